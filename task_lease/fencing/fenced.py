"""For what a resource is claimed."""

from __future__ import annotations

from typing import Protocol

from task_lease.errors import StaleFence


class Fenced(Protocol):
    """For what a resource is claimed: a `Lease`, held or lost."""

    @property
    def owner(self) -> str:
        """The text that is unique per acquisition."""

    @property
    def fence(self) -> int | None:
        """The number that grows from holder to holder."""


def fence_of(lease: Fenced, resource: str) -> int:
    """Return the lease's fence.

    Raises:
        StaleFence: If it has none: an unguarded run passes no guard.
    """
    if lease.fence is None:
        raise StaleFence(resource, None, None)
    return lease.fence


def passes(lease: Fenced, fence: int | None, owner: str | None) -> bool:
    """Return whether a lease passes where a fence and its owner were seen last.

    Equal fences pass only for the same owner: the two sides of a failover can issue
    one number.
    """
    if lease.fence is None:
        return False
    return (
        fence is None
        or lease.fence > fence
        or (lease.fence, lease.owner) == (fence, owner)
    )
