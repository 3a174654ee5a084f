from __future__ import annotations

import json
import math
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from harness import eventually

from task_lease import (
    InvalidConfig,
    Lease,
    LeaseConfig,
    LeaseConflict,
    LeaseLost,
    Leases,
    StoreUnavailable,
)
from task_lease.claims import Claim
from task_lease.config import LONGEST_DELAY
from task_lease.exclusive import Finished, Later, Run, Skip, Tries, admit, hold

if TYPE_CHECKING:
    import redis
    from core.conftest import AllExpire, Clock, Events, MakeLeases
    from harness import Server

KEY = "tl1:{invoice:42}"
TTL = 60.0
PARENT = Claim("invoice:42", TTL, "billing.plan", "parent-id", "", 0, "mail")
CLAIM = Claim("invoice:42", TTL, "billing.send", "my-id", "parent-id", 0, "mail")
STRANGER = Claim("invoice:42", TTL, "billing.send", "their-id", "", 0, "mail")

SKIP = LeaseConfig(ttl=TTL)
RETRY = LeaseConfig(ttl=TTL, on_conflict="retry", retry_delay=2.0)
RAISE = LeaseConfig(ttl=TTL, on_conflict="raise")
WAIT = LeaseConfig(ttl=TTL, on_conflict="wait", wait=20)

every_policy = pytest.mark.parametrize("config", [SKIP, RETRY, WAIT, RAISE])


@pytest.fixture
def leases(make_leases: MakeLeases) -> Leases:
    return make_leases(ttl=TTL)


@pytest.fixture
def held(leases: Leases) -> Lease:
    return take(leases, STRANGER)


def take(leases: Leases, claim: Claim) -> Lease:
    lease = leases.ask(claim)
    assert isinstance(lease, Lease)
    return lease


def later(admission: object) -> Later:
    assert isinstance(admission, Later)
    return admission


def conflicts(events: Events) -> list[str]:
    return [event.detail for event in events if event.kind == "conflict"]


@every_policy
def test_task_runs_when_the_lease_is_free(
    leases: Leases, config: LeaseConfig, events: Events
) -> None:
    admission = admit(leases, CLAIM, config)

    assert isinstance(admission, Run)
    admission.lease.check(remote=True)
    assert admission.lease.holder["id"] == "my-id"
    assert events[0].kind == "acquired"
    about = (events[0].task, events[0].id, events[0].queue)
    assert about == ("billing.send", "my-id", "mail")


# The four policies


def test_skip_says_who_holds_it_and_nothing_else(
    leases: Leases, held: Lease, client: redis.Redis, events: Events
) -> None:
    before = client.keys()

    admission = admit(leases, CLAIM, SKIP)

    assert isinstance(admission, Skip)
    record = dict(admission.record)
    assert held.fence is not None
    assert record.pop("since") == held.fence / 1e6
    assert TTL - 10 < record.pop("remaining") <= TTL  # type: ignore[operator]
    assert record == {
        "skipped": True,
        "lease": "invoice:42",
        "holder": {
            "task": "billing.send",
            "id": "their-id",
            "host": held.holder["host"],
            "pid": os.getpid(),
        },
    }
    assert json.loads(json.dumps(admission.record)) == admission.record
    assert client.keys() == before
    assert conflicts(events) == ["skipped"]


def test_skip_record_is_whole_when_the_holder_is_unknown(
    leases: Leases, client: redis.Redis
) -> None:
    client.set(KEY, "stranger 17 60000 no record", px=60_000)

    admission = admit(leases, CLAIM, SKIP)

    assert isinstance(admission, Skip)
    holder = admission.record["holder"]
    assert holder == {"task": "", "id": "", "host": "", "pid": 0}
    assert admission.record["since"] == 17e-6


@pytest.mark.usefixtures("held")
def test_retry_comes_back_later_and_counts(leases: Leases) -> None:
    admission = later(admit(leases, CLAIM, RETRY, tries=Tries(3, 5)))

    assert admission.reason == "conflict"
    assert admission.tries == Tries(4, 5)
    assert isinstance(admission.error, LeaseConflict)
    assert admission.error.name == "invoice:42"


