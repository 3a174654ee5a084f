from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from adapters import rq_tasks
from adapters.rq_workers import LEASE_WORKER, PATIENCE, Workers, pid_in, wait_for
from harness import eventually, free_port
from histories import find_falling_fences, find_overlaps, read_history
from rq import Callback, Queue, Repeat, Retry
from rq.command import send_stop_job_command
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.version import VERSION

from task_lease import Leases
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis
    from harness import Process

RQ3 = int(VERSION.split(".", maxsplit=1)[0]) >= 3
CLASSES = [
    LEASE_WORKER,
    "rq_lease.LeaseSimpleWorker",
    pytest.param(
        "rq_lease.LeaseSpawnWorker",
        marks=pytest.mark.skipif(not RQ3, reason="RQ 2 cannot"),
    ),
]


@pytest.fixture
def workers(spawn: Callable[..., Process], url: str) -> Workers:
    return Workers(spawn, url)


@pytest.fixture
def queue(client: redis.Redis) -> Queue:
    return Queue("reports", connection=client)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "history"


@pytest.mark.parametrize("worker_class", CLASSES)
def test_job_runs_under_its_lease_on_each_worker(
    workers: Workers, queue: Queue, log: Path, client: redis.Redis, worker_class: str
) -> None:
    workers.start(worker_class=worker_class)

    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")

    assert wait_for(job, "finished", "failed") == "finished"
    assert job.return_value() == read_history(log)[0].fence
    eventually(
        lambda: not client.exists("tl1:{run:a}"), PATIENCE, "the lease is released"
    )


# The four policies.


def test_duplicate_is_skipped_with_a_record_and_dependents_go_on(
    workers: Workers, queue: Queue, log: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        workers.start()
    holder = queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 60)
    pid_in(tmp_path / "pid")

    skipped = queue.enqueue(rq_tasks.run_or_skip, str(log), "a")
    dependent = queue.enqueue(rq_tasks.run, str(log), "b", depends_on=skipped)

    assert wait_for(dependent, "finished", "failed") == "finished"
    record = skipped.return_value()
    assert record["skipped"] is True
    assert record["lease"] == "run:a"
    assert record["holder"]["id"] == holder.id
    assert [run.key for run in read_history(log)] == ["b"]


def test_duplicate_fails_with_conflict_and_rq_tries_it_again(
    workers: Workers, queue: Queue, log: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        workers.start()
    queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 60)
    pid_in(tmp_path / "pid")

    job = queue.enqueue(rq_tasks.run_or_raise, str(log), "a", retry=Retry(max=1))

    assert wait_for(job, "finished", "failed") == "failed"
    job.refresh()
    assert job.retries_left == 0
    result = job.latest_result()
    assert result is not None
    assert "LeaseConflict" in (result.exc_string or "")
    assert not log.exists()


def test_duplicate_waits_longer_than_its_own_timeout(
    workers: Workers, queue: Queue, log: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        workers.start()
    queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 2.5)
    pid_in(tmp_path / "pid")

    job = queue.enqueue(rq_tasks.run_or_wait, str(log), "a", job_timeout=1)

    assert wait_for(job, "finished", "failed") == "finished"


@pytest.mark.parametrize("worker_class", CLASSES)
def test_duplicate_is_parked_and_runs_when_the_lease_ends(
    workers: Workers, queue: Queue, log: Path, tmp_path: Path, worker_class: str
) -> None:
    for _ in range(2):
        workers.start(worker_class=worker_class)
    holder = queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 2)
    pid_in(tmp_path / "pid")

    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")

    wait_for(job, "deferred")
    assert queue.deferred_job_registry.get_job_ids() == [job.id]
    assert job.id not in queue.started_job_registry.get_job_ids()
    assert wait_for(job, "finished", "failed") == "finished"
    assert holder.get_status() == "finished"
    assert len(queue.started_job_registry) == 0


def test_parked_job_runs_when_its_worker_was_restarted(
    workers: Workers, queue: Queue, log: Path, tmp_path: Path
) -> None:
    first, second = workers.start(), workers.start()
    queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 60)
    pid_in(tmp_path / "pid")
    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    wait_for(job, "deferred")
    for worker in (first, second):
        worker.kill9_all()

    workers.start()

    assert wait_for(job, "finished", "failed") == "finished"


# Settings.


