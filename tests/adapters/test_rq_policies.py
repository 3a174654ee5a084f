from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from adapters import rq_tasks
from adapters.rq_workers import CLASSES, PATIENCE, Workers, pid_in, wait_for
from harness import eventually
from histories import find_falling_fences, find_overlaps, read_history
from rq import Callback, Queue, Repeat, Retry
from rq.job import Job
from rq.serializers import JSONSerializer

from task_lease import Lease, Leases
from task_lease.claims import Claim
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    from pathlib import Path

    import redis


@pytest.mark.parametrize("worker_class", CLASSES)
def test_job_runs_under_its_lease_on_each_worker(
    rq_workers: Workers,
    rq_queue: Queue,
    history: Path,
    client: redis.Redis,
    worker_class: str,
) -> None:
    rq_workers.start(worker_class=worker_class)

    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")

    assert wait_for(job, "finished", "failed") == "finished"
    assert job.return_value() == read_history(history)[0].fence
    eventually(
        lambda: not client.exists("tl1:{run:a}"), PATIENCE, "the lease is released"
    )


def record_of(job: Job) -> dict[str, Any]:
    record = job.return_value()
    assert isinstance(record, dict)
    return record


def test_duplicate_is_skipped_with_a_record_and_dependents_go_on(
    rq_workers: Workers, rq_queue: Queue, history: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        rq_workers.start()
    holder = rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 60)
    pid_in(tmp_path / "pid")

    skipped = rq_queue.enqueue(rq_tasks.run_or_skip, str(history), "a")
    dependent = rq_queue.enqueue(rq_tasks.run, str(history), "b", depends_on=skipped)

    assert wait_for(dependent, "finished", "failed") == "finished"
    record = record_of(skipped)
    assert record["skipped"] is True
    assert record["lease"] == "run:a"
    assert record["holder"]["id"] == holder.id
    assert [run.key for run in read_history(history)] == ["b"]


def test_duplicate_fails_with_conflict_and_rq_tries_it_again(
    rq_workers: Workers, rq_queue: Queue, history: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        rq_workers.start()
    rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 60)
    pid_in(tmp_path / "pid")

    job = rq_queue.enqueue(rq_tasks.run_or_raise, str(history), "a", retry=Retry(max=1))

    assert wait_for(job, "finished", "failed") == "failed"
    assert Job.fetch(job.id, rq_queue.connection).retries_left == 0
    result = job.latest_result()
    assert result is not None
    assert "LeaseConflict" in (result.exc_string or "")
    assert not history.exists()


def test_duplicate_waits_longer_than_its_own_timeout(
    rq_workers: Workers, rq_queue: Queue, history: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        rq_workers.start()
    rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 2.5)
    pid_in(tmp_path / "pid")

    job = rq_queue.enqueue(rq_tasks.run_or_wait, str(history), "a", job_timeout=1)

    assert wait_for(job, "finished", "failed") == "finished"


@pytest.mark.parametrize("worker_class", CLASSES)
def test_duplicate_is_parked_and_runs_when_the_lease_ends(
    rq_workers: Workers,
    rq_queue: Queue,
    history: Path,
    tmp_path: Path,
    worker_class: str,
) -> None:
    for _ in range(2):
        rq_workers.start(worker_class=worker_class)
    holder = rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 2)
    pid_in(tmp_path / "pid")

    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")

    wait_for(job, "deferred")
    assert rq_queue.deferred_job_registry.get_job_ids() == [job.id]
    assert job.id not in rq_queue.started_job_registry.get_job_ids()
    assert wait_for(job, "finished", "failed") == "finished"
    assert holder.get_status() == "finished"
    assert len(rq_queue.started_job_registry) == 0


def test_parked_job_runs_when_its_worker_was_restarted(
    rq_workers: Workers, rq_queue: Queue, history: Path, tmp_path: Path
) -> None:
    first, second = rq_workers.start(), rq_workers.start()
    rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 60)
    pid_in(tmp_path / "pid")
    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    wait_for(job, "deferred")
    for worker in (first, second):
        worker.kill9_all()

    rq_workers.start()

    assert wait_for(job, "finished", "failed") == "finished"


@pytest.mark.parametrize(
    "worker_class", [*CLASSES, "rq.Worker", "rq.worker.SimpleWorker"]
)
def test_chain_of_one_key_loses_no_link_when_duplicates_are_skipped(
    rq_workers: Workers, rq_queue: Queue, history: Path, worker_class: str
) -> None:
    links = 5
    for _ in range(2):
        rq_workers.start("--with-scheduler", worker_class=worker_class)

    rq_queue.enqueue(rq_tasks.go_on, str(history), "a", links)

    eventually(lambda: len(read_history(history)) == links, PATIENCE, "all links ran")
    runs = read_history(history)
    assert not find_overlaps(runs)
    assert not find_falling_fences(runs)


