from __future__ import annotations

import math
import pickle
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import pytest

from task_lease import LeaseLost, Leases, StoreUnavailable
from task_lease.claims import Claim
from task_lease.heartbeat import Heartbeat
from task_lease.lease import boottime

if TYPE_CHECKING:
    import redis
    from conftest import Spawn
    from core.conftest import Clock, Events, MakeLeases
    from harness import Server

    from task_lease import Lease

KEY = "tl1:{invoice:42}"
TTL = 3600.0


@pytest.fixture(autouse=True)
def _no_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that is put forward would make one due.
    monkeypatch.setattr(Heartbeat, "add", lambda *_: None)


@pytest.fixture
def leases(make_leases: MakeLeases, clock: Clock) -> Leases:
    return make_leases(ttl=TTL, clock=clock)


@pytest.fixture
def lease(leases: Leases) -> Lease:
    return leases.acquire("invoice:42")


def test_trust_ends_before_the_store_forgets_the_lease(
    lease: Lease, client: redis.Redis, clock: Clock
) -> None:
    trusted = lease.trusted_until - clock()

    assert TTL * 0.9 - 5 < trusted < TTL * 0.9
    assert trusted < client.pttl(KEY) / 1000 - TTL * 0.09


def test_trust_is_counted_from_the_start_of_the_request_when_it_was_slow(
    lease: Lease, clock: Clock
) -> None:
    started_at = clock()
    clock.ahead += TTL / 2

    lease.judge(True, started_at)  # noqa: FBT003 - the store's word

    assert lease.trusted_until == pytest.approx(started_at + TTL * 0.9)


def test_trust_never_shrinks_when_an_older_answer_comes_later(
    lease: Lease, clock: Clock
) -> None:
    started_at = clock()
    lease.judge(True, started_at + 10)  # noqa: FBT003 - the store's word
    trusted_until = lease.trusted_until

    lease.judge(True, started_at)  # noqa: FBT003 - the store's word

    assert lease.trusted_until == trusted_until


def test_old_failure_raises_no_doubt_when_a_later_request_succeeded(
    lease: Lease, clock: Clock
) -> None:
    failure = StoreUnavailable("renew", "TimeoutError")
    started_at = clock()
    lease.judge(True, started_at + 2)  # noqa: FBT003 - the store's word

    states = []
    for seconds in (1, 3):
        lease.judge(failure, started_at + seconds)
        states.append(lease.state)

    assert states == ["held", "at risk"]


def test_success_revives_nothing_when_it_comes_after_the_end_of_trust(
    lease: Lease, clock: Clock, events: Events
) -> None:
    started_at = clock() + TTL * 0.89
    clock.ahead += TTL * 0.91

    lease.judge(True, started_at)  # noqa: FBT003 - the store's word

    assert (lease.state, lease.lost) == ("lost", "expired")
    assert events.kinds() == ["acquired", "lost"]
    clock.ahead = 0
    lease.judge(True, clock())  # noqa: FBT003 - the store's word
    assert lease.state == "lost"


def test_check_compares_the_clock_itself(lease: Lease, clock: Clock) -> None:
    clock.ahead = TTL * 0.89
    lease.check()

    clock.ahead = TTL * 0.91
    with pytest.raises(LeaseLost, match=r"invoice:42 was lost \(expired\)") as lost:
        lease.check()

    assert (lost.value.name, lost.value.reason) == ("invoice:42", "expired")
    assert (lease.state, lease.lost) == ("lost", "expired")


def test_lost_is_final_when_the_clock_goes_back(lease: Lease, clock: Clock) -> None:
    clock.ahead = TTL
    with pytest.raises(LeaseLost):
        lease.check()
    clock.ahead = 0

    with pytest.raises(LeaseLost):
        lease.check()
    with pytest.raises(LeaseLost):
        lease.renew()
    assert lease.state == "lost"


def test_check_does_not_ask_the_store_unless_told(
    lease: Lease, client: redis.Redis
) -> None:
    client.delete(KEY)

    lease.check()
    with pytest.raises(LeaseLost, match="stolen"):
        lease.check(remote=True)
    with pytest.raises(LeaseLost, match="stolen"):
        lease.check()


def test_renew_gives_the_full_time_again(
    lease: Lease, client: redis.Redis, clock: Clock, events: Events
) -> None:
    clock.ahead += TTL / 2
    client.pexpire(KEY, 1000)

    lease.renew()

    assert lease.trusted_until == pytest.approx(clock() + TTL * 0.9, abs=5)
    assert client.pttl(KEY) > TTL * 1000 - 5000
    assert events.kinds() == ["acquired", "renewed"]
    assert 0 <= events[-1].seconds < 5


