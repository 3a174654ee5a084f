"""What tasks write down about their runs, and what must be true of it.

A run appends one line to a file that all processes share: JSON with its key, its fence,
and when it began and ended on the clock of the machine. A line is written in one piece
at the end of the run, so the lines need not be in order.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Run(NamedTuple):
    """One run: instants in nanoseconds of CLOCK_MONOTONIC."""

    key: str
    start: int
    end: int
    fence: int


@contextmanager
def recorded(path: str | Path, key: str, fence: int | None) -> Iterator[None]:
    """Write down that what happens inside is a run of a key under a fence."""
    start = time.monotonic_ns()
    yield
    end = time.monotonic_ns()
    line = json.dumps({"key": key, "start": start, "end": end, "fence": fence})
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode() + b"\n")
    finally:
        os.close(descriptor)


def read_history(path: Path) -> list[Run]:
    """Return the runs that were written down so far."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [Run(**json.loads(line)) for line in lines]


def find_overlaps(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return pairs of runs of one key of which the second began too early."""
    return [(one, two) for one, two in _neighbours(runs) if two.start < one.end]


def find_falling_fences(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return pairs of runs of one key of which the second has no higher fence."""
    return [(one, two) for one, two in _neighbours(runs) if two.fence <= one.fence]


def _neighbours(runs: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    by_key: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.start):
        by_key[run.key].append(run)
    for history in by_key.values():
        yield from pairwise(history)
