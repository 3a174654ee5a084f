"""The processes of the demo: started, written down, and ended whatever happens."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from example_project.stage.sessions import Watchdog, end

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self


class CannotPlay(Exception):
    """Something that the demo needs is not there, or not any more."""


class Company:
    """All processes that the demo started.

    Each leads a session of its own. Its pid stands in ``NAME.pid`` while it lives, for
    ``make clean``, and what it prints in ``NAME.log``.

    Args:
        folder: Where these files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: set[str] = set()
        self._watchdog = Watchdog()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The server last, so that nobody misses it.
        for name in reversed(list(self._processes)):
            self.end(name)
        self._watchdog.dismiss()

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process.

        Args:
            name: How its files are called.
            command: The program and its arguments.
            env: Variables to set beside our own.
        """
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self._watchdog.watch(process.pid)
        self._processes[name] = process
        self._pid_file(name).write_text(f"{process.pid}\n", encoding="ascii")
        return process

    def stop(self, name: str) -> None:
        """Tell a process to end by itself (SIGTERM)."""
        self._stopped.add(name)
        self._processes[name].terminate()

    def end(self, name: str) -> None:
        """Kill what is left of a process and its children."""
        process = self._processes.pop(name)
        end(process.pid)
        process.wait()
        self._watchdog.forget(process.pid)
        self._pid_file(name).unlink(missing_ok=True)

    def check_alive(self) -> None:
        """Return if all that shall run still does.

        Raises:
            CannotPlay: If a process has ended by itself; the message has its last
                lines.
        """
        for name, process in self._processes.items():
            if name not in self._stopped and process.poll() is not None:
                log = self.log(name).read_text(encoding="utf-8", errors="replace")
                message = f"{name} has ended by itself:\n{log[-2000:]}"
                raise CannotPlay(message)

    def log(self, name: str) -> Path:
        """Return the file with what a process prints."""
        return self._folder / f"{name}.log"

    def _pid_file(self, name: str) -> Path:
        return self._folder / f"{name}.pid"