def test_renew_loses_the_lease_when_another_has_it(
    make_leases: MakeLeases, lease: Lease, client: redis.Redis, events: Events
) -> None:
    client.delete(KEY)
    other = make_leases().acquire("invoice:42")

    with pytest.raises(LeaseLost, match="stolen"):
        lease.renew()

    assert not lease.release()
    other.check(remote=True)
    assert events.kinds().count("lost") == 1


def test_renew_says_that_the_store_is_away_and_trust_goes_on(
    private_server: Server,
    make_leases: MakeLeases,
    clock: Clock,
    events: Events,
) -> None:
    lease = make_leases(private_server.url(), ttl=TTL, clock=clock).acquire("a")
    private_server.kill()

    with pytest.raises(StoreUnavailable, match="renew"):
        lease.renew()
    with pytest.raises(StoreUnavailable, match="renew"):
        lease.check(remote=True)

    lease.check()
    assert lease.state == "at risk"
    assert events.kinds() == ["acquired", "at risk"]
    clock.ahead = TTL
    with pytest.raises(LeaseLost, match="unreachable"):
        lease.check()


def test_risk_is_over_when_the_store_answers_again(
    private_server: Server, make_leases: MakeLeases, clock: Clock
) -> None:
    lease = make_leases(private_server.url(), ttl=TTL, clock=clock).acquire("a")
    private_server.client().save()
    private_server.kill()
    with pytest.raises(StoreUnavailable):
        lease.renew()
    private_server.start()

    lease.renew()

    assert lease.state == "held"


def test_release_says_whether_it_was_still_ours(
    lease: Lease, client: redis.Redis, events: Events
) -> None:
    assert lease.release()

    assert client.exists(KEY) == 0
    assert lease.state == "released"
    assert events.kinds() == ["acquired", "released"]
    assert 0 <= events[-1].seconds < 5


def test_release_does_nothing_when_it_is_repeated(
    leases: Leases, lease: Lease, events: Events
) -> None:
    assert lease.release()
    other = leases.acquire("invoice:42")

    assert not lease.release()

    other.check(remote=True)
    assert events.kinds() == ["acquired", "released", "acquired", "renewed"]


def test_release_tells_a_loss_when_it_was_not_noticed_before(
    lease: Lease, client: redis.Redis, events: Events
) -> None:
    client.delete(KEY)

    assert not lease.release()

    assert (lease.state, lease.lost) == ("lost", "stolen")
    assert [(event.kind, event.detail) for event in events[1:]] == [("lost", "stolen")]


def test_release_frees_a_lost_lease_when_the_store_still_has_it(
    lease: Lease, client: redis.Redis, clock: Clock
) -> None:
    clock.ahead = TTL
    with pytest.raises(LeaseLost):
        lease.check()

    assert lease.release()

    assert client.exists(KEY) == 0
    assert lease.state == "lost"


def test_release_leaves_the_lease_to_its_ttl_when_the_store_is_away(
    private_server: Server, make_leases: MakeLeases, events: Events
) -> None:
    lease = make_leases(private_server.url(), ttl=TTL).acquire("a")
    private_server.kill()

    assert lease.release()

    assert lease.state == "released"
    assert "ConnectionError" in events[-1].detail


def test_check_says_lost_when_the_lease_was_released(lease: Lease) -> None:
    lease.release()

    with pytest.raises(LeaseLost):
        lease.check()
    with pytest.raises(LeaseLost):
        lease.renew()


