"""Fixtures of the core's tests: leases that tell what happens, and a clock to turn."""

from __future__ import annotations

import gc
import re
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from harness import eventually

from task_lease import Leases
from task_lease.lease import boottime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    import redis

    from task_lease import LeaseEvent


#: Whether a file is one of those in which errors are made to strike.
STRUCK = re.compile("/(task_lease|redis)/").search


class MakeLeases(Protocol):
    """Makes `Leases` that are released after the test."""

    def __call__(self, store: Any = None, **options: Any) -> Leases:
        """Make them; the store is that of `url`, and `events` are kept."""


class AllExpire(Protocol):
    """Asserts that nothing in a database stays for ever."""

    def __call__(self) -> None:
        """Assert it."""


class Strike(Protocol):
    """Interrupts some work, as a signal would."""

    def __call__(self, place: int, work: Callable[[], object]) -> bool:
        """Raise at the n-th place; return whether there are so many."""


class Clock:
    """The real clock of trust, which can be put forward and back.

    Attributes:
        ahead: Seconds that it is ahead of the real one.
        asked: How often it was looked at.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return boottime() + self.ahead


class Events(list["LeaseEvent"]):
    """What observers were told, oldest first."""

    def kinds(self, name: str | None = None) -> list[str]:
        """Return the kinds of the events, of one lease or of all."""
        return [event.kind for event in self if name in (None, event.name)]

    def await_kind(self, kind: str, timeout: float = 10.0) -> LeaseEvent:
        """Return the first event of a kind, waiting for it."""
        eventually(lambda: kind in self.kinds(), timeout, f"an event {kind!r}")
        return next(event for event in self if event.kind == kind)


@pytest.fixture
def events() -> Events:
    """Give what the observers of all leases of the test are told."""
    return Events()


@pytest.fixture
def clock() -> Clock:
    """Give a clock to turn, for `Leases(clock=...)`."""
    return Clock()


@pytest.fixture
def make_leases(url: str, events: Events) -> Iterator[MakeLeases]:
    """Give a function that makes leases in the test's database."""
    made: list[Leases] = []

    def make(store: Any = None, **options: Any) -> Leases:
        options.setdefault("observers", (events.append,))
        made.append(Leases(url if store is None else store, **options))
        return made[-1]

    yield make
    for leases in made:
        for lease in leases.leases():
            lease.release()


@pytest.fixture
def leases(make_leases: MakeLeases) -> Leases:
    """Give leases in the test's database, with a short ttl."""
    return make_leases(ttl=1.0)


@pytest.fixture
def all_expire(client: redis.Redis) -> AllExpire:
    """Give an assertion that every key in the test's database has an expiry."""

    def check() -> None:
        endless = [key for key in client.scan_iter() if client.pttl(key) == -1]
        assert endless == []

    return check


@pytest.fixture
def strike() -> Iterator[Strike]:
    """Give a function that interrupts work at any call that it makes.

    Only calls of our own code and of redis-py count: where an error strikes in the
    logging or threading of Python, they may keep a lock for ever.
    """

    def strike(place: int, work: Callable[[], object]) -> bool:
        left = place

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal left
            if event in {"call", "c_return"} and STRUCK(frame.f_code.co_filename):
                left -= 1
                if left == 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            sys.setprofile(count)
            try:
                work()
            finally:
                sys.setprofile(None)
        return left <= 0

    yield strike
    sys.setprofile(None)
    # Connections that were struck while they were made are closed here and not later,
    # in the middle of another test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
