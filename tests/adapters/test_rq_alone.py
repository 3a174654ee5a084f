from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from adapters import rq_tasks
from adapters.rq_workers import Workers, wait_for
from rq.job import Job

from task_lease import Leases

if TYPE_CHECKING:
    from pathlib import Path

    import redis
    from rq import Queue


@pytest.mark.parametrize("worker_class", ["rq.Worker", "rq.SimpleWorker"])
def test_decorated_job_takes_its_lease_when_the_worker_knows_none(
    rq_workers: Workers,
    rq_queue: Queue,
    history: Path,
    client: redis.Redis,
    worker_class: str,
) -> None:
    rq_workers.start(worker_class=worker_class)

    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    coroutine = rq_queue.enqueue(rq_tasks.run_async, str(history), "b")

    wait_for(job, "finished")
    wait_for(coroutine, "finished")
    assert job.return_value() is not None
    assert coroutine.return_value() is not None
    assert not client.exists("tl1:{run:a}")


@pytest.mark.parametrize("worker_class", ["rq.Worker", "rq.SimpleWorker"])
def test_decorated_job_waits_in_place_when_the_worker_cannot_park(
    rq_workers: Workers, rq_queue: Queue, history: Path, url: str, worker_class: str
) -> None:
    lease = Leases(url).try_acquire("run:a")
    assert lease is not None
    rq_workers.start(worker_class=worker_class)
    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    wait_for(job, "started")

    lease.release()

    assert wait_for(job, "finished", "failed") == "finished"


@pytest.mark.parametrize("worker_class", ["rq.Worker", "rq.SimpleWorker"])
def test_decorated_job_is_scheduled_when_it_has_waited_in_place(
    rq_workers: Workers, rq_queue: Queue, history: Path, url: str, worker_class: str
) -> None:
    name = "adapters.rq_tasks.run_or_come_back:a"
    lease = Leases(url).try_acquire(name)
    assert lease is not None
    rq_workers.start("--with-scheduler", worker_class=worker_class)
    job = rq_queue.enqueue(rq_tasks.run_or_come_back, str(history), "a")
    wait_for(job, "scheduled")

    lease.release()

    assert wait_for(job, "finished", "failed") == "finished"
    assert not Job.fetch(job.id, rq_queue.connection).number_of_retries
