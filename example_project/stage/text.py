"""The timeline in characters, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from example_project.stage.words import SIGNS, entry_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from example_project.stage.timeline import Panel, Strip, Timeline

_COLUMNS = 66
_GUTTER = 11
_STEPS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
_MOST_STEPS = 7
_HELD, _WAITS, _PAUSED = "━", "·", "░"


def chart(timeline: Timeline, paint: Callable[[str, str], str]) -> Iterator[str]:
    """Yield the lines of a timeline.

    Args:
        timeline: What to show.
        paint: Gives a text a colour.
    """
    for panel in timeline.panels:
        number, _, title = panel.title.partition(" ")
        yield ""
        yield paint(f" {number}  {title.partition(':')[0]}", "bold")
        yield paint(_axis(panel), "dim")
        for worker in timeline.workers:
            for row in range(panel.rows(worker)):
                label = worker if row == 0 else ""
                yield f" {label:<{_GUTTER - 1}}{_row(panel, worker, row, paint)}"
    yield ""
    signs = [f"{sign.character} {sign.meaning}" for sign in SIGNS.values()]
    yield paint(f" {_HELD} holds   {_WAITS} waits   {_PAUSED} paused", "dim")
    for first in range(0, len(signs), 3):
        yield paint(f" {'   '.join(signs[first : first + 3])}", "dim")


def _column(panel: Panel, at: float) -> int:
    part = (at - panel.start) / max(panel.end - panel.start, 0.1)
    return min(max(int(part * _COLUMNS), 0), _COLUMNS - 1)


def _axis(panel: Panel) -> str:
    seconds = panel.end - panel.start
    step = next((s for s in _STEPS if seconds / s <= _MOST_STEPS), 60.0)
    line = [" "] * (_GUTTER + _COLUMNS + 8)
    for number in range(int(seconds / step) + 1):
        label = f"{number * step:g}" + ("" if number else " s")
        first = _GUTTER + _column(panel, panel.start + number * step)
        line[first : first + len(label)] = label
    return "".join(line).rstrip()


def _row(panel: Panel, worker: str, row: int, paint: Callable[[str, str], str]) -> str:
    cells = [" "] * _COLUMNS
    for strip in panel.strips:
        if (strip.worker, strip.row) == (worker, row):
            _fill(cells, panel, strip)
    for strip in panel.strips:
        if (strip.worker, strip.row) == (worker, row):
            _put_signs(cells, panel, strip)
    colours = {sign.character: sign.terminal for sign in SIGNS.values()}
    return "".join(paint(cell, colours.get(cell, "cyan")) for cell in cells).rstrip()


def _fill(cells: list[str], panel: Panel, strip: Strip) -> None:
    if not strip.lease:
        return
    start, end = strip.held or (strip.end, strip.end)
    _draw(cells, panel, (strip.start, start), _WAITS)
    if not strip.held:
        return
    _draw(cells, panel, (start, end), _HELD)
    if strip.paused:
        _draw(cells, panel, strip.paused, _PAUSED)
    first, last = _column(panel, start), _column(panel, end)
    entry = entry_of(strip.lease)
    for label in (f" {entry} ", f" {entry.rpartition(':')[2]} "):
        if len(label) + 3 <= last - first:
            cells[first + 2 : first + 2 + len(label)] = label
            return


def _draw(
    cells: list[str], panel: Panel, span: tuple[float, float], character: str
) -> None:
    first, last = (_column(panel, at) for at in span)
    cells[first : last + 1] = character * (last + 1 - first)


def _put_signs(cells: list[str], panel: Panel, strip: Strip) -> None:
    last = -1
    for mark in sorted(strip.marks, key=lambda mark: mark.at):
        last = max(_column(panel, mark.at), last + 1)
        if last < len(cells):
            cells[last] = SIGNS[mark.kind].character
