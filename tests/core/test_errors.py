from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from task_lease import (
    Holder,
    InvalidArgument,
    InvalidConfig,
    LeaseConflict,
    LeaseError,
    LeaseLost,
    StaleFence,
    StoreUnavailable,
)
from task_lease.errors import describe_holder

HOLDER: Holder = {
    "task": "billing.send",
    "id": "8f",
    "parent": "7e",
    "attempt": 2,
    "queue": "mail",
    "host": "worker-1",
    "identity": "ab12",
    "pid": 4711,
    "start": 99,
    "group": False,
    "since": 1_700_000_000.25,
}
EXAMPLES: list[tuple[LeaseError, dict[str, Any], str]] = [
    (
        InvalidConfig("ttl", -1, "must be at least 0.1 seconds"),
        {"setting": "ttl", "value": -1, "rule": "must be at least 0.1 seconds"},
        "ttl=-1: must be at least 0.1 seconds",
    ),
    (
        InvalidArgument("tenant", "has no stable form"),
        {"argument": "tenant", "problem": "has no stable form"},
        "argument 'tenant' has no stable form",
    ),
    (
        LeaseConflict("invoice:42", HOLDER, 7.25),
        {"name": "invoice:42", "holder": HOLDER, "remaining": 7.25},
        "invoice:42 is held by billing.send [8f] on worker-1 pid 4711, 7.2 s left",
    ),
    (
        LeaseConflict("invoice:42"),
        {"name": "invoice:42", "holder": None, "remaining": 0.0},
        "invoice:42 is held by an unknown holder, 0.0 s left",
    ),
    (
        LeaseLost("invoice:42", "stolen"),
        {"name": "invoice:42", "reason": "stolen"},
        "invoice:42 was lost (stolen)",
    ),
    (
        StoreUnavailable("acquire", "TimeoutError: too late"),
        {"operation": "acquire", "problem": "TimeoutError: too late"},
        "the lease store failed at acquire: TimeoutError: too late",
    ),
    (
        StaleFence("invoices/42", 1_764_000_000_000_001, 1_764_000_000_000_002),
        {"resource": "invoices/42", "fence": 1_764_000_000_000_001},
        "invoices/42 refused fence 1764000000000001: it has seen 1764000000000002",
    ),
    (
        StaleFence("invoices/42", None, None),
        {"resource": "invoices/42", "fence": None, "stored": None},
        "invoices/42 refused fence None: it has seen None",
    ),
]
CLASSES = [
    InvalidConfig,
    InvalidArgument,
    LeaseConflict,
    LeaseLost,
    StoreUnavailable,
    StaleFence,
]

examples = pytest.mark.parametrize(("error", "fields", "text"), EXAMPLES)


def assert_is(error: BaseException, fields: dict[str, Any], text: str) -> None:
    assert {name: getattr(error, name) for name in fields} == fields
    assert str(error) == text


@examples
def test_error_has_its_fields_and_says_them(
    error: LeaseError, fields: dict[str, Any], text: str
) -> None:
    assert_is(error, fields, text)


@examples
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_error_keeps_its_fields_through_pickle(
    error: LeaseError, fields: dict[str, Any], text: str, protocol: int
) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - our own

    assert type(again) is type(error)
    assert_is(again, fields, text)


@examples
def test_error_keeps_its_fields_through_json_of_its_args(
    error: LeaseError, fields: dict[str, Any], text: str
) -> None:
    again = type(error)(*json.loads(json.dumps(error.args)))

    assert_is(again, fields, text)


@examples
def test_error_keeps_its_fields_through_a_copy(
    error: LeaseError, fields: dict[str, Any], text: str
) -> None:
    assert_is(copy.deepcopy(error), fields, text)


@pytest.mark.parametrize("kind", CLASSES)
def test_error_can_be_made_without_arguments(kind: type[LeaseError]) -> None:
    assert str(kind())
    assert isinstance(kind(), LeaseError)


def test_conflict_and_loss_are_never_caught_as_each_other() -> None:
    related = [
        (one, other)
        for one in CLASSES
        for other in CLASSES
        if one is not other and issubclass(one, other)
    ]

    assert related == []


def test_config_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(InvalidConfig, ValueError)
    assert issubclass(InvalidArgument, TypeError)


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        (None, "an unknown holder"),
        ({}, "an unknown holder"),
        ({"pid": 7}, "a process on ? pid 7"),
        ({"task": "", "id": "", "host": "h", "pid": 7}, "a process on h pid 7"),
        ({"id": "8f", "host": "h"}, "a process [8f] on h pid ?"),
    ],
)
def test_holder_is_described_as_far_as_it_is_known(
    holder: Holder | None, words: str
) -> None:
    assert describe_holder(holder) == words
