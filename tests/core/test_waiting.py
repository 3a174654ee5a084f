from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from harness import Process, Server, eventually
from typing_extensions import override

from task_lease import Lease, LeaseConflict, LeaseLost, Leases, StoreUnavailable
from task_lease.exclusive import hold
from task_lease.threads import Alarm
from task_lease.waiting import Wakeups

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis
    from conftest import Spawn
    from core.conftest import AllExpire, Events, MakeLeases, Strike

KEY = "tl1:{invoice:42}"
QUEUE = f"{KEY}:q"

# Where an error strikes from outside, an open file may be left to the collector.
may_leave_files_open = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

WAITER = textwrap.dedent(
    """
    import sys, time
    from task_lease import Leases

    leases = Leases(sys.argv[1], ttl=float(sys.argv[2]))
    print("waits", flush=True)
    with leases.acquire("invoice:42", timeout=60) as lease:
        print("has it", flush=True)
        time.sleep(60)
    """
)


class Waiter(threading.Thread):
    """Waits for the lease in a thread of its own."""

    def __init__(self, leases: Leases, **options: Any) -> None:
        super().__init__(daemon=True)
        self._leases = leases
        self._options = {"timeout": 60, **options}
        self.lease: Lease | None = None
        self.error: Exception | None = None
        self.got_at = 0.0

    @override
    def run(self) -> None:
        try:
            self.lease = self._leases.acquire("invoice:42", **self._options)
            self.got_at = time.monotonic()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def outcome(self, timeout: float = 20) -> Lease:
        self.join(timeout)
        if self.error is not None:
            raise self.error
        assert self.lease is not None
        return self.lease


@pytest.fixture
def start_waiter(client: redis.Redis) -> Callable[..., Waiter]:
    """Start a waiter and return once it stands in the queue."""

    def start(leases: Leases, **options: Any) -> Waiter:
        waiting = client.zcard(QUEUE)
        waiter = Waiter(leases, **options)
        waiter.start()
        eventually(lambda: client.zcard(QUEUE) > waiting, 20, "it stands in the queue")
        return waiter

    return start


@pytest.fixture
def start_process(
    spawn: Spawn, url: str, client: redis.Redis
) -> Callable[..., Process]:
    """Start a process that waits, and return once it stands in the queue."""

    def start(ttl: float = 1.0) -> Process:
        waiting = client.zcard(QUEUE)
        process = spawn([sys.executable, "-c", WAITER, url, str(ttl)])
        eventually(lambda: client.zcard(QUEUE) > waiting, 20, "it stands in the queue")
        return process

    return start


def subscriptions(client: redis.Redis, leases: Leases) -> int:
    ((_, subscribers),) = client.pubsub_numsub(leases._wakeups.channel)
    return int(subscribers)


# Being handed the lease


def test_waiter_gets_the_lease_at_once_when_it_is_released(
    make_leases: MakeLeases, start_waiter: Callable[..., Waiter]
) -> None:
    leases = make_leases(ttl=60)
    held = leases.acquire("invoice:42")
    waiter = start_waiter(leases)

    released_at = time.monotonic()
    held.release()
    lease = waiter.outcome()

    assert waiter.got_at - released_at < 5  # and not the ttl of a minute
    assert lease.fence is not None
    assert held.fence is not None
    assert lease.fence > held.fence
    lease.check(remote=True)


def test_waiters_are_served_first_come_first_served(
    make_leases: MakeLeases,
    start_waiter: Callable[..., Waiter],
    all_expire: AllExpire,
) -> None:
    held = make_leases(ttl=60).acquire("invoice:42")
    waiters = [start_waiter(make_leases(ttl=60)) for _ in range(5)]
    all_expire()
    fences = [held.fence]

    for waiter in waiters:
        held.release()
        held = waiter.outcome()
        fences.append(held.fence)
        assert [w.lease for w in waiters[waiters.index(waiter) + 1 :] if w.lease] == []

    assert fences == sorted(fences, key=lambda fence: fence or 0)