def test_plain_job_is_leased_when_its_queue_is_configured_by_variable(
    workers: Workers, queue: Queue, log: Path
) -> None:
    configured = {"RQ_LEASE_QUEUES": '{"reports": {"ttl": 3, "on_conflict": "retry"}}'}
    workers.start(env=configured)

    job = queue.enqueue(rq_tasks.run, str(log), "a")

    wait_for(job, "finished")
    assert job.return_value() is not None


def test_plain_job_is_leased_when_its_queue_is_configured_on_the_class(
    workers: Workers, client: redis.Redis, log: Path
) -> None:
    workers.start(
        worker_class="adapters.rq_tasks.ClassConfigured", queues=["plain", "other"]
    )

    leased = Queue("plain", connection=client).enqueue(rq_tasks.run, str(log), "a")
    bare = Queue("other", connection=client).enqueue(rq_tasks.run, str(log), "a")

    wait_for(leased, "finished")
    wait_for(bare, "finished")
    assert leased.return_value() is not None
    assert bare.return_value() is None


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("RQ_LEASE_QUEUES", "{reports", "is no JSON"),
        ("RQ_LEASE_QUEUES", '["reports"]', "must map names of queues"),
        (
            "RQ_LEASE_QUEUES",
            '{"reports": {"ttl": 0}}',
            "RQ_LEASE_QUEUES['reports']['ttl']=0: must be at least 0.1",
        ),
        ("RQ_LEASE_QUEUES", '{"reports": {"tll": 3}}', "['tll']=3: is no setting"),
        ("RQ_LEASE_TTL", "NaN", "RQ_LEASE_TTL=nan: must be at least"),
        ("RQ_LEASE_ON_CONFLICT", "never", "must be one of skip, retry, wait, raise"),
        ("RQ_LEASE_TLL", "3", "is no setting; there are RQ_LEASE_FENCE_LIFE"),
        ("RQ_LEASE_URL", "http://localhost", "RQ_LEASE_URL='http://…': must start"),
        ("RQ_LEASE_FENCE_LIFE", "-1", "RQ_LEASE_FENCE_LIFE=-1: must be at least 0"),
    ],
)
def test_worker_refuses_to_start_when_a_variable_is_wrong(
    workers: Workers, variable: str, value: str, words: str
) -> None:
    worker = workers.launch(env={variable: value})

    assert worker.wait(PATIENCE) != 0
    assert "InvalidConfig" in worker.output()
    assert words in worker.output()


@pytest.mark.skipif(RQ3, reason="RQ 3 can")
def test_spawn_worker_refuses_to_start_when_rq_is_too_old(workers: Workers) -> None:
    worker = workers.launch(worker_class="rq_lease.LeaseSpawnWorker")

    assert worker.wait(PATIENCE) != 0
    assert "worker_class='LeaseSpawnWorker': needs RQ 3.0" in worker.output()


# Death and loss.


def started_within(job: Job, since: float) -> float:
    wait_for(job, "finished")
    return time.monotonic() - since


@pytest.mark.parametrize("duplicate", [rq_tasks.run_or_wait, rq_tasks.run_or_retry])
def test_lease_is_taken_over_at_once_when_the_horse_was_killed(
    workers: Workers,
    queue: Queue,
    log: Path,
    tmp_path: Path,
    duplicate: Callable[..., object],
) -> None:
    for _ in range(2):
        workers.start()
    killed = queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a")
    horse = pid_in(tmp_path / "pid")
    job = queue.enqueue(duplicate, str(log), "a")
    wait_for(job, "deferred", "queued")

    os.kill(horse, signal.SIGKILL)

    assert started_within(job, time.monotonic()) < 5.0
    assert wait_for(killed, "failed") == "failed"


def test_parked_job_is_woken_at_once_when_the_whole_worker_was_killed(
    workers: Workers, queue: Queue, log: Path, tmp_path: Path
) -> None:
    holder = workers.start()
    queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a")
    pid_in(tmp_path / "pid")
    workers.start()
    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    wait_for(job, "deferred")

    holder.kill9_all()

    assert started_within(job, time.monotonic()) < 8.0


def test_parked_job_is_woken_within_ttl_and_a_sweep_when_holder_died_elsewhere(
    workers: Workers, queue: Queue, log: Path, url: str
) -> None:
    lease = Leases(url, ttl=2.0).try_acquire("run:a")
    assert lease is not None
    workers.start()
    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    wait_for(job, "deferred")

    lease._end(lease)  # the beats end, as with the host
    since = time.monotonic()

    assert started_within(job, since) < 2.0 + 4.0