def test_only_one_release_counts_when_threads_race(
    leases: Leases, events: Events
) -> None:
    lease = leases.acquire("invoice:42")
    start = threading.Barrier(4)
    answers: list[bool] = []

    def release() -> None:
        start.wait()
        answers.append(lease.release())

    threads = [threading.Thread(target=release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(answers) == [False, False, False, True]
    assert events.kinds() == ["acquired", "released"]


# As a context manager


def test_block_releases_the_lease(leases: Leases, client: redis.Redis) -> None:
    with leases.acquire("invoice:42") as lease:
        assert client.exists(KEY)

    assert client.exists(KEY) == 0
    assert lease.state == "released"


def test_block_raises_at_its_end_when_the_lease_was_lost(
    leases: Leases, clock: Clock
) -> None:
    with pytest.raises(LeaseLost, match="expired"), leases.acquire("invoice:42"):
        clock.ahead = TTL


def test_block_raises_at_its_end_when_only_the_release_shows_the_loss(
    leases: Leases, client: redis.Redis
) -> None:
    with pytest.raises(LeaseLost, match="stolen"), leases.acquire("invoice:42"):
        client.delete(KEY)


def test_block_lets_its_own_error_pass_when_the_lease_was_lost(
    leases: Leases, clock: Clock, client: redis.Redis
) -> None:
    def work() -> None:
        with leases.acquire("invoice:42"):
            clock.ahead = TTL
            raise KeyError

    with pytest.raises(KeyError):
        work()

    assert client.exists(KEY) == 0


# Being called on a loss


def test_callback_is_called_once_when_the_lease_is_lost(
    lease: Lease, clock: Clock
) -> None:
    called: list[Lease] = []
    lease.when_lost(called.append)
    clock.ahead = TTL

    lease.notice(clock())
    lease.notice(clock())
    with pytest.raises(LeaseLost):
        lease.check()

    assert called == [lease]


def test_callback_is_called_at_once_when_the_lease_is_lost_already(
    lease: Lease, clock: Clock
) -> None:
    clock.ahead = TTL
    lease.notice(clock())
    called: list[Lease] = []

    lease.when_lost(called.append)

    assert called == [lease]


def test_callback_is_not_called_when_it_was_taken_back_or_the_lease_released(
    leases: Leases, clock: Clock
) -> None:
    called: list[Lease] = []
    taken_back, released = leases.acquire("a"), leases.acquire("b")
    for lease in (taken_back, released):
        lease.when_lost(called.append)
    taken_back.when_lost(None)
    released.release()
    clock.ahead = TTL

    assert taken_back.notice(clock())
    assert not released.notice(clock())

    assert called == []


def test_callback_that_raises_is_logged_and_harms_nothing(
    lease: Lease, clock: Clock, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Lease) -> None:
        raise RuntimeError

    lease.when_lost(fail)
    clock.ahead = TTL

    with pytest.raises(LeaseLost):
        lease.check()

    assert events.kinds() == ["acquired", "lost"]
    assert "RuntimeError" in caplog.text


def test_callback_comes_before_the_observers(
    make_leases: MakeLeases, clock: Clock
) -> None:
    order: list[str] = []
    observer = lambda event: order.append(event.kind)  # noqa: E731
    lease = make_leases(ttl=TTL, clock=clock, observers=[observer]).acquire("a")
    lease.when_lost(lambda _: order.append("called"))
    clock.ahead = TTL

    lease.notice(clock())

    assert order == ["acquired", "called", "lost"]


# Without a store


def test_unguarded_lease_is_always_trusted_and_has_no_fence(
    leases: Leases, client: redis.Redis, clock: Clock, events: Events
) -> None:
    lease = leases.unguarded(Claim("invoice:42", 10.0))
    clock.ahead = 10 * TTL

    lease.check()
    lease.check(remote=True)
    lease.renew()

    assert lease.fence is None
    assert lease.state == "held"
    assert lease.trusted_until == math.inf
    assert lease.release()
    assert not lease.release()
    assert client.keys() == []
    assert events == []


# Elsewhere

FORKED = textwrap.dedent(
    """
    import os, sys, traceback
    from task_lease import LeaseLost, Leases

    leases = Leases(sys.argv[1], ttl=60)
    lease = leases.acquire("invoice:42")

    def look_from_child():
        assert leases.leases() == []
        assert lease.release() is False
        lease.when_lost(print)
        for question in (lease.check, lease.renew, lambda: lease.check(remote=True)):
            try:
                question()
            except LeaseLost:
                continue
            raise AssertionError("the child believes that it holds the lease")
        assert lease.notice(float("inf")) is False
        with lease:
            pass
        assert leases.try_acquire("invoice:42") is None
        own = leases.acquire("invoice:43")
        assert own.holder["pid"] == os.getpid()
        assert leases.leases() == [own]
        own.check(remote=True)

    # The child must not even look at what another thread may have held.
    lease._mutex.acquire()
    leases._heartbeat._mutex.acquire()
    leases._wakeups._mutex.acquire()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            look_from_child()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    lease._mutex.release()
    leases._heartbeat._mutex.release()
    leases._wakeups._mutex.release()
    assert os.waitpid(child, 0)[1] == 0
    assert leases.leases() == [lease]
    lease.check(remote=True)
    assert lease.release() is True
    print("well")
    """
)


def test_forked_child_holds_nothing_and_releases_nothing(
    url: str, spawn: Spawn
) -> None:
    process = spawn([sys.executable, "-W", "ignore", "-c", FORKED, url])

    assert process.wait(30) == 0, process.output()

    assert process.output().endswith("well\n")


def test_lease_cannot_be_pickled_into_another_process(lease: Lease) -> None:
    with pytest.raises((TypeError, AttributeError)):
        pickle.dumps(lease)


def test_clock_of_trust_goes_forward() -> None:
    instants: list[Any] = [boottime() for _ in range(1000)]

    assert instants == sorted(instants)


def test_lease_shows_its_name_fence_and_state(lease: Lease) -> None:
    assert repr(lease) == f"<Lease invoice:42 fence={lease.fence} held>"
