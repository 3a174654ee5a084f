from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import fencing.books  # noqa: F401 - sets Django up
import pytest
from django.apps import apps
from django.db import connection, connections
from fencing.tickets import OLD

if TYPE_CHECKING:
    import redis

TEXT = (Path(__file__).parents[2] / "docs" / "fencing.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def create_table(model: Any) -> None:
    with connection.schema_editor() as editor:
        editor.create_model(model)


# sqlite3's and SQLAlchemy's connections are those of the text, which closes none.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_every_block_of_the_documentation_runs(
    client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "text.sqlite3")
    django = {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{path}-django"}
    databases = connections.configure_settings({"default": django})
    connections.databases.update(databases)
    if hasattr(connections._connections, "default"):
        del connections["default"]
    # Mapped classes look for their module.
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", module)
    given: dict[str, Any] = module.__dict__
    given |= {
        "lease": OLD,
        "path": path,
        "folder": tmp_path / "objects",
        "redis_client": client,
        "create_table": create_table,
    }

    for block in BLOCKS:
        exec(compile(block, "fencing.md", "exec", dont_inherit=True), given)  # noqa: S102

    assert len(BLOCKS) == TEXT.count("```python") == 6
    assert given["database"].execute("SELECT id FROM invoices").fetchall() == [(43,)]
    assert given["bill"].total == 10
    assert client.get("total") is None
    assert given["guard"].read("report.csv") == b"42,10\n"
    apps.all_models.pop("billing")
    connections["default"].close()
    given["database"].close()
    given["engine"].dispose()
