"""A table of numbers behind each driver, all used in the same way by the tests."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any, Protocol

import django
import psycopg
import sqlalchemy as sa
from django.conf import settings
from django.db import connections, models, transaction
from sqlalchemy import orm
from typing_extensions import override

from task_lease.fencing import Fenced, RowGuard
from task_lease.fencing.sqlalchemy import TableGuard

if not settings.configured:
    settings.configure(DATABASES={}, LOGGING_CONFIG=None, INSTALLED_APPS=[])
    django.setup()

from task_lease.fencing.django import FencedModel

if TYPE_CHECKING:
    from collections.abc import Callable

TABLES = (
    "DROP TABLE IF EXISTS books",
    "DROP TABLE IF EXISTS lease_fences",
    """CREATE TABLE books (id VARCHAR(99) PRIMARY KEY, n INT DEFAULT 0,
    lock_version BIGINT, lock_owner VARCHAR(64))""",
    """CREATE TABLE lease_fences (name VARCHAR(99) PRIMARY KEY,
    lock_version BIGINT, lock_owner VARCHAR(64))""",
    "INSERT INTO books (id, n) VALUES ('a', 0)",
    "INSERT INTO books (id, n) VALUES ('b', 0)",
)


class Books(Protocol):
    """One transaction after another, on a connection of its own."""

    def claim(self, lease: Fenced, *rows: str) -> None: ...
    def claim_or_insert(self, lease: Fenced, row: str) -> None: ...
    def claim_name(self, lease: Fenced, name: str) -> None: ...
    def read(self, row: str) -> int: ...
    def write(self, row: str, n: int) -> None: ...
    def seen(self, row: str) -> tuple[int | None, str | None] | None: ...
    def delete(self, row: str) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


class Plain:
    """DB-API."""

    def __init__(self, address: str, level: str) -> None:
        self._mark = "?" if address.startswith("/") else "%s"
        style: Any = sqlite3.paramstyle if self._mark == "?" else psycopg.paramstyle
        if self._mark == "?":
            self._base: Any = sqlite3.connect(address, timeout=0)
        else:
            self._base = psycopg.connect(address)
            self._base.isolation_level = psycopg.IsolationLevel[level.replace(" ", "_")]
        self._cursor = self._base.cursor()
        self._guard = RowGuard(table="books", key="id", paramstyle=style)
        self._names = RowGuard(table="lease_fences", key="name", paramstyle=style)

    def claim(self, lease: Fenced, *rows: str) -> None:
        self._guard.claim_all(self._cursor, lease, rows)

    def claim_or_insert(self, lease: Fenced, row: str) -> None:
        self._guard.claim_or_insert(self._cursor, lease, row)

    def claim_name(self, lease: Fenced, name: str) -> None:
        self._names.claim_or_insert(self._cursor, lease, name)

    def read(self, row: str) -> int:
        number: int = self._one("SELECT n FROM books WHERE id = {}", row)[0]
        return number

    def write(self, row: str, n: int) -> None:
        self._run("UPDATE books SET n = {} WHERE id = {}", n, row)

    def seen(self, row: str) -> tuple[int | None, str | None] | None:
        found = self._one("SELECT lock_version, lock_owner FROM books WHERE id={}", row)
        return tuple(found) if found else None

    def delete(self, row: str) -> None:
        self._run("DELETE FROM books WHERE id = {}", row)

    def commit(self) -> None:
        self._base.commit()

    def rollback(self) -> None:
        self._base.rollback()

    def close(self) -> None:
        self._base.close()

    def _one(self, statement: str, *values: object) -> Any:
        self._run(statement, *values)
        return self._cursor.fetchone()

    def _run(self, statement: str, *values: object) -> None:
        self._cursor.execute(statement.format(*[self._mark] * len(values)), values)


class Base(orm.DeclarativeBase):
    """The models of SQLAlchemy."""


class Book(Base):
    """A row."""

    __tablename__ = "books"
    id: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    n: orm.Mapped[int]
    lock_version: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    lock_owner: orm.Mapped[str | None]


NAMES = sa.Table(
    "lease_fences",
    Base.metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("lock_version", sa.BigInteger),
    sa.Column("lock_owner", sa.String),
)


class Core:
    """SQLAlchemy Core."""

    def __init__(self, address: str, level: str) -> None:
        sqlite = address.startswith("/")
        url = f"sqlite:///{address}" if sqlite else "postgresql+psycopg://"
        connect: Callable[[], Any]
        if sqlite:
            connect = lambda: sqlite3.connect(address, timeout=0)  # noqa: E731
            self._engine = sa.create_engine(url, creator=connect)
        else:
            connect = lambda: psycopg.connect(address)  # noqa: E731
            self._engine = sa.create_engine(url, creator=connect, isolation_level=level)
        self._guard, self._names = TableGuard(Book), TableGuard(NAMES)
        self._base = self._connect()

    def _connect(self) -> Any:
        return self._engine.connect()

    def claim(self, lease: Fenced, *rows: str) -> None:
        self._guard.claim(self._base, lease, Book.id.in_(rows))

    def claim_or_insert(self, lease: Fenced, row: str) -> None:
        self._guard.claim_or_insert(self._base, lease, id=row)

    def claim_name(self, lease: Fenced, name: str) -> None:
        self._names.claim_or_insert(self._base, lease, name=name)

    def read(self, row: str) -> int:
        number: int = self._base.scalar(sa.select(Book.n).where(Book.id == row))
        return number

    def write(self, row: str, n: int) -> None:
        self._base.execute(sa.update(Book).where(Book.id == row).values(n=n))

    def seen(self, row: str) -> tuple[int | None, str | None] | None:
        wanted = sa.select(Book.lock_version, Book.lock_owner).where(Book.id == row)
        found = self._base.execute(wanted).first()
        return (found[0], found[1]) if found else None

    def delete(self, row: str) -> None:
        self._base.execute(sa.delete(Book).where(Book.id == row))

    def commit(self) -> None:
        self._base.commit()

    def rollback(self) -> None:
        self._base.rollback()

    def close(self) -> None:
        self._base.close()
        self._engine.dispose()


class Orm(Core):
    """SQLAlchemy's ORM, which reads objects and writes them back."""

    @override
    def _connect(self) -> Any:
        return orm.Session(self._engine)

    @override
    def read(self, row: str) -> int:
        number: int = self._base.get_one(Book, row).n
        return number

    @override
    def write(self, row: str, n: int) -> None:
        self._base.get_one(Book, row).n = n
        self._base.flush()


