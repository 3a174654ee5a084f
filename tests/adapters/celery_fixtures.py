"""Celery's servers, workers and app, as pytest-celery wants them but without Docker.

A module says which workers it wants by its own `worker_specs`; without one it gets the
two that all such modules share, eight processes in all.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from adapters.celery_journal import ALL, Journal
from adapters.celery_nodes import (
    WorkerContainer,
    WorkerSpec,
    backend_node,
    broker_node,
    worker_node,
)
from conftest import wanted_kinds
from harness import Server, servers_available
from kombu import pools
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestSetup,
    CeleryWorkerCluster,
)
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import redis
    from celery import Celery

BROKER, BACKEND, STORE = 1, 2, 3
SHARED = WorkerSpec(queues=("celery", "reports", "plain"))


class StartWorker(Protocol):
    """Starts a worker that ends with the test."""

    def __call__(self, spec: WorkerSpec, *, ready: bool = True) -> WorkerContainer:
        """Start it, and return once it takes messages if `ready` is wanted."""


class Setup(CeleryTestSetup):
    """Leaves no connection open behind a test."""

    @override
    def teardown(self) -> None:
        """Close what the app has opened."""
        backend: Any = self.app.backend
        backend.result_consumer.stop()
        # A result that is collected later would connect again to unsubscribe.
        backend.result_consumer._pubsub = None
        backend.client.connection_pool.disconnect()
        self.app.close()
        # Kombu keeps pools for all apps, and would give the next one a closed pool.
        pools.reset()


@pytest.fixture(scope="session")
def celery_server() -> Iterator[Server]:
    """Give the server of all Celery tests: one kind, for the core tests have both.

    Not the one that other tests empty, since workers live on while tests come and go.
    """
    kinds = [kind for kind in wanted_kinds() if kind in servers_available()]
    if not kinds:
        pytest.skip("there is no server here; the core tests fail for it in CI")
    with Server(kinds[0]) as server:
        yield server


@pytest.fixture(scope="session")
def celery_settings(celery_server: Server) -> dict[str, Any]:
    """Give the settings that the sending app and all workers have."""
    return {
        "broker_url": celery_server.url(BROKER),
        "result_backend": celery_server.url(BACKEND),
        "lease_url": celery_server.url(STORE),
        "lease_ttl": 5.0,
        "lease_queues": {
            "reports": {"ttl": 4.0, "on_conflict": "wait"},
            "plain": {"on_conflict": "skip"},
        },
        "worker_prefetch_multiplier": 1,
        "broker_connection_retry_on_startup": True,
    }


@pytest.fixture
def store(celery_server: Server) -> redis.Redis:
    """Give a client for the database of the leases."""
    return celery_server.client(STORE, decode_responses=True)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """Give what the tasks of this test write to; its path is part of their leases."""
    journal = Journal(tmp_path / "journal")
    yield journal
    # No task shall stand in the way of the next test.
    journal.open_gate(ALL)


@pytest.fixture(scope="session")
def shared_workers(
    celery_settings: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[WorkerContainer]]:
    """Give the two workers that modules without own wishes share."""
    folder = tmp_path_factory.mktemp("workers")
    with _running([SHARED, SHARED], celery_settings, folder) as workers:
        yield workers


@pytest.fixture(scope="module")
def worker_specs() -> list[WorkerSpec]:
    """Say which workers a module wants: none of its own, but the shared ones."""
    return []


@pytest.fixture(scope="module")
def workers(
    request: pytest.FixtureRequest,
    worker_specs: list[WorkerSpec],
    celery_settings: Mapping[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[WorkerContainer]]:
    """Give the workers of a module, ready."""
    if not worker_specs:
        yield request.getfixturevalue("shared_workers")
        return
    folder = tmp_path_factory.mktemp("workers")
    with _running(worker_specs, celery_settings, folder) as workers:
        yield workers


@pytest.fixture
def start_worker(
    celery_settings: Mapping[str, Any], tmp_path: Path
) -> Iterator[StartWorker]:
    """Give a function that starts a worker of the test's own."""
    with contextlib.ExitStack() as stack:

        def start(spec: WorkerSpec, *, ready: bool = True) -> WorkerContainer:
            worker = WorkerContainer(spec, celery_settings, tmp_path)
            stack.callback(_end, worker)
            if ready:
                worker.ready()
            return worker

        yield start


@pytest.fixture
def celery_broker_cluster(celery_server: Server) -> CeleryBrokerCluster:
    """Give the broker: a database of the server."""
    return CeleryBrokerCluster(broker_node(celery_server, BROKER))


@pytest.fixture
def celery_backend_cluster(celery_server: Server) -> CeleryBackendCluster:
    """Give the result backend: another database of the server."""
    return CeleryBackendCluster(backend_node(celery_server, BACKEND))


@pytest.fixture
def celery_worker_cluster(
    workers: list[WorkerContainer],
) -> Iterator[CeleryWorkerCluster]:
    """Give the module's workers; what they print meanwhile follows a failure."""
    printed = [len(worker.logs()) for worker in workers]
    yield CeleryWorkerCluster(*(worker_node(worker) for worker in workers))
    for worker, length in zip(workers, printed, strict=True):
        print(f"--- {worker.process!r}\n{worker.logs()[length:]}")  # noqa: T201


@pytest.fixture
def celery_setup_cls() -> type[Setup]:
    """Give the setup that closes its connections."""
    return Setup


@pytest.fixture
def celery_setup_config(celery_settings: dict[str, Any]) -> dict[str, Any]:
    """Give the settings of the app that sends."""
    return celery_settings


@pytest.fixture
def app(celery_setup: Setup) -> Celery:
    """Give the app that sends, with workers that are ready."""
    assert celery_setup.ready()
    return celery_setup.app


@contextlib.contextmanager
def _running(
    specs: list[WorkerSpec], settings: Mapping[str, Any], folder: Path
) -> Iterator[list[WorkerContainer]]:
    workers = [WorkerContainer(spec, settings, folder) for spec in specs]
    try:
        for worker in workers:
            worker.ready()
        yield workers
    finally:
        for worker in workers:
            worker.teardown()


def _end(worker: WorkerContainer) -> None:
    worker.teardown()
    # pytest shows it where the test failed.
    print(f"--- {worker.process!r}\n{worker.logs()}")  # noqa: T201