@pytest.mark.parametrize(
    ("conflicts", "longest", "low", "high"),
    [
        (0, LONGEST_DELAY, 2, 4),
        (1, LONGEST_DELAY, 4, 8),
        (5, LONGEST_DELAY, 64, 128),
        (99, LONGEST_DELAY, 150, LONGEST_DELAY),
        (99, 1e9, 150, LONGEST_DELAY),
        (99, 30, 15, 30),
        (5, 3, 1.5, 3),
    ],
)
@pytest.mark.usefixtures("held")
def test_retry_backs_off_with_jitter_up_to_a_limit(
    leases: Leases, conflicts: int, longest: float, low: float, high: float
) -> None:
    config = RETRY.with_settings({"retry_limit": None})
    tries = Tries(conflicts)

    delays = {
        later(admit(leases, CLAIM, config, tries=tries, longest_delay=longest)).delay
        for _ in range(20)
    }

    assert all(low <= delay <= high for delay in delays)
    assert len(delays) > 1


@pytest.mark.parametrize("limit", [0, 1, 7])
@pytest.mark.usefixtures("held")
def test_retry_fails_when_its_limit_is_reached(
    leases: Leases, limit: int, events: Events
) -> None:
    config = RETRY.with_settings({"retry_limit": limit})
    for conflict in range(limit):
        assert later(admit(leases, CLAIM, config, tries=Tries(conflict, 99)))

    with pytest.raises(LeaseConflict):
        admit(leases, CLAIM, config, tries=Tries(limit))

    assert conflicts(events)[-1] == "failed"


@pytest.mark.usefixtures("held")
def test_raise_fails_with_the_holder(leases: Leases, events: Events) -> None:
    with pytest.raises(LeaseConflict) as conflict:
        admit(leases, CLAIM, RAISE)

    assert conflict.value.holder is not None
    assert conflict.value.holder["id"] == "their-id"
    assert 0 < conflict.value.remaining <= TTL
    assert conflicts(events) == ["failed"]


def test_wait_runs_when_the_lease_is_released(leases: Leases, held: Lease) -> None:
    release = threading.Timer(0.2, held.release)
    release.start()

    admission = admit(leases, CLAIM, WAIT)

    assert isinstance(admission, Run)
    release.join()


@pytest.mark.usefixtures("held")
def test_wait_fails_when_its_patience_has_ended(
    leases: Leases, client: redis.Redis, events: Events
) -> None:
    config = WAIT.with_settings({"wait": 0.3})
    began_at = time.monotonic()

    with pytest.raises(LeaseConflict):
        admit(leases, CLAIM, config)

    assert time.monotonic() - began_at >= 0.3
    assert client.exists(f"{KEY}:q") == 0
    assert conflicts(events) == ["failed"]


@pytest.mark.usefixtures("held")
def test_wait_does_not_wait_when_it_has_no_time(leases: Leases) -> None:
    with pytest.raises(LeaseConflict):
        admit(leases, CLAIM, WAIT.with_settings({"wait": 0}))


@pytest.mark.parametrize(
    ("policy", "outcome"), [("skip", Skip), ("retry", Later), ("wait", Run)]
)
def test_callable_chooses_the_policy_from_the_conflict(
    leases: Leases, held: Lease, policy: Any, outcome: type
) -> None:
    seen: list[LeaseConflict] = []

    def choose(conflict: LeaseConflict) -> Any:
        seen.append(conflict)
        if policy == "wait":
            held.release()
        return policy

    admission = admit(leases, CLAIM, LeaseConfig(ttl=TTL, on_conflict=choose))

    assert isinstance(admission, outcome)
    assert [(c.holder or {}).get("id") for c in seen] == ["their-id"]


@pytest.mark.usefixtures("held")
def test_callable_is_refused_when_it_chooses_nothing(leases: Leases) -> None:
    config = LeaseConfig(ttl=TTL, on_conflict=lambda _: "perhaps")  # type: ignore[arg-type,return-value]

    with pytest.raises(InvalidConfig, match="on_conflict='perhaps'"):
        admit(leases, CLAIM, config)


@pytest.mark.usefixtures("held")
def test_error_of_the_callable_is_the_tasks(leases: Leases) -> None:
    def fail(_: LeaseConflict) -> Any:
        raise KeyError

    with pytest.raises(KeyError):
        admit(leases, CLAIM, LeaseConfig(ttl=TTL, on_conflict=fail))