def test_lease_ends_at_once_when_the_job_is_stopped(
    workers: Workers, queue: Queue, log: Path, tmp_path: Path, client: redis.Redis
) -> None:
    for _ in range(2):
        workers.start()
    stopped = queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a")
    pid_in(tmp_path / "pid")
    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    wait_for(job, "deferred")

    send_stop_job_command(client, stopped.id)

    assert started_within(job, time.monotonic()) < 5.0
    assert stopped.get_status() == "stopped"


def test_lease_ends_at_once_when_the_worker_is_shut_down_cold(
    workers: Workers, queue: Queue, log: Path, tmp_path: Path
) -> None:
    holder = workers.start()
    queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a")
    pid_in(tmp_path / "pid")
    workers.start()
    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    wait_for(job, "deferred")

    holder.terminate()
    eventually(lambda: "warm shut down" in holder.output(), PATIENCE, "it is asked")
    eventually(lambda: holder.terminate() or not holder.is_alive, PATIENCE, "it ends")

    assert started_within(job, time.monotonic()) < 5.0


@pytest.mark.parametrize("worker_class", CLASSES)
def test_job_fails_in_its_sleep_when_the_lease_is_lost(
    workers: Workers,
    queue: Queue,
    tmp_path: Path,
    client: redis.Redis,
    worker_class: str,
) -> None:
    workers.start(worker_class=worker_class)
    job = queue.enqueue(rq_tasks.hold_briefly_trusted, str(tmp_path / "pid"), "a")
    pid_in(tmp_path / "pid")

    client.delete("tl1:{run:a}")

    assert wait_for(job, "finished", "failed", timeout=10.0) == "failed"
    result = job.latest_result()
    assert result is not None
    assert "LeaseLost: run:a was lost (stolen)" in (result.exc_string or "")


def test_run_ends_silently_when_its_job_runs_elsewhere(
    workers: Workers, queue: Queue, tmp_path: Path, client: redis.Redis
) -> None:
    worker = workers.start()
    job = queue.enqueue(rq_tasks.hold_briefly_trusted, str(tmp_path / "pid"), "a")
    horse = pid_in(tmp_path / "pid")
    stored = client.get("tl1:{run:a}")
    assert isinstance(stored, bytes)

    client.set("tl1:{run:a}", b"another" + stored[stored.index(b" ") :], px=60_000)

    eventually(lambda: horse not in worker.children(), PATIENCE, "the run ends")
    assert job.get_status() == "started"
    assert job.latest_result() is None
    assert len(queue.failed_job_registry) == 0


def test_job_is_ended_by_its_own_timeout_when_it_holds_a_lease(
    workers: Workers, queue: Queue, tmp_path: Path, client: redis.Redis
) -> None:
    workers.start()

    job = queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", job_timeout=1)

    assert wait_for(job, "finished", "failed") == "failed"
    result = job.latest_result()
    assert result is not None
    assert "JobTimeoutException" in (result.exc_string or "")
    eventually(
        lambda: not client.exists("tl1:{run:a}"), PATIENCE, "the lease is released"
    )


def test_lease_is_held_until_the_callbacks_are_done(
    workers: Workers, queue: Queue, tmp_path: Path
) -> None:
    workers.start()

    job = queue.enqueue(
        rq_tasks.hold_for_callback,
        str(tmp_path / "pid"),
        "a",
        on_success=Callback(rq_tasks.long_callback),
    )

    wait_for(job, "finished")
    assert (tmp_path / "pid.callback").read_text() == "1"


# The store.


def test_job_is_scheduled_when_the_store_of_its_own_is_down(
    workers: Workers, queue: Queue, log: Path
) -> None:
    workers.start(env={"RQ_LEASE_URL": f"redis://127.0.0.1:{free_port()}/0"})

    retried = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    failed = queue.enqueue(rq_tasks.run_or_fail_without_store, str(log), "b")
    unguarded = queue.enqueue(rq_tasks.run_in_any_case, str(log), "c")

    assert wait_for(unguarded, "finished", "failed") == "finished"
    assert wait_for(failed, "finished", "failed") == "failed"
    assert wait_for(retried, "scheduled") == "scheduled"
    assert unguarded.return_value() is None
    result = failed.latest_result()
    assert result is not None
    assert "StoreUnavailable" in (result.exc_string or "")
    assert [run.key for run in read_history(log)] == ["c"]


