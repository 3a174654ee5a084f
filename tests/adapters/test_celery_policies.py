from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from adapters import celery_tasks as tasks
from adapters.celery_journal import PATIENCE
from celery import chain, chord, states
from harness import eventually
from histories import find_falling_fences, find_overlaps

from task_lease import LeaseConflict
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    import redis
    from adapters.celery_journal import Begun, Journal

pytestmark = pytest.mark.usefixtures("app")


def begin(journal: Journal, task: tasks.Observed, key: str = "k") -> Begun:
    """Start a run that waits at its gate."""
    task.delay(journal.log, key, gated=True)
    return journal.wait_begun(key)


def test_task_finds_its_lease_in_itself_and_around_it() -> None:
    result = tasks.look_at_lease.delay()

    found = result.get(timeout=PATIENCE)

    assert found["current"]
    assert found["state"] == "held"
    assert found["fence"] > 0
    assert found["ttl"] == 5.0
    assert found["holder"]["id"] == result.id
    assert found["holder"]["queue"] == "celery"


def test_tasks_run_side_by_side_when_keys_differ(journal: Journal) -> None:
    begin(journal, tasks.or_skip, "one")

    begin(journal, tasks.or_skip, "other")

    assert not journal.runs()


def test_skipped_task_says_who_holds_the_lease(journal: Journal) -> None:
    holder = begin(journal, tasks.or_skip)

    result = tasks.or_skip.delay(journal.log, "k")
    record = result.get(timeout=PATIENCE)

    assert holder.fence
    assert record.pop("since") == pytest.approx(holder.fence / 1e6)
    assert 0 < record.pop("remaining") <= 5.0
    assert record == {
        "skipped": True,
        "lease": holder.lease,
        "holder": {
            "task": tasks.or_skip.name,
            "id": holder.task_id,
            "host": os.uname().nodename,
            "pid": holder.pid,
        },
    }
    assert json.loads(json.dumps(record)) == record
    assert result.state == states.SUCCESS
    assert len(journal.begun("k")) == 1


def test_chain_goes_on_when_its_head_is_skipped(journal: Journal) -> None:
    holder = begin(journal, tasks.or_skip)

    tail = chain(
        tasks.or_skip.s(journal.log, "k"), tasks.collect.s(journal.log)
    ).delay()

    assert tail.get(timeout=PATIENCE)["holder"]["id"] == holder.task_id


def test_chord_body_runs_once_when_a_member_is_skipped(journal: Journal) -> None:
    holder = begin(journal, tasks.or_skip)
    members = [tasks.or_skip.s(journal.log, key) for key in ("k", "free")]

    body = chord(members)(tasks.collect.s(journal.log))
    skipped, ran = body.get(timeout=PATIENCE)

    assert skipped["holder"]["id"] == holder.task_id
    assert ran == journal.begun("free")[0].fence
    assert len(journal.told("collected")) == 1


def test_retried_task_comes_back_when_lease_is_held(journal: Journal) -> None:
    begin(journal, tasks.or_retry)

    result = tasks.or_retry.delay(journal.log, "k")
    eventually(lambda: result.state == states.RETRY, PATIENCE, "it comes back")
    journal.open_gate("k")

    fence = result.get(timeout=PATIENCE)
    first, second = journal.runs("k")
    assert not find_overlaps([first, second])
    assert first.fence < second.fence == fence


def test_conflicts_leave_max_retries_to_the_task(journal: Journal) -> None:
    first = tasks.retries_once.delay(journal.log, "k")
    journal.wait_begun("k")

    second = tasks.retries_once.delay(journal.log, "k")
    eventually(lambda: second.state == states.RETRY, PATIENCE, "it comes back")
    journal.open_gate("k")

    assert first.get(timeout=PATIENCE) == 1
    assert second.get(timeout=PATIENCE) == 1
    own = [run.retries for run in journal.begun("k") if run.task_id == second.id]
    assert own == [0, 1]


