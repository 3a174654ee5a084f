"""What the store answers, made from the replies of the Lua operations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from task_lease.errors import Holder

# The first element of some replies.
_PARKED = 2
_DONE = 3
_HELD = 2
# What the owner begins with as long as a lease is kept for a parked job (parking.lua).
_RESERVED = "parked:"


class Granted(NamedTuple):
    """An acquire that succeeded, with the fence of the acquisition."""

    fence: int


class Refused(NamedTuple):
    """An acquire that found the lease held.

    Attributes:
        remaining: Seconds until the holder's lease ends unless renewed.
        ttl: The holder's ttl in seconds.
        fence: The holder's fence.
        owner: The holder's owner, by which a proven-dead one is released.
        holder: The holder's record.
        arrival: Our place in the queue, empty if we do not wait.
    """

    remaining: float
    ttl: float
    fence: int
    owner: str
    holder: Holder
    arrival: str

    @property
    def is_reserved(self) -> bool:
        """Whether it is only kept for a parked job, which does not run yet."""
        return self.owner.startswith(_RESERVED)


class Parked(NamedTuple):
    """An acquire that found the lease held and left a parked job behind.

    Attributes:
        arrival: Its place; empty if it was parked by an earlier call, or if nothing is
            to be done since the job was called off.
    """

    arrival: str


class Done(NamedTuple):
    """An acquire by a copy of a task whose outcome is stored: nothing is to be run."""


class Handed(NamedTuple):
    """A parked job that was handed over: the lease's name, and who the job is."""

    name: str
    holder: Holder


class Released(NamedTuple):
    """What came of a release or a sweep.

    Attributes:
        mine: Whether the lease was the owner's, or free.
        problem: What went wrong when it was handed over, mostly nothing.
        handed: The parked job that was handed over, if one was.
    """

    mine: bool
    problem: str = ""
    handed: Handed | None = None


class StoreFacts(NamedTuple):
    """What a store says about itself.

    Attributes:
        product: ``"redis"`` or ``"valkey"``.
        version: Its version.
        eviction: What it does when its memory is full; empty if it does not tell.
        clock: Its clock, in seconds since 1970.
    """

    product: str
    version: tuple[int, ...]
    eviction: str
    clock: float


class Held(NamedTuple):
    """Who holds a lease beside which jobs are parked."""

    owner: str
    holder: Holder


def granted_refused_or_done(reply: Sequence[Any]) -> Granted | Refused | Done:
    """Read the reply of an acquire that may be a copy's."""
    return Done() if reply[0] == _DONE else granted_or_refused(reply)


def granted_or_refused(reply: Sequence[Any]) -> Granted | Refused:
    """Read the reply of an acquire that does not park."""
    if reply[0] == 1:
        return Granted(int(reply[1]))
    _, remaining, ttl, fence, owner, record, arrival = reply
    holder = holder_of(text_of(record))
    holder["since"] = int(fence) / 1e6
    return Refused(
        remaining / 1000,
        ttl / 1000,
        int(fence),
        text_of(owner),
        holder,
        text_of(arrival),
    )


def granted_refused_or_parked(reply: Sequence[Any]) -> Granted | Refused | Parked:
    """Read the reply of an acquire that may park."""
    if reply[0] == _PARKED:
        return Parked(text_of(reply[1]))
    return granted_or_refused(reply)


def released(reply: Sequence[Any], *, repeated: bool = False) -> Released:
    """Read the reply of a release; a repeated one was said yes to, if not this time."""
    entry = text_of(reply[2])
    handed = None
    if entry:
        parked = json.loads(entry)
        handed = Handed(parked["name"], holder_of(parked["record"]))
    return Released(bool(reply[0]) or repeated, text_of(reply[1]), handed)


def released_or_held(reply: Sequence[Any]) -> Released | Held:
    """Read the reply of a sweep."""
    if not reply[0]:
        return Released(mine=False)
    if reply[0] == _HELD:
        return Held(text_of(reply[1]), holder_of(text_of(reply[2])))
    return released(reply)


def facts_from(info: Mapping[str, Any], clock: Sequence[Any]) -> StoreFacts:
    """Read the reply of INFO and TIME; a Valkey also tells a version of Redis."""
    product = "valkey" if "valkey_version" in info else "redis"
    numbers = str(info.get(f"{product}_version", "")).split(".")
    return StoreFacts(
        product,
        tuple(int(number) for number in numbers if number.isdigit()),
        str(info.get("maxmemory_policy", "")),
        int(clock[0]) + int(clock[1]) / 1e6,
    )


def holder_of(record: str) -> Holder:
    """Read a holder's record; what is no record becomes an empty one."""
    try:
        holder = json.loads(record)
    except (ValueError, RecursionError):
        return {}
    return cast("Holder", holder) if isinstance(holder, dict) else {}


def text_of(value: bytes | str) -> str:
    """Return text as text, whether or not the client decodes responses."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
