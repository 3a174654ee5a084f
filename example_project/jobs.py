"""The RQ side: ``rq worker -w example_project.jobs.Worker reports``.

``-w rq_lease.LeaseWorker`` does the same for the leases; a class of our own has the
worker import this module, which is then not imported anew for every job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import rq_lease
from example_project import work
from example_project.settings import TTL, WAIT, key_for
from example_project.stage import recorder

if TYPE_CHECKING:
    from task_lease import Lease

recorder.record_leases()


class Worker(rq_lease.LeaseWorker):
    """The worker of this application."""


@rq_lease.exclusive(
    name="invoices.count_payment",
    key=key_for("balance:{customer}"),
    ttl=TTL,
    on_conflict="retry",
)
def count_payment(customer: str, seconds: float) -> str:
    """Count a payment. A duplicate is parked, and the worker goes on meanwhile."""
    return work.count_up(_lease(), f"balance:{customer}", seconds)


@rq_lease.exclusive(
    name="invoices.import_payments",
    key=key_for("payments:{file}"),
    ttl=TTL,
    on_conflict="wait",
    wait=WAIT,
)
def import_payments(file: str, seconds: float) -> str:
    """Import the payments in a file of the bank. A duplicate waits."""
    return work.do_once(_lease(), f"payments:{file}", "imported", seconds)


@rq_lease.exclusive(name="invoices.close_month", key=key_for("month:{month}"), ttl=TTL)
def close_month(month: str, seconds: float) -> str:
    """Close a month. A duplicate is skipped."""
    return work.do_once(_lease(), f"month:{month}", "closed", seconds)


def _lease() -> Lease:
    lease = rq_lease.current_lease()
    if lease is None:
        message = "this runs as a job"
        raise LookupError(message)
    return lease