def test_retried_task_fails_when_its_limit_is_reached(journal: Journal) -> None:
    begin(journal, tasks.or_retry_twice)

    result = tasks.or_retry_twice.delay(journal.log, "k")

    with pytest.raises(LeaseConflict):
        result.get(timeout=PATIENCE)
    assert len(journal.begun("k")) == 1


def test_waiting_task_begins_as_soon_as_lease_is_free(
    journal: Journal, store: redis.Redis
) -> None:
    first = begin(journal, tasks.or_wait)
    waiting = lease_keys(str(first.lease)).queue

    results = [tasks.or_wait.delay(journal.log, "k") for _ in range(3)]
    eventually(lambda: store.zcard(waiting) == 3, PATIENCE, "three wait")
    journal.open_gate("k")

    runs = journal.wait_runs(4)
    assert not find_overlaps(runs)
    assert not find_falling_fences(runs)
    assert {result.get(timeout=PATIENCE) for result in results} == {
        run.fence for run in runs[1:]
    }
    # Much sooner than the ttl, so it was told.
    assert (runs[-1].end - runs[0].end) / 1e9 < 3.0


def test_waiting_task_fails_when_its_time_is_over(journal: Journal) -> None:
    begin(journal, tasks.or_wait_a_little)

    result = tasks.or_wait_a_little.delay(journal.log, "k")

    with pytest.raises(LeaseConflict):
        result.get(timeout=PATIENCE)


def test_conflict_survives_the_result_backend(journal: Journal) -> None:
    holder = begin(journal, tasks.or_raise)

    result = tasks.or_raise.delay(journal.log, "k")
    with pytest.raises(LeaseConflict) as caught:
        result.get(timeout=PATIENCE)

    assert type(caught.value).__module__ == "task_lease.errors"
    assert caught.value.name == holder.lease
    assert caught.value.holder
    assert caught.value.holder["id"] == holder.task_id
    assert caught.value.holder["pid"] == holder.pid
    assert 0 < caught.value.remaining <= 5.0


def test_autoretry_never_sees_a_conflict(journal: Journal) -> None:
    begin(journal, tasks.or_raise)

    result = tasks.or_raise.delay(journal.log, "k")
    result.get(timeout=PATIENCE, propagate=False)

    assert result.state == states.FAILURE
    journal.open_gate("k")
    journal.wait_runs(1)
    assert [run.retries for run in journal.begun("k")] == [0]


def test_callable_chooses_the_policy(journal: Journal) -> None:
    holder = begin(journal, tasks.or_choose)

    result = tasks.or_choose.delay(journal.log, "k")

    with pytest.raises(LeaseConflict, match=holder.task_id):
        result.get(timeout=PATIENCE)


def test_plain_task_is_leased_when_its_queue_is(
    journal: Journal, store: redis.Redis
) -> None:
    send = tasks.plain.apply_async
    send((journal.log, "k"), {"gated": True}, queue="reports")
    first = journal.wait_begun("k")

    send((journal.log, "k"), {"gated": True}, queue="reports")
    assert first.lease
    _, _, ttl, _ = str(store.get(lease_keys(first.lease).lease)).split(" ", 3)
    waiting = lease_keys(first.lease).queue
    eventually(lambda: store.zcard(waiting) == 1, PATIENCE, "the second waits")
    journal.open_gate("k")

    assert ttl == "4000"
    assert not find_overlaps(journal.wait_runs(2))


def test_plain_task_is_free_when_its_queue_is(journal: Journal) -> None:
    tasks.plain.delay(journal.log, "k", gated=True)
    tasks.plain.delay(journal.log, "k", gated=True)

    second = journal.wait_begun("k", 2)

    assert second.lease is None
    assert second.fence is None


def test_task_beats_queue_and_queue_beats_app(
    journal: Journal, store: redis.Redis
) -> None:
    send = tasks.or_skip.apply_async
    send((journal.log, "k"), {"gated": True}, queue="reports")
    first = journal.wait_begun("k")

    second = send((journal.log, "k"), queue="reports")

    assert second.get(timeout=PATIENCE)["skipped"]
    assert first.lease
    _, _, ttl, _ = str(store.get(lease_keys(first.lease).lease)).split(" ", 3)
    assert ttl == "4000"
