from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from adapters import celery_tasks as tasks
from adapters.celery_journal import PATIENCE
from adapters.celery_nodes import WorkerSpec
from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded

from celery_lease import ExclusiveTask, current_lease
from celery_lease.settings import AppLeases
from task_lease import InvalidConfig
from task_lease.exclusive import admit
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    import redis
    from adapters.celery_fixtures import StartWorker

    from task_lease import LeaseConflict
    from task_lease.config import LeaseConfig

# Nobody listens there: what is tested here needs no store.
NOWHERE = "redis://127.0.0.1:1/0"
AMQP = "amqp://guest@127.0.0.1:1//"


def new_app(**settings: Any) -> Celery:
    app = Celery("settings", set_as_current=False, broker=NOWHERE)
    app.conf.update(settings)
    return app


def add_task(app: Celery, **options: Any) -> Task[Any, Any]:
    def run(number: int = 0) -> int:
        return number

    options.setdefault("base", ExclusiveTask)
    # Not shared: a wrong task would spoil every app to come.
    decorate: Any = app.task(name="run", shared=False, **options)
    task: Task[Any, Any] = decorate(run)
    app.finalize()
    return task


def config_of(
    app: Celery, task: Task[Any, Any], queue: str = "celery"
) -> LeaseConfig | None:
    wanted = isinstance(task, ExclusiveTask)
    plan = AppLeases.of(app).plan(app.tasks[task.name], queue, exclusive=wanted)
    return plan.config if plan else None


def choose(conflict: LeaseConflict) -> str:
    return "retry" if conflict.remaining > 1 else "skip"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ttl", 7.5),
        ("on_conflict", "wait"),
        ("on_conflict", choose),
        ("wait", 3),
        ("retry_delay", 2.5),
        ("retry_limit", None),
        ("on_lost", "flag"),
        ("on_error", "raise"),
        ("key", "{number}"),
    ],
)
def test_task_option_is_what_the_lease_gets(setting: str, value: object) -> None:
    app = new_app()

    task = add_task(app, **{f"lease_{setting}": value})

    assert getattr(config_of(app, task), setting) == value


def test_option_of_a_base_class_holds_for_its_tasks() -> None:
    class Slow(ExclusiveTask):
        abstract = True
        lease_ttl = 42.0

    app = new_app()

    task = add_task(app, base=Slow)

    config = config_of(app, task)
    assert config
    assert config.ttl == 42.0


@pytest.mark.parametrize(
    ("on_task", "on_queue", "on_app", "expected"),
    [
        (4.0, 3.0, 2.0, 4.0),
        (None, 3.0, 2.0, 3.0),
        (None, None, 2.0, 2.0),
        (None, None, None, 10.0),
        (4.0, None, None, 4.0),
    ],
)
def test_task_beats_queue_beats_app_beats_default(
    on_task: float | None,
    on_queue: float | None,
    on_app: float | None,
    expected: float,
) -> None:
    app = new_app(lease_queues={"celery": {"wait": 5}})
    if on_queue:
        app.conf.lease_queues["celery"]["ttl"] = on_queue
    if on_app:
        app.conf.lease_ttl = on_app

    task = add_task(app, **({"lease_ttl": on_task} if on_task else {}))

    config = config_of(app, task)
    assert config
    assert config.ttl == expected
    assert config.wait == 5


def test_plain_task_is_leased_only_from_a_queue_with_settings() -> None:
    app = new_app(lease_queues={"reports": {"ttl": 30, "lease_on_conflict": "retry"}})
    task = add_task(app, base=Task)

    config = config_of(app, task, "reports")

    assert config
    assert (config.ttl, config.on_conflict) == (30, "retry")
    assert config_of(app, task, "celery") is None


