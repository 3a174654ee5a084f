from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from typing_extensions import override

ROOT = Path(__file__).parent.parent
# Last, so that the packages under test are those that are installed.
sys.path.append(str(ROOT))

from example_project.stage.arrange import arrange  # noqa: E402
from example_project.stage.history import Moment  # noqa: E402
from example_project.stage.runs import fences_grow, runs_of, take_turns  # noqa: E402
from example_project.stage.svg import draw  # noqa: E402
from example_project.stage.terminal import Terminal  # noqa: E402
from example_project.stage.text import chart  # noqa: E402
from example_project.stage.words import SIGNS, describe  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from example_project.stage.timeline import Strip

SVG = "{http://www.w3.org/2000/svg}"
TAGS = [
    "svg",
    "title",
    "desc",
    "defs",
    "pattern",
    "rect",
    "text",
    "circle",
    "path",
    "g",
]
COLUMNS = 80


def parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314 - our own picture


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in parse(svg).iter(f"{SVG}text")]


LEASE = "app.issue:invoice:2041"


def moment(at: float, kind: str, worker: str = "celery-1", **about: Any) -> Moment:
    pid = int(worker[-1])
    known: dict[str, Any] = {"pid": pid, "lease": LEASE, "fence": pid, **about}
    return Moment(at=at, kind=kind, worker=worker, **known)


def runs(*spans: tuple[float, float | None, int]) -> list[Moment]:
    moments = []
    for began, ended, fence in spans:
        about: dict[str, Any] = {"detail": "invoice:2041", "fence": fence}
        moments.append(moment(began, "began", **about))
        if ended is not None:
            moments.append(moment(ended, "ended", **about))
    return moments


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], True),
        ([(0, 1, 1), (1, 2, 2)], True),
        ([(0, 1.5, 1), (1, 2, 2)], False),
        ([(0, None, 1), (1, 2, 2)], False),
    ],
)
def test_runs_take_turns_when_none_begins_before_the_last_has_ended(
    spans: list[tuple[float, float | None, int]], *, expected: bool
) -> None:
    found = runs_of(runs(*spans), "invoice:2041")

    assert len(found) == len(spans)
    assert take_turns(found) is expected
    assert runs_of(runs(*spans), "invoice:1") == []


@pytest.mark.parametrize(
    ("fences", "expected"), [([1, 2, 3], True), ([1, 1], False), ([2, 1], False)]
)
def test_fences_grow_when_each_is_higher_than_the_last(
    fences: list[int], *, expected: bool
) -> None:
    spans = [(float(n), n + 0.5, fence) for n, fence in enumerate(fences)]
    found = [run for span in spans for run in runs_of(runs(span), "invoice:2041")]

    assert fences_grow(found) is expected


def strips_of(*moments: Moment) -> list[Strip]:
    """Arrange moments as one scene from 0 s to 10 s."""
    scene = Moment(at=0.0, kind="scene", detail="1 A title: and more")
    verdict = Moment(at=10.0, kind="verdict", detail="one; two", seconds=1.0)
    (panel,) = arrange([scene, *moments, verdict]).panels
    return panel.strips


def kinds(strip: Strip) -> list[str]:
    return [mark.kind for mark in strip.marks]


def test_bar_ends_at_the_release_when_the_lease_is_released() -> None:
    (strip,) = strips_of(
        moment(1, "acquired"), moment(2, "renewed"), moment(4, "released")
    )

    assert (strip.held, strip.beats, strip.marks) == ((1, 4), [2], [])


def test_bar_has_no_takeover_when_the_release_is_told_late() -> None:
    first, second = strips_of(
        moment(1, "acquired"),
        moment(4, "acquired", "celery-2", seconds=2.0),
        moment(4.1, "released"),
    )

    assert (first.held, kinds(first)) == ((1, 4), [])
    assert (second.start, second.held) == (2, (4, 10))
    assert kinds(second) == ["conflict"]


def test_takeover_is_marked_when_the_holder_was_killed() -> None:
    first, second = strips_of(
        moment(1, "acquired"), moment(3, "killed"), moment(4, "acquired", "celery-2")
    )

    assert (first.held, kinds(first)) == ((1, 3), ["killed"])
    assert kinds(second) == ["takeover"]


def test_bar_ends_at_the_takeover_when_the_holder_is_paused() -> None:
    first, second = strips_of(
        moment(1, "acquired"),
        moment(2, "paused"),
        moment(5, "acquired", "celery-2"),
        moment(6, "resumed"),
        moment(6.1, "lost"),
        moment(6.2, "refused"),
    )

    assert (first.held, first.paused) == ((1, 5), (2, 6))
    assert kinds(first) == ["lost", "refused"]
    assert kinds(second) == ["takeover"]