# A task never conflicts with itself


@every_policy
def test_copy_comes_back_later_whatever_the_policy(
    leases: Leases, config: LeaseConfig, events: Events
) -> None:
    take(leases, CLAIM)
    delays = []
    for quiet in (0, 1, 2, 30):
        admission = later(admit(leases, CLAIM, config, tries=Tries(2, quiet)))
        assert admission.reason == "copy"
        assert admission.tries == Tries(2, quiet + 1)
        delays.append(admission.delay)

    assert delays == [1, 2, 4, LONGEST_DELAY]
    assert all("(copy)" in detail for detail in conflicts(events))


def test_copy_stops_waiting_when_its_original_gets_the_lease(
    make_leases: MakeLeases,
    client: redis.Redis,
    held: Lease,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("task_lease.client._LONGEST_REST", 0.3)
    original = make_leases(ttl=TTL)
    first = threading.Thread(target=admit, args=(original, CLAIM, WAIT))
    first.start()
    eventually(lambda: client.zcard(f"{KEY}:q"), 10, "the original waits")
    admissions: list[object] = []
    copy = threading.Thread(
        target=lambda: admissions.append(admit(make_leases(ttl=TTL), CLAIM, WAIT))
    )
    copy.start()
    eventually(lambda: client.zcard(f"{KEY}:q") == 2, 10, "the copy waits")

    held.release()
    first.join(20)
    copy.join(20)

    assert later(admissions[0]).reason == "copy"
    assert client.exists(f"{KEY}:q") == 0


def test_task_without_an_id_is_nobodys_copy(leases: Leases) -> None:
    take(leases, Claim("invoice:42", TTL))

    assert isinstance(admit(leases, Claim("invoice:42", TTL), SKIP), Skip)


@every_policy
@pytest.mark.parametrize(
    ("done", "asks", "outcome"), [(0, 0, Finished), (2, 1, Finished), (0, 1, Run)]
)
def test_copy_does_nothing_when_its_attempt_or_a_later_one_is_done(
    leases: Leases, config: LeaseConfig, done: int, asks: int, outcome: type
) -> None:
    take(leases, CLAIM._replace(attempt=done)).release(remember=60)
    copy = CLAIM._replace(attempt=asks, may_be_copy=True)

    assert isinstance(admit(leases, copy, config), outcome)


def test_marker_of_what_is_done_is_only_read_by_what_may_be_a_copy(
    leases: Leases, all_expire: AllExpire
) -> None:
    take(leases, CLAIM).release(remember=60)
    all_expire()

    assert isinstance(admit(leases, CLAIM, SKIP), Run)


# Nor with its parent


@every_policy
def test_child_waits_in_place_until_its_parent_releases(
    leases: Leases, config: LeaseConfig
) -> None:
    parent = take(leases, PARENT)
    release = threading.Timer(0.2, parent.release)
    release.start()

    admission = admit(leases, CLAIM, config)

    assert isinstance(admission, Run)
    release.join()


@every_policy
def test_child_comes_back_later_when_its_parent_holds_on(
    leases: Leases, config: LeaseConfig, client: redis.Redis
) -> None:
    take(leases, PARENT)
    began_at = time.monotonic()

    admission = later(admit(leases, CLAIM, config, tries=Tries(1, 3)))

    assert 1 <= time.monotonic() - began_at < 10
    assert (admission.reason, admission.delay) == ("parent", 8)
    assert admission.tries == Tries(1, 4)
    assert client.exists(f"{KEY}:q") == 0


def test_next_try_of_a_task_waits_for_the_one_before(leases: Leases) -> None:
    before = take(leases, CLAIM)
    release = threading.Timer(0.2, before.release)
    release.start()

    assert isinstance(admit(leases, CLAIM._replace(attempt=1), SKIP), Run)
    release.join()


def test_child_of_many_waits_for_each_of_them(leases: Leases) -> None:
    parent = take(leases, STRANGER)
    release = threading.Timer(0.2, parent.release)
    release.start()
    child = CLAIM._replace(parents=("another-id", "their-id"))

    assert isinstance(admit(leases, child, SKIP), Run)
    release.join()


def test_policy_is_asked_when_the_parent_went_and_another_came_first(
    make_leases: MakeLeases, leases: Leases, client: redis.Redis
) -> None:
    parent = take(leases, PARENT)
    other = make_leases(ttl=TTL)
    first = threading.Thread(target=other.wait, args=(STRANGER, lambda _: math.inf))
    first.start()
    eventually(lambda: client.zcard(f"{KEY}:q"), 10, "another waits")
    release = threading.Timer(0.2, parent.release)
    release.start()

    admission = admit(leases, CLAIM, SKIP)

    release.join()
    first.join(20)
    assert isinstance(admission, Skip)
    assert admission.record["holder"]["id"] == "their-id"


@pytest.mark.parametrize("id_", [[1], {}, 7, None, True])
def test_record_of_a_stranger_confuses_nobody(
    leases: Leases, client: redis.Redis, id_: object
) -> None:
    record = json.dumps({"id": id_, "attempt": id_, "task": id_, "pid": id_})
    client.set(KEY, f"stranger 17 60000 {record}", px=60_000)

    assert isinstance(admit(leases, CLAIM, SKIP), Skip)
    with pytest.raises(LeaseConflict, match="is held by"):
        admit(leases, CLAIM, RAISE)


def test_task_without_a_parent_is_nobodys_child(leases: Leases) -> None:
    take(leases, Claim("invoice:42", TTL))

    assert isinstance(admit(leases, CLAIM._replace(parent=""), SKIP), Skip)


# Nobody is skipped in favour of the dead


@pytest.mark.parametrize("remaining", [29.0, 10.0, 0.5])
@pytest.mark.usefixtures("held")
def test_skip_becomes_later_when_the_holder_has_missed_a_beat(
    leases: Leases, client: redis.Redis, remaining: float
) -> None:
    client.pexpire(KEY, round(remaining * 1000))

    admission = later(admit(leases, CLAIM, SKIP))

    assert admission.reason == "dead"
    assert remaining - 0.4 < admission.delay <= remaining
    assert admission.tries == Tries(0, 1)


@pytest.mark.usefixtures("held")
def test_skip_is_meant_when_the_holder_is_within_a_beat_and_a_half(
    leases: Leases, client: redis.Redis
) -> None:
    client.pexpire(KEY, 40_000)

    assert isinstance(admit(leases, CLAIM, SKIP), Skip)


@pytest.mark.usefixtures("held")
def test_delay_for_the_dead_is_no_longer_than_the_host_can_bear(
    leases: Leases, client: redis.Redis
) -> None:
    client.pexpire(KEY, 29_000)

    assert later(admit(leases, CLAIM, SKIP, longest_delay=10)).delay == 10


@pytest.mark.parametrize("config", [RETRY, RAISE])
@pytest.mark.usefixtures("held")
def test_only_skip_cares_whether_the_holder_may_be_dead(
    leases: Leases, client: redis.Redis, config: LeaseConfig
) -> None:
    client.pexpire(KEY, 10_000)

    if config is RAISE:
        with pytest.raises(LeaseConflict):
            admit(leases, CLAIM, config)
    else:
        assert later(admit(leases, CLAIM, config)).reason == "conflict"


# A store that cannot be used


@pytest.fixture
def away(private_server: Server, make_leases: MakeLeases) -> Leases:
    leases = make_leases(private_server.url(), ttl=TTL)
    private_server.kill()
    return leases


@every_policy
def test_task_comes_back_later_when_the_store_is_away(
    away: Leases, config: LeaseConfig, events: Events
) -> None:
    admission = later(admit(away, CLAIM, config, tries=Tries(2, 1)))

    assert admission.reason == "store"
    assert admission.tries == Tries(2, 2)
    first = config.retry_delay
    assert 2 * first <= admission.delay <= 4 * first
    assert isinstance(admission.error, StoreUnavailable)
    assert "back in" in conflicts(events)[0]
    assert "ConnectionError" in conflicts(events)[0]


def test_delay_without_a_store_is_no_longer_than_the_host_can_bear(
    away: Leases,
) -> None:
    tries = Tries(0, 99)

    assert later(admit(away, CLAIM, SKIP, tries=tries, longest_delay=10)).delay <= 10
    assert later(admit(away, CLAIM, SKIP, tries=tries)).delay <= LONGEST_DELAY


@every_policy
def test_task_fails_when_the_store_is_away_and_it_is_to_raise(
    away: Leases, config: LeaseConfig
) -> None:
    with pytest.raises(StoreUnavailable, match="failed at acquire"):
        admit(away, CLAIM, config.with_settings({"on_error": "raise"}))


@every_policy
def test_task_runs_unguarded_when_the_store_is_away_and_it_is_to_run(
    away: Leases, config: LeaseConfig, events: Events
) -> None:
    admission = admit(away, CLAIM, config.with_settings({"on_error": "run"}))

    assert isinstance(admission, Run)
    lease = admission.lease
    assert lease.fence is None
    assert hold(lease, lambda: "done") == "done"
    assert lease.release()
    assert "runs without a lease" in conflicts(events)[0]


def test_task_does_not_run_when_the_answer_came_too_late(
    make_leases: MakeLeases, clock: Clock, client: redis.Redis
) -> None:
    leases = make_leases(clock=clock, ttl=TTL)
    ask = leases._store.acquire

    def ask_slowly(*args: Any) -> Any:
        answer = ask(*args)
        clock.ahead += TTL
        return answer

    leases._store.acquire = ask_slowly  # type: ignore[method-assign,assignment]

    assert later(admit(leases, CLAIM, SKIP)).reason == "store"
    assert client.exists(KEY) == 0


def test_waiting_task_comes_back_later_when_the_store_goes_away(
    private_server: Server, make_leases: MakeLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("task_lease.client._WITHOUT_STORE", 0.3)
    leases = make_leases(private_server.url(), ttl=TTL)
    take(leases, STRANGER)
    kill = threading.Timer(0.2, private_server.kill)
    kill.start()

    admission = later(admit(leases, CLAIM, WAIT))

    assert admission.reason == "store"
    kill.join()


# The whole of it


class Workers:
    """Threads that run bodies under one lease, and write down what they see."""

    def __init__(self, make_leases: MakeLeases, config: LeaseConfig) -> None:
        self.fences: list[int | None] = []
        self.overlaps: list[list[int]] = []
        self._inside: list[int] = []
        self._make_leases = make_leases
        self._config = config

    def work(self, workers: int, turns: int) -> None:
        threads = [
            threading.Thread(target=self._take_turns, args=(turns,))
            for _ in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def _take_turns(self, turns: int) -> None:
        leases = self._make_leases()
        for turn in range(turns):
            claim = Claim("invoice:42", 5, "t", f"{threading.get_ident()}-{turn}")
            with suppress(LeaseConflict):
                admission = admit(leases, claim, self._config)
                if isinstance(admission, Run):
                    self.fences.append(admission.lease.fence)
                    hold(admission.lease, self._body)
                    admission.lease.release()

    def _body(self) -> None:
        self._inside.append(threading.get_ident())
        if len(self._inside) > 1:
            self.overlaps.append(list(self._inside))
        time.sleep(0.002)
        self._inside.remove(threading.get_ident())


@pytest.mark.parametrize("on_conflict", ["skip", "retry", "wait", "raise"])
def test_bodies_never_overlap_whatever_the_policy(
    make_leases: MakeLeases,
    client: redis.Redis,
    all_expire: AllExpire,
    on_conflict: Any,
) -> None:
    config = LeaseConfig(ttl=5, on_conflict=on_conflict, wait=60)
    workers = Workers(make_leases, config)

    workers.work(workers=6, turns=10)

    assert workers.overlaps == []
    assert len(workers.fences) == 60 if on_conflict == "wait" else workers.fences
    assert workers.fences == sorted(set(workers.fences), key=lambda fence: fence or 0)
    assert list(client.scan_iter()) == [f"{KEY}:f".encode()]
    all_expire()


def test_lost_run_tells_its_loss_and_frees_nobody_elses_lease(
    make_leases: MakeLeases, client: redis.Redis, leases: Leases
) -> None:
    lease = take(make_leases(), CLAIM._replace(ttl=0.6))

    def body() -> None:
        client.delete(KEY)
        take(leases, STRANGER)
        time.sleep(60)

    with pytest.raises(LeaseLost, match="stolen"):
        hold(lease, body)

    assert not lease.release()
    (theirs,) = leases.leases()
    theirs.check(remote=True)
