"""Exclusive jobs for RQ.

Write ``@exclusive(...)`` on a job's function, or `job` in place of RQ's own, and start
``rq worker -w rq_lease.LeaseWorker``: a job runs once at a time for the same arguments,
across processes and machines. What a lease can *not* give is said in `task_lease`;
``current_lease().fence`` is what makes the rest harmless.
"""

from __future__ import annotations

from rq_lease.job import exclusive, job
from rq_lease.worker import LeaseSimpleWorker, LeaseSpawnWorker, LeaseWorker, Leasing
from task_lease import current_lease

__all__ = [
    "LeaseSimpleWorker",
    "LeaseSpawnWorker",
    "LeaseWorker",
    "Leasing",
    "current_lease",
    "exclusive",
    "job",
]
