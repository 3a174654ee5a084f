"""What a worker looks at when it starts: settings that contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from task_lease.checks import problems_of
from task_lease.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Celery, Task

    from celery_lease.settings import AppLeases, Plan


def problems_at_start(app: Celery, app_leases: AppLeases) -> list[str]:
    """Return what does not fit together, one sentence each with the remedy.

    Args:
        app: The worker's app.
        app_leases: Its leases.

    Raises:
        InvalidConfig: If a task's settings do not fit together at all.
    """
    problems = []
    for task in app.tasks.values():
        plan = app_leases.plan(task, "", exclusive=bool(_wants_lease(task)))
        if plan is not None:
            problems += [f"{task.name}: {text}" for text in _of_task(app, task, plan)]
    try:
        return problems + problems_of(app_leases.leases)
    except StoreUnavailable as error:
        return [*problems, f"{error}; until it answers, lease_on_error decides"]


def _wants_lease(task: Task[Any, Any]) -> bool:
    return bool(getattr(task, "wants_lease", False))


def _of_task(app: Celery, task: Task[Any, Any], plan: Plan) -> Iterator[str]:
    config = plan.config
    hard = task.time_limit or app.conf.task_time_limit
    soft = task.soft_time_limit or app.conf.task_soft_time_limit
    for name, limit in (("time_limit", hard), ("soft_time_limit", soft)):
        if limit and config.ttl > limit:
            yield (
                f"lease_ttl ({config.ttl:g} s) is longer than {name} ({limit:g} s); "
                "beats renew the lease for as long as the task runs, so choose a ttl "
                "of seconds, or others wait for it after a crash"
            )
        if limit and config.on_conflict == "wait" and config.wait >= limit:
            yield (
                f"lease_wait ({config.wait:g} s) does not fit into {name} "
                f"({limit:g} s), in which the task also waits: shorten lease_wait"
            )
    yield from _of_visibility(app, task, plan, hard or soft)


def _of_visibility(
    app: Celery, task: Task[Any, Any], plan: Plan, limit: float | None
) -> Iterator[str]:
    options = app.conf.broker_transport_options or {}
    timeout = options.get("visibility_timeout")
    if timeout is None:
        return
    if plan.config.ttl >= timeout:
        yield (
            f"lease_ttl ({plan.config.ttl:g} s) reaches the broker's "
            f"visibility_timeout ({timeout:g} s): make the ttl much shorter"
        )
    if task.acks_late and limit and limit > timeout:
        yield (
            f"it may run for {limit:g} s, but the broker delivers it again after a "
            f"visibility_timeout of {timeout:g} s: make that longer"
        )
