"""Shapes of the picture: text, bars, and a sign for each kind of moment."""

from __future__ import annotations

from typing import NamedTuple
from xml.sax.saxutils import escape

from example_project.stage.words import SIGNS

INK, PALE = "#1f2937", "#6b7280"
#: How far a sign reaches from its middle.
REACH = 6.5

# The width of a character as a part of the font's size, in a wide font.
_CHARACTER = 0.6
_NORMAL = 400
_DIAMOND = "M0 -6 L6 0 L0 6 L-6 0 Z"
_UP = "M0 -6 L6.2 5 L-6.2 5 Z"
_DOWN = "M0 6 L6.2 -5 L-6.2 -5 Z"
_OCTAGON = "M-2.5 -6 H2.5 L6 -2.5 V2.5 L2.5 6 H-2.5 L-6 2.5 V-2.5 Z"
_CIRCLE = "M-6 0 A6 6 0 1 0 6 0 A6 6 0 1 0 -6 0 Z"
_CROSS = (
    "M-5.5 -3.3 L-3.3 -5.5 L0 -2.2 L3.3 -5.5 L5.5 -3.3 L2.2 0 "
    "L5.5 3.3 L3.3 5.5 L0 2.2 L-3.3 5.5 L-5.5 3.3 L-2.2 0 Z"
)
_BAR = "M-3.7 -1.2 H3.7 V1.2 H-3.7 Z"
_EXCLAMATION = "M-1.1 -4 H1.1 L0.8 1.2 H-0.8 Z M-1.1 2.2 H1.1 V4 H-1.1 Z"
# Each a shape of its own, not only a colour, and what is white on it.
_SHAPES = {
    "conflict": (_DIAMOND, ""),
    "killed": (_CROSS, ""),
    "takeover": (_UP, ""),
    "lost": (_CIRCLE, _EXCLAMATION),
    "refused": (_OCTAGON, _BAR),
    "stopping": (_DOWN, ""),
}


class Font(NamedTuple):
    """How a text is set.

    Attributes:
        size: In pixels.
        fill: The colour.
        weight: As in CSS.
        anchor: Which part of the text is at its place.
    """

    size: float = 11
    fill: str = INK
    weight: int = _NORMAL
    anchor: str = "start"


PLAIN = Font()
LABEL = Font(size=10)


def text(x: float, y: float, words: str, font: Font = PLAIN) -> str:
    """Return words at a place, which is on their base line."""
    about = f'x="{x:.1f}" y="{y:.1f}" font-size="{font.size:g}" fill="{font.fill}"'
    if font.weight != _NORMAL:
        about += f' font-weight="{font.weight}"'
    if font.anchor != "start":
        about += f' text-anchor="{font.anchor}"'
    return f"<text {about}>{escape(words)}</text>"


def width_of(words: str, font: Font = PLAIN) -> float:
    """Return about how wide words are."""
    return len(words) * font.size * _CHARACTER


def bar(
    left: float, right: float, y: float, height: float, fill: str, tooltip: str = ""
) -> str:
    """Return a bar, which is never too narrow to be seen."""
    size = f'width="{max(right - left, 2.0):.1f}" height="{height:.1f}"'
    about = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    return (
        f'<rect x="{left:.1f}" y="{y:.1f}" {size} rx="3" fill="{fill}">{about}</rect>'
    )


def dots(left: float, right: float, y: float, colour: str) -> str:
    """Return a dotted line."""
    line = f'd="M{left:.1f} {y:.1f} H{right:.1f}" stroke="{colour}"'
    return f'<path {line} stroke-width="2" stroke-dasharray="2 3"/>'


def beat(x: float, y: float) -> str:
    """Return the dot that stands for a beat."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.2" fill="#fff"/>'


def sign(kind: str, x: float, y: float) -> str:
    """Return the sign of a kind of moment around a point."""
    shape, inside = _SHAPES[kind]
    colour = SIGNS[kind].colour
    on_it = f'<path d="{inside}" fill="#fff"/>' if inside else ""
    return (
        f'<g transform="translate({x:.1f} {y:.1f})">'
        f'<path d="{shape}" fill="{colour}" stroke="#fff" stroke-width="1.2"/>'
        f"{on_it}</g>"
    )
