"""RQ workers as processes of their own, and what tests ask about their jobs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from harness import eventually
from rq.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from harness import Process
    from rq.job import Job

RQ3 = int(VERSION.split(".", maxsplit=1)[0]) > 2
LEASE_WORKER = "rq_lease.LeaseWorker"
#: The worker classes that know leases, for tests of each.
CLASSES = [
    LEASE_WORKER,
    "rq_lease.LeaseSimpleWorker",
    pytest.param(
        "rq_lease.LeaseSpawnWorker",
        marks=pytest.mark.skipif(not RQ3, reason="RQ 2 cannot"),
    ),
]
#: Seconds in which a job must be done, on a busy machine.
PATIENCE = 30.0


class Workers:
    """Starts workers on one server.

    Args:
        spawn: Starts a process that ends with the test.
        url: The database of the jobs.
    """

    def __init__(self, spawn: Callable[..., Process], url: str) -> None:
        self._spawn = spawn
        self._url = url

    def start(
        self,
        *options: str,
        worker_class: str = LEASE_WORKER,
        queues: Sequence[str] = ("reports",),
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Start ``rq worker`` and return once it listens."""
        process = self.launch(
            *options, worker_class=worker_class, queues=queues, env=env
        )
        eventually(
            lambda: "Listening on" in process.output() or not process.is_alive,
            PATIENCE,
            f"{process!r} listens",
        )
        assert process.is_alive, process.output()
        return process

    def launch(
        self,
        *options: str,
        worker_class: str = LEASE_WORKER,
        queues: Sequence[str] = ("reports",),
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Start ``rq worker`` and return at once."""
        rq = [sys.executable, "-m", "rq.cli", "worker", "-u", self._url]
        return self._spawn([*rq, "-w", worker_class, *options, *queues], env=env)


def wait_for(job: Job, *states: str, timeout: float = PATIENCE) -> str:
    """Return a job's status once it is one of the given ones."""

    def status() -> str | None:
        found = job.get_status().value
        return found if found in states else None

    found = eventually(status, timeout, f"{job.id} is {states}")
    assert found is not None
    return found


def pid_in(path: Path) -> int:
    """Return the pid that a job wrote down, once it is there."""
    eventually(path.exists, PATIENCE, f"{path} is written")
    return int(path.read_text().splitlines()[0])
