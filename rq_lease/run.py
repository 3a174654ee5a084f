"""One run of a job under its lease, on a worker that knows leases."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError as JobsUnavailable

from rq_lease.guard import Guard, claim_of, guarding
from rq_lease.parents import sending
from rq_lease.parking import (
    come_back,
    forget_execution,
    park_of,
    prolong_execution,
)
from rq_lease.report import tell_worker
from rq_lease.tries import Comeback
from task_lease.answers import Parked
from task_lease.errors import LeaseLost, StoreUnavailable
from task_lease.exclusive import (
    Finished,
    Later,
    Run,
    Skip,
    Tries,
    admit,
    admit_or_park,
    hold,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rq import Queue
    from rq.job import Job

    from rq_lease.worker import Leasing
    from task_lease.claims import Claim
    from task_lease.config import LeaseConfig
    from task_lease.exclusive import Admission
    from task_lease.lease import Lease

# Seconds between two looks whether the store is back, at the most.
_LONGEST_PAUSE = 5.0
# Seconds between two attempts to schedule a job while RQ's own server is away.
_PAUSE = 1.0


class JobRun:
    """One run of a job.

    What shall happen instead of the job's function (a skip, an error) is put in its
    place, so it goes the way that every outcome goes in RQ.

    Args:
        worker: The worker that runs it.
        job: The job as it was popped.
        queue: The queue it came from.
        execution_id: RQ's id of this run.
        execution: The run, where RQ's version hands it around.
    """

    def __init__(
        self,
        worker: Leasing,
        job: Job,
        queue: Queue,
        execution_id: str,
        execution: tuple[Any, ...],
    ) -> None:
        self._worker = worker
        self._job = job
        self._queue = queue
        self._execution_id = execution_id
        self._execution = execution
        self._lease: Lease | None = None
        self._scope = contextlib.ExitStack()
        #: Whether the outcome belongs to another run of the same job.
        self.is_disowned = False

    def begin(self) -> bool:
        """Get the lease, and return whether RQ shall go on with the job."""
        try:
            admission = self._decide()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
            self._perform_instead(functools.partial(_raise, error))
            return True
        if isinstance(admission, Later):
            self._come_back(admission)
        elif isinstance(admission, (Parked, Finished)):
            forget_execution(self._worker, self._job, *self._execution)
        return admission is None or isinstance(admission, (Run, Skip))

    def check(self) -> None:
        """Look at the clock once more, before the outcome is stored.

        Raises:
            LeaseLost: If the lease was lost.
        """
        if self._lease is None:
            return
        try:
            self._lease.check()
        except LeaseLost:
            self._note_loss(self._lease)
            raise

    def end(self) -> None:
        """Release the lease: the outcome is stored."""
        self._scope.close()
        self._job.__dict__.pop("perform", None)
        if self._lease is not None:
            self._lease.release()
            tell_worker(lease=None)

    def _decide(self) -> Admission | Parked | None:
        """Get the lease, if the job wants one, and put things in place."""
        function = self._function()
        if function is None:
            return None
        settings = self._worker.lease_settings
        guard = Guard.of(function)
        if guard is None and self._queue.name not in settings.queues:
            return None
        guard = guard or Guard.plain(function)
        config = settings.config(self._queue.name, guard.options)
        name = guard.lease_name(function, self._job.args, self._job.kwargs)
        claim = claim_of(self._job, self._queue.name, guard.task, name, config)
        if self._worker.can_park:
            park = park_of(self._job, self._queue, self._execution_id)
            claim = claim._replace(park=park)
        admission = self._admit(claim, config)
        if isinstance(admission, Run):
            self._perform_under(admission.lease, config)
        elif isinstance(admission, Skip):
            self._perform_instead(functools.partial(dict, admission.record))
        return admission

    def _function(self) -> Callable[..., Any] | None:
        try:
            found: Callable[..., Any] | None = self._job.func
        except Exception:  # noqa: BLE001 - RQ meets it again, and fails the job for it
            return None
        return found

    def _admit(self, claim: Claim, config: LeaseConfig) -> Admission | Parked:
        if config.on_conflict == "wait" or callable(config.on_conflict):
            self._allow(config.wait)
        tries = Tries() if claim.park else Comeback.of(self._job).tries
        leases = self._worker.leases
        if claim.park is None:
            return admit(leases, claim, config, tries=tries)
        while True:
            # Without the store, RQ itself can do nothing with the job either.
            admission = admit_or_park(
                leases, claim, config, tries=tries, longest_delay=_LONGEST_PAUSE
            )
            if not isinstance(admission, Later):
                return admission
            tries = admission.tries
            tell_worker(waits=admission.delay)
            threading.Event().wait(admission.delay)

    def _allow(self, seconds: float) -> None:
        """Let a wait be none of the job's own time, on which others keep an eye."""
        tell_worker(waits=seconds)
        if not self._worker.is_horse:
            # Nobody else says meanwhile that this run lives.
            prolong_execution(self._worker, self._job, seconds, *self._execution)

    def _perform_under(self, lease: Lease, config: LeaseConfig) -> None:
        self._lease = lease
        tell_worker(lease=lease.name)
        in_horse = self._worker.is_horse
        self._scope.enter_context(sending(self._job, in_horse=in_horse))
        perform = self._job.perform

        def perform_leased() -> Any:
            try:
                with guarding(self._job):
                    return hold(lease, perform, on_lost=config.on_lost)
            except LeaseLost:
                self._note_loss(lease)
                raise
            finally:
                # RQ takes its time to store the outcome; `end` comes in any case.
                lease.body_ended_at = None

        self._perform_instead(perform_leased)

    def _perform_instead(self, perform: Callable[[], Any]) -> None:
        self._job.perform = perform  # type: ignore[method-assign]

    def _note_loss(self, lease: Lease) -> None:
        try:
            found = self._worker.leases.look(lease.name)
        except StoreUnavailable:
            return
        if (
            lease.lost
            and found is not None
            and found.owner != lease.owner
            and found.holder.get("id") == self._job.id
            and not found.is_reserved
        ):
            self.is_disowned = True
            # RQ offers no other way to say that there is none to call.
            vars(self._job)["_failure_callback"] = None

    def _come_back(self, later: Later) -> None:
        while True:
            try:
                come_back(self._worker, self._job, self._queue, later, *self._execution)
            except JobsUnavailable as error:
                self._worker.log.warning("Job %s has to wait: %s", self._job.id, error)
                tell_worker(waits=_PAUSE)
                threading.Event().wait(_PAUSE)
            else:
                return


def _raise(error: Exception) -> None:
    raise error
