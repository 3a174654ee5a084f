"""The workers of the application, each a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from redis import Redis
from rq import Worker

from example_project.stage.history import WORKER, record
from example_project.stage.runs import of_kind

if TYPE_CHECKING:
    import subprocess

    from example_project.stage.company import Company
    from example_project.stage.stage import Stage

#: The queue of the RQ worker.
REPORTS = "reports"
# Seconds for a worker to start, on a machine that has other work.
_PATIENCE = 45.0
#: Where the package is imported from; not resolved, so that a link to it will do.
_ROOT = Path(__file__).parent.parent.parent


class Crew:
    """Starts workers and tells them to stop.

    Args:
        company: Who ends them.
        redis_url: Where their queues are.
    """

    def __init__(self, company: Company, redis_url: str) -> None:
        self._company = company
        self._redis_url = redis_url
        self._store = Redis.from_url(redis_url)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_celery(self, name: str) -> None:
        """Start a Celery worker for the common queue and one of its own name."""
        words = f"-A example_project.app worker -n {name}@%h -Q invoices,{name} -c 3"
        words += " -l info --without-gossip --without-mingle --without-heartbeat"
        self._start(name, "celery", *words.split())

    def start_rq(self, name: str) -> None:
        """Start an RQ worker."""
        words = f"worker -n {name} -w example_project.jobs.Worker -u {self._redis_url}"
        self._start(name, "rq.cli", *words.split(), REPORTS)

    def is_there(self, name: str) -> bool:
        """Return whether a worker was started."""
        return name in self._processes

    def until_ready(self, stage: Stage, *names: str) -> None:
        """Wait until workers take what is sent to them.

        Raises:
            NotInTime: If they do not.
        """

        def ready() -> bool:
            found = {m.worker for m in of_kind(stage.moments(), "ready")}
            for worker in Worker.all(self._store):
                if worker.name not in found:
                    record("ready", worker=worker.name)
            return found >= set(names)

        stage.wait_for(f"{', '.join(names)} can work", ready, _PATIENCE)

    def stop(self, name: str) -> None:
        """Tell a worker to finish what it does and end."""
        record("stopping", worker=name, pid=self._processes[name].pid)
        self._company.stop(name)

    def until_gone(self, stage: Stage, name: str) -> int:
        """Return the exit code of a worker that was told to stop.

        Raises:
            NotInTime: If it does not end.
        """
        process = self._processes[name]
        stage.wait_for(f"{name} ends", lambda: process.poll() is not None)
        record("gone", worker=name, pid=process.pid)
        return process.returncode

    def _start(self, name: str, module: str, *words: str) -> None:
        known = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(_ROOT), *([known] if known else [])])
        command = [sys.executable, "-m", module, *words]
        env = {WORKER: name, "PYTHONPATH": path}
        self._processes[name] = self._company.start(name, command, env)
