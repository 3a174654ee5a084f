"""Processes by session, and a watchdog that outlives the tests.

Everything the tests start leads a session of its own, so that ending it reaches
its children too, also an RQ work-horse in a process group of its own. The watchdog
(this file, run as a program) ends the sessions of a test process that was killed.
Ctrl-C does not reach it, for it leads a session as well.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

#: States of a process that only waits to be reaped.
DEAD = frozenset("ZX")


class Stat(NamedTuple):
    """What the kernel says about one process."""

    pid: int
    state: str
    parent: int
    session: int
    started: int


def read_stat(pid: int) -> Stat | None:
    """Return the process's state, or None if there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name may hold spaces and brackets; what follows it does not.
    fields = line.rpartition(b")")[2].split()
    state = fields[0].decode()
    return Stat(pid, state, int(fields[1]), int(fields[3]), int(fields[19]))


def list_living() -> list[Stat]:
    """Return every process that is not dead, zombies left out."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    stats = [read_stat(pid) for pid in pids]
    return [stat for stat in stats if stat and stat.state not in DEAD]


def list_children(parent: int) -> list[int]:
    """Return the pids of the living direct children."""
    return [stat.pid for stat in list_living() if stat.parent == parent]


def list_members(leader: int) -> list[int]:
    """Return the pids of the living processes of a session."""
    return [stat.pid for stat in list_living() if stat.session == leader]


def signal_each(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_session(leader: int, started: int, timeout: float = 10.0) -> None:
    """Kill a session until nothing of it lives.

    Args:
        leader: The pid that the session began with.
        started: The leader's start time, so that a stranger who was given the
            same pid later is left alone.
        timeout: Seconds after which this gives up.

    Raises:
        TimeoutError: Something of the session still lives.
    """
    stat = read_stat(leader)
    if stat and stat.started != started:
        return
    deadline = time.monotonic() + timeout
    while members := list_members(leader):
        if time.monotonic() > deadline:
            message = f"processes {members} survive SIGKILL"
            raise TimeoutError(message)
        signal_each(members, signal.SIGKILL)
        time.sleep(0.005)


def watch(leader: int, started: int) -> None:
    """Have the watchdog end this session when the calling process dies."""
    _tell_watchdog(f"watch {leader} {started}\n")


def forget(leader: int, started: int) -> None:
    """Take back `watch`."""
    _tell_watchdog(f"forget {leader} {started}\n")


def _tell_watchdog(line: str) -> None:
    pipe = _start_watchdog(os.getpid()).stdin
    if pipe is None:  # pragma: no cover - it was started with one
        raise BrokenPipeError
    pipe.write(line.encode())
    pipe.flush()


@functools.cache
def _start_watchdog(owner: int) -> subprocess.Popen[bytes]:
    # One for each pid, so that a forked child does not write to its parent's pipe.
    watchdog = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(owner)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(_dismiss_watchdog, owner, watchdog)
    return watchdog


def _dismiss_watchdog(owner: int, watchdog: subprocess.Popen[bytes]) -> None:
    if owner == os.getpid():
        watchdog.communicate(b"\n")


def guard(owner: int, lines: BinaryIO) -> None:
    """Read sessions from `lines` until the owner is gone, then end them all.

    The end of the pipe alone would not do, for a child that the owner forked may
    keep its other end open; nor would the owner's death, for there may be lines
    left to read. The pipe is unbuffered, or `select` would miss what is buffered.
    """
    watched: set[tuple[int, int]] = set()
    while True:
        if not select.select([lines], [], [], 0.1)[0]:
            if os.getppid() != owner:
                break
            continue
        words = lines.readline().decode().split()
        if not words:
            break
        session = (int(words[1]), int(words[2]))
        (watched.add if words[0] == "watch" else watched.discard)(session)
    for leader, started in watched:
        end_session(leader, started)


if __name__ == "__main__":
    with open(0, "rb", buffering=0) as standard_input:
        guard(int(sys.argv[1]), standard_input)
