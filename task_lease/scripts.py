"""Typed calls of the Lua operations.

The only module that talks to the store, and the only one that knows milliseconds.
Every operation is one round trip and gives the same answer when it is repeated
after a lost reply, so each is sent a second time when the connection breaks.
"""

from __future__ import annotations

import hashlib
import math
import pkgutil
import random
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from redis.exceptions import ConnectionError as StoreConnectionError
from redis.exceptions import NoScriptError, RedisError

from task_lease.answers import (
    facts_from,
    granted_or_refused,
    granted_refused_or_done,
    released,
    text_of,
)
from task_lease.errors import StoreUnavailable
from task_lease.keys import PARKED_INDEX, probe_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import redis

    from task_lease.answers import (
        Done,
        Granted,
        Refused,
        Released,
        StoreFacts,
    )
    from task_lease.keys import LeaseKeys

T = TypeVar("T")

# How a request can end without a usable answer. What is not Redis's protocol makes
# its reader raise nearly anything; what interrupts a task from outside is none of it.
_NO_ANSWER = (
    RedisError,
    OSError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)

_RANDOM_FENCE = 1000
# Seconds that the mark lives by which two clients find out that they share a database.
_FOR_PROBE = 10.0


class Script(NamedTuple):
    """A Lua operation: its text and the digest by which the server knows it."""

    text: str
    digest: str


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


class Outcome(NamedTuple):
    """An attempt of a task whose outcome is stored, or may be.

    Attributes:
        key: Where this is remembered.
        attempt: Which attempt of the task it is.
        life: Seconds that it is remembered.
    """

    key: str
    attempt: int
    life: float


class Renewal(NamedTuple):
    """One lease to renew, ttl in seconds."""

    keys: LeaseKeys
    owner: str
    ttl: float


def load(*names: str) -> Script:
    """Return an operation made of files of ``lua/``, one behind the other."""
    parts = (pkgutil.get_data("task_lease", f"lua/{name}.lua") for name in names)
    text = "\n".join(part.decode() for part in parts if part)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


