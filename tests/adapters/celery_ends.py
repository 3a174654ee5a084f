"""Tasks that end in every way that Celery knows, under a lease of half a minute."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from adapters.celery_journal import tell, tell_begun, wait_at_gate
from adapters.celery_tasks import KEY, Observed
from billiard.exceptions import SoftTimeLimitExceeded
from celery import shared_task
from celery.exceptions import Ignore, Reject

#: Far longer than any test waits for the lease to end.
TTL = 30.0


class EndError(Exception):
    """What a task fails with."""


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_ttl=TTL)
def end(self: Observed, log: str, key: str, how: str) -> str:
    """End as told, once the test has opened the gate."""
    tell_begun(self, log, key)
    wait_at_gate(log, key)
    if how == "exception":
        raise EndError(key)
    if how == "ignore":
        raise Ignore
    if how == "reject":
        raise Reject(key, requeue=False)
    if how == "exit":
        raise SystemExit(1)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return how


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_ttl=TTL, acks_late=True)
def requeue_once(self: Observed, log: str, key: str) -> str:
    """Send the message back the first time."""
    tell_begun(self, log, key)
    if not (self.request.delivery_info or {}).get("redelivered"):
        raise Reject(key, requeue=True)
    return "again"


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_ttl=TTL, soft_time_limit=1)
def stop_softly(self: Observed, log: str, key: str) -> str:
    tell_begun(self, log, key)
    try:
        time.sleep(60)
    except SoftTimeLimitExceeded:
        tell(log, "soft")
        raise
    return "never"


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_ttl=TTL, time_limit=1)
def stop_hard(self: Observed, log: str, key: str) -> None:
    tell_begun(self, log, key)
    time.sleep(60)


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_ttl=TTL, time_limit=1)
def stop_never(self: Observed, log: str, key: str) -> None:
    """Does not want to end, so that only a kill does it."""
    tell_begun(self, log, key)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_ttl=TTL)
def sleep_long(self: Observed, log: str, key: str) -> None:
    tell_begun(self, log, key)
    time.sleep(60)


@shared_task(
    base=Observed,
    bind=True,
    lease_key=KEY,
    lease_ttl=TTL,
    acks_late=True,
    reject_on_worker_lost=True,
)
def die_once(self: Observed, log: str, key: str) -> str:
    """Killed the first time, as by the kernel when memory runs out."""
    tell_begun(self, log, key)
    if not (self.request.delivery_info or {}).get("redelivered"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@shared_task(base=Observed, bind=True, lease_key=KEY, lease_ttl=1.5, acks_late=True)
def outlast_visibility(self: Observed, log: str, key: str, how: str = "") -> str:
    """Run until the broker has given the message to somebody else, and longer."""
    tell_begun(self, log, key)
    wait_at_gate(log, key)
    if how == "exception":
        raise EndError(key)
    return "once"


@shared_task(
    base=Observed,
    bind=True,
    lease_key=KEY,
    lease_ttl=1.5,
    acks_late=True,
    max_retries=1,
)
def retry_after_copy(self: Observed, log: str, key: str) -> int:
    """Is copied, and then sends itself again."""
    tell_begun(self, log, key)
    if self.request.retries:
        return int(self.request.retries)
    wait_at_gate(log, key)
    raise self.retry(countdown=0)
