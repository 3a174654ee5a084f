from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_lease import InvalidConfig, LeaseConfig, LeaseConflict
from task_lease.config import (
    LONGEST_TTL,
    SETTINGS,
    SHORTEST_TTL,
    check_seconds,
    check_ttl,
)

NO_SECONDS: list[Any] = [
    -1,
    -0.001,
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    -(10**400),
    "10",
    "",
    b"10",
    None,
    True,
    False,
    Decimal(10),
    1j,
    [10],
    {},
]
NO_CHOICE: list[Any] = ["", "perhaps", "Skip", None, 5, ["skip"], {}, {"raise"}]
NO_LIMIT: list[Any] = [-1, 1.0, 1.5, "3", True, False, [3]]
REFUSED: list[tuple[str, Any]] = [
    *(("ttl", value) for value in [*NO_SECONDS, 0, 0.0, 0.099, 86_401, 1e300]),
    *(("wait", value) for value in NO_SECONDS),
    *(("retry_delay", value) for value in [*NO_SECONDS, 300.1, 1e9]),
    *(("retry_limit", value) for value in NO_LIMIT),
    *(("on_conflict", value) for value in NO_CHOICE),
    *(("on_lost", value) for value in NO_CHOICE),
    *(("on_error", value) for value in NO_CHOICE),
]
ALLOWED: list[tuple[str, Any]] = [
    *(("ttl", value) for value in [SHORTEST_TTL, 1, 10.5, LONGEST_TTL]),
    *(("wait", value) for value in [0, 0.0, 1e300]),
    *(("retry_delay", value) for value in [0, 0.001, 300]),
    *(("retry_limit", value) for value in [None, 0, 1, 10**30]),
    *(("on_conflict", value) for value in ["skip", "retry", "wait", "raise", str]),
    *(("on_lost", value) for value in ["raise", "flag", print]),
    *(("on_error", value) for value in ["retry", "raise", "run"]),
]


@pytest.mark.parametrize(("setting", "value"), REFUSED)
def test_config_names_setting_value_and_rule_when_it_refuses(
    setting: str, value: Any
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        LeaseConfig(**{setting: value})

    error = refused.value
    assert error.setting == setting
    assert error.value is value
    assert error.rule
    assert str(error).startswith(f"{setting}={value!r}"[:100])
    assert str(error).endswith(f": {error.rule}")
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(("setting", "value"), ALLOWED)
def test_config_keeps_the_value_when_its_rule_allows_it(
    setting: str, value: Any
) -> None:
    assert getattr(LeaseConfig(**{setting: value}), setting) == value


def test_config_refuses_a_callable_when_the_setting_takes_none() -> None:
    with pytest.raises(InvalidConfig, match="on_error=") as refused:
        LeaseConfig(on_error=print)  # type: ignore[arg-type]

    assert "callable" not in refused.value.rule


def test_config_cannot_be_changed_when_it_is_made() -> None:
    config = LeaseConfig()

    with pytest.raises(FrozenInstanceError):
        config.ttl = 20.0  # type: ignore[misc]


def test_with_settings_replaces_only_what_is_given() -> None:
    config = LeaseConfig(ttl=20, on_conflict="wait")

    changed = config.with_settings({"on_conflict": "raise", "retry_limit": None})

    assert changed == LeaseConfig(ttl=20, on_conflict="raise", retry_limit=None)
    assert config == LeaseConfig(ttl=20, on_conflict="wait")


@pytest.mark.parametrize("name", ["TTL", "lease_ttl", "ttl_", "", "policy_for"])
def test_with_settings_lists_all_settings_when_a_name_is_none(name: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        LeaseConfig().with_settings({name: 10})

    assert refused.value.setting == name
    assert all(setting in refused.value.rule for setting in SETTINGS)


@pytest.mark.parametrize(("setting", "value"), REFUSED)
def test_with_settings_refuses_what_the_config_refuses(
    setting: str, value: Any
) -> None:
    with pytest.raises(InvalidConfig, match=rf"^{setting}="):
        LeaseConfig().with_settings({setting: value})


@pytest.mark.parametrize("policy", ["skip", "retry", "wait", "raise"])
def test_policy_is_what_the_callable_makes_of_the_conflict(policy: Any) -> None:
    seen: list[LeaseConflict] = []

    def choose(conflict: LeaseConflict) -> Any:
        seen.append(conflict)
        return policy

    conflict = LeaseConflict("name", {"pid": 1}, 2.0)

    assert LeaseConfig(on_conflict=choose).policy_for(conflict) == policy
    assert LeaseConfig(on_conflict=policy).policy_for(conflict) == policy
    assert seen == [conflict]


@pytest.mark.parametrize("choice", [None, "", "SKIP", "drop", 1, ["skip"], print])
def test_policy_is_refused_when_a_callable_returns_none_of_the_four(
    choice: Any,
) -> None:
    config = LeaseConfig(on_conflict=lambda _: choice)

    with pytest.raises(InvalidConfig, match="must return one of") as refused:
        config.policy_for(LeaseConflict("name"))

    assert (refused.value.setting, refused.value.value) == ("on_conflict", choice)


@given(st.floats() | st.integers(), st.floats(0, 1e6), st.floats(0, 1e6))
def test_seconds_are_returned_as_given_or_refused(
    value: float, low: float, high: float
) -> None:
    allowed = low <= value <= high

    if allowed:
        assert check_seconds("wait", value, shortest=low, longest=high) is value
    else:
        with pytest.raises(InvalidConfig, match=r"^wait="):
            check_seconds("wait", value, shortest=low, longest=high)


def test_ttl_refuses_what_no_beat_can_keep_and_what_outlives_a_day() -> None:
    with pytest.raises(InvalidConfig, match=r"at least 0.1 and at most 86400 seconds"):
        check_ttl(0.01)

    assert check_ttl(SHORTEST_TTL) == SHORTEST_TTL
    assert check_ttl(LONGEST_TTL) == LONGEST_TTL
