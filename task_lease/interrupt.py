"""`LeaseLost`, raised inside the code that runs under a lease.

In the main thread a signal does it, which also ends `time.sleep` and socket reads; in
any other thread the interpreter raises at the next bytecode, so a C call that blocks
is not interrupted. In a greenlet it is raised where that next waits.

Python's own logging and threading take locks in places where an error that is raised
from outside would leave them taken for ever. Whoever then logs would hang, and that can
be the beating thread; so a loss waits for a moment there.

Bodies can be nested, and a store that cannot be reached costs all their leases at
once. Then one loss is raised at a time, and the next one when the body that it struck
has ended: its clean-up is not cut short.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from _thread import start_new_thread
from typing import TYPE_CHECKING, Protocol, TypeVar

from task_lease.greenlets import greenlets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from task_lease.errors import LeaseLost, LostReason
    from task_lease.greenlets import Greenlet, Greenlets

# Ignored by default, and used neither by Celery nor by RQ (SIGUSR1, SIGUSR2, SIGALRM).
_SIGNAL = getattr(signal, "SIGURG", None)

# Seconds until another look at a thread that is about to take or to give back a lock,
# and how many looks it gets; it could also be one that waits for long.
_LOOK_AGAIN = 0.002
_MOST_LOOKS = 50
_LOCKING = frozenset(
    ("__enter__", "__exit__", "acquire", "release", "notify", "notify_all", "set")
)


class Interrupt(Protocol):
    """Delivers a loss to the thread that made it, at most once and only while armed.

    Attributes:
        is_struck_through: Whether a loss was raised in the body that is not its own,
            but that of a body around it.
    """

    is_struck_through: bool

    def arm(self) -> None:
        """Let a loss be raised from now on: the body begins."""

    def deliver(self, name: str, reason: LostReason) -> None:
        """Raise the loss in the body, from whatever thread."""

    def disarm(self) -> None:
        """Let nothing be raised any more: the body has ended.

        If a loss is still raised in here, it must be called again.
        """

    def pass_on(self) -> None:
        """Raise the loss of a body around this one that had to wait for its end."""


def interrupt_here(error: type[LeaseLost]) -> Interrupt:
    """Return what can raise an error in the current thread or greenlet.

    Args:
        error: The class to raise; it must be callable without arguments.
    """
    library = greenlets()
    if library is not None:
        return _InGreenlet(error, library)
    if threading.current_thread() is threading.main_thread():
        handler = _installed_handler()
        if handler is not None:
            return _BySignal(error, handler)
    return _ByInterpreter(error, _here.nest)


class _Nested:
    """What is armed, one inside the other, in one thread."""

    def __init__(self) -> None:
        self.is_pending = False
        self.is_struck = False
        self.is_struck_through = False


N = TypeVar("N", bound=_Nested)


def _strike(armed: Sequence[N]) -> N | None:
    """Return whose loss is to be raised now, and note that it is."""
    for interrupt in reversed(armed):
        if interrupt.is_struck:
            # That body is on its way out, and must come to its end.
            return None
        if interrupt.is_pending:
            for inside in armed[armed.index(interrupt) :]:
                inside.is_pending = False
                inside.is_struck = True
                inside.is_struck_through = inside is not interrupt
            return interrupt
    return None


class _Looks:
    """Says when a thread may be struck, and has another look when it may not."""

    def __init__(self, strike: Callable[[], object]) -> None:
        self._strike = strike
        self._left = _MOST_LOOKS

    def is_too_early(self, frame: FrameType | None) -> bool:
        """Whether the thread is where it must not be struck; then strike later."""
        if self._left == 0 or not _handles_a_lock(frame):
            self._left = _MOST_LOOKS
            return False
        self._left -= 1
        # The low-level call, for it takes none of those locks itself.
        start_new_thread(self._strike_later, ())
        return True

    def _strike_later(self) -> None:
        time.sleep(_LOOK_AGAIN)
        self._strike()


def _handles_a_lock(frame: FrameType | None) -> bool:
    module = frame.f_globals.get("__name__") if frame else None
    if module == "threading" and frame:
        return frame.f_code.co_name in _LOCKING
    return module == "logging"


class _SignalHandler:
    """Raises pending losses in the main thread."""

    def __init__(
        self, previous: Callable[[int, FrameType | None], object] | None
    ) -> None:
        self._previous = previous
        self._looks = _Looks(_signal_main_thread)
        self.armed: list[_BySignal] = []

    @property
    def is_pending(self) -> bool:
        """Whether a loss waits to be raised."""
        return any(interrupt.is_pending for interrupt in self.armed)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Runs in the main thread between two bytecodes, so it races with nothing.
        if self.is_pending and self._looks.is_too_early(frame):
            return
        interrupt = _strike(self.armed)
        if interrupt is not None:
            raise interrupt.loss
        if self._previous is not None:
            self._previous(number, frame)


def _installed_handler() -> _SignalHandler | None:
    if _SIGNAL is None:  # pragma: no cover - no such signal on Windows
        return None
    current = signal.getsignal(_SIGNAL)
    if isinstance(current, _SignalHandler):
        return current
    handler = _SignalHandler(current if callable(current) else None)
    signal.signal(_SIGNAL, handler)
    return handler


class _BySignal(_Nested):
    def __init__(self, error: type[LeaseLost], handler: _SignalHandler) -> None:
        super().__init__()
        self.loss = error()
        self._error = error
        self._handler = handler

    def arm(self) -> None:
        self._handler.armed.append(self)

    def deliver(self, name: str, reason: LostReason) -> None:
        self.loss = self._error(name, reason)
        self.is_pending = self in self._handler.armed
        _signal_main_thread()

    def disarm(self) -> None:
        armed = self._handler.armed
        if self in armed:
            armed.remove(self)

    def pass_on(self) -> None:
        if self._handler.is_pending:
            _signal_main_thread()


def _signal_main_thread() -> None:
    main = threading.main_thread().ident
    if _SIGNAL is not None and main is not None:  # pragma: no branch
        signal.pthread_kill(main, _SIGNAL)


class _Nest:
    """What is armed in one thread other than the main one."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.armed: list[_ByInterpreter] = []
        self._thread = threading.get_ident()
        self._looks = _Looks(self._strike_again)

    def strike(self) -> None:
        """Raise what is to be raised now, with the mutex held."""
        if not any(interrupt.is_pending for interrupt in self.armed):
            return
        # Where it stands now is where it is struck.
        if self._looks.is_too_early(sys._current_frames().get(self._thread)):  # noqa: SLF001 - it is documented
            return
        interrupt = _strike(self.armed)
        if interrupt is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread), ctypes.py_object(interrupt.error)
            )

    def _strike_again(self) -> None:
        with self.mutex:
            self.strike()


