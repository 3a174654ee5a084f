"""What a work-horse tells its worker, so that the worker knows it when the horse dies.

It is a pipe that the worker opens before the horse begins. Lines are short, and what a
killed horse has written can still be read.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# How the horse, forked or started anew, finds the pipe.
_VARIABLE = "TASK_LEASE_HORSE_PIPE"
_MOST = 65_536


class HorseReport:
    """The report of one horse, for the worker that opens it."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        os.set_inheritable(self._writer, True)  # noqa: FBT003
        os.environ[_VARIABLE] = str(self._writer)
        self._unread = b""

    def heard(self) -> Iterator[dict[str, Any]]:
        """Yield the facts that were told since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._unread += os.read(self._reader, _MOST)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            # A name may be too long for the pipe.
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def close(self) -> None:
        """End it."""
        os.environ.pop(_VARIABLE, None)
        os.close(self._reader)
        os.close(self._writer)


def tell_worker(**facts: object) -> None:
    """Tell facts as the horse; without a report this does nothing."""
    writer = os.environ.get(_VARIABLE)
    if writer is None:
        return
    # Nobody reads, or not fast enough: the worker then knows less, and no harm is done.
    with contextlib.suppress(OSError):
        os.write(int(writer), json.dumps(facts).encode() + b"\n")
