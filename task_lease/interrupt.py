"""`LeaseLost`, raised inside the code that runs under a lease.

In the main thread a signal does it, which also ends `time.sleep` and socket reads; in
any other thread the interpreter raises at the next bytecode, so a C call that blocks
is not interrupted.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from typing import TYPE_CHECKING, Protocol

from task_lease.errors import LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

# Ignored by default, and used neither by Celery nor by RQ (SIGUSR1, SIGUSR2, SIGALRM).
_SIGNAL = getattr(signal, "SIGURG", None)


class Interrupt(Protocol):
    """Delivers a loss to the thread that made it, at most once and only while armed.

    Attributes:
        delivered: Whether the loss was raised in the body.
    """

    delivered: bool

    def arm(self) -> None:
        """Let a loss be raised from now on: the body begins."""

    def deliver(self) -> None:
        """Raise the loss in the body, from whatever thread."""

    def disarm(self) -> None:
        """Let nothing be raised any more: the body has ended."""


def interrupt_here(error: type[LeaseLost]) -> Interrupt:
    """Return what can raise an error in the current thread.

    Args:
        error: The class to raise; it must be callable without arguments.
    """
    if threading.current_thread() is threading.main_thread():
        handler = _installed_handler()
        if handler is not None:
            return _BySignal(error, handler)
    return _ByInterpreter(error)


class _SignalHandler:
    """Raises the pending loss of the innermost armed body of the main thread."""

    def __init__(
        self, previous: Callable[[int, FrameType | None], object] | None
    ) -> None:
        self._previous = previous
        self.armed: list[_BySignal] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Runs in the main thread between two bytecodes, so it races with nothing.
        for interrupt in reversed(self.armed):
            if interrupt.pending:
                interrupt.pending = False
                interrupt.delivered = True
                raise interrupt.error
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


class _BySignal:
    def __init__(self, error: type[LeaseLost], handler: _SignalHandler) -> None:
        self.error = error
        self.pending = False
        self.delivered = False
        self._handler = handler

    def arm(self) -> None:
        self._handler.armed.append(self)

    def deliver(self) -> None:
        self.pending = True
        if _SIGNAL is not None:  # pragma: no branch
            main = threading.main_thread().ident
            if main is not None:  # pragma: no branch
                signal.pthread_kill(main, _SIGNAL)

    def disarm(self) -> None:
        if self in self._handler.armed:
            self._handler.armed.remove(self)
        self.pending = False


class _ByInterpreter:
    def __init__(self, error: type[LeaseLost]) -> None:
        self.delivered = False
        self._error = error
        self._thread = threading.get_ident()
        self._mutex = threading.Lock()
        self._armed = False

    def arm(self) -> None:
        self._armed = True

    def deliver(self) -> None:
        with self._mutex:
            if self._armed and not self.delivered:
                self.delivered = True
                _raise_in_thread(self._thread, self._error)

    def disarm(self) -> None:
        # What was set a moment ago can still be raised in here.
        while self._armed:
            try:
                with self._mutex:
                    self._armed = False
            except LeaseLost:
                continue
        if self.delivered:
            try:
                _raise_in_thread(self._thread, None)
            except LeaseLost:
                return


def _raise_in_thread(thread: int, error: type[LeaseLost] | None) -> None:
    # https://docs.python.org/3/c-api/threads.html: NULL takes back what is pending.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(error) if error else None
    )
