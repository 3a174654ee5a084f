"""Where things are, and the settings of the Celery app."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Callable

#: One server and database for broker, results, RQ and leases, so that RQ can park.
REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
#: PostgreSQL if it says so, or else a file for SQLite.
DATABASE_URL = os.environ.get("DATABASE_URL", "sqlite:///ledger.sqlite3")
#: Seconds that a lease outlives its holder's last beat: short, so that the demo is.
TTL = 2.0
#: Seconds that a duplicate waits where its policy is to wait.
WAIT = 30.0

broker_url = result_backend = lease_url = REDIS_URL
broker_connection_retry_on_startup = True
# A worker takes what it can begin and leaves the rest to the others.
worker_prefetch_multiplier = 1
task_default_queue = "invoices"
lease_ttl = TTL
lease_wait = WAIT


def key_for(template: str) -> str | Callable[..., str]:
    """Return what makes two calls the same: the template, as a rule.

    With ``EXAMPLE_BREAK_LEASES`` set no two calls are the same, so that a test can
    show that the demo would notice if its leases excluded nobody.
    """
    if os.environ.get("EXAMPLE_BREAK_LEASES"):
        return lambda **_: f"{uuid4()}"
    return template
