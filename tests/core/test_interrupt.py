from __future__ import annotations

import contextvars
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from harness import eventually

from task_lease import LeaseLost, Leases, current_lease
from task_lease.exclusive import hold
from task_lease.interrupt import _here, interrupt_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import redis
    from core.conftest import MakeLeases, Strike

    from task_lease import Lease
    from task_lease.errors import LostReason

TTL = 3600.0


class Stopped(LeaseLost):
    """What a host has raised in a body instead."""


@pytest.fixture
def leases(make_leases: MakeLeases) -> Leases:
    return make_leases(ttl=TTL)


@pytest.fixture
def lease(leases: Leases) -> Lease:
    return leases.acquire("invoice:42")


@pytest.fixture(autouse=True)
def _nothing_is_left_armed() -> Iterator[None]:
    yield
    handler: Any = signal.getsignal(signal.SIGURG)
    assert getattr(handler, "armed", []) == []
    assert _here.nest.armed == []
    assert current_lease() is None


def lose(lease: Lease, reason: LostReason = "stolen") -> None:
    """Lose a lease as the beating thread does."""
    lease._lose(reason)


def lose_soon(*leases: Lease, delay: float = 0.1) -> threading.Thread:
    def lose_all() -> None:
        time.sleep(delay)
        for lease in leases:
            lose(lease)

    thread = threading.Thread(target=lose_all)
    thread.start()
    return thread


