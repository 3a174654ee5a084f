from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from adapters import celery_ends as ends
from adapters import celery_tasks as tasks
from adapters.celery_journal import PATIENCE
from adapters.celery_nodes import WorkerSpec
from celery import states
from harness import eventually

from task_lease.keys import lease_keys

if TYPE_CHECKING:
    import redis
    from adapters.celery_fixtures import StartWorker
    from adapters.celery_journal import Begun, Journal
    from celery import Celery
    from celery.result import AsyncResult

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("app")]

TASKS = ("adapters.celery_tasks", "adapters.celery_ends")
SPEC = WorkerSpec(queues=("ends",), concurrency=2, include=TASKS)
#: Seconds in which a lease must have ended that would live for `ends.TTL`.
AT_ONCE = ends.TTL / 2


@pytest.fixture(scope="module")
def worker_specs() -> list[WorkerSpec]:
    return [SPEC]


def wait_released(store: redis.Redis, begun: Begun) -> None:
    """Return once the lease of a run has ended."""
    key = lease_keys(str(begun.lease)).lease
    eventually(lambda: not store.exists(key), AT_ONCE, "the lease has ended")


def send(task: tasks.Observed, *args: object) -> AsyncResult[object]:
    return task.apply_async(args, queue="ends")


@pytest.mark.parametrize(
    "how", ["success", "exception", "ignore", "reject", "exit", "kill"]
)
def test_lease_ends_at_once_however_the_body_ends(
    journal: Journal, store: redis.Redis, how: str
) -> None:
    send(ends.end, journal.log, "k", how)
    begun = journal.wait_begun("k")
    assert store.exists(lease_keys(str(begun.lease)).lease)

    journal.open_gate("k")

    wait_released(store, begun)
    send(ends.end, journal.log, "k", "success").get(timeout=PATIENCE)
    assert (journal.begun("k")[1].fence or 0) > (begun.fence or 0)


@pytest.mark.parametrize("task", [ends.stop_softly, ends.stop_hard, ends.stop_never])
def test_lease_ends_at_once_when_a_time_limit_strikes(
    journal: Journal, store: redis.Redis, task: tasks.Observed
) -> None:
    result = send(task, journal.log, "k")
    begun = journal.wait_begun("k")

    wait_released(store, begun)

    eventually(lambda: result.state == states.FAILURE, PATIENCE, "it has failed")


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGKILL"])
def test_lease_ends_at_once_when_task_is_terminated(
    app: Celery, journal: Journal, store: redis.Redis, sent: str
) -> None:
    result = send(ends.sleep_long, journal.log, "k")
    begun = journal.wait_begun("k")

    app.control.revoke(result.id, terminate=True, signal=sent)

    wait_released(store, begun)
    # Its stub does not know the state.
    eventually(lambda: str(result.state) == "REVOKED", PATIENCE, "it is revoked")


def test_revoked_task_never_takes_a_lease(
    app: Celery, journal: Journal, store: redis.Redis
) -> None:
    result = ends.end.apply_async((journal.log, "k", "success"), countdown=3600)
    app.control.revoke(result.id)

    name = ends.end.exclusive_name(journal.log, "k", "success")
    assert not store.exists(lease_keys(name).lease)
    journal.open_gate("k")
    other = send(ends.end, journal.log, "k", "success")
    assert other.get(timeout=PATIENCE) == "success"


@pytest.mark.parametrize("task", [ends.requeue_once, ends.die_once])
def test_message_that_went_back_runs_again_under_a_new_lease(
    journal: Journal, store: redis.Redis, task: tasks.Observed
) -> None:
    result = send(task, journal.log, "k")

    assert result.get(timeout=PATIENCE) in {"again", "survived"}

    first, second = journal.begun("k")
    assert (second.fence or 0) > (first.fence or 0)
    wait_released(store, second)


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGQUIT"])
def test_lease_ends_at_once_when_worker_shuts_down(
    journal: Journal, store: redis.Redis, start_worker: StartWorker, sent: str
) -> None:
    spec = WorkerSpec(queues=("leaving",), concurrency=1, include=TASKS)
    worker = start_worker(spec)
    ends.end.apply_async((journal.log, "k", "success"), queue="leaving")
    begun = journal.wait_begun("k")

    worker.kill(sent)
    if sent == "SIGTERM":
        # A warm shutdown waits for the task, whose lease is kept meanwhile.
        said = "worker: Warm shutdown"
        eventually(lambda: said in worker.logs(), PATIENCE, "it is leaving")
        assert store.exists(lease_keys(str(begun.lease)).lease)
        journal.open_gate("k")

    wait_released(store, begun)
    worker.process.wait(PATIENCE)


def test_lease_ends_when_child_is_replaced_after_its_tasks(
    journal: Journal, store: redis.Redis, start_worker: StartWorker
) -> None:
    spec = WorkerSpec(
        queues=("short",),
        concurrency=1,
        include=TASKS,
        options=("--max-tasks-per-child", "1"),
    )
    start_worker(spec)
    journal.open_gate("k")

    for _ in range(3):
        result = ends.end.apply_async((journal.log, "k", "success"), queue="short")
        assert result.get(timeout=PATIENCE) == "success"

    runs = journal.begun("k")
    assert len({begun.pid for begun in runs}) == 3
    wait_released(store, runs[-1])
