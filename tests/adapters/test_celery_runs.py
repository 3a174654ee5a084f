from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from adapters import celery_tasks as tasks
from adapters.celery_journal import PATIENCE
from celery import states
from harness import eventually
from histories import find_falling_fences, find_overlaps

from task_lease import LeaseLost
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    import redis
    from adapters.celery_journal import Begun, Journal
    from celery import Celery
    from celery.result import AsyncResult

pytestmark = pytest.mark.usefixtures("app")


def key_of(begun: Begun) -> str:
    assert begun.lease
    return lease_keys(begun.lease).lease


def take_away(store: redis.Redis, journal: Journal) -> None:
    """Delete the lease of the run that has begun, as nobody should."""
    assert store.delete(key_of(journal.wait_begun("k"))) == 1


def test_lease_is_held_when_success_is_stored_and_callback_sent(
    app: Celery, journal: Journal, store: redis.Redis
) -> None:
    callback = tasks.collect.si([], journal.log).set(queue=tasks.UNTAKEN)
    with app.connection_for_write() as connection:
        channel: Any = connection.channel()
        channel.queue_purge(tasks.UNTAKEN)

    tasks.span.apply_async((journal.log, "k"), link=callback)
    seen = eventually(lambda: journal.told("success"), PATIENCE, "it has succeeded")

    assert seen == [{"what": "success", "held": True, "stored": "SUCCESS", "sent": 1}]
    key = key_of(journal.begun("k")[0])
    eventually(lambda: not store.exists(key), PATIENCE, "the lease is released")


def test_lease_is_held_when_failure_is_stored(
    journal: Journal, store: redis.Redis
) -> None:
    name = tasks.span.exclusive_name(journal.log, "k", fails=True)

    result = tasks.span.delay(journal.log, "k", fails=True)
    with pytest.raises(ArithmeticError):
        result.get(timeout=PATIENCE)

    [seen] = eventually(lambda: journal.told("failure"), PATIENCE, "it has failed")
    assert seen["held"]
    assert seen["stored"] == states.FAILURE
    key = lease_keys(name).lease
    eventually(lambda: not store.exists(key), PATIENCE, "the lease is released")


def test_lease_is_kept_when_task_lasts_three_ttls(journal: Journal) -> None:
    first = tasks.last_three_ttls.delay(journal.log, "k")
    journal.wait_begun("k")
    second = tasks.last_three_ttls.delay(journal.log, "k")

    runs = journal.wait_runs(2)

    assert not find_overlaps(runs)
    assert not find_falling_fences(runs)
    fences = [result.get(timeout=PATIENCE) for result in (first, second)]
    assert [run.fence for run in runs] == fences


def assert_lost(result: AsyncResult[object], journal: Journal) -> None:
    with pytest.raises(LeaseLost) as caught:
        result.get(timeout=PATIENCE)
    assert caught.value.name == journal.begun("k")[0].lease
    assert caught.value.reason == "stolen"
    assert result.state == states.FAILURE


def test_lost_task_is_stopped_while_it_sleeps(
    journal: Journal, store: redis.Redis
) -> None:
    result = tasks.sleep.apply_async(
        (journal.log, "k"), link=tasks.collect.si([], journal.log)
    )
    take_away(store, journal)
    lost_at = time.monotonic()

    assert_lost(result, journal)

    # One beat and one request are half of its ttl.
    assert time.monotonic() - lost_at < 3.0
    assert not journal.told("collected")


def test_autoretry_does_not_send_a_lost_task_again(
    journal: Journal, store: redis.Redis
) -> None:
    result = tasks.sleep_or_retry.delay(journal.log, "k")
    take_away(store, journal)

    assert_lost(result, journal)

    assert [begun.retries for begun in journal.begun("k")] == [0]


def test_lost_task_fails_when_it_swallows_the_loss(
    journal: Journal, store: redis.Redis
) -> None:
    result = tasks.swallow.delay(journal.log, "k")
    take_away(store, journal)

    assert_lost(result, journal)

    assert journal.told("swallowed")


def test_lost_task_sees_a_mark_when_it_wants_no_more(
    journal: Journal, store: redis.Redis
) -> None:
    result = tasks.notice.delay(journal.log, "k")
    take_away(store, journal)

    assert_lost(result, journal)

    assert journal.told("noticed") == [{"what": "noticed", "reason": "stolen"}]


def test_lost_task_is_called_back_when_it_gave_a_callable(
    journal: Journal, store: redis.Redis
) -> None:
    result = tasks.call_back.delay(journal.log, "k")
    take_away(store, journal)

    [told] = eventually(lambda: journal.told("lost"), PATIENCE, "it is called back")
    assert (told["task"], told["reason"]) == (tasks.call_back.name, "stolen")
    assert result.state == states.PENDING
    journal.open_gate("k")
    assert_lost(result, journal)
