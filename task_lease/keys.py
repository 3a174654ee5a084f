"""Every name that task-lease writes into Redis.

All keys of one lease share a hash tag, so they live in one slot of a cluster, and
what a user puts into a name can leave neither its slot nor the prefix.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from task_lease.errors import InvalidConfig

#: The version of what is stored is part of every name.
PREFIX = "tl1"

#: The index of the leases beside which something is parked.
PARKED_INDEX = f"{PREFIX}:parked"

#: Who looks after those, for a moment.
TURN = f"{PREFIX}:turn"

_READABLE = "_.:-/@=+,"
_LONGEST = 200
_HEAD = 160
_CACHED = 1024
_RULE = "must be text and must not be empty"


class LeaseKeys(NamedTuple):
    """The keys of one lease, all in one slot.

    Attributes:
        lease: The record of who holds it.
        fence: The floor of its fences. It stays after a run, until it expires.
        queue: Its waiters, first come, first served.
        waiters: How to wake each waiter, and until when it counts as alive.
        parked: What is parked beside it.
        handed: The parked job that is on its way to a worker.
    """

    lease: str
    fence: str
    queue: str
    waiters: str
    parked: str
    handed: str


def escape(name: str) -> str:
    """Return a lease's name as plain ASCII that is safe inside a key.

    Ordinary names stay as they are; everything else becomes ``%XX`` per byte of
    UTF-8. A name that gets too long is cut, and ends in ``~`` and a digest of all
    of it. Two names never have the same result.

    Raises:
        InvalidConfig: The name is empty or no text.
    """
    return _escape("name", name)


def lease_keys(name: str) -> LeaseKeys:
    """Return the keys of the lease with this name.

    Raises:
        InvalidConfig: The name is empty or no text.
    """
    try:
        return _cached_keys(name)
    except TypeError:
        # What cannot be hashed is no text.
        raise InvalidConfig("name", name, _RULE) from None


@lru_cache(maxsize=_CACHED)
def _cached_keys(name: str) -> LeaseKeys:
    return keys_of(_lease_key(name))


def keys_of(lease: str) -> LeaseKeys:
    """Return the keys of the lease with this first key."""
    return LeaseKeys(
        lease=lease,
        fence=f"{lease}:f",
        queue=f"{lease}:q",
        waiters=f"{lease}:w",
        parked=f"{lease}:p",
        handed=f"{lease}:h",
    )


def done_key(name: str, attempt_id: str) -> str:
    """Return the key that marks an attempt under this lease as done.

    Raises:
        InvalidConfig: The name or the attempt's id is empty or no text.
    """
    return f"{_lease_key(name)}:d:{_escape('attempt_id', attempt_id)}"


def wake_channel(process: str) -> str:
    """Return the channel on which one process is woken for all its waiters.

    Raises:
        InvalidConfig: The process is empty or no text.
    """
    return f"{PREFIX}:wake:{_escape('process', process)}"


def probe_key(nonce: str) -> str:
    """Return a key to find out with whether two clients share a database."""
    return f"{PREFIX}:probe:{nonce}"


def _lease_key(name: str) -> str:
    return f"{PREFIX}:{{{escape(name)}}}"


def _escape(setting: str, text: object) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidConfig(setting, text, _RULE)
    escaped = quote(text, safe=_READABLE, errors="surrogatepass").replace("~", "%7E")
    return escaped if len(escaped) <= _LONGEST else _cut(text, escaped)


def _cut(text: str, escaped: str) -> str:
    # No other name holds a "~", so a cut name never equals one that is whole.
    head = re.sub("%[0-9A-F]?$", "", escaped[:_HEAD])
    whole = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    return f"{head}~{whole.hexdigest()[:32]}"
