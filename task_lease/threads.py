"""The threads, locks and calls by which leases are kept beside the work they are for.

Where gevent or eventlet has replaced the process's threads, beats need a real one, and
whatever is the user's must be called in the loop to which it belongs.
"""

from __future__ import annotations

import threading
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeVar

from task_lease.greenlets import greenlets

if TYPE_CHECKING:
    from collections.abc import Callable

    from task_lease.greenlets import Bell, Greenlets, Work

E = TypeVar("E")


class Alarm:
    """What one waiter sleeps on.

    Unlike an Event, it has no Python code in which a loss that is raised by a signal
    could leave a mutex taken.
    """

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake the waiter, now or when it next sleeps."""
        self._rings.put(None)

    def sleep(self, seconds: float) -> bool:
        """Sleep until woken; return whether that was the reason to stop."""
        try:
            self._rings.get(timeout=seconds)
        except Empty:
            return False
        self.silence()
        return True

    def silence(self) -> None:
        """Forget that it rang."""
        while not self._rings.empty():
            self._rings.get()


class Threads(Protocol):
    """Starts the thread that beats, and what sends its requests.

    Attributes:
        may_end: Whether the thread may end while nothing is to be done.
    """

    may_end: bool

    def bell(self) -> Bell:
        """Return what the thread sleeps on."""

    def start(self, work: Work) -> object:
        """Start the thread that beats."""

    def start_request(self, work: Work) -> object:
        """Start what sends a request, from that thread."""


class RealThreads:
    """The threads of a process in which a thread is one."""

    may_end = True

    def bell(self) -> Bell:
        """Return what the thread sleeps on."""
        return Alarm()

    def start(self, work: Work) -> object:
        """Start the thread that beats."""
        return start_thread(work, "task-lease-heartbeat")

    def start_request(self, work: Work) -> object:
        """Start what sends a request, from that thread."""
        return start_thread(work, "task-lease-beat")


class ThreadsBesideGreenlets:
    """A real thread beside the greenlets of a process.

    Args:
        library: Whose greenlets they are.
        shares_client: Whether requests use a client that greenlets of this thread
            use, too; then they must be sent from here.
    """

    # The connections of its requests belong to its loop.
    may_end = False

    def __init__(self, library: Greenlets, *, shares_client: bool) -> None:
        self._library = library
        self._home = library.call_soon_here() if shares_client else None

    def bell(self) -> Bell:
        """Return what the thread sleeps on."""
        return self._library.bell()

    def start(self, work: Work) -> object:
        """Start the thread that beats."""
        return self._library.start_thread(work)

    def start_request(self, work: Work) -> object:
        """Start what sends a request, from that thread."""
        if self._home is None:
            return self._library.spawn(work)
        return self._home(partial(self._library.spawn, work))


def start_thread(work: Work, name: str) -> threading.Thread:
    """Start a thread that does not outlive the process."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def real_lock() -> threading.Lock:
    """Return a lock between real threads; whoever has it must not wait."""
    library = greenlets()
    return threading.Lock() if library is None else library.lock()


def starter_here() -> Callable[[Work, str], object]:
    """Return what starts a thread of the kind that the current one is.

    Called from a real thread, it starts a greenlet in the thread it was made in.
    """
    library = greenlets()
    if library is None:
        return start_thread
    call_soon = library.call_soon_here()
    return lambda work, _: call_soon(partial(library.spawn, work))


def at_home(call: Callable[[E], None]) -> Callable[[E], None]:
    """Return what calls in this thread's loop also from another real thread."""
    library = greenlets()
    if library is None:
        return call
    home, call_soon = library.thread(), library.call_soon_here()

    def call_at_home(event: E) -> None:
        if library.thread() == home:
            call(event)
        else:
            call_soon(partial(library.spawn, partial(call, event)))

    return call_at_home
