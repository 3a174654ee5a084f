"""Guard rows of a table through any driver of DB-API 2.0."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from task_lease.errors import InvalidConfig, StaleFence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from task_lease.fencing.fenced import Fenced

# What stands for the nth value. Drivers with "pyformat" take values by place, too.
_MARKS = {"qmark": "?", "numeric": ":{}", "format": "%s", "pyformat": "%s"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAMES = {"table": re.compile(rf"({_NAME.pattern}\.)?{_NAME.pattern}")}


class Cursor(Protocol):
    """A cursor as DB-API 2.0 has it."""

    @property
    def rowcount(self) -> int:
        """How many rows the last statement changed."""

    def execute(self, statement: Any, parameters: Any, /) -> object:
        """Run a statement."""

    def fetchone(self) -> Any:
        """Return the next row, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGuard:
    """Refuses at one row of a table whoever has been overtaken there.

    Equal fences pass only for the same owner, which is why the owner has a column:
    the two sides of a failover can issue one number.

    Attributes:
        table: A plain name, also as ``schema.table``; names are not quoted.
        key: The column whose value tells the rows apart.
        paramstyle: The driver's: ``sqlite3.paramstyle``, ``psycopg.paramstyle``.
        version_column: A BIGINT: the highest fence that the row has seen, or NULL.
        owner_column: A text: who came with that fence, or NULL.

    Example:
        >>> guard = RowGuard(table="invoices", key="id")
        >>> with connection:  # doctest: +SKIP
        ...     guard.claim(connection.cursor(), lease, 42)
        ...     # only now read the row, and write it
    """

    table: str
    key: str
    paramstyle: str = "qmark"
    version_column: str = "lock_version"
    owner_column: str = "lock_owner"

    def __post_init__(self) -> None:
        """Refuse a name that is more than a name.

        Raises:
            InvalidConfig: If a name or the paramstyle is not allowed.
        """
        for setting in ("table", "key", "version_column", "owner_column"):
            name, allowed = getattr(self, setting), _NAMES.get(setting, _NAME)
            if not isinstance(name, str) or not allowed.fullmatch(name):
                rule = "must be a plain name of letters, digits and _"
                raise InvalidConfig(setting, name, rule)
        if self.paramstyle not in _MARKS:
            rule = f"must be one of {', '.join(_MARKS)}"
            raise InvalidConfig("paramstyle", self.paramstyle, rule)

    def claim(self, cursor: Cursor, lease: Fenced, row: object) -> None:
        """Claim a row until the transaction ends, as its first statement.

        Args:
            cursor: One of the transaction's.
            lease: Who wants to write; a run without a fence is always refused.
            row: The row's value in the key column.

        Raises:
            StaleFence: If the row has seen a higher fence, or there is no such row.
        """
        fence, mine = lease.fence, (lease.fence, lease.owner)
        version, holder = self.version_column, self.owner_column
        if fence is not None:
            update = (
                f"UPDATE {self.table} SET {version} = {{}}, {holder} = {{}} "  # noqa: S608
                f"WHERE {self.key} = {{}} AND ({version} IS NULL OR {version} < {{}} "
                f"OR ({version} = {{}} AND {holder} = {{}}))"
            )
            self._run(cursor, update, *mine, row, fence, *mine)
            if cursor.rowcount > 0:
                return
        select = f"SELECT {version}, {holder} FROM {self.table} "  # noqa: S608
        self._run(cursor, select + f"WHERE {self.key} = {{}}", row)
        stored, by = cursor.fetchone() or (None, None)
        # Some drivers count only what changed, and a repeated claim changes nothing.
        if fence is None or (stored, by) != mine:
            raise StaleFence(f"{self.table}[{row!r}]", fence, stored)

    def claim_all(self, cursor: Cursor, lease: Fenced, rows: Iterable[object]) -> None:
        """Claim many rows, in an order that is the same for everyone.

        Args:
            cursor: One of the transaction's.
            lease: Who wants to write.
            rows: Their values in the key column.

        Raises:
            StaleFence: If one of them has seen a higher fence, or is not there.
        """
        for row in sorted(set(rows), key=repr):
            self.claim(cursor, lease, row)

    def claim_or_insert(self, cursor: Cursor, lease: Fenced, row: object) -> None:
        """Claim a row that is inserted if it is not there; PostgreSQL or SQLite.

        With a table of guard rows, one for each lease's name, it claims what no row
        of its own can guard: inserts, deletes, and whatever a statement may reach.

        Args:
            cursor: One of the transaction's.
            lease: Who wants to write.
            row: The row's value in the key column, which must be unique; all other
                columns must have defaults.

        Raises:
            StaleFence: If the row has seen a higher fence.
        """
        if lease.fence is not None:
            insert = f"INSERT INTO {self.table} ({self.key}) VALUES ({{}}) "  # noqa: S608
            self._run(cursor, insert + f"ON CONFLICT ({self.key}) DO NOTHING", row)
        self.claim(cursor, lease, row)

    def _run(self, cursor: Cursor, statement: str, *values: object) -> None:
        marks = map(_MARKS[self.paramstyle].format, range(1, len(values) + 1))
        cursor.execute(statement.format(*marks), values)
