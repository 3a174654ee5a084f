"""Databases for the guards: SQLite always, PostgreSQL where it is installed."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest
from conftest import IN_CI
from fencing.books import DRIVERS, TABLES
from postgresql import Postgresql, find_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencing.books import Books


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """Give the address of a PostgreSQL; a missing one is an error in CI."""
    if not find_program("initdb"):
        (pytest.fail if IN_CI else pytest.skip)("no PostgreSQL was found here")
    with Postgresql() as server:
        yield server.address


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Give the address of a database with two books."""
    if request.param == "postgresql":
        address: str = request.getfixturevalue("postgresql")
        with psycopg.connect(address) as base:
            for statement in TABLES:
                base.execute(statement)
        base.close()
        return address
    path = os.fspath(tmp_path / "books.sqlite3")
    with closing(sqlite3.connect(path)) as ledger, ledger:
        for statement in TABLES:
            ledger.execute(statement)
    return path


@pytest.fixture(params=DRIVERS)
def connect(
    request: pytest.FixtureRequest, database: str
) -> Iterator[Callable[..., Books]]:
    """Give a function that opens the books once more, in an isolation level."""
    opened: list[Books] = []

    def open_books(level: str = "READ COMMITTED") -> Books:
        opened.append(DRIVERS[request.param](database, level))
        return opened[-1]

    yield open_books
    for books in opened:
        books.close()


@pytest.fixture
def books(connect: Callable[..., Books]) -> Books:
    """Give the books."""
    return connect()
