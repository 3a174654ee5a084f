"""Functions that the RQ workers of the tests run, and worker classes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from histories import recorded
from rq import Queue, Retry, get_current_job

from rq_lease import LeaseWorker, current_lease, exclusive, job
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    import redis
    from rq.job import Job

TTL = 2.0


class ClassConfigured(LeaseWorker):
    """Leases for all jobs of one queue, said on the class."""

    lease_queues: ClassVar = {"plain": {"ttl": TTL, "on_conflict": "skip"}}


class Unswept(LeaseWorker):
    """Wakes parked jobs by releases alone."""

    lease_sweep: ClassVar = 3600.0


def fence() -> int | None:
    """Return the fence of the lease that is held here."""
    lease = current_lease()
    return lease.fence if lease else None


def run(path: str, key: str, seconds: float = 0.0) -> int | None:
    """Write a line about this run; the key says what it excludes."""
    with recorded(path, key, fence()):
        time.sleep(seconds)
    return fence()


@exclusive(ttl=TTL, on_conflict="retry", key="{key}", name="run")
def run_or_retry(path: str, key: str, seconds: float = 0.0) -> int | None:
    """Run, or come back later."""
    return run(path, key, seconds)


@exclusive(ttl=TTL, on_conflict="wait", wait=60.0, key="{key}", name="run")
def run_or_wait(path: str, key: str, seconds: float = 0.0) -> int | None:
    """Run, or wait."""
    return run(path, key, seconds)


@exclusive(ttl=TTL, on_conflict="skip", key="{key}", name="run")
def run_or_skip(path: str, key: str, seconds: float = 0.0) -> int | None:
    """Run, or skip."""
    return run(path, key, seconds)


@exclusive(ttl=TTL, on_conflict="raise", key="{key}", name="run")
def run_or_raise(path: str, key: str, seconds: float = 0.0) -> int | None:
    """Run, or fail."""
    return run(path, key, seconds)


@exclusive(ttl=TTL, on_conflict="retry", retry_delay=0.5, wait=0.2, key="{key}")
def run_or_come_back(path: str, key: str, seconds: float = 0.0) -> int | None:
    """Run, or wait only for a moment."""
    return run(path, key, seconds)


@exclusive(ttl=TTL, on_error="raise", key="{key}")
def run_or_fail_without_store(path: str, key: str) -> int | None:
    """Run, or fail if the store cannot be asked."""
    return run(path, key)


@exclusive(ttl=TTL, on_error="run", key="{key}")
def run_in_any_case(path: str, key: str) -> int | None:
    """Run, leased or not."""
    return run(path, key)


@exclusive(ttl=TTL, on_conflict="retry", key="{key}")
async def run_async(path: str, key: str) -> int | None:
    """Run as a coroutine."""
    return run(path, key)


def say_pid(path: str) -> None:
    """Write down who runs; the file is there once it is written."""
    target = Path(path)
    partial = target.with_suffix(".new")
    partial.write_text(f"{os.getpid()}\n{fence()}")
    partial.replace(target)


@exclusive(ttl=20.0, on_conflict="retry", key="{key}", name="run")
def hold(path: str, key: str, seconds: float = 60.0) -> str:
    """Say who runs, and hold the lease for long; its ttl is long, too."""
    say_pid(path)
    time.sleep(seconds)
    return f"slept for {seconds} s under {key}"


@exclusive(ttl=TTL, key="{key}", name="run")
def hold_briefly_trusted(path: str, key: str) -> str:
    """Say who runs, and hold a lease that has many beats."""
    say_pid(path)
    time.sleep(60.0)
    return key


@exclusive(ttl=0.5, key="{key}", name="run")
def hold_for_callback(path: str, key: str) -> None:
    """Say who runs; what takes long is the callback."""
    say_pid(path)
    assert key


def long_callback(job: Job, connection: redis.Redis, result: object) -> None:
    """Take longer than the lease's ttl, and write down whether it is still held."""
    del result
    time.sleep(1.5)
    held = connection.exists(lease_keys(f"run:{job.args[1]}").lease)
    Path(f"{job.args[0]}.callback").write_text(str(held))


@exclusive(ttl=TTL, on_conflict="skip", key="{key}", name="run")
def go_on(path: str, key: str, times: int) -> None:
    """Enqueue the next link for the same key, while this one still holds it."""
    current = get_current_job()
    assert current is not None
    if times > 1:
        queue = Queue(current.origin, connection=current.connection)
        queue.enqueue(go_on, path, key, times - 1)
    run(path, key, 0.1)


def enqueue_after(job: Job, connection: redis.Redis, result: object) -> None:
    """Enqueue the next link from a callback, while the lease is still held."""
    del result
    path, key, _ = job.args
    Queue(job.origin, connection=connection).enqueue(go_on, path, key, 1)
    time.sleep(0.3)


@exclusive(ttl=TTL, on_conflict="skip", key="{key}", name="run")
def go_on_in_many_ways(path: str, key: str) -> None:
    """Enqueue for the same key in each of RQ's ways, and from another thread."""
    current = get_current_job()
    assert current is not None
    queue = Queue(current.origin, connection=current.connection)
    data = Queue.prepare_data(go_on, (path, key, 1))
    queue.enqueue_many([data])
    queue.enqueue_call(go_on, (path, key, 1), meta={"mine": 1})
    thread = threading.Thread(target=queue.enqueue, args=(go_on, path, key, 1))
    thread.start()
    thread.join()
    run(path, key, 0.5)


@exclusive(ttl=TTL, key="{key}")
def fail_once(path: str, key: str) -> int | None:
    """Fail at the first try."""
    run(path, key)
    if len(Path(path).read_text().splitlines()) == 1:
        raise OSError(key)
    return fence()


@exclusive(ttl=TTL, key="{key}")
def return_retry(path: str, key: str, times: int) -> Retry | str:
    """Ask to be run again, at once, some times."""
    run(path, key)
    if len(Path(path).read_text().splitlines()) <= times:
        return Retry(max=times, interval=0)
    return "done"


def child(tenant: int) -> int:
    """Do nothing, as what another job has sent."""
    return tenant


def send_child() -> None:
    """Send a job from a job, through the decorator."""
    current = get_current_job()
    assert current is not None
    sender = job(current.origin, current.connection, meta={"tenant": 7})
    sender(child).delay(7, job_id="the-child")


@exclusive(ttl=TTL, on_conflict="skip", key=())
def hold_and_run(path: str, log: str, seconds: float) -> None:
    """Say who runs, then run."""
    say_pid(path)
    run(log, "a", seconds)
