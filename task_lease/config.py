"""What a user may set for a lease, checked once when it is made."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from task_lease.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from task_lease.arguments import Key
    from task_lease.errors import LeaseConflict

Policy: TypeAlias = Literal["skip", "retry", "wait", "raise"]
OnLost: TypeAlias = Literal["raise", "flag"]
OnError: TypeAlias = Literal["retry", "raise", "run"]

#: Shorter leases would need a beat more often than a busy interpreter can promise.
SHORTEST_TTL = 0.1
#: A day. A longer lease would keep everyone out that long after a crash.
LONGEST_TTL = 86_400.0
#: What a deferred attempt waits at the most, in seconds.
LONGEST_DELAY = 300.0

# Whole numbers can be too large for a float.
_LARGEST = sys.float_info.max

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "on_conflict": get_args(Policy),
    "on_lost": get_args(OnLost),
    "on_error": get_args(OnError),
}
_ALSO_CALLABLE = frozenset({"on_conflict", "on_lost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """The settings of one task's lease. Durations are seconds.

    Attributes:
        ttl: How long the lease outlives its holder's last beat. Beats come every
            third of it.
        on_conflict: What a duplicate does: ``"skip"``, ``"retry"``, ``"wait"`` or
            ``"raise"``, or a callable that is given the `LeaseConflict` and returns
            one of the four.
        wait: How long ``"wait"`` waits before it fails like ``"raise"``.
        retry_delay: The first delay of ``"retry"``; it doubles up to five minutes,
            and chance makes each up to twice as long.
        retry_limit: How many conflicts in a row ``"retry"`` bears before it fails
            like ``"raise"``. None is no limit.
        on_lost: ``"raise"`` stops the running task with `LeaseLost`, ``"flag"`` only
            marks the lease, and a callable is called with the lease and does the
            rest itself.
        on_error: What happens when the store cannot be used: ``"retry"`` comes back
            later, ``"raise"`` fails with `StoreUnavailable`, ``"run"`` runs without
            a lease.
        key: What of the arguments makes two calls the same work; None is all.
    """

    ttl: float = 10.0
    on_conflict: Policy | Callable[[LeaseConflict], Policy] = "skip"
    wait: float = 60.0
    retry_delay: float = 1.0
    retry_limit: int | None = 100
    on_lost: OnLost | Callable[..., object] = "raise"
    on_error: OnError = "retry"
    key: Key | None = None

    def __post_init__(self) -> None:
        """Refuse what no rule allows.

        Raises:
            InvalidConfig: If a value is of the wrong kind or out of range.
        """
        check_ttl(self.ttl)
        check_seconds("wait", self.wait)
        check_seconds("retry_delay", self.retry_delay, longest=LONGEST_DELAY)
        _check_limit(self.retry_limit)
        for setting in _CHOICES:
            _check_choice(setting, getattr(self, setting))

    def policy_for(self, conflict: LeaseConflict) -> Policy:
        """Return what to do about a conflict.

        Raises:
            InvalidConfig: If a callable returned none of the four policies.
        """
        if not callable(self.on_conflict):
            return self.on_conflict
        chosen = self.on_conflict(conflict)
        if chosen not in get_args(Policy):
            rule = f"must return one of {', '.join(get_args(Policy))}"
            raise InvalidConfig("on_conflict", chosen, rule)
        return chosen

    def with_settings(self, settings: Mapping[str, object]) -> LeaseConfig:
        """Return a copy in which the given settings replace ours.

        Raises:
            InvalidConfig: If a name is no setting or a value is not allowed.
        """
        for name, value in settings.items():
            if name not in SETTINGS:
                rule = f"is no setting; there are {', '.join(SETTINGS)}"
                raise InvalidConfig(name, value, rule)
        return replace(self, **settings)  # type: ignore[arg-type]


#: The names of all settings of a `LeaseConfig`.
SETTINGS = tuple(field.name for field in fields(LeaseConfig))


def check_ttl(ttl: object) -> float:
    """Return the ttl, in seconds.

    Raises:
        InvalidConfig: If it is no number between `SHORTEST_TTL` and `LONGEST_TTL`.
    """
    return check_seconds("ttl", ttl, shortest=SHORTEST_TTL, longest=LONGEST_TTL)


def check_seconds(
    setting: str, value: object, *, shortest: float = 0.0, longest: float = math.inf
) -> float:
    """Return a duration as it was given, in seconds.

    Raises:
        InvalidConfig: If it is no finite number within the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidConfig(setting, value, "must be a number of seconds")
    if not shortest <= value <= min(longest, _LARGEST):
        bounds = f"at least {shortest:g}"
        if math.isfinite(longest):
            bounds += f" and at most {longest:g}"
        raise InvalidConfig(setting, value, f"must be {bounds} seconds")
    return value


def check_flag(setting: str, value: object) -> bool:
    """Return a setting that is either on or off.

    Raises:
        InvalidConfig: If it is neither True nor False.
    """
    if not isinstance(value, bool):
        raise InvalidConfig(setting, value, "must be True or False")
    return value


def _check_limit(limit: object) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        rule = "must be a whole number of at least 0, or None for no limit"
        raise InvalidConfig("retry_limit", limit, rule)


def _check_choice(setting: str, value: object) -> None:
    if callable(value) and setting in _ALSO_CALLABLE:
        return
    if value not in _CHOICES[setting]:
        rule = f"must be one of {', '.join(_CHOICES[setting])}"
        if setting in _ALSO_CALLABLE:
            rule += ", or a callable"
        raise InvalidConfig(setting, value, rule)
