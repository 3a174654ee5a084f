"""Greenlets, in a process whose threads and sockets gevent or eventlet has replaced.

Whatever such a process calls a thread is a greenlet, and stands still as long as
another one computes. This is what the core needs to interrupt one all the same: calls
that reach the loop of a thread from another, and real threads.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Work: TypeAlias = Callable[[], object]
    #: Has some work done by the loop of one thread, soon; call it from anywhere.
    CallSoon: TypeAlias = Callable[[Work], object]


class Greenlet(Protocol):
    """What is switched to and from."""

    gr_frame: FrameType | None

    def throw(self, error: BaseException) -> object:
        """Switch to it and raise an error there; only its loop may."""


class Greenlets(Protocol):
    """One of the libraries."""

    def current(self) -> Greenlet:
        """Return the running greenlet."""

    def call_soon_here(self) -> CallSoon:
        """Return what calls in the loop of this thread, from whatever thread."""

    def start_thread(self, work: Work) -> object:
        """Start a real thread, with a loop of its own."""


def greenlets() -> Greenlets | None:
    """Return the library that replaced this process's threads, None if none did."""
    if "gevent.monkey" in sys.modules:
        from gevent import monkey  # noqa: PLC0415 - only where somebody uses it

        if monkey.is_module_patched("threading"):
            return _Gevent()
    if "eventlet.patcher" in sys.modules:
        from eventlet import patcher  # noqa: PLC0415 - only where somebody uses it

        if patcher.is_monkey_patched("thread"):
            return _Eventlet()
    return None


class _Gevent:
    def current(self) -> Greenlet:
        from gevent import getcurrent  # noqa: PLC0415

        current: Greenlet = getcurrent()
        return current

    def call_soon_here(self) -> CallSoon:
        from gevent import get_hub  # noqa: PLC0415

        call: CallSoon = get_hub().loop.run_callback_threadsafe
        return call

    def start_thread(self, work: Work) -> object:
        return _original_of_gevent("_thread", "start_new_thread")(work, ())


def _original_of_gevent(module: str, name: str) -> Any:
    from gevent import monkey  # noqa: PLC0415

    return monkey.get_original(module, name)


class _Eventlet:
    def current(self) -> Greenlet:
        from eventlet import getcurrent  # noqa: PLC0415

        current: Greenlet = getcurrent()
        return current

    def call_soon_here(self) -> CallSoon:
        from eventlet.hubs import get_hub  # noqa: PLC0415

        # Nothing wakes the loop for it, but a worker's never sleeps for long.
        return partial(get_hub().schedule_call_global, 0)

    def start_thread(self, work: Work) -> object:
        thread = _original_of_eventlet("threading").Thread(target=work, daemon=True)
        return thread.start()


def _original_of_eventlet(module: str) -> Any:
    from eventlet import patcher  # noqa: PLC0415

    return patcher.original(module)
