"""Get a lease now, or wait for it."""

from __future__ import annotations

import math
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from task_lease.answers import Done, Granted, Refused
from task_lease.claims import (
    Claim,
    Conflict,
    Patience,
    event_of,
    holder_of,
    record_of,
)
from task_lease.config import check_flag, check_seconds, check_ttl
from task_lease.connection import REQUEST_TIMEOUT, client_for
from task_lease.errors import AlreadyDone, LeaseConflict, StoreUnavailable
from task_lease.greenlets import greenlets
from task_lease.heartbeat import Heartbeat
from task_lease.host import is_proven_dead, this_process
from task_lease.keys import done_key, lease_keys
from task_lease.lease import Lease, boottime
from task_lease.observers import Announcer, log_event
from task_lease.scripts import Outcome, Place, Store
from task_lease.threads import RealThreads, ThreadsBesideGreenlets, at_home
from task_lease.waiting import Wakeups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import redis

    from task_lease.answers import StoreFacts
    from task_lease.errors import Holder
    from task_lease.observers import LeaseEvent, Observer
    from task_lease.threads import Alarm, Threads

T = TypeVar("T")

# Seconds between two looks whether a holder on this host still lives.
_LOOK_EVERY = 0.1
# A waiter asks again when the holder's lease should have ended; it counts as alive
# for this part of its own ttl longer, and never for less than a second.
_PATIENCE = 1 / 3
# Seconds. It asks sooner than that where the end is far, for the lease may have been
# handed to a waiter that is dead, and nobody is told when such a one does not come.
_LONGEST_REST = 5.0
# Seconds that a waiter outlasts a store that does not answer, and between two tries.
_WITHOUT_STORE = 10.0
_ASK_AGAIN = 0.25
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
        self._proof_of_death = check_flag("proof_of_death", proof_of_death)
        self._clock = clock
        life = check_seconds("fence_life", fence_life, longest=10 * 365 * 86_400)
        client = client_for(store, REQUEST_TIMEOUT)
        self._store = Store(client, fence_life=life)
        self._emit = at_home(Announcer(observers))
        beats, threads = _beside(self._store, store)
        self._heartbeat = Heartbeat(beats, clock, threads)
        self._wakeups = Wakeups(lambda: client)

    @property
    def store(self) -> Store:
        """The operations of the store."""
        return self._store

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
        seconds = math.inf if timeout is None else check_seconds("timeout", timeout)
        until = self._clock() + seconds
        answer = self.ask(claim)
        if isinstance(answer, Lease):
            return answer
        if seconds == 0:
            raise answer.error
        return self.wait(claim, lambda _: until - self._clock())

    def ask(self, claim: Claim) -> Lease | Conflict:
        """Ask once, in one round trip, and take over from a proven-dead holder.

        Raises:
            AlreadyDone: If the claim is a copy of a task that has an outcome.
            StoreUnavailable: If no usable answer came.
        """
        return self._ask(claim, new_owner(), None)

    def wait(self, claim: Claim, patience: Patience) -> Lease:
        """Wait in the queue of a lease.

        Args:
            claim: Who asks for which lease.
            patience: Says after each conflict how long may still be waited.

        Raises:
            AlreadyDone: If the claim is a copy of a task that has an outcome.
            LeaseConflict: If patience ends first.
            StoreUnavailable: If the store cannot be used; a wait that has begun
                outlasts some seconds of that.
        """
        owner = new_owner()
        began_at = self._clock()
        left = 0.0
        place = Place(self._wakeups.channel, max(claim.ttl * _PATIENCE, 1.0))
        lease: Lease | None = None
        try:
            alarm = self._wakeups.expect(owner)
            while lease is None:
                alarm.silence()
                ask = partial(self._ask, claim, owner, place, began_at)
                answer = self._outlast(ask, alarm, min(left, _WITHOUT_STORE))
                if isinstance(answer, Lease):
                    lease = answer
                    break
                left = patience(answer)
                if left <= 0:
                    raise answer.error
                place = place._replace(arrival=answer.refused.arrival)
                self._rest(alarm, answer.refused, left)
        finally:
            self._wakeups.forget(owner)
            if lease is None:
                self._leave(claim, owner)
        return lease

    def look(self, name: str) -> Refused | None:
        """Return who holds a lease, None if nobody does; changes nothing.

        Args:
            name: The lease's name.

        Raises:
            StoreUnavailable: If the store cannot be used.
        """
        return self._store.peek(lease_keys(name))

    def facts(self) -> StoreFacts:
        """Return what the store says about itself.

        Raises:
            StoreUnavailable: If the store cannot be used.
        """
        return self._store.facts()

    def is_seen_by(self, client: redis.Redis) -> bool:
        """Return whether a client reads what is written here: one server, one database.

        Raises:
            StoreUnavailable: If one of the two did not answer.
        """
        return self._store.is_seen_by(client)

    def release_dead(self, name: str, task_id: str, *, patience: float) -> bool:
        """Release a task's lease as soon as its process is proven dead.

        Args:
            name: The lease's name.
            task_id: The id of the task that held it when last seen.
            patience: Seconds to wait for the death.

        Returns:
            Whether the lease was released.

        Raises:
            StoreUnavailable: If the store cannot be used.
        """
        keys = lease_keys(name)
        held = self._store.peek(keys)
        if held is None or held.holder.get("id") != task_id:
            return False
        until = self._clock() + patience
        pause = threading.Event()
        while not self.is_dead(held.holder):
            if self._clock() >= until:
                return False
            pause.wait(_LOOK_EVERY)
        return self._store.release(keys, held.owner).mine

    def is_dead(self, holder: Holder) -> bool:
        """Return whether a holder's process is proven dead."""
        return self._proof_of_death and is_proven_dead(holder)

    def granted(
        self,
        claim: Claim,
        owner: str,
        reply: Granted,
        asked_at: float,
        began_at: float | None,
    ) -> Lease:
        """Return the lease that the store has granted, and let it beat.

        Args:
            claim: Who asked for which lease.
            owner: The owner that was asked for.
            reply: What the store said.
            asked_at: The instant of the request.
            began_at: The instant from which it was waited; None if it was not.

        Raises:
            StoreUnavailable: If the answer came too late to be trusted.
        """
        lease = self._new_lease(claim, owner, reply.fence, asked_at)
        now = self._clock()
        if now >= lease.trusted_until:
            # The answer came so late that another may hold it by now.
            lease.release()
            raise StoreUnavailable("acquire", "the answer came after its deadline")
        try:
            self._heartbeat.add(lease)
            waited = now - (asked_at if began_at is None else began_at)
            lease.tell("acquired", waited)
        except BaseException:
            # Nobody will ever have it who could release it, and beats would keep it.
            lease.release()
            raise
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
            entry = claim.entry
            reply = self._store.acquire(
                keys, owner, claim.ttl, record, place, entry, _copy_of(claim)
            )
            if isinstance(reply, Granted):
                return self.granted(claim, owner, reply, asked_at, began_at)
            if isinstance(reply, Done):
                raise AlreadyDone(claim.name, claim.id)
            if takeovers == _MOST_TAKEOVERS or not self.is_dead(reply.holder):
                return conflict_of(claim, reply)
            takeovers += 1
            if self._store.release(keys, reply.owner).mine:
                self._emit(event_of(claim, "takeover", reply))

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

    def _outlast(self, ask: Callable[[], T], alarm: Alarm, seconds: float) -> T:
        """Return the first answer of a store that may be away for some seconds."""
        until = self._clock() + seconds
        while True:
            try:
                return ask()
            except StoreUnavailable as error:
                # Without a cause an answer came, and the lease was given up.
                if error.__cause__ is None or self._clock() >= until:
                    raise
            alarm.sleep(_ASK_AGAIN)

    def _rest(self, alarm: Alarm, refused: Refused, left: float) -> None:
        # The holder's end, and a little for the difference between the clocks.
        pause = min(refused.remaining + 0.01, left, _LONGEST_REST)
        here = self._proof_of_death and bool(
            refused.holder.get("identity") == this_process().identity
        )
        until = self._clock() + pause
        while pause > 0 and not alarm.sleep(min(pause, _LOOK_EVERY) if here else pause):
            if here and self.is_dead(refused.holder):
                return
            pause = until - self._clock()

    def _leave(self, claim: Claim, owner: str) -> None:
        try:
            # If it was handed to us in this very moment, it goes to the next one.
            self._store.release(lease_keys(claim.name), owner)
        except StoreUnavailable:
            # Our place in the queue ends by itself.
            return


def conflict_of(claim: Claim, refused: Refused) -> Conflict:
    """Return a refusal as the conflict of a claim."""
    error = LeaseConflict(claim.name, refused.holder, refused.remaining)
    return Conflict(refused, error)


def _beside(
    store: Store, source: redis.Redis | str | Callable[[], redis.Redis]
) -> tuple[Store, Threads]:
    """Return the store as beats see it, and the threads that they use."""
    library = greenlets()
    if library is None:
        return store, RealThreads()
    # A greenlet's connection is of no use to another thread.
    own = client_for(source, REQUEST_TIMEOUT)
    shares = own is store.client or (
        getattr(own, "connection_pool", own)
        is getattr(store.client, "connection_pool", None)
    )
    threads = ThreadsBesideGreenlets(library, shares_client=shares)
    return Store(own, fence_life=0.0), threads


def _copy_of(claim: Claim) -> Outcome | None:
    if not claim.may_be_copy:
        return None
    return Outcome(done_key(claim.name, claim.id), claim.attempt, 0.0)


def new_owner() -> str:
    """Return an owner for one acquisition."""
    return os.urandom(16).hex()