def refused(client: redis.Redis, command: str) -> int:
    stats = client.info("commandstats").get(f"cmdstat_{command}", {})
    calls: int = stats.get("rejected_calls", 0)
    return calls


def test_job_waits_in_its_place_when_the_shared_store_refuses_to_work(
    spawn: Callable[..., Process],
    queue: Queue,
    log: Path,
    client: redis.Redis,
    url: str,
) -> None:
    client.acl_setuser(
        "worker",
        enabled=True,
        passwords=["+secret"],
        categories=["+@all"],
        commands=["-evalsha", "-eval"],
        keys=["*"],
        channels=["*"],
    )
    client.config_resetstat()
    Workers(spawn, url.replace("//", "//worker:secret@")).start()
    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    eventually(lambda: refused(client, "evalsha"), PATIENCE, "it meets the refusal")
    before = log.exists()

    client.acl_setuser("worker", enabled=True, commands=["+evalsha", "+eval"])

    assert wait_for(job, "finished", "failed") == "finished"
    assert not before
    client.acl_deluser("worker")


def other_database(url: str) -> str:
    return f"{url.rsplit('/', 1)[0]}/0"


def test_job_is_scheduled_and_runs_when_it_cannot_be_parked(
    workers: Workers, queue: Queue, log: Path, url: str, client: redis.Redis
) -> None:
    store = other_database(url)
    lease = Leases(store).try_acquire("run:a")
    assert lease is not None
    worker = workers.start("--with-scheduler", env={"RQ_LEASE_URL": store})

    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")

    wait_for(job, "scheduled")
    assert len(queue.started_job_registry) == 0
    assert client.llen(queue.intermediate_queue_key) == 0
    lease.release()
    assert wait_for(job, "finished", "failed") == "finished"
    assert "share no server" in worker.output()


# The decorator alone.


@pytest.mark.parametrize("worker_class", ["rq.Worker", "rq.SimpleWorker"])
def test_decorated_job_takes_its_lease_when_the_worker_knows_none(
    workers: Workers, queue: Queue, log: Path, client: redis.Redis, worker_class: str
) -> None:
    workers.start(worker_class=worker_class)

    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    coroutine = queue.enqueue(rq_tasks.run_async, str(log), "b")

    wait_for(job, "finished")
    wait_for(coroutine, "finished")
    assert job.return_value() is not None
    assert coroutine.return_value() is not None
    assert not client.exists("tl1:{run:a}")


@pytest.mark.parametrize("worker_class", ["rq.Worker", "rq.SimpleWorker"])
def test_decorated_job_waits_in_place_when_the_worker_cannot_park(
    workers: Workers, queue: Queue, log: Path, url: str, worker_class: str
) -> None:
    lease = Leases(url).try_acquire("run:a")
    assert lease is not None
    workers.start(worker_class=worker_class)
    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    wait_for(job, "started")

    lease.release()

    assert wait_for(job, "finished", "failed") == "finished"


@pytest.mark.parametrize("worker_class", ["rq.Worker", "rq.SimpleWorker"])
def test_decorated_job_is_scheduled_when_it_has_waited_in_place(
    workers: Workers, queue: Queue, log: Path, url: str, worker_class: str
) -> None:
    name = "adapters.rq_tasks.run_or_come_back:a"
    lease = Leases(url).try_acquire(name)
    assert lease is not None
    workers.start("--with-scheduler", worker_class=worker_class)
    job = queue.enqueue(rq_tasks.run_or_come_back, str(log), "a")
    wait_for(job, "scheduled")

    lease.release()

    assert wait_for(job, "finished", "failed") == "finished"
    job.refresh()
    assert not job.number_of_retries


# Jobs that send jobs, and copies.


def test_chain_of_one_key_loses_no_link_when_duplicates_are_skipped(
    workers: Workers, queue: Queue, log: Path
) -> None:
    links = 10
    for _ in range(2):
        workers.start()

    queue.enqueue(rq_tasks.go_on, str(log), "a", links)

    eventually(lambda: len(read_history(log)) == links, PATIENCE, "all links ran")
    runs = read_history(log)
    assert not find_overlaps(runs)
    assert not find_falling_fences(runs)


