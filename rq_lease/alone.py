"""What the decorated function does by itself, on a worker that knows no leases.

It can neither hold the lease until the outcome is stored nor park the job. So it waits
in place for a while, and then has RQ schedule the job again, which takes a worker with
a scheduler (``rq worker --with-scheduler``) to come back.
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
import threading
from typing import TYPE_CHECKING, Any

from rq.job import Retry

from rq_lease.guard import claim_of
from rq_lease.parents import sending
from rq_lease.settings import read_settings
from rq_lease.tries import Comeback
from task_lease.errors import LeaseConflict
from task_lease.exclusive import Later, Run, Skip, admit, hold

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis
    from rq.job import Job

    from rq_lease.guard import Guard
    from task_lease.claims import Claim
    from task_lease.client import Leases
    from task_lease.config import LeaseConfig
    from task_lease.exclusive import Admission

# The part of the time that the job has left for its work, in which it may wait.
_SHARE = 0.5


def run_alone(
    job: Job,
    guard: Guard,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return what a job's function returns, run under its lease.

    Args:
        job: The job that runs.
        guard: What its function says about leases.
        function: What to run.
        args: The arguments of the call.
        kwargs: The keyword arguments of the call.

    Raises:
        LeaseConflict: If the lease is held and the policy is to fail.
        LeaseLost: If the lease was lost before the function ended.
        StoreUnavailable: If the store cannot be used and the policy is to fail.
    """
    config = _settings().config(job.origin, guard.options)
    name = guard.binder.name(args, kwargs)
    claim = claim_of(job, job.origin, guard.task, name, config)
    leases = _leases(job.connection)
    comeback = Comeback.of(job)
    admission = admit(leases, claim, config, tries=comeback.tries)
    if isinstance(admission, Later):
        admission = _insist(leases, claim, config, admission, _patience(job, config))
    if isinstance(admission, Later):
        comeback.note(job, admission.tries)
        return Retry(max=sys.maxsize, interval=max(math.ceil(admission.delay), 1))
    if not isinstance(admission, Run):
        return dict(admission.record) if isinstance(admission, Skip) else None
    try:
        body = functools.partial(_call, function, args, kwargs)
        with sending(job, in_horse=False):
            return hold(admission.lease, body, on_lost=config.on_lost)
    finally:
        admission.lease.release()


@functools.cache
def _settings() -> Any:
    return read_settings()


@functools.lru_cache(maxsize=4)
def _leases(connection: redis.Redis) -> Leases:
    leases: Leases = _settings().leases(connection)
    return leases


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    result = function(*args, **kwargs)
    # RQ would run the coroutine only after we have released.
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def _patience(job: Job, config: LeaseConfig) -> float:
    timeout = float(job.timeout or 0)
    return min(config.wait, timeout * _SHARE) if timeout > 0 else config.wait


def _insist(
    leases: Leases, claim: Claim, config: LeaseConfig, later: Later, seconds: float
) -> Admission:
    """Return what came of waiting in place instead of coming back later."""
    until = leases.now() + seconds
    admission: Admission = later
    while isinstance(admission, Later) and admission.reason == "store":
        left = until - leases.now()
        if left <= 0:
            return admission
        threading.Event().wait(min(admission.delay, left))
        admission = admit(leases, claim, config, tries=admission.tries)
    if not isinstance(admission, Later):
        return admission
    try:
        return Run(leases.wait(claim, lambda _: until - leases.now()))
    except LeaseConflict:
        return admission