def test_newcomer_never_overtakes_those_who_wait(
    make_leases: MakeLeases, start_waiter: Callable[..., Waiter]
) -> None:
    leases = make_leases(ttl=60)
    held = leases.acquire("invoice:42")
    waiters = [start_waiter(leases) for _ in range(3)]
    ends = threading.Event()
    stolen: list[Lease] = []

    def try_all_the_time() -> None:
        newcomer = make_leases(ttl=60)
        while not ends.is_set():
            lease = newcomer.try_acquire("invoice:42")
            if lease:
                stolen.append(lease)

    thread = threading.Thread(target=try_all_the_time)
    thread.start()
    held.release()
    for waiter in waiters[:-1]:
        waiter.outcome().release()
    waiters[-1].outcome()
    ends.set()
    thread.join()

    assert stolen == []


def test_many_waiters_of_one_process_share_one_subscription(
    make_leases: MakeLeases, start_waiter: Callable[..., Waiter], client: redis.Redis
) -> None:
    leases = make_leases(ttl=60)
    held = leases.acquire("invoice:42")
    waiters = [start_waiter(leases) for _ in range(6)]
    eventually(lambda: subscriptions(client, leases), 10, "it subscribes")

    assert subscriptions(client, leases) == 1
    for waiter in waiters:
        held.release()
        held = waiter.outcome()


