"""How a job waits beside its lease, or comes back later where it cannot.

A parked job looks like one that waits for another: its status is deferred, and it is in
the registry of deferred jobs, so RQ's own tools show it, cancel it and delete it. The
release of the lease puts it back to the front of its queue. What the store cannot do
in its own step, since it would have to know RQ's version, is done here.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from rq.job import JobStatus
from rq.utils import as_text, current_timestamp, utcformat
from rq.version import VERSION

from rq_lease.tries import Comeback
from task_lease.claims import Park

if TYPE_CHECKING:
    from rq import Queue
    from rq.job import Job
    from rq.worker import BaseWorker

    from task_lease.exclusive import Later

#: RQ's major version, which decides about a few of its habits.
MAJOR = int(VERSION.split(".", maxsplit=1)[0])

# The field in which the store notes the run that was given up when it parked a job.
_EXECUTION = "lease_execution"


def park_of(job: Job, queue: Queue, execution_id: str) -> Park | None:
    """Return how a job is parked, None if it cannot be.

    Args:
        job: The job as it was popped.
        queue: The queue it came from.
        execution_id: The run that is given up.
    """
    if getattr(job, "has_rate_limit", False):
        # It must go through RQ's own gate again.
        return None
    return Park(
        id=job.id,
        attempt=utcformat(job.enqueued_at) if job.enqueued_at else "",
        job=_text(job.key),
        queue=queue.key,
        queues=queue.redis_queues_keys,
        deferred=queue.deferred_job_registry.key,
        # Before RQ 3.0 any other score is an instant at which the job is failed.
        score=str(current_timestamp()) if MAJOR > 2 else "+inf",  # noqa: PLR2004
        execution=execution_id,
        started=queue.started_job_registry.key,
        intermediate=queue.intermediate_queue_key,
    )


def forget_execution(worker: BaseWorker, job: Job, *execution: Any) -> None:
    """Let RQ forget the run of a job that was parked; may be done twice.

    Args:
        worker: The worker that runs it.
        job: The job.
        *execution: The run, where RQ's version hands it around.
    """
    with worker.connection.pipeline() as pipeline:
        worker.cleanup_execution(job, pipeline, *execution)
        pipeline.execute()


def prolong_execution(
    worker: BaseWorker, job: Job, seconds: float, *execution: Any
) -> None:
    """Let RQ take the run of a job for abandoned only so much later.

    Args:
        worker: The worker that runs it.
        job: The job.
        seconds: How long it waits beside its own time.
        *execution: The run, where RQ's version hands it around.
    """
    run: Any = execution[0] if execution else worker.execution
    ttl = worker.get_heartbeat_ttl(job) + math.ceil(seconds)
    with worker.connection.pipeline() as pipeline:
        worker.heartbeat(ttl, pipeline=pipeline)
        run.heartbeat(job.started_job_registry, ttl, pipeline=pipeline)
        pipeline.execute()


def was_parked(job: Job, execution_id: str) -> bool:
    """Return whether a run of a job ended with the job being parked."""
    found = job.connection.hget(job.key, _EXECUTION)
    return isinstance(found, (bytes, str)) and _text(found) == execution_id


def come_back(
    worker: BaseWorker, job: Job, queue: Queue, later: Later, *execution: Any
) -> None:
    """Give a run up and schedule the job: the fallback where nothing can be parked.

    It takes a worker with a scheduler to come back. All is written at once, so the job
    is not lost when the process dies here.

    Args:
        worker: The worker that runs it.
        job: The job.
        queue: The queue it came from.
        later: When to come back, and what the job shall carry.
        *execution: The run, where RQ's version hands it around.
    """
    at = datetime.now(timezone.utc) + timedelta(seconds=max(later.delay, 1.0))
    with worker.connection.pipeline() as pipeline:
        job.set_status(JobStatus.SCHEDULED, pipeline=pipeline)
        queue.schedule_job(job, at, pipeline=pipeline)
        Comeback(later.tries, job.number_of_retries).note(job, later.tries, pipeline)
        worker.cleanup_execution(job, pipeline, *execution)
        pipeline.lrem(queue.intermediate_queue_key, 1, job.id)
        pipeline.execute()
    _free_slot(job)


def _free_slot(job: Job) -> None:
    if getattr(job, "has_rate_limit", False):
        from rq.rate_limit import release_slot  # noqa: PLC0415 - not before RQ 3.0

        release_slot(job)


def _text(value: bytes | str) -> str:
    return str(as_text(value))