ACQUIRE = load("shared", "parking", "acquire")
RENEW = load("renew")
RELEASE = load("shared", "parking", "release")


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
        #: How long a floor outlives its fence, in milliseconds.
        self.fence_life = milliseconds(fence_life)

    def acquire(  # noqa: PLR0913, PLR0917 - the operation has as many
        self,
        keys: LeaseKeys,
        owner: str,
        ttl: float,
        record: str,
        place: Place | None = None,
        entry: str = "",
        copy_of: Outcome | None = None,
    ) -> Granted | Refused | Done:
        """Ask for a lease, or for a place in its queue where it is held.

        Args:
            keys: The lease's keys.
            owner: Who asks.
            ttl: Seconds that the lease outlives its last beat.
            record: What others read about the holder.
            place: How to stand in the queue of those who wait; None does not.
            entry: What stands for us when parked, empty if we never are.
            copy_of: What we may be a copy of; None if we are none.

        Raises:
            StoreUnavailable: If no answer came; the lease may be ours or not.
        """
        call = self.acquiring(keys, owner, ttl, record, place, entry, "", copy_of)
        return self.twice("acquire", lambda: granted_refused_or_done(call()))

    def release(
        self, keys: LeaseKeys, owner: str, outcome: Outcome | None = None
    ) -> Released:
        """End a lease if it is the owner's, and leave its queue if it only waits.

        Args:
            keys: The lease's keys.
            owner: Whose lease it is.
            outcome: What is remembered to be done, so that no copy of it runs again.

        Raises:
            StoreUnavailable: If no answer came; the lease then ends by its ttl.
        """
        args: tuple[str | int, ...] = (owner, draw(), self.fence_life)
        if outcome is None:
            call = self.caller(RELEASE, keys, *args)
        else:
            remembered = (outcome.attempt, milliseconds(outcome.life))
            call = self.caller(RELEASE, (*keys, outcome.key), *args, *remembered)
        calls: list[Any] = []

        def release() -> Released:
            calls.append(call)
            # The lost reply may have been the one that said yes.
            return released(call(), repeated=len(calls) > 1)

        return self.twice("release", release)

    def renew(self, renewals: Sequence[Renewal]) -> list[bool | StoreUnavailable]:
        """Renew many leases in one round trip.

        Returns:
            For each whether it is still the owner's, or why that is not known.
        """
        try:
            replies = self._renew_all(renewals)
            missing = [i for i, r in enumerate(replies) if isinstance(r, NoScriptError)]
            if missing:
                again = self._renew_all([renewals[i] for i in missing], known=False)
                for i, reply in zip(missing, again, strict=True):
                    replies[i] = reply
        except _NO_ANSWER as error:
            return [_unavailable("renew", error)] * len(renewals)
        except BaseException:
            self._drop_idle_connections()
            raise
        return [_renewed(reply) for reply in replies]

    def peek(self, keys: LeaseKeys) -> Refused | None:
        """Return who holds a lease, None if nobody does; changes nothing.

        Raises:
            StoreUnavailable: If no usable answer came.
        """

        def call() -> Refused | None:
            pipeline = self.client.pipeline(transaction=False)
            pipeline.get(keys.lease)
            pipeline.pttl(keys.lease)
            stored, remaining = pipeline.execute()
            if stored is None:
                return None
            owner, fence, ttl, record = text_of(stored).split(" ", 3)
            reply = [0, remaining, int(ttl), fence, owner, record, ""]
            return cast("Refused", granted_or_refused(reply))

        return self.twice("peek", call)

    def facts(self) -> StoreFacts:
        """Return what the store says about itself.

        Raises:
            StoreUnavailable: If no usable answer came.
        """

        def call() -> StoreFacts:
            return facts_from(self.client.info(), self.client.time())

        return self.twice("info", call)

    def is_seen_by(self, client: redis.Redis) -> bool:
        """Return whether a client reads what is written here.

        Raises:
            StoreUnavailable: If one of the two did not answer.
        """
        mark = probe_key(secrets.token_hex(8))

        def call() -> bool:
            self.client.set(mark, 1, px=milliseconds(_FOR_PROBE))
            return bool(client.exists(mark))

        return self.twice("probe", call)

    def acquiring(  # noqa: PLR0913, PLR0917 - the operation has as many
        self,
        keys: LeaseKeys,
        owner: str,
        ttl: float,
        record: str,
        place: Place | None = None,
        entry: str = "",
        details: str = "",
        copy_of: Outcome | None = None,
    ) -> Callable[[], Any]:
        """Return the call of an acquire, in one round trip, as the store answers it.

        Args:
            keys: The lease's keys.
            owner: Who asks.
            ttl: Seconds that the lease outlives its last beat.
            record: What others read about the holder.
            place: How to stand in the queue of those who wait; None does not.
            entry: What stands for us when parked, empty if we never are.
            details: What only the parking itself needs, empty to park nothing.
            copy_of: What we may be a copy of; None if we are none.
        """
        channel, patience, arrival = place or ("", 0.0, "")
        more_keys = (PARKED_INDEX,) if details else ()
        more_args: tuple[int, ...] = ()
        if copy_of is not None:
            more_keys, more_args = (copy_of.key,), (copy_of.attempt,)
        return self.caller(
            ACQUIRE,
            (*keys, *more_keys),
            owner,
            milliseconds(ttl),
            record,
            draw(),
            self.fence_life,
            channel,
            milliseconds(patience),
            arrival,
            entry,
            details,
            *more_args,
        )

    def caller(
        self, script: Script, keys: Sequence[str], *args: str | int
    ) -> Callable[[], Any]:
        """Return the call of an operation, in one round trip."""

        def call() -> Any:
            try:
                return self.client.evalsha(script.digest, len(keys), *keys, *args)
            except NoScriptError:
                return self.client.eval(script.text, len(keys), *keys, *args)

        return call

    def twice(self, operation: str, call: Callable[[], T]) -> T:
        """Return what a request brings, sent again if the connection breaks.

        Raises:
            StoreUnavailable: If no usable answer came.
        """
        try:
            try:
                return call()
            except StoreConnectionError:
                return call()
        except _NO_ANSWER as error:
            raise _unavailable(operation, error) from error
        except BaseException:
            self._drop_idle_connections()
            raise

    def _renew_all(
        self, renewals: Sequence[Renewal], *, known: bool = True
    ) -> list[object]:
        # The text itself makes the script known, and needs no right to SCRIPT.
        pipeline = self.client.pipeline(transaction=False)
        for keys, owner, ttl in renewals:
            args = (1, keys.lease, owner, milliseconds(ttl))
            if known:
                pipeline.evalsha(RENEW.digest, *args)
            else:
                pipeline.eval(RENEW.text, *args)
        return cast("list[object]", pipeline.execute(raise_on_error=False))

    def _drop_idle_connections(self) -> None:
        # What interrupted us can have struck between request and reply, and redis-py
        # would then give the reply to whoever next uses the connection.
        pool = getattr(self.client, "connection_pool", None)
        if pool is not None:
            pool.disconnect(inuse_connections=False)


def _renewed(reply: object) -> bool | StoreUnavailable:
    if isinstance(reply, Exception):
        return _unavailable("renew", reply)
    if reply in (0, 1):
        return bool(reply)
    return StoreUnavailable("renew", f"strange answer {reply!r:.100}")


def _unavailable(operation: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(operation, f"{type(error).__name__}: {error}")


def draw() -> int:
    """Return the random part of a fence."""
    # Two sides of a failover shall not issue the same number; nothing secret in it.
    return random.randrange(_RANDOM_FENCE)  # noqa: S311
