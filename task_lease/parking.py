"""Leave a task parked beside its lease, and wake what nobody else would wake."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from task_lease.answers import (
    Granted,
    Held,
    Refused,
    Released,
    granted_refused_or_parked,
    released_or_held,
    text_of,
)
from task_lease.claims import Conflict, event_of, record_of
from task_lease.client import conflict_of, new_owner
from task_lease.keys import PARKED_INDEX, TURN, keys_of, lease_keys
from task_lease.observers import event_of_handed
from task_lease.scripts import draw, load, milliseconds

if TYPE_CHECKING:
    from task_lease.answers import Parked
    from task_lease.claims import Claim, Park
    from task_lease.client import Leases
    from task_lease.keys import LeaseKeys
    from task_lease.lease import Lease

SWEEP = load("shared", "parking", "sweep")


class Parking:
    """What is parked beside the leases of one store.

    Args:
        leases: The leases.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._store = leases.store

    def park(
        self, claim: Claim, park: Park, *, counts: bool, limit: int | None
    ) -> Lease | Conflict | Parked:
        """Ask once, and where the lease is held, leave the task parked beside it.

        Args:
            claim: Who asks for which lease.
            park: How it is parked.
            counts: Whether it is one of the conflicts that have a limit.
            limit: How many of those there may be; None is no limit.

        Raises:
            StoreUnavailable: If no usable answer came; it is parked or not.
        """
        owner, asked_at = new_owner(), self._leases.now()
        call = self._store.acquiring(
            lease_keys(claim.name),
            owner,
            claim.ttl,
            record_of(claim),
            entry=claim.entry,
            details=park.details(counts=counts, limit=limit),
        )
        reply = self._store.twice("acquire", lambda: granted_refused_or_parked(call()))
        if isinstance(reply, Granted):
            return self._leases.granted(claim, owner, reply, asked_at, None)
        if isinstance(reply, Refused):
            return conflict_of(claim, reply)
        self._leases.tell(event_of(claim, "parked", None))
        return reply

    def sweep(self) -> None:
        """Wake what is parked beside leases that ended without a release.

        Raises:
            StoreUnavailable: If the store cannot be used.
        """
        for keys in self._stalled():
            found = self._sweep(keys)
            if isinstance(found, Held) and self._leases.is_dead(found.holder):
                found = self._store.release(keys, found.owner)
            if isinstance(found, Released) and found.handed:
                self._leases.tell(event_of_handed(found.handed))

    def takes_turn(self, period: float) -> bool:
        """Return whether to sweep now: true for one process in each period.

        Args:
            period: Seconds.

        Raises:
            StoreUnavailable: If the store cannot be used.
        """
        client = self._store.client

        def take() -> bool:
            if not client.exists(PARKED_INDEX):
                return False
            return bool(client.set(TURN, 1, nx=True, px=milliseconds(period)))

        return self._store.twice("sweep", take)

    def _stalled(self) -> list[LeaseKeys]:
        """Return the leases beside which something is parked."""

        def call() -> list[LeaseKeys]:
            members = cast("set[bytes]", self._store.client.smembers(PARKED_INDEX))
            return [keys_of(text_of(member)) for member in members]

        return self._store.twice("sweep", call)

    def _sweep(self, keys: LeaseKeys) -> Released | Held:
        """Hand over one lease if it has ended, or return who holds it."""
        call = self._store.caller(
            SWEEP, (*keys, PARKED_INDEX), draw(), self._store.fence_life
        )
        return self._store.twice("sweep", lambda: released_or_held(call()))