class _Here(threading.local):
    def __init__(self) -> None:
        self.nest = _Nest()


_here = _Here()


class _ByInterpreter(_Nested):
    def __init__(self, error: type[LeaseLost], nest: _Nest) -> None:
        super().__init__()
        self.error = error
        self._nest = nest

    def arm(self) -> None:
        with self._nest.mutex:
            self._nest.armed.append(self)

    def deliver(self, name: str, reason: LostReason) -> None:  # noqa: ARG002 - a class is raised, without arguments
        with self._nest.mutex:
            self.is_pending = self in self._nest.armed
            self._nest.strike()

    def disarm(self) -> None:
        with self._nest.mutex:
            if self in self._nest.armed:
                self._nest.armed.remove(self)
        # What was set is raised right here, or before. It is not taken back, for that
        # leaves the interpreter (before Python 3.13) looking for it at every call.

    def pass_on(self) -> None:
        with self._nest.mutex:
            self._nest.strike()


#: What is armed in each greenlet, one inside the other.
_in_greenlets: dict[Greenlet, list[_InGreenlet]] = {}


class _InGreenlet(_Nested):
    def __init__(self, error: type[LeaseLost], library: Greenlets) -> None:
        super().__init__()
        self.loss = error()
        self._error = error
        self._library = library
        self._greenlet = library.current()
        self._call_soon = library.call_soon_here()
        self._looks = _Looks(self._strike_soon)

    def arm(self) -> None:
        _in_greenlets.setdefault(self._greenlet, []).append(self)

    def deliver(self, name: str, reason: LostReason) -> None:
        self.loss = self._error(name, reason)
        self.is_pending = self in self._armed()
        if self._library.current() is self._greenlet:
            self.pass_on()
        else:
            self._strike_soon()

    def disarm(self) -> None:
        armed = self._armed()
        if self in armed:
            armed.remove(self)
        if not armed:
            _in_greenlets.pop(self._greenlet, None)

    def pass_on(self) -> None:
        interrupt = _strike(self._armed())
        if interrupt is not None:
            raise interrupt.loss

    def _armed(self) -> list[_InGreenlet]:
        return _in_greenlets.get(self._greenlet, [])

    def _strike_soon(self) -> None:
        self._call_soon(self._strike_from_loop)

    def _strike_from_loop(self) -> None:
        # The loop runs, so the greenlet does not: nothing comes in between.
        pending = any(interrupt.is_pending for interrupt in self._armed())
        if not pending or self._looks.is_too_early(self._greenlet.gr_frame):
            return
        interrupt = _strike(self._armed())
        if interrupt is not None:
            self._greenlet.throw(interrupt.loss)
