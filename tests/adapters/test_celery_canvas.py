"""Every row and column of the table in docs/celery.md, "Chains, groups and chords"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from adapters import celery_tasks as tasks
from adapters.celery_journal import PATIENCE
from celery import chain, chord, group, states
from celery.exceptions import ChordError
from harness import eventually

from task_lease import LeaseConflict
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    import redis
    from adapters.celery_journal import Begun, Journal
    from adapters.celery_nodes import WorkerContainer
    from celery.canvas import Signature
    from celery.result import AsyncResult

pytestmark = pytest.mark.usefixtures("app")

TASKS = {
    "skip": tasks.or_skip,
    "retry": tasks.or_retry,
    "wait": tasks.or_wait,
    "raise": tasks.or_raise,
}


class Stage:
    """Holds leases, makes duplicates of their holders, and lets them go on."""

    def __init__(
        self,
        policy: str,
        journal: Journal,
        store: redis.Redis,
        workers: list[WorkerContainer],
    ) -> None:
        self.policy = policy
        self.journal = journal
        self._task = TASKS[policy]
        self._store = store
        self._workers = workers
        self._holders: dict[str, Begun] = {}

    @property
    def collect(self) -> Signature:
        """What writes down the results that come before it."""
        return tasks.collect.s(self.journal.log)

    @property
    def blame(self) -> Signature:
        """What writes down an error."""
        return tasks.blame.s(self.journal.log)

    def hold(self, *keys: str) -> None:
        """Start a run of each key, outside of the canvas."""
        for key in keys:
            self._task.delay(self.journal.log, key, gated=True)
            self._holders[key] = self.journal.wait_begun(key)

    def member(self, key: str = "free", *, gated: bool = False) -> Signature:
        """Return a task of a key: a duplicate if the key is held."""
        return self._task.si(self.journal.log, key, gated=gated)

    def let_go(self, *keys: str, times: int = 1) -> None:
        """End the holders, once the duplicates of each have met it.

        Under a policy that decides at once they are not ended.
        """
        if self.policy in {"retry", "wait"}:
            for key in keys:
                self.wait_met(key, times)
            self.journal.open_gate(*keys)

    def wait_met(self, key: str, times: int) -> None:
        """Return once so many duplicates have found a key's lease held."""
        name = str(self.journal.begun(key)[0].lease)

        def met() -> int:
            said = f"Lease {name} is held by"
            told = sum(worker.logs().count(said) for worker in self._workers)
            return told + self._store.zcard(lease_keys(name).queue)

        eventually(lambda: met() >= times, PATIENCE, f"{times} meet {key}")

    def assert_outcome(self, result: object, key: str = "k") -> None:
        """Check what a duplicate had for its result under a policy that gives one."""
        holder = self._holders[key]
        if self.policy == "skip":
            assert isinstance(result, dict)
            assert result["skipped"]
            assert result["holder"]["id"] == holder.task_id
            assert result["since"] == pytest.approx((holder.fence or 0) / 1e6)
        else:
            assert isinstance(result, int)
            assert result > (holder.fence or 0)

    def told(self, what: str) -> int:
        """Return how often something was written down."""
        return len(self.journal.told(what))


@pytest.fixture(params=list(TASKS))
def stage(
    request: pytest.FixtureRequest,
    journal: Journal,
    store: redis.Redis,
    workers: list[WorkerContainer],
) -> Stage:
    return Stage(request.param, journal, store, workers)


@pytest.mark.parametrize("place", ["head", "middle", "tail"])
def test_duplicate_in_chain(stage: Stage, place: str) -> None:
    stage.hold("k")
    before = [] if place == "head" else [stage.member()]
    after = [] if place == "tail" else [stage.collect]

    links = chain(*before, stage.member("k"), *after)
    result = links.apply_async(link_error=stage.blame)
    stage.let_go("k")

    if stage.policy == "raise":
        with pytest.raises(LeaseConflict):
            result.get(timeout=PATIENCE)
        eventually(lambda: stage.told("blamed"), PATIENCE, "the errback runs")
        assert (stage.told("collected"), stage.told("blamed")) == (0, 1)
    else:
        stage.assert_outcome(result.get(timeout=PATIENCE))
        assert (stage.told("collected"), stage.told("blamed")) == (len(after), 0)


