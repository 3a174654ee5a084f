"""Fixtures of both adapters: those for Celery have a module of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from adapters.celery_fixtures import (  # noqa: F401 - pytest finds them here
    app,
    celery_backend_cluster,
    celery_broker_cluster,
    celery_server,
    celery_settings,
    celery_setup_cls,
    celery_setup_config,
    celery_worker_cluster,
    journal,
    shared_workers,
    start_worker,
    store,
    worker_specs,
    workers,
)
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
