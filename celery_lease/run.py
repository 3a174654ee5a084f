"""One run of a task under its lease, translated into Celery's own outcomes."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from celery import states
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError

from celery_lease.settings import RECEIPT, AppLeases
from task_lease.claims import Claim
from task_lease.errors import LeaseLost, StoreUnavailable
from task_lease.exclusive import Finished, Later, Run, Skip, Tries, admit, hold

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Task
    from celery.app.task import Context

    from celery_lease.settings import Plan
    from task_lease import Lease

logger = logging.getLogger("celery_lease")

#: The message header in which a task that comes back carries its `Tries`.
TRIES_HEADER = "task_lease_tries"

_OUTCOMES = frozenset({states.SUCCESS, states.FAILURE, states.RETRY})
_TRACKS = "_track_started_after_acquire"
# Native delayed delivery of a broker refuses less; the fraction it may lose.
_LEAST_DELAY = 1.0
# Seconds between two attempts to send a task again while the broker is away.
_PUBLISH_AGAIN = 1.0


class _Lost(LeaseLost, Ignore):
    """What interrupts a body: no ``autoretry_for`` may take it for a failure."""


def run_exclusively(
    task: Task[Any, Any],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return what a call of the task returns, run under the task's lease.

    Args:
        task: The task, with its request on top of the stack.
        call: Runs the body.
        args: The arguments of the call.
        kwargs: The keyword arguments of the call.

    Raises:
        LeaseConflict: If the lease is held and the policy is to fail.
        LeaseLost: If the lease was lost before the body ended.
        StoreUnavailable: If the store cannot be used and the policy is to fail.
    """
    request = task.request
    app_leases = AppLeases.of(task.app)
    if request.called_directly or (request.is_eager and not app_leases.eager):
        return call(*args, **kwargs)
    queue = app_leases.queue_of(request.__dict__)
    wanted = bool(getattr(task, "wants_lease", False))
    plan = app_leases.plan(task, queue, exclusive=wanted)
    if plan is None:
        _note_start(task, request)
        return call(*args, **kwargs)
    receipt = request.get(RECEIPT)
    wanted_events = isinstance(receipt, dict) and receipt.get("events")
    app_leases.events.hostname = str(request.hostname) if wanted_events else ""
    run = _Run(task, request, app_leases, plan, queue)
    return run.perform(call, args, kwargs)


def start_after_acquire(task: type[Task[Any, Any]]) -> None:
    """Let the state STARTED be stored after the acquire and not before it.

    A task that then has to come back never looked as if it had begun.
    """
    if getattr(task, "track_started", False) and not hasattr(task, _TRACKS):
        setattr(task, _TRACKS, True)
        task.track_started = False


def release_after(task: Task[Any, Any], state: str | None) -> None:
    """Release the lease of the run on top of the stack, whose outcome is stored.

    Args:
        task: The task.
        state: The outcome; whoever runs a copy of the message shall know of it.
    """
    request = task.request
    lease: Lease | None = request.get("lease") or _left_over(task)
    if lease is None:
        return
    has_outcome = state in _OUTCOMES and not lease.lost
    app_leases = AppLeases.of(task.app)
    copied = has_outcome and app_leases.may_be_copied(task.acks_late, request.__dict__)
    lease.release(remember=2 * app_leases.visibility_timeout if copied else 0.0)


def _left_over(task: Task[Any, Any]) -> Lease | None:
    """Return the lease that a run got, but was interrupted before it could note it.

    A time limit can strike just there; and nobody else would ever end that lease.
    """
    app_leases = AppLeases.made_for(task.app)
    held = app_leases.leases.leases() if app_leases else ()
    here = threading.current_thread()
    for lease in held:
        # The same id in another thread is a live run of which this one was a copy.
        if lease.thread is here and lease.holder.get("id") == task.request.id:
            return lease
    return None


