"""What is known about the leases of a job's function."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, TypedDict

from rq_lease.parents import PARENT
from task_lease.arguments import Binder
from task_lease.claims import Claim
from task_lease.config import LeaseConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rq.job import Job

    from task_lease.arguments import Key
    from task_lease.config import OnError, OnLost, Policy
    from task_lease.errors import LeaseConflict

_ATTRIBUTE = "__task_lease__"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

# The id of the job whose lease is held already, by the worker or further out.
_guarded: ContextVar[str | None] = ContextVar("rq_lease_guarded", default=None)


class LeaseOptions(TypedDict, total=False):
    """What a function may say about its leases: `LeaseConfig`, and its name.

    Attributes:
        name: The task in the lease's name, by default the function's full name. Give
            two functions, or a Celery task, the same to exclude each other.
    """

    ttl: float
    on_conflict: Policy | Callable[[LeaseConflict], Policy]
    wait: float
    retry_delay: float
    retry_limit: int | None
    on_lost: OnLost | Callable[..., object]
    on_error: OnError
    key: Key | None
    name: str


@dataclass(frozen=True, slots=True)
class Guard:
    """What a function says about its leases.

    Attributes:
        task: The task in the lease's name.
        options: What it says beside that, as settings.
        binder: Computes the leases' names.
    """

    task: str
    options: Mapping[str, object]
    binder: Binder

    @classmethod
    def new(cls, function: Callable[..., Any], options: LeaseOptions) -> Guard:
        """Return what a function with these options says.

        Raises:
            InvalidConfig: If an option is not allowed or does not fit the function.
        """
        settings: dict[str, Any] = dict(options)
        task = str(settings.pop("name", "") or _full_name(function))
        key = LeaseConfig().with_settings(settings).key
        return cls(task, settings, Binder(task, _signature(function), key))

    @classmethod
    def plain(cls, function: Callable[..., Any]) -> Guard:
        """Return what holds for a function that says nothing."""
        return cls.new(inspect.unwrap(getattr(function, "__func__", function)), {})

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Guard | None:
        """Return what a function says, None if it says nothing."""
        found = getattr(function, _ATTRIBUTE, None)
        return found if isinstance(found, cls) else None

    def put_on(self, function: Callable[..., Any]) -> None:
        """Let a function say this."""
        setattr(function, _ATTRIBUTE, self)

    def is_wanted_by(self, job: Job) -> bool:
        """Return whether a call comes from this job, and its lease is still to get."""
        # A queue that runs its jobs in place names no real worker.
        if _guarded.get() == job.id or job.worker_name == "sync":
            return False
        function = job.func
        return function is not None and Guard.of(function) is self

    def lease_name(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> str:
        """Return the name of the lease for a call of the function.

        Raises:
            InvalidArgument: If an argument that counts has no stable form.
            TypeError: If the function cannot be called like this.
        """
        if inspect.ismethod(function):
            owner = function.__self__
            args = (_full_name(owner) if inspect.isclass(owner) else owner, *args)
        return self.binder.name(args, kwargs)


@contextmanager
def guarding(job: Job) -> Iterator[None]:
    """Let the job's function know that its lease is held, or needs not be."""
    token = _guarded.set(job.id)
    try:
        yield
    finally:
        _guarded.reset(token)


def claim_of(job: Job, queue: str, task: str, name: str, config: LeaseConfig) -> Claim:
    """Return a job's claim to a lease; it cannot be parked.

    Args:
        job: The job as it was popped.
        queue: The name of the queue it came from.
        task: The task in the lease's name.
        name: The lease's name.
        config: The settings of the lease.
    """
    depends_on: Sequence[str] = getattr(job, "_dependency_ids", ())
    parent = job.meta.get(PARENT, "")
    return Claim(
        name,
        config.ttl,
        task,
        job.id,
        str(parent),
        _microseconds(job.enqueued_at),
        queue,
        tuple(depends_on),
    )


def _microseconds(instant: datetime | None) -> int:
    if instant is None:
        return 0
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=timezone.utc)
    return (instant - _EPOCH) // timedelta(microseconds=1)


def _full_name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:
        # Some builtins do not tell theirs.
        return inspect.signature(lambda *args, **kwargs: (args, kwargs))
