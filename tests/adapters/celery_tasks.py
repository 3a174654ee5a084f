"""The tasks that the Celery workers of the tests run.

They are shared tasks, so that they belong to whatever app is the current one: in a
worker its own, in a test the one that sends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import redis
from adapters.celery_journal import tell, tell_begun, wait_at_gate
from celery import shared_task
from histories import recorded
from typing_extensions import override

from celery_lease import ExclusiveTask, current_lease
from task_lease import LeaseLost
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    from celery import Task

    from task_lease import Lease, LeaseConflict

#: A queue that no worker takes from, so that what is sent there stays to be counted.
UNTAKEN = "untaken"
#: Two calls are the same work in one test and for one key.
KEY = ("log", "key")
ALL_ERRORS = (Exception,)


class Observed(ExclusiveTask):
    """Notes when a run was attempted, before it has a lease."""

    abstract = True

    @override
    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.request.attempted_at = time.monotonic()  # type: ignore[attr-defined]


def work(task: Task[Any, Any], log: str, key: str, *, gated: bool) -> int | None:
    """Run under the key's lease, and return its fence."""
    lease = current_lease()
    fence = lease.fence if lease else None
    try:
        with recorded(log, key, fence):
            tell_begun(task, log, key)
            if gated:
                wait_at_gate(log, key)
    except LeaseLost:
        tell(log, "stopped", at=time.monotonic())
        raise
    return fence


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_on_conflict="skip")
def or_skip(self: Observed, log: str, key: str, *, gated: bool = False) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_on_conflict="retry")
def or_retry(self: Observed, log: str, key: str, *, gated: bool = False) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_on_conflict="wait")
def or_wait(self: Observed, log: str, key: str, *, gated: bool = False) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(
    base=Observed,
    bind=True,
    lease_key=KEY,
    lease_on_conflict="raise",
    autoretry_for=ALL_ERRORS,
    max_retries=None,
)
def or_raise(self: Observed, log: str, key: str, *, gated: bool = False) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(bind=True)
def plain(
    self: Task[Any, Any], log: str, key: str, *, gated: bool = False
) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task
def collect(results: list[Any], log: str) -> list[Any]:
    tell(log, "collected", results=results)
    return results


@shared_task
def blame(request: Any, error: Exception, traceback: object, log: str) -> None:
    del request, traceback
    tell(log, "blamed", error=type(error).__name__)


@shared_task(base=Observed, bind=True)
def look_at_lease(self: Observed) -> dict[str, Any]:
    lease = self.lease
    assert lease is not None
    return {
        "current": current_lease() is lease,
        "state": lease.state,
        "fence": lease.fence,
        "ttl": lease.ttl,
        "holder": lease.holder,
    }


# Options


def fail_if_held_by_a_task(conflict: LeaseConflict) -> str:
    holder = conflict.holder or {}
    return "raise" if holder.get("task", "").endswith("or_choose") else "skip"


@shared_task(
    base=Observed, bind=True, lease_key=KEY, lease_on_conflict=fail_if_held_by_a_task
)
def or_choose(self: Observed, log: str, key: str, *, gated: bool = False) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(
    base=Observed,
    bind=True,
    lease_key=KEY,
    lease_on_conflict="wait",
    lease_wait=0.5,
)
def or_wait_a_little(
    self: Observed, log: str, key: str, *, gated: bool = False
) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(
    base=Observed,
    bind=True,
    lease_key=KEY,
    lease_on_conflict="retry",
    lease_retry_delay=0.5,
    lease_retry_limit=2,
)
def or_retry_twice(
    self: Observed, log: str, key: str, *, gated: bool = False
) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(
    base=Observed,
    bind=True,
    lease_key=KEY,
    lease_on_conflict="retry",
    max_retries=1,
)
def retries_once(self: Observed, log: str, key: str) -> int:
    """Needs its one retry for itself; conflicts must leave it that."""
    work(self, log, key, gated=True)
    if not self.request.retries:
        raise self.retry(countdown=0)
    return int(self.request.retries)


