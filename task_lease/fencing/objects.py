"""Guard objects of a store that can put on a condition: files here, S3 beside it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import quote

from task_lease.errors import StaleFence
from task_lease.fencing.fenced import fence_of, passes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from task_lease.fencing.fenced import Fenced

# Others may put in between, each only once for each of its own claims and writes.
_MOST_TRIES = 100


class Stored(NamedTuple):
    """An object as it is stored, and the tag that changes with its content."""

    data: bytes
    tag: str


class ObjectStore(Protocol):
    """What a store must be able to do."""

    def get(self, key: str) -> Stored | None:
        """Return an object, None if there is none."""

    def put(self, key: str, data: bytes, *, replaces: str | None) -> str | None:
        """Put an object on a condition, checked and done in one step.

        Args:
            key: The object's key.
            data: What to put.
            replaces: The tag that it must have now; None is that there is none.

        Returns:
            The new tag, None if the condition did not hold.
        """


class _Envelope(NamedTuple):
    fence: int
    owner: str
    data: bytes | None

    def pack(self) -> bytes:
        head = {"fence": self.fence, "owner": self.owner, "gone": self.data is None}
        return json.dumps(head).encode() + b"\n" + (self.data or b"")


def _unpack(packed: bytes) -> _Envelope:
    line, _, data = packed.partition(b"\n")
    head = json.loads(line)
    return _Envelope(head["fence"], head["owner"], None if head["gone"] else data)


@dataclass(frozen=True, slots=True)
class ObjectGuard:
    """Refuses at an object whoever has been overtaken there.

    The fence stands in a first line of the object itself, for a tag of S3 changes
    only with the content: a mark beside it would leave the tag as it is, and the
    overtaken one could replace the object.

    Attributes:
        store: Where the objects are.

    Example:
        >>> guard = ObjectGuard(FileStore("/var/lib/reports"))  # doctest: +SKIP
        >>> report = guard.claim(lease, "2025-10")  # doctest: +SKIP
        >>> report.write((report.data or b"") + b"one more line")  # doctest: +SKIP
    """

    store: ObjectStore

    def claim(self, lease: Fenced, key: str) -> ClaimedObject:
        """Return an object, read after it was claimed; there need not be one.

        Args:
            lease: Who wants to write; a run without a fence is always refused.
            key: The object's key.

        Raises:
            StaleFence: If it has seen a higher fence.
            OSError: If the store changes faster than it can be claimed.
        """
        fence = fence_of(lease, key)
        for _ in range(_MOST_TRIES):
            stored = self.store.get(key)
            seen = _unpack(stored.data) if stored else None
            if seen and not passes(lease, seen.fence, seen.owner):
                raise StaleFence(key, fence, seen.fence)
            data = seen.data if seen else None
            packed = _Envelope(fence, lease.owner, data).pack()
            replaces = stored.tag if stored else None
            if tag := self.store.put(key, packed, replaces=replaces):
                return ClaimedObject(self.store, key, fence, lease.owner, data, tag)
        message = f"{key} was changed by others {_MOST_TRIES} times while claimed"
        raise OSError(message)

    def read(self, key: str) -> bytes | None:
        """Return an object's data without a claim, None if there is none."""
        stored = self.store.get(key)
        return _unpack(stored.data).data if stored else None


class ClaimedObject:
    """An object that was claimed.

    Attributes:
        data: What it held when it was claimed, or what was written since; None if it
            is not there.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        fence: int,
        owner: str,
        data: bytes | None,
        tag: str,
    ) -> None:
        self.data = data
        self._store, self._key, self._tag = store, key, tag
        self._fence, self._owner = fence, owner

    def write(self, data: bytes) -> None:
        """Replace the object, unless it was claimed with a higher fence.

        Raises:
            StaleFence: If it was, or was changed by another of the same owner.
        """
        self._put(data)

    def delete(self) -> None:
        """Leave only the fence, unless it was claimed with a higher one.

        Raises:
            StaleFence: If it was, or was changed by another of the same owner.
        """
        self._put(None)

    def _put(self, data: bytes | None) -> None:
        packed = _Envelope(self._fence, self._owner, data).pack()
        tag = self._store.put(self._key, packed, replaces=self._tag)
        if tag is None:
            stored = self._store.get(self._key)
            if stored is None or stored.data != packed:
                seen = _unpack(stored.data).fence if stored else None
                raise StaleFence(self._key, self._fence, seen)
            # A repeated request found that the first one had been carried out.
            tag = stored.tag
        self._tag, self.data = tag, data


class FileStore:
    """Objects as files of a folder, on a filesystem that all writers share.

    Each is replaced by an atomic rename, under a lock that ends with its process;
    what is read is always whole.

    Args:
        folder: Where the files are; it is made if it is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> Stored | None:
        """Return an object, None if there is none."""
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        return Stored(data, hashlib.sha256(data).hexdigest())

    def put(self, key: str, data: bytes, *, replaces: str | None) -> str | None:
        """Put an object if it has this tag, None for not there; return the new tag."""
        with self._alone():
            stored = self.get(key)
            if (stored.tag if stored else None) != replaces:
                return None
            self._replace(self._path(key), data)
        return hashlib.sha256(data).hexdigest()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _replace(self, path: Path, data: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(name).unlink()
            raise

    def _path(self, key: str) -> Path:
        # Nothing that a key holds leads out of the folder, or to a file of ours.
        return self._folder / f"={quote(key, safe='')}"
