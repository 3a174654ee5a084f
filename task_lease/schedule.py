"""Which leases are to be renewed when: those that beat, and those in trouble."""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from task_lease.lease import Lease

# Part of a ttl. Leases due within it of a beat come along, so that many become one.
_GATHER = 1 / 12


class Schedule:
    """The leases of a process, in the order of their beats.

    It has no lock; whoever uses it has.
    """

    def __init__(self) -> None:
        self._healthy: dict[float, OrderedDict[str, Lease]] = {}
        self._troubled: dict[str, Lease] = {}

    def put(self, lease: Lease) -> None:
        """Let a lease beat in line, which costs no search to find it."""
        group = self._healthy.setdefault(lease.ttl, OrderedDict())
        last = next(reversed(group.values()), lease)
        if lease.next_beat_at < last.next_beat_at - lease.ttl * _GATHER:
            # Its answer came late; in line it would be passed over.
            self.put_apart(lease)
        else:
            group[lease.owner] = lease

    def put_apart(self, lease: Lease) -> None:
        """Let a lease beat at its own time, and watch its deadline."""
        self._troubled[lease.owner] = lease

    def drop(self, lease: Lease) -> None:
        """Forget a lease."""
        self._troubled.pop(lease.owner, None)
        group = self._healthy.get(lease.ttl)
        if group is not None:
            group.pop(lease.owner, None)
            if not group:
                del self._healthy[lease.ttl]

    def due(self, now: float) -> list[list[Lease]]:
        """Return the leases in line that are due, those of one ttl together."""
        return [self._due_of(ttl, now) for ttl in self._healthy]

    def apart(self) -> list[Lease]:
        """Return the leases that are not in line, due or not."""
        return list(self._troubled.values())

    def instants(self) -> Iterator[float]:
        """Yield the instants at which something is to be done."""
        for group in self._healthy.values():
            yield next(iter(group.values())).next_beat_at
        for lease in self._troubled.values():
            yield min(lease.next_beat_at, lease.trusted_until)

    def __iter__(self) -> Iterator[Lease]:
        for group in self._healthy.values():
            yield from group.values()
        yield from self._troubled.values()

    def _due_of(self, ttl: float, now: float) -> list[Lease]:
        # In order of their beats, so the first one that is not due ends the search.
        leases = iter(self._healthy[ttl].values())
        first = next(leases)
        if first.next_beat_at > now:
            return []
        soon = now + ttl * _GATHER
        return [first, *takewhile(lambda lease: lease.next_beat_at <= soon, leases)]
