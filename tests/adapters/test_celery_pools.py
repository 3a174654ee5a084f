from __future__ import annotations

import importlib.util
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from adapters import celery_tasks as tasks
from adapters.celery_journal import PATIENCE
from adapters.celery_nodes import WorkerSpec
from celery import states
from histories import find_falling_fences, find_overlaps

from task_lease import LeaseLost
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    import redis
    from adapters.celery_journal import Journal
    from celery.result import AsyncResult

pytestmark = pytest.mark.usefixtures("app")

POOLS = ["prefork", "threads", "solo", "gevent"]
in_one_process = pytest.mark.parametrize(
    "pool", ["threads", "gevent"], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=POOLS)
def pool(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "gevent" and importlib.util.find_spec("gevent") is None:
        pytest.skip("gevent is not installed")
    return name


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> list[WorkerSpec]:
    side_by_side = 1 if pool == "solo" else 4
    # With a limit, the threads pool of Celery 5.5 pauses for seconds at the limit.
    settings = {"worker_prefetch_multiplier": 0}
    return [WorkerSpec((pool,), pool, side_by_side, settings)] * 2


def send(
    pool: str,
    task: tasks.Observed,
    journal: Journal,
    key: str = "k",
    **options: object,
) -> AsyncResult[Any]:
    return task.apply_async((journal.log, key), options, queue=pool)


def test_task_has_its_lease_in_pool(pool: str) -> None:
    found = tasks.look_at_lease.apply_async(queue=pool).get(timeout=PATIENCE)

    assert found["current"]
    assert found["state"] == "held"
    assert found["holder"]["queue"] == pool


def test_duplicate_is_skipped_in_pool(pool: str, journal: Journal) -> None:
    holder = send(pool, tasks.or_skip, journal, "k", gated=True)
    journal.wait_begun("k")

    record = send(pool, tasks.or_skip, journal).get(timeout=PATIENCE)

    assert record["holder"]["id"] == holder.id


def test_tasks_take_turns_in_pool(pool: str, journal: Journal) -> None:
    keys = [f"key-{number % 3}" for number in range(45)]

    for key in keys:
        send(pool, tasks.contend_or_wait, journal, key)
    runs = journal.wait_runs(45)

    assert Counter(run.key for run in runs) == Counter(keys)
    assert not find_overlaps(runs)
    assert not find_falling_fences(runs)


def test_task_that_computes_for_three_ttls_keeps_its_lease_in_pool(
    pool: str, journal: Journal
) -> None:
    # On two workers, so that another one is there to take what is lost.
    results = [send(pool, tasks.compute_three_ttls, journal) for _ in range(2)]

    fences = [result.get(timeout=PATIENCE) for result in results]

    assert None not in fences
    runs = journal.wait_runs(2)
    assert not find_overlaps(runs)
    assert not find_falling_fences(runs)


def test_lost_task_is_stopped_in_pool(
    pool: str, journal: Journal, store: redis.Redis
) -> None:
    result = send(pool, tasks.spin, journal)
    lease = str(journal.wait_begun("k").lease)

    store.delete(lease_keys(lease).lease)
    with pytest.raises(LeaseLost, match="stolen"):
        result.get(timeout=PATIENCE)

    assert result.state == states.FAILURE


@in_one_process
def test_each_task_has_a_lease_of_its_own_in_one_process(
    pool: str, journal: Journal
) -> None:
    # As many as one worker runs, for it may take all of them.
    keys = ["a", "b", "c", "d"]
    results = [send(pool, tasks.or_skip, journal, key, gated=True) for key in keys]
    begun = [journal.wait_begun(key) for key in keys]

    assert len({run.lease for run in begun}) == 4
    assert len({run.pid for run in begun}) <= 2
    journal.open_gate(*keys)
    assert [result.get(timeout=PATIENCE) for result in results] == [
        run.fence for run in begun
    ]


@in_one_process
def test_loss_stops_only_its_own_task_in_one_process(
    pool: str, journal: Journal, store: redis.Redis
) -> None:
    lost = send(pool, tasks.spin, journal, "lost")
    lease = str(journal.wait_begun("lost").lease)
    others = [send(pool, tasks.or_skip, journal, key, gated=True) for key in "abc"]
    for key in "abc":
        journal.wait_begun(key)

    store.delete(lease_keys(lease).lease)
    lost.get(timeout=PATIENCE, propagate=False)
    journal.open_gate(*"abc")

    for other in others:
        assert isinstance(other.get(timeout=PATIENCE), int)
    assert lost.state == states.FAILURE
