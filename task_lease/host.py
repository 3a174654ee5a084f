"""Which process this is, and whether the process of a record is proven dead.

"Proven" is one-sided: whatever cannot be read, or does not fit, is no proof, and
the lease then simply runs out. A proof needs Linux and a record that was written
on this very kernel, in this PID and time namespace. A virtual machine or a process
that was copied or restored as a whole cannot be told from its original.
"""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from task_lease.errors import Holder

_PROC: Final = Path("/proc")
# No Linux kernel gives out a higher process number.
_HIGHEST_PID: Final = 2**22


class ProcessIdentity(NamedTuple):
    """What tells one process from all others, as a holder's record keeps it.

    Attributes:
        host: The host's name, for people.
        identity: A digest that two processes share only if they see each other
            under the same numbers; empty where no death can be proven.
        pid: The process number.
        start: When the process started, in raw clock ticks; 0 if unknown.
        group: Whether the process leads a process group of its own.
    """

    host: str
    identity: str
    pid: int
    start: int
    group: bool


class _Stat(NamedTuple):
    """The part of a process's ``stat`` file that decides over life and death."""

    state: bytes
    threads: int
    start: int

    @property
    def is_dead(self) -> bool:
        # A first thread that has ended is a zombie while others work on. The
        # kernel reads the state before it counts the threads, the zombie among
        # them, so one read is enough: no thread can slip in between.
        return self.state in {b"Z", b"X"} and self.threads == 1


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process, cheaply."""
    # A process may get a group of its own at any time: RQ's horse does so only
    # after the fork.
    return _identify(os.getpid(), os.getpgrp())


def is_proven_dead(holder: Holder) -> bool:
    """Return whether the process that the record names has certainly ended.

    Args:
        holder: A record as read from the store; it is not trusted.
    """
    body = _recorded_body(holder)
    try:
        return body is not None and _has_ended(body)
    except (OSError, ValueError, IndexError):
        return False


@lru_cache(maxsize=2)
def _identify(pid: int, group: int) -> ProcessIdentity:
    host = socket.gethostname()
    try:
        stat = _read_stat(pid)
        start = stat.start if stat else 0
        identity = _digest_host(host) if start > 0 and _proc_shows_as(pid) else ""
    except (OSError, ValueError, IndexError):
        start, identity = 0, ""
    return ProcessIdentity(host, identity, pid, start, group == pid)


# The process number alone would not do: a descendant can get the number of an
# ancestor that has ended, and would find that one's identity in its memory.
os.register_at_fork(after_in_child=_identify.cache_clear)


def _proc_shows_as(pid: int) -> bool:
    """Return whether ``/proc`` is of our PID namespace: one number, and that ours."""
    status = (_PROC / "self/status").read_bytes()
    return b"\nNSpid:\t%d\n" % pid in status


def _digest_host(host: str) -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_bytes().decode().strip()
    pids = (_PROC / "self/ns/pid").readlink()
    try:
        clock = (_PROC / "self/ns/time").readlink()
    except FileNotFoundError:  # a kernel without time namespaces
        clock = None
    seen_from = f"{boot}\n{pids}\n{clock}\n{host}"
    return sha256(os.fsencode(seen_from)).hexdigest()[:32]


def _recorded_body(record: object) -> ProcessIdentity | None:
    """Return the recorded process if it is one of this host's, and well-formed."""
    here = this_process()
    if not isinstance(record, dict) or record.get("identity") != here.identity:
        return None
    pid, start, group = (record.get(field) for field in ("pid", "start", "group"))
    if type(pid) is not int or type(start) is not int or type(group) is not bool:
        return None
    if not here.identity or not 0 < pid <= _HIGHEST_PID or start <= 0:
        return None
    return ProcessIdentity(here.host, here.identity, pid, start, group)


def _has_ended(body: ProcessIdentity) -> bool:
    stat = _read_stat(body.pid)
    if stat is not None and stat.start != body.start:
        # The number was given out again, which the kernel does only when neither
        # a process nor a group bears it any more.
        return True
    # The body may have made its group after the record was written.
    return _is_dead(body.pid, stat) and _group_has_ended(body.pid)


def _group_has_ended(group: int) -> bool:
    # -1 would stand for "every process", not for a group.
    if group > 1 and not _exists(-group):
        return True
    # What is left are zombies, or not. A mount that hides the processes of other
    # users cannot tell.
    if b"hidepid=" in (_PROC / "self/mountinfo").read_bytes():
        return False
    # A member can leave a child behind and end while we look, and the child is not
    # in the list. So only those count as dead who were dead before it was made.
    dead = _dead_members(group)
    return dead is not None and dead == _dead_members(group)


def _dead_members(group: int) -> dict[int, _Stat] | None:
    """Return the group's zombies, or None if a member lives or may have lived."""
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()]
    dead = {}
    for pid in pids:
        try:
            is_member = os.getpgid(pid) == group
        except ProcessLookupError:
            return None
        if is_member:
            stat = _read_stat(pid)
            if stat is None or not stat.is_dead:
                return None
            dead[pid] = stat
    return dead


def _is_dead(pid: int, stat: _Stat | None) -> bool:
    # No file is not yet no process: a mount can hide those of other users.
    return not _exists(pid) if stat is None else stat.is_dead


def _exists(target: int) -> bool:
    """Return whether there is such a process, or such a group if negative."""
    try:
        os.kill(target, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read_stat(pid: int) -> _Stat | None:
    # Below "task", for emulators put numbers of their own in place of a process's
    # own "/proc/<pid>/stat", which then differ from what everybody else reads.
    path = _PROC / str(pid) / "task" / str(pid) / "stat"
    try:
        text = path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name may itself contain blanks and parentheses.
    fields = text[text.rindex(b")") + 1 :].split()
    return _Stat(fields[0], int(fields[17]), int(fields[19]))
