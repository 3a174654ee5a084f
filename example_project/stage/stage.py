"""The stage: tells what happens while scenes play, and keeps the score."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from example_project.stage.history import History, record
from example_project.stage.words import describe

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from example_project.stage.history import Moment
    from example_project.stage.runs import Run
    from example_project.stage.terminal import Terminal

T = TypeVar("T")

#: Seconds for what should happen soon, on a machine that has other work.
PATIENCE = 20.0
_LOOK_EVERY = 0.02


class NotInTime(Exception):
    """Something that a scene waited for did not happen."""


class Stage:
    """What the scenes play on.

    Attributes:
        failures: How many claims were not shown.

    Args:
        path: The history.
        terminal: Where to tell what happens.
        check_alive: Raises if there is no sense in going on.
    """

    def __init__(
        self, path: Path, terminal: Terminal, check_alive: Callable[[], None]
    ) -> None:
        self.failures = 0
        self._history = History(path)
        self._terminal = terminal
        self._check_alive = check_alive
        self._began_at = time.monotonic()
        self._shown: list[str] = []
        self._workers: dict[int, str] = {}

    def moments(self) -> list[Moment]:
        """Return everything that happened so far."""
        self._tell_news()
        return self._history.moments()

    @contextmanager
    def scene(self, number: int, title: str) -> Iterator[None]:
        """Play a scene; it has failed if it waits for something in vain."""
        failures, self._shown = self.failures, []
        self._began_at = time.monotonic()
        record("scene", detail=f"{number} {title}")
        self._terminal.scene(number, title)
        try:
            yield
        except NotInTime as error:
            self.check(f"{error}", shown=False)
        except Exception:
            # Perhaps the server is gone, which says more than what came of it.
            self._check_alive()
            raise
        shown = self.failures == failures
        record("verdict", detail="; ".join(self._shown), seconds=float(shown))

    def say(self, text: str) -> None:
        """Tell what the scene does next."""
        self._tell_news()
        self._terminal.line(self._now(), "", text)

    def check(self, claim: str, *, shown: bool, headline: str = "") -> None:
        """Say whether a claim was shown.

        Args:
            claim: What was to be shown.
            shown: Whether it was.
            headline: The claim in a few words, for the picture.
        """
        self._tell_news()
        self._terminal.verdict(claim, shown=shown)
        self.failures += not shown
        if headline:
            self._shown.append(headline if shown else f"NOT SHOWN: {headline}")

    def wait_for(
        self, what: str, answer: Callable[[], T], patience: float = PATIENCE
    ) -> T:
        """Ask until the answer is true, and return it.

        Args:
            what: What is waited for.
            answer: Is asked again and again.
            patience: Seconds after which it should have become true.

        Raises:
            NotInTime: If it does not become true.
        """
        deadline = time.monotonic() + patience
        while not (found := answer()):
            if time.monotonic() > deadline:
                message = f"{patience:g} s passed without this: {what}"
                raise NotInTime(message)
            self._check_alive()
            time.sleep(_LOOK_EVERY)
            self._tell_news()
        return found

    def play_for(self, seconds: float) -> None:
        """Let time pass, and tell what happens meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tell_news()
            time.sleep(_LOOK_EVERY)

    def send_signal(self, number: signal.Signals, kind: str, run: Run) -> None:
        """Send a signal to the process of a run, and write it down."""
        record(kind, worker=run.worker, pid=run.pid, lease=run.lease)
        os.kill(run.pid, number)

    def _now(self) -> float:
        return time.monotonic() - self._began_at

    def _tell_news(self) -> None:
        for moment in self._history.news():
            if moment.worker:
                self._workers[moment.pid] = moment.worker
            told = describe(moment, self._workers)
            if told and moment.at >= self._began_at:
                self._terminal.line(moment.at - self._began_at, *told)
