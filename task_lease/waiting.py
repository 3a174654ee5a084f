"""Wakes whoever waits for a lease, with one subscription per process.

A wake-up only makes waiting short. Nobody relies on one: every waiter also asks again
by itself, so a lost message costs time and never a hang.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from typing import TYPE_CHECKING

from task_lease.keys import wake_channel
from task_lease.threads import Alarm

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis
    from redis.client import PubSub

logger = logging.getLogger("task_lease.acquire")

# Seconds: how often the listener looks whether anybody still waits, and how long it
# pauses before it subscribes again after an error.
_LOOK_EVERY = 5.0
_PAUSE = 0.5


class Wakeups:
    """The subscription through which this process hears of leases handed to it.

    Args:
        connect: Returns the client to subscribe with.
    """

    _thread: threading.Thread | None

    def __init__(self, connect: Callable[[], redis.Redis]) -> None:
        self._connect = connect
        self._start_anew()
        wakeups = weakref.ref(self)

        def start_anew_in_child() -> None:
            forked = wakeups()
            if forked is not None:
                forked._start_anew()  # noqa: SLF001 - our own method

        os.register_at_fork(after_in_child=start_anew_in_child)

    def _start_anew(self) -> None:
        self.channel = wake_channel(secrets.token_hex(8))
        self._mutex = threading.Lock()
        self._waiting: dict[str, Alarm] = {}
        self._thread = None

    def expect(self, owner: str) -> Alarm:
        """Return what rings when the owner is woken.

        It also rings as soon as there is a subscription, for what was announced
        before was not heard.
        """
        alarm = Alarm()
        with self._mutex:
            self._waiting[owner] = alarm
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._listen, name="task-lease-wakeups", daemon=True
                )
                self._thread.start()
        return alarm

    def forget(self, owner: str) -> None:
        """Wait no longer for the owner to be woken."""
        with self._mutex:
            self._waiting.pop(owner, None)

    def _listen(self) -> None:
        subscription: PubSub | None = None
        while self._is_wanted():
            try:
                if subscription is None:
                    subscription = self._connect().pubsub()  # type: ignore[no-untyped-call, unused-ignore]
                    subscription.subscribe(self.channel)
                self._hear(subscription.get_message(timeout=_LOOK_EVERY))
            except Exception as error:  # noqa: BLE001 - whatever it is, it cannot hear
                logger.warning("Waiting for wake-ups failed: %s", error)
                self._wake_all()
                _close(subscription)
                subscription = None
                threading.Event().wait(_PAUSE)
        _close(subscription)

    def _is_wanted(self) -> bool:
        with self._mutex:
            if not self._waiting:
                self._thread = None
            return self._thread is threading.current_thread()

    def _hear(self, message: dict[str, object] | None) -> None:
        if message is None:
            return
        if message["type"] == "subscribe":
            self._wake_all()
            return
        owner = message["data"]
        text = owner.decode() if isinstance(owner, bytes) else str(owner)
        with self._mutex:
            alarm = self._waiting.get(text)
        if alarm is not None:
            alarm.ring()

    def _wake_all(self) -> None:
        with self._mutex:
            alarms = list(self._waiting.values())
        for alarm in alarms:
            alarm.ring()


def _close(subscription: PubSub | None) -> None:
    if subscription is not None:
        try:
            subscription.close()
        except Exception:
            # It is given up anyhow.
            logger.debug("Closing the subscription failed", exc_info=True)