def test_dependents_of_one_key_run_one_after_the_other(
    workers: Workers, queue: Queue, log: Path
) -> None:
    for _ in range(2):
        workers.start()

    last = queue.enqueue(rq_tasks.run_or_skip, str(log), "a", 0.1)
    for _ in range(5):
        last = queue.enqueue(rq_tasks.run_or_skip, str(log), "a", depends_on=last)

    wait_for(last, "finished")
    assert len(read_history(log)) == 6


def test_repeats_and_retries_of_a_job_are_no_duplicates_of_it(
    workers: Workers, queue: Queue, log: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        workers.start()

    queue.enqueue(rq_tasks.run_or_skip, str(log), "a", repeat=Repeat(times=3))
    failing = queue.enqueue(
        rq_tasks.fail_once, str(tmp_path / "failing"), "b", retry=Retry(max=1)
    )
    returning = queue.enqueue(rq_tasks.return_retry, str(tmp_path / "back"), "c", 2)

    eventually(lambda: len(read_history(log)) == 4, PATIENCE, "all repeats ran")
    assert wait_for(failing, "finished") == "finished"
    assert wait_for(returning, "finished") == "finished"
    assert len(read_history(tmp_path / "back")) == 3


def test_job_never_runs_beside_itself_when_its_id_is_twice_in_the_queue(
    workers: Workers, queue: Queue, log: Path, client: redis.Redis
) -> None:
    job = queue.enqueue(rq_tasks.run_or_skip, str(log), "a", 1.0)
    client.rpush(queue.key, job.id)

    for _ in range(2):
        workers.start()

    wait_for(job, "finished")
    eventually(lambda: client.zcard(lease_keys("run:a").parked) == 0, PATIENCE, "drop")
    assert len(read_history(log)) == 1


def test_job_runs_again_after_itself_when_it_was_requeued_while_it_ran(
    workers: Workers, queue: Queue, log: Path
) -> None:
    for _ in range(2):
        workers.start()
    job = queue.enqueue(rq_tasks.run_or_skip, str(log), "a", 1.5)
    wait_for(job, "started")

    queue.enqueue_job(job)

    eventually(lambda: len(read_history(log)) == 2, PATIENCE, "it ran twice")
    assert not find_overlaps(read_history(log))


def test_parked_job_keeps_nobody_back_when_it_is_cancelled(
    workers: Workers, queue: Queue, log: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        workers.start()
    queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", 2.0)
    pid_in(tmp_path / "pid")
    cancelled = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    wait_for(cancelled, "deferred")
    job = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")
    wait_for(job, "deferred")

    Job.fetch(cancelled.id, connection=queue.connection).cancel()

    assert wait_for(job, "finished", "failed") == "finished"
    assert cancelled.get_status() == "canceled"
    assert len(read_history(log)) == 1


def test_json_serializer_carries_jobs_and_records(
    workers: Workers, client: redis.Redis, log: Path, url: str
) -> None:
    serializer = "rq.serializers.JSONSerializer"
    queue = Queue("reports", connection=client, serializer=JSONSerializer)
    workers.start("--serializer", serializer)
    lease = Leases(url).try_acquire("run:a")
    assert lease is not None

    skipped = queue.enqueue(rq_tasks.run_or_skip, str(log), "a")
    retried = queue.enqueue(rq_tasks.run_or_retry, str(log), "a")

    wait_for(skipped, "finished")
    assert skipped.return_value()["lease"] == "run:a"
    wait_for(retried, "deferred")
    lease.release()
    assert wait_for(retried, "finished", "failed") == "finished"


# Many.


@pytest.mark.parametrize("function", [rq_tasks.run_or_retry, rq_tasks.run_or_wait])
def test_nothing_overlaps_or_is_lost_when_many_workers_compete(
    spawn: Callable[..., Process],
    url: str,
    queue: Queue,
    log: Path,
    function: Callable[..., object],
) -> None:
    for number in range(200):
        queue.enqueue(function, str(log), f"k{number % 5}", 0.001)

    pool = [sys.executable, "-m", "rq.cli", "worker-pool", "-n", "8", "-q"]
    spawn([*pool, "-u", url, "-w", LEASE_WORKER, "reports"])

    eventually(lambda: len(read_history(log)) == 200, 90.0, "all jobs ran", pause=0.2)
    runs = read_history(log)
    assert not find_overlaps(runs)
    assert not find_falling_fences(runs)
    eventually(lambda: len(queue.finished_job_registry) == 200, PATIENCE, "all stored")
    assert len(queue.failed_job_registry) == 0
