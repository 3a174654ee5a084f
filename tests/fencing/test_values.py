from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis
from fencing.tickets import NEW, OLD, TWIN, UNGUARDED, Ticket
from redis.crc import key_slot

from task_lease import InvalidConfig, StaleFence
from task_lease.fencing.redis import ValueGuard

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
def values(request: pytest.FixtureRequest, url: str) -> Iterator[redis.Redis]:
    """Give the client of the values, which decodes replies or not."""
    with redis.Redis.from_url(url, decode_responses=request.param) as values:
        yield values


@pytest.mark.parametrize("late", [OLD, TWIN])
@pytest.mark.parametrize("verb", ["claim", "set", "delete"])
def test_value_is_refused_to_whoever_was_overtaken(
    values: redis.Redis, verb: str, late: Ticket
) -> None:
    guard = ValueGuard(values)
    first = OLD if late == TWIN else NEW
    guard.claim(first, "n")
    guard.set(first, "n", "1")

    with pytest.raises(StaleFence) as caught:
        getattr(guard, verb)(late, "n", *(["0"] if verb == "set" else []))

    assert caught.value.args == ("n", OLD.fence, first.fence)
    assert values.get("n") in {b"1", "1"}


def test_value_is_written_by_its_owner_again_and_by_a_higher_fence(
    values: redis.Redis,
) -> None:
    guard = ValueGuard(values)

    for ticket, value in ((OLD, "1"), (OLD, "2"), (NEW, "3")):
        guard.set(ticket, "n", value)

    assert values.get("n") in {b"3", "3"}


def test_deleted_value_still_knows_whom_to_refuse(values: redis.Redis) -> None:
    guard = ValueGuard(values)
    guard.delete(NEW, "n")

    with pytest.raises(StaleFence):
        guard.set(OLD, "n", "0")

    assert not values.exists("n")


def test_value_is_refused_when_the_run_has_no_fence(values: redis.Redis) -> None:
    with pytest.raises(StaleFence):
        ValueGuard(values).set(UNGUARDED, "n", "0")

    assert values.dbsize() == 0


def test_value_and_mark_end_with_their_ttl_when_they_have_one(
    values: redis.Redis,
) -> None:
    ValueGuard(values, fence_life=100).set(OLD, "a", "1", ttl=50)
    ValueGuard(values).set(OLD, "b", "1")

    assert 0 < values.pttl("a") <= 50_000 < values.pttl("{a}:fence") <= 100_000
    assert values.pttl("b") == values.pttl("{b}:fence") == -1


@pytest.mark.parametrize(
    ("key", "mark"), [("n:1", "{n:1}:fence"), ("a{b}c", "a{b}c:fence")]
)
def test_mark_is_in_the_slot_of_its_value(
    values: redis.Redis, key: str, mark: str
) -> None:
    ValueGuard(values).claim(OLD, key)

    assert values.exists(mark)
    assert key_slot(key.encode()) == key_slot(mark.encode())


@pytest.mark.parametrize("key", ["a{", "a}", "a{}b", "}{"])
def test_key_is_refused_when_its_mark_could_be_in_another_slot(
    values: redis.Redis, key: str
) -> None:
    with pytest.raises(InvalidConfig, match="hash tag"):
        ValueGuard(values).claim(OLD, key)


@pytest.mark.parametrize("life", [0, -1, "1", True])
def test_life_is_refused_when_it_is_no_positive_number(
    values: redis.Redis, life: float
) -> None:
    with pytest.raises(InvalidConfig, match="fence_life"):
        ValueGuard(values, fence_life=life)
