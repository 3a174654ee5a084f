"""`LeaseLost`, raised inside the code that runs under a lease.

In the main thread a signal does it, which also ends `time.sleep` and socket reads; in
any other thread the interpreter raises at the next bytecode, so a C call that blocks
is not interrupted.

Bodies can be nested, and a store that cannot be reached costs all their leases at
once. Then one loss is raised at a time, the innermost first, and the next one when
that body has ended: its clean-up is not cut short.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from task_lease.errors import LeaseLost, LostReason

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

    def deliver(self, name: str, reason: LostReason) -> None:
        """Raise the loss in the body, from whatever thread."""

    def disarm(self) -> None:
        """Let nothing be raised any more: the body has ended.

        If a loss is still raised in here, it must be called again.
        """

    def pass_on(self) -> None:
        """Raise the loss of a body around this one that had to wait for its end."""


def interrupt_here(error: type[LeaseLost]) -> Interrupt:
    """Return what can raise an error in the current thread.

    Args:
        error: The class to raise; it must be callable without arguments.
    """
    if threading.current_thread() is threading.main_thread():
        handler = _installed_handler()
        if handler is not None:
            return _BySignal(error, handler)
    return _ByInterpreter(error, _here.nest)


class _Nested:
    """What is armed inside each other in one thread."""

    def __init__(self) -> None:
        self.pending = False
        self.delivered = False


N = TypeVar("N", bound=_Nested)


def _next(armed: Sequence[N]) -> N | None:
    """Return whose loss is to be raised now."""
    for interrupt in reversed(armed):
        if interrupt.pending:
            return interrupt
        if interrupt.delivered:
            # That body is on its way out, and must come to its end.
            return None
    return None


class _SignalHandler:
    """Raises pending losses in the main thread."""

    def __init__(
        self, previous: Callable[[int, FrameType | None], object] | None
    ) -> None:
        self._previous = previous
        self.armed: list[_BySignal] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Runs in the main thread between two bytecodes, so it races with nothing.
        interrupt = _next(self.armed)
        if interrupt is not None:
            interrupt.pending = False
            interrupt.delivered = True
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
        self.pending = True
        _signal_main_thread()

    def disarm(self) -> None:
        armed = self._handler.armed
        if self in armed:
            armed.remove(self)
        self.pending = False

    def pass_on(self) -> None:
        if _next(self._handler.armed) is not None:
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
        self.thread = threading.get_ident()

    def strike(self) -> None:
        """Raise what is to be raised now, with the mutex held."""
        interrupt = _next(self.armed)
        if interrupt is not None:
            interrupt.pending = False
            interrupt.delivered = True
            self.set_pending(interrupt.error)

    def set_pending(self, error: type[LeaseLost] | None) -> None:
        # https://docs.python.org/3/c-api/threads.html: NULL takes back what is pending.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self.thread), ctypes.py_object(error) if error else None
        )


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
            self.pending = self in self._nest.armed and not self.delivered
            self._nest.strike()

    def disarm(self) -> None:
        with self._nest.mutex:
            if self in self._nest.armed:
                self._nest.armed.remove(self)
            if self.delivered:
                self._nest.set_pending(None)

    def pass_on(self) -> None:
        with self._nest.mutex:
            self._nest.strike()
