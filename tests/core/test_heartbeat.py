from __future__ import annotations

import gc
import logging
import os
import sys
import textwrap
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from harness import eventually, read_stat

from task_lease import LeaseLost, Leases
from task_lease.claims import Claim
from task_lease.lease import boottime
from task_lease.scripts import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis
    from conftest import Spawn
    from core.conftest import Clock, Events, MakeLeases
    from harness import Process, Server

    from task_lease import Lease

KEY = "tl1:{invoice:42}"


def is_stopped(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state == "T"


def beating_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "task-lease-heartbeat"]


def beats(leases: Leases) -> bool:
    """Whether these leases have a beating thread; others may have theirs."""
    return leases._heartbeat._thread is not None


class CountedRequests:
    """Counts the renewals that are sent, and how many leases each carries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.threads: set[str] = set()
        send = Store.renew

        def renew(store: Store, renewals: Any) -> Any:
            self.sizes.append(len(renewals))
            return send(store, renewals)

        monkeypatch.setattr(Store, "renew", renew)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> CountedRequests:
    return CountedRequests(monkeypatch)


# Keeping a lease


def test_lease_is_kept_for_many_ttls(
    make_leases: MakeLeases, client: redis.Redis, events: Events
) -> None:
    lease = make_leases(ttl=0.6).acquire("invoice:42")
    until = boottime() + 4 * lease.ttl
    lowest = lease.ttl

    while boottime() < until:
        lease.check()
        lowest = min(lowest, client.pttl(KEY) / 1000)
        time.sleep(0.01)

    assert lowest > 0
    assert events.kinds().count("renewed") >= 6
    assert set(events.kinds()) <= {"acquired", "renewed", "at risk"}
    assert lease.release()


def test_beats_end_when_the_lease_is_released(
    make_leases: MakeLeases, client: redis.Redis, requests: CountedRequests
) -> None:
    leases = make_leases(ttl=0.5)
    with leases.acquire("invoice:42"):
        eventually(lambda: len(requests.sizes) > 1, 10, "two beats")
    sent = len(requests.sizes)
    eventually(lambda: not beats(leases), 10, "the thread ends")

    assert len(requests.sizes) - sent <= 1
    assert client.exists(KEY) == 0


def test_thousand_leases_are_renewed_by_one_thread_in_few_requests(
    make_leases: MakeLeases, requests: CountedRequests
) -> None:
    leases = make_leases(ttl=6)
    threads, beating = threading.active_count(), len(beating_threads())
    held = [leases.acquire(f"invoice:{number}") for number in range(1000)]

    eventually(lambda: sum(requests.sizes) >= 1000, 20, "every lease is renewed")

    assert len(beating_threads()) <= beating + 1
    assert threading.active_count() <= threads + 2  # it, and a request on its way
    assert len(requests.sizes) <= 10
    for lease in held:
        lease.check()
    assert len(leases.leases()) == 1000


def test_leases_taken_by_many_threads_are_renewed_in_few_requests(
    make_leases: MakeLeases, requests: CountedRequests
) -> None:
    leases = make_leases(ttl=3)
    go_home = threading.Event()

    def hold(thread: int) -> None:
        held = [leases.acquire(f"invoice:{thread}-{n}") for n in range(40)]
        go_home.wait(30)
        for lease in held:
            lease.release()

    threads = [threading.Thread(target=hold, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    eventually(lambda: sum(requests.sizes) >= 320, 20, "every lease is renewed")
    few = len(requests.sizes)
    go_home.set()
    for thread in threads:
        thread.join()

    assert few <= 12
    assert leases.leases() == []


def test_leases_of_different_ttls_all_live(make_leases: MakeLeases) -> None:
    leases = make_leases()
    held = [
        leases.acquire(f"invoice:{ttl}", ttl=ttl) for ttl in (0.5, 0.7, 1.3, 7, 3600)
    ]

    until = boottime() + 2.5
    while boottime() < until:
        for lease in held:
            lease.check()
        time.sleep(0.02)


def test_late_grant_is_renewed_before_those_that_came_in_between(
    make_leases: MakeLeases, clock: Clock, events: Events
) -> None:
    leases = make_leases(ttl=6, clock=clock)
    leases.acquire("in time")
    clock.ahead = -4.5  # the answer takes that long
    late = leases.acquire("late")
    clock.ahead = 0

    # Trusted for 0.9 s more; the beat of the other one is due in 2 s.
    eventually(lambda: "renewed" in events.kinds("late"), 5, "it is renewed")

    late.check()
    assert "renewed" not in events.kinds("in time")


# Losing a lease


def test_loss_is_told_within_a_beat_and_a_request_when_stolen(
    make_leases: MakeLeases, client: redis.Redis, events: Events
) -> None:
    lease = make_leases(ttl=1.2).acquire("invoice:42")
    told_at: list[float] = []
    lease.when_lost(lambda _: told_at.append(boottime()))
    events.await_kind("renewed")

    stolen_at = boottime()
    client.delete(KEY)
    eventually(lambda: told_at, 5, "the loss is told")

    # A beat is 0.4 s and a request 0.2 s; the rest is for a busy machine.
    assert told_at[0] - stolen_at < 0.4 + 0.2 + 0.4
    assert lease.lost == "stolen"
    assert events.await_kind("lost").detail == "stolen"


def test_others_are_kept_when_one_lease_is_stolen(
    make_leases: MakeLeases, client: redis.Redis, events: Events
) -> None:
    leases = make_leases(ttl=0.6)
    lost, *kept = [leases.acquire(name) for name in ("a", "b", "c")]

    client.delete("tl1:{a}")
    events.await_kind("lost")

    assert leases.leases() == kept
    for lease in kept:
        lease.check(remote=True)
    assert lost.state == "lost"


def test_unreachable_store_is_told_at_the_end_of_trust(
    private_server: Server, make_leases: MakeLeases, events: Events
) -> None:
    lease = make_leases(private_server.url(), ttl=2).acquire("invoice:42")
    told_at: list[float] = []
    lease.when_lost(lambda _: told_at.append(boottime()))
    events.await_kind("renewed")

    private_server.pause()
    events.await_kind("at risk")
    assert lease.state == "at risk"
    lease.check()
    trusted_until = lease.trusted_until
    eventually(lambda: told_at, 5, "the loss is told")

    # Not a moment later than the store may give it to somebody else.
    assert trusted_until <= told_at[0] < trusted_until + 0.2
    assert (lease.state, lease.lost) == ("lost", "unreachable")
    assert events.await_kind("lost").detail == "unreachable"
    private_server.resume()


def test_lost_lease_is_not_revived_when_the_store_answers_at_last(
    private_server: Server, make_leases: MakeLeases, events: Events
) -> None:
    leases = make_leases(private_server.url(), ttl=1)
    lease = leases.acquire("invoice:42")
    events.await_kind("renewed")
    private_server.pause()
    events.await_kind("lost")

    private_server.resume()
    again = leases.acquire("invoice:42", timeout=10)

    with pytest.raises(LeaseLost, match="unreachable"):
        lease.check()
    assert events.kinds().count("lost") == 1
    assert again.fence is not None
    assert lease.fence is not None
    assert again.fence > lease.fence


def test_risk_passes_when_the_store_answers_in_time(
    private_server: Server, make_leases: MakeLeases, events: Events
) -> None:
    lease = make_leases(private_server.url(), ttl=3).acquire("invoice:42")
    private_server.pause()
    events.await_kind("at risk")

    private_server.resume()
    events.await_kind("renewed")

    assert lease.state == "held"
    assert "lost" not in events.kinds()
    lease.check(remote=True)


def test_lease_survives_a_restart_of_the_store_within_its_ttl(
    private_server: Server, make_leases: MakeLeases, events: Events
) -> None:
    lease = make_leases(private_server.url(), ttl=3).acquire("invoice:42")
    events.await_kind("renewed")
    beats = events.kinds().count("renewed")

    private_server.restart()
    eventually(lambda: events.kinds().count("renewed") > beats + 1, 10, "two beats")

    lease.check()


def test_loss_is_told_when_the_store_restarts_empty(
    private_server: Server, make_leases: MakeLeases, events: Events
) -> None:
    make_leases(private_server.url(), ttl=3).acquire("invoice:42")

    private_server.restart_empty()

    assert events.await_kind("lost").detail == "stolen"


def test_hanging_requests_are_few_and_beats_go_on_after_them(
    private_server: Server, make_leases: MakeLeases, events: Events
) -> None:
    leases = make_leases(private_server.url(), ttl=0.5)
    before = threading.active_count()
    for turn in range(12):
        leases.acquire(f"invoice:{turn}", ttl=0.5 + turn / 100)

    private_server.pause()
    eventually(lambda: events.kinds().count("lost") == 12, 10, "all are lost")
    most = threading.active_count()
    private_server.resume()

    with leases.acquire("another") as lease:
        eventually(lambda: events.kinds("another").count("renewed") > 3, 10, "beats")
        lease.check()
    assert most - before <= 1 + 8 + 12
    assert {event.detail for event in events if event.kind == "lost"} == {"unreachable"}


def test_clock_that_jumps_is_noticed_soon_when_no_beat_is_due(
    make_leases: MakeLeases, clock: Clock, events: Events
) -> None:
    make_leases(ttl=600, clock=clock).acquire("invoice:42")
    time.sleep(0.05)  # the beating thread waits for its next beat, in 200 s

    clock.ahead = 3600  # the machine was suspended

    assert events.await_kind("lost", 10).detail == "expired"


# A process that stands still

PAUSED = textwrap.dedent(
    """
    import sys, time
    from task_lease import LeaseLost, Leases
    from task_lease.exclusive import hold

    leases = Leases(sys.argv[1])
    lease = leases.acquire("invoice:42", ttl=0.6)

    def work():
        while True:
            before = time.monotonic()
            print("works", flush=True)
            if {checks}:
                lease.check()
            while time.monotonic() < before + 0.02:
                time.sleep(0.005)

    try:
        hold(lease, work) if {holds} else work()
    except LeaseLost as lost:
        print("told", lost.reason, lease.release(), flush=True)
    """
)


@pytest.fixture
def paused_past_its_ttl(
    url: str, spawn: Spawn, leases: Leases
) -> Callable[..., Process]:
    def start(**options: bool) -> Process:
        program = PAUSED.format(**options)
        process = spawn([sys.executable, "-c", program, url])
        eventually(lambda: "works" in process.output(), 20, "it works")
        process.pause()
        eventually(lambda: is_stopped(process.pid), 5, "it stands still")
        leases.acquire("invoice:42", timeout=10)
        return process

    return start


def test_check_tells_a_paused_process_before_anything_else(
    paused_past_its_ttl: Callable[..., Process],
) -> None:
    process = paused_past_its_ttl(checks=True, holds=False)
    said = process.output()

    process.resume()

    assert process.wait(10) == 0
    # It stood still somewhere in its loop: at most one line was already begun.
    words = process.output()[len(said) :]
    assert words.splitlines()[-1] == "told expired False"
    assert words.count("works") <= 1


def test_body_of_a_paused_process_is_told_without_a_check(
    paused_past_its_ttl: Callable[..., Process],
) -> None:
    process = paused_past_its_ttl(checks=False, holds=True)

    process.resume()

    assert process.wait(10) == 0
    assert process.output().splitlines()[-1] == "told expired False"


# What is left behind


def test_lease_is_dropped_when_its_thread_ended_without_a_release(
    make_leases: MakeLeases, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    leases = make_leases(ttl=0.6)
    thread = threading.Thread(target=leases.acquire, args=("invoice:42",))
    thread.start()
    thread.join()
    assert client.exists(KEY)

    eventually(lambda: not leases.leases(), 10, "the lease is dropped")
    eventually(lambda: not client.exists(KEY), 10, "the lease ends")

    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "invoice:42" in record.getMessage()
    assert "thread ended without a release" in record.getMessage()


def test_lease_is_dropped_when_its_body_ended_a_ttl_ago(
    make_leases: MakeLeases, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    leases = make_leases(ttl=0.6)
    lease = leases.acquire("invoice:42")
    lease.end_of_body()
    ended_at = boottime()

    eventually(lambda: not leases.leases(), 10, "the lease is dropped")
    kept_for = boottime() - ended_at
    eventually(lambda: not client.exists(KEY), 10, "the lease ends")

    assert kept_for > lease.ttl
    assert "body ended without a release" in caplog.text


@pytest.mark.parametrize("ends", ["renew", "check", "release"])
def test_beating_thread_rests_when_a_lease_ended_elsewhere(
    make_leases: MakeLeases, client: redis.Redis, clock: Clock, ends: str
) -> None:
    leases = make_leases(ttl=0.6, clock=clock)
    lease, other = leases.acquire("invoice:42"), leases.acquire("other", ttl=600)
    if ends == "release":
        # As if a loss had struck before the beats were told.
        lease._end = lambda _: None
        lease.release()
    elif ends == "renew":
        client.delete(KEY)
        with pytest.raises(LeaseLost):
            lease.renew()
    else:
        clock.ahead = 0.58
        with pytest.raises(LeaseLost):
            lease.check()

    eventually(lambda: leases.leases() == [other], 10, "it is forgotten")
    looked = clock.asked
    time.sleep(0.3)  # to see that nothing turns round and round

    assert clock.asked - looked < 50


def test_beating_thread_rests_when_a_lease_on_its_way_is_released(
    private_server: Server, make_leases: MakeLeases, clock: Clock
) -> None:
    leases = make_leases(private_server.url(), ttl=3600, clock=clock)
    lease = leases.acquire("invoice:42")
    private_server.pause()
    clock.ahead = 3600 * 0.85  # the beat is late, and trust ends before its patience
    heartbeat = leases._heartbeat
    eventually(lambda: heartbeat._requests, 10, "a beat is on its way")
    release = threading.Thread(target=lease.release)
    release.start()
    eventually(lambda: lease.state == "released", 10, "it is being released")

    clock.ahead = 3600 * 0.95
    time.sleep(1.1)  # its longest wait
    looked = clock.asked
    time.sleep(0.3)  # to see that nothing turns round and round
    private_server.resume()
    release.join()

    assert clock.asked - looked < 50


def test_release_wins_when_a_renewal_is_on_its_way(
    private_server: Server, make_leases: MakeLeases, events: Events
) -> None:
    leases = make_leases(private_server.url(), ttl=3)
    lease = leases.acquire("invoice:42")
    private_server.pause()
    eventually(lambda: leases._heartbeat._requests, 10, "a beat is on its way")
    release = threading.Thread(target=lease.release)
    release.start()
    eventually(lambda: lease.state == "released", 10, "it is being released")

    private_server.resume()
    release.join()
    eventually(lambda: not leases._heartbeat._requests, 10, "the beat is answered")

    assert lease.state == "released"
    assert leases.leases() == []
    assert set(events.kinds()) <= {"acquired", "at risk", "released"}
    assert private_server.client().exists(KEY) == 0


def test_release_is_never_a_loss_when_renewals_race_it(
    make_leases: MakeLeases, events: Events
) -> None:
    leases = make_leases(ttl=5)
    held: list[Lease] = []
    ends = threading.Event()

    def renew_all_the_time() -> None:
        while not ends.is_set():
            for lease in held[-1:]:
                lease.judge(leases._store.renew([lease.renewal])[0], boottime())

    thread = threading.Thread(target=renew_all_the_time)
    thread.start()
    for _ in range(300):
        held.append(leases.acquire("invoice:42"))
        assert held[-1].release()
    ends.set()
    thread.join()

    assert "lost" not in events.kinds()
    assert {lease.state for lease in held} == {"released"}


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_beats_go_on_when_callbacks_of_lost_leases_raise(
    make_leases: MakeLeases, client: redis.Redis, error: type[BaseException]
) -> None:
    leases = make_leases(ttl=0.6)
    kept = leases.acquire("kept")

    def fail(_: Lease) -> None:
        raise error

    for turn in range(10):  # more than there may be hanging requests
        lost = leases.acquire(f"lost-{turn}", ttl=0.3)
        lost.when_lost(fail)
        client.delete(f"tl1:{{lost-{turn}}}")
        eventually(lambda lease=lost: lease.lost, 5, "it is lost")  # type: ignore[misc]
        assert lost.lost == "stolen"

    kept.check(remote=True)
    assert leases.leases() == [kept]


def test_beats_go_on_when_the_store_makes_them_stumble(
    make_leases: MakeLeases,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    leases = make_leases(ttl=3)
    stumbles = iter([True])

    def take_answered(heartbeat: Any) -> Any:
        if next(stumbles, False):
            raise MemoryError
        answered, heartbeat._answered = heartbeat._answered, []
        return answered

    monkeypatch.setattr(type(leases._heartbeat), "_take_answered", take_answered)
    lease = leases.acquire("invoice:42")
    until = lease.trusted_until

    eventually(lambda: lease.trusted_until > until, 10, "it is renewed")

    assert "The heartbeat stumbled" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, OSError, TypeError])
def test_beat_has_failed_when_the_request_raises(
    make_leases: MakeLeases,
    monkeypatch: pytest.MonkeyPatch,
    events: Events,
    error: type[Exception],
) -> None:
    lease = make_leases(ttl=1).acquire("invoice:42")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Store, "renew", fail)

    assert error.__name__ in events.await_kind("at risk").detail
    assert events.await_kind("lost").detail == "unreachable"
    assert lease.lost == "unreachable"


# Threads and memory


def test_threads_end_when_nothing_is_held(url: str) -> None:
    before = threading.active_count()
    made = [Leases(url) for _ in range(20)]
    for leases in made:
        leases.acquire("invoice:42").release()

    eventually(lambda: threading.active_count() <= before, 10, "the threads end")

    gone = [weakref.ref(leases) for leases in made]
    del leases
    made.clear()
    gc.collect()
    assert [ref for ref in gone if ref() is not None] == []


def test_beats_begin_again_when_the_thread_had_ended(
    make_leases: MakeLeases, events: Events
) -> None:
    leases = make_leases(ttl=0.6)
    for turn in range(3):
        with leases.acquire(f"invoice:{turn}") as lease:
            before = events.kinds().count("renewed")
            eventually(lambda n=before: events.kinds().count("renewed") > n, 10, "beat")  # type: ignore[misc]
            lease.check()
        eventually(lambda: not beats(leases), 10, "the thread ends")


def test_memory_stays_flat_when_leases_come_and_go(url: str) -> None:
    leases = Leases(url, observers=())

    def cycle(times: int) -> None:
        for turn in range(times):
            with leases.acquire(f"invoice:{turn % 50}"):
                pass

    cycle(500)
    gc.collect()
    before = len(gc.get_objects())
    cycle(2000)
    gc.collect()

    assert len(gc.get_objects()) - before < 200


FORKED = textwrap.dedent(
    """
    import os, sys, time, threading
    from task_lease import Leases

    events = []
    leases = Leases(sys.argv[1], ttl=0.6, observers=[events.append])
    lease = leases.acquire("parent's")
    while "renewed" not in [e.kind for e in events]:
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        events.clear()
        own = leases.acquire("child's")
        while [e.kind for e in events].count("renewed") < 4:
            time.sleep(0.01)
        own.check(remote=True)
        about = {e.name for e in events}
        os._exit(0 if about == {"child's"} and own.release() else 1)
    assert os.waitpid(child, 0)[1] == 0
    lease.check(remote=True)
    assert "lost" not in [e.kind for e in events]
    assert lease.release()
    print("well")
    """
)


def test_forked_child_beats_for_its_own_leases_only(url: str, spawn: Spawn) -> None:
    process = spawn([sys.executable, "-W", "ignore", "-c", FORKED, url])

    assert process.wait(30) == 0, process.output()

    assert process.output().endswith("well\n")


def test_beats_never_create_a_lease(
    make_leases: MakeLeases, client: redis.Redis, events: Events
) -> None:
    make_leases(ttl=0.5).acquire("invoice:42")

    client.flushdb()
    events.await_kind("lost")

    assert client.keys() == []


def test_unguarded_lease_has_no_beats(leases: Leases) -> None:
    leases.unguarded(Claim("invoice:42", 0.3))

    assert leases.leases() == []
    assert os.getpid()
