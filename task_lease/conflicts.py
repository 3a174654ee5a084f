"""What to do when a lease is held: the policy of every host."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypedDict

from task_lease.claims import Conflict, event_of
from task_lease.config import LONGEST_DELAY
from task_lease.errors import LeaseConflict, StoreUnavailable
from task_lease.lease import Lease
from task_lease.parking import Parking

if TYPE_CHECKING:
    from task_lease.answers import Parked
    from task_lease.claims import Claim, Park
    from task_lease.client import Leases
    from task_lease.config import LeaseConfig
    from task_lease.errors import Holder

Reason: TypeAlias = Literal["copy", "parent", "dead", "conflict", "store"]

# A holder has missed a beat when more than one and a half of them have gone by; a
# beat is a third of the ttl.
_MISSED = 1.5 / 3
# Seconds that a task waits in place for its own parent to release.
_FOR_PARENT = 1.0


class Tries(NamedTuple):
    """How often a task came back so far; it travels with the task's message.

    Attributes:
        conflicts: Conflicts under ``"retry"``, which its limit counts.
        quiet: All other reasons, which have no limit.
    """

    conflicts: int = 0
    quiet: int = 0


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


@dataclass(frozen=True, slots=True)
class Finished:
    """Do nothing at all: this is a copy of an attempt whose outcome is stored."""


Admission: TypeAlias = Run | Skip | Later | Finished


class Decision:
    """What to do about a claim that did not succeed, under one configuration."""

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
        """Return what to do about a conflict, once the task's own line is ruled out.

        Raises:
            LeaseConflict: If the policy is to fail, or its patience has ended.
            StoreUnavailable: If the store cannot be used while waiting.
        """
        if _is_parent(conflict, self._claim):
            answer = _wait(self._leases, self._claim, _FOR_PARENT, while_parent=True)
            if isinstance(answer, Lease):
                return Run(answer)
            conflict = answer
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

    def park(self, park: Park, later: Later) -> Run | Parked:
        """Leave a task parked beside the lease instead of coming back by itself.

        Raises:
            LeaseConflict: If it has come back as often as it may.
            StoreUnavailable: If the store cannot be used.
        """
        counts = later.reason == "conflict"
        limit = self._config.retry_limit
        parking = Parking(self._leases)
        answer = parking.park(self._claim, park, counts=counts, limit=limit)
        if isinstance(answer, Lease):
            return Run(answer)
        if isinstance(answer, Conflict):
            self._tell(answer, "failed")
            raise answer.error
        return answer

    def without_store(self, error: StoreUnavailable) -> Admission:
        """Return what to do while the store cannot be used.

        Raises:
            StoreUnavailable: If the policy is to fail.
        """
        if self._config.on_error == "raise":
            raise error
        if self._config.on_error == "run":
            self._tell(None, f"runs without a lease: {error}")
            return Run(self._leases.unguarded(self._claim))
        quiet = self._tries.quiet
        delay = _backed_off(self._config.retry_delay, quiet, self._longest_delay)
        self._tell(None, f"back in {delay:.1f} s: {error}")
        return Later(delay, "store", self._tries._replace(quiet=quiet + 1), error)

    def _skip(self, conflict: Conflict) -> Admission:
        refused = conflict.refused
        if refused.ttl - refused.remaining > _MISSED * refused.ttl:
            # Perhaps it is dead. Nobody is skipped in favour of the dead.
            delay = min(refused.remaining, self._longest_delay)
            return self._quietly("dead", delay, conflict)
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

    def _tell(self, conflict: Conflict | None, what: str) -> None:
        refused = conflict.refused if conflict else None
        self._leases.tell(event_of(self._claim, "conflict", refused, what))


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
        holder_id in (claim.parent, *claim.parents)
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
