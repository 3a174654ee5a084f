"""Lets a job know which job enqueued it, so that it is no duplicate of that one.

RQ does not note it. While a job runs under its lease, what it creates is marked, in
whatever way it is enqueued.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rq.job import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The entry of a job's meta that names the job which enqueued it.
PARENT = "lease_parent"

_parent: ContextVar[str] = ContextVar("rq_lease_parent", default="")


class _Horse:
    """The job for which a whole process works, whichever its threads are."""

    job_id = ""


@contextmanager
def sending(job: Job, *, in_horse: bool) -> Iterator[None]:
    """Mark what is created meanwhile as sent by a job.

    Args:
        job: The job that runs.
        in_horse: Whether this process has nothing else to do, so that what its other
            threads create is the job's, too.
    """
    _watch_creation()
    if in_horse:
        _Horse.job_id = job.id
    token = _parent.set(job.id)
    try:
        yield
    finally:
        _parent.reset(token)
        _Horse.job_id = ""


@functools.cache
def _watch_creation() -> None:
    """Have RQ note the parent wherever a job is created, once per process.

    All of RQ's ways to enqueue create the job there, and it has no hook of its own.
    """
    create: Any = vars(Job)["create"].__func__

    @functools.wraps(create)
    def create_by_parent(cls: type[Job], *args: Any, **kwargs: Any) -> Job:
        job: Job = create(cls, *args, **kwargs)
        parent = _parent.get() or _Horse.job_id
        if parent:
            # A copy, for it is the sender's own dictionary.
            job.meta = {**job.meta, PARENT: parent}
        return job

    Job.create = classmethod(create_by_parent)  # type: ignore[method-assign,assignment]
