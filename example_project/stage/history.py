"""What happened, as lines of JSON that all processes add to one file."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

#: The variable that names the file; without it nothing is written down.
HISTORY = "EXAMPLE_HISTORY"
#: The variable that names the worker to which a process belongs.
WORKER = "EXAMPLE_WORKER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened.

    Attributes:
        at: Seconds on the machine's monotonic clock, the same in all processes.
        kind: What happened: the kind of a `LeaseEvent`, or a word of the demo's.
        worker: The worker to which it happened.
        pid: The process to which it happened.
        lease: The lease's name, if it is about one.
        id: The id of the task.
        fence: The fence of the holder.
        seconds: What `LeaseEvent.seconds` says.
        detail: One word more.
        other: The pid of the holder that was in the way.
        other_fence: The fence that the ledger had seen.
    """

    at: float
    kind: str
    worker: str = ""
    pid: int = 0
    lease: str = ""
    id: str = ""
    fence: int | None = None
    seconds: float = 0.0
    detail: str = ""
    other: int = 0
    other_fence: int | None = None


_FIELDS = frozenset(field.name for field in fields(Moment))


def record(kind: str, **about: object) -> None:
    """Write down that something happened, now and here unless it says otherwise."""
    path = os.environ.get(HISTORY)
    if not path:
        return
    here = {"worker": os.environ.get(WORKER, ""), "pid": os.getpid()}
    moment = {"at": time.monotonic(), "kind": kind, **here, **about}
    line = json.dumps(moment, separators=(",", ":")).encode() + b"\n"
    # One write to a file opened for appending: lines of other processes stay whole.
    history = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(history, line)
    finally:
        os.close(history)


class History:
    """The moments in a file, which grows while it is read.

    Args:
        path: The file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._moments: list[Moment] = []

    def news(self) -> list[Moment]:
        """Return what was written since the last call, as it was written."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        news = [_moment(json.loads(line)) for line in whole.splitlines()]
        self._moments += news
        return news

    def moments(self) -> list[Moment]:
        """Return what was read so far, in the order of time."""
        return sorted(self._moments, key=lambda moment: moment.at)


def _moment(about: dict[str, Any]) -> Moment:
    return Moment(**{name: about[name] for name in about.keys() & _FIELDS})
