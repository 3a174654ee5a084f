"""Get a lease now, or wait for it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from task_lease.claims import Claim, Conflict, Patience, event_of, holder_of, record_of
from task_lease.config import check_seconds, check_ttl
from task_lease.connection import REQUEST_TIMEOUT, client_for
from task_lease.errors import LeaseConflict, StoreUnavailable
from task_lease.heartbeat import Heartbeat
from task_lease.host import is_proven_dead, this_process
from task_lease.keys import lease_keys
from task_lease.lease import Lease, boottime
from task_lease.observers import Announcer, log_event
from task_lease.scripts import Granted, Place, Refused, Store
from task_lease.waiting import Wakeups

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    import redis

    from task_lease.observers import LeaseEvent, Observer

# Seconds between two looks whether a holder on this host still lives.
_LOOK_EVERY = 0.1
# A waiter asks again when the holder's lease should have ended; it counts as alive
# for this part of its own ttl longer, and never for less than a second.
_PATIENCE = 1 / 3
# A takeover gives way to the queue, so it may take more than one; not for ever.
_MOST_TAKEOVERS = 8


class Leases:
    """Leases in one store.

    A lease makes overlap rare and short, not impossible: whoever was paused for
    longer than the ttl does not know yet that another has begun. Give the fence to
    what you write to, so that it can refuse the late one.

    Args:
        store: A Redis client, a URL, or a callable that returns a client. A plain
            client is copied, with the same server and credentials.
        ttl: Seconds that a lease outlives its last beat, unless said otherwise.
        fence_life: Seconds that the last fence of a name is remembered at the least;
            0 remembers none, and a server clock that steps back can then issue a
            lower one.
        proof_of_death: Whether a lease is taken at once from a holder on this host
            whose process is proven dead. Switch it off where processes outlive the
            task that started them and go on with its work.
        observers: Who is told of events; by default they are logged.
        clock: The clock of trust, in seconds.

    Raises:
        InvalidConfig: If a value is not allowed.

    Example:
        >>> leases = Leases("redis://localhost:6379/0")  # doctest: +SKIP
        >>> with leases.acquire("migrate", timeout=60) as lease:  # doctest: +SKIP
        ...     migrate(fence=lease.fence)
    """

    def __init__(
        self,
        store: redis.Redis | str | Callable[[], redis.Redis],
        *,
        ttl: float = 10.0,
        fence_life: float = 3600.0,
        proof_of_death: bool = True,
        observers: Iterable[Observer] = (log_event,),
        clock: Callable[[], float] = boottime,
    ) -> None:
        self._ttl = check_ttl(ttl)
        self._proof_of_death = proof_of_death
        self._clock = clock
        life = check_seconds("fence_life", fence_life, longest=10 * 365 * 86_400)
        client = client_for(store, REQUEST_TIMEOUT)
        self._store = Store(client, fence_life=life)
        self._emit = Announcer(observers)
        self._heartbeat = Heartbeat(self._store, clock)
        self._wakeups = Wakeups(lambda: client)

    def try_acquire(self, name: str, *, ttl: float | None = None) -> Lease | None:
        """Return the lease, or None if somebody else holds it.

        Args:
            name: What is exclusive.
            ttl: Seconds that the lease outlives its last beat.

        Raises:
            InvalidConfig: If the name is empty or the ttl not allowed.
            StoreUnavailable: If the store cannot be used.
        """
        answer = self.ask(self._claim(name, ttl))
        return answer if isinstance(answer, Lease) else None

    def acquire(
        self, name: str, *, ttl: float | None = None, timeout: float | None = None
    ) -> Lease:
        """Return the lease, waiting for it first come, first served.

        Args:
            name: What is exclusive.
            ttl: Seconds that the lease outlives its last beat.
            timeout: Seconds to wait at the most; None waits without limit, and 0
                asks once.

        Raises:
            InvalidConfig: If the name is empty or a duration not allowed.
            LeaseConflict: If it is still held when the time is over.
            StoreUnavailable: If the store cannot be used.
        """
        claim = self._claim(name, ttl)
        answer = self.ask(claim)
        if isinstance(answer, Lease):
            return answer
        if timeout is None:
            return self.wait(claim, lambda _: math.inf)
        until = self._clock() + check_seconds("timeout", timeout)
        return self.wait(claim, lambda _: until - self._clock())

    def ask(self, claim: Claim) -> Lease | Conflict:
        """Ask once, in one round trip, and take over from a proven-dead holder.

        Raises:
            StoreUnavailable: If no usable answer came.
        """
        return self._ask(claim, _new_owner(), None)

    def wait(self, claim: Claim, patience: Patience) -> Lease:
        """Wait in the queue of a lease.

        Args:
            claim: Who asks for which lease.
            patience: Says after each conflict how long may still be waited.

        Raises:
            LeaseConflict: If patience ends first.
            StoreUnavailable: If the store cannot be used.
        """
        owner = _new_owner()
        began_at = self._clock()
        woken = self._wakeups.expect(owner, min(claim.ttl, 1.0))
        place = Place(self._wakeups.channel, max(claim.ttl * _PATIENCE, 1.0))
        lease: Lease | None = None
        try:
            while lease is None:
                woken.clear()
                answer = self._ask(claim, owner, place, began_at)
                if isinstance(answer, Lease):
                    lease = answer
                    break
                left = patience(answer)
                if left <= 0:
                    raise answer.error
                place = place._replace(arrival=answer.refused.arrival)
                self._rest(woken, answer.refused, left)
        finally:
            self._wakeups.forget(owner)
            if lease is None:
                self._leave(claim, owner)
        return lease

    def unguarded(self, claim: Claim) -> Lease:
        """Return a lease in name only: no fence, no beats, always trusted.

        It is for work that shall rather run without exclusion than not at all. Every
        guard refuses its fence, None.
        """
        return self._new_lease(claim, "", None, math.inf)

    def now(self) -> float:
        """Return the instant on the clock of trust, in seconds."""
        return self._clock()

    def tell(self, event: LeaseEvent) -> None:
        """Tell an event to all observers."""
        self._emit(event)

    def leases(self) -> list[Lease]:
        """Return the leases that this process holds."""
        return self._heartbeat.leases()

    def _claim(self, name: str, ttl: float | None) -> Claim:
        return Claim(name, self._ttl if ttl is None else check_ttl(ttl))

    def _ask(
        self,
        claim: Claim,
        owner: str,
        place: Place | None,
        began_at: float | None = None,
    ) -> Lease | Conflict:
        keys = lease_keys(claim.name)
        record = record_of(claim)
        takeovers = 0
        while True:
            asked_at = self._clock()
            reply = self._store.acquire(keys, owner, claim.ttl, record, place)
            if isinstance(reply, Granted):
                return self._granted(claim, owner, reply, asked_at, began_at)
            if takeovers == _MOST_TAKEOVERS or not self._is_dead(reply):
                error = LeaseConflict(claim.name, reply.holder, reply.remaining)
                return Conflict(reply, error)
            takeovers += 1
            self._store.release(keys, reply.owner)
            self._emit(event_of(claim, "takeover", reply))

    def _is_dead(self, refused: Refused) -> bool:
        return self._proof_of_death and is_proven_dead(refused.holder)

    def _granted(
        self,
        claim: Claim,
        owner: str,
        reply: Granted,
        asked_at: float,
        began_at: float | None,
    ) -> Lease:
        lease = self._new_lease(claim, owner, reply.fence, asked_at)
        now = self._clock()
        if now >= lease.trusted_until:
            # The answer came so late that another may hold it by now.
            lease.release()
            raise StoreUnavailable("acquire", "the answer came after its deadline")
        self._heartbeat.add(lease)
        waited = now - (asked_at if began_at is None else began_at)
        lease.tell("acquired", waited)
        return lease

    def _new_lease(
        self, claim: Claim, owner: str, fence: int | None, asked_at: float
    ) -> Lease:
        return Lease(
            claim.name,
            owner=owner,
            fence=fence,
            ttl=claim.ttl,
            holder=holder_of(claim),
            asked_at=asked_at,
            keys=lease_keys(claim.name),
            store=self._store,
            clock=self._clock,
            emit=self._emit,
            end=self._heartbeat.discard,
        )

    def _rest(self, woken: threading.Event, refused: Refused, left: float) -> None:
        # The holder's end, and a little for the difference between the clocks.
        pause = min(refused.remaining + 0.01, left)
        here = self._proof_of_death and bool(
            refused.holder.get("identity") == this_process().identity
        )
        until = self._clock() + pause
        while pause > 0 and not woken.wait(min(pause, _LOOK_EVERY) if here else pause):
            if here and self._is_dead(refused):
                return
            pause = until - self._clock()

    def _leave(self, claim: Claim, owner: str) -> None:
        try:
            # If it was handed to us in this very moment, it goes to the next one.
            self._store.release(lease_keys(claim.name), owner)
        except StoreUnavailable:
            # Our place in the queue ends by itself.
            return


def _new_owner() -> str:
    return os.urandom(16).hex()
