"""The Celery side: ``celery -A example_project.app worker -Q invoices``.

The tasks below whose names the functions in `example_project.jobs` bear as well share
their leases with those, so that Celery and RQ exclude each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Celery

from celery_lease import ExclusiveTask
from example_project import work
from example_project.settings import key_for
from example_project.stage import recorder

if TYPE_CHECKING:
    from task_lease import Lease

app = Celery("example_project")
app.config_from_object("example_project.settings")
recorder.record_leases()
recorder.record_workers()


@app.task(base=ExclusiveTask, bind=True, lease_key=key_for("invoice:{number}"))
def issue_invoice(self: Any, number: int, seconds: float) -> str:
    """Issue an invoice. A duplicate is skipped, which is the default."""
    lease: Lease = self.lease
    return work.do_once(lease, f"invoice:{number}", "issued", seconds)


@app.task(
    base=ExclusiveTask,
    bind=True,
    lease_key=key_for("invoice:{number}"),
    lease_on_conflict="wait",
)
def settle_invoice(self: Any, number: int, seconds: float) -> str:
    """Settle an invoice; when its lease is lost, it tries to save what it has."""
    lease: Lease = self.lease
    return work.do_once_and_save(lease, f"invoice:{number}", "settled", seconds)


@app.task(
    base=ExclusiveTask,
    bind=True,
    lease_key=key_for("statements:{month}"),
    lease_on_conflict="wait",
)
def build_statements(self: Any, month: str) -> str:
    """Build the statements of a month, until its last figures are in.

    A duplicate waits, and finds them built.
    """
    lease: Lease = self.lease
    entry, figures = f"statements:{month}", f"figures:{month}"
    return work.do_once_complete(lease, entry, "built", figures)


@app.task(
    base=ExclusiveTask,
    bind=True,
    name="invoices.count_payment",
    lease_key=key_for("balance:{customer}"),
    lease_on_conflict="wait",
)
def count_payment(self: Any, customer: str, seconds: float) -> str:
    """Count a payment of a customer. Each counts, but one at a time."""
    lease: Lease = self.lease
    return work.count_up(lease, f"balance:{customer}", seconds)


@app.task(
    base=ExclusiveTask,
    bind=True,
    name="invoices.import_payments",
    lease_key=key_for("payments:{file}"),
    lease_on_conflict="wait",
)
def import_payments(self: Any, file: str, seconds: float) -> str:
    """Import the payments in a file of the bank. A duplicate waits."""
    lease: Lease = self.lease
    return work.do_once(lease, f"payments:{file}", "imported", seconds)


@app.task(
    base=ExclusiveTask,
    bind=True,
    name="invoices.close_month",
    lease_key=key_for("month:{month}"),
)
def close_month(self: Any, month: str, seconds: float) -> str:
    """Close a month. A duplicate is skipped."""
    lease: Lease = self.lease
    return work.do_once(lease, f"month:{month}", "closed", seconds)
