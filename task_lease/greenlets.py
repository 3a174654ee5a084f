"""Greenlets, in a process whose threads and sockets gevent or eventlet has replaced.

Whatever such a process calls a thread is a greenlet, and stands still as long as
another one computes. This is what the core needs to beat and to interrupt all the
same: real threads and locks, and calls that reach the loop of a thread from another.
"""

from __future__ import annotations

import atexit
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Lock
    from types import FrameType

    Work: TypeAlias = Callable[[], object]
    #: Has some work done by the loop of one thread, soon; call it from anywhere.
    CallSoon: TypeAlias = Callable[[Work], object]

# Seconds between two looks of what cannot be woken from another thread.
_LOOK_EVERY = 0.05
# Seconds that the end of the process waits for a thread of ours.
_PATIENCE = 2.0


class ProcessEnds(BaseException):
    """Ends a real thread of ours; nothing that it runs may take it for a failure."""


class Greenlet(Protocol):
    """What is switched to and from."""

    gr_frame: FrameType | None

    def throw(self, error: BaseException) -> object:
        """Switch to it and raise an error there; only its loop may."""


class Bell(Protocol):
    """What one thread sleeps on, and others ring."""

    def ring(self) -> None:
        """Wake the sleeper, now or when it next sleeps."""

    def sleep(self, seconds: float) -> bool:
        """Sleep until woken; return whether that was the reason to stop."""


class Greenlets(Protocol):
    """One of the libraries."""

    def current(self) -> Greenlet:
        """Return the running greenlet."""

    def spawn(self, work: Work) -> object:
        """Start a greenlet in this thread."""

    def call_soon_here(self) -> CallSoon:
        """Return what calls in the loop of this thread, from whatever thread."""

    def start_thread(self, work: Work) -> object:
        """Start a real thread, with a loop of its own."""

    def thread(self) -> int:
        """Return the number of this real thread."""

    def lock(self) -> Lock:
        """Return a real lock; whoever has it must not switch."""

    def bell(self) -> Bell:
        """Return a bell for a real thread."""


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

    def spawn(self, work: Work) -> object:
        import gevent  # noqa: PLC0415

        return gevent.spawn(work)

    def call_soon_here(self) -> CallSoon:
        from gevent import get_hub  # noqa: PLC0415

        call: CallSoon = get_hub().loop.run_callback_threadsafe
        return call

    def start_thread(self, work: Work) -> object:
        # It must not touch a loop while the process's end takes loops apart.
        ended = self.lock()
        ended.acquire()

        def run() -> None:
            stop = partial(self.call_soon_here(), partial(_end, self.current()))
            at_exit = partial(_end_and_wait, stop, ended)
            atexit.register(at_exit)
            try:
                work()
            except ProcessEnds:
                pass
            finally:
                ended.release()
                atexit.unregister(at_exit)

        return _original_of_gevent("_thread", "start_new_thread")(run, ())

    def thread(self) -> int:
        number: int = _original_of_gevent("_thread", "get_ident")()
        return number

    def lock(self) -> Lock:
        lock: Lock = _original_of_gevent("_thread", "allocate_lock")()
        return lock

    def bell(self) -> Bell:
        return _GeventBell()


def _end(greenlet: Greenlet) -> None:
    greenlet.throw(ProcessEnds())


def _end_and_wait(stop: Work, ended: Lock) -> None:
    stop()
    ended.acquire(timeout=_PATIENCE)


def _original_of_gevent(module: str, name: str) -> Any:
    from gevent import monkey  # noqa: PLC0415

    return monkey.get_original(module, name)


class _GeventBell:
    def __init__(self) -> None:
        self._rung = False
        self._wake: Work | None = None

    def ring(self) -> None:
        self._rung = True
        if self._wake is not None:
            self._wake()

    def sleep(self, seconds: float) -> bool:
        if self._wake is None:
            self._make()
        if not self._rung:
            self._event.wait(seconds)
        self._event.clear()
        rung, self._rung = self._rung, False
        return rung

    def _make(self) -> None:
        # In the sleeper's own thread, to which both belong.
        from gevent.event import Event  # noqa: PLC0415

        self._event = Event()
        self._wake = partial(_Gevent().call_soon_here(), self._event.set)


class _Eventlet:
    def current(self) -> Greenlet:
        from eventlet import getcurrent  # noqa: PLC0415

        current: Greenlet = getcurrent()
        return current

    def spawn(self, work: Work) -> object:
        import eventlet  # noqa: PLC0415

        return eventlet.spawn_n(work)

    def call_soon_here(self) -> CallSoon:
        from eventlet.hubs import get_hub  # noqa: PLC0415

        # Nothing wakes the loop for it, but a worker's never sleeps for long.
        return partial(get_hub().schedule_call_global, 0)

    def start_thread(self, work: Work) -> object:
        thread = _original_of_eventlet("threading").Thread(target=work, daemon=True)
        return thread.start()

    def thread(self) -> int:
        number: int = _original_of_eventlet("threading").get_ident()
        return number

    def lock(self) -> Lock:
        lock: Lock = _original_of_eventlet("threading").Lock()
        return lock

    def bell(self) -> Bell:
        return _EventletBell()


def _original_of_eventlet(module: str) -> Any:
    from eventlet import patcher  # noqa: PLC0415

    return patcher.original(module)


class _EventletBell:
    def __init__(self) -> None:
        self._rung = False

    def ring(self) -> None:
        self._rung = True

    def sleep(self, seconds: float) -> bool:
        import eventlet  # noqa: PLC0415

        while not self._rung and seconds > 0:
            pause = min(seconds, _LOOK_EVERY)
            eventlet.sleep(pause)
            seconds -= pause
        rung, self._rung = self._rung, False
        return rung
