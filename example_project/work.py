"""What the application does, whichever of the two frameworks runs it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from example_project.ledger import Ledger
from example_project.settings import DATABASE_URL
from example_project.stage.history import record
from task_lease import LeaseLost, StaleFence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from task_lease import Lease

_LOOK_EVERY = 0.1


def do_once(lease: Lease, entry: str, state: str, seconds: float) -> str:
    """Bring an entry of the ledger into a state, unless it is there already.

    Args:
        lease: The lease of the run.
        entry: The entry.
        state: What it shall say.
        seconds: How long that takes.
    """
    ledger = Ledger(DATABASE_URL)
    with _recorded(lease, entry):
        if ledger.look(entry).state == state:
            return "was done before"
        time.sleep(seconds)
        with ledger.claimed(entry, lease) as row:
            row.write(state)
    return state


def do_once_complete(lease: Lease, entry: str, state: str, source: str) -> str:
    """Work like `do_once`, for as long as another entry is not final."""
    ledger = Ledger(DATABASE_URL)
    with _recorded(lease, entry):
        if ledger.look(entry).state == state:
            return "was done before"
        while ledger.look(source).state != "final":
            time.sleep(_LOOK_EVERY)
        with ledger.claimed(entry, lease) as row:
            row.write(state)
    return state


def count_up(lease: Lease, entry: str, seconds: float) -> str:
    """Add one to an entry: what two at a time would lose."""
    ledger = Ledger(DATABASE_URL)
    with _recorded(lease, entry):
        time.sleep(seconds)
        with ledger.claimed(entry, lease) as row:
            row.write(f"{row.read().writes + 1} payments")
    return entry


def do_once_and_save(lease: Lease, entry: str, state: str, seconds: float) -> str:
    """Work like `do_once`, but write also when the lease is lost.

    It is wrong to do so, and easily written. The ledger refuses, for the fence of the
    lease is old.
    """
    try:
        return do_once(lease, entry, state, seconds)
    except LeaseLost:
        record("told", lease=lease.name, fence=lease.fence, detail=entry)
        try:
            with Ledger(DATABASE_URL).claimed(entry, lease) as row:
                row.write(f"{state}, too late")
        except StaleFence as error:
            about = {"fence": lease.fence, "other_fence": error.stored}
            record("refused", lease=lease.name, **about)
        raise


@contextmanager
def _recorded(lease: Lease, entry: str) -> Iterator[None]:
    """Write down when the body of a run begins and ends."""
    about = {"lease": lease.name, "fence": lease.fence, "id": lease.holder.get("id")}
    record("began", detail=entry, **about)
    yield
    record("ended", detail=entry, **about)
