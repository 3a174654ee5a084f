"""Guard values in Redis or Valkey, each compared and set in one script."""

from __future__ import annotations

import math
import pkgutil
import re
from typing import TYPE_CHECKING, Any

from task_lease.config import check_seconds
from task_lease.errors import InvalidConfig, StaleFence
from task_lease.fencing.fenced import fence_of

if TYPE_CHECKING:
    import redis

    from task_lease.fencing.fenced import Fenced

_SCRIPT = (pkgutil.get_data("task_lease", "lua/fence.lua") or b"").decode()
_TAG = re.compile(r"[^{]*\{[^}]+\}")


class ValueGuard:
    """Refuses at a key whoever has been overtaken there.

    Beside each value stands a mark, ``<key>:fence`` in the same slot. It outlives the
    value, so that a deleted one does not forget whom to refuse.

    Args:
        client: The client of the values; it may be another than the leases' one.
        fence_life: Seconds that a mark outlives its last use; None is for ever.
            Once it has ended, every fence passes.

    Raises:
        InvalidConfig: If the life is not allowed.
    """

    def __init__(self, client: redis.Redis, *, fence_life: float | None = None) -> None:
        self._life = _milliseconds("fence_life", fence_life)
        self._call: Any = client.register_script(_SCRIPT)

    def claim(self, lease: Fenced, key: str) -> None:
        """Claim a key, before its value is read.

        Args:
            lease: Who wants to write; a run without a fence is always refused.
            key: The value's key.

        Raises:
            InvalidConfig: If the key has a brace that makes no hash tag.
            StaleFence: If the key has seen a higher fence.
        """
        self._run(lease, key, "claim")

    def set(
        self, lease: Fenced, key: str, value: str | bytes, *, ttl: float | None = None
    ) -> None:
        """Write a value, unless somebody with a higher fence has claimed its key.

        Args:
            lease: Who writes.
            key: The value's key; claim it before you read what you compute this from.
            value: What to write.
            ttl: Seconds that the value lives; None is for ever.

        Raises:
            InvalidConfig: If the key or the ttl is not allowed.
            StaleFence: If the key has seen a higher fence.
        """
        self._run(lease, key, "set", value, _milliseconds("ttl", ttl))

    def delete(self, lease: Fenced, key: str) -> None:
        """Delete a value, unless somebody with a higher fence has claimed its key.

        Args:
            lease: Who deletes.
            key: The value's key.

        Raises:
            InvalidConfig: If the key has a brace that makes no hash tag.
            StaleFence: If the key has seen a higher fence.
        """
        self._run(lease, key, "delete")

    def _run(
        self, lease: Fenced, key: str, verb: str, value: str | bytes = "", ttl: int = 0
    ) -> None:
        fence = fence_of(lease, key)
        args = [fence, lease.owner, self._life, verb, value, ttl]
        if seen := self._call(keys=[key, _mark_of(key)], args=args):
            raise StaleFence(key, fence, int(seen))


def _mark_of(key: str) -> str:
    if _TAG.match(key):
        return f"{key}:fence"
    if "{" in key or "}" in key:
        raise InvalidConfig("key", key, "must have no brace outside of a hash tag")
    return f"{{{key}}}:fence"


def _milliseconds(setting: str, seconds: float | None) -> int:
    if seconds is None:
        return 0
    return math.ceil(check_seconds(setting, seconds, shortest=0.001) * 1000)
