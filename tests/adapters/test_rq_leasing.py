from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from adapters import rq_tasks
from adapters.rq_workers import PATIENCE, RQ3, Workers, pid_in, wait_for
from harness import eventually, list_living
from histories import find_overlaps, read_history
from rq import Queue, Retry
from rq.job import Job, JobStatus

from rq_lease import LeaseSimpleWorker, LeaseWorker
from rq_lease.guard import claim_of
from rq_lease.parking import park_of
from rq_lease.report import HorseReport, tell_worker
from task_lease import LeaseConfig, Leases
from task_lease.answers import Parked
from task_lease.parking import Parking

if TYPE_CHECKING:
    from pathlib import Path

    import redis


def nothing() -> None:
    pass


def test_report_of_a_horse_is_heard_line_by_line() -> None:
    report = HorseReport()

    tell_worker(lease="a")
    first = list(report.heard())
    tell_worker(waits=1.5)
    tell_worker(lease=None)
    rest = list(report.heard())
    report.close()
    tell_worker(lease="nobody listens")

    assert first == [{"lease": "a"}]
    assert rest == [{"waits": 1.5}, {"lease": None}]


def test_report_goes_on_when_a_name_is_too_long_for_it() -> None:
    report = HorseReport()

    tell_worker(lease="x" * 200_000)
    for _ in range(5):
        list(report.heard())
    tell_worker(waits=1)
    tell_worker(waits=2)

    assert {"waits": 2} in list(report.heard())
    report.close()


def parked_run(
    worker: LeaseWorker, queue: Queue, url: str
) -> tuple[Job, tuple[Any, ...]]:
    """Park a job as its horse does, and leave the rest undone."""
    sent = queue.enqueue(nothing)
    queue.pop_job_id()
    job = Job.fetch(sent.id, connection=queue.connection)
    execution = worker.prepare_execution(job)
    claim = claim_of(job, queue.name, "t", "invoices:7", LeaseConfig())
    park = park_of(job, queue, execution.id)
    assert park is not None
    claim = claim._replace(park=park)
    answer = Parking(Leases(url)).park(claim, park, counts=True, limit=None)
    assert isinstance(answer, Parked)
    return job, (execution,) if RQ3 else ()


def fail(worker: LeaseWorker, job: Job, queue: Queue, execution: Any) -> None:
    known = {"execution": execution[0]} if execution else {}
    worker.handle_job_failure(job, queue, exc_string="Work-horse terminated", **known)


def test_parked_job_is_not_failed_when_its_horse_was_killed_right_then(
    client: redis.Redis, url: str
) -> None:
    queue = Queue("reports", connection=client)
    worker = LeaseWorker([queue], connection=client)
    lease = Leases(url).try_acquire("invoices:7")
    assert lease is not None
    job, execution = parked_run(worker, queue, url)

    fail(worker, job, queue, execution)
    before = job.get_status()
    lease.release()

    assert before == JobStatus.DEFERRED
    assert queue.job_ids == [job.id]
    assert len(queue.failed_job_registry) == 0
    assert client.keys("rq:execution*") == []


def test_job_is_failed_when_a_later_run_of_it_was_killed(
    client: redis.Redis, url: str
) -> None:
    queue = Queue("reports", connection=client)
    worker = LeaseWorker([queue], connection=client)
    lease = Leases(url).try_acquire("invoices:7")
    assert lease is not None
    job, _ = parked_run(worker, queue, url)
    lease.release()
    execution = worker.prepare_execution(job)

    fail(worker, job, queue, (execution,) if RQ3 else ())

    assert job.get_status() == JobStatus.FAILED


def test_stopped_job_is_stopped_when_it_was_parked_in_that_moment(
    client: redis.Redis, url: str
) -> None:
    queue = Queue("reports", connection=client)
    worker = LeaseWorker([queue], connection=client)
    lease = Leases(url).try_acquire("invoices:7")
    assert lease is not None
    job, execution = parked_run(worker, queue, url)
    worker._stopped_job_id = job.id

    fail(worker, job, queue, execution)
    lease.release()

    assert job.get_status() == JobStatus.STOPPED
    assert queue.job_ids == []


