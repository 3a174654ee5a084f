"""Leases on Celery's event stream, for ``celery events``, Flower and other monitors.

The types are ``lease-acquired``, ``lease-conflict``, ``lease-lost``,
``lease-released`` and ``lease-takeover``: a group of their own, so that no monitor
takes them for a state of the task. They are sent where the worker sends events of
tasks (``-E``), by a thread of the process in which they happen, so that a broker
which is away holds up neither a run nor a beat. What cannot be sent is dropped.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery

    from task_lease.observers import LeaseEvent

logger = logging.getLogger("celery_lease")

_KINDS = frozenset({"acquired", "conflict", "lost", "released", "takeover"})
# Events that may wait for a broker which is slow or away.
_MOST_WAITING = 1000
# Seconds without an event after which the thread ends and closes its connection.
_IDLE = 10.0


class EventSender:
    """Sends what happens to the leases of an app as events: an observer.

    Args:
        app: The app whose broker carries the events.

    Attributes:
        hostname: The worker's name, which events carry; empty while nobody wants
            events.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self.hostname = ""
        self._is_sending: bool
        self._reset()

    def __call__(self, event: LeaseEvent) -> None:
        """Let an event be sent, if the worker sends events."""
        if not self.hostname or event.kind not in _KINDS:
            return
        if self._pid != os.getpid():
            self._reset()
        about = (f"lease-{event.kind}", self.hostname, _fields_of(event))
        with self._mutex:
            if len(self._waiting.queue) >= _MOST_WAITING:
                return
            self._waiting.put(about)
            if not self._is_sending:
                self._is_sending = True
                threading.Thread(
                    target=self._send_all, name="task-lease-events", daemon=True
                ).start()

    def _reset(self) -> None:
        # A child has neither the thread of its parent nor the broker's connection.
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._waiting: queue.Queue[tuple[str, str, dict[str, Any]]] = queue.Queue()
        self._is_sending = False

    def _send_all(self) -> None:
        while self._has_more():
            try:
                self._send_over_one_connection()
            except Exception:
                # A broker fails in many ways, and what waits would be stale.
                logger.debug("Events of leases were dropped", exc_info=True)
                with self._mutex:
                    self._waiting.queue.clear()

    def _send_over_one_connection(self) -> None:
        app: Any = self._app
        with app.connection_for_write() as connection:
            while True:
                try:
                    kind, hostname, fields = self._waiting.get(timeout=_IDLE)
                except queue.Empty:
                    return
                with app.events.Dispatcher(
                    connection, hostname=hostname, buffer_while_offline=False
                ) as dispatcher:
                    dispatcher.send(kind, **fields)

    def _has_more(self) -> bool:
        with self._mutex:
            self._is_sending = not self._waiting.empty()
            return self._is_sending


def are_wanted(consumer: Any) -> bool:
    """Return whether a worker's consumer sends the events of tasks."""
    dispatcher = getattr(consumer, "event_dispatcher", None)
    if dispatcher is None or not dispatcher.enabled:
        return False
    return not dispatcher.groups or "task" in dispatcher.groups


def _fields_of(event: LeaseEvent) -> dict[str, Any]:
    holder = event.holder or {}
    return {
        "uuid": event.id,
        "name": event.task,
        "queue": event.queue,
        "lease": event.name,
        "fence": event.fence,
        "seconds": event.seconds,
        "detail": event.detail,
        "holder": holder.get("id", ""),
        "holder_host": holder.get("host", ""),
        "holder_pid": holder.get("pid", 0),
    }