def test_parked_job_waits_in_one_strip_when_it_comes_back() -> None:
    first, parked = strips_of(
        moment(1, "acquired", "celery-2"),
        moment(2, "conflict", "rq-1", id="a"),
        moment(2.1, "parked", "rq-1", id="a"),
        moment(5, "released", "celery-2"),
        moment(5.1, "acquired", "rq-1", id="a", fence=9),
    )

    assert (first.held, kinds(first)) == ((1, 5), [])
    assert (parked.start, parked.held) == (2, (5.1, 10))
    assert kinds(parked) == ["conflict"]


def test_strips_stand_in_rows_when_they_overlap_in_a_lane() -> None:
    strips = strips_of(
        moment(1, "acquired", lease="t:a"),
        moment(1, "conflict", lease="t:b", id="b"),
        moment(3, "stopping", lease="", fence=None),
        moment(4, "released", lease="t:a"),
        moment(6, "acquired", lease="t:c"),
        moment(6, "acquired", "celery-2", lease="t:d"),
    )

    assert [strip.row for strip in strips] == [0, 1, 1, 0, 0]


def story() -> list[Moment]:
    """Return two scenes with every kind of sign in them."""
    return [
        Moment(at=-2, kind="ready", worker="celery-1"),
        Moment(at=0, kind="scene", detail="1 Kill & <pause>: more"),
        moment(0.5, "acquired"),
        moment(0.6, "conflict", "celery-2", other=1, id="x", detail="skipped"),
        moment(1, "renewed"),
        moment(2, "killed"),
        moment(3, "acquired", "celery-2", seconds=1.5),
        moment(4, "paused", "celery-2"),
        moment(6, "acquired", "rq-3"),
        moment(7, "resumed", "celery-2"),
        moment(7, "lost", "celery-2"),
        moment(7, "refused", "celery-2", other_fence=3),
        moment(8, "released", "rq-3"),
        moment(8.5, "stopping", "rq-3", lease=""),
        Moment(at=10, kind="verdict", detail="good; NOT SHOWN: bad"),
        Moment(at=20, kind="scene", detail="2 Nothing happens"),
        Moment(at=21, kind="verdict", detail="", seconds=1.0),
    ]


def test_picture_shows_every_lane_and_sign_when_all_of_it_happened() -> None:
    svg = draw(arrange(story()), 2.0)

    words = texts(svg)
    assert {"celery-1", "celery-2", "rq-3", "Kill & <pause>", "paused"} <= set(words)
    assert {"good", "NOT SHOWN: bad", "✓", "✗"} <= set(words)
    for sign in SIGNS.values():
        # Once in the legend, and at least once where it happened.
        assert svg.count(f'fill="{sign.colour}" stroke="#fff"') >= 2
        assert sign.meaning in words


def test_picture_needs_nothing_from_elsewhere() -> None:
    svg = draw(arrange(story()), 2.0)

    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    assert {node.tag for node in parse(svg).iter()} <= {SVG + tag for tag in TAGS}


def test_picture_is_within_its_edges_when_signs_come_at_the_end() -> None:
    late = [*story()[:2], moment(9.99, "acquired"), moment(10, "lost"), *story()[-3:]]
    svg = draw(arrange(late), 2.0)

    places = re.findall(r"translate\(([\d.]+) ", svg)
    assert places
    assert all(0 < float(x) < 900 for x in places)


def test_picture_is_drawn_when_nothing_happened() -> None:
    assert texts(draw(arrange([]), 2.0))


def test_committed_picture_is_of_this_renderer() -> None:
    svg = (ROOT / "docs" / "timeline.svg").read_text("utf-8")

    assert {"1", "2", "3", "4", "5", "celery-3", "takeover"} <= set(texts(svg))
    assert "✗" not in texts(svg)


def plain(text: str, _: str) -> str:
    return text


def test_chart_shows_every_sign_when_all_of_it_happened() -> None:
    lines = list(chart(arrange(story()), plain))

    legend = next(n for n, line in enumerate(lines) if "holds" in line)
    drawn = "\n".join(lines[:legend])
    assert all(sign.character in drawn for sign in SIGNS.values())
    assert " 2041 ━" in drawn
    assert max(map(len, lines)) <= COLUMNS


def test_conflict_is_told_with_the_holders_name_when_it_is_known() -> None:
    conflict = moment(1, "conflict", "celery-2", other=1, detail="skipped")

    assert describe(conflict, {1: "celery-1"}) == (
        "◇",
        "celery-2: invoice:2041 is held by celery-1: skipped",
    )
    assert describe(moment(1, "renewed"), {}) is None


class Tty(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "coloured"),
    [
        (Tty, {}, True),
        (Tty, {"NO_COLOR": "1"}, False),
        (io.StringIO, {}, False),
    ],
)
def test_terminal_has_colours_when_it_is_one_and_they_are_wanted(
    stream: Callable[[], io.StringIO], environ: dict[str, str], *, coloured: bool
) -> None:
    output = stream()

    Terminal(output, environ).verdict("it holds", shown=True)

    assert "it holds" in output.getvalue()
    assert ("\x1b[" in output.getvalue()) is coloured
