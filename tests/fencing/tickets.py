"""For what the tests claim."""

from __future__ import annotations

from typing import NamedTuple


class Ticket(NamedTuple):
    """What a guard wants to know of a lease."""

    owner: str
    fence: int | None
    name: str = "books"


UNGUARDED = Ticket("", None)
OLD, NEW = Ticket("old", 1_760_000_000_000_007), Ticket("new", 1_760_000_000_000_008)
TWIN = Ticket("twin", OLD.fence)
