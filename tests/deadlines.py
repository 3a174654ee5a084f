"""Waiting for events, with deadlines instead of fixed sleeps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def eventually(
    predicate: Callable[[], T], timeout: float, what: str, *, pause: float = 0.01
) -> T:
    """Ask until the answer is true, and return it.

    Args:
        predicate: Asked again and again; what it raises is not caught.
        timeout: Seconds after which the wait has failed.
        what: What was awaited, for the failure's message.
        pause: Seconds between two questions.

    Raises:
        AssertionError: It did not come true in time.
    """
    deadline = time.monotonic() + timeout
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            message = f"not within {timeout:g} s: {what} (last answer: {answer!r})"
            raise AssertionError(message)
        time.sleep(pause)
    return answer