def test_subscription_ends_when_nobody_waits_any_more(
    make_leases: MakeLeases,
    start_waiter: Callable[..., Waiter],
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("task_lease.waiting._LOOK_EVERY", 0.1)
    leases = make_leases(ttl=60)
    for _ in range(3):
        held = leases.acquire("invoice:42")
        waiter = start_waiter(leases)
        eventually(lambda: subscriptions(client, leases), 10, "it subscribes")
        held.release()
        waiter.outcome().release()

        eventually(lambda: not subscriptions(client, leases), 10, "it ends")
        eventually(lambda: leases._wakeups._thread is None, 10, "its thread ends")


# Giving up


def test_conflict_is_raised_when_the_time_is_over(
    make_leases: MakeLeases, client: redis.Redis
) -> None:
    leases = make_leases(ttl=60)
    held = leases.acquire("invoice:42")
    began_at = time.monotonic()

    with pytest.raises(LeaseConflict) as conflict:
        leases.acquire("invoice:42", timeout=0.5)

    assert 0.5 <= time.monotonic() - began_at < 10
    assert conflict.value.name == "invoice:42"
    assert conflict.value.holder is not None
    assert conflict.value.holder["pid"] == os.getpid()
    assert 0 < conflict.value.remaining <= 60
    assert client.exists(QUEUE, f"{KEY}:w") == 0
    held.check(remote=True)


def test_others_move_up_when_a_waiter_gives_up(
    make_leases: MakeLeases, start_waiter: Callable[..., Waiter], client: redis.Redis
) -> None:
    leases = make_leases(ttl=60)
    held = leases.acquire("invoice:42")
    impatient = start_waiter(leases, timeout=0.3)
    patient = start_waiter(leases)

    with pytest.raises(LeaseConflict):
        impatient.outcome()
    assert client.zcard(QUEUE) == 1
    held.release()

    assert patient.outcome().state == "held"


def test_lease_is_passed_on_when_it_is_handed_to_one_who_just_gave_up(
    make_leases: MakeLeases,
) -> None:
    leases = make_leases(ttl=60)
    for turn in range(30):
        held = leases.acquire("invoice:42")
        impatient, patient = Waiter(leases, timeout=0.01), Waiter(leases)
        for waiter in (impatient, patient):
            waiter.start()
        time.sleep(0.007 + turn * 0.0002)  # about when the first one gives up
        held.release()
        with suppress(LeaseConflict):
            impatient.outcome().release()

        patient.outcome(timeout=10).release()


@may_leave_files_open
def test_interrupted_waiter_leaves_the_queue(
    make_leases: MakeLeases, client: redis.Redis
) -> None:
    leases = make_leases(ttl=60)
    around, held = leases.acquire("around"), leases.acquire("invoice:42")

    def lose_around() -> None:
        eventually(lambda: client.zcard(QUEUE), 10, "it stands in the queue")
        around._lose("stolen")

    thread = threading.Thread(target=lose_around)
    thread.start()
    with pytest.raises(LeaseLost, match="around was lost"):
        hold(around, lambda: leases.acquire("invoice:42", timeout=60))
    thread.join()

    assert client.exists(QUEUE, f"{KEY}:w") == 0
    assert leases._wakeups._waiting == {}
    held.check(remote=True)


# When something is lost


def test_waiter_gets_the_lease_when_the_holder_lets_it_run_out(
    make_leases: MakeLeases, client: redis.Redis, start_waiter: Callable[..., Waiter]
) -> None:
    client.set(KEY, "stranger 17 1500 {}", px=1500)
    waiter = start_waiter(make_leases(ttl=60))

    assert waiter.outcome().state == "held"


def test_waiter_gets_the_lease_when_its_wake_up_is_lost(
    make_leases: MakeLeases, client: redis.Redis, start_waiter: Callable[..., Waiter]
) -> None:
    leases = make_leases(ttl=60)
    held = leases.acquire("invoice:42")
    waiter = start_waiter(leases)
    eventually(lambda: subscriptions(client, leases), 10, "it subscribes")

    client.client_kill_filter(_type="pubsub")
    held.release()

    assert waiter.outcome().state == "held"


def test_waiter_gets_the_lease_when_it_was_handed_before_anybody_heard(
    make_leases: MakeLeases,
    start_waiter: Callable[..., Waiter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("task_lease.client._LONGEST_REST", 60.0)
    leases = make_leases(ttl=60)
    held = leases.acquire("invoice:42")
    connect, may_connect = leases._wakeups._connect, threading.Event()

    def connect_late() -> redis.Redis:
        may_connect.wait(20)
        return connect()

    monkeypatch.setattr(leases._wakeups, "_connect", connect_late)
    waiter = start_waiter(leases)

    held.release()
    may_connect.set()

    assert waiter.outcome().state == "held"


def test_waiter_gets_the_lease_when_it_never_hears_anything(
    make_leases: MakeLeases, start_waiter: Callable[..., Waiter]
) -> None:
    leases = make_leases(ttl=1.5)
    held = leases.acquire("invoice:42")
    leases._wakeups._listen = lambda: time.sleep(30)  # type: ignore[method-assign]
    waiter = start_waiter(leases)

    held.release()

    assert waiter.outcome().state == "held"


def test_waiters_live_when_the_channel_is_forbidden(
    private_server: Server, make_leases: MakeLeases
) -> None:
    with private_server.client() as admin:
        admin.acl_setuser(
            "mute",
            enabled=True,
            passwords=["+word"],
            keys=["*"],
            reset_channels=True,
            categories=["+@all"],
        )
    url = f"redis://mute:word@127.0.0.1:{private_server.port}/0"
    leases = make_leases(url, ttl=1.5)
    held = leases.acquire("invoice:42")
    waiter = Waiter(leases)
    waiter.start()
    with private_server.client() as admin:
        eventually(lambda: admin.zcard(QUEUE), 10, "it stands in the queue")

    # Publishing is forbidden as well; the lease ends all the same.
    held.release()

    assert waiter.outcome().state == "held"


def test_listener_goes_on_when_it_hears_nonsense(
    make_leases: MakeLeases, client: redis.Redis, start_waiter: Callable[..., Waiter]
) -> None:
    leases = make_leases(ttl=60)
    held = leases.acquire("invoice:42")
    waiter = start_waiter(leases)
    eventually(lambda: subscriptions(client, leases), 10, "it subscribes")

    for nonsense in (b"", b"nobody", b"\xff\xfe", b"x" * 100_000):
        client.publish(leases._wakeups.channel, nonsense)
    held.release()

    waiter.outcome()


@pytest.mark.parametrize("proof_of_death", [False, True])
def test_dead_waiter_at_the_head_costs_seconds(
    make_leases: MakeLeases,
    start_process: Callable[..., Process],
    start_waiter: Callable[..., Waiter],
    proof_of_death: bool,  # noqa: FBT001
) -> None:
    leases = make_leases(ttl=60, proof_of_death=proof_of_death)
    held = leases.acquire("invoice:42")
    process = start_process()
    waiter = start_waiter(leases)

    process.kill9()
    released_at = time.monotonic()
    held.release()
    waiter.outcome()

    assert waiter.got_at - released_at < 10  # and not the ttl of a minute


def test_waiter_takes_over_when_the_holder_is_killed(
    make_leases: MakeLeases,
    start_process: Callable[..., Process],
    start_waiter: Callable[..., Waiter],
) -> None:
    leases = make_leases(ttl=60)
    held = leases.acquire("invoice:42")
    process = start_process(ttl=60)
    held.release()
    eventually(lambda: "has it" in process.output(), 20, "the process has the lease")
    waiter = start_waiter(leases)

    killed_at = time.monotonic()
    process.kill9()
    waiter.outcome()

    assert waiter.got_at - killed_at < 10  # and not the ttl of a minute


def test_waiter_survives_a_restart_of_the_store(
    private_server: Server, make_leases: MakeLeases
) -> None:
    leases = make_leases(private_server.url(), ttl=20)
    leases.acquire("invoice:42")
    waiter = Waiter(leases)
    waiter.start()
    with private_server.client() as client:
        eventually(lambda: client.zcard(QUEUE), 10, "it stands in the queue")

    private_server.restart_empty()

    assert waiter.outcome().state == "held"


def test_waiter_gives_up_when_the_store_stays_away(
    private_server: Server,
    make_leases: MakeLeases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("task_lease.client._WITHOUT_STORE", 0.5)
    leases = make_leases(private_server.url(), ttl=1)
    leases.acquire("invoice:42", ttl=60)
    waiter = Waiter(leases)
    waiter.start()
    with private_server.client() as client:
        eventually(lambda: client.zcard(QUEUE), 10, "it stands in the queue")

    private_server.kill()

    with pytest.raises(StoreUnavailable):
        waiter.outcome()


# The alarm of one waiter


def test_alarm_wakes_whoever_sleeps_on_it() -> None:
    alarm = Alarm()
    ring = threading.Timer(0.05, alarm.ring)
    ring.start()

    assert alarm.sleep(20)
    ring.join()


def test_alarm_lets_its_waiter_sleep_when_nothing_rings() -> None:
    assert not Alarm().sleep(0.01)


def test_alarm_wakes_once_however_often_it_rang() -> None:
    alarm = Alarm()
    for _ in range(3):
        alarm.ring()

    assert alarm.sleep(20)
    assert not alarm.sleep(0.01)


def test_alarm_forgets_that_it_rang_when_it_is_silenced() -> None:
    alarm = Alarm()
    alarm.ring()

    alarm.silence()

    assert not alarm.sleep(0.01)


def test_channel_is_another_one_in_a_forked_child(url: str, spawn: Spawn) -> None:
    program = textwrap.dedent(
        """
        import os, sys
        from task_lease import Leases
        leases = Leases(sys.argv[1])
        before = leases._wakeups.channel
        child = os.fork()
        if child == 0:
            os._exit(leases._wakeups.channel == before)
        assert os.waitpid(child, 0)[1] == 0
        assert leases._wakeups.channel == before
        """
    )

    assert spawn([sys.executable, "-W", "ignore", "-c", program, url]).wait(20) == 0


def test_listener_is_started_again_when_it_has_died(client: redis.Redis) -> None:
    wakeups = Wakeups(lambda: client)
    wakeups._listen = lambda: None  # type: ignore[method-assign]
    wakeups.expect("first")
    eventually(lambda: not wakeups._thread or not wakeups._thread.is_alive(), 10, "end")
    del wakeups._listen

    alarm = wakeups.expect("second")

    assert alarm.sleep(20)
    for owner in ("first", "second"):
        wakeups.forget(owner)


# An interruption anywhere


# What strikes in a finalizer of redis-py is told as a warning, and harms nothing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@may_leave_files_open
def test_waiting_works_on_wherever_a_waiter_was_interrupted(
    make_leases: MakeLeases,
    client: redis.Redis,
    strike: Strike,
    events: Events,
) -> None:
    leases = make_leases(ttl=60)
    blocker = leases.acquire("invoice:42")

    def wait() -> None:
        with suppress(LeaseConflict):
            leases.acquire("invoice:42", timeout=0.005)

    place = 1
    while strike(place, wait):
        # Redis-py and our own code have some hundred places; a sample of them will do.
        place += 3
        assert leases._wakeups._waiting == {}
        assert not leases._wakeups._mutex.locked()
        assert not leases._heartbeat._mutex.locked()
    assert place > 100
    blocker.release()
    client.delete(KEY, QUEUE, f"{KEY}:w")

    held = leases.acquire("invoice:42", timeout=5)
    waiter = Waiter(leases)
    waiter.start()
    eventually(lambda: client.zcard(QUEUE), 10, "it stands in the queue")
    held.release()
    waiter.outcome().release()
    assert leases.leases() == []
    assert "lost" not in events.kinds()