def test_follower_knows_its_parent_in_whatever_way_it_is_enqueued(
    rq_workers: Workers, rq_queue: Queue, history: Path
) -> None:
    for _ in range(2):
        rq_workers.start()
    finished = rq_queue.finished_job_registry

    many = rq_queue.enqueue(rq_tasks.go_on_in_many_ways, str(history), "a")
    one = rq_queue.enqueue(
        rq_tasks.go_on,
        str(history),
        "b",
        1,
        on_success=Callback(rq_tasks.enqueue_after),
    )

    eventually(lambda: len(finished) == 6, PATIENCE, "all of them ended")
    jobs = Job.fetch_many(finished.get_job_ids(), rq_queue.connection)
    parents = [job.meta.get("lease_parent") for job in jobs if job]
    assert parents.count(many.id) == 3
    assert parents.count(one.id) == 1
    assert not find_overlaps(read_history(history))


@pytest.mark.parametrize("known", ["depends_on", "meta"])
def test_job_is_no_duplicate_of_its_parent_when_that_still_holds_the_lease(
    rq_workers: Workers, rq_queue: Queue, history: Path, url: str, known: str
) -> None:
    rq_workers.start()
    parent = rq_queue.enqueue(rq_tasks.run, str(history), "other")
    wait_for(parent, "finished")
    lease = Leases(url).ask(Claim("run:a", 10.0, id=parent.id))
    assert isinstance(lease, Lease)
    about = {"depends_on": parent, "meta": {"lease_parent": parent.id}}

    job = rq_queue.enqueue(
        rq_tasks.run_or_skip, str(history), "a", **{known: about[known]}
    )

    wait_for(job, "deferred", "finished")
    lease.release()
    wait_for(job, "finished")
    assert [run.key for run in read_history(history)] == ["other", "a"]


def test_repeats_and_retries_of_a_job_are_no_duplicates_of_it(
    rq_workers: Workers, rq_queue: Queue, history: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        rq_workers.start()

    rq_queue.enqueue(rq_tasks.run_or_skip, str(history), "a", repeat=Repeat(times=3))
    failing = rq_queue.enqueue(
        rq_tasks.fail_once, str(tmp_path / "failing"), "b", retry=Retry(max=1)
    )
    returning = rq_queue.enqueue(rq_tasks.return_retry, str(tmp_path / "back"), "c", 2)

    eventually(lambda: len(read_history(history)) == 4, PATIENCE, "all repeats ran")
    assert wait_for(failing, "finished") == "finished"
    assert wait_for(returning, "finished") == "finished"
    assert len(read_history(tmp_path / "back")) == 3


def test_job_never_runs_beside_itself_when_its_id_is_twice_in_the_queue(
    rq_workers: Workers, rq_queue: Queue, history: Path, client: redis.Redis
) -> None:
    job = rq_queue.enqueue(rq_tasks.run_or_skip, str(history), "a", 1.0)
    client.rpush(rq_queue.key, job.id)

    for _ in range(2):
        rq_workers.start()

    wait_for(job, "finished")
    eventually(lambda: client.zcard(lease_keys("run:a").parked) == 0, PATIENCE, "drop")
    assert len(read_history(history)) == 1


def test_job_runs_again_after_itself_when_it_was_requeued_while_it_ran(
    rq_workers: Workers, rq_queue: Queue, history: Path
) -> None:
    for _ in range(2):
        rq_workers.start()
    job = rq_queue.enqueue(rq_tasks.run_or_skip, str(history), "a", 1.5)
    wait_for(job, "started")

    rq_queue.enqueue_job(job)

    eventually(lambda: len(read_history(history)) == 2, PATIENCE, "it ran twice")
    assert not find_overlaps(read_history(history))


def test_parked_job_keeps_nobody_back_when_it_is_cancelled(
    rq_workers: Workers, rq_queue: Queue, history: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        rq_workers.start()
    rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 2.0)
    pid_in(tmp_path / "pid")
    cancelled = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    wait_for(cancelled, "deferred")
    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    wait_for(job, "deferred")

    Job.fetch(cancelled.id, connection=rq_queue.connection).cancel()

    assert wait_for(job, "finished", "failed") == "finished"
    assert cancelled.get_status() == "canceled"
    assert len(read_history(history)) == 1


def test_json_serializer_carries_jobs_and_records(
    rq_workers: Workers, client: redis.Redis, history: Path, url: str
) -> None:
    serializer = "rq.serializers.JSONSerializer"
    queue = Queue("reports", connection=client, serializer=JSONSerializer)
    rq_workers.start("--serializer", serializer)
    lease = Leases(url).try_acquire("run:a")
    assert lease is not None

    skipped = queue.enqueue(rq_tasks.run_or_skip, str(history), "a")
    retried = queue.enqueue(rq_tasks.run_or_retry, str(history), "a")

    wait_for(skipped, "finished")
    assert record_of(skipped)["lease"] == "run:a"
    wait_for(retried, "deferred")
    lease.release()
    assert wait_for(retried, "finished", "failed") == "finished"
