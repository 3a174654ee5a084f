from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
from celery import Celery
from harness import Server

from celery_lease.settings import AppLeases
from rq_lease import exclusive
from rq_lease.settings import read_settings
from task_lease import InvalidConfig, LeaseConfig, Leases, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "s3c/ret"  # noqa: S105 - the example
URL = f"rediss://user:{SECRET}@host:6379/0"


def of_celery(**settings: object) -> AppLeases:
    app = Celery(broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.update(settings)
    return AppLeases.of(app)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: LeaseConfig().with_settings({"url": URL}),
        lambda: Leases("redis://h", ttl=URL),  # type: ignore[arg-type]
        lambda: Leases(URL.replace("rediss", "amqp")),
        lambda: Leases(URL.replace("6379", "port")),
        lambda: Leases(f"redis://host/0?password={SECRET}&db=x"),
        lambda: exclusive(url=URL),  # type: ignore[call-overload]
        lambda: read_settings(environ={"RQ_LEASE_URI": URL}),
        lambda: read_settings(environ={"RQ_LEASE_QUEUES": URL}),
        lambda: read_settings(environ={"RQ_LEASE_TTL": URL}),
        lambda: read_settings(defaults={"url": URL}),
        lambda: read_settings(queues={"q": {"url": URL}}),
        lambda: of_celery(lease_uri=URL),
        lambda: of_celery(lease_queues=URL),
        lambda: of_celery(lease_queues={"q": URL}),
        lambda: of_celery(lease_eager=URL),
    ],
)
def test_no_error_shows_a_password_when_a_url_is_in_the_wrong_place(
    mistake: Callable[[], object],
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        mistake()

    error = caught.value
    shown = f"{error} {error!r} {error.args} {vars(error)} {pickle.dumps(error)!r}"
    assert SECRET not in shown
    assert "ret@" not in shown


def test_no_error_or_log_shows_a_password_when_the_server_refuses_it(
    server_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(server_kind, requirepass="right") as server:
        leases = Leases(f"redis://:wr0ng@127.0.0.1:{server.port}/0")
        with pytest.raises(StoreUnavailable) as caught:
            leases.try_acquire("invoice:42")

    assert "wr0ng" not in f"{caught.value} {caught.value!r} {caplog.text}"


def test_value_is_cut_when_it_is_too_long_to_read() -> None:
    with pytest.raises(InvalidConfig) as caught:
        LeaseConfig(on_lost="x" * 10_000)  # type: ignore[arg-type]

    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", ["no", "False", 0, None])
def test_flag_is_refused_when_it_is_neither_true_nor_false(value: object) -> None:
    with pytest.raises(InvalidConfig, match=r"proof_of_death=.* True or False"):
        Leases("redis://127.0.0.1:1", proof_of_death=value)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"lease_eager=.* True or False"):
        of_celery(lease_eager=value)
