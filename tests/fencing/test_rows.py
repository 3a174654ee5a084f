from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest
from fencing.tickets import Ticket
from hypothesis import given
from hypothesis import strategies as st

from task_lease import InvalidConfig, StaleFence
from task_lease.fencing import RowGuard

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

TABLE = "CREATE TABLE invoices (id TEXT, lock_version BIGINT, lock_owner TEXT, n INT)"
GUARD = RowGuard(table="invoices", key="id")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite3"
    with closing(sqlite3.connect(path)) as ledger, ledger:
        ledger.execute(TABLE)
        ledger.execute("INSERT INTO invoices VALUES ('a', NULL, NULL, 0)")
    return path


@pytest.fixture
def ledger(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, timeout=5)) as ledger:
        yield ledger


def stored(ledger: sqlite3.Connection) -> tuple[int, str]:
    version, owner = ledger.execute(
        "SELECT lock_version, lock_owner FROM invoices WHERE id = 'a'"
    ).fetchone()
    return version, owner


def test_claim_raises_the_stored_fence_when_the_row_was_never_claimed(
    ledger: sqlite3.Connection,
) -> None:
    GUARD.claim(ledger.cursor(), Ticket("one", 1_760_000_000_000_000), "a")

    assert stored(ledger) == (1_760_000_000_000_000, "one")


def test_claim_passes_when_the_fence_is_higher_than_the_stored_one(
    ledger: sqlite3.Connection,
) -> None:
    GUARD.claim(ledger.cursor(), Ticket("one", 7), "a")

    GUARD.claim(ledger.cursor(), Ticket("two", 8), "a")

    assert stored(ledger) == (8, "two")


def test_claim_is_refused_when_the_row_has_seen_a_higher_fence(
    ledger: sqlite3.Connection,
) -> None:
    GUARD.claim(ledger.cursor(), Ticket("two", 8), "a")

    with pytest.raises(StaleFence) as caught:
        GUARD.claim(ledger.cursor(), Ticket("one", 7), "a")

    assert caught.value.args == ("invoices['a']", 7, 8)
    assert stored(ledger) == (8, "two")


def test_claim_passes_again_when_the_same_owner_comes_back(
    ledger: sqlite3.Connection,
) -> None:
    for _ in range(2):
        with ledger:
            GUARD.claim(ledger.cursor(), Ticket("one", 7), "a")

    assert stored(ledger) == (7, "one")


def test_claim_is_refused_when_another_owner_has_the_same_fence(
    ledger: sqlite3.Connection,
) -> None:
    GUARD.claim(ledger.cursor(), Ticket("one", 7), "a")

    with pytest.raises(StaleFence, match="refused fence 7: it has seen 7"):
        GUARD.claim(ledger.cursor(), Ticket("two", 7), "a")

    assert stored(ledger) == (7, "one")


@pytest.mark.parametrize("seen", [None, 7])
def test_claim_is_refused_when_the_run_has_no_fence(
    ledger: sqlite3.Connection, seen: int | None
) -> None:
    ledger.execute("UPDATE invoices SET lock_version = ?, lock_owner = ''", (seen,))

    with pytest.raises(StaleFence) as caught:
        GUARD.claim(ledger.cursor(), Ticket("", None), "a")

    assert (caught.value.fence, caught.value.stored) == (None, seen)


def test_claim_is_refused_when_there_is_no_such_row(
    ledger: sqlite3.Connection,
) -> None:
    with pytest.raises(StaleFence) as caught:
        GUARD.claim(ledger.cursor(), Ticket("one", 7), "b")

    assert (caught.value.resource, caught.value.stored) == ("invoices['b']", None)


def test_claim_touches_no_other_row_when_it_passes(
    ledger: sqlite3.Connection,
) -> None:
    ledger.execute("INSERT INTO invoices VALUES ('b', 3, 'three', 0)")

    GUARD.claim(ledger.cursor(), Ticket("one", 7), "a")

    other = ledger.execute("SELECT * FROM invoices WHERE id = 'b'").fetchone()
    assert other == ("b", 3, "three", 0)


def test_claim_leaves_no_trace_when_its_transaction_is_rolled_back(
    ledger: sqlite3.Connection,
) -> None:
    GUARD.claim(ledger.cursor(), Ticket("two", 8), "a")
    ledger.rollback()

    GUARD.claim(ledger.cursor(), Ticket("one", 7), "a")

    assert stored(ledger) == (7, "one")


class Counting:
    """A cursor of a driver that counts only rows that changed, as some do."""

    def __init__(self, cursor: sqlite3.Cursor, rowcount: int) -> None:
        self._cursor = cursor
        self.rowcount = rowcount
        self.execute = cursor.execute
        self.fetchone = cursor.fetchone


@pytest.mark.parametrize("rowcount", [0, -1])
def test_claim_passes_when_the_driver_does_not_count_what_stays_the_same(
    ledger: sqlite3.Connection, rowcount: int
) -> None:
    GUARD.claim(Counting(ledger.cursor(), rowcount), Ticket("one", 7), "a")

    with pytest.raises(StaleFence):
        GUARD.claim(Counting(ledger.cursor(), rowcount), Ticket("two", 6), "a")


class Recorder:
    """A cursor that only writes down what it is asked, and finds one row."""

    rowcount = 0

    def __init__(self, row: tuple[object, ...]) -> None:
        self.asked: list[tuple[str, tuple[object, ...]]] = []
        self._row = row

    def execute(self, statement: str, parameters: tuple[object, ...], /) -> None:
        self.asked.append((statement, parameters))

    def fetchone(self) -> Any:
        return self._row


