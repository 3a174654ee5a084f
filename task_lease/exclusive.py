"""Run a callable under a lease: what happens on conflict, and on loss.

The policy of every host lives here. An adapter asks `admit`, does what it says
(run, skip, come back later), and runs the body in `hold`.
"""

from __future__ import annotations

import random
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

from task_lease.client import Conflict, event_of
from task_lease.config import LONGEST_DELAY
from task_lease.errors import LeaseConflict, LeaseLost, StoreUnavailable
from task_lease.interrupt import interrupt_here
from task_lease.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Callable

    from task_lease.client import Claim, Leases
    from task_lease.config import LeaseConfig, OnLost
    from task_lease.errors import Holder
    from task_lease.interrupt import Interrupt

R = TypeVar("R")

Reason: TypeAlias = Literal["copy", "parent", "dead", "conflict", "store"]

# A holder has missed a beat when more than one and a half of them have gone by; a
# beat is a third of the ttl.
_MISSED = 1.5 / 3
# Seconds that a task waits in place for its own parent to release.
_FOR_PARENT = 1.0

_current: ContextVar[Lease | None] = ContextVar("task_lease_current", default=None)


class Tries(NamedTuple):
    """How often a task came back so far; it travels with the task's message.

    Attributes:
        conflicts: Conflicts under ``"retry"``, which its limit counts.
        quiet: All other reasons, which have no limit.
    """

    conflicts: int = 0
    quiet: int = 0


_FIRST_TRY = Tries()


class SkipRecord(TypedDict):
    """The result of a skipped task: who held the lease, and since when.

    Attributes:
        skipped: Always true.
        lease: The lease's name.
        holder: The holder's task, id, host and pid.
        since: When the holder got it, in seconds since 1970 by the store's clock.
        remaining: Seconds that its lease had left unless renewed.
    """

    skipped: bool
    lease: str
    holder: Holder
    since: float
    remaining: float


@dataclass(frozen=True, slots=True)
class Run:
    """Run now, under this lease, and release it afterwards."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Skip:
    """Finish successfully without running; the record is the result."""

    record: SkipRecord


@dataclass(frozen=True, slots=True)
class Later:
    """Come back after a delay.

    Attributes:
        delay: Seconds.
        reason: Why.
        tries: What the task shall carry when it comes back.
        error: What kept it from running.
    """

    delay: float
    reason: Reason
    tries: Tries
    error: LeaseConflict | StoreUnavailable


Admission: TypeAlias = Run | Skip | Later


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
    try:
        answer = leases.ask(claim)
        if isinstance(answer, Conflict) and _is_parent(answer, claim):
            answer = _wait(leases, claim, _FOR_PARENT, while_parent=True)
        if isinstance(answer, Conflict):
            return _Decision(leases, claim, config, tries, longest_delay).on(answer)
        return Run(answer)
    except StoreUnavailable as error:
        if config.on_error == "raise":
            raise
        if config.on_error == "run":
            _tell_conflict(leases, claim, None, f"runs without a lease: {error}")
            return Run(leases.unguarded(claim))
        delay = _backed_off(config.retry_delay, tries.quiet, longest_delay)
        _tell_conflict(leases, claim, None, f"back in {delay:.1f} s: {error}")
        return Later(delay, "store", tries._replace(quiet=tries.quiet + 1), error)


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
            does not, and a callable is called with the lease instead.
        lost_error: What is raised; a class that can be called without arguments.

    Raises:
        LeaseLost: If the lease was lost before the body ended, whatever else the
            body raised or returned, and also if it swallowed the interruption.
    """
    interrupt = interrupt_here(lost_error) if on_lost == "raise" else None
    token = _current.set(lease)
    failure: BaseException | None = None
    try:
        try:
            _begin(lease, on_lost, interrupt)
            return body()
        except BaseException as error:
            failure = error
            raise
        finally:
            # The loss can strike here once more, but only once.
            try:
                _end(lease, interrupt)
            except LeaseLost:
                _end(lease, interrupt)
            _current.reset(token)
            if lease.lost:
                _raise_lost(lease, lost_error, failure)
    finally:
        # A loss from now on is only recorded.
        lease.when_lost(None)


def _begin(
    lease: Lease,
    on_lost: OnLost | Callable[..., object],
    interrupt: Interrupt | None,
) -> None:
    if interrupt is not None:
        interrupt.arm()
        lease.when_lost(lambda _: interrupt.deliver())
    elif callable(on_lost):
        lease.when_lost(on_lost)


def _end(lease: Lease, interrupt: Interrupt | None) -> None:
    if interrupt is not None:
        interrupt.disarm()
    lease.end_of_body()


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


