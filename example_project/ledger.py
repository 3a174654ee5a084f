"""The ledger: a table that refuses whoever has been overtaken.

SQLite by default, PostgreSQL if ``DATABASE_URL`` names it and psycopg is installed.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from task_lease.fencing import RowGuard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from task_lease import Lease

#: Long, so that a demo on somebody's PostgreSQL touches nothing of theirs.
TABLE = "task_lease_example_ledger"
POSTGRESQL = ("postgresql://", "postgres://")
SQLITE = "sqlite:///"
_COLUMNS = (
    "entry VARCHAR(100) PRIMARY KEY, state VARCHAR(100) NOT NULL, "
    "writes INTEGER NOT NULL, lock_version BIGINT, lock_owner VARCHAR(100)"
)
# Seconds that a transaction waits for another one.
_PATIENCE = 10


class Entry(NamedTuple):
    """One row.

    Attributes:
        state: What is known about an invoice, a month, a customer.
        writes: How often it was written.
        fence: The highest fence that it has seen.
    """

    state: str
    writes: int
    fence: int | None


class Claimed:
    """An entry inside a transaction that has claimed it."""

    def __init__(self, cursor: Any, mark: str, entry: str) -> None:
        self._cursor = cursor
        self._mark = mark
        self._entry = entry

    def read(self) -> Entry:
        """Return the entry as it is."""
        select = f"SELECT state, writes, lock_version FROM {TABLE}"  # noqa: S608
        self._cursor.execute(f"{select} WHERE entry = {self._mark}", (self._entry,))
        return Entry(*self._cursor.fetchone())

    def write(self, state: str) -> None:
        """Change the entry's state."""
        update = f"UPDATE {TABLE} SET writes = writes + 1, state = {self._mark}"  # noqa: S608
        values = (state, self._entry)
        self._cursor.execute(f"{update} WHERE entry = {self._mark}", values)


class Ledger:
    """The ledger at an address; each call has a connection of its own.

    Args:
        url: ``postgresql://...``, or ``sqlite:///`` and a path.

    Raises:
        ModuleNotFoundError: If it is PostgreSQL and psycopg is not installed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        if url.startswith(POSTGRESQL):
            self._driver: Any = import_module("psycopg")
            self._mark = "%s"
        else:
            self._driver = sqlite3
            self._mark = "?"
        paramstyle = self._driver.paramstyle
        self._guard = RowGuard(table=TABLE, key="entry", paramstyle=paramstyle)

    def prepare(self, entries: list[str]) -> None:
        """Begin with these entries and no others."""
        with self._transaction() as cursor:
            cursor.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} ({_COLUMNS})")
            cursor.execute(f"DELETE FROM {TABLE}")  # noqa: S608
            insert = f"INSERT INTO {TABLE} VALUES ({self._mark}, 'open', 0, NULL, NULL)"  # noqa: S608
            cursor.executemany(insert, [(entry,) for entry in entries])

    @contextmanager
    def claimed(self, entry: str, lease: Lease) -> Iterator[Claimed]:
        """Give an entry for reading and writing, in one transaction.

        Args:
            entry: Its name.
            lease: Under which it is to be changed.

        Raises:
            StaleFence: If the entry has seen a newer holder than this one.
        """
        with self._transaction() as cursor:
            self._guard.claim(cursor, lease, entry)
            yield Claimed(cursor, self._mark, entry)

    def put(self, entry: str, state: str) -> None:
        """Change the state of an entry without any lease: from outside."""
        with self._transaction() as cursor:
            Claimed(cursor, self._mark, entry).write(state)

    def look(self, entry: str) -> Entry:
        """Return an entry without claiming it."""
        with self._transaction() as cursor:
            return Claimed(cursor, self._mark, entry).read()

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        with closing(self._connect()) as connection, connection:
            yield connection.cursor()

    def _connect(self) -> Any:
        if self._driver is sqlite3:
            return sqlite3.connect(self._url.removeprefix(SQLITE), timeout=_PATIENCE)
        return self._driver.connect(self._url, connect_timeout=_PATIENCE)
