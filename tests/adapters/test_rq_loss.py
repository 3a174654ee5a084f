from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from adapters import rq_tasks
from adapters.rq_workers import CLASSES, PATIENCE, Workers, pid_in, wait_for
from harness import eventually, free_port
from histories import read_history
from rq import Callback
from rq.command import send_stop_job_command

from task_lease import Leases
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import redis
    from harness import Process, Server
    from rq import Queue
    from rq.job import Job


# No sweep shall help where the worker itself ends the lease.
UNSWEPT = "adapters.rq_tasks.Unswept"


def started_within(job: Job, since: float) -> float:
    wait_for(job, "finished")
    return time.monotonic() - since


@pytest.mark.parametrize(
    ("duplicate", "waits"),
    [(rq_tasks.run_or_wait, "waiting"), (rq_tasks.run_or_retry, "parked")],
)
def test_lease_is_taken_over_at_once_when_the_horse_was_killed(
    rq_workers: Workers,
    rq_queue: Queue,
    history: Path,
    client: redis.Redis,
    duplicate: Callable[..., object],
    waits: str,
) -> None:
    for _ in range(2):
        rq_workers.start(worker_class=UNSWEPT)
    killed = rq_queue.enqueue(rq_tasks.hold, str(history.with_name("pid")), "a")
    horse = pid_in(history.with_name("pid"))
    job = rq_queue.enqueue(duplicate, str(history), "a")
    keys = lease_keys("run:a")
    key = keys.queue if waits == "waiting" else keys.parked
    eventually(lambda: client.exists(key), PATIENCE, f"it is {waits}")

    os.kill(horse, signal.SIGKILL)

    assert started_within(job, time.monotonic()) < 5.0
    assert wait_for(killed, "failed") == "failed"


def test_parked_job_is_woken_at_once_when_the_whole_worker_was_killed(
    rq_workers: Workers, rq_queue: Queue, history: Path, tmp_path: Path
) -> None:
    holder = rq_workers.start()
    rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a")
    pid_in(tmp_path / "pid")
    rq_workers.start()
    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    wait_for(job, "deferred")

    holder.kill9_all()

    assert started_within(job, time.monotonic()) < 8.0


def test_parked_job_is_woken_within_ttl_and_a_sweep_when_holder_died_elsewhere(
    rq_workers: Workers, rq_queue: Queue, history: Path, url: str
) -> None:
    lease = Leases(url, ttl=2.0).try_acquire("run:a")
    assert lease is not None
    rq_workers.start()
    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    wait_for(job, "deferred")

    lease._end(lease)  # the beats end, as with the host
    since = time.monotonic()

    assert started_within(job, since) < 2.0 + 4.0


def test_lease_ends_at_once_when_the_job_is_stopped(
    rq_workers: Workers,
    rq_queue: Queue,
    history: Path,
    tmp_path: Path,
    client: redis.Redis,
) -> None:
    for _ in range(2):
        rq_workers.start(worker_class=UNSWEPT)
    stopped = rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a")
    pid_in(tmp_path / "pid")
    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    wait_for(job, "deferred")

    send_stop_job_command(client, stopped.id)

    assert started_within(job, time.monotonic()) < 5.0
    assert stopped.get_status() == "stopped"


def asked_to_end(worker: Process) -> bool:
    worker.terminate()
    return not worker.is_alive


def test_lease_ends_at_once_when_the_worker_is_shut_down_cold(
    rq_workers: Workers, rq_queue: Queue, history: Path, tmp_path: Path
) -> None:
    holder = rq_workers.start(worker_class=UNSWEPT)
    rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a")
    pid_in(tmp_path / "pid")
    rq_workers.start(worker_class=UNSWEPT)
    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    wait_for(job, "deferred")

    holder.terminate()
    eventually(lambda: "warm shut down" in holder.output(), PATIENCE, "it is asked")
    # Within a second of the first time, RQ does not listen; and one time more would
    # strike while the lease is being ended.
    eventually(lambda: asked_to_end(holder), PATIENCE, "it ends", pause=1.1)

    assert started_within(job, time.monotonic()) < 5.0


@pytest.mark.parametrize("worker_class", CLASSES)
def test_job_fails_in_its_sleep_when_the_lease_is_lost(
    rq_workers: Workers,
    rq_queue: Queue,
    tmp_path: Path,
    client: redis.Redis,
    worker_class: str,
) -> None:
    rq_workers.start(worker_class=worker_class)
    job = rq_queue.enqueue(rq_tasks.hold_briefly_trusted, str(tmp_path / "pid"), "a")
    pid_in(tmp_path / "pid")

    client.delete("tl1:{run:a}")

    assert wait_for(job, "finished", "failed", timeout=10.0) == "failed"
    result = job.latest_result()
    assert result is not None
    assert "LeaseLost: run:a was lost (stolen)" in (result.exc_string or "")


def test_run_ends_silently_when_its_job_runs_elsewhere(
    rq_workers: Workers, rq_queue: Queue, tmp_path: Path, client: redis.Redis
) -> None:
    worker = rq_workers.start()
    job = rq_queue.enqueue(rq_tasks.hold_briefly_trusted, str(tmp_path / "pid"), "a")
    horse = pid_in(tmp_path / "pid")
    stored = client.get("tl1:{run:a}")
    assert isinstance(stored, bytes)

    client.set("tl1:{run:a}", b"another" + stored[stored.index(b" ") :], px=60_000)

    eventually(lambda: horse not in worker.children(), PATIENCE, "the run ends")
    assert job.get_status() == "started"
    assert job.latest_result() is None
    assert len(rq_queue.failed_job_registry) == 0


