from __future__ import annotations

import inspect
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import rq.decorators
from adapters import rq_tasks
from adapters.rq_workers import Workers, wait_for
from rq import Queue
from rq.job import Job
from rq.worker import SimpleWorker

from rq_lease import LeaseSimpleWorker, current_lease, exclusive
from rq_lease.guard import Guard
from rq_lease.job import job
from rq_lease.parents import PARENT
from rq_lease.settings import read_settings
from task_lease import InvalidArgument, InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

    import redis


class Report:
    """Something with methods that are jobs."""

    def __init__(self, number: int) -> None:
        self.number = number

    @exclusive(key="{month}")
    def send(self, month: str) -> str:
        return f"{self.number} {month} {current_lease() is not None}"

    def print(self, month: str) -> str:
        return f"{self.number} {month}"

    @classmethod
    @exclusive
    def build(cls, month: str) -> str:
        return f"{cls.__name__} {month}"


def plain(tenant: int, month: str = "may") -> str:
    return f"{tenant} {month}"


def lease_name(function: Any, *args: Any, **kwargs: Any) -> str:
    guard = Guard.of(function) or Guard.plain(function)
    return guard.lease_name(function, args, kwargs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ttl": 0}, "ttl=0"),
        ({"ttl": float("nan")}, "ttl=nan"),
        ({"on_conflict": "never"}, "on_conflict='never'"),
        ({"timeout": 3}, "timeout=3: is no setting"),
        ({"key": "{nobody}"}, "'nobody' is no parameter"),
    ],
)
def test_exclusive_names_the_option_when_it_is_wrong(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        exclusive(**options)(plain)

    assert words in str(caught.value)


def test_call_takes_no_lease_when_it_is_no_job() -> None:
    @exclusive(key="{tenant}")
    def look(tenant: int) -> tuple[int, bool]:
        return tenant, current_lease() is None

    assert look(7) == (7, True)


def test_decorated_function_stays_what_it_was() -> None:
    decorated = exclusive(plain)

    assert inspect.signature(decorated) == inspect.signature(plain)
    assert decorated.__name__ == "plain"
    assert pickle.loads(pickle.dumps(rq_tasks.run_or_retry)) is rq_tasks.run_or_retry  # noqa: S301


def test_names_are_one_when_a_call_is_written_in_different_ways() -> None:
    names = {
        lease_name(plain, 7),
        lease_name(plain, 7, "may"),
        lease_name(plain, tenant=7, month="may"),
        lease_name(exclusive(plain), 7),
    }

    assert len(names) == 1


def test_names_are_shared_when_functions_are_given_one_name() -> None:
    one = exclusive(name="invoices", key="{tenant}")(plain)

    assert lease_name(one, 7) == "invoices:7"


def test_method_needs_a_key_when_its_object_has_no_stable_form() -> None:
    assert lease_name(Report(1).send, "may").endswith("Report.send:may")
    with pytest.raises(InvalidArgument, match="self"):
        lease_name(Report(1).print, "may")


def test_class_method_and_builtin_have_stable_names() -> None:
    assert lease_name(Report.build, "may") == lease_name(Report.build, month="may")
    assert lease_name(print, "may") != lease_name(print, "june")


def test_job_takes_what_rqs_own_decorator_takes(client: redis.Redis) -> None:
    known = inspect.signature(rq.decorators.job.__init__).parameters
    given: dict[str, Any] = {"timeout": 7, "result_ttl": 8, "ttl": 9, "failure_ttl": 10}
    decorated = job("reports", client, lease_ttl=3.0, lease_key="{tenant}", **given)
    call = decorated(plain)

    sent = call.delay(7, job_id="a-job", at_front=True)

    assert given.keys() <= known.keys()
    assert (sent.id, sent.timeout, sent.result_ttl, sent.ttl) == ("a-job", 7, 8, 9)
    assert call(7) == "7 may"
    assert call.enqueue(8).args == (8,)
    guard = Guard.of(call)
    assert guard is not None
    assert guard.options == {"ttl": 3.0, "key": "{tenant}"}


def test_job_names_the_option_when_it_is_wrong(client: redis.Redis) -> None:
    with pytest.raises(InvalidConfig, match="ttl=0"):
        job("reports", client, lease_ttl=0)


def test_jobs_know_who_enqueued_them_only_while_that_one_holds_a_lease(
    client: redis.Redis, history: Path
) -> None:
    queue = Queue("reports", connection=client)
    parent = queue.enqueue(rq_tasks.go_on, str(history), "a", 2)
    queue.enqueue(rq_tasks.send_child)

    LeaseSimpleWorker([queue], connection=client).work(burst=True)

    metas = [
        job.meta
        for job in Job.fetch_many(queue.finished_job_registry.get_job_ids(), client)
        if job
    ]
    assert len(metas) == 4
    assert [meta for meta in metas if PARENT in meta] == [{PARENT: parent.id}]
    assert {"tenant": 7} in metas
    assert queue.enqueue(plain, 7).meta == {}


def test_job_takes_no_lease_when_its_queue_runs_it_in_place(
    client: redis.Redis, history: Path
) -> None:
    queue = Queue("reports", connection=client, is_async=False)

    done = queue.enqueue(rq_tasks.run_or_retry, str(history), "a")

    assert done.return_value() is None


@pytest.mark.parametrize("worker_class", [SimpleWorker, LeaseSimpleWorker])
def test_method_runs_under_its_lease_when_it_is_a_job(
    client: redis.Redis, worker_class: type[Any]
) -> None:
    queue = Queue("reports", connection=client)
    sent = queue.enqueue(Report(1).send, "may")

    worker_class([queue], connection=client).work(burst=True)

    assert sent.return_value() == "1 may True"


@pytest.mark.parametrize("function", [Report(1).print, "adapters.rq_tasks.nothing"])
def test_job_fails_with_the_reason_when_it_has_no_lease_to_get(
    client: redis.Redis, function: Any
) -> None:
    class Configured(LeaseSimpleWorker):
        lease_queues = {"reports": {"ttl": 3}}  # noqa: RUF012 - as users write it

    queue = Queue("reports", connection=client)
    sent = queue.enqueue(function, "may")

    Configured([queue], connection=client).work(burst=True)

    assert sent.get_status() == "failed"
    result = sent.latest_result()
    assert result is not None
    assert "no stable form" in str(result.exc_string) or "nothing" in str(
        result.exc_string
    )


def test_settings_of_a_function_go_before_those_of_its_queue_and_worker() -> None:
    settings = read_settings(
        queues={"reports": {"wait": 2, "ttl": 2}},
        defaults={"wait": 3, "ttl": 3, "retry_delay": 3},
        environ={"RQ_LEASE_RETRY_DELAY": "4", "RQ_LEASE_ON_CONFLICT": "retry"},
    )

    config = settings.config("reports", {"wait": 1})

    assert (config.wait, config.ttl, config.retry_delay) == (1, 2, 4)
    assert config.on_conflict == "retry"


def test_variables_name_what_they_set_when_they_are_read() -> None:
    settings = read_settings(
        url="redis://one",
        environ={
            "RQ_LEASE_URL": "redis://two",
            "RQ_LEASE_RETRY_LIMIT": "null",
            "RQ_LEASE_PROOF_OF_DEATH": "false",
            "PATH": "/bin",
        },
    )

    assert settings.url == "redis://two"
    assert settings.of_store == {"proof_of_death": False}
    assert settings.config("any", {}).retry_limit is None


def test_spawned_job_takes_its_lease_by_itself_when_the_worker_knows_none(
    rq_workers: Workers, rq_queue: Queue, history: Path
) -> None:
    rq_workers.start(worker_class="rq.worker.SpawnWorker")

    sent = rq_queue.enqueue(rq_tasks.run_or_retry, str(history), "a")

    wait_for(sent, "finished")
    assert sent.return_value() is not None
