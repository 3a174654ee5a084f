"""Moments in words and signs, the same in the terminal and in the picture."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from example_project.stage.history import Moment


class Sign(NamedTuple):
    """How a kind of moment is shown.

    Attributes:
        character: What stands for it in the terminal.
        terminal: Its colour there.
        colour: Its colour in the picture.
        meaning: What the legends say.
    """

    character: str
    terminal: str
    colour: str
    meaning: str


SIGNS: Mapping[str, Sign] = {
    "conflict": Sign("◇", "yellow", "#b45309", "conflict: somebody holds it"),
    "takeover": Sign("▲", "green", "#15803d", "takeover"),
    "killed": Sign("✖", "red", "#111827", "kill -9"),
    "stopping": Sign("▽", "dim", "#4b5563", "SIGTERM"),
    "lost": Sign("!", "red", "#b91c1c", "lost: the task is told"),
    "refused": Sign("⊘", "red", "#b91c1c", "late write refused by the fence"),
}


def entry_of(lease: str) -> str:
    """Return the part of a lease's name behind its task: what it is about."""
    return lease.partition(":")[2]


def short(fence: int | None) -> str:
    """Return the digits of a fence in which neighbours differ."""
    return "none" if fence is None else f"…{fence % 10**8:08d}"


def describe(moment: Moment, holders: Mapping[int, str]) -> tuple[str, str] | None:
    """Return a moment's sign and what to tell of it, None if it is not worth a line.

    Args:
        moment: The moment.
        holders: The workers by the pids of their processes.
    """
    words = _WORDS.get(moment.kind)
    if words is None:
        return None
    text = words.format(
        worker=moment.worker,
        pid=moment.pid,
        other=holders.get(moment.other, f"pid {moment.other}"),
        entry=entry_of(moment.lease),
        fence=short(moment.fence),
        detail=moment.detail,
        other_fence=short(moment.other_fence),
    )
    if moment.kind == "acquired" and moment.seconds > _WAITED:
        text += f" after waiting {moment.seconds:.1f} s"
    sign = SIGNS.get(moment.kind)
    return (sign.character if sign else _PLAIN.get(moment.kind, "")), text


# Seconds from which on it is worth saying that somebody waited.
_WAITED = 0.2
_PLAIN = {"acquired": "▶", "released": "■", "paused": "‖", "resumed": "▷"}
_STOP, _CONT = signal.Signals.SIGSTOP.name, signal.Signals.SIGCONT.name
_WORDS = {
    "acquired": "{worker} holds {entry}, fence {fence}",
    "released": "{worker} is done with {entry}",
    "conflict": "{worker}: {entry} is held by {other}: {detail}",
    "parked": "{worker} parks a job beside {entry}",
    "handed": "{worker} hands {entry} to a parked job",
    "at risk": "{worker} is at risk to lose {entry}: {detail}",
    "lost": "{worker} has lost {entry} ({detail})",
    "takeover": "{worker} takes {entry} from {other}, which is proven dead",
    "told": "{worker}: LeaseLost is raised in the task for {detail}",
    "refused": "the ledger refuses {worker}'s fence {fence}: it has seen {other_fence}",
    "killed": "kill -9 of pid {pid}, {worker}, in the middle of {entry}",
    "paused": f"{_STOP} to pid {{pid}}, {{worker}}, in the middle of {{entry}}",
    "resumed": f"{_CONT} to pid {{pid}}, {{worker}}",
    "stopping": "{worker} is told to stop (SIGTERM)",
    "gone": "{worker} has ended",
}
