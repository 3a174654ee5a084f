"""What a scene is given: ways to wait for what shall happen, and to look at it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from example_project.stage.runs import Run, of_kind, runs_of
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import AsyncResult
    from redis import Redis
    from rq import Queue

    from example_project.ledger import Ledger
    from example_project.stage.crew import Crew
    from example_project.stage.history import Moment
    from example_project.stage.stage import Stage


@dataclass(frozen=True, slots=True)
class Play:
    """What the scenes are given.

    Attributes:
        stage: Tells what happens and keeps the score.
        crew: Starts and stops workers.
        ledger: The ledger.
        store: Where the leases are.
        reports: The queue of the RQ worker.
        results: Looks for the results of Celery tasks.
    """

    stage: Stage
    crew: Crew
    ledger: Ledger
    store: Redis
    reports: Queue
    results: Celery

    def runs(self, entry: str) -> list[Run]:
        """Return the runs for an entry."""
        return runs_of(self.stage.moments(), entry)

    def until_begun(self, entry: str, runs: int = 1) -> Run:
        """Return the latest run for an entry as soon as so many have begun."""

        def begun() -> list[Run]:
            found = self.runs(entry)
            return found if len(found) >= runs else []

        what = f"run {runs} for {entry} begins"
        return self.stage.wait_for(what, begun)[-1]

    def until_ended(self, entry: str, runs: int = 1) -> list[Run]:
        """Return the runs for an entry as soon as so many have come to their end."""

        def ended() -> list[Run]:
            found = self.runs(entry)
            return found if sum(run.ended < math.inf for run in found) >= runs else []

        return self.stage.wait_for(f"run {runs} for {entry} ends", ended)

    def until_kind(self, kind: str, run: Run) -> Moment:
        """Return what happened under the lease of a run, once it has."""

        def happened() -> list[Moment]:
            found = of_kind(self.stage.moments(), kind, run.lease)
            return [moment for moment in found if moment.pid == run.pid]

        return self.stage.wait_for(f"{run.worker} writes: {kind}", happened)[-1]

    def until_waited_for(self, run: Run) -> None:
        """Wait until somebody waits for the lease of a run."""
        queue = lease_keys(run.lease).queue
        what = f"somebody waits for {run.lease}"
        self.stage.wait_for(what, lambda: self.store.zcard(queue))

    def until_stored(self, sent: list[AsyncResult[Any]]) -> list[Any]:
        """Return the results of Celery tasks as soon as all are stored."""
        found = [self.results.AsyncResult(one.id) for one in sent]
        what = "the results are stored"
        self.stage.wait_for(what, lambda: all(result.ready() for result in found))
        return [result.result for result in found]
