from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from adapters import celery_tasks as tasks
from adapters.celery_journal import PATIENCE
from adapters.celery_nodes import WorkerSpec
from celery.events.state import State
from harness import eventually

from task_lease.keys import lease_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis
    from adapters.celery_journal import Journal
    from celery import Celery

EVENTFUL = WorkerSpec(queues=("eventful",), concurrency=2, options=("-E",))
SILENT = WorkerSpec(queues=("silent",), concurrency=2)


@pytest.fixture(scope="module")
def worker_specs() -> list[WorkerSpec]:
    return [EVENTFUL, SILENT]


class Monitor:
    """What a monitor of Celery has seen."""

    def __init__(self) -> None:
        self.state: Any = State()
        self.seen: list[dict[str, Any]] = []

    def see(self, event: dict[str, Any]) -> None:
        self.state.event(event)
        self.seen.append(event)

    def wait_for(self, kind: str, task_id: str) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            about = [event for event in self.seen if event.get("uuid") == task_id]
            return [event for event in about if event["type"] == kind]

        return eventually(found, PATIENCE, f"{kind} of {task_id}")[0]


@pytest.fixture
def monitor(app: Celery) -> Iterator[Monitor]:
    monitor = Monitor()
    with app.connection_for_read() as connection:
        receiver: Any = app.events.Receiver(connection, handlers={"*": monitor.see})
        opened = threading.Event()

        def capture() -> None:
            with receiver.consumer_context(wakeup=False) as (drained, _, _):
                opened.set()
                while not receiver.should_stop:
                    try:
                        drained.drain_events(timeout=0.2)
                    except TimeoutError:
                        continue

        thread = threading.Thread(target=capture)
        thread.start()
        assert opened.wait(PATIENCE)
        yield monitor
        receiver.should_stop = True
        thread.join(PATIENCE)


def test_monitor_sees_leases_and_every_task_in_its_own_state(
    monitor: Monitor, journal: Journal
) -> None:
    send = tasks.or_skip.apply_async
    first = send((journal.log, "k"), {"gated": True}, queue="eventful")
    begun = journal.wait_begun("k")
    second = send((journal.log, "k"), queue="eventful")
    assert second.get(timeout=PATIENCE)["skipped"]
    conflict = monitor.wait_for("lease-conflict", second.id)
    acquired = monitor.wait_for("lease-acquired", first.id)
    monitor.wait_for("task-started", first.id)
    assert monitor.state.tasks[first.id].state == "STARTED"
    journal.open_gate("k")
    released = monitor.wait_for("lease-released", first.id)

    for task_id in (first.id, second.id):
        monitor.wait_for("task-succeeded", task_id)
        assert monitor.state.tasks[task_id].state == "SUCCESS"
    assert acquired["fence"] == released["fence"] == begun.fence
    assert acquired["hostname"].endswith("@tests")
    assert (conflict["holder"], conflict["holder_pid"]) == (first.id, begun.pid)
    assert conflict["detail"] == "skipped"
    told = [event for event in monitor.seen if event["type"].startswith("lease-")]
    assert journal.log not in str(told)


def test_monitor_sees_that_a_lease_is_lost(
    monitor: Monitor, journal: Journal, store: redis.Redis
) -> None:
    result = tasks.sleep.apply_async((journal.log, "k"), queue="eventful")
    begun = journal.wait_begun("k")

    assert store.delete(lease_keys(str(begun.lease)).lease) == 1

    assert monitor.wait_for("lease-lost", result.id)["detail"] == "stolen"
    monitor.wait_for("task-failed", result.id)
    assert monitor.state.tasks[result.id].state == "FAILURE"


def test_worker_without_events_sends_none(monitor: Monitor, journal: Journal) -> None:
    silent = tasks.or_skip.apply_async((journal.log, "a"), queue="silent")
    silent.get(timeout=PATIENCE)
    told = tasks.or_skip.apply_async((journal.log, "b"), queue="eventful")

    monitor.wait_for("lease-released", told.id)

    about = [event for event in monitor.seen if event.get("uuid") == silent.id]
    assert not [event for event in about if event["type"].startswith("lease-")]
