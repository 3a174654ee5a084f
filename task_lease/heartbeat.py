"""One thread per process that renews every held lease and notices a lost one.

The thread never waits for the store: each batch of renewals is sent by a short-lived
thread of its own, so no request, however long it hangs (a name look-up included),
can hide that a deadline has passed. Beside greenlets that is a greenlet, too, but one
of a real thread, which no work of the user's can hold up.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

from task_lease.errors import StoreUnavailable
from task_lease.greenlets import ProcessEnds
from task_lease.schedule import Schedule
from task_lease.threads import real_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from task_lease.lease import Lease
    from task_lease.scripts import Store
    from task_lease.threads import Threads

logger = logging.getLogger("task_lease.heartbeat")

# Parts of a ttl: between beats, what a request may take, and until a failed one is
# sent again.
_BEAT = 1 / 3
_PATIENCE = 1 / 6
_AGAIN = 1 / 12
# Requests that hang beyond their patience are left behind, but not without number.
_MOST_REQUESTS = 8
# Seconds. The waits of threading count no suspended time, so none is longer.
_LONGEST_WAIT = 1.0


class _Request:
    """Renewals of one ttl that are on their way."""

    def __init__(self, leases: list[Lease], ttl: float, sent_at: float) -> None:
        self.leases = leases
        self.sent_at = sent_at
        self.patient_until = sent_at + ttl * _PATIENCE
        self.look_at = min(
            self.patient_until, *(lease.trusted_until for lease in leases)
        )
        self.replies: list[bool | StoreUnavailable] = []


class Heartbeat:
    """Renews leases until they are released, lost or left behind.

    Args:
        store: Where the leases are.
        clock: The leases' clock, in seconds.
        threads: How its threads are started.
    """

    _thread: object | None
    _wake_at: float

    def __init__(
        self, store: Store, clock: Callable[[], float], threads: Threads
    ) -> None:
        self._store = store
        self._clock = clock
        self._threads = threads
        self._start_anew()
        heartbeat = weakref.ref(self)

        def start_anew_in_child() -> None:
            forked = heartbeat()
            if forked is not None:
                forked._start_anew()  # noqa: SLF001 - our own method

        os.register_at_fork(after_in_child=start_anew_in_child)

    def add(self, lease: Lease) -> None:
        """Renew a lease from now on."""
        with self._mutex:
            self._put(lease)
            self._active = True
            if self._thread is None:
                self._start_thread()
            elif lease.next_beat_at < self._wake_at:
                self._bell.ring()

    def discard(self, lease: Lease) -> None:
        """Renew a lease no more."""
        with self._mutex:
            self._schedule.drop(lease)

    def leases(self) -> list[Lease]:
        """Return the leases that are being renewed."""
        with self._mutex:
            return list(self._all())

    def _start_anew(self) -> None:
        # In a forked child nothing of the parent's is ours: not the leases, not the
        # thread, and not the mutex that some thread of the parent may have held.
        #
        # That mutex is bare, so that a loss raised by a signal cannot come between
        # taking it and entering the block, as in the Python code of a Condition.
        self._mutex = real_lock()
        self._bell = self._threads.bell()
        self._thread = None
        self._schedule = Schedule()
        self._requests: list[_Request] = []
        self._answered: list[_Request] = []
        self._left_behind = 0
        self._wake_at = math.inf
        self._active = False
        self._idle_wait = _LONGEST_WAIT

    def _start_thread(self) -> None:
        thread = self._thread = object()
        try:
            self._threads.start(partial(self._run, thread))
        except BaseException:
            # There is none, or one that shall not go on: the next lease tries again.
            self._thread = None
            raise

    def _run(self, thread: object) -> None:
        goes_on = True
        while goes_on and self._thread is thread:
            try:
                goes_on = self._turn()
            except ProcessEnds:
                raise
            except BaseException:
                # A beat that dies would lose every lease of the process.
                logger.exception("The heartbeat stumbled and goes on")
                threading.Event().wait(_LONGEST_WAIT)

    def _turn(self) -> bool:
        """Do what is due, and wait; return whether there is more to come."""
        for request in self._take_answered():
            self._judge(request)
        now = self._clock()
        self._lose_patience(now)
        for leases in self._take_due(now):
            self._send(leases, now)
        with self._mutex:
            if self._answered:
                return True
            self._wake_at = self._next_wake_at()
            if math.isinf(self._wake_at) and self._threads.may_end:
                self._thread = None
                return False
            pause = self._wake_at - self._clock()
        self._bell.sleep(min(max(pause, 0.0), _LONGEST_WAIT))
        self._wake_at = -math.inf
        return True

    def _take_answered(self) -> list[_Request]:
        with self._mutex:
            answered, self._answered = self._answered, []
            return answered

    def _judge(self, request: _Request) -> None:
        for lease, reply in zip(request.leases, request.replies, strict=True):
            lease.judge(reply, request.sent_at)
        again_at = self._clock()
        with self._mutex:
            if request in self._requests:
                self._requests.remove(request)
            else:
                self._left_behind -= 1
            for lease, reply in zip(request.leases, request.replies, strict=True):
                self._schedule.drop(lease)
                if not lease.is_live:
                    continue
                if isinstance(reply, StoreUnavailable):
                    lease.next_beat_at = max(
                        again_at, request.sent_at + lease.ttl * _AGAIN
                    )
                    self._schedule.put_apart(lease)
                else:
                    lease.next_beat_at = request.sent_at + lease.ttl * _BEAT
                    self._put(lease)

    def _lose_patience(self, now: float) -> None:
        for request in [r for r in self._requests if now >= r.look_at]:
            for lease in request.leases:
                lease.notice(now)
            live = list(filter(_is_live, request.leases))
            if now >= request.patient_until:
                for lease in live:
                    lease.doubt("no answer in time")
                self._leave_behind(request, live, now)
            else:
                ends = [lease.trusted_until for lease in live]
                request.look_at = min([request.patient_until, *ends])

    def _leave_behind(self, request: _Request, leases: list[Lease], now: float) -> None:
        with self._mutex:
            self._requests.remove(request)
            self._left_behind += 1
        self._postpone(leases, now)

    def _take_due(self, now: float) -> Iterator[list[Lease]]:
        with self._mutex:
            due = self._schedule.due(now)
            troubled = self._schedule.apart()
        again: dict[float, list[Lease]] = {}
        for lease in troubled:
            if lease.notice(now) or not lease.is_live:
                self.discard(lease)
            elif now >= lease.next_beat_at:
                again.setdefault(lease.ttl, []).append(lease)
        for leases in (*due, *again.values()):
            live = [lease for lease in leases if self._is_wanted(lease, now)]
            if live:
                yield live

    def _is_wanted(self, lease: Lease, now: float) -> bool:
        ended_at = lease.body_ended_at
        if lease.notice(now) or not lease.is_live:
            # Lost or released elsewhere: what stays in line would be due for ever.
            pass
        elif ended_at is not None and now > ended_at + lease.ttl:
            logger.error("%r is dropped: its body ended without a release", lease)
        elif not lease.thread.is_alive():
            logger.error("%r is dropped: its thread ended without a release", lease)
        else:
            return True
        self.discard(lease)
        return False

    def _send(self, leases: list[Lease], now: float) -> None:
        ttl = leases[0].ttl
        if self._left_behind >= _MOST_REQUESTS:
            for lease in leases:
                lease.doubt("too many requests hang")
            self._postpone(leases, now + ttl * _AGAIN)
            return
        request = _Request(leases, ttl, now)
        with self._mutex:
            for lease in leases:
                self._schedule.drop(lease)
            self._requests.append(request)
        try:
            self._threads.start_request(partial(self._ask, request))
        except RuntimeError as error:
            # No more threads, or the interpreter is ending.
            problem = StoreUnavailable("renew", str(error))
            self._answer(request, [problem] * len(leases))

    def _postpone(self, leases: Iterable[Lease], until: float) -> None:
        with self._mutex:
            for lease in filter(_is_live, leases):
                lease.next_beat_at = until
                self._schedule.drop(lease)
                self._schedule.put_apart(lease)

    def _ask(self, request: _Request) -> None:
        try:
            replies = self._store.renew([lease.renewal for lease in request.leases])
        except Exception as error:  # noqa: BLE001 - whatever it is, the beat failed
            problem = StoreUnavailable("renew", f"{type(error).__name__}: {error}")
            replies = [problem] * len(request.leases)
        self._answer(request, replies)

    def _answer(
        self, request: _Request, replies: list[bool | StoreUnavailable]
    ) -> None:
        with self._mutex:
            request.replies = replies
            self._answered.append(request)
        self._bell.ring()

    def _next_wake_at(self) -> float:
        instants = [*self._schedule.instants()]
        instants += [request.look_at for request in self._requests]
        if instants:
            return min(instants)
        # Short tasks come and go: a look now and then costs less than a new thread for
        # each of them. Only where there were none, the thread ends.
        active, self._active = self._active, False
        return self._clock() + self._idle_wait if active else math.inf

    def _put(self, lease: Lease) -> None:
        if lease.is_live:
            self._idle_wait = lease.ttl * _BEAT
            self._schedule.put(lease)

    def _all(self) -> Iterator[Lease]:
        yield from self._schedule
        for request in self._requests:
            yield from filter(_is_live, request.leases)


def _is_live(lease: Lease) -> bool:
    return lease.is_live