def test_settings_are_read_when_they_have_a_namespace() -> None:
    app = Celery("settings", set_as_current=False)
    django = {
        "CELERY_BROKER_URL": AMQP,
        "CELERY_LEASE_URL": NOWHERE,
        "CELERY_LEASE_TTL": 20,
        "CELERY_LEASE_QUEUES": {"reports": {"on_conflict": "raise"}},
    }
    app.config_from_object(django, namespace="CELERY")
    task = add_task(app)

    config = config_of(app, task, "reports")

    assert config
    assert (config.ttl, config.on_conflict) == (20, "raise")


def test_settings_are_read_when_an_object_has_them() -> None:
    class Settings:
        broker_url = NOWHERE
        lease_ttl = 20

    app = Celery("settings", set_as_current=False)
    app.config_from_object(Settings)

    config = config_of(app, add_task(app))

    assert config
    assert config.ttl == 20


WRONG = [
    ("ttl", 0, "at least 0.1"),
    ("ttl", -1, "at least 0.1"),
    ("ttl", math.nan, "at least 0.1"),
    ("ttl", "10", "must be a number of seconds"),
    ("ttl", True, "must be a number of seconds"),
    ("wait", -1, "at least 0"),
    ("retry_delay", math.inf, "at least 0"),
    ("retry_limit", 1.5, "whole number"),
    ("on_conflict", "queue", "one of skip, retry, wait, raise"),
    ("on_lost", "ignore", "one of raise, flag"),
    ("on_error", "skip", "one of retry, raise, run"),
    ("tttl", 5, "is no setting; there are"),
]


@pytest.mark.parametrize(("setting", "value", "rule"), WRONG)
def test_task_is_refused_when_an_option_is_wrong(
    setting: str, value: object, rule: str
) -> None:
    with pytest.raises(InvalidConfig, match=rule) as caught:
        add_task(new_app(), **{f"lease_{setting}": value})

    assert caught.value.setting == f"run: lease_{setting}"
    assert f"lease_{setting}={caught.value.value!r}: " in str(caught.value)


@pytest.mark.parametrize("key", ["{customer}", ["customer"], "{number.real", 7])
def test_task_is_refused_when_its_key_does_not_fit(key: object) -> None:
    with pytest.raises(InvalidConfig, match="run: lease_key="):
        add_task(new_app(), lease_key=key)


@pytest.mark.parametrize(("setting", "value", "rule"), WRONG)
@pytest.mark.parametrize("where", ["app", "queue", "namespace"])
def test_app_is_refused_when_a_setting_is_wrong(
    where: str, setting: str, value: object, rule: str
) -> None:
    app = new_app()
    if where == "app":
        app.conf[f"lease_{setting}"] = value
    elif where == "queue":
        app.conf.lease_queues = {"reports": {setting: value}}
    else:
        written = {f"CELERY_LEASE_{setting.upper()}": value}
        app.config_from_object(written, namespace="CELERY")

    with pytest.raises(InvalidConfig, match=rule) as caught:
        AppLeases.of(app)

    place = "lease_queues['reports']: " if where == "queue" else ""
    assert caught.value.setting == f"{place}lease_{setting}"


@pytest.mark.parametrize("queues", [["reports"], {"reports": 5}, {7: {}}])
def test_app_is_refused_when_lease_queues_has_no_settings(queues: object) -> None:
    with pytest.raises(InvalidConfig, match="lease_queues"):
        AppLeases.of(new_app(lease_queues=queues))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lease_url": "postgres://user:secret@db/1"}, "redis://"),
        ({"broker_url": AMQP}, "lease_url"),
        ({"broker_url": AMQP, "result_backend": "rpc://"}, "lease_url"),
    ],
)
def test_app_is_refused_when_no_store_is_named(
    settings: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidConfig, match=named) as caught:
        AppLeases.of(new_app(**settings))

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"broker_url": "redis://127.0.0.1:1/5"},
        {"broker_url": AMQP, "result_backend": "redis://127.0.0.1:1/5"},
        {"broker_url": AMQP, "lease_url": "redis://127.0.0.1:1/5"},
        {"result_backend": NOWHERE, "lease_url": "redis://127.0.0.1:1/5"},
    ],
)
def test_store_is_found_where_redis_is_configured(
    settings: dict[str, object],
) -> None:
    leases = AppLeases.of(new_app(**settings)).leases

    client: redis.Redis = leases._store.client
    assert client.connection_pool.connection_kwargs["db"] == 5


