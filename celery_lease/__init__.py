"""Exclusive tasks for Celery.

Import this, write ``@app.task(base=ExclusiveTask)`` or set ``app.conf.lease_queues``,
and a task runs once at a time for the same arguments, across processes and machines.
What a lease can *not* give is said in `task_lease`; ``self.lease.fence`` is what makes
the rest harmless.
"""

from __future__ import annotations

from celery_lease import lifecycle
from celery_lease.task import ExclusiveTask
from task_lease import current_lease

__all__ = ["ExclusiveTask", "current_lease"]

lifecycle.connect()
