"""Decorators that make a job's function exclusive.

The decorated function carries what it says about its leases. A `LeaseWorker` reads
that and does the rest around the whole job; on any other worker the function takes
the lease itself when it is called as a job, see `rq_lease.alone`. A call of it that
is no job takes none.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

import rq.decorators
from rq import get_current_job
from typing_extensions import override

from rq_lease.alone import run_alone
from rq_lease.guard import Guard, guarding
from task_lease.config import LeaseConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis
    from rq import Queue
    from rq.job import Job
    from typing_extensions import Unpack

    from rq_lease.guard import LeaseOptions

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_PREFIX = "lease_"


class LeasedJob(Protocol[P, R_co]):
    """A function that can also be enqueued.

    Attributes:
        delay: Enqueues a call; also takes ``depends_on``, ``job_id`` and ``at_front``.
        enqueue: The same.
    """

    delay: Callable[..., Job]
    enqueue: Callable[..., Job]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function itself, without a lease."""


@overload
def exclusive(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def exclusive(
    **options: Unpack[LeaseOptions],
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def exclusive(function: Any = None, /, **options: Any) -> Any:
    """Let the jobs of a function run once at a time for the same arguments.

    Args:
        function: The function, where no option is given.
        **options: The settings of `LeaseConfig`, and ``name``, what stands for the
            function in the names of its leases.

    Raises:
        InvalidConfig: If an option is not allowed or does not fit the function.

    Example:
        >>> @exclusive(ttl=30, on_conflict="retry", key="tenant:{tenant}")
        ... def send_invoices(tenant: int, month: str) -> None: ...
    """
    if function is not None:
        return _decorated(function, {})
    LeaseConfig().with_settings({k: v for k, v in options.items() if k != "name"})
    return lambda function: _decorated(function, options)


def _decorated(function: Callable[..., Any], options: Any) -> Callable[..., Any]:
    guard = Guard.new(function, options)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        job = get_current_job()
        if job is None or not guard.is_wanted_by(job):
            return function(*args, **kwargs)
        with guarding(job):
            return run_alone(job, guard, function, args, kwargs)

    guard.put_on(guarded)
    return guarded


class job(rq.decorators.job):  # noqa: N801 - the name that it replaces
    """RQ's decorator with lease options: ``lease_ttl``, ``lease_on_conflict``, ...

    Args:
        queue: The queue, or its name.
        connection: The connection of the queue.
        *args: What else RQ's decorator takes.
        **options: The same by name, and the options of `exclusive` with the prefix
            ``lease_``.

    Raises:
        InvalidConfig: If a lease option is not allowed.
    """

    def __init__(
        self, queue: Queue | str, connection: redis.Redis, *args: Any, **options: Any
    ) -> None:
        of_lease: dict[str, Any] = {
            name.removeprefix(_PREFIX): options.pop(name)
            for name in tuple(options)
            if name.startswith(_PREFIX)
        }
        self._exclusive = exclusive(**of_lease)
        super().__init__(queue, connection, *args, **options)

    @override
    def __call__(self, f: Callable[P, R]) -> LeasedJob[P, R]:
        """Make the function exclusive and give it ``delay`` and ``enqueue``.

        Raises:
            InvalidConfig: If a lease option does not fit the function.
        """
        leased: LeasedJob[P, R] = super().__call__(self._exclusive(f))  # type: ignore[no-untyped-call]
        return leased
