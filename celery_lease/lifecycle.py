"""The signal hooks: what happens when a worker starts, and after each run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from celery import Task, signals

from celery_lease.checks import problems_at_start
from celery_lease.run import release_after, start_after_acquire
from celery_lease.settings import AppLeases
from celery_lease.task import Guard
from task_lease.errors import LeaseError

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger("celery_lease")


def connect() -> None:
    """Connect the hooks to Celery's signals; doing it twice changes nothing."""
    signals.worker_init.connect(_on_worker_init, weak=False)
    signals.celeryd_after_setup.connect(_on_after_setup, weak=False)
    signals.worker_process_init.connect(_on_process_init, weak=False)
    signals.task_postrun.connect(_on_postrun, weak=False)


def adopt(app: Celery) -> list[Task[Any, Any]]:
    """Let the plain tasks of an app be leased on queues that are configured so.

    Returns:
        The tasks that were not adopted before.
    """
    if not AppLeases.of(app).queues:
        return []
    plain = [
        task
        for task in app.tasks.values()
        if not task.name.startswith("celery.") and not isinstance(task, Guard)
    ]
    for task in plain:
        kind: type[Any] = type(task)
        own = {"__module__": kind.__module__, "Request": _request_class(kind)}
        guarded = type(kind.__name__, (Guard, kind), own)
        task.__class__ = guarded
        start_after_acquire(guarded)
    return plain


def _request_class(kind: type[Any]) -> object:
    # A class that the user chose stays, and the lease of a killed run then ends by
    # its ttl.
    return Guard.Request if kind.Request == Task.Request else kind.Request


def _on_worker_init(sender: Any, **_: object) -> None:
    # Not at the top: whoever only sends tasks needs no worker.
    from celery_lease.request import write_receipt  # noqa: PLC0415

    if not _wants_leases(sender.app):
        return
    try:
        adopt(sender.app)
    except LeaseError as error:
        # A receiver's error would be logged, and the worker would run unguarded.
        message = f"The lease settings are wrong: {error}"
        raise SystemExit(message) from error
    signals.task_received.connect(write_receipt, weak=False)


def _wants_leases(app: Celery) -> bool:
    """Return whether anything in the app is leased: a worker of another needs none."""
    named = any(str(key).lower().endswith("lease_queues") for key in app.conf)
    return named or any(isinstance(task, Guard) for task in app.tasks.values())


def _on_after_setup(instance: Any, **_: object) -> None:
    """Look at the whole once the worker knows its queues."""
    if not _wants_leases(instance.app):
        return
    app_leases = AppLeases.of(instance.app)
    problems = _problems(instance.app, app_leases)
    for problem in problems:
        logger.warning("Lease check: %s", problem)
    if problems and app_leases.checks == "error":
        message = f"Lease checks failed, and lease_checks is error: {problems[0]}"
        raise SystemExit(message)


def _problems(app: Celery, app_leases: AppLeases) -> list[str]:
    if app_leases.checks == "off":
        return []
    unknown = sorted(app_leases.queues - set(app.amqp.queues))
    told = [
        f"lease_queues names the queue {queue!r}, which this worker does not know: "
        "correct the name, or declare it in task_queues"
        for queue in unknown
    ]
    return told + problems_at_start(app, app_leases)


def _on_process_init(sender: Any, **_: object) -> None:
    """Adopt anew in a process that was spawned and so imported everything itself."""
    from celery import current_app  # noqa: PLC0415 - the app of this very process
    from celery.app.trace import build_tracer  # noqa: PLC0415

    del sender
    app = cast("Any", current_app)._get_current_object()  # noqa: SLF001 - their idiom
    for task in adopt(app) if _wants_leases(app) else ():
        task.__trace__ = build_tracer(task.name, task, app.loader, app=app)


def _on_postrun(sender: Task[Any, Any], state: str | None = None, **_: object) -> None:
    release_after(sender, state)
