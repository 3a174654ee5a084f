from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from adapters import rq_tasks
from adapters.rq_workers import PATIENCE, RQ3, Workers, wait_for
from rq import Queue

from rq_lease.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path

    import redis


def test_plain_job_is_leased_when_its_queue_is_configured_by_variable(
    rq_workers: Workers, rq_queue: Queue, history: Path
) -> None:
    configured = {"RQ_LEASE_QUEUES": '{"reports": {"ttl": 3, "on_conflict": "retry"}}'}
    rq_workers.start(env=configured)

    job = rq_queue.enqueue(rq_tasks.run, str(history), "a")

    wait_for(job, "finished")
    assert job.return_value() is not None


def test_plain_job_is_leased_when_its_queue_is_configured_on_the_class(
    rq_workers: Workers, client: redis.Redis, history: Path
) -> None:
    rq_workers.start(
        worker_class="adapters.rq_tasks.ClassConfigured", queues=["plain", "other"]
    )

    leased = Queue("plain", connection=client).enqueue(rq_tasks.run, str(history), "a")
    bare = Queue("other", connection=client).enqueue(rq_tasks.run, str(history), "a")

    wait_for(leased, "finished")
    wait_for(bare, "finished")
    assert leased.return_value() is not None
    assert bare.return_value() is None


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("RQ_LEASE_QUEUES", "{reports", "is no JSON"),
        ("RQ_LEASE_QUEUES", '["reports"]', "must map names of queues"),
        (
            "RQ_LEASE_QUEUES",
            '{"reports": {"ttl": 0}}',
            "RQ_LEASE_QUEUES['reports']['ttl']=0: must be at least 0.1",
        ),
        ("RQ_LEASE_QUEUES", '{"reports": {"tll": 3}}', "['tll']=3: is no setting"),
        ("RQ_LEASE_TTL", "NaN", "RQ_LEASE_TTL=nan: must be at least"),
        ("RQ_LEASE_ON_CONFLICT", "never", "must be one of skip, retry, wait, raise"),
        ("RQ_LEASE_TLL", "3", "is no setting; there are RQ_LEASE_FENCE_LIFE"),
        ("RQ_LEASE_URL", "http://localhost", "RQ_LEASE_URL='http://…': must start"),
        ("RQ_LEASE_PROOF_OF_DEATH", "no", "_OF_DEATH='no': must be True or False"),
        ("RQ_LEASE_FENCE_LIFE", "-1", "RQ_LEASE_FENCE_LIFE=-1: must be at least 0"),
    ],
)
def test_worker_refuses_to_start_when_a_variable_is_wrong(
    rq_workers: Workers, variable: str, value: str, words: str
) -> None:
    worker = rq_workers.launch(env={variable: value})

    assert worker.wait(PATIENCE) != 0
    assert "InvalidConfig" in worker.output()
    assert words in worker.output()


def test_variable_is_understood_as_python_spells_it() -> None:
    variables = {"RQ_LEASE_PROOF_OF_DEATH": "False", "RQ_LEASE_RETRY_LIMIT": "None"}

    settings = read_settings(environ=variables)

    assert settings.of_store == {"proof_of_death": False}
    assert settings.config("reports", {}).retry_limit is None


@pytest.mark.skipif(RQ3, reason="RQ 3 can")
def test_spawn_worker_refuses_to_start_when_rq_is_too_old(rq_workers: Workers) -> None:
    worker = rq_workers.launch(worker_class="rq_lease.LeaseSpawnWorker")

    assert worker.wait(PATIENCE) != 0
    assert "worker_class='LeaseSpawnWorker': needs RQ 3.0" in worker.output()