def lease_of_call() -> object:
    return current_lease()


def test_direct_call_takes_no_lease() -> None:
    task = new_app().task(name="look", base=ExclusiveTask, shared=False)(lease_of_call)

    assert task() is None
    assert task.lease is None


def test_eager_run_takes_no_lease() -> None:
    app = new_app(task_always_eager=True, task_eager_propagates=True)
    task = app.task(name="look", base=ExclusiveTask, shared=False)(lease_of_call)

    assert task.delay().get() is None
    assert task.apply().get() is None


def test_eager_run_takes_a_lease_when_asked_to(url: str, client: redis.Redis) -> None:
    app = new_app(lease_url=url, lease_eager=True)

    def look(task: ExclusiveTask) -> bool:
        lease = task.lease
        assert lease is not None
        return bool(client.exists(lease_keys(lease.name).lease))

    task = app.task(name="look", base=ExclusiveTask, bind=True, shared=False)(look)

    assert task.apply().get()
    assert not client.exists(lease_keys(task.exclusive_name()).lease)


def test_lease_ends_when_a_limit_strikes_before_the_run_knows_of_it(
    url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = new_app(lease_url=url, lease_eager=True)
    task = app.task(name="look", base=ExclusiveTask, shared=False)(lease_of_call)

    def strike(*args: Any, **kwargs: Any) -> None:
        admit(*args, **kwargs)
        assert client.exists(lease_keys(task.exclusive_name()).lease)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr("celery_lease.run.admit", strike)

    assert task.apply().state == "FAILURE"
    assert not client.exists(lease_keys(task.exclusive_name()).lease)


@pytest.mark.parametrize(
    ("settings", "namespace", "told"),
    [
        ({"lease_ttl": 0}, "", "lease_ttl=0: must be at least 0.1"),
        ({"lease_ttl": 0}, "CELERY", "lease_ttl=0: must be at least 0.1"),
        ({"lease_tttl": 3}, "", "lease_tttl=3: is no setting"),
        ({"lease_queues": {"reports": {"ttl": -1}}}, "", "lease_ttl=-1: must be"),
        ({"lease_url": "http://nowhere"}, "", "must start with one of redis://"),
    ],
)
def test_worker_refuses_to_start_when_settings_are_wrong(
    start_worker: StartWorker, settings: dict[str, object], namespace: str, told: str
) -> None:
    spec = WorkerSpec(settings=settings, namespace=namespace, concurrency=1)

    worker = start_worker(spec, ready=False)

    assert worker.process.wait(30) not in {0, -9}
    assert told in worker.logs()
    assert "ready." not in worker.logs()


def test_worker_refuses_to_start_when_a_task_is_wrong(
    start_worker: StartWorker,
) -> None:
    spec = WorkerSpec(include=("adapters.celery_wrong_task",), concurrency=1)

    worker = start_worker(spec, ready=False)

    assert worker.process.wait(30) not in {0, -9}
    told = "adapters.celery_wrong_task.wrong: lease_on_conflict='drop': must be one of"
    assert told in worker.logs()


@pytest.mark.usefixtures("app")
def test_worker_runs_when_settings_have_a_namespace(start_worker: StartWorker) -> None:
    queues = {"django": {"ttl": 21}, "gone": {}}
    settings = {"lease_ttl": 20, "lease_queues": queues}
    spec = WorkerSpec(("django", "other"), settings=settings, namespace="CELERY")

    worker = start_worker(spec)

    found = [
        tasks.look_at_lease.apply_async(queue=queue).get(timeout=PATIENCE)["ttl"]
        for queue in spec.queues
    ]
    assert found == [21, 20]
    assert "lease_queues names the queue 'gone'" in worker.logs()
