from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from adapters import celery_ends as ends
from adapters import celery_tasks as tasks
from adapters.celery_fixtures import BROKER
from adapters.celery_journal import PATIENCE
from adapters.celery_nodes import WorkerSpec
from celery import states
from harness import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis
    from adapters.celery_fixtures import StartWorker
    from adapters.celery_journal import Journal
    from adapters.celery_nodes import WorkerContainer
    from celery.result import AsyncResult
    from harness import Server

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("app")]

#: Seconds after which the broker gives a message to somebody else.
VISIBLE = 2
SPEC = WorkerSpec(
    queues=("copied",),
    concurrency=1,
    include=("adapters.celery_tasks", "adapters.celery_ends"),
    settings={"broker_transport_options": {"visibility_timeout": VISIBLE}},
)


@pytest.fixture(scope="module")
def worker_specs() -> list[WorkerSpec]:
    return [SPEC]


def send(task: tasks.Observed, *args: object) -> AsyncResult[object]:
    return task.apply_async(args, queue="copied")


@pytest.fixture
def broker(celery_server: Server) -> redis.Redis:
    return celery_server.client(BROKER)


@pytest.fixture
def copy(
    start_worker: StartWorker, broker: redis.Redis, journal: Journal
) -> Callable[[AsyncResult[object]], WorkerContainer]:
    """Give what lets a second worker receive a message that the first still runs."""

    def overdue() -> bool:
        return broker.zcount("unacked_index", 0, time.time() - VISIBLE) > 0

    def copy(result: AsyncResult[object]) -> WorkerContainer:
        journal.wait_begun("k")
        eventually(overdue, PATIENCE, "the message is overdue")
        # A worker looks for such messages when it starts, and then only rarely.
        worker = start_worker(SPEC)
        said = f"[{result.id}] received"
        eventually(lambda: said in worker.logs(), PATIENCE, "the copy arrives")
        return worker

    return copy


def wait_acknowledged(broker: redis.Redis) -> None:
    """Return once no message is left, neither in the queue nor with a worker."""

    def is_empty() -> bool:
        return not broker.llen("copied") and not broker.hlen("unacked")

    eventually(is_empty, PATIENCE, "all messages are acknowledged")


def test_copy_does_not_run_when_first_run_goes_on(
    copy: Callable[[AsyncResult[object]], WorkerContainer],
    broker: redis.Redis,
    journal: Journal,
) -> None:
    result = send(ends.outlast_visibility, journal.log, "k")
    worker = copy(result)
    held = f"[{result.id}] on"
    eventually(lambda: held in worker.logs(), PATIENCE, "the copy meets the run")

    assert result.state == states.PENDING
    journal.open_gate("k")

    assert result.get(timeout=PATIENCE) == "once"
    wait_acknowledged(broker)
    assert len(journal.begun("k")) == 1
    assert result.successful()


def test_copy_is_acknowledged_when_first_run_has_failed(
    copy: Callable[[AsyncResult[object]], WorkerContainer],
    broker: redis.Redis,
    journal: Journal,
) -> None:
    result = send(ends.outlast_visibility, journal.log, "k", "exception")
    copy(result)
    journal.open_gate("k")

    with pytest.raises(ends.EndError):
        result.get(timeout=PATIENCE)

    wait_acknowledged(broker)
    assert len(journal.begun("k")) == 1


def test_next_try_runs_though_the_first_was_copied(
    copy: Callable[[AsyncResult[object]], WorkerContainer],
    broker: redis.Redis,
    journal: Journal,
) -> None:
    result = send(ends.retry_after_copy, journal.log, "k")
    copy(result)
    journal.open_gate("k")

    assert result.get(timeout=PATIENCE) == 1

    wait_acknowledged(broker)
    assert [begun.retries for begun in journal.begun("k")] == [0, 1]


def test_paused_run_writes_nothing_when_its_copy_has_taken_over(
    workers: list[WorkerContainer],
    copy: Callable[[AsyncResult[object]], WorkerContainer],
    broker: redis.Redis,
    journal: Journal,
) -> None:
    result = send(ends.outlast_visibility, journal.log, "k")
    first = journal.wait_begun("k")
    workers[0].process.pause()
    try:
        copy(result)
        second = journal.wait_begun("k", 2)
    finally:
        workers[0].process.resume()
    said = f"Lease {first.lease} lost"
    eventually(lambda: said in workers[0].logs(), PATIENCE, "the first is told")

    assert (second.fence or 0) > (first.fence or 0)
    assert result.state == states.PENDING
    journal.open_gate("k")
    assert result.get(timeout=PATIENCE) == "once"
    wait_acknowledged(broker)
    assert len(journal.begun("k")) == 2
