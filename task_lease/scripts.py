"""Typed calls of the Lua operations.

The only module that talks to the store, and the only one that knows milliseconds.
Every operation is one round trip and gives the same answer when it is repeated
after a lost reply, so each is sent a second time when the connection breaks.
"""

from __future__ import annotations

import hashlib
import json
import math
import pkgutil
import random
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from redis.exceptions import ConnectionError as StoreConnectionError
from redis.exceptions import NoScriptError, RedisError

from task_lease.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import redis

    from task_lease.errors import Holder
    from task_lease.keys import LeaseKeys

T = TypeVar("T")

_RANDOM_FENCE = 1000


class Script(NamedTuple):
    """A Lua operation: its text and the digest by which the server knows it."""

    text: str
    digest: str


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


class Place(NamedTuple):
    """How a waiter stands in the queue.

    Attributes:
        channel: Where to wake it.
        patience: Seconds after the holder's end at which it counts as dead.
        arrival: Its place from an earlier answer, empty for the end of the queue.
    """

    channel: str
    patience: float
    arrival: str = ""


class Renewal(NamedTuple):
    """One lease to renew, ttl in seconds."""

    keys: LeaseKeys
    owner: str
    ttl: float


def _load(*names: str) -> Script:
    parts = (pkgutil.get_data("task_lease", f"lua/{name}.lua") for name in names)
    text = "\n".join(part.decode() for part in parts if part)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


ACQUIRE = _load("shared", "acquire")
RENEW = _load("renew")
RELEASE = _load("shared", "release")


def milliseconds(seconds: float) -> int:
    """Return seconds as whole milliseconds, rounded up."""
    return math.ceil(seconds * 1000)


class Store:
    """The lease store behind a Redis client.

    Args:
        client: A client of redis-py.
        fence_life: Seconds that the fence floor of a name outlives its last fence;
            0 keeps none.
    """

    def __init__(self, client: redis.Redis, *, fence_life: float) -> None:
        self.client = client
        self._life = milliseconds(fence_life)

    def acquire(
        self,
        keys: LeaseKeys,
        owner: str,
        ttl: float,
        record: str,
        place: Place | None = None,
    ) -> Granted | Refused:
        """Ask for a lease, or for a place in its queue where it is held.

        Raises:
            StoreUnavailable: If no answer came; the lease may be ours or not.
        """
        channel, patience, arrival = place or ("", 0.0, "")
        call = self._caller(
            ACQUIRE,
            keys[:4],
            owner,
            milliseconds(ttl),
            record,
            _draw(),
            self._life,
            channel,
            milliseconds(patience),
            arrival,
        )
        reply = _twice("acquire", call)
        if reply[0]:
            return Granted(int(reply[1]))
        return _refused(reply)

    def release(self, keys: LeaseKeys, owner: str) -> tuple[bool, str]:
        """End a lease if it is the owner's, and leave its queue if it only waits.

        Returns:
            Whether the lease was the owner's, and what went wrong when it was handed
            to a waiter (mostly nothing).

        Raises:
            StoreUnavailable: If no answer came; the lease then ends by its ttl.
        """
        call = self._caller(RELEASE, keys[:4], owner, _draw(), self._life)
        repeated = False
        try:
            try:
                reply = call()
            except StoreConnectionError:
                repeated = True
                reply = call()
        except (RedisError, OSError) as error:
            raise _unavailable("release", error) from error
        # The lost reply may have been the one that said yes.
        return bool(reply[0]) or repeated, _text(reply[1])

    def renew(self, renewals: Sequence[Renewal]) -> list[bool | StoreUnavailable]:
        """Renew many leases in one round trip.

        Returns:
            For each whether it is still the owner's, or why that is not known.
        """
        try:
            replies = self._renew_all(renewals)
            missing = [i for i, r in enumerate(replies) if isinstance(r, NoScriptError)]
            if missing:
                self.client.script_load(RENEW.text)
                again = self._renew_all([renewals[i] for i in missing])
                for i, reply in zip(missing, again, strict=True):
                    replies[i] = reply
        except (RedisError, OSError) as error:
            return [_unavailable("renew", error)] * len(renewals)
        return [
            _unavailable("renew", reply)
            if isinstance(reply, Exception)
            else bool(reply)
            for reply in replies
        ]

    def _renew_all(self, renewals: Sequence[Renewal]) -> list[object]:
        pipeline = self.client.pipeline(transaction=False)
        for keys, owner, ttl in renewals:
            pipeline.evalsha(RENEW.digest, 1, keys.lease, owner, milliseconds(ttl))
        return cast("list[object]", pipeline.execute(raise_on_error=False))

    def _caller(
        self, script: Script, keys: Sequence[str], *args: str | int
    ) -> Callable[[], Any]:
        def call() -> Any:
            try:
                return self.client.evalsha(script.digest, len(keys), *keys, *args)
            except NoScriptError:
                return self.client.eval(script.text, len(keys), *keys, *args)

        return call


def _twice(operation: str, call: Callable[[], T]) -> T:
    try:
        try:
            return call()
        except StoreConnectionError:
            return call()
    except (RedisError, OSError) as error:
        raise _unavailable(operation, error) from error


def _unavailable(operation: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(operation, f"{type(error).__name__}: {error}")


def _draw() -> int:
    # Two sides of a failover shall not issue the same number; nothing secret in it.
    return random.randrange(_RANDOM_FENCE)  # noqa: S311


def _refused(reply: Sequence[Any]) -> Refused:
    _, remaining, ttl, fence, owner, record, arrival = reply
    holder: Holder = _holder(_text(record))
    holder["since"] = int(fence) / 1e6
    return Refused(
        remaining / 1000,
        ttl / 1000,
        int(fence),
        _text(owner),
        holder,
        _text(arrival),
    )


def _holder(record: str) -> Holder:
    try:
        holder = json.loads(record)
    except ValueError:
        return {}
    return cast("Holder", holder) if isinstance(holder, dict) else {}


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
