"""The demo: five scenes with real workers and a server of its own.

``make demo`` runs it. It ends with 0 if every scene showed what it claims, with 1 if
one did not, and with 2 if it could not be played.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from celery import Celery
from redis import Redis
from rq import Queue

from example_project.ledger import POSTGRESQL, SQLITE, Ledger
from example_project.stage.arrange import arrange
from example_project.stage.company import CannotPlay, Company
from example_project.stage.crew import REPORTS, Crew
from example_project.stage.history import HISTORY
from example_project.stage.play import Play
from example_project.stage.server import start_server
from example_project.stage.stage import NotInTime, Stage
from example_project.stage.svg import draw
from example_project.stage.terminal import Terminal
from example_project.stage.text import chart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType


def main(words: Sequence[str] | None = None) -> int:
    """Play the demo and return its exit code.

    Args:
        words: The arguments of the command line.
    """
    options = _options(words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    terminal = Terminal(sys.stdout)
    began_at = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        failures = _play(options, terminal)
    except (CannotPlay, NotInTime) as error:
        terminal.print(f"\n{error}")
        return 2
    except KeyboardInterrupt:
        terminal.print("\nStopped; everything that was started has ended.")
        return 130
    took = time.monotonic() - began_at
    if failures:
        terminal.print(f"\n✗ {failures} claims were not shown ({took:.0f} s).")
        return 1
    terminal.print(f"\n✓ Every scene showed what it claims ({took:.0f} s).")
    return 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="example_project.demo", description=__doc__)
    parser.add_argument(
        "--scenes",
        type=lambda text: [int(number) for number in text.split(",")],
        default=[1, 2, 3, 4, 5],
        help="which to play, by default 1,2,3,4,5",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("var"), help="for all files, by default var"
    )
    parser.add_argument(
        "--server", help="a redis-server or valkey-server, by default what is found"
    )
    parser.add_argument(
        "--break-leases",
        action="store_true",
        help="let leases exclude nobody, to see that the demo notices",
    )
    return parser.parse_args(words)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _play(options: argparse.Namespace, terminal: Terminal) -> int:
    """Play the chosen scenes, draw what happened, and return the failures."""
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    history = folder / "history.jsonl"
    with _alone_in(folder), Company(folder) as company:
        history.unlink(missing_ok=True)
        (folder / "server").mkdir(exist_ok=True)
        server = start_server(company, folder / "server", options.server)
        os.environ["REDIS_URL"] = server.url
        os.environ["DATABASE_URL"] = _database_url(folder)
        os.environ[HISTORY] = str(history)
        if options.break_leases:
            os.environ["EXAMPLE_BREAK_LEASES"] = "1"
        terminal.print(f"{server.version}; the ledger is in {_ledger_name()}")
        stage = Stage(history, terminal, company.check_alive)
        _perform(stage, Crew(company, server.url), options.scenes)
    _show(stage, folder, terminal)
    return stage.failures


def _perform(stage: Stage, crew: Crew, numbers: list[int]) -> None:
    # Not before the variables are set that its settings come from.
    from example_project import app, scenes  # noqa: PLC0415

    ledger = _open_ledger(scenes.ENTRIES)
    store = Redis.from_url(os.environ["REDIS_URL"])
    # A sender is subscribed to its results until the end, when the server is gone. So
    # it is to know of no backend, and results are looked for by another app.
    results = Celery(backend=os.environ["REDIS_URL"])
    app.app.conf.update(result_backend=None)
    reports = Queue(REPORTS, connection=store)
    play = Play(stage, crew, ledger, store, reports, results)
    scenes.start_workers(play)
    for number in numbers:
        title, scene = scenes.SCENES[number - 1]
        with stage.scene(number, title):
            scene(play)


def _open_ledger(entries: list[str]) -> Ledger:
    try:
        ledger = Ledger(os.environ["DATABASE_URL"])
        ledger.prepare(entries)
    except ModuleNotFoundError:
        message = "DATABASE_URL names PostgreSQL: pip install 'psycopg[binary]'"
        raise CannotPlay(message) from None
    except Exception as error:
        # The errors of two drivers, which have no base of their own in common.
        message = f"The ledger cannot be used: {error}"
        raise CannotPlay(message) from error
    return ledger


def _show(stage: Stage, folder: Path, terminal: Terminal) -> None:
    from example_project.settings import TTL  # noqa: PLC0415 - as above

    timeline = arrange(stage.moments())
    for line in chart(timeline, terminal.paint):
        terminal.print(line)
    picture = folder / "timeline.svg"
    picture.write_text(draw(timeline, TTL), encoding="utf-8")
    terminal.print(f"\nThe same as a picture: {picture}")


def _database_url(folder: Path) -> str:
    url = os.environ.get("DATABASE_URL", "")
    if url.startswith(POSTGRESQL):
        return url
    path = folder / "ledger.sqlite3"
    path.unlink(missing_ok=True)
    return f"{SQLITE}{path}"


def _ledger_name() -> str:
    url = os.environ["DATABASE_URL"]
    return "PostgreSQL" if url.startswith(POSTGRESQL) else url.removeprefix(SQLITE)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    with (folder / "demo.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"A demo is already playing in {folder}."
            raise CannotPlay(message) from None
        yield


if __name__ == "__main__":
    sys.exit(main())
