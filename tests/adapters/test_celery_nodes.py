from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from adapters.celery_journal import PATIENCE
from adapters.celery_nodes import WorkerSpec, worker_node
from harness import eventually

if TYPE_CHECKING:
    from adapters.celery_fixtures import Setup, StartWorker
    from celery import Celery


def test_setup_is_ready_without_docker(celery_setup: Setup) -> None:
    assert celery_setup.ready(control=True)
    assert len(celery_setup) == 4


@pytest.mark.fault
def test_worker_node_is_killed_and_starts_anew(
    app: Celery, start_worker: StartWorker
) -> None:
    node = worker_node(start_worker(WorkerSpec(queues=("node",), concurrency=1)), app)

    node.kill()
    eventually(lambda: node.container.status == "exited", PATIENCE, "it has ended")
    node.restart()

    assert node.container.status == "running"
    assert node.ready()
    assert node.logs().count("ready.") == 2
