"""Every error that task-lease raises on purpose.

Each class builds its message from its fields, and its ``args`` are exactly the
arguments of its constructor, so that an error survives pickle and the JSON of a
result backend. "Could not get it" (`LeaseConflict`) and "no longer have it"
(`LeaseLost`) are never one error.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypedDict

from typing_extensions import override

if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    LostReason: TypeAlias = Literal["stolen", "expired", "unreachable"]


# A URL in the wrong place: what stands before its last @, and a password in its query.
_SECRETS = re.compile(r"(://)[^\s'\"]*(?=@)|(?<=password=)[^&\s'\"]*")
_LONGEST_SHOWN = 200


class Holder(TypedDict, total=False):
    """Who holds a lease, as its record in the store says.

    Every field is plain text or a number, so the record can be part of a task's
    result. Argument values never stand in it.
    """

    task: str
    id: str
    parent: str
    attempt: int
    queue: str
    host: str
    identity: str
    pid: int
    start: int
    group: bool
    since: float


class LeaseError(Exception):
    """The base of every error of this package."""


class InvalidConfig(LeaseError, ValueError):
    """A setting has a value that its rule does not allow."""

    def __init__(self, setting: str = "", value: object = None, rule: str = "") -> None:
        value = _presentable(value)
        super().__init__(setting, value, rule)
        self.setting = setting
        self.value = value
        self.rule = rule

    @override
    def __str__(self) -> str:
        shown = _text_of(self.value)
        if len(shown) > _LONGEST_SHOWN:
            shown = f"{shown[:_LONGEST_SHOWN]}…"
        return f"{self.setting}={shown}: {self.rule}"


def _presentable(value: object) -> object:
    """Return the value, or its text with what looks like a secret left out."""
    text = _text_of(value)
    shown = _SECRETS.sub("\\1…", text)
    return value if shown == text else shown


def _text_of(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - it is the value that is wrong, not we
        return f"<{type(value).__name__}>"


class InvalidArgument(LeaseError, TypeError):
    """An argument of a task cannot be part of a lease's name."""

    def __init__(self, argument: str = "", problem: str = "") -> None:
        super().__init__(argument, problem)
        self.argument = argument
        self.problem = problem

    @override
    def __str__(self) -> str:
        return f"argument {self.argument!r} {self.problem}"


class LeaseConflict(LeaseError):
    """The lease could not be got: somebody else holds it.

    Attributes:
        name: The lease's name.
        holder: The holder's record, or None where it is not known.
        remaining: Seconds until the holder's lease ends unless renewed.
    """

    def __init__(
        self, name: str = "", holder: Holder | None = None, remaining: float = 0.0
    ) -> None:
        super().__init__(name, holder, remaining)
        self.name = name
        self.holder = holder
        self.remaining = remaining

    @override
    def __str__(self) -> str:
        held_by = describe_holder(self.holder)
        return f"{self.name} is held by {held_by}, {self.remaining:.1f} s left"


class AlreadyDone(LeaseError):
    """The task is a copy of one whose outcome is stored: it must not run again."""

    def __init__(self, name: str = "", task_id: str = "") -> None:
        super().__init__(name, task_id)
        self.name = name
        self.task_id = task_id

    @override
    def __str__(self) -> str:
        return f"task {self.task_id} has run under {self.name} already"


class LeaseLost(LeaseError):
    """The lease is no longer ours, so the work under it must stop.

    Attributes:
        name: The lease's name.
        reason: ``"stolen"`` (the store says that it is not ours), ``"expired"``
            (noticed after the fact) or ``"unreachable"`` (the store could not be
            asked before trust ended).
    """

    def __init__(self, name: str = "", reason: LostReason = "expired") -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason: LostReason = reason

    @override
    def __str__(self) -> str:
        return f"{self.name} was lost ({self.reason})"


class StoreUnavailable(LeaseError):
    """The lease store could not be used, so nothing is known about the lease."""

    def __init__(self, operation: str = "", problem: str = "") -> None:
        super().__init__(operation, problem)
        self.operation = operation
        self.problem = problem

    @override
    def __str__(self) -> str:
        return f"the lease store failed at {self.operation}: {self.problem}"


class StaleFence(LeaseError):
    """A resource refused a write, for it has seen a newer fence.

    Attributes:
        resource: What refused the write.
        fence: The fence that came with the write, None for an unguarded run.
        stored: The highest fence that the resource has seen, None if unknown.
    """

    def __init__(
        self, resource: str = "", fence: int | None = None, stored: int | None = None
    ) -> None:
        super().__init__(resource, fence, stored)
        self.resource = resource
        self.fence = fence
        self.stored = stored

    @override
    def __str__(self) -> str:
        return f"{self.resource} refused fence {self.fence}: it has seen {self.stored}"


def describe_holder(holder: Holder | None) -> str:
    """Return the holder in a few words for a person."""
    if not holder:
        return "an unknown holder"
    # What a record holds was perhaps written by a stranger.
    words = [str(holder.get("task") or "a process")]
    if holder.get("id"):
        words.append(f"[{holder['id']}]")
    words.append(f"on {holder.get('host', '?')} pid {holder.get('pid', '?')}")
    return " ".join(words)
