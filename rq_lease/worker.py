"""Workers that hold the lease of a job until its outcome is stored.

`Leasing` does it all; it goes in front of one of RQ's workers. RQ 2 calls
``perform_job(job, queue)`` and RQ 3 adds the execution, which is only handed on here.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rq.logutils import setup_loghandlers
from rq.version import VERSION
from rq.worker import BaseWorker, SimpleWorker, SpawnWorker, Worker
from typing_extensions import override

from rq_lease.parking import MAJOR, forget_execution, was_parked
from rq_lease.report import HorseReport
from rq_lease.run import JobRun
from rq_lease.settings import WorkerSettings, read_settings
from rq_lease.sweeper import Sweeper
from task_lease.config import SHORTEST_TTL, check_seconds
from task_lease.errors import InvalidConfig, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import redis
    from rq import Queue
    from rq.job import Job

    from task_lease.client import Leases

# Seconds within which a horse that has ended must be proven dead.
_FOR_PROOF = 1.0


class Leasing(BaseWorker):
    """Put in front of a worker class of RQ: its jobs run under their leases.

    Attributes:
        lease_url: The lease store, a URL or a client. None takes the connection of the
            jobs; only then, or on the same server and database, can jobs be parked.
        lease_queues: Settings by the name of a queue, for all of its jobs.
        lease_defaults: Settings for every function that says nothing else.
        lease_sweep: Seconds between two looks after leases that ended without a
            release.
    """

    lease_url: ClassVar[redis.Redis | str | None] = None
    lease_queues: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    lease_defaults: ClassVar[Mapping[str, object]] = {}
    lease_sweep: ClassVar[float] = 1.0

    _settings: WorkerSettings | None = None
    _leases: Leases | None = None
    _can_park: bool | None = None
    _sweeper: Sweeper | None = None
    _report: HorseReport | None = None
    _job: Job | None = None
    _run: JobRun | None = None
    _lease_name: str | None = None
    _allowed: int = 0

    @property
    def lease_settings(self) -> WorkerSettings:
        """The settings of the class and the environment.

        Raises:
            InvalidConfig: If one of them is not allowed.
        """
        if self._settings is None:
            self._settings = read_settings(
                url=self.lease_url,
                queues=self.lease_queues,
                defaults=self.lease_defaults,
            )
        return self._settings

    @property
    def leases(self) -> Leases:
        """The leases in this worker's store."""
        if self._leases is None:
            self._leases = self.lease_settings.leases(self.connection)
        return self._leases

    @property
    def can_park(self) -> bool:
        """Whether leases and jobs share a server, so that jobs can wait beside them."""
        if self._can_park is None:
            if self.lease_settings.url is None:
                self._can_park = hasattr(self.connection, "connection_pool")
            else:
                try:
                    self._can_park = self.leases.is_seen_by(self.connection)
                except StoreUnavailable:
                    return False
        return self._can_park

    @override
    def bootstrap(self, *args: Any, **kwargs: Any) -> None:
        """Check the settings, then start like any worker.

        Raises:
            InvalidConfig: If a setting is not allowed, or the worker cannot do it.
        """
        if isinstance(self, SpawnWorker) and MAJOR < 3:  # noqa: PLR2004
            name = type(self).__name__
            rule = f"needs RQ 3.0, as RQ {VERSION} runs its jobs in a plain Worker"
            raise InvalidConfig("worker_class", name, rule)
        check_seconds("lease_sweep", self.lease_sweep, shortest=SHORTEST_TTL)
        if self.can_park:
            self._sweeper = Sweeper(self.leases, self.lease_sweep)
            self._sweeper.start()
        else:
            self.log.warning(
                "Worker %s: leases and jobs share no server, so a job that conflicts "
                "is scheduled and needs a worker with a scheduler to come back",
                self.name,
            )
        # RQ's command configures the loggers of RQ alone.
        level = args[0] if args else kwargs.get("logging_level", "INFO")
        setup_loghandlers(level, name="task_lease")
        super().bootstrap(*args, **kwargs)

    @override
    def teardown(self) -> None:
        """Sweep no more, then end like any worker."""
        if self._sweeper is not None and not self.is_horse:
            self._sweeper.stop()
        super().teardown()  # type: ignore[no-untyped-call]

    @override
    def execute_job(self, job: Job, queue: Queue) -> None:
        """Execute a job, and end the lease of a horse that was killed."""
        self._job, self._report, self._lease_name = job, HorseReport(), None
        self._allowed = 0
        try:
            super().execute_job(job, queue)
        finally:
            self._listen()
            self._end_lease(job)
            self._report.close()
            self._report = self._job = None

    @override
    def wait_for_horse(self) -> Any:
        """Wait for the horse, and hear what it has to say."""
        try:
            return super().wait_for_horse()
        finally:
            self._listen()

    @override
    def perform_job(self, job: Job, queue: Queue, *args: Any, **kwargs: Any) -> bool:
        """Perform a job under its lease, until its outcome is stored."""
        execution_id = str((args[0] if args else cast("Any", self).execution).id)
        self._run = JobRun(self, job, queue, execution_id, args)
        try:
            if self._run.begin():
                return super().perform_job(job, queue, *args, **kwargs)
            return True
        finally:
            self._run.end()
            self._run = None

    @override
    def handle_execution_ended(
        self, job: Job, queue: Queue, heartbeat_ttl: int
    ) -> None:
        """Note the end, unless the lease was lost in the last moment."""
        if self._run is not None:
            if self._run.is_disowned:
                return
            if sys.exc_info()[0] is None:
                self._run.check()
        super().handle_execution_ended(job, queue, heartbeat_ttl)

    @override
    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """Tell the exception handlers, unless the outcome belongs to another run."""
        if self._run is None or not self._run.is_disowned:
            super().handle_exception(job, *exc_info)

    @override
    def handle_job_failure(
        self, job: Job, queue: Queue, *args: Any, **kwargs: Any
    ) -> None:
        """Store the failure, unless the outcome is not this run's to store."""
        execution = kwargs.get("execution")
        if self._allowed and job.timeout:
            # It may be put into its queue again as it is.
            job.timeout -= self._allowed
            self._allowed = 0
        if self._is_not_ours(job, execution):
            given = () if execution is None else (execution,)
            forget_execution(self, job, *given)
        else:
            super().handle_job_failure(job, queue, *args, **kwargs)

    def _is_not_ours(self, job: Job, execution: Any) -> bool:
        if self._run is not None:
            return self._run.is_disowned
        if self.is_horse or self._stopped_job_id == job.id:
            return False
        # The horse was killed right after the job was parked.
        run = execution or getattr(self, "execution", None)
        return run is not None and was_parked(job, run.id)

    def _listen(self) -> None:
        if self._report is None:
            return
        for fact in self._report.heard():
            if "lease" in fact:
                self._lease_name = fact["lease"]
            if "waits" in fact and self._job is not None:
                self._allow(self._job, math.ceil(fact["waits"]))

    def _allow(self, job: Job, seconds: int) -> None:
        # A copy of the horse's job: beyond its timeout, the worker kills the horse.
        if job.timeout and job.timeout > 0:
            job.timeout += seconds
            self._allowed += seconds

    def _end_lease(self, job: Job) -> None:
        """End the lease that a horse has left, once that is proven dead."""
        if self._lease_name is None:
            return
        try:
            self.leases.release_dead(self._lease_name, job.id, patience=_FOR_PROOF)
        except StoreUnavailable as error:
            self.log.warning("Worker %s: %s", self.name, error)


class LeaseWorker(Leasing, Worker):
    """RQ's `Worker`, whose horses hold the leases."""


class LeaseSimpleWorker(Leasing, SimpleWorker):
    """RQ's `SimpleWorker`, which holds the leases itself."""


class LeaseSpawnWorker(Leasing, SpawnWorker):
    """RQ's `SpawnWorker`, whose horses hold the leases; RQ 3.0 and later."""
