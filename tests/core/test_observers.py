from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from harness import eventually

from task_lease import LeaseEvent, LeaseLost, Leases, log_event
from task_lease.observers import Announcer

if TYPE_CHECKING:
    import redis
    from core.conftest import Events, MakeLeases

    from task_lease import Holder

HOLDER: Holder = {"task": "billing.send", "id": "8f", "host": "w1", "pid": 7}
LEVELS = [
    ("acquired", "", "DEBUG", "acquire"),
    ("conflict", "skipped", "INFO", "acquire"),
    ("takeover", "", "INFO", "acquire"),
    ("renewed", "", "DEBUG", "heartbeat"),
    ("at risk", "no answer", "WARNING", "heartbeat"),
    ("lost", "stolen", "ERROR", "heartbeat"),
    ("released", "", "DEBUG", "release"),
    ("released", "no answer", "WARNING", "release"),
    ("parked", "", "INFO", "park"),
    ("handed", "", "INFO", "park"),
]


class FailingObserver:
    """Raises at every event, each time something else."""

    ERRORS = (RuntimeError, ValueError, KeyError, AssertionError, LeaseLost)

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, event: LeaseEvent) -> None:
        self.told.append(event.kind)
        raise self.ERRORS[len(self.told) % len(self.ERRORS)]


@pytest.mark.parametrize(("kind", "detail", "level", "phase"), LEVELS)
def test_log_event_has_the_level_and_logger_of_its_kind(
    kind: Any,
    detail: str,
    level: str,
    phase: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "task_lease")
    event = LeaseEvent(kind, "invoice:42", HOLDER, 17, 0.5, detail)

    log_event(event)

    (record,) = caplog.records
    assert (record.levelname, record.name) == (level, f"task_lease.{phase}")
    assert "invoice:42" in record.getMessage()
    assert detail in record.getMessage()
    assert record.__dict__["lease_event"] == event


@pytest.mark.parametrize("kind", ["conflict", "takeover"])
@pytest.mark.parametrize("holder", [None, {}, HOLDER])
def test_log_event_says_who_holds_it_as_far_as_it_is_known(
    kind: Any, holder: Holder | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "task_lease")

    log_event(LeaseEvent(kind, "invoice:42", holder))

    named = "billing.send [8f]" if holder else "unknown holder"
    assert named in caplog.text


def test_log_event_is_silent_when_the_phase_is_silenced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "task_lease.heartbeat")
    caplog.set_level(logging.DEBUG, "task_lease")

    log_event(LeaseEvent("lost", "invoice:42", detail="stolen"))
    log_event(LeaseEvent("acquired", "invoice:42"))

    assert [record.name for record in caplog.records] == ["task_lease.acquire"]


def test_announcer_tells_all_others_when_an_observer_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first: list[LeaseEvent] = []
    last: list[LeaseEvent] = []
    announce = Announcer([first.append, FailingObserver(), last.append])
    event = LeaseEvent("acquired", "invoice:42")

    announce(event)

    assert first == last == [event]
    assert "An observer failed at acquired" in caplog.text
    assert "Traceback" in caplog.text


def test_announcer_lets_an_exit_pass_when_an_observer_wants_one() -> None:
    def leave(_: LeaseEvent) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        Announcer([leave])(LeaseEvent("acquired", "invoice:42"))


def test_lease_lives_on_when_every_observer_raises(
    make_leases: MakeLeases, client: redis.Redis
) -> None:
    failing = FailingObserver()
    leases = make_leases(ttl=0.5, observers=[failing])

    lease = leases.acquire("invoice:42")
    conflicting = leases.try_acquire("invoice:42")
    eventually(lambda: failing.told.count("renewed") > 5, 10, "five beats")

    lease.check(remote=True)
    assert conflicting is None
    assert lease.release()
    assert client.exists("tl1:{invoice:42}") == 0
    assert failing.told[-1] == "released"


def test_loss_is_noticed_when_every_observer_raises(
    make_leases: MakeLeases, client: redis.Redis
) -> None:
    leases = make_leases(ttl=0.5, observers=[FailingObserver()])
    lost, kept = leases.acquire("lost"), leases.acquire("kept")

    client.delete("tl1:{lost}")
    eventually(lambda: lost.lost, 10, "the loss is noticed")

    assert lost.lost == "stolen"
    kept.check(remote=True)


def test_default_observer_logs_what_happens(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "task_lease")

    with Leases(url).acquire("invoice:42") as lease:
        pass

    said = [record.getMessage() for record in caplog.records]
    assert [text.split(" (")[0] for text in said] == [
        "Lease invoice:42 acquired",
        "Lease invoice:42 released",
    ]
    assert all(str(lease.fence) in text for text in said)


def test_events_never_show_who_owns_the_lease(leases: Leases, events: Events) -> None:
    with leases.acquire("invoice:42") as lease:
        leases.try_acquire("invoice:42")

    assert events.kinds() == ["acquired", "released"]
    assert lease.owner not in repr(list(events))
    assert lease.owner not in repr(lease)