def in_thread(work: Callable[[], None]) -> None:
    """Run work in a thread, and raise here what it raises there."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised again
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    for error in raised:
        raise error


def here(work: Callable[[], None]) -> None:
    work()


anywhere = pytest.mark.parametrize("run", [here, in_thread])


def loop() -> None:
    while True:
        pass


def loop_through_calls() -> None:
    while True:
        sorted([3, 1, 2], key=lambda number: -number)


def sleep() -> None:
    time.sleep(60)


def receive() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.recv(1)


def take_a_mutex() -> None:
    mutex = threading.Lock()
    with mutex:
        mutex.acquire(timeout=60)


def await_an_event() -> None:
    threading.Event().wait(60)


def await_a_queue() -> None:
    queue.SimpleQueue[None]().get(timeout=60)


def join_a_thread() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, args=(60,))
    thread.start()
    try:
        thread.join()
    finally:
        ends.set()


def await_a_process() -> None:
    nap = "import time; time.sleep(60)"
    subprocess.run([sys.executable, "-c", nap], check=True)


BLOCKED = [
    sleep,
    receive,
    take_a_mutex,
    await_an_event,
    await_a_queue,
    join_a_thread,
    await_a_process,
]


@pytest.mark.parametrize("body", [*BLOCKED, loop, loop_through_calls])
def test_body_in_the_main_thread_is_stopped_whatever_it_does(
    lease: Lease, body: Callable[[], None]
) -> None:
    losing = lose_soon(lease)
    began_at = time.monotonic()

    with pytest.raises(LeaseLost, match=r"invoice:42 was lost \(stolen\)"):
        hold(lease, body)

    assert time.monotonic() - began_at < 20
    losing.join()


@pytest.mark.parametrize("body", [loop, loop_through_calls])
def test_body_in_a_thread_is_stopped_at_the_next_bytecode(
    leases: Leases, body: Callable[[], None]
) -> None:
    def work() -> None:
        lease = leases.acquire("invoice:42")
        losing = lose_soon(lease)
        with pytest.raises(LeaseLost, match=r"invoice:42 was lost \(stolen\)"):
            hold(lease, body)
        losing.join()

    in_thread(work)


def test_body_in_a_thread_is_stopped_when_its_blocking_call_returns(
    leases: Leases,
) -> None:
    went_on: list[bool] = []

    def work() -> None:
        lease = leases.acquire("invoice:42")
        losing = lose_soon(lease, delay=0.05)

        def body() -> None:
            time.sleep(0.3)
            went_on.append(True)

        with pytest.raises(LeaseLost):
            hold(lease, body)
        losing.join()

    in_thread(work)

    assert went_on == []


def test_body_is_stopped_by_the_beats_when_the_lease_is_stolen(
    make_leases: MakeLeases, client: redis.Redis
) -> None:
    lease = make_leases(ttl=0.6).acquire("invoice:42")

    def body() -> None:
        client.delete("tl1:{invoice:42}")
        time.sleep(60)

    with pytest.raises(LeaseLost, match="stolen"):
        hold(lease, body)

    assert not lease.release()


def test_body_in_a_thread_is_stopped_by_the_beats_when_the_lease_is_stolen(
    make_leases: MakeLeases, client: redis.Redis
) -> None:
    leases = make_leases(ttl=0.6)

    def work() -> None:
        lease = leases.acquire("invoice:42")
        client.delete("tl1:{invoice:42}")
        with pytest.raises(LeaseLost, match="stolen"):
            hold(lease, loop)

    in_thread(work)


def test_loss_in_the_main_thread_says_what_was_lost_and_why(lease: Lease) -> None:
    said: list[str] = []

    def body() -> None:
        try:
            time.sleep(60)
        except LeaseLost as lost:
            said.append(str(lost))
            raise

    losing = lose_soon(lease)
    with pytest.raises(LeaseLost) as raised:
        hold(lease, body)
    losing.join()

    assert said == ["invoice:42 was lost (stolen)"] == [str(raised.value)]
    assert raised.value.args == ("invoice:42", "stolen")


@anywhere
def test_loss_is_what_the_host_wants_to_have_raised(
    leases: Leases, run: Callable[[Callable[[], None]], None]
) -> None:
    def work() -> None:
        lease = leases.acquire("invoice:42")
        losing = lose_soon(lease)
        with pytest.raises(Stopped) as raised:
            hold(lease, loop, lost_error=Stopped)
        losing.join()
        assert raised.value.args == ("invoice:42", "stolen")

    run(work)


@anywhere
def test_loss_is_raised_exactly_once_and_again_at_the_end_when_swallowed(
    leases: Leases, run: Callable[[Callable[[], None]], None]
) -> None:
    caught: list[BaseException] = []

    def body() -> str:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            try:
                time.sleep(0.001)
            except Exception as error:  # noqa: BLE001 - as careless code does
                caught.append(error)
        return "done"

    def work() -> None:
        lease = leases.acquire("invoice:42")
        losing = lose_soon(lease, delay=0.05)
        with pytest.raises(LeaseLost, match="stolen"):
            hold(lease, body)
        losing.join()

    run(work)

    assert [type(error) for error in caught] == [LeaseLost]


@anywhere
def test_clean_up_of_the_body_runs_to_its_end(
    leases: Leases, run: Callable[[Callable[[], None]], None]
) -> None:
    cleaned: list[int] = []

    def body() -> None:
        try:
            loop()
        finally:
            for step in range(20):
                time.sleep(0.005)
                cleaned.append(step)

    def work() -> None:
        lease = leases.acquire("invoice:42")
        losing = lose_soon(lease)
        with pytest.raises(LeaseLost):
            hold(lease, body)
        losing.join()

    run(work)

    assert cleaned == list(range(20))


@anywhere
def test_nothing_strikes_after_the_body_has_ended(
    leases: Leases, run: Callable[[Callable[[], None]], None]
) -> None:
    chance = random.Random(42)  # noqa: S311 - no secret
    outcomes: list[str] = []

    def work() -> None:
        lease = leases.acquire("invoice:42")
        for _ in range(300):
            lease._lost = None
            losing = lose_soon(lease, delay=chance.uniform(0, 0.001))
            try:
                hold(lease, lambda: time.sleep(0.0005))
                outcomes.append("kept")
            except LeaseLost:
                outcomes.append("lost")
            # Whatever struck from here on would escape.
            losing.join()
            for _ in range(50):
                sorted([2, 1])

    run(work)

    assert len(outcomes) == 300
    assert set(outcomes) == {"kept", "lost"}


def test_body_returns_its_value_when_the_lease_is_kept(lease: Lease) -> None:
    assert hold(lease, lambda: 42) == 42
    assert lease.state == "held"


def test_body_is_not_run_when_the_lease_is_lost_already(lease: Lease) -> None:
    ran: list[bool] = []
    lose(lease)

    with pytest.raises(LeaseLost):
        hold(lease, lambda: ran.append(True))

    assert ran == []


def test_error_of_the_body_is_the_cause_when_the_lease_is_lost_too(
    lease: Lease,
) -> None:
    def body() -> None:
        with suppress(LeaseLost):
            lose(lease)
        raise KeyError

    with pytest.raises(LeaseLost, match="stolen") as raised:
        hold(lease, body)

    assert isinstance(raised.value.__cause__, KeyError)


def test_error_of_the_body_passes_when_the_lease_is_kept(lease: Lease) -> None:
    def body() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        hold(lease, body)

    assert lease.state == "held"


def test_loss_is_raised_when_the_end_of_trust_is_noticed_at_the_end(
    lease: Lease,
) -> None:
    def body() -> None:
        lease._trusted_until = 0.0

    with pytest.raises(LeaseLost, match="expired"):
        hold(lease, body)


def test_check_in_the_body_raises_what_the_host_wants(lease: Lease) -> None:
    def body() -> None:
        lease._trusted_until = 0.0
        lease.check()

    with pytest.raises(Stopped, match="expired"):
        hold(lease, body, lost_error=Stopped)


# Other ways to hear of a loss


@anywhere
def test_flag_only_marks_the_lease_and_the_end_tells(
    leases: Leases, run: Callable[[Callable[[], None]], None]
) -> None:
    seen: list[str] = []

    def work() -> None:
        lease = leases.acquire("invoice:42")

        def body() -> None:
            lose(lease)
            seen.append(lease.state)

        with pytest.raises(LeaseLost, match="stolen"):
            hold(lease, body, on_lost="flag")

    run(work)

    assert seen == ["lost"]


def test_callable_is_called_with_the_lease_and_nothing_is_interrupted(
    lease: Lease,
) -> None:
    called: list[Lease] = []

    def body() -> None:
        lose(lease)
        eventually(lambda: called, 10, "it is called")

    with pytest.raises(LeaseLost, match="stolen"):
        hold(lease, body, on_lost=called.append)

    assert called == [lease]


def test_callable_that_takes_its_time_costs_no_other_lease(
    make_leases: MakeLeases, client: redis.Redis
) -> None:
    leases = make_leases(ttl=0.6)
    kept, lost = leases.acquire("kept"), leases.acquire("lost")
    begun, may_end = threading.Event(), threading.Event()

    def take_time(_: Lease) -> None:
        begun.set()
        may_end.wait(20)

    def body() -> None:
        client.delete("tl1:{lost}")
        assert begun.wait(10)
        wait(2 * kept.ttl)

    with pytest.raises(LeaseLost, match="lost was lost"):
        hold(lost, body, on_lost=take_time)

    may_end.set()
    kept.check(remote=True)


def test_error_of_the_callable_is_logged(
    lease: Lease, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Lease) -> None:
        raise RuntimeError

    def body() -> None:
        lose(lease)
        eventually(lambda: "RuntimeError" in caplog.text, 10, "it is logged")

    with pytest.raises(LeaseLost, match="stolen"):
        hold(lease, body, on_lost=fail)


def test_callable_is_not_called_when_the_body_has_ended(lease: Lease) -> None:
    called: list[Lease] = []

    hold(lease, lambda: None, on_lost=called.append)
    lose(lease)

    assert called == []


# The lease of the running code


@anywhere
def test_current_lease_is_that_of_the_innermost_body(
    leases: Leases, run: Callable[[Callable[[], None]], None]
) -> None:
    def work() -> None:
        outer, inner = leases.acquire("outer"), leases.acquire("inner")
        seen = [current_lease()]

        def outer_body() -> None:
            seen.append(current_lease())
            hold(inner, lambda: seen.append(current_lease()))
            seen.append(current_lease())
            with suppress(KeyError):
                hold(inner, lambda: dict[str, str]()["missing"])
            seen.append(current_lease())

        hold(outer, outer_body)
        seen.append(current_lease())
        assert seen == [None, outer, inner, outer, outer, None]

    run(work)


def test_current_lease_is_not_that_of_another_context(lease: Lease) -> None:
    seen: list[object] = []

    def body() -> None:
        empty = contextvars.Context()
        seen.append(empty.run(current_lease))
        in_thread(lambda: seen.append(current_lease()))

    hold(lease, body)

    assert seen == [None, None]


# One body inside another


class Nested:
    """A body inside another, which writes down what happens to both."""

    def __init__(self, leases: Leases) -> None:
        self.outer = leases.acquire("outer")
        self.inner = leases.acquire("inner")
        self.said: list[str] = []

    def run(self, *lost: Lease, swallows: bool = False) -> BaseException | None:
        losing = lose_soon(*lost, delay=0.05)
        try:
            hold(self.outer, lambda: self.outer_body(swallows=swallows))
        except LeaseLost as error:
            return error
        finally:
            losing.join()
        return None

    def outer_body(self, *, swallows: bool) -> None:
        try:
            hold(self.inner, self.inner_body)
        except LeaseLost as error:
            self.said.append(f"inner hold raised {error.name or '?'}")
            if not swallows or error.name != "inner":
                raise
        try:
            wait(0.2)
            self.said.append("outer went on")
        except LeaseLost:
            self.said.append("outer was struck")
            raise

    def inner_body(self) -> None:
        try:
            wait(0.5)
        finally:
            wait(0.05)
            self.said.append("inner cleaned up")


def wait(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.001)


@anywhere
def test_outer_body_goes_on_when_only_the_inner_lease_is_lost(
    leases: Leases, run: Callable[[Callable[[], None]], None]
) -> None:
    def work() -> None:
        nested = Nested(leases)
        assert nested.run(nested.inner, swallows=True) is None
        assert nested.said == [
            "inner cleaned up",
            "inner hold raised inner",
            "outer went on",
        ]

    run(work)


@anywhere
def test_both_bodies_end_when_only_the_outer_lease_is_lost(
    leases: Leases, run: Callable[[Callable[[], None]], None]
) -> None:
    def work() -> None:
        nested = Nested(leases)
        error = nested.run(nested.outer)
        assert isinstance(error, LeaseLost)
        assert error.name == "outer"
        assert nested.said[0] == "inner cleaned up"
        assert len(nested.said) == 2
        assert nested.inner.state == "held"

    run(work)


@anywhere
@pytest.mark.parametrize("order", ["inner first", "outer first"])
@pytest.mark.parametrize("swallows", [False, True])
def test_no_clean_up_is_cut_short_when_both_leases_are_lost_at_once(
    leases: Leases,
    run: Callable[[Callable[[], None]], None],
    order: str,
    swallows: bool,  # noqa: FBT001
) -> None:
    def work() -> None:
        nested = Nested(leases)
        lost = [nested.inner, nested.outer]
        if order == "outer first":
            lost.reverse()
        error = nested.run(*lost, swallows=swallows)
        assert isinstance(error, LeaseLost)
        assert (error.name, error.reason) == ("outer", "stolen")
        assert nested.said[0] == "inner cleaned up"
        assert "outer went on" not in nested.said

    run(work)


@anywhere
def test_outer_loss_is_raised_when_the_inner_one_was_swallowed_inside(
    leases: Leases, run: Callable[[Callable[[], None]], None]
) -> None:
    def work() -> None:
        outer, inner = leases.acquire("outer"), leases.acquire("inner")
        went_on: list[bool] = []

        def inner_body() -> None:
            losing = lose_soon(inner, outer, delay=0)
            with suppress(LeaseLost):
                wait(5)
            losing.join()

        def outer_body() -> None:
            with suppress(KeyError):
                hold(inner, inner_body)
            went_on.append(True)

        with pytest.raises(LeaseLost, match=r"outer was lost \(stolen\)"):
            hold(outer, outer_body)
        assert went_on == []

    run(work)


# The signal


def test_handler_of_the_application_is_still_called(lease: Lease) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, _: called.append(number))
    try:
        hold(lease, lambda: signal.raise_signal(signal.SIGURG))
        signal.raise_signal(signal.SIGURG)
    finally:
        signal.signal(signal.SIGURG, before)

    assert called == [signal.SIGURG] * 2


def test_signal_from_elsewhere_interrupts_nothing(lease: Lease) -> None:
    def body() -> str:
        signal.raise_signal(signal.SIGURG)
        return "kept"

    assert hold(lease, body) == "kept"
    signal.raise_signal(signal.SIGURG)


@anywhere
def test_interrupt_delivers_nothing_unless_armed(
    run: Callable[[Callable[[], None]], None],
) -> None:
    def work() -> None:
        interrupt = interrupt_here(LeaseLost)
        interrupt.deliver("invoice:42", "stolen")
        wait(0.01)
        interrupt.arm()
        interrupt.disarm()
        interrupt.deliver("invoice:42", "stolen")
        wait(0.01)
        interrupt.pass_on()
        wait(0.01)

    run(work)


# Locks of Python's own


class Locks:
    """Code that looks like one of Python's own modules, and where it is struck."""

    def __init__(self, module: str, name: str) -> None:
        self.mutex = threading.Lock()
        self.entered, self.may_leave = threading.Event(), False
        source = (
            f"def {name}(locks):\n"
            "    locks.mutex.acquire()\n"
            "    locks.entered.set()\n"
            "    while not locks.may_leave:\n"
            "        pass\n"
            "    locks.mutex.release()\n"
        )
        namespace: dict[str, Any] = {"__name__": module}
        exec(source, namespace)  # noqa: S102 - the text above
        self.work: Callable[[Locks], None] = namespace[name]


