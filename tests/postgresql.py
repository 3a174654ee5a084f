"""A PostgreSQL of our own, on a free port, in a temporary folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from deadlines import eventually
from processes import Process
from servers import HOST, free_port
from typing_extensions import Self

if TYPE_CHECKING:
    from types import TracebackType

#: Who runs it where we are root, which PostgreSQL refuses to be.
USER = "postgres"
#: Seconds that it may take to start or to stop.
PATIENCE = 60.0
_OPTIONS = ("fsync=off", "full_page_writes=off", "unix_socket_directories=")


def find_program(name: str) -> Path | None:
    """Return one of PostgreSQL's programs, from where Debian has it or from PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    on_path = shutil.which(name)
    return debian[-1] if debian else Path(on_path) if on_path else None


class Postgresql:
    """A cluster of our own, which dies with the tests."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="task-lease-postgresql-"))
        self.port = free_port()
        self._process: Process | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where its one database is, as psycopg wants it; nobody waits for a row."""
        about = f"host={HOST} port={self.port} user={USER} dbname=postgres"
        return f"{about} options='-c lock_timeout=100ms'"

    def close(self) -> None:
        """End it if it runs, and remove its folder."""
        if self._process is not None:
            if self._process.is_alive:
                # Fast: its children end in good order. They lead own sessions.
                os.kill(self._process.pid, signal.SIGINT)
                self._process.wait(PATIENCE)
            self._process.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        data = self.folder / "data"
        if os.geteuid() == 0:
            shutil.chown(self.folder, USER)
        made = subprocess.run(
            _as_user(
                "initdb",
                f"--pgdata={data}",
                f"--username={USER}",
                "--auth=trust",
                "--no-sync",
                "--no-locale",
                "--encoding=UTF8",
            ),
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            cwd=self.folder,
        )
        assert made.returncode == 0, made.stderr
        options = [word for option in _OPTIONS for word in ("-c", option)]
        address = ("-h", HOST, "-p", str(self.port))
        command = _as_user("postgres", "-D", str(data), *address, *options)
        self._process = Process(
            command, log=self.folder / "server.log", cwd=self.folder
        )
        eventually(self._answers, PATIENCE, "PostgreSQL answers")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.is_alive, self._process.output()
        try:
            psycopg.connect(self.address, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True


def _as_user(name: str, *words: str) -> list[str]:
    program = find_program(name)
    assert program is not None
    as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    return [*(as_user if os.geteuid() == 0 else []), str(program), *words]