@dataclass(frozen=True, slots=True)
class _Run:
    task: Task[Any, Any]
    request: Context
    app_leases: AppLeases
    plan: Plan
    queue: str

    def perform(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        claim = self._claim(self.plan.binder.name(args, kwargs))
        admission = admit(
            self.app_leases.leases,
            claim,
            self.plan.config,
            tries=self._tries(),
            longest_delay=self.app_leases.longest_delay,
        )
        if isinstance(admission, Run):
            return self._hold(admission.lease, lambda: call(*args, **kwargs))
        if isinstance(admission, Skip):
            return dict(admission.record)
        if isinstance(admission, Finished):
            raise Ignore
        return self._come_back(admission)

    def _claim(self, name: str) -> Claim:
        request = self.request
        return Claim(
            name,
            self.plan.config.ttl,
            self.task.name,
            request.id or "",
            request.parent_id or "",
            request.retries or 0,
            self.queue,
            may_be_copy=self._may_be_copy(),
        )

    def _may_be_copy(self) -> bool:
        info = self.request.delivery_info or {}
        return bool(info.get("redelivered")) or self._carried() is not None

    def _carried(self) -> tuple[int, ...] | None:
        """Return what this attempt carried when it came back, None if it did not."""
        carried = self.request.get(TRIES_HEADER)
        if not isinstance(carried, (list, tuple)) or len(carried) != len(Tries()) + 1:
            return None
        retries, *tries = carried
        # `self.retry()` hands the header on, but its next try starts afresh.
        return tuple(tries) if retries == self.request.retries else None

    def _tries(self) -> Tries:
        return Tries(*(self._carried() or ()))

    def _hold(self, lease: Lease, body: Callable[[], Any]) -> Any:
        self.request.lease = lease  # type: ignore[attr-defined]
        on_lost = self.plan.config.on_lost
        try:
            _note_start(self.task, self.request)
            return hold(lease, body, on_lost=on_lost, lost_error=_Lost)
        except _Lost as lost:
            if self._runs_elsewhere(lease):
                # The result belongs to the other run: no state, no callback, no event.
                raise Ignore from lost
            if isinstance(lost.__cause__, Retry):
                # The body itself has sent the task again.
                raise lost.__cause__ from lost
            raise LeaseLost(lost.name, lost.reason) from lost

    def _runs_elsewhere(self, lease: Lease) -> bool:
        try:
            holder = self.app_leases.leases.look(lease.name)
        except StoreUnavailable:
            return False
        return (
            holder is not None
            and holder.owner != lease.owner
            and holder.holder.get("id") == self.request.id
        )

    def _come_back(self, later: Later) -> Any:
        seconds = max(later.delay, _LEAST_DELAY)
        self._send_again(seconds, later.tries)
        shown = later.reason == "conflict" and not self._ignores_result()
        if shown:
            raise Retry(str(later.error), later.error, cast("Any", seconds))
        raise Ignore

    def _ignores_result(self) -> bool:
        asked: bool | None = self.request.get("ignore_result")
        return bool(self.task.ignore_result if asked is None else asked)

    def _send_again(self, seconds: float, tries: Tries) -> None:
        request = self.request
        headers = dict(request.headers or {})
        headers.pop(RECEIPT, None)
        headers[TRIES_HEADER] = [request.retries, *tries]
        again = self.task.signature_from_request(
            request,
            countdown=seconds,
            queue=self.queue or None,
            retries=request.retries,
            headers=headers,
            ignore_result=self._ignores_result(),
            add_to_parent=False,
        )
        pause = threading.Event()
        while True:
            try:
                again.apply_async()
            except (OperationalError, OSError) as error:
                logger.warning("Task %s cannot be sent again: %s", request.id, error)
                pause.wait(_PUBLISH_AGAIN)
                if self.task.acks_late:
                    # The broker still has the message.
                    raise Reject(error, requeue=True) from error
            else:
                return


def _note_start(task: Task[Any, Any], request: Context) -> None:
    if getattr(task, _TRACKS, False) and request.id and not request.is_eager:
        about = {"pid": os.getpid(), "hostname": request.hostname}
        task.backend.store_result(request.id, about, states.STARTED, request=request)
