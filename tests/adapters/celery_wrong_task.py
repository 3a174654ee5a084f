"""A task that nobody can use, for a worker that shall not start."""

from __future__ import annotations

from celery import shared_task

from celery_lease import ExclusiveTask


@shared_task(base=ExclusiveTask, lease_on_conflict="drop")
def wrong() -> None:
    pass
