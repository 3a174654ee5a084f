"""The Redis client that leases use, made from what the user gives.

A lease's promises rest on bounded requests that are repeated only where we know it.
So from a plain client we take a copy, with the same server, credentials and TLS but
with time limits and without retries of its own. Any other client is used as it is.
"""

from __future__ import annotations

import os
import threading
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import override

from task_lease.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds that a request may take, connecting included.
REQUEST_TIMEOUT = 5.0

# What belongs to the pool it was made for, or is ours to set.
_NOT_COPIED = (
    "cache",
    "decode_responses",
    "encoding",
    "event_dispatcher",
    "himport_registry",
    "maint_notifications",
    "oss_cluster",
    "orig_",
    "retry",
    "socket_connect_timeout",
    "socket_timeout",
)
# What a client tells the server about itself. Otherwise each new connection looks it
# up in files, which takes longer than all the rest, and each RQ horse makes a new one.
_LIBRARY: dict[str, Any] = (
    {"driver_info": redis.driver_info.DriverInfo()}
    if hasattr(redis, "driver_info")
    else {"lib_version": redis.__version__}
)
# As many as there are threads or greenlets; redis-py 8 would refuse the hundred-first.
_NO_LIMIT = 2**31 - 1
_SCHEMES = ("redis://", "rediss://", "unix://")


class _Pool(redis.ConnectionPool):
    """A pool that a forked child can use whatever a thread of its parent just did.

    redis-py renews a pool in the child, but under a lock that such a thread may have
    held at the fork, and then for ever.
    """

    @override
    def reset(self) -> None:
        self._lock = threading.RLock()
        super().reset()

    @override
    def _checkpid(self) -> None:
        if self.pid != os.getpid():
            self._fork_lock = threading.RLock()
        super()._checkpid()


def client_for(
    source: redis.Redis | str | Callable[[], redis.Redis], timeout: float
) -> redis.Redis:
    """Return a client for the store.

    Args:
        source: A client, a URL, or a callable that returns a client.
        timeout: Seconds that one request may take.

    Raises:
        InvalidConfig: If the source is none of these.
    """
    if isinstance(source, str):
        return _from_url(source, timeout)
    is_client = hasattr(source, "evalsha") and not isinstance(source, type)
    client: Any = source if is_client or not callable(source) else source()
    kind = type(client).__name__
    if not hasattr(client, "evalsha"):
        rule = "must be a Redis client, a URL, or a callable that returns a client"
        raise InvalidConfig("store", kind, rule)
    if iscoroutinefunction(client.execute_command):
        raise InvalidConfig("store", kind, "must be a client without async and await")
    return _bounded(client, timeout)


def _from_url(url: str, timeout: float) -> redis.Redis:
    # Nothing else of it is shown, nor the words of another error: anything may be, or
    # hold, a part of the password.
    scheme, separator, _ = url.partition("://")
    shown = f"{scheme[:16]}://…" if separator else "…"
    if not url.startswith(_SCHEMES):
        rule = f"must start with one of {', '.join(_SCHEMES)}"
        raise InvalidConfig("url", shown, rule)
    try:
        client = _bounded(redis.Redis.from_url(url), timeout)
        # Made, not connected: a wrong option shows now, and not at the first use.
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError, redis.RedisError):
        rule = "is no valid URL, or has an option that does not exist"
        raise InvalidConfig("url", shown, rule) from None
    return client


def _bounded(client: Any, timeout: float) -> redis.Redis:
    pool: Any = getattr(client, "connection_pool", None)
    if type(pool) not in (redis.ConnectionPool, redis.BlockingConnectionPool):
        return client  # type: ignore[no-any-return]
    kept = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if not name.startswith(_NOT_COPIED)
    }
    for name, value in _LIBRARY.items():
        kept.setdefault(name, value)
    copy = _Pool(
        connection_class=pool.connection_class,
        max_connections=_NO_LIMIT,
        **kept,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
    )
    ours = redis.Redis(connection_pool=copy)
    # Nobody else has the pool, so its connections end with the client.
    ours.auto_close_connection_pool = True
    return ours
