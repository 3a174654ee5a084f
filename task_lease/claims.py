"""Who asks for which lease, and who is in the way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple, Protocol

from task_lease.host import this_process
from task_lease.observers import LeaseEvent

if TYPE_CHECKING:
    from task_lease.errors import Holder, LeaseConflict
    from task_lease.observers import EventKind
    from task_lease.scripts import Refused


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
    """

    name: str
    ttl: float
    task: str = ""
    id: str = ""
    parent: str = ""
    attempt: int = 0
    queue: str = ""


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