@anywhere
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("logging", "acquire"),
        ("logging", "_acquireLock"),
        ("logging", "handle"),
        ("threading", "__enter__"),
        ("threading", "release"),
    ],
)
def test_loss_waits_for_a_moment_where_a_lock_would_stay_taken(
    leases: Leases,
    run: Callable[[Callable[[], None]], None],
    module: str,
    name: str,
) -> None:
    def work() -> None:
        lease = leases.acquire("invoice:42")
        locks = Locks(module, name)

        def lose_in_there() -> None:
            locks.entered.wait(20)
            lose(lease)
            time.sleep(0.01)  # it would be struck by now
            locks.may_leave = True

        thread = threading.Thread(target=lose_in_there)
        thread.start()

        def body() -> None:
            locks.work(locks)
            loop()

        with pytest.raises(LeaseLost):
            hold(lease, body)
        thread.join()
        assert not locks.mutex.locked()

    run(work)


@anywhere
def test_loss_does_not_wait_for_ever_where_a_lock_is_taken(
    leases: Leases, run: Callable[[Callable[[], None]], None]
) -> None:
    def work() -> None:
        lease = leases.acquire("invoice:42")
        losing = lose_soon(lease)
        with pytest.raises(LeaseLost):
            hold(lease, lambda: locks.work(locks))
        losing.join()

    locks = Locks("logging", "acquire")
    run(work)


def test_loss_strikes_at_once_in_other_code_of_a_module_with_locks(
    leases: Leases,
) -> None:
    lease = leases.acquire("invoice:42")
    losing = lose_soon(lease)

    with pytest.raises(LeaseLost):
        hold(lease, await_an_event)

    losing.join()


# A loss that strikes anywhere


# What strikes in a finalizer of redis-py is told as a warning, and harms nothing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_hold_leaves_nothing_behind_wherever_it_is_interrupted(
    lease: Lease, strike: Strike
) -> None:
    place = 0

    while strike(place := place + 1, lambda: hold(lease, lambda: None)):
        assert current_lease() is None
        assert hold(lease, lambda: "works") == "works"

    assert place > 20
