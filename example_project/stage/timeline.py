"""What is drawn of a demo: panels, lanes and strips."""

from __future__ import annotations

from dataclasses import dataclass, field

from example_project.stage.words import entry_of


@dataclass(frozen=True, slots=True)
class Mark:
    """A sign at an instant: its kind is a key of `SIGNS`."""

    at: float
    kind: str


@dataclass(slots=True, kw_only=True)
class Strip:
    """What one task did at one worker, or what happened to the worker itself.

    Attributes:
        worker: The worker.
        pid: The process.
        id: The task's id.
        lease: The lease's name, empty if it is about the worker.
        start: When it began to wait or to hold.
        end: When there is nothing more to be seen of it.
        fence: Its fence, None as long as it holds nothing.
        held: From when to when it held the lease.
        ending: How that ended: a kind of moment, empty as long as it did not.
        paused: From when to when its process was stopped.
        beats: When it renewed its lease.
        marks: What happened to it.
        row: The row in its worker's lane.
    """

    worker: str
    pid: int
    id: str
    lease: str
    start: float
    end: float
    fence: int | None = None
    held: tuple[float, float] | None = None
    ending: str = ""
    paused: tuple[float, float] | None = None
    beats: list[float] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    row: int = 0

    def mark(self, at: float, kind: str) -> None:
        """Put a sign on it."""
        self.marks.append(Mark(at, kind))
        self.end = max(self.end, at)

    def end_holding(self, at: float, kind: str) -> None:
        """End what it holds, if it does."""
        if self.held and not self.ending:
            self.held = (self.held[0], at)
            self.ending = kind
            self.end = max(self.end, at)


@dataclass(slots=True, kw_only=True)
class Panel:
    """One scene.

    Attributes:
        title: What it shows.
        headline: What came out.
        shown: Whether it showed what it claims.
        start: When it began.
        end: When it was over.
        strips: What happened in it.
        released: The leases, with their fences, that were released in it.
    """

    title: str
    start: float
    headline: str = ""
    shown: bool = False
    end: float = 0.0
    strips: list[Strip] = field(default_factory=list)
    released: set[tuple[str, int | None]] = field(default_factory=set)

    @property
    def entries(self) -> list[str]:
        """What its leases are about, in the order of their appearance."""
        strips = sorted(self.strips, key=lambda strip: strip.start)
        return list(dict.fromkeys(entry_of(s.lease) for s in strips if s.lease))

    def rows(self, worker: str) -> int:
        """Return how many rows a worker's lane needs here."""
        return max((s.row + 1 for s in self.strips if s.worker == worker), default=0)


@dataclass(slots=True)
class Timeline:
    """Everything that is drawn.

    Attributes:
        workers: Their names, one for each lane.
        present: From when to when each worker was there.
        panels: The scenes.
    """

    workers: list[str]
    present: dict[str, tuple[float, float]]
    panels: list[Panel]
