from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from adapters import rq_tasks
from adapters.rq_workers import LEASE_WORKER, PATIENCE
from harness import eventually
from histories import find_falling_fences, find_overlaps, read_history

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from harness import Process
    from rq import Queue


@pytest.mark.parametrize("function", [rq_tasks.run_or_retry, rq_tasks.run_or_wait])
def test_nothing_overlaps_or_is_lost_when_many_workers_compete(
    spawn: Callable[..., Process],
    url: str,
    rq_queue: Queue,
    history: Path,
    function: Callable[..., object],
) -> None:
    for number in range(200):
        rq_queue.enqueue(function, str(history), f"k{number % 5}", 0.001)

    pool = [sys.executable, "-m", "rq.cli", "worker-pool", "-n", "8", "-q"]
    spawn([*pool, "-u", url, "-w", LEASE_WORKER, "reports"])

    eventually(
        lambda: len(read_history(history)) == 200, 90.0, "all jobs ran", pause=0.2
    )
    runs = read_history(history)
    assert not find_overlaps(runs)
    assert not find_falling_fences(runs)
    eventually(
        lambda: len(rq_queue.finished_job_registry) == 200, PATIENCE, "all stored"
    )
    assert len(rq_queue.failed_job_registry) == 0
