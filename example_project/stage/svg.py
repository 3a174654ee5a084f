"""The timeline as a picture: plain SVG, with nothing to load from elsewhere."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from example_project.stage.shapes import (
    INK,
    LABEL,
    PALE,
    REACH,
    Font,
    bar,
    beat,
    dots,
    sign,
    text,
    width_of,
)
from example_project.stage.words import SIGNS, entry_of, short

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from example_project.stage.timeline import Panel, Strip, Timeline

_WIDTH, _MARGIN, _GUTTER, _BETWEEN = 900.0, 18.0, 72.0, 18.0
_PANELS_PER_ROW = 3
_ROW, _BAR, _PADDING = 21.0, 16.0, 6.0
_LINE, _LANE, _HATCH = "#d1d5db", "#f3f4f6", "url(#hatch)"
_GOOD, _BAD = "#15803d", "#b91c1c"
_COLOURS = {
    "invoice": "#2563a8",
    "balance": "#0f766e",
    "month": "#7c4d9e",
    "payments": "#8a6116",
    "statements": "#475a91",
}
_OTHER = "#64748b"
_STEPS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
_MOST_STEPS = 6
_WHITE = Font(size=10, fill="#fff")
_AXIS = Font(size=10, fill=PALE, anchor="middle")
_FONTS = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"
_DEFINITIONS = """\
<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff" \
fill-opacity="0.55"/><rect width="2.4" height="6" fill="#374151"/></pattern></defs>"""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where a panel is drawn.

    Attributes:
        left: Its left edge.
        width: Its width.
        start: The instant at its left edge.
        seconds: How long it lasts.
        lanes: The upper and the lower edge of each worker's lane.
    """

    left: float
    width: float
    start: float
    seconds: float
    lanes: dict[str, tuple[float, float]]

    def x(self, at: float) -> float:
        """Return the place of an instant."""
        return self.left + self.width * (at - self.start) / self.seconds

    def y(self, strip: Strip) -> float:
        """Return the middle of a strip's row."""
        return self.lanes[strip.worker][0] + _PADDING + _ROW * (strip.row + 0.5)


def draw(timeline: Timeline, ttl: float) -> str:
    """Return the timeline as SVG.

    Args:
        timeline: What to draw.
        ttl: Seconds that a lease outlives its last beat.
    """
    title = "What the leases did"
    about = (
        "A run of the demo: a lane for each worker, a bar for each lease that it held. "
        f"A lease ends {ttl:g} s after its last beat."
    )
    parts = [
        text(_MARGIN, 26, title, Font(size=17, weight=600)),
        text(_MARGIN, 44, about, Font(fill=PALE)),
    ]
    y = 58.0
    for first in range(0, len(timeline.panels), _PANELS_PER_ROW):
        panels = timeline.panels[first : first + _PANELS_PER_ROW]
        y = _add_row(parts, timeline, panels, y) + 26
    y = _add_legend(parts, timeline, y)
    size = f'width="{_WIDTH:.0f}" height="{y:.0f}"'
    box = f'viewBox="0 0 {_WIDTH:.0f} {y:.0f}" role="img" font-family="{_FONTS}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>',
        f"<title>{title}</title><desc>{about}</desc>",
        f'{_DEFINITIONS}<rect {size} fill="#fff"/>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _add_row(
    parts: list[str], timeline: Timeline, panels: Sequence[Panel], top: float
) -> float:
    """Add panels side by side, and return where they end."""
    room = _WIDTH - 2 * _MARGIN - _GUTTER + _BETWEEN
    width = room / len(panels) - _BETWEEN
    lefts = [_MARGIN + _GUTTER + room / len(panels) * n for n in range(len(panels))]
    captions = [
        _add_caption(parts, panel, left, top, width)
        for panel, left in zip(panels, lefts, strict=True)
    ]
    lanes = _lanes(timeline, panels, max(captions) + 10)
    for worker, (upper, lower) in lanes.items():
        name = Font(size=12, weight=600)
        parts.append(text(_MARGIN, (upper + lower) / 2 + 4, worker, name))
    for panel, left in zip(panels, lefts, strict=True):
        seconds = max(panel.end - panel.start, 0.1)
        frame = _Frame(left, width, panel.start, seconds, lanes)
        parts.extend(_panel(timeline, panel, frame))
    return max((lower for _, lower in lanes.values()), default=top) + 16


def _add_caption(
    parts: list[str], panel: Panel, left: float, y: float, width: float
) -> float:
    """Add a panel's title and what came out, and return where they end."""
    number, _, title = panel.title.partition(" ")
    middle = Font(fill="#fff", weight=600, anchor="middle")
    name = Font(size=13, weight=600)
    parts += [
        f'<circle cx="{left + 9:.1f}" cy="{y + 8:.1f}" r="9" fill="{INK}"/>',
        text(left + 9, y + 12, number, middle),
        text(left + 25, y + 12, title.partition(":")[0], name),
    ]
    y += 30
    for finding in filter(None, panel.headline.split("; ")):
        shown = not finding.startswith("NOT SHOWN")
        tick = Font(fill=_GOOD if shown else _BAD, weight=700)
        parts.append(text(left, y, "✓" if shown else "✗", tick))
        for line in textwrap.wrap(finding, int((width - 15) / width_of("m"))):
            parts.append(text(left + 15, y, line))
            y += 15
    return y - 8