@pytest.mark.parametrize(
    ("paramstyle", "marks"),
    [
        ("qmark", ["?"] * 6),
        ("numeric", [":1", ":2", ":3", ":4", ":5", ":6"]),
        ("format", ["%s"] * 6),
        ("pyformat", ["%s"] * 6),
    ],
)
def test_claim_marks_values_as_the_driver_wants_them(
    paramstyle: str, marks: list[str]
) -> None:
    guard = RowGuard(
        table="billing.invoices",
        key="number",
        paramstyle=paramstyle,
        version_column="v",
        owner_column="o",
    )
    cursor = Recorder((7, "one"))

    guard.claim(cursor, Ticket("one", 7), "a")

    a, b, c, d, e, f = marks
    update = (
        f"UPDATE billing.invoices SET v = {a}, o = {b} WHERE number = {c} "  # noqa: S608
        f"AND (v IS NULL OR v < {d} OR (v = {e} AND o = {f}))"
    )
    select = f"SELECT v, o FROM billing.invoices WHERE number = {a}"  # noqa: S608
    values = (7, "one", "a", 7, 7, "one")
    assert cursor.asked == [(update, values), (select, ("a",))]


NAMES = ["table", "key", "version_column", "owner_column"]


@pytest.mark.parametrize("setting", NAMES)
@pytest.mark.parametrize(
    "name", ["", "a b", "a;", 'a"', "a--", "1a", "a.b.c", "a\n", "ä", "{}", None, 3]
)
def test_guard_is_refused_when_a_name_is_more_than_a_name(
    setting: str, name: object
) -> None:
    names: dict[str, Any] = {"table": "invoices", "key": "id", setting: name}

    with pytest.raises(InvalidConfig) as caught:
        RowGuard(**names)

    assert (caught.value.setting, caught.value.value) == (setting, name)


def test_guard_is_refused_when_a_column_names_a_table() -> None:
    with pytest.raises(InvalidConfig, match=r"key='a\.id'"):
        RowGuard(table="billing.a", key="a.id")


def test_guard_is_refused_when_the_paramstyle_is_unknown() -> None:
    with pytest.raises(InvalidConfig, match="paramstyle='dollar': must be one of"):
        RowGuard(table="invoices", key="id", paramstyle="dollar")


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("xyz")), max_size=20))
def test_claims_accept_only_what_never_goes_back(claims: list[tuple[int, str]]) -> None:
    accepted: list[tuple[int, str]] = []
    with closing(sqlite3.connect(":memory:")) as ledger:
        ledger.execute(TABLE)
        ledger.execute("INSERT INTO invoices VALUES ('a', NULL, NULL, 0)")
        for fence, owner in claims:
            last = accepted[-1] if accepted else (-1, "")
            may = fence > last[0] or (fence, owner) == last

            try:
                GUARD.claim(ledger.cursor(), Ticket(owner, fence), "a")
            except StaleFence:
                assert not may
            else:
                assert may
                accepted.append((fence, owner))


# The race that the guard is for: two runs add 1 to the same number, and the one that
# was overtaken reads first. Whoever is told that it has written must have counted.


def add(
    ledger: sqlite3.Connection, ticket: Ticket, claims: str | None
) -> Generator[None]:
    """Add 1 in a transaction, pausing between reading and writing."""
    with ledger:
        if claims == "before it reads":
            GUARD.claim(ledger.cursor(), ticket, "a")
        ((number,),) = ledger.execute("SELECT n FROM invoices").fetchall()
        yield
        if claims == "before it writes":
            GUARD.claim(ledger.cursor(), ticket, "a")
        ledger.execute("UPDATE invoices SET n = ?", (number + 1,))


def race(path: Path, tickets: Sequence[Ticket], claims: str | None) -> tuple[int, int]:
    """Return how many of the runs were told that they had written, and the number."""
    with ExitStack() as stack:
        ledgers = [
            stack.enter_context(closing(sqlite3.connect(path, timeout=0)))
            for _ in tickets
        ]
        started = [
            (add(*run, claims), run) for run in zip(ledgers, tickets, strict=True)
        ]
        waiting = [run for adding, run in started if not reads(adding)]
        adding = [a for a, run in started if run not in waiting]
        written = [writes(a) for a in adding]
        written += [writes(add(*run, claims)) for run in waiting]
        ((number,),) = ledgers[0].execute("SELECT n FROM invoices").fetchall()
    return sum(written), number


def reads(adding: Generator[None]) -> bool:
    """Return whether it came to its pause, or else has to wait for the other."""
    try:
        next(adding)
    except sqlite3.OperationalError:
        return False
    return True


def writes(adding: Generator[None]) -> bool:
    """Return whether it came to its end, or else was refused."""
    try:
        for _ in adding:
            continue
    except StaleFence:
        return False
    return True


OVERTAKEN, NEWER = Ticket("overtaken", 1), Ticket("newer", 2)


@pytest.mark.parametrize("claims", [None, "before it writes"])
def test_update_is_lost_when_nothing_is_claimed_before_reading(
    path: Path, claims: str | None
) -> None:
    written, number = race(path, [OVERTAKEN, NEWER], claims)

    assert (written, number) == (2, 1)


def test_no_update_is_lost_when_the_row_is_claimed_before_reading(path: Path) -> None:
    written, number = race(path, [OVERTAKEN, NEWER], "before it reads")

    assert (written, number) == (2, 2)


def test_late_update_is_refused_when_the_newer_run_was_first(path: Path) -> None:
    written, number = race(path, [NEWER, OVERTAKEN], "before it reads")

    assert (written, number) == (1, 1)
