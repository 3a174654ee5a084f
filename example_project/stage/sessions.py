"""Sessions of processes, and a watchdog that ends them when the demo is killed.

Everything that the demo starts leads a session of its own, so that ending it also
reaches a work-horse of RQ, which has a process group of its own. The watchdog is this
file, run as a program; it leads a session, too, so that no Ctrl-C reaches it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PROC = Path("/proc")


def members(leader: int) -> list[int]:
    """Return the living processes of the session that a process began."""
    if not _PROC.is_dir():  # not Linux: the process group is most of it
        return [leader]
    found = [int(path.name) for path in _PROC.glob("[0-9]*")]
    return [pid for pid in found if _session(pid) == leader]


def _session(pid: int) -> int | None:
    """Return the session of a process, None if it is dead."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # After the program's name, which may hold spaces and brackets.
    state, _, _, session = stat.rpartition(b")")[2].split()[:4]
    return None if state in b"ZX" else int(session)


def end(leader: int, patience: float = 5.0) -> None:
    """Kill what is left of a session.

    Args:
        leader: The process that the session began with.
        patience: Seconds after which this gives up.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and (pids := members(leader)):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if pids == [leader] and not _PROC.is_dir():
            return
        time.sleep(0.01)


class Watchdog:
    """A process that outlives this one, and then ends the sessions it was told of."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def watch(self, leader: int) -> None:
        """End this session when the calling process has died."""
        self._tell(leader)

    def forget(self, leader: int) -> None:
        """Take back `watch`."""
        self._tell(-leader)

    def dismiss(self) -> None:
        """Let it end what it still watches, and itself."""
        self._process.communicate()

    def _tell(self, word: int) -> None:
        pipe = self._process.stdin
        if pipe is None:  # pragma: no cover - it was started with one
            raise BrokenPipeError
        pipe.write(b"%d\n" % word)
        pipe.flush()


def _guard() -> None:
    # The pipe ends with the process that holds its other end, however that dies.
    watched: set[int] = set()
    for line in sys.stdin:
        word = int(line)
        (watched.add if word > 0 else watched.discard)(abs(word))
    for leader in watched:
        end(leader)


if __name__ == "__main__":
    _guard()
