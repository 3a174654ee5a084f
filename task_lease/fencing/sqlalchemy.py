"""Guard rows of a table through SQLAlchemy 2: a connection or an ORM session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Table, and_, case, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from task_lease.errors import InvalidConfig, StaleFence
from task_lease.fencing.fenced import fence_of

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, CursorResult

    from task_lease.fencing.fenced import Fenced

_INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


class TableGuard:
    """Refuses at the rows of a table whoever has been overtaken there.

    Args:
        table: A table, or a mapped class.
        version_column: A BIGINT: the highest fence that the row has seen, or NULL.
        owner_column: A text: who came with that fence, or NULL.

    Raises:
        InvalidConfig: If it is no table, or has no such column.

    Example:
        >>> guard = TableGuard(Invoice)  # doctest: +SKIP
        >>> with Session(engine) as session, session.begin():  # doctest: +SKIP
        ...     guard.claim(session, lease, Invoice.id == 42)
        ...     # only now read the invoice, and write it
    """

    def __init__(
        self,
        table: Table | type[Any],
        *,
        version_column: str = "lock_version",
        owner_column: str = "lock_owner",
    ) -> None:
        found = getattr(table, "__table__", table)
        if not isinstance(found, Table):
            raise InvalidConfig("table", table, "must be a table or a mapped class")
        for setting in (version_column, owner_column):
            if setting not in found.c:
                rule = f"must be a column of {found.fullname}"
                raise InvalidConfig("column", setting, rule)
        self._table = found
        self._version = found.c[version_column]
        self._owner = found.c[owner_column]

    def claim(
        self, database: Connection | Session, lease: Fenced, *where: ColumnElement[bool]
    ) -> None:
        """Claim rows until the transaction ends, as its first statement.

        A session forgets what it has read, so that it is read again.

        Args:
            database: The connection or session of the transaction.
            lease: Who wants to write; a run without a fence is always refused.
            *where: Which rows; all must pass, and there must be one.

        Raises:
            InvalidConfig: If the session has changes from before the claim.
            StaleFence: If a row has seen a higher fence, or there is no such row.
        """
        fence = fence_of(lease, self._table.fullname)
        _check_unchanged(database)
        ours = and_(self._version == fence, self._owner == lease.owner)
        may = or_(self._version.is_(None), self._version < fence, ours)
        values = {self._version: fence, self._owner: lease.owner}
        claim = update(self._table).where(*where, may).values(values)
        found = cast("CursorResult[Any]", database.execute(claim)).rowcount
        # Also a row that came between the two statements was not claimed.
        others = select(self._version).where(*where, _is_not(ours)).limit(1)
        refused = database.execute(others).first()
        if refused or not found:
            stored = refused[0] if refused else None
            raise StaleFence(self._table.fullname, fence, stored)
        if isinstance(database, Session):
            database.expire_all()

    def claim_or_insert(
        self, database: Connection | Session, lease: Fenced, **key: object
    ) -> None:
        """Claim a row that is inserted if it is not there; PostgreSQL or SQLite.

        With a table of guard rows, one for each lease's name, it claims what no row
        of its own can guard: inserts, deletes, and whatever a statement may reach.

        Args:
            database: The connection or session of the transaction.
            lease: Who wants to write.
            **key: The row's unique column and its value; all other columns must have
                defaults.

        Raises:
            InvalidConfig: If the database is another one; insert the row beforehand.
            StaleFence: If the row has seen a higher fence.
        """
        fence_of(lease, self._table.fullname)
        _check_unchanged(database)
        bind = database.get_bind() if isinstance(database, Session) else database
        if bind.dialect.name not in _INSERTS:
            rule = f"must be one of {', '.join(_INSERTS)} to insert while claiming"
            raise InvalidConfig("dialect", bind.dialect.name, rule)
        insert = _INSERTS[bind.dialect.name](self._table).values(key)
        columns = [self._table.c[name] for name in key]
        database.execute(insert.on_conflict_do_nothing(index_elements=columns))
        where = [self._table.c[name] == value for name, value in key.items()]
        self.claim(database, lease, *where)


def _is_not(ours: ColumnElement[bool]) -> ColumnElement[bool]:
    # Where a column is NULL, a comparison is neither true nor false.
    return case((ours, 0), else_=1) == 1


def _check_unchanged(database: Connection | Session) -> None:
    if isinstance(database, Session) and any(
        (database.new, database.dirty, database.deleted)
    ):
        rule = "must have no changes from before the claim: claim before you read"
        raise InvalidConfig("session", type(database).__name__, rule)
