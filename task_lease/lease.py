"""The lease you hold: its owner, its fence, and how long it can be trusted."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Literal, TypeAlias

from typing_extensions import override

from task_lease.answers import Released
from task_lease.errors import LeaseLost, StoreUnavailable
from task_lease.keys import done_key
from task_lease.observers import LeaseEvent, event_of_handed
from task_lease.scripts import Outcome, Renewal
from task_lease.threads import real_lock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from task_lease.errors import Holder, LostReason
    from task_lease.keys import LeaseKeys
    from task_lease.observers import EventKind, Observer
    from task_lease.scripts import Store

logger = logging.getLogger("task_lease.heartbeat")

State: TypeAlias = Literal["held", "at risk", "lost", "released"]

# Trust ends this part of the ttl before the store's own end, for clocks that drift.
_MARGIN = 0.1

if hasattr(time, "CLOCK_BOOTTIME"):

    def boottime() -> float:
        """Return seconds on a clock that only goes forward, suspended time included."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
else:  # pragma: no cover - not on Linux
    boottime = time.monotonic


class Lease:
    """A lease that this process holds, or held.

    As a context manager it is released at the end of the block, which raises
    `LeaseLost` if it was lost meanwhile. It belongs to the process and the thread
    that acquired it: a forked child holds nothing of its parent's, and the beats end
    with the thread.

    Attributes:
        name: The lease's name.
        owner: The text, unique per acquisition, by which the store knows the holder.
        fence: A number that grows from holder to holder; give it to whatever you
            write to. None if the work runs without a lease.
        ttl: Seconds that the lease outlives its last beat.
        holder: What the store says about us to others.
    """

    __slots__ = (
        "_at_risk",
        "_clock",
        "_emit",
        "_end",
        "_ended",
        "_keys",
        "_lost",
        "_mutex",
        "_pid",
        "_since",
        "_store",
        "_trusted_until",
        "_when_lost",
        "body_ended_at",
        "fence",
        "holder",
        "name",
        "next_beat_at",
        "owner",
        "thread",
        "ttl",
    )

    def __init__(  # noqa: PLR0913 - made in one place, by name
        self,
        name: str,
        *,
        owner: str,
        fence: int | None,
        ttl: float,
        holder: Holder,
        asked_at: float,
        keys: LeaseKeys,
        store: Store,
        clock: Callable[[], float],
        emit: Observer,
        end: Callable[[Lease], object],
    ) -> None:
        self.name = name
        self.owner = owner
        self.fence = fence
        self.ttl = ttl
        self.holder = holder
        self.thread = threading.current_thread()
        self.next_beat_at = asked_at + ttl / 3
        self.body_ended_at: float | None = None
        self._pid = os.getpid()
        self._since = asked_at
        self._trusted_until = asked_at + ttl * (1 - _MARGIN)
        self._keys = keys
        self._store = store
        self._clock = clock
        self._emit = emit
        self._end = end
        self._mutex = real_lock()
        self._lost: LostReason | None = None
        self._at_risk = False
        self._ended = False
        self._when_lost: Callable[[Lease], object] | None = None

    @property
    def trusted_until(self) -> float:
        """The instant on the lease's clock at which trust ends unless renewed."""
        return self._trusted_until

    @property
    def lost(self) -> LostReason | None:
        """Why the lease was lost; None as long as it was not noticed to be."""
        return self._lost

    @property
    def state(self) -> State:
        """Where the lease stands, as far as this process has noticed."""
        if self._lost:
            return "lost"
        if self._ended:
            return "released"
        return "at risk" if self._at_risk else "held"

    @property
    def is_live(self) -> bool:
        """Whether the lease still wants beats: neither lost nor released."""
        return not self._lost and not self._ended

    @property
    def renewal(self) -> Renewal:
        """What the store must know to renew the lease."""
        return Renewal(self._keys, self.owner, self.ttl)

    def check(self, *, remote: bool = False) -> None:
        """Return if the lease can still be trusted; compares the clock itself.

        Args:
            remote: Also ask the store, which renews the lease.

        Raises:
            LeaseLost: If it cannot.
            StoreUnavailable: If the store was to be asked and did not answer.
        """
        if self._pid != os.getpid() or (self._ended and not self._lost):
            raise LeaseLost(self.name, "expired")
        self.notice(self._clock())
        if remote and not self._lost:
            self.renew()
        if self._lost:
            raise LeaseLost(self.name, self._lost)

    def renew(self) -> None:
        """Renew the lease now, beside the beats.

        Raises:
            LeaseLost: If it is no longer ours.
            StoreUnavailable: If the store did not answer; trust goes on until its end.
        """
        self.check()
        if self.fence is None:
            return
        started_at = self._clock()
        reply = self._store.renew([self.renewal])[0]
        self.judge(reply, started_at)
        if self._lost:
            raise LeaseLost(self.name, self._lost)
        if isinstance(reply, StoreUnavailable):
            raise reply

    def release(self, *, remember: float = 0.0) -> bool:
        """End the lease. Doing it twice, or in a forked child, does nothing.

        Args:
            remember: Seconds for which the store remembers that this attempt of the
                holder's task has an outcome, so that no copy of it runs; 0 does not.

        Returns:
            Whether it was still ours. A store that does not answer counts as a yes,
            for the lease then ends by its ttl.
        """
        if self._pid != os.getpid() or not self._finish():
            return False
        if self.fence is None:
            return True
        self._end(self)
        try:
            outcome = self._outcome(remember) if remember else None
            done = self._store.release(self._keys, self.owner, outcome)
        except StoreUnavailable as error:
            done = Released(mine=True, problem=str(error))
        if done.mine:
            self.tell("released", self._clock() - self._since, done.problem)
        elif not self._lost:
            self._lost = "stolen"
            self.tell("lost", detail="stolen")
        if done.handed:
            self._emit(event_of_handed(done.handed))
        return done.mine

    def when_lost(self, callback: Callable[[Lease], object] | None) -> None:
        """Call back, once, as soon as the lease is lost: in the beating thread.

        A lease that is lost already calls back at once. What the callback raises is
        logged, for it must not stop the beats of other leases.
        """
        if self._pid != os.getpid():
            return
        with self._mutex:
            self._when_lost = callback
            lost = self._lost
        if lost and callback:
            self._call_back(callback)

    def end_of_body(self) -> None:
        """Note that the work has ended and look at the clock a last time.

        From here on the lease is only held until the outcome is stored.
        """
        self.body_ended_at = self._clock()
        self.notice(self.body_ended_at)

    def notice(self, now: float) -> bool:
        """Lose the lease if its trust has ended; return whether it is lost."""
        if not self._lost and now >= self._trusted_until:
            self._lose("unreachable" if self._at_risk else "expired")
        return self._lost is not None

    def doubt(self, problem: str) -> None:
        """Note that a beat has failed."""
        if not self._at_risk and self.is_live:
            self._at_risk = True
            self.tell("at risk", detail=problem)

    def judge(self, reply: bool | StoreUnavailable, started_at: float) -> None:  # noqa: FBT001 - the store's word
        """Draw the conclusion from a renewal that started at an instant.

        Trust is counted from the start of the request, so a slow success gives no
        more than the store has surely granted; and what is lost stays lost.
        """
        now = self._clock()
        if self.notice(now) or self._ended:
            return
        until = started_at + self.ttl * (1 - _MARGIN)
        if isinstance(reply, StoreUnavailable):
            # Of a request that hung while a later one succeeded, it says nothing.
            if until >= self._trusted_until:
                self.doubt(str(reply))
        elif not reply:
            self._lose("stolen")
        else:
            self._trusted_until = max(self._trusted_until, until)
            self._at_risk = False
            self.tell("renewed", now - started_at)

    def _lose(self, reason: LostReason) -> None:
        if self._pid != os.getpid():
            # It was never this process's to lose; nor is its mutex, perhaps taken.
            return
        with self._mutex:
            if self._lost or self._ended:
                return
            self._lost = reason
            callback = self._when_lost
        try:
            # Before anything that may block, or worse.
            if callback:
                self._call_back(callback)
        finally:
            self.tell("lost", detail=reason)

    def _call_back(self, callback: Callable[[Lease], object]) -> None:
        try:
            callback(self)
        except BaseException as error:
            # In the body's own thread it may be the loss itself that strikes in here.
            passes = isinstance(error, LeaseLost) or not isinstance(error, Exception)
            if passes and threading.current_thread() is self.thread:
                raise
            logger.exception("What was to be called on the loss of %r failed", self)

    def _outcome(self, life: float) -> Outcome:
        key = done_key(self.name, self.holder.get("id", ""))
        return Outcome(key, self.holder.get("attempt", 0), life)

    def _finish(self) -> bool:
        with self._mutex:
            first = not self._ended
            self._ended = True
            return first

    def tell(
        self,
        kind: EventKind,
        seconds: float = 0.0,
        detail: str = "",
    ) -> None:
        """Tell the observers what happened to this lease."""
        own = self.holder
        about = (own.get("task", ""), own.get("id", ""), own.get("queue", ""))
        self._emit(
            LeaseEvent(kind, self.name, own, self.fence, seconds, detail, *about)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.notice(self._clock())
        self.release()
        if self._lost and error is None:
            raise LeaseLost(self.name, self._lost)

    @override
    def __repr__(self) -> str:
        return f"<Lease {self.name} fence={self.fence} {self.state}>"