class Row(FencedModel):
    """A row, as Django has it."""

    id = models.CharField(primary_key=True, max_length=99)
    n = models.IntegerField(default=0)

    class Meta:
        app_label = "books"
        db_table = "books"


class Name(FencedModel):
    """A guard row, as Django has it."""

    name = models.CharField(primary_key=True, max_length=99)

    class Meta:
        app_label = "books"
        db_table = "lease_fences"


class Django:
    """Django, with a database alias for each connection."""

    _count = 0

    def __init__(self, address: str, level: str) -> None:
        Django._count += 1
        self._alias = f"books{Django._count}"
        settings_of = (
            _sqlite(address) if address.startswith("/") else _pg(address, level)
        )
        known = {"default": {}, self._alias: settings_of}
        connections.databases.update(connections.configure_settings(known))
        self._rows: Any = Row.objects.using(self._alias)
        self._names: Any = Name.objects.using(self._alias)
        self._atomic: Any = None

    def _begin(self) -> None:
        if self._atomic is None:
            self._atomic = transaction.atomic(using=self._alias)
            self._atomic.__enter__()

    def claim(self, lease: Fenced, *rows: str) -> None:
        self._begin()
        self._rows.filter(id__in=rows).claim(lease)

    def claim_or_insert(self, lease: Fenced, row: str) -> None:
        self._begin()
        self._rows.claim_or_create(lease, id=row)

    def claim_name(self, lease: Fenced, name: str) -> None:
        self._begin()
        self._names.claim_or_create(lease, name=name)

    def read(self, row: str) -> int:
        self._begin()
        number: int = self._rows.get(id=row).n
        return number

    def write(self, row: str, n: int) -> None:
        self._begin()
        self._rows.filter(id=row).update(n=n)

    def seen(self, row: str) -> tuple[int | None, str | None] | None:
        self._begin()
        found = self._rows.filter(id=row).values_list("lock_version", "lock_owner")
        return found.first()  # type: ignore[no-any-return]

    def delete(self, row: str) -> None:
        self._begin()
        self._rows.filter(id=row).delete()

    def commit(self) -> None:
        self._end(None)

    def rollback(self) -> None:
        self._end(RuntimeError())

    def close(self) -> None:
        self.rollback()
        connections[self._alias].close()

    def _end(self, error: Exception | None) -> None:
        if self._atomic is not None:
            atomic, self._atomic = self._atomic, None
            atomic.__exit__(error and type(error), error, None)


def _sqlite(address: str) -> dict[str, Any]:
    engine = "django.db.backends.sqlite3"
    return {"ENGINE": engine, "NAME": address, "OPTIONS": {"timeout": 0}}


def _pg(address: str, level: str) -> dict[str, Any]:
    about: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(address)
    chosen = psycopg.IsolationLevel[level.replace(" ", "_")]
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": about["dbname"],
        "USER": about["user"],
        "HOST": about["host"],
        "PORT": about["port"],
        "OPTIONS": {"options": about["options"], "isolation_level": chosen},
    }


DRIVERS: dict[str, Callable[[str, str], Books]] = {
    "dbapi": Plain,
    "core": Core,
    "orm": Orm,
    "django": Django,
}