@pytest.mark.parametrize("held", [("a",), ("a", "b")])
def test_duplicates_in_group(stage: Stage, held: tuple[str, ...]) -> None:
    stage.hold(*held)

    result: Any = group(stage.member(key) for key in ("a", "b")).apply_async()
    stage.let_go(*held)

    if stage.policy == "raise":
        with pytest.raises(LeaseConflict):
            result.get(timeout=PATIENCE)
        first, second = result.results
        eventually(result.ready, PATIENCE, "both are ready")
        assert first.state == states.FAILURE
        expected = states.FAILURE if "b" in held else states.SUCCESS
        assert second.state == expected
    else:
        found = dict(zip("ab", result.get(timeout=PATIENCE), strict=True))
        for key in held:
            stage.assert_outcome(found[key], key)


def assert_chord_error(body: AsyncResult[Any]) -> None:
    error = body.get(timeout=PATIENCE, propagate=False)
    assert body.state == states.FAILURE
    assert isinstance(error, ChordError)
    assert "LeaseConflict" in str(error)


@pytest.mark.parametrize("held", ["a", "ab", "abc"])
def test_duplicates_in_chord_header(stage: Stage, held: str) -> None:
    stage.hold(*held)
    members = [stage.member(key) for key in "abc"]

    result = chord(members)(stage.collect.on_error(stage.blame))
    stage.let_go(*held)

    if stage.policy == "raise":
        assert_chord_error(result)
        eventually(lambda: stage.told("blamed"), PATIENCE, "the errback runs")
        assert stage.told("collected") == 0
    else:
        found = dict(zip("abc", result.get(timeout=PATIENCE), strict=True))
        for key in held:
            stage.assert_outcome(found[key], key)
        assert (stage.told("collected"), stage.told("blamed")) == (1, 0)


def test_members_of_chord_header_that_are_duplicates_of_each_other(
    stage: Stage,
) -> None:
    members = [stage.member("k", gated=True) for _ in range(3)]

    result = chord(members)(stage.collect)
    stage.journal.wait_begun("k")
    stage.wait_met("k", 2)
    stage.journal.open_gate("k")

    runs = {"skip": 1, "retry": 3, "wait": 3, "raise": 1}
    if stage.policy == "raise":
        assert_chord_error(result)
    else:
        found = result.get(timeout=PATIENCE)
        assert sum(isinstance(each, int) for each in found) == runs[stage.policy]
        assert stage.told("collected") == 1
    assert len(stage.journal.begun("k")) == runs[stage.policy]


def test_duplicate_in_chord_within_chain(stage: Stage) -> None:
    stage.hold("k")
    both = group(stage.member("k"), stage.member("other"))

    links = chain(stage.member(), both, stage.collect, stage.collect)
    result: Any = links.apply_async()
    stage.let_go("k")

    if stage.policy == "raise":
        with pytest.raises((ChordError, LeaseConflict)):
            result.get(timeout=PATIENCE)
        # Which states body and tail have then is up to the release of Celery.
        assert stage.told("collected") == 0
    else:
        first, second = result.get(timeout=PATIENCE)
        stage.assert_outcome(first)
        assert isinstance(second, int)
        assert stage.told("collected") == 2


def test_duplicate_with_callback_and_errback(stage: Stage) -> None:
    stage.hold("k")

    result: Any = stage.member("k").apply_async(
        link=stage.collect, link_error=stage.blame
    )
    stage.let_go("k")

    if stage.policy == "raise":
        with pytest.raises(LeaseConflict):
            result.get(timeout=PATIENCE)
        eventually(lambda: stage.told("blamed"), PATIENCE, "the errback runs")
        assert (stage.told("collected"), stage.told("blamed")) == (0, 1)
    else:
        stage.assert_outcome(result.get(timeout=PATIENCE))
        eventually(lambda: stage.told("collected"), PATIENCE, "the callback runs")
        assert (stage.told("collected"), stage.told("blamed")) == (1, 0)
