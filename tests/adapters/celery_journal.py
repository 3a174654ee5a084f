"""What a task under test tells, and how a test holds it back and lets it go on.

Beside its history (`histories`), a run writes a line when it begins. A task that is
told to wait goes on once the test has opened the gate of its key.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import eventually
from histories import read_history

from task_lease import current_lease

if TYPE_CHECKING:
    from celery import Task
    from histories import Run

#: Seconds that a test waits for a worker to do something, on a busy machine too.
PATIENCE = 30.0
#: Stands for all keys when gates are opened.
ALL = "all"


class Begun(NamedTuple):
    """A run that has begun: instants in seconds of the machine's monotonic clock."""

    key: str
    task_id: str
    pid: int
    fence: int | None
    lease: str | None
    retries: int
    attempted_at: float
    began_at: float


def tell_begun(task: Task[Any, Any], log: str, key: str) -> None:
    """Write down that a run of a key has begun."""
    lease = current_lease()
    began = Begun(
        key,
        task.request.id or "",
        os.getpid(),
        lease.fence if lease else None,
        lease.name if lease else None,
        task.request.retries or 0,
        task.request.get("attempted_at", 0.0),
        time.monotonic(),
    )
    _append(Path(f"{log}.begun"), began)


def tell(log: str, what: str, **about: object) -> None:
    """Write down that something has happened."""
    _append(Path(f"{log}.told"), {"what": what, **about})


def wait_at_gate(log: str, key: str) -> None:
    """Return once the test has opened the gate of the key."""
    gates = [_gate(Path(log), key), _gate(Path(log), ALL)]
    while not any(gate.exists() for gate in gates):
        time.sleep(0.01)


class Journal:
    """The test's side: reads what the tasks tell, and opens their gates."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = str(path)

    def begun(self, key: str | None = None) -> list[Begun]:
        """Return the runs that have begun so far, of one key or of all."""
        found = [Begun(*line) for line in _read(Path(f"{self.log}.begun"))]
        return [begun for begun in found if key in {None, begun.key}]

    def wait_begun(self, key: str, count: int = 1) -> Begun:
        """Return the latest run of a key once so many have begun."""

        def latest() -> Begun | None:
            found = self.begun(key)
            return found[count - 1] if len(found) >= count else None

        begun = eventually(latest, PATIENCE, f"run {count} of {key} begins")
        assert begun is not None
        return begun

    def told(self, what: str) -> list[dict[str, Any]]:
        """Return what the tasks have told of one kind so far."""
        lines = _read(Path(f"{self.log}.told"))
        return [line for line in lines if line["what"] == what]

    def open_gate(self, *keys: str) -> None:
        """Let the runs of some keys go on, those to come included."""
        for key in keys:
            _gate(self.path, key).touch()

    def runs(self, key: str | None = None) -> list[Run]:
        """Return the runs that have ended, of one key or of all."""
        return [run for run in read_history(self.path) if key in {None, run.key}]

    def wait_runs(self, count: int, timeout: float = PATIENCE) -> list[Run]:
        """Return the runs that have ended once there are so many."""
        what = f"{count} runs have ended"
        eventually(lambda: len(self.runs()) >= count, timeout, what, pause=0.05)
        return self.runs()


def _gate(log: Path, key: str) -> Path:
    return log.with_name(f"{log.name}.{key}.open")


def _append(path: Path, line: object) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def _read(path: Path) -> list[Any]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
