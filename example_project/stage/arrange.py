"""From the moments of a demo to what is drawn of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from example_project.stage.timeline import Panel, Strip, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from example_project.stage.history import Moment

# Strips of a lane that are closer than this part of the panel stand in two rows.
_GAP = 0.05
# What a word takes of it.
_WORD = 0.15
# Seconds of waiting that are worth a line; a first connection takes some, too.
_WAITED = 0.2


def arrange(moments: Sequence[Moment]) -> Timeline:
    """Return what is to be drawn of moments, which are in the order of time."""
    workers = sorted({moment.worker for moment in moments if moment.worker})
    present = {worker: _presence(moments, worker) for worker in workers}
    return Timeline(workers, present, [_panel(scene) for scene in _scenes(moments)])


def _presence(moments: Sequence[Moment], worker: str) -> tuple[float, float]:
    ready = [m.at for m in moments if m.worker == worker and m.kind == "ready"]
    gone = [m.at for m in moments if m.worker == worker and m.kind == "gone"]
    return min(ready, default=moments[0].at), min(gone, default=moments[-1].at)


def _scenes(moments: Iterable[Moment]) -> list[list[Moment]]:
    scenes: list[list[Moment]] = []
    plays = False
    for moment in moments:
        if moment.kind == "scene":
            scenes.append([])
            plays = True
        if plays:
            scenes[-1].append(moment)
        plays = plays and moment.kind != "verdict"
    return scenes


def _panel(moments: Sequence[Moment]) -> Panel:
    first, last = moments[0], moments[-1]
    panel = Panel(title=first.detail, start=first.at, end=last.at)
    if last.kind == "verdict":
        panel.headline, panel.shown = last.detail, bool(last.seconds)
    panel.released = {(m.lease, m.fence) for m in moments if m.kind == "released"}
    for moment in moments:
        note = _NOTES.get(moment.kind)
        if note is not None:
            note(panel, moment)
    for strip in panel.strips:
        strip.end_holding(panel.end, "over")
        if strip.paused:
            strip.paused = (strip.paused[0], min(strip.paused[1], panel.end))
    _put_into_rows(panel)
    return panel


def _note_acquired(panel: Panel, moment: Moment) -> None:
    strip = _find_parked(panel, moment)
    if strip is None:
        strip = _add_strip(panel, moment)
        if moment.seconds > _WAITED:
            strip.start = max(moment.at - moment.seconds, panel.start)
            strip.mark(strip.start, "conflict")
    before = [s for s in panel.strips if s.lease == moment.lease and s.held]
    if before and (before[-1].lease, before[-1].fence) not in panel.released:
        strip.mark(moment.at, "takeover")
    for other in before:
        # A release is told a moment after it happened.
        other.end_holding(moment.at, "followed")
    strip.pid, strip.fence = moment.pid, moment.fence
    strip.held = (moment.at, moment.at)
    strip.end = max(strip.end, moment.at)


def _note_conflict(panel: Panel, moment: Moment) -> None:
    if _find_parked(panel, moment) is None:
        _add_strip(panel, moment).mark(moment.at, "conflict")


def _note_released(panel: Panel, moment: Moment) -> None:
    for strip in _find_held(panel, moment):
        strip.end_holding(moment.at, moment.kind)


def _note_lost(panel: Panel, moment: Moment) -> None:
    for strip in _find_held(panel, moment):
        strip.end_holding(moment.at, moment.kind)
        strip.mark(moment.at, moment.kind)


def _note_killed(panel: Panel, moment: Moment) -> None:
    for strip in _find_process(panel, moment):
        strip.end_holding(moment.at, moment.kind)
        strip.mark(moment.at, moment.kind)


def _note_paused(panel: Panel, moment: Moment) -> None:
    for strip in _find_process(panel, moment):
        strip.paused = (moment.at, panel.end)


def _note_resumed(panel: Panel, moment: Moment) -> None:
    for strip in _find_process(panel, moment):
        if strip.paused:
            strip.paused = (strip.paused[0], moment.at)
            strip.end = max(strip.end, moment.at)


def _note_renewed(panel: Panel, moment: Moment) -> None:
    for strip in _find_held(panel, moment):
        strip.beats.append(moment.at)


def _note_stopping(panel: Panel, moment: Moment) -> None:
    strip = _add_strip(panel, moment)
    strip.mark(moment.at, moment.kind)
    # Its meaning is written beside it.
    strip.end += (panel.end - panel.start) * _WORD


_NOTES: Mapping[str, Callable[[Panel, Moment], None]] = {
    "acquired": _note_acquired,
    "conflict": _note_conflict,
    "parked": _note_conflict,
    "renewed": _note_renewed,
    "released": _note_released,
    "lost": _note_lost,
    "refused": _note_lost,
    "killed": _note_killed,
    "paused": _note_paused,
    "resumed": _note_resumed,
    "stopping": _note_stopping,
}


def _add_strip(panel: Panel, moment: Moment) -> Strip:
    strip = Strip(
        worker=moment.worker,
        pid=moment.pid,
        id=moment.id,
        lease=moment.lease,
        start=moment.at,
        end=moment.at,
    )
    panel.strips.append(strip)
    return strip


def _find_parked(panel: Panel, moment: Moment) -> Strip | None:
    """Return the strip of a task that came before and holds nothing yet."""
    about = (moment.worker, moment.lease, moment.id)
    for strip in panel.strips:
        if (strip.worker, strip.lease, strip.id) == about and not strip.held:
            return strip
    return None


def _find_held(panel: Panel, moment: Moment) -> list[Strip]:
    about = (moment.lease, moment.fence)
    return [s for s in panel.strips if s.held and (s.lease, s.fence) == about]


def _find_process(panel: Panel, moment: Moment) -> list[Strip]:
    about = (moment.lease, moment.pid)
    return [s for s in panel.strips if s.held and (s.lease, s.pid) == about]


def _put_into_rows(panel: Panel) -> None:
    gap = (panel.end - panel.start) * _GAP
    ends: dict[str, list[float]] = {}
    for strip in sorted(panel.strips, key=lambda strip: strip.start):
        rows = ends.setdefault(strip.worker, [])
        free = [row for row, end in enumerate(rows) if end + gap <= strip.start]
        strip.row = free[0] if free else len(rows)
        rows[strip.row : strip.row + 1] = [strip.end]
