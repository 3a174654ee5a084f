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