# The span of a lease


class Spanned(Observed):
    """Tells whether the lease is held when the outcome is stored."""

    abstract = True

    @override
    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self._tell("success", task_id, args[0])

    @override
    def on_failure(
        self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        self._tell("failure", task_id, args[0])

    def _tell(self, what: str, task_id: str, log: str) -> None:
        assert self.lease is not None
        with redis.Redis.from_url(self.app.conf.lease_url) as store:
            held = store.get(lease_keys(self.lease.name).lease) or b""
        with redis.Redis.from_url(self.app.conf.broker_url) as broker:
            sent = broker.llen(UNTAKEN)
        tell(
            log,
            what,
            held=held.decode().startswith(f"{self.lease.owner} "),
            stored=self.backend.get_task_meta(task_id, cache=False)["status"],
            sent=sent,
        )


@shared_task(base=Spanned, bind=True, lease_key=KEY)
def span(self: Spanned, log: str, key: str, *, fails: bool = False) -> int | None:
    if fails:
        raise ArithmeticError(key)
    return work(self, log, key, gated=False)


# Losing a lease


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_ttl=3.0)
def sleep(self: Observed, log: str, key: str) -> None:
    tell_begun(self, log, key)
    time.sleep(60)


@shared_task(
    base=Observed,
    bind=True,
    lease_key=KEY,
    lease_ttl=3.0,
    autoretry_for=ALL_ERRORS,
    retry_backoff=False,
    default_retry_delay=0,
    max_retries=5,
)
def sleep_or_retry(self: Observed, log: str, key: str) -> None:
    tell_begun(self, log, key)
    time.sleep(60)


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_ttl=3.0)
def swallow(self: Observed, log: str, key: str) -> str:
    """Does not want to know."""
    tell_begun(self, log, key)
    try:
        time.sleep(60)
    except LeaseLost:
        tell(log, "swallowed")
    return "done"


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_ttl=3.0)
def spin(self: Observed, log: str, key: str) -> None:
    """Works in small steps, as code must that a signal cannot reach."""
    tell_begun(self, log, key)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.01)


@shared_task(
    base=Observed, bind=True, lease_key=KEY, lease_ttl=3.0, lease_on_lost="flag"
)
def notice(self: Observed, log: str, key: str) -> None:
    """Looks at the mark itself, and ends."""
    assert self.lease is not None
    tell_begun(self, log, key)
    until = time.monotonic() + 60
    while self.lease.lost is None and time.monotonic() < until:
        time.sleep(0.01)
    tell(log, "noticed", reason=self.lease.lost)


def tell_lost(lease: Lease) -> None:
    task = lease.holder["task"]
    tell(_logs[lease.name], "lost", task=task, reason=lease.lost)


#: Where to tell of the loss of a lease, by its name.
_logs: dict[str, str] = {}


@shared_task(
    base=Observed, bind=True, lease_key=KEY, lease_ttl=3.0, lease_on_lost=tell_lost
)
def call_back(self: Observed, log: str, key: str) -> None:
    """Is told by a call, and ends when the test says so."""
    assert self.lease is not None
    _logs[self.lease.name] = log
    tell_begun(self, log, key)
    wait_at_gate(log, key)


# Time and death


@shared_task(
    base=Observed,
    bind=True,
    lease_key=KEY,
    lease_ttl=1.5,
    lease_on_conflict="wait",
)
def last_three_ttls(self: Observed, log: str, key: str) -> int | None:
    assert self.lease is not None
    with recorded(log, key, self.lease.fence):
        tell_begun(self, log, key)
        time.sleep(3 * self.lease.ttl)
    return self.lease.fence


@shared_task(
    base=Observed,
    bind=True,
    lease_key=KEY,
    lease_ttl=1.5,
    lease_on_conflict="wait",
)
def compute_three_ttls(self: Observed, log: str, key: str) -> int | None:
    """Lets no other greenlet run meanwhile."""
    assert self.lease is not None
    with recorded(log, key, self.lease.fence):
        tell_begun(self, log, key)
        until = time.monotonic() + 3 * self.lease.ttl
        while time.monotonic() < until:
            sum(range(1000))
    return self.lease.fence