class _Decision:
    """What to do about a conflict."""

    def __init__(
        self,
        leases: Leases,
        claim: Claim,
        config: LeaseConfig,
        tries: Tries,
        longest_delay: float,
    ) -> None:
        self._leases = leases
        self._claim = claim
        self._config = config
        self._tries = tries
        self._longest_delay = longest_delay

    def on(self, conflict: Conflict) -> Admission:
        if _is_copy(conflict, self._claim):
            return self._quietly("copy", self._doubled(), conflict)
        if _is_parent(conflict, self._claim):
            return self._quietly("parent", self._doubled(), conflict)
        policy = self._config.policy_for(conflict.error)
        decide = {
            "skip": self._skip,
            "retry": self._retry,
            "wait": self._wait,
            "raise": self._fail,
        }
        return decide[policy](conflict)

    def _skip(self, conflict: Conflict) -> Admission:
        refused = conflict.refused
        if refused.ttl - refused.remaining > _MISSED * refused.ttl:
            # Perhaps it is dead. Nobody is skipped in favour of the dead.
            return self._quietly("dead", refused.remaining, conflict)
        self._tell(conflict, "skipped")
        return Skip(
            {
                "skipped": True,
                "lease": self._claim.name,
                "holder": _public(refused.holder),
                "since": refused.holder.get("since", 0.0),
                "remaining": refused.remaining,
            }
        )

    def _retry(self, conflict: Conflict) -> Admission:
        conflicts = self._tries.conflicts
        limit = self._config.retry_limit
        if limit is not None and conflicts >= limit:
            return self._fail(conflict)
        delay = _backed_off(self._config.retry_delay, conflicts, self._longest_delay)
        self._tell(conflict, f"back in {delay:.1f} s")
        tries = self._tries._replace(conflicts=conflicts + 1)
        return Later(delay, "conflict", tries, conflict.error)

    def _wait(self, _: Conflict) -> Admission:
        answer = _wait(self._leases, self._claim, self._config.wait)
        if isinstance(answer, Lease):
            return Run(answer)
        if _is_copy(answer, self._claim):
            return self._quietly("copy", self._doubled(), answer)
        return self._fail(answer)

    def _fail(self, conflict: Conflict) -> Admission:
        self._tell(conflict, "failed")
        raise conflict.error

    def _quietly(self, reason: Reason, delay: float, conflict: Conflict) -> Later:
        self._tell(conflict, f"back in {delay:.1f} s ({reason})")
        tries = self._tries._replace(quiet=self._tries.quiet + 1)
        return Later(delay, reason, tries, conflict.error)

    def _doubled(self) -> float:
        return min(2.0 ** min(self._tries.quiet, 16), self._longest_delay)

    def _tell(self, conflict: Conflict, what: str) -> None:
        _tell_conflict(self._leases, self._claim, conflict, what)


def _wait(
    leases: Leases, claim: Claim, seconds: float, *, while_parent: bool = False
) -> Lease | Conflict:
    """Return the lease, or the conflict at which waiting ended."""
    last: list[Conflict] = []
    until = leases.now() + seconds

    def patience(conflict: Conflict) -> float:
        last[:] = [conflict]
        gives_up = (
            not _is_parent(conflict, claim)
            if while_parent
            else (_is_copy(conflict, claim))
        )
        if gives_up:
            return 0.0
        return until - leases.now()

    try:
        return leases.wait(claim, patience)
    except LeaseConflict:
        return last[0]


def _is_copy(conflict: Conflict, claim: Claim) -> bool:
    holder = conflict.refused.holder
    return bool(claim.id) and (
        holder.get("id") == claim.id and holder.get("attempt") == claim.attempt
    )


def _is_parent(conflict: Conflict, claim: Claim) -> bool:
    """Whether the holder sent this task: another task, or its own earlier try."""
    holder_id = conflict.refused.holder.get("id")
    return bool(holder_id) and (
        holder_id == claim.parent
        or (holder_id == claim.id and not _is_copy(conflict, claim))
    )


def _public(holder: Holder) -> Holder:
    return {
        "task": holder.get("task", ""),
        "id": holder.get("id", ""),
        "host": holder.get("host", ""),
        "pid": holder.get("pid", 0),
    }


def _backed_off(first: float, times: int, longest: float) -> float:
    """Return a delay in seconds: the first, twice as long each time, and up to double.

    What came together shall not come back together.
    """
    longest = min(longest, LONGEST_DELAY)
    delay = min(first * 2.0 ** min(times, 32), longest / 2)
    return delay * random.uniform(1.0, 2.0)  # noqa: S311 - jitter, no secret


def _tell_conflict(
    leases: Leases, claim: Claim, conflict: Conflict | None, what: str
) -> None:
    refused = conflict.refused if conflict else None
    leases.tell(event_of(claim, "conflict", refused, what))
