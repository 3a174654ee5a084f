"""Run a callable under a lease: what happens on conflict, and on loss.

The policy of every host lives here and in `conflicts`. An adapter asks `admit`, does
what it says (run, skip, come back later), and runs the body in `hold`.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from task_lease.claims import Conflict
from task_lease.config import LONGEST_DELAY
from task_lease.conflicts import (
    Admission,
    Decision,
    Finished,
    Later,
    Run,
    Skip,
    SkipRecord,
    Tries,
)
from task_lease.errors import AlreadyDone, LeaseLost, StoreUnavailable
from task_lease.interrupt import interrupt_here
from task_lease.threads import starter_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from task_lease.answers import Parked
    from task_lease.claims import Claim
    from task_lease.client import Leases
    from task_lease.config import LeaseConfig, OnLost
    from task_lease.interrupt import Interrupt
    from task_lease.lease import Lease

__all__ = [
    "Admission",
    "Finished",
    "Later",
    "Run",
    "Skip",
    "SkipRecord",
    "Tries",
    "admit",
    "admit_or_park",
    "current_lease",
    "hold",
]

logger = logging.getLogger("task_lease.heartbeat")

R = TypeVar("R")

_FIRST_TRY = Tries()

_current: ContextVar[Lease | None] = ContextVar("task_lease_current", default=None)


def current_lease() -> Lease | None:
    """Return the lease under which the calling code runs, None outside of one."""
    return _current.get()


def admit(
    leases: Leases,
    claim: Claim,
    config: LeaseConfig,
    *,
    tries: Tries = _FIRST_TRY,
    longest_delay: float = LONGEST_DELAY,
) -> Admission:
    """Decide whether a task may run now.

    Args:
        leases: Where its lease is.
        claim: Who asks for which lease.
        config: The task's settings.
        tries: How often the task came back so far.
        longest_delay: Seconds that a delay may have at the most.

    Raises:
        LeaseConflict: If the policy is to fail, or its patience has ended.
        StoreUnavailable: If the store cannot be used and the policy is to fail.
    """
    decision = Decision(leases, claim, config, tries, longest_delay)
    try:
        answer = leases.ask(claim)
        if isinstance(answer, Conflict):
            return decision.on(answer)
        return Run(answer)
    except AlreadyDone:
        return Finished()
    except StoreUnavailable as error:
        return decision.without_store(error)


def admit_or_park(
    leases: Leases,
    claim: Claim,
    config: LeaseConfig,
    *,
    tries: Tries = _FIRST_TRY,
    longest_delay: float = LONGEST_DELAY,
) -> Admission | Parked:
    """Decide like `admit`, but park beside the lease what shall come back later.

    The only reason to come back that is left is then the store itself.

    Args:
        leases: Where its lease is.
        claim: Who asks for which lease; if it cannot be parked, this is `admit`.
        config: The task's settings.
        tries: How often the task came back so far.
        longest_delay: Seconds that a delay may have at the most.

    Raises:
        LeaseConflict: If the policy is to fail, or its patience has ended.
        StoreUnavailable: If the store cannot be used and the policy is to fail.
    """
    admission = admit(leases, claim, config, tries=tries, longest_delay=longest_delay)
    if not isinstance(admission, Later) or admission.reason == "store":
        return admission
    if claim.park is None:
        return admission
    decision = Decision(leases, claim, config, tries, longest_delay)
    try:
        return decision.park(claim.park, admission)
    except StoreUnavailable as error:
        return decision.without_store(error)


def hold(
    lease: Lease,
    body: Callable[[], R],
    *,
    on_lost: OnLost | Callable[..., object] = "raise",
    lost_error: type[LeaseLost] = LeaseLost,
) -> R:
    """Return what a body returns, run under a lease.

    The lease is still held afterwards: the caller releases it when the outcome is
    stored.

    Args:
        lease: The lease to run under.
        body: What to run.
        on_lost: ``"raise"`` interrupts the body when the lease is lost, ``"flag"``
            does not, and a callable is called with the lease instead, in a thread of
            its own.
        lost_error: What is raised; a class that can be called without arguments.

    Raises:
        LeaseLost: If the lease was lost before the body ended, whatever else the
            body raised or returned, and also if it swallowed the interruption.
    """
    interrupt = interrupt_here(lost_error) if on_lost == "raise" else None
    around = _current.get()
    failure: BaseException | None = None
    try:
        try:
            _current.set(lease)
            _begin(lease, on_lost, interrupt)
            return body()
        except BaseException as error:
            failure = error
            raise
        finally:
            # A loss can strike here once more: ours, or that of a body around this.
            try:
                _end(lease, interrupt)
            finally:
                _end(lease, interrupt)
                if lease.lost and not _passes(failure, interrupt):
                    _raise_lost(lease, lost_error, failure)
    finally:
        _current.set(around)
        _leave(lease, interrupt)


def _begin(
    lease: Lease,
    on_lost: OnLost | Callable[..., object],
    interrupt: Interrupt | None,
) -> None:
    if interrupt is not None:
        interrupt.arm()
        lease.when_lost(
            lambda lost: interrupt.deliver(lost.name, lost.lost or "expired")
        )
    elif callable(on_lost):
        lease.when_lost(partial(_call_apart, starter_here(), on_lost))


def _call_apart(
    start: Callable[[Callable[[], None], str], object],
    on_lost: Callable[..., object],
    lease: Lease,
) -> None:
    """Call what may take its time, for the beating thread has none."""

    def call() -> None:
        try:
            on_lost(lease)
        except Exception:
            # Nobody is there to catch it.
            logger.exception("What was to be called on the loss of %r failed", lease)

    start(call, "task-lease-on-lost")


def _end(lease: Lease, interrupt: Interrupt | None) -> None:
    if interrupt is not None:
        interrupt.disarm()
    lease.end_of_body()


def _leave(lease: Lease, interrupt: Interrupt | None) -> None:
    # A loss from now on is only recorded.
    lease.when_lost(None)
    if interrupt is not None:
        interrupt.pass_on()


def _passes(failure: BaseException | None, interrupt: Interrupt | None) -> bool:
    """Whether the body ends by the loss of a body around it, which is to hear of it."""
    through = interrupt is not None and interrupt.is_struck_through
    return through and isinstance(failure, LeaseLost)


def _raise_lost(
    lease: Lease, lost_error: type[LeaseLost], failure: BaseException | None
) -> None:
    """Raise the loss, unless it is what the body already raises."""
    reason = lease.lost or "expired"
    if isinstance(failure, LeaseLost) and failure.name in {"", lease.name}:
        failure.name, failure.reason = lease.name, reason
        failure.args = (lease.name, reason)
        return
    raise lost_error(lease.name, reason) from failure