@shared_task(
    base=Observed,
    bind=True,
    lease_key=KEY,
    lease_ttl=30.0,
    lease_on_conflict="raise",
)
def hold_long(self: Observed, log: str, key: str, *, gated: bool = False) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(
    base=Observed, bind=True, lease_key=KEY, lease_ttl=30.0, lease_on_conflict="wait"
)
def wait_long(self: Observed, log: str, key: str, *, gated: bool = False) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(
    base=Observed, bind=True, lease_key=KEY, lease_ttl=3.0, lease_on_conflict="wait"
)
def hold_short(
    self: Observed, log: str, key: str, *, gated: bool = False
) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(
    base=Observed, bind=True, lease_key=KEY, lease_ttl=6.0, lease_on_conflict="skip"
)
def hold_or_skip(
    self: Observed, log: str, key: str, *, gated: bool = False
) -> int | None:
    return work(self, log, key, gated=gated)


# Many runs


def contend(task: Observed, log: str, key: str) -> None:
    assert task.lease is not None
    with recorded(log, key, task.lease.fence):
        tell_begun(task, log, key)
        time.sleep(0.01)


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_on_conflict="retry")
def contend_or_retry(self: Observed, log: str, key: str) -> None:
    contend(self, log, key)


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_on_conflict="wait")
def contend_or_wait(self: Observed, log: str, key: str) -> None:
    contend(self, log, key)


@shared_task(base=Observed, bind=True, ignore_result=True)
def tiny(self: Observed, log: str, number: int) -> None:
    assert self.lease is not None
    with recorded(log, str(number), self.lease.fence):
        pass


@shared_task(base=Observed, bind=True, lease_key="{log}", ignore_result=True)
def send_itself(self: Observed, log: str, left: int) -> None:
    assert self.lease is not None
    with recorded(log, "links", self.lease.fence):
        if left:
            send_itself.delay(log, left - 1)


@shared_task(base=Observed, bind=True, lease_key="{log}", ignore_result=True)
def link(self: Observed, log: str) -> None:
    assert self.lease is not None
    with recorded(log, "links", self.lease.fence):
        pass


@shared_task(
    base=Observed, bind=True, lease_key="{log}", ignore_result=True, max_retries=None
)
def retry_at_once(self: Observed, log: str, times: int) -> None:
    assert self.lease is not None
    with recorded(log, "links", self.lease.fence):
        pass
    if self.request.retries < times:
        raise self.retry(countdown=0)


@shared_task(base=Observed, bind=True)
def take(self: Observed, log: str, value: Any, other: Any = 0) -> None:
    """Takes arguments of any type, all of which count."""
    del value, other
    tell_begun(self, log, "take")
    wait_at_gate(log, "take")


@shared_task(base=Observed, bind=True, lease_key="{log} {value}")
def take_named(self: Observed, log: str, value: str) -> None:
    """Has the argument's own text in the name of its lease."""
    del value
    tell_begun(self, log, "take")
    wait_at_gate(log, "take")


# The store is down


@shared_task(
    base=Observed, bind=True, lease_key=KEY, lease_ttl=2.0, lease_on_error="retry"
)
def run_when_store_is_back(
    self: Observed, log: str, key: str, *, gated: bool = False
) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(
    base=Observed, bind=True, lease_key=KEY, lease_ttl=2.0, lease_on_error="raise"
)
def fail_without_store(
    self: Observed, log: str, key: str, *, gated: bool = False
) -> int | None:
    return work(self, log, key, gated=gated)


@shared_task(
    base=Observed, bind=True, lease_key=KEY, lease_ttl=2.0, lease_on_error="run"
)
def run_without_store(
    self: Observed, log: str, key: str, *, gated: bool = False
) -> int | None:
    return work(self, log, key, gated=gated)
