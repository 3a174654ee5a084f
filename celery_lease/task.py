"""The task class that takes a lease before its body and keeps it to the end."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from celery import Task
from typing_extensions import override

from celery_lease.run import run_exclusively, start_after_acquire
from celery_lease.settings import AppLeases, naming_setting, task_settings
from task_lease.arguments import Binder

if TYPE_CHECKING:
    from celery import Celery

    from task_lease import Lease


if TYPE_CHECKING:
    _Task = Task[Any, Any]
else:
    # Generic only for type checkers: Celery 5.5's class takes no parameters.
    _Task = Task


class Guard:
    """Mixed into a task's class in front: runs the task under a lease.

    Attributes:
        wants_lease: Whether the task is leased from whatever queue it comes, and not
            only from queues that are configured so.
    """

    wants_lease = False
    #: By name, so that only a worker imports it.
    Request = "celery_lease.request:LeaseRequest"

    @property
    def lease(self) -> Lease | None:
        """The lease of the run, None in a run without one (direct, eager)."""
        found: Lease | None = self.request.get("lease")  # type: ignore[attr-defined]
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task, exclusively if it came as a message."""
        call = super().__call__  # type: ignore[misc]
        return run_exclusively(self, call, args, kwargs)  # type: ignore[arg-type]


class ExclusiveTask(Guard, _Task):
    """A task of which one run with the same arguments is active at a time.

    What a duplicate does and how the lease behaves is set by attributes, in the
    decorator or in a class:

    ====================== ===========================================================
    ``lease_key``          what of the arguments makes two calls the same work
    ``lease_ttl``          seconds that the lease outlives its last beat
    ``lease_on_conflict``  ``"skip"``, ``"retry"``, ``"wait"``, ``"raise"``, a callable
    ``lease_wait``         seconds that ``"wait"`` waits
    ``lease_retry_delay``  seconds of the first delay of ``"retry"``
    ``lease_retry_limit``  conflicts in a row that ``"retry"`` bears
    ``lease_on_lost``      ``"raise"``, ``"flag"``, or a callable
    ``lease_on_error``     ``"retry"``, ``"raise"``, ``"run"``: store not usable
    ====================== ===========================================================

    Example:
        >>> @app.task(base=ExclusiveTask, bind=True)  # doctest: +SKIP
        ... def send_invoice(self, customer): ...
    """

    abstract = True
    wants_lease = True

    @classmethod
    @override
    def on_bound(cls, app: Celery) -> None:
        """Check the task's settings as soon as the task is known.

        Raises:
            InvalidConfig: If an attribute is no setting or its value not allowed.
        """
        super().on_bound(app)
        start_after_acquire(cls)
        key: Any = task_settings(cls).get("key")
        if cls.run is not Task.run:
            with naming_setting(f"{cls.name}: "):
                Binder(str(cls.name), _signature_of_run(cls), key)

    def exclusive_name(self, *args: Any, **kwargs: Any) -> str:
        """Return the name of the lease under which a call with these arguments runs.

        Raises:
            InvalidArgument: If an argument has no stable form.
        """
        plan = AppLeases.of(self.app).plan(self, "", exclusive=True)
        assert plan is not None  # noqa: S101 - an exclusive task always has one
        return plan.binder.name(args, kwargs)


def _signature_of_run(task: type[Task[Any, Any]]) -> inspect.Signature:
    signature = inspect.signature(task.run)
    if isinstance(inspect.getattr_static(task, "run"), staticmethod):
        return signature
    _, *parameters = signature.parameters.values()
    return signature.replace(parameters=parameters)
