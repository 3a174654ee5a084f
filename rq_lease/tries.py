"""How often a job came back so far, where it cannot be parked.

That is kept in a field of the job's own hash, which RQ does not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from task_lease.exclusive import Tries

if TYPE_CHECKING:
    from redis.client import Pipeline
    from rq.job import Job

_FIELD = "lease_tries"


@dataclass(frozen=True, slots=True)
class Comeback:
    """What a job carries that comes back later.

    Attributes:
        tries: How often it came back.
        number_of_retries: What RQ counted before the first time, since it counts each
            of ours as one of the function's own.
    """

    tries: Tries
    number_of_retries: int | None

    @classmethod
    def of(cls, job: Job) -> Comeback:
        """Take from a job what it carries, and let RQ's own count be what it was."""
        stored = job.connection.hget(job.key, _FIELD)
        if not isinstance(stored, (bytes, str)):
            return cls(Tries(), job.number_of_retries)
        job.connection.hdel(job.key, _FIELD)
        conflicts, quiet, number_of_retries = json.loads(stored)
        # Not None, which would not be stored over what is there.
        job.number_of_retries = number_of_retries or 0
        return cls(Tries(conflicts, quiet), number_of_retries)

    def note(self, job: Job, tries: Tries, pipeline: Pipeline | None = None) -> None:
        """Write down that the job will come back."""
        connection = job.connection if pipeline is None else pipeline
        carried = json.dumps([*tries, self.number_of_retries])
        connection.hset(job.key, _FIELD, carried)
