"""What the history says about the runs of an entry: pure functions over moments."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from example_project.stage.history import Moment


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a task's body, as the body itself wrote it down.

    Attributes:
        worker: Where it ran.
        pid: In which process.
        id: The task's id.
        lease: Under which lease.
        fence: With which fence.
        began: When, on the clock of `Moment`.
        ended: When, infinite for a run that did not come to its end.
    """

    worker: str
    pid: int
    id: str
    lease: str
    fence: int
    began: float
    ended: float = math.inf


def runs_of(moments: Iterable[Moment], entry: str) -> list[Run]:
    """Return the runs for an entry of the ledger, in the order of their beginnings."""
    runs: dict[tuple[str, int], Run] = {}
    for moment in moments:
        if moment.detail != entry or moment.kind not in {"began", "ended"}:
            continue
        fence = moment.fence or 0
        if moment.kind == "began":
            about = (moment.worker, moment.pid, moment.id, moment.lease, fence)
            runs[moment.lease, fence] = Run(*about, began=moment.at)
        else:
            begun = runs[moment.lease, fence]
            runs[moment.lease, fence] = replace(begun, ended=moment.at)
    return sorted(runs.values(), key=lambda run: run.began)


def take_turns(runs: Sequence[Run]) -> bool:
    """Return whether no run began before the one in front of it had ended."""
    return all(first.ended <= second.began for first, second in pairwise(runs))


def fences_grow(runs: Sequence[Run]) -> bool:
    """Return whether every run had a higher fence than the one in front of it."""
    return all(first.fence < second.fence for first, second in pairwise(runs))


def of_kind(moments: Iterable[Moment], kind: str, lease: str = "") -> list[Moment]:
    """Return the moments of a kind, of one lease if it is named."""
    return [m for m in moments if m.kind == kind and lease in {"", m.lease}]
