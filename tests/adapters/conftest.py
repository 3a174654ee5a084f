"""Fixtures for RQ: workers as processes, a queue, and the history of the runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from adapters.rq_workers import Workers
from rq import Queue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import redis
    from harness import Process


@pytest.fixture
def rq_workers(spawn: Callable[..., Process], url: str) -> Workers:
    """Give what starts workers on the test's database."""
    return Workers(spawn, url)


@pytest.fixture
def rq_queue(client: redis.Redis) -> Queue:
    """Give the queue from which the workers take jobs."""
    return Queue("reports", connection=client)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Give the file to which the jobs append their runs."""
    return tmp_path / "history"
