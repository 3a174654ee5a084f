"""What in a store's own set-up can break a lease's promises, with the remedy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from task_lease.answers import StoreFacts
    from task_lease.client import Leases

_OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
# Seconds between the clocks of the store and of this host. Leases do not compare
# them, but a store whose clock is that far off is likely to be set back at once.
_CLOCK_OFFSET = 5.0


def problems_of(leases: Leases) -> list[str]:
    """Return what is wrong with the store, one sentence each with the remedy.

    Args:
        leases: The leases whose store is looked at.

    Raises:
        StoreUnavailable: If the store cannot be used.
    """
    before = time.time()
    facts = leases.facts()
    offset = facts.clock - (before + time.time()) / 2
    return [*_of_version(facts), *_of_eviction(facts), *_of_clock(offset)]


def _of_version(facts: StoreFacts) -> Iterator[str]:
    oldest = _OLDEST[facts.product]
    if facts.version < oldest:
        found = ".".join(map(str, facts.version))
        needed = ".".join(map(str, oldest))
        yield f"the lease store is {facts.product} {found}: use {needed} or later"


def _of_eviction(facts: StoreFacts) -> Iterator[str]:
    if facts.eviction and facts.eviction != "noeviction":
        yield (
            f"the lease store may evict leases (maxmemory-policy {facts.eviction}): "
            "set it to noeviction, or use a server of its own for leases"
        )


def _of_clock(offset: float) -> Iterator[str]:
    if abs(offset) > _CLOCK_OFFSET:
        yield (
            f"the lease store's clock is {offset:+.0f} s off this host's: "
            "synchronise both, for fences follow that clock"
        )
