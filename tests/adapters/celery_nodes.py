"""The nodes of pytest-celery over servers and processes of our own, without Docker.

A node asks its "container" for `ready`, `kill`, `logs`, `teardown` and `celeryconfig`;
these here are a database of a server, and a worker's process.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from adapters.celery_journal import PATIENCE
from harness import Process, eventually
from pytest_celery import CeleryTestBackend, CeleryTestBroker, CeleryTestWorker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from celery import Celery
    from harness import Server

_numbers = itertools.count(1)


class ServerContainer:
    """One database of a server that belongs to somebody else."""

    def __init__(self, server: Server, db: int) -> None:
        self._server = server
        self._db = db
        self.name = f"{server.kind}-{server.port}-{db}"
        self.id = self.name

    @property
    def url(self) -> str:
        """The URL of the database."""
        return self._server.url(self._db)

    @property
    def celeryconfig(self) -> dict[str, str]:
        """What Celery has to know to reach it."""
        return {"url": self.url, "host_url": self.url}

    @property
    def status(self) -> str:
        """Docker's word for whether it runs."""
        return "running" if self._server.is_running else "exited"

    def ready(self) -> bool:
        """Return whether the server answers."""
        with self._server.client(self._db) as client:
            return bool(client.ping())

    def logs(self) -> str:
        """Return what the server has printed so far."""
        return (self._server.folder / "server.log").read_text(errors="replace")

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """End the server, whatever the signal is."""
        del signal
        self._server.kill()

    def reload(self) -> None:
        """Do nothing: what is told here is never old."""

    def restart(self, timeout: float = 0) -> None:
        """Restart the server with its data."""
        del timeout
        self._server.restart()

    def teardown(self) -> None:
        """Do nothing: the server's owner ends it."""


@dataclass(frozen=True)
class WorkerSpec:
    """How a worker is started.

    Attributes:
        queues: The queues that it takes messages from.
        pool: The kind of pool.
        concurrency: How many tasks it runs side by side.
        settings: The app's settings beside those that all workers have.
        namespace: The prefix under which all settings are written, for Celery.
        host: The host that the worker shall believe to be on; empty for the real one.
        include: The modules of its tasks.
        options: More words for the command line.
    """

    queues: tuple[str, ...] = ("celery",)
    pool: str = "prefork"
    concurrency: int = 4
    settings: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = ""
    host: str = ""
    include: tuple[str, ...] = ("adapters.celery_tasks",)
    options: tuple[str, ...] = ()

    def command(self, name: str) -> list[str]:
        """Return the command that starts a worker of this name."""
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
        return [
            *(sys.executable, "-m", "celery", "-A", "adapters.celery_app", "worker"),
            *("-P", self.pool, "-c", str(self.concurrency), "-n", f"{name}@tests"),
            *("-Q", ",".join(self.queues), "-l", "INFO", *quiet, *self.options),
        ]

    def variables(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables that configure the app, given what all workers have."""
        prefix = f"{self.namespace}_" if self.namespace else ""
        both = {**settings, **self.settings}
        written = {
            f"{prefix}{name.upper() if prefix else name}": value
            for name, value in both.items()
        }
        app = {
            "settings": written,
            "namespace": self.namespace or None,
            "host": self.host,
            "include": self.include,
        }
        return {"CELERY_TEST_APP": json.dumps(app), "C_FORCE_ROOT": "1"}


class WorkerContainer:
    """A worker's process, which starts at once."""

    def __init__(
        self, spec: WorkerSpec, settings: Mapping[str, Any], folder: Path
    ) -> None:
        self.spec = spec
        self.name = f"w{next(_numbers)}"
        self.id = self.name
        self._settings = settings
        self._folder = folder
        self.process = self._start()

    @property
    def celeryconfig(self) -> dict[str, str]:
        """A worker is not what others connect to."""
        return {"url": "", "host_url": ""}

    @property
    def status(self) -> str:
        """Docker's word for whether it runs."""
        return "running" if self.process.is_alive else "exited"

    def ready(self) -> bool:
        """Return once the worker takes messages.

        Raises:
            AssertionError: It ended instead; the message has its last output.
        """
        eventually(self._is_ready_or_ended, PATIENCE, f"{self.name} is ready")
        assert self.process.is_alive, self.logs()[-4000:]
        return True

    def logs(self) -> str:
        """Return what the worker has printed so far."""
        return self.process.output()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send the worker's main process a signal, as Docker would."""
        os.kill(self.process.pid, _number_of(signal))

    def reload(self) -> None:
        """Do nothing: what is told here is never old."""

    def restart(self, timeout: float = 10.0) -> None:
        """End the worker in good order if it still runs, and start it anew."""
        if self.process.is_alive:
            self.process.terminate()
            self.process.wait(timeout)
        self.process.end()
        self.process = self._start()
        self.ready()

    def teardown(self) -> None:
        """End the worker and its children at once."""
        self.process.end()

    # The vendor's worker node asks for these.

    def worker_name(self) -> str:
        """Return the worker's name."""
        return self.name

    def worker_queue(self) -> str:
        """Return the queue that only this worker takes messages from, if any."""
        return self.spec.queues[-1]

    def _start(self) -> Process:
        log = self._folder / f"{self.name}.log"
        self._told_before = log.read_text(errors="replace") if log.exists() else ""
        return Process(
            self.spec.command(self.name),
            log=log,
            env=self.spec.variables(self._settings),
        )

    def _is_ready_or_ended(self) -> bool:
        told = self.logs().removeprefix(self._told_before)
        return f"{self.name}@tests ready." in told or not self.process.is_alive


def _number_of(name: str | int) -> int:
    return name if isinstance(name, int) else signal.Signals[name].value


# A node is typed for Docker's containers, but uses of one only what is above.


def broker_node(server: Server, db: int) -> CeleryTestBroker:
    """Return a database of a server as pytest-celery's broker."""
    return CeleryTestBroker(cast("Any", ServerContainer(server, db)))


def backend_node(server: Server, db: int) -> CeleryTestBackend:
    """Return a database of a server as pytest-celery's result backend."""
    return CeleryTestBackend(cast("Any", ServerContainer(server, db)))


def worker_node(
    container: WorkerContainer, app: Celery | None = None
) -> CeleryTestWorker:
    """Return a worker's process as pytest-celery's worker."""
    return CeleryTestWorker(cast("Any", container), cast("Any", app))
