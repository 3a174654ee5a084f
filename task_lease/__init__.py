"""Leases for work that must not run twice at a time.

What is *not* guaranteed: a lease cannot give mutual exclusion by itself, as no lock
service can in a network that may pause. A holder that was stopped for longer than its
ttl goes on for a moment beside the next one. The lease makes overlap rare and short;
the fence, a number that grows with every acquisition, makes it harmless where what
you write to refuses a lower one. Nobody can detect a virtual machine that is paused
or cloned as a whole, or an old primary that still answers after a failover.
"""

from __future__ import annotations

from task_lease.client import Leases
from task_lease.config import LeaseConfig
from task_lease.errors import (
    Holder,
    InvalidArgument,
    InvalidConfig,
    LeaseConflict,
    LeaseError,
    LeaseLost,
    StaleFence,
    StoreUnavailable,
)
from task_lease.exclusive import current_lease
from task_lease.lease import Lease
from task_lease.observers import LeaseEvent, log_event

__all__ = [
    "Holder",
    "InvalidArgument",
    "InvalidConfig",
    "Lease",
    "LeaseConfig",
    "LeaseConflict",
    "LeaseError",
    "LeaseEvent",
    "LeaseLost",
    "Leases",
    "StaleFence",
    "StoreUnavailable",
    "current_lease",
    "log_event",
]
