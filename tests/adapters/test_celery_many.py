from __future__ import annotations

import uuid
from collections import Counter
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from adapters import celery_tasks as tasks
from adapters.celery_journal import PATIENCE
from celery import chain, states
from harness import eventually
from histories import find_falling_fences, find_overlaps

from task_lease import InvalidArgument
from task_lease.keys import PREFIX, lease_keys

if TYPE_CHECKING:
    import redis
    from adapters.celery_journal import Journal
    from celery import Celery

pytestmark = pytest.mark.usefixtures("app")

#: Eight processes on a busy machine need some time for hundreds of tasks.
LONG = 90.0


@pytest.mark.parametrize("task", [tasks.contend_or_retry, tasks.contend_or_wait])
def test_eight_processes_run_each_key_once_at_a_time(
    journal: Journal, task: tasks.Observed
) -> None:
    keys = [f"key-{number % 5}" for number in range(200)]

    sent = [task.delay(journal.log, key) for key in keys]
    runs = journal.wait_runs(200, timeout=LONG)

    assert Counter(run.key for run in runs) == Counter(keys)
    assert {run.task_id for run in journal.begun()} == {result.id for result in sent}
    assert not find_overlaps(runs)
    assert not find_falling_fences(runs)
    # Both workers, of four processes each, had their part in it.
    assert len({run.pid for run in journal.begun()}) > 4
    eventually(
        lambda: {result.state for result in sent} == {states.SUCCESS},
        PATIENCE,
        "every task has succeeded",
    )


def test_many_names_leave_one_expiring_key_each(
    journal: Journal, store: redis.Redis
) -> None:
    for number in range(1000):
        tasks.tiny.delay(journal.log, number)
    journal.wait_runs(1000, timeout=LONG)

    def left() -> set[str]:
        return set(store.scan_iter(f"{PREFIX}:{{{tasks.tiny.name}:*"))

    held = [key for key in left() if not key.endswith(":f")]
    eventually(lambda: not store.exists(*held or [""]), PATIENCE, "all are released")
    names = Counter(key[: key.index("}")] for key in left())
    assert len(names) == 1000
    assert set(names.values()) == {1}
    everything = list(store.scan_iter("*", count=1000))
    assert all(store.pttl(key) != -1 for key in everything)


def test_no_link_is_skipped_when_task_sends_itself(journal: Journal) -> None:
    tasks.send_itself.delay(journal.log, 200)

    runs = journal.wait_runs(201, timeout=LONG)

    assert not find_overlaps(runs)
    assert not find_falling_fences(runs)


def test_no_link_is_skipped_in_a_chain_of_one_task(journal: Journal) -> None:
    chain(*(tasks.link.si(journal.log) for _ in range(200))).delay()

    runs = journal.wait_runs(200, timeout=LONG)

    assert not find_falling_fences(runs)


def test_no_try_is_skipped_when_task_retries_at_once(journal: Journal) -> None:
    tasks.retry_at_once.delay(journal.log, 200)

    runs = journal.wait_runs(201, timeout=LONG)

    assert not find_falling_fences(runs)


@pytest.mark.parametrize(
    "value",
    [
        uuid.UUID("12345678-1234-5678-1234-567812345678"),
        datetime(2024, 2, 29, 12, 30, 15, 250_000, tzinfo=timezone.utc),
        date(2024, 2, 29),
        Decimal("1.50"),
        ("a", (1, 2.5)),
        {1: None, "ü": [True]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_sender_knows_the_lease_that_the_worker_takes(
    journal: Journal, store: redis.Redis, value: object
) -> None:
    name = tasks.take.exclusive_name(journal.log, value=value)

    tasks.take.delay(journal.log, value, other=0)
    begun = journal.wait_begun("take")

    assert begun.lease == name
    assert str(begun.fence) in str(store.get(lease_keys(name).lease))


@pytest.mark.parametrize(
    "value", ["{x}}{", "a\nb\r", "nul\0", "\N{SNAKE}", "k" * 10_000]
)
def test_any_text_can_name_a_lease(
    journal: Journal, store: redis.Redis, value: str
) -> None:
    name = tasks.take_named.exclusive_name(journal.log, value)

    tasks.take_named.delay(journal.log, value)
    begun = journal.wait_begun("take")

    assert begun.lease == name
    key = lease_keys(name).lease
    assert str(begun.fence) in str(store.get(key))
    assert len(key) < 300
    assert all(char not in key[5:-1] for char in "{}\n\r\0")


def test_sender_is_told_of_an_argument_without_stable_form(journal: Journal) -> None:
    with pytest.raises(InvalidArgument, match="'value'"):
        tasks.take.exclusive_name(journal.log, object())


def test_task_fails_without_a_trace_when_arguments_do_not_fit(
    app: Celery, store: redis.Redis
) -> None:
    pattern = f"{PREFIX}:{{{tasks.or_raise.name}:*"
    before = set(store.scan_iter(pattern))

    result = app.send_task(tasks.or_raise.name, ("log", "key", "more", "and more"))

    with pytest.raises(TypeError, match="too many positional arguments"):
        result.get(timeout=PATIENCE)
    assert result.state == states.FAILURE
    assert set(store.scan_iter(pattern)) <= before
