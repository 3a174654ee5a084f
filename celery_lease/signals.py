"""Signals in Celery's manner, sent in the worker process in which it happens.

Connect as to Celery's own: ``@lease_lost.connect``. The sender is the task's name, and
``event`` a `task_lease.LeaseEvent`. Receivers of `lease_lost` are called in the thread
that beats, so they must be quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery.utils.dispatch import Signal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from task_lease.observers import EventKind, LeaseEvent

#: A task got its lease.
lease_acquired = Signal(name="lease_acquired", providing_args=["event"])
#: A task found its lease held; ``event.detail`` says what is done about it.
lease_conflict = Signal(name="lease_conflict", providing_args=["event"])
#: A running task no longer has its lease; ``event.detail`` is the reason.
lease_lost = Signal(name="lease_lost", providing_args=["event"])
#: A task's outcome is stored, and its lease has ended.
lease_released = Signal(name="lease_released", providing_args=["event"])
#: A lease was taken from a holder that is proven dead.
lease_takeover = Signal(name="lease_takeover", providing_args=["event"])

_SIGNALS: Mapping[EventKind, Signal] = {
    "acquired": lease_acquired,
    "conflict": lease_conflict,
    "lost": lease_lost,
    "released": lease_released,
    "takeover": lease_takeover,
}


def send_signal(event: LeaseEvent) -> None:
    """Send an event as the signal of its kind, if it has one: an observer."""
    signal = _SIGNALS.get(event.kind)
    if signal is not None:
        signal.send(event.task, event=event)
