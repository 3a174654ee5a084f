"""Wakes parked jobs whose lease ended without a release.

An idle RQ worker blocks for minutes, so this has a thread of its own. Of all workers
on one store, one sweeps in each period.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import TYPE_CHECKING

from task_lease.errors import StoreUnavailable
from task_lease.parking import Parking

if TYPE_CHECKING:
    from task_lease.client import Leases

logger = logging.getLogger("rq_lease")


class Sweeper:
    """A thread that sweeps until it is stopped.

    Args:
        leases: The leases beside which jobs may be parked.
        period: Seconds between two sweeps.
    """

    def __init__(self, leases: Leases, period: float) -> None:
        self._parking = Parking(leases)
        self._period = period
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="rq-lease-sweeper", daemon=True
        )

    def start(self) -> None:
        """Begin to sweep."""
        self._thread.start()

    def stop(self) -> None:
        """Sweep no more."""
        self._stopped.set()
        self._thread.join(self._period)

    def _run(self) -> None:
        while not self._stopped.wait(self._period * random.uniform(0.8, 1.2)):  # noqa: S311 - no secret
            try:
                if self._parking.takes_turn(self._period):
                    self._parking.sweep()
            except StoreUnavailable as error:
                logger.warning("Parked jobs cannot be looked after: %s", error)
            except Exception:
                # Without it, the jobs of a dead holder would wait for ever.
                logger.exception("The sweeper stumbled and goes on")