def test_wait_adds_to_the_timeout_that_the_worker_watches(client: redis.Redis) -> None:
    queue = Queue("reports", connection=client)
    worker = LeaseWorker([queue], connection=client)
    job = queue.enqueue(nothing, job_timeout=10)
    worker._job, worker._report = job, HorseReport()

    tell_worker(waits=60)
    worker._listen()
    allowed = job.timeout
    fail(worker, job, queue, (worker.prepare_execution(job),) if RQ3 else ())
    worker._report.close()

    assert allowed == 70
    assert Job.fetch(job.id, connection=client).timeout == 10


def test_waiting_run_is_not_abandoned_when_nobody_beats_for_it(
    rq_workers: Workers, rq_queue: Queue, history: Path, url: str, client: redis.Redis
) -> None:
    lease = Leases(url).try_acquire("run:a")
    assert lease is not None
    rq_workers.start(worker_class="rq_lease.LeaseSimpleWorker")

    job = rq_queue.enqueue(rq_tasks.run_or_wait, str(history), "a", job_timeout=1)

    def seconds() -> float:
        found = client.zrange(rq_queue.started_job_registry.key, 0, 0, withscores=True)
        return float(found[0][1]) - time.time() if found else 0.0

    eventually(lambda: seconds() > 110, PATIENCE, "its run lives for the wait as well")
    lease.release()
    assert wait_for(job, "finished", "failed") == "finished"


def test_job_never_runs_beside_itself_when_it_was_swept_as_abandoned(
    rq_workers: Workers, rq_queue: Queue, history: Path, tmp_path: Path
) -> None:
    worker = rq_workers.start()
    job = rq_queue.enqueue(
        rq_tasks.hold_and_run,
        str(tmp_path / "pid"),
        str(history),
        3.0,
        retry=Retry(max=1),
    )
    horse = pid_in(tmp_path / "pid")
    worker.kill9()
    rq_workers.start()

    rq_queue.started_job_registry.cleanup(timestamp=int(time.time()) + 1000)

    eventually(lambda: len(read_history(history)) == 2, PATIENCE, "it ran once more")
    assert not find_overlaps(read_history(history))
    wait_for(job, "finished")
    assert horse not in [stat.pid for stat in list_living()]


def test_worker_leaves_the_lease_when_its_horse_lives_on(
    rq_workers: Workers, rq_queue: Queue, tmp_path: Path, client: redis.Redis
) -> None:
    worker = rq_workers.start()
    rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a")
    horse = pid_in(tmp_path / "pid")

    worker.kill9()
    rq_workers.start()
    duplicate = rq_queue.enqueue(rq_tasks.run_or_retry, str(tmp_path / "log"), "a")

    wait_for(duplicate, "deferred")
    assert client.exists("tl1:{run:a}")
    os.killpg(horse, signal.SIGKILL)
    wait_for(duplicate, "finished")


@pytest.mark.skipif(not RQ3, reason="RQ 2 has no rate limits")
def test_rate_limited_job_comes_back_through_the_gate(
    client: redis.Redis, url: str, history: Path
) -> None:
    from rq import RateLimit  # noqa: PLC0415 - not in RQ 2

    queue = Queue("reports", connection=client)
    lease = Leases(url).try_acquire("run:a")
    assert lease is not None
    limit = RateLimit("gate", concurrency=1)
    job = queue.enqueue(rq_tasks.run_or_retry, str(history), "a", rate_limit=limit)
    other = queue.enqueue(rq_tasks.run, str(history), "b", rate_limit=limit)

    LeaseSimpleWorker([queue], connection=client).work(burst=True)

    assert job.get_status() == JobStatus.SCHEDULED
    assert other.get_status() == JobStatus.FINISHED
