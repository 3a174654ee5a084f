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
from task_lease.errors import LeaseLost
from task_lease.exclusive import Later, Run, Skip, Tries, admit, hold

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Task
    from celery.app.task import Context

    from celery_lease.settings import Plan
    from task_lease import Lease

logger = logging.getLogger("celery_lease")

#: The message header in which a task that comes back carries its `Tries`.
TRIES_HEADER = "task_lease_tries"

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
    run = _Run(task, request, app_leases, plan, queue)
    return run.perform(call, args, kwargs)


def start_after_acquire(task: type[Task[Any, Any]]) -> None:
    """Let the state STARTED be stored after the acquire and not before it.

    A task that then has to come back never looked as if it had begun.
    """
    if getattr(task, "track_started", False) and not hasattr(task, _TRACKS):
        setattr(task, _TRACKS, True)
        task.track_started = False


def release_after(task: Task[Any, Any]) -> None:
    """Release the lease of the run on top of the stack, whose outcome is stored."""
    lease: Lease | None = task.request.get("lease")
    if lease is not None:
        lease.release()


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
        )

    def _tries(self) -> Tries:
        carried = self.request.get(TRIES_HEADER)
        if not isinstance(carried, (list, tuple)) or len(carried) != len(Tries()) + 1:
            return Tries()
        retries, *tries = carried
        # `self.retry()` hands the header on, but its next try starts afresh.
        return Tries(*tries) if retries == self.request.retries else Tries()

    def _hold(self, lease: Lease, body: Callable[[], Any]) -> Any:
        self.request.lease = lease  # type: ignore[attr-defined]
        on_lost = self.plan.config.on_lost
        try:
            _note_start(self.task, self.request)
            return hold(lease, body, on_lost=on_lost, lost_error=_Lost)
        except _Lost as lost:
            raise LeaseLost(lost.name, lost.reason) from lost

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
