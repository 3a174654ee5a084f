"""What happens to leases, told to whoever wants to know.

An observer is any callable that takes a `LeaseEvent`. It is called in the thread in
which the event happens, the beating one included, so it must be quick and must not
raise; what it raises is logged and dropped. Argument values are never part of an
event.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from task_lease.errors import describe_holder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from task_lease.answers import Handed
    from task_lease.errors import Holder

EventKind: TypeAlias = Literal[
    "acquired",
    "conflict",
    "renewed",
    "at risk",
    "lost",
    "released",
    "takeover",
    "parked",
    "handed",
]


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """Something that happened to a lease.

    Attributes:
        kind: What happened.
        name: The lease's name.
        holder: The holder's record: ours, or with ``"conflict"`` and ``"takeover"``
            the other's.
        fence: The fence of the holder, None where there is none.
        seconds: The time that belongs to the event: how long we waited
            (``acquired``), what remains to the holder (``conflict``), the latency of
            the beat (``renewed``), how long the lease was held (``released``).
        detail: One word more: the reason of a loss, what is done about a conflict.
        task: The task of ours to which it happened.
        id: That task's id.
        queue: The queue from which that task came.
    """

    kind: EventKind
    name: str
    holder: Holder | None = None
    fence: int | None = None
    seconds: float = 0.0
    detail: str = ""
    task: str = ""
    id: str = ""
    queue: str = ""


if TYPE_CHECKING:
    Observer: TypeAlias = Callable[[LeaseEvent], object]

_logger = logging.getLogger("task_lease")

# One logger for each phase, so that a user can silence one.
_PHASES: Mapping[EventKind, str] = {
    "acquired": "acquire",
    "conflict": "acquire",
    "takeover": "acquire",
    "renewed": "heartbeat",
    "at risk": "heartbeat",
    "lost": "heartbeat",
    "released": "release",
    "parked": "park",
    "handed": "park",
}
_LOGGERS = {
    kind: logging.getLogger(f"task_lease.{phase}") for kind, phase in _PHASES.items()
}
_LEVELS: Mapping[EventKind, int] = {
    "acquired": logging.DEBUG,
    "renewed": logging.DEBUG,
    "released": logging.DEBUG,
    "at risk": logging.WARNING,
    "lost": logging.ERROR,
}


def log_event(event: LeaseEvent) -> None:
    """Write an event to the logger of its phase: the default observer.

    What is expected (a conflict, a takeover) is INFO, the everyday is DEBUG, a lease
    at risk a WARNING, a lost one an ERROR.
    """
    logger = _LOGGERS[event.kind]
    level = _LEVELS.get(event.kind, logging.INFO)
    if event.kind == "released" and event.detail:
        level = logging.WARNING
    if not logger.isEnabledFor(level):
        return
    message, about = _wording(event)
    logger.log(level, message, *about, extra={"lease_event": event})


class Announcer:
    """Tells every observer of an event; an observer that raises harms nobody.

    Args:
        observers: Who is told, in this order.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def __call__(self, event: LeaseEvent) -> None:
        """Tell an event to all observers."""
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                # The task and the beats must not suffer from who watches them.
                _logger.exception("An observer failed at %s", event.kind)


def event_of_handed(handed: Handed) -> LeaseEvent:
    """Return the event that a parked job was handed over, about that job."""
    job = handed.holder
    about = (job.get("task", ""), job.get("id", ""), job.get("queue", ""))
    return LeaseEvent("handed", handed.name, None, None, 0.0, "", *about)


def _wording(event: LeaseEvent) -> tuple[str, tuple[object, ...]]:
    if event.kind == "conflict":
        held_by = describe_holder(event.holder)
        since = (event.holder or {}).get("since", 0.0)
        about = (event.name, held_by, since, event.seconds, event.detail)
        return "Lease %s is held by %s since %.3f, %.1f s left: %s", about
    if event.kind == "takeover":
        return "Lease %s taken from %s, which is dead", (
            event.name,
            describe_holder(event.holder),
        )
    if event.kind in {"parked", "handed"}:
        done = "is parked beside" if event.kind == "parked" else "is handed"
        return f"%s [%s] {done} lease %s", (event.task, event.id, event.name)
    return "Lease %s %s (fence %s, %.3f s) %s", (
        event.name,
        event.kind,
        event.fence,
        event.seconds,
        event.detail,
    )