def _lanes(
    timeline: Timeline, panels: Sequence[Panel], top: float
) -> dict[str, tuple[float, float]]:
    """Return the edges of a lane for every worker that was there."""
    lanes: dict[str, tuple[float, float]] = {}
    for worker in timeline.workers:
        start, end = timeline.present[worker]
        if any(start < panel.end and end > panel.start for panel in panels):
            rows = max(1, *(panel.rows(worker) for panel in panels))
            lanes[worker] = (top, top + rows * _ROW + 2 * _PADDING)
            top = lanes[worker][1] + 6
    return lanes


def _panel(timeline: Timeline, panel: Panel, frame: _Frame) -> Iterator[str]:
    for worker, (upper, lower) in frame.lanes.items():
        start, end = timeline.present[worker]
        start, end = max(start, panel.start), min(end, panel.end)
        if start < end:
            yield bar(frame.x(start), frame.x(end), upper, lower - upper, _LANE)
    yield from _ticks(frame)
    for strip in panel.strips:
        yield from _strip(frame, strip)
    # Signs last, so that no bar hides one.
    for strip in panel.strips:
        yield from _signs(frame, strip)


def _ticks(frame: _Frame) -> Iterator[str]:
    step = next((s for s in _STEPS if frame.seconds / s <= _MOST_STEPS), 60.0)
    edges = [edge for lane in frame.lanes.values() for edge in lane]
    if not edges:
        return
    for number in range(math.floor(frame.seconds / step) + 1):
        at = number * step
        x, bottom = frame.x(frame.start + at), max(edges)
        line = f"M{x:.1f} {min(edges):.1f} V{bottom + 3:.1f}"
        yield f'<path d="{line}" stroke="{_LINE}"/>'
        yield text(x, bottom + 14, f"{at:g}" if number else "0 s", _AXIS)


def _strip(frame: _Frame, strip: Strip) -> Iterator[str]:
    if not strip.lease:
        return
    colour, y = _colour_of(entry_of(strip.lease)), frame.y(strip)
    start, end = strip.held or (strip.end, strip.end)
    if start > strip.start:
        yield dots(frame.x(strip.start), frame.x(start), y, colour)
    if strip.held is None:
        return
    left, right, top = frame.x(start), frame.x(end), y - _BAR / 2
    yield bar(left, right, top, _BAR, colour, _tooltip(frame, strip))
    for at in strip.beats:
        yield beat(frame.x(at), y + 5.4)
    if strip.paused:
        left, right = map(frame.x, strip.paused)
        yield bar(left, right, top, _BAR, _HATCH)
        yield bar((left + right) / 2 - 24, (left + right) / 2 + 24, y - 6.5, 13, "#fff")
        yield text((left + right) / 2, y + 3.5, "paused", Font(10, anchor="middle"))
    yield from _label(frame, strip, start, end)


def _label(frame: _Frame, strip: Strip, start: float, end: float) -> Iterator[str]:
    """Name a bar, if there is room between its signs."""
    left = frame.x(start) + (REACH + 3 if strip.start < start else 5)
    right = frame.x(min(end, strip.paused[0]) if strip.paused else end) - 3
    if strip.ending == "killed":
        right -= REACH
    entry = entry_of(strip.lease)
    for name in (entry, entry.rpartition(":")[2]):
        if width_of(name, LABEL) <= right - left:
            yield text(left, frame.y(strip) + 2.5, name, _WHITE)
            return


def _signs(frame: _Frame, strip: Strip) -> Iterator[str]:
    marks = sorted(strip.marks, key=lambda mark: mark.at)
    right = frame.left + frame.width - REACH * (2 * len(marks) - 1)
    x = -math.inf
    for number, mark in enumerate(marks):
        # Side by side where they would hide each other, and all inside.
        x = max(frame.x(mark.at), frame.left + REACH, x + 2 * REACH)
        x = min(x, right + 2 * REACH * number)
        yield sign(mark.kind, x, frame.y(strip))
        if not strip.lease:
            meaning = SIGNS[mark.kind].meaning
            yield text(x + REACH + 3, frame.y(strip) + 3.5, meaning, LABEL)


def _tooltip(frame: _Frame, strip: Strip) -> str:
    start, end = strip.held or (strip.end, strip.end)
    when = f"{start - frame.start:.2f} s to {end - frame.start:.2f} s"
    who = f"{strip.worker} pid {strip.pid} held {entry_of(strip.lease)}"
    return f"{who} from {when}, fence {short(strip.fence)}"


def _add_legend(parts: list[str], timeline: Timeline, y: float) -> float:
    """Add what colours and signs mean, and return where that ends."""
    entries = [entry for panel in timeline.panels for entry in panel.entries]
    x = _MARGIN
    for kind in dict.fromkeys(entry.partition(":")[0] for entry in entries):
        parts.append(bar(x, x + 22, y - 10, 13, _colour_of(kind)))
        parts.append(text(x + 28, y, kind))
        x += 28 + width_of(kind) + 20
    parts.append(bar(x, x + 22, y - 10, 13, _OTHER))
    parts += [beat(x + left, y) for left in (5, 11, 17)]
    parts.append(text(x + 28, y, "beats"))
    x += 28 + width_of("beats") + 20
    parts.append(dots(x, x + 22, y - 4, INK) + text(x + 28, y, "waits, or is parked"))
    x, y = _MARGIN, y + 22
    for kind, about in SIGNS.items():
        needs = 17 + width_of(about.meaning) + 14
        if x + needs > _WIDTH:
            x, y = _MARGIN, y + 19
        parts.append(sign(kind, x + 6, y - 4) + text(x + 17, y, about.meaning))
        x += needs
    return y + 16


def _colour_of(entry: str) -> str:
    return _COLOURS.get(entry.partition(":")[0], _OTHER)
