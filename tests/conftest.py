"""Fixtures: servers of our own, a clean database for each test, and processes."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Protocol

import hypothesis
import pytest
import redis
from harness import Process, Server, servers_available, servers_expected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

#: Narrows the kinds of server, with a comma between two: "valkey,redis".
SERVERS_VARIABLE = "TASK_LEASE_TEST_SERVERS"
IN_CI = bool(os.environ.get("CI"))
#: Never 0, so that code which forgets the database's number shows.
DATABASES = itertools.cycle(range(1, 16))

# A deadline for one example says nothing when examples ask a real server.
hypothesis.settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if IN_CI else "dev")


class Spawn(Protocol):
    """Starts a program that ends with the test."""

    def __call__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Start the program, as `Process` does; its log is in `tmp_path`."""


def wanted_kinds() -> list[str]:
    """Return the kinds of server to run the tests on."""
    named = os.environ.get(SERVERS_VARIABLE)
    return named.replace(" ", "").split(",") if named else servers_expected()


@pytest.fixture(scope="session", params=wanted_kinds())
def server_kind(request: pytest.FixtureRequest) -> str:
    """Give each kind of server in turn; a missing one is an error in CI."""
    kind: str = request.param
    if kind not in servers_available():
        reason = f"no {kind}-server was found here"
        (pytest.fail if IN_CI else pytest.skip)(reason)
    return kind


@pytest.fixture(scope="session")
def server(server_kind: str) -> Iterator[Server]:
    """Give the server that all tests share; it must not be stopped or paused."""
    with Server(server_kind) as server:
        yield server


@pytest.fixture
def private_server(server_kind: str) -> Iterator[Server]:
    """Give a server that the test may kill, pause and restart."""
    with Server(server_kind) as server:
        yield server


@pytest.fixture
def url(server: Server) -> str:
    """Give the URL of a database of the shared, emptied server."""
    with server.client() as client:
        client.flushall()
    return server.url(next(DATABASES))


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    """Give a client for the database of `url`."""
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """Give a function that starts programs; each one's output follows a failure."""
    started: list[Process] = []

    def start(
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        log = tmp_path / f"process-{len(started)}.log"
        started.append(Process(command, log=log, env=env, cwd=cwd))
        return started[-1]

    yield start
    for process in started:
        process.end()
        # pytest shows it where the test failed.
        print(f"--- {process!r}\n{process.output()}")  # noqa: T201
