from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from adapters import celery_tasks as tasks
from adapters.celery_journal import PATIENCE
from adapters.celery_nodes import WorkerSpec
from harness import eventually

from task_lease import LeaseConflict
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    import redis
    from adapters.celery_fixtures import StartWorker
    from adapters.celery_journal import Begun, Journal
    from adapters.celery_nodes import WorkerContainer

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("app")]

# A worker that lost a child may still give it a message. So what takes over comes by
# a queue of its own, to a worker from which nothing is taken.
HERE = WorkerSpec(queues=("here",), concurrency=2)
ELSEWHERE = WorkerSpec(queues=("elsewhere",), concurrency=2, host="elsewhere")
DOOMED = WorkerSpec(queues=("doomed",), concurrency=3)


@pytest.fixture(scope="module")
def worker_specs() -> list[WorkerSpec]:
    return [HERE, ELSEWHERE]


@pytest.fixture
def doomed(start_worker: StartWorker) -> WorkerContainer:
    return start_worker(DOOMED)


def begin(journal: Journal, task: tasks.Observed, key: str = "k") -> Begun:
    """Start a run in the doomed worker, which waits at its gate."""
    task.apply_async((journal.log, key), {"gated": True}, queue="doomed")
    return journal.wait_begun(key)


def kill(worker: WorkerContainer) -> float:
    """Kill a worker with its children, and return the instant."""
    killed_at = time.monotonic()
    worker.process.kill9_all()
    return killed_at


@pytest.mark.usefixtures("doomed")
def test_two_killed_children_lose_only_their_own_leases(journal: Journal) -> None:
    held = {key: begin(journal, tasks.hold_long, key) for key in ("a", "b", "c")}

    for key in ("a", "b"):
        os.kill(held[key].pid, signal.SIGKILL)
    taken = {
        key: tasks.hold_long.apply_async((journal.log, key), queue="here")
        for key in held
    }

    for key in ("a", "b"):
        assert taken[key].get(timeout=PATIENCE) > (held[key].fence or 0)
    with pytest.raises(LeaseConflict):
        taken["c"].get(timeout=PATIENCE)
    journal.open_gate("c")
    eventually(lambda: journal.runs("c"), PATIENCE, "the third ends")
    assert [run.fence for run in journal.runs("c")] == [held["c"].fence]


def test_lease_is_taken_at_once_when_holder_died_here(
    journal: Journal, doomed: WorkerContainer, workers: list[WorkerContainer]
) -> None:
    holders = [begin(journal, tasks.hold_long, key) for key in ("a", "b", "c")]
    kill(doomed)

    for holder in holders:
        result = tasks.hold_long.apply_async((journal.log, holder.key), queue="here")
        assert result.get(timeout=PATIENCE) > (holder.fence or 0)
        assert f"Lease {holder.lease} taken from" in workers[0].logs()

    # All in far less than the ttl, and within 0.2 s unless the machine is busy.
    takers = [journal.begun(holder.key)[1] for holder in holders]
    assert min(taker.began_at - taker.attempted_at for taker in takers) < 0.2
    assert max(taker.began_at - taker.attempted_at for taker in takers) < 5.0


def test_waiting_task_begins_at_once_when_holder_dies_here(
    journal: Journal, doomed: WorkerContainer, store: redis.Redis
) -> None:
    holder = begin(journal, tasks.wait_long)
    tasks.wait_long.apply_async((journal.log, "k"), queue="here")
    waiting = lease_keys(str(holder.lease)).queue
    eventually(lambda: store.zcard(waiting) == 1, PATIENCE, "the second waits")

    killed_at = kill(doomed)

    taker = journal.wait_begun("k", 2)
    assert taker.began_at - killed_at < 5.0


def test_lease_is_taken_after_its_ttl_when_holder_died_elsewhere(
    journal: Journal, doomed: WorkerContainer, workers: list[WorkerContainer]
) -> None:
    holder = begin(journal, tasks.hold_short)
    killed_at = kill(doomed)

    tasks.hold_short.apply_async((journal.log, "k"), queue="elsewhere")

    taker = journal.wait_begun("k", 2)
    assert (taker.fence or 0) > (holder.fence or 0)
    assert 1.0 < taker.began_at - killed_at < 3.0 + 1.0
    assert f"Lease {holder.lease} taken from" not in workers[1].logs()


def test_duplicate_is_not_skipped_for_the_dead_save_at_first(
    journal: Journal, doomed: WorkerContainer, store: redis.Redis
) -> None:
    holder = begin(journal, tasks.hold_or_skip)
    key = lease_keys(str(holder.lease)).lease
    kill(doomed)

    early = tasks.hold_or_skip.apply_async((journal.log, "k"), queue="elsewhere")
    skipped = early.get(timeout=PATIENCE)
    # A beat and a half of a ttl of six seconds are three.
    eventually(lambda: store.pttl(key) < 2900, PATIENCE, "the beats are missed")
    late = tasks.hold_or_skip.apply_async((journal.log, "k"), queue="elsewhere")

    assert skipped["holder"]["id"] == holder.task_id
    assert late.get(timeout=PATIENCE) > (holder.fence or 0)
    assert [begun.task_id for begun in journal.begun("k")] == [holder.task_id, late.id]
