from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree as ET

import pytest
from harness import eventually, list_members

import task_lease

ROOT = Path(__file__).parent.parent
# Last, so that the packages under test are those that are installed.
sys.path.append(str(ROOT))

from example_project.ledger import SQLITE, Entry, Ledger  # noqa: E402
from example_project.stage import server  # noqa: E402
from example_project.stage.company import CannotPlay, Company  # noqa: E402
from example_project.stage.history import HISTORY, WORKER, History, record  # noqa: E402
from task_lease import StaleFence  # noqa: E402

if TYPE_CHECKING:
    from conftest import Spawn
    from harness import Process

#: Where the packages under test are, which may be the sources.
INSTALLED = Path(task_lease.__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"
FEWEST_CLAIMS = 9


class StartDemo(NamedTuple):
    """Starts the demo with all of its files in a folder."""

    spawn: Spawn
    folder: Path
    home: Path

    def __call__(self, *words: str) -> Process:
        command = [sys.executable, "-m", "example_project.demo"]
        return self.spawn(
            [*command, "--folder", self.folder, *words],
            env={"PYTHONPATH": f"{self.home}{os.pathsep}{INSTALLED}"},
            cwd=self.home,
        )


@pytest.fixture
def start_demo(spawn: Spawn, tmp_path: Path) -> StartDemo:
    # The package alone, for beside it lie the sources of those that are installed.
    home = tmp_path / "home"
    home.mkdir()
    (home / "example_project").symlink_to(ROOT / "example_project")
    return StartDemo(spawn, tmp_path / "var", home)


def texts(svg: str) -> list[str]:
    root = ET.fromstring(svg)  # noqa: S314 - our own picture
    return [node.text or "" for node in root.iter(f"{SVG}text")]


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_demo_shows_what_it_claims_when_leases_work(start_demo: StartDemo) -> None:
    demo = start_demo()

    assert demo.wait(240) == 0, demo.output()
    assert demo.output().count("   ✓ ") == FEWEST_CLAIMS
    assert "✗" not in demo.output()
    picture = texts((start_demo.folder / "timeline.svg").read_text("utf-8"))
    assert {"1", "2", "3", "4", "5", "celery-1", "celery-3", "rq-1"} <= set(picture)
    assert list(start_demo.folder.glob("*.pid")) == []


@pytest.mark.fault
@pytest.mark.timeout(180)
def test_demo_fails_when_leases_exclude_nobody(start_demo: StartDemo) -> None:
    demo = start_demo("--scenes", "1", "--break-leases")

    assert demo.wait(150) == 1, demo.output()
    assert "✗ invoice 2041 was issued once" in demo.output()
    assert "✗" in texts((start_demo.folder / "timeline.svg").read_text("utf-8"))


def is_playing(demo: Process) -> bool:
    return "rq-1 holds month" in demo.output()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_demo_leaves_nothing_running_when_it_is_ended(
    start_demo: StartDemo, number: signal.Signals, code: int
) -> None:
    demo = start_demo("--scenes", "2")
    eventually(lambda: is_playing(demo) or not demo.is_alive, 90, "the scene plays")
    leaders = [int(path.read_text()) for path in start_demo.folder.glob("*.pid")]

    os.kill(demo.pid, number)

    assert demo.wait(30) == code
    assert len(leaders) == 4
    eventually(lambda: not any(map(list_members, leaders)), 10, "all have ended")


@pytest.mark.fault
def test_demo_cannot_begin_when_its_server_is_not_there(start_demo: StartDemo) -> None:
    demo = start_demo("--server", "no-such-server")

    assert demo.wait(30) == 2
    assert "There is no no-such-server here." in demo.output()


@pytest.mark.fault
def test_demo_cannot_begin_when_another_plays_there(start_demo: StartDemo) -> None:
    start_demo.folder.mkdir()
    with (start_demo.folder / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        demo = start_demo()

        assert demo.wait(30) == 2
    assert "already playing" in demo.output()


def test_server_is_asked_for_in_plain_words_when_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server, "_bundled_valkey", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))

    with Company(tmp_path) as company, pytest.raises(CannotPlay) as caught:
        server.start_server(company, tmp_path)

    assert "apt-get install redis-server" in str(caught.value)


class Ticket(NamedTuple):
    owner: str
    fence: int


def test_ledger_refuses_a_late_write_when_a_newer_holder_has_written(
    tmp_path: Path,
) -> None:
    ledger = Ledger(f"{SQLITE}{tmp_path / 'ledger.sqlite3'}")
    ledger.prepare(["invoice:1", "invoice:2"])
    newer: Any = Ticket("newer", 8)
    late: Any = Ticket("late", 7)
    with ledger.claimed("invoice:1", newer) as row:
        row.write("settled")

    with (
        pytest.raises(StaleFence),
        ledger.claimed("invoice:1", late) as row,
    ):
        row.write("too late")

    assert ledger.look("invoice:1") == Entry("settled", 1, 8)
    assert ledger.look("invoice:2") == Entry("open", 0, None)


def test_history_gives_whole_lines_only_when_one_is_being_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv(HISTORY, str(path))
    monkeypatch.setenv(WORKER, "celery-1")
    history = History(path)
    assert history.news() == []

    record("began", lease="a:b")
    with path.open("a") as file:
        file.write('{"at": 0.0, "kin')
    (first,) = history.news()
    with path.open("a") as file:
        file.write('d": "ended", "unknown": 1}\n')
    (second,) = history.news()

    assert (first.kind, first.worker, first.lease) == ("began", "celery-1", "a:b")
    assert [moment.kind for moment in history.moments()] == [second.kind, first.kind]


def test_nothing_is_recorded_when_no_history_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(HISTORY, raising=False)
    monkeypatch.chdir(tmp_path)

    record("began")

    assert list(tmp_path.iterdir()) == []
