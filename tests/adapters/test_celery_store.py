from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from adapters import celery_tasks as tasks
from adapters.celery_journal import PATIENCE
from adapters.celery_nodes import WorkerSpec
from celery import states
from harness import Server, eventually

from task_lease import LeaseLost, StoreUnavailable
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from adapters.celery_journal import Journal
    from adapters.celery_nodes import WorkerContainer
    from celery.result import AsyncResult

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("app")]

#: What the tasks here have for a ttl, in seconds.
TTL = 2.0


@pytest.fixture(scope="module")
def lease_server(celery_server: Server) -> Iterator[Server]:
    """Give a store apart from the broker, so that it can fail alone."""
    with Server(celery_server.kind) as server:
        yield server


@pytest.fixture(scope="module")
def worker_specs(lease_server: Server) -> list[WorkerSpec]:
    settings = {"lease_url": lease_server.url(4)}
    # The worker starts without its store.
    lease_server.stop()
    return [WorkerSpec(queues=("stored",), concurrency=4, settings=settings)]


@pytest.fixture
def down(lease_server: Server) -> Server:
    """Give the store, which does not run."""
    if lease_server.is_running:
        lease_server.stop()
    return lease_server


@pytest.fixture
def up(down: Server) -> Server:
    """Give the store, which runs and is empty."""
    down.start()
    return down


def send(
    task: tasks.Observed, journal: Journal, *, gated: bool = False
) -> AsyncResult[Any]:
    call = (journal.log, "k"), {"gated": gated}
    return task.apply_async(*call, queue="stored")


def test_task_comes_back_until_store_is_there(
    journal: Journal, down: Server, workers: list[WorkerContainer]
) -> None:
    name = tasks.run_when_store_is_back.exclusive_name(journal.log, "k")

    result = send(tasks.run_when_store_is_back, journal)
    eventually(lambda: workers[0].logs().count(name) >= 2, PATIENCE, "it comes back")
    assert not journal.begun()
    down.start()

    assert result.get(timeout=PATIENCE) > 0
    assert len(journal.begun()) == 1


@pytest.mark.usefixtures("down")
def test_task_fails_when_store_is_down_and_it_shall(journal: Journal) -> None:
    result = send(tasks.fail_without_store, journal)

    with pytest.raises(StoreUnavailable) as caught:
        result.get(timeout=PATIENCE)

    assert caught.value.operation == "acquire"
    assert result.state == states.FAILURE
    assert not journal.begun()


def test_task_runs_without_fence_when_store_is_down_and_it_may(
    journal: Journal, down: Server, workers: list[WorkerContainer]
) -> None:
    result = send(tasks.run_without_store, journal, gated=True)
    begun = journal.wait_begun("k")
    down.start()
    journal.open_gate("k")

    assert result.get(timeout=PATIENCE) is None
    assert begun.fence is None
    assert "runs without a lease" in workers[0].logs()


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        (tasks.run_when_store_is_back, "kill"),
        (tasks.run_when_store_is_back, "pause"),
        (tasks.fail_without_store, "kill"),
        (tasks.run_without_store, "kill"),
    ],
)
def test_running_task_is_stopped_when_store_is_lost(
    journal: Journal, up: Server, task: tasks.Observed, fault: str
) -> None:
    result = send(task, journal, gated=True)
    first = journal.wait_begun("k")

    getattr(up, fault)()
    failed_at = time.monotonic()
    with pytest.raises(LeaseLost) as caught:
        result.get(timeout=PATIENCE)

    assert caught.value.reason == "unreachable"
    assert result.state == states.FAILURE
    # What it raised is stored later: while the store hangs, that takes some seconds.
    [stopped] = journal.told("stopped")
    assert stopped["at"] - failed_at < TTL
    assert not journal.runs()
    (up.resume if fault == "pause" else up.start)()
    journal.open_gate("k")
    assert send(task, journal).get(timeout=PATIENCE) > (first.fence or 0)


def test_running_task_goes_on_when_store_is_back_in_time(
    journal: Journal, up: Server
) -> None:
    result = send(tasks.or_skip, journal, gated=True)
    begun = journal.wait_begun("k")
    key = lease_keys(str(begun.lease)).lease

    up.restart()
    client = up.client(4)
    left = client.pttl(key)
    eventually(lambda: client.pttl(key) > left, PATIENCE, "it is renewed")
    journal.open_gate("k")

    assert result.get(timeout=PATIENCE) == begun.fence


def test_finished_task_succeeds_when_store_is_gone_at_its_end(
    journal: Journal, up: Server
) -> None:
    result = send(tasks.or_skip, journal, gated=True)
    first = journal.wait_begun("k")

    up.kill()
    journal.open_gate("k")

    assert result.get(timeout=PATIENCE) == first.fence
    up.start()
    assert send(tasks.or_skip, journal).get(timeout=PATIENCE) > (first.fence or 0)
