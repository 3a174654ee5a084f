"""What holds in a process whose threads gevent or eventlet has replaced."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Spawn

PATCH = {
    "gevent": "from gevent import monkey; monkey.patch_all()\nfrom gevent import spawn",
    "eventlet": "import eventlet; eventlet.monkey_patch()\nfrom eventlet import spawn",
}
COMMON = """
import sys, threading, time, redis
from task_lease import LeaseLost, Leases, current_lease
from task_lease.exclusive import hold
from task_lease.greenlets import greenlets
from task_lease.interrupt import _in_greenlets

library = greenlets()
leases = Leases(sys.argv[1], ttl=float(sys.argv[2]), observers=())

def lose_in_thread(lease, delay=0.1):
    def lose():
        nap(delay)
        lease._lose("stolen")
    nap = original_sleep()
    library.start_thread(lose)

def original_sleep():
    if "gevent" in sys.modules:
        return __import__("gevent.monkey").monkey.get_original("time", "sleep")
    return __import__("eventlet.patcher").patcher.original("time").sleep

def compute(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))

def run(*works):
    greens = [spawn(work) for work in works]
    for green in greens:
        (green.get if hasattr(green, "get") else green.wait)()
"""


@pytest.fixture(params=PATCH)
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


@pytest.fixture
def run_green(spawn: Spawn, url: str, library: str) -> Callable[..., str]:
    """Run a program in a patched process, and return what it prints."""

    def run(program: str, ttl: float = 3600.0) -> str:
        text = "\n".join([PATCH[library], COMMON, textwrap.dedent(program)])
        # The libraries themselves warn, of their end and of each other.
        command = [sys.executable, "-W", "ignore", "-c", text, url, str(ttl)]
        process = spawn(command)
        assert process.wait(60) == 0, process.output()
        return process.output()

    return run


def test_body_in_a_greenlet_is_stopped_once_where_it_waits(
    run_green: Callable[..., str],
) -> None:
    said = run_green(
        """
        caught, cleaned = [], []

        def body():
            try:
                time.sleep(60)
            except LeaseLost as error:
                caught.append(str(error))
                raise
            finally:
                for step in range(20):
                    time.sleep(0.005)
                    cleaned.append(step)

        def work():
            lease = leases.acquire("invoice:42")
            lose_in_thread(lease)
            try:
                hold(lease, body)
            except LeaseLost as error:
                print(caught == [str(error)], cleaned == list(range(20)), error)

        run(work)
        print(_in_greenlets)
        """
    )

    assert said.split("\n")[:2] == ["True True invoice:42 was lost (stolen)", "{}"]


def test_loss_stops_no_other_greenlet(run_green: Callable[..., str]) -> None:
    said = run_green(
        """
        def lose():
            lease = leases.acquire("lost")
            lose_in_thread(lease)
            try:
                hold(lease, lambda: time.sleep(60))
            except LeaseLost:
                print("lost")

        def keep():
            lease = leases.acquire("kept")
            print(hold(lease, lambda: time.sleep(0.5) or current_lease() is lease))

        run(keep, lose)
        """
    )

    assert said.split() == ["lost", "True"]


def test_nothing_strikes_a_greenlet_after_its_body_has_ended(
    run_green: Callable[..., str],
) -> None:
    said = run_green(
        """
        import random
        outcomes = []

        def work():
            lease = leases.acquire("invoice:42")
            for _ in range(100):
                lease._lost = None
                lose_in_thread(lease, random.uniform(0, 0.004))
                try:
                    hold(lease, lambda: time.sleep(0.002))
                    outcomes.append("kept")
                except LeaseLost:
                    outcomes.append("lost")
                # Whatever struck from here on would escape.
                time.sleep(0.005)

        run(work)
        print(len(outcomes), sorted(set(outcomes)))
        """
    )

    assert said == "100 ['kept', 'lost']\n"


def test_outer_loss_waits_in_a_greenlet_for_the_clean_up_of_the_inner_body(
    run_green: Callable[..., str],
) -> None:
    said = run_green(
        """
        def work():
            outer, inner = leases.acquire("outer"), leases.acquire("inner")

            def inner_body():
                try:
                    time.sleep(60)
                finally:
                    outer._lose("stolen")
                    time.sleep(0.1)
                    print("cleaned")

            def outer_body():
                lose_in_thread(inner)
                hold(inner, inner_body)
                print("went on")

            try:
                hold(outer, outer_body)
            except LeaseLost as error:
                print(error.name)

        run(work)
        """
    )

    assert said.split() == ["cleaned", "outer"]


def test_lease_is_kept_while_a_greenlet_computes_for_three_ttls(
    run_green: Callable[..., str],
) -> None:
    said = run_green(
        """
        def work():
            lease = leases.acquire("invoice:42")
            hold(lease, lambda: compute(3 * lease.ttl))
            lease.check(remote=True)
            print(lease.state, lease.release())

        run(work)
        """,
        ttl=1.5,
    )

    assert said == "held True\n"


def test_loss_strikes_a_computing_greenlet_at_its_next_switch(
    run_green: Callable[..., str],
) -> None:
    said = run_green(
        """
        def work():
            lease = leases.acquire("invoice:42")

            def body():
                redis.Redis.from_url(sys.argv[1]).delete("tl1:{invoice:42}")
                until = time.monotonic() + 30
                while lease.lost is None and time.monotonic() < until:
                    compute(0.01)
                print(lease.lost)
                time.sleep(60)

            try:
                hold(lease, body)
            except LeaseLost as error:
                print(error)

        run(work)
        """,
        ttl=1.5,
    )

    assert said == "stolen\ninvoice:42 was lost (stolen)\n"


@pytest.mark.parametrize("computes", [False, True])
def test_shared_client_is_used_by_the_greenlets_alone(
    run_green: Callable[..., str],
    computes: bool,  # noqa: FBT001
) -> None:
    # Such a client is used as it is, so nobody can have another one.
    said = run_green(
        f"""
        class Pool(redis.ConnectionPool): pass

        client = redis.Redis(connection_pool=Pool.from_url(sys.argv[1]))
        leases = Leases(client, ttl=float(sys.argv[2]), observers=())

        def work():
            lease = leases.acquire("invoice:42")
            try:
                hold(lease, lambda: ({computes} and compute or time.sleep)(4.5))
                print("kept")
            except LeaseLost as error:
                print("lost")
            ended.append(True)

        def turn():
            # As a worker's loop does, which eventlet cannot wake from a thread.
            while not ended:
                time.sleep(0.05)

        ended = []
        run(work, turn)
        """,
        ttl=1.5,
    )

    assert said == ("lost\n" if computes else "kept\n")


def test_user_is_told_in_the_thread_of_the_greenlets(
    run_green: Callable[..., str],
) -> None:
    said = run_green(
        """
        told = {}

        def observe(event):
            told[event.kind] = library.thread()

        def on_lost(lease):
            told["callback"] = library.thread()

        leases = Leases(sys.argv[1], ttl=float(sys.argv[2]), observers=[observe])

        def work():
            lease = leases.acquire("invoice:42")

            def body():
                until = time.monotonic() + 30
                while "renewed" not in told and time.monotonic() < until:
                    time.sleep(0.01)
                redis.Redis.from_url(sys.argv[1]).delete("tl1:{invoice:42}")
                while "callback" not in told and time.monotonic() < until:
                    time.sleep(0.01)

            try:
                hold(lease, body, on_lost=on_lost)
            except LeaseLost:
                time.sleep(0.1)
            print(sorted(told), set(told.values()) == {library.thread()})

        run(work)
        """,
        ttl=1.5,
    )

    assert said == "['acquired', 'callback', 'lost', 'renewed'] True\n"