def test_job_is_not_dropped_when_its_lease_is_only_reserved_for_it(
    rq_workers: Workers, rq_queue: Queue, tmp_path: Path, client: redis.Redis
) -> None:
    rq_workers.start()
    job = rq_queue.enqueue(rq_tasks.hold_briefly_trusted, str(tmp_path / "pid"), "a")
    pid_in(tmp_path / "pid")
    stored = client.get("tl1:{run:a}")
    assert isinstance(stored, bytes)

    # As if the store had lost its last write: the hand-over is there, the run is not.
    reserved = b"parked:0123" + stored[stored.index(b" ") :]
    client.set("tl1:{run:a}", reserved, px=60_000)

    assert wait_for(job, "finished", "failed") == "failed"


def test_job_is_ended_by_its_own_timeout_when_it_holds_a_lease(
    rq_workers: Workers, rq_queue: Queue, tmp_path: Path, client: redis.Redis
) -> None:
    rq_workers.start()

    job = rq_queue.enqueue(rq_tasks.hold, str(tmp_path / "pid"), "a", job_timeout=1)

    assert wait_for(job, "finished", "failed") == "failed"
    result = job.latest_result()
    assert result is not None
    assert "JobTimeoutException" in (result.exc_string or "")
    eventually(
        lambda: not client.exists("tl1:{run:a}"), PATIENCE, "the lease is released"
    )


def test_lease_is_held_until_the_callbacks_are_done(
    rq_workers: Workers, rq_queue: Queue, tmp_path: Path
) -> None:
    rq_workers.start()

    job = rq_queue.enqueue(
        rq_tasks.hold_for_callback,
        str(tmp_path / "pid"),
        "a",
        on_success=Callback(rq_tasks.long_callback),
    )

    wait_for(job, "finished")
    assert (tmp_path / "pid.callback").read_text() == "1"


def test_job_is_scheduled_when_the_store_of_its_own_is_down(
    rq_workers: Workers, rq_queue: Queue, history: Path
) -> None:
    rq_workers.start(env={"RQ_LEASE_URL": f"redis://127.0.0.1:{free_port()}/0"})

    retried = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    failed = rq_queue.enqueue(rq_tasks.run_or_fail_without_store, str(history), "b")
    unguarded = rq_queue.enqueue(rq_tasks.run_in_any_case, str(history), "c")

    assert wait_for(unguarded, "finished", "failed") == "finished"
    assert wait_for(failed, "finished", "failed") == "failed"
    assert wait_for(retried, "scheduled") == "scheduled"
    assert unguarded.return_value() is None
    result = failed.latest_result()
    assert result is not None
    assert "StoreUnavailable" in (result.exc_string or "")
    assert [run.key for run in read_history(history)] == ["c"]


@pytest.mark.parametrize("worker_class", CLASSES)
def test_running_job_is_stopped_when_the_store_of_its_own_goes_away(
    rq_workers: Workers,
    rq_queue: Queue,
    tmp_path: Path,
    private_server: Server,
    worker_class: str,
) -> None:
    store = {"RQ_LEASE_URL": private_server.url()}
    rq_workers.start(worker_class=worker_class, env=store)
    job = rq_queue.enqueue(rq_tasks.hold_briefly_trusted, str(tmp_path / "pid"), "a")
    pid_in(tmp_path / "pid")

    private_server.kill()

    assert wait_for(job, "finished", "failed") == "failed"
    result = job.latest_result()
    assert result is not None
    assert "LeaseLost: run:a was lost (unreachable)" in (result.exc_string or "")


def test_running_job_goes_on_when_the_store_of_its_own_is_back_in_time(
    rq_workers: Workers, rq_queue: Queue, history: Path, private_server: Server
) -> None:
    worker = rq_workers.start(env={"RQ_LEASE_URL": private_server.url()})
    job = rq_queue.enqueue(rq_tasks.run_or_skip, str(history), "a", 2 * rq_tasks.TTL)
    with private_server.client() as store:
        eventually(lambda: store.exists("tl1:{run:a}"), PATIENCE, "it has its lease")

    private_server.restart()

    assert wait_for(job, "finished", "failed") == "finished"
    assert "was lost" not in worker.output()
    assert [run.key for run in read_history(history)] == ["a"]


def refused(client: redis.Redis, command: str) -> int:
    stats = client.info("commandstats").get(f"cmdstat_{command}", {})
    calls: int = stats.get("rejected_calls", 0)
    return calls


def test_job_waits_in_its_place_when_the_shared_store_refuses_to_work(
    spawn: Callable[..., Process],
    rq_queue: Queue,
    history: Path,
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
    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")
    eventually(lambda: refused(client, "evalsha"), PATIENCE, "it meets the refusal")
    before = history.exists()

    client.acl_setuser("worker", enabled=True, commands=["+evalsha", "+eval"])

    assert wait_for(job, "finished", "failed") == "finished"
    assert not before
    client.acl_deluser("worker")


def other_database(url: str) -> str:
    return f"{url.rsplit('/', 1)[0]}/0"


def test_job_is_scheduled_and_runs_when_it_cannot_be_parked(
    rq_workers: Workers, rq_queue: Queue, history: Path, url: str, client: redis.Redis
) -> None:
    store = other_database(url)
    lease = Leases(store).try_acquire("run:a")
    assert lease is not None
    worker = rq_workers.start("--with-scheduler", env={"RQ_LEASE_URL": store})

    job = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")

    wait_for(job, "scheduled")
    assert len(rq_queue.started_job_registry) == 0
    assert client.llen(rq_queue.intermediate_queue_key) == 0
    lease.release()
    assert wait_for(job, "finished", "failed") == "finished"
    assert "share no server" in worker.output()
