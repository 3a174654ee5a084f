"""Who asks for which lease, and who is in the way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple, Protocol

from task_lease.host import this_process
from task_lease.keys import escape
from task_lease.observers import LeaseEvent

if TYPE_CHECKING:
    from task_lease.answers import Refused
    from task_lease.errors import Holder, LeaseConflict
    from task_lease.observers import EventKind


class Park(NamedTuple):
    """How a job of RQ is parked beside its lease, in the names of RQ's own keys.

    Attributes:
        id: The job's id.
        attempt: When it was put into its queue, as its hash says.
        job: The job's hash.
        queue: The list it came from, and is handed back to.
        queues: The set of all queues.
        deferred: The registry of jobs that wait.
        score: Its score in there.
        execution: The id of the run that is given up.
        started: The registry of that run.
        intermediate: The list that holds the popped job until it starts.
    """

    id: str
    attempt: str
    job: str
    queue: str
    queues: str
    deferred: str
    score: str
    execution: str
    started: str
    intermediate: str

    def entry(self, name: str, record: str) -> str:
        """Return what stands for the parked job: always the same for one attempt.

        Args:
            name: The lease's name, as plain ASCII.
            record: Who holds the lease while the job is on its way.
        """
        kept = ("id", "attempt", "job", "queue", "queues", "deferred")
        entry = {field: getattr(self, field) for field in kept}
        entry.update(name=name, record=record)
        return json.dumps(entry, separators=(",", ":"))

    def details(self, *, counts: bool, limit: int | None) -> str:
        """Return what only the parking itself needs.

        Args:
            counts: Whether it is one of the conflicts that have a limit.
            limit: How many of those there may be; None is no limit.
        """
        kept = ("score", "execution", "started", "intermediate")
        details: dict[str, object] = {name: getattr(self, name) for name in kept}
        if counts:
            details["counts"] = True
            if limit is not None:
                details["limit"] = limit
        return json.dumps(details, separators=(",", ":"))


class Claim(NamedTuple):
    """Who asks for which lease.

    Attributes:
        name: The lease's name.
        ttl: Seconds that the lease outlives its last beat.
        task: The task's name, for people and for metrics.
        id: The task's id.
        parent: The id of the task that sent this one.
        attempt: Which try of the task this is, where the id alone does not tell.
        queue: The queue from which it came.
        parents: The ids of more tasks from which this one may follow.
        park: How it is parked beside the lease, None where that is not possible.
        may_be_copy: Whether another delivery of the same attempt may have run.
    """

    name: str
    ttl: float
    task: str = ""
    id: str = ""
    parent: str = ""
    attempt: int = 0
    queue: str = ""
    parents: tuple[str, ...] = ()
    park: Park | None = None
    may_be_copy: bool = False

    @property
    def entry(self) -> str:
        """What stands for the task when it is parked, empty if it never is."""
        if self.park is None:
            return ""
        record = {
            "task": self.task,
            "id": self.id,
            "parent": self.parent,
            "attempt": self.attempt,
            "queue": self.queue,
        }
        name = escape(self.name)
        return self.park.entry(name, json.dumps(record, separators=(",", ":")))


class Conflict(NamedTuple):
    """A lease that could not be got.

    Attributes:
        refused: What the store said.
        error: The same as an error that can be raised.
    """

    refused: Refused
    error: LeaseConflict


class Patience(Protocol):
    """Decides how to go on after each conflict of a waiting claim."""

    def __call__(self, conflict: Conflict) -> float:
        """Return the seconds that may still be waited; 0 or less gives up."""


def event_of(
    claim: Claim,
    kind: EventKind,
    refused: Refused | None,
    detail: str = "",
) -> LeaseEvent:
    """Return an event that happened to a claim, about the holder in its way."""
    about = (claim.task, claim.id, claim.queue)
    if refused is None:
        return LeaseEvent(kind, claim.name, None, None, 0.0, detail, *about)
    left = refused.remaining
    return LeaseEvent(
        kind, claim.name, refused.holder, refused.fence, left, detail, *about
    )


def holder_of(claim: Claim) -> Holder:
    """Return what the store shall say about a claim that succeeds."""
    process = this_process()
    holder: Holder = {
        "task": claim.task,
        "id": claim.id,
        "parent": claim.parent,
        "attempt": claim.attempt,
        "queue": claim.queue,
        "host": process.host,
        "identity": process.identity,
        "pid": process.pid,
        "start": process.start,
        "group": process.group,
    }
    return holder


def record_of(claim: Claim) -> str:
    """Return the same as the text that is stored."""
    return json.dumps(holder_of(claim), separators=(",", ":"))
