"""Programs that run beside the tests, to be killed, stopped and watched."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import sessions
from typing_extensions import Self, override

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

TESTS = Path(__file__).parent


class Process:
    """A running program, the leader of a session of its own.

    It starts at once, writes what it prints to a log, and dies with the tests.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start the program.

        Args:
            command: The program and its arguments.
            log: The file that gets its standard output and standard error,
                after what is already there.
            env: Variables to set beside those of the tests.
            cwd: The folder to run in, by default that of the tests' process.
        """
        self.command = [str(word) for word in command]
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **import_path(), **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )
        self.pid = self._popen.pid
        stat = sessions.read_stat(self.pid)  # not reaped yet, so it is there
        self._started = stat.started if stat else 0
        sessions.watch(self.pid, self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    @override
    def __repr__(self) -> str:
        return f"<Process {self.pid}: {' '.join(self.command)}>"

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        return self._popen.poll()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.returncode is None

    def output(self) -> str:
        """Return what it has printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def children(self) -> list[int]:
        """Return the pids of its living direct children."""
        return sessions.list_children(self.pid)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); its children are left to it."""
        self._popen.send_signal(signal.SIGTERM)

    def kill9(self) -> None:
        """Kill this one process and reap it; its children live on."""
        self._popen.kill()
        self._popen.wait()

    def kill9_all(self) -> None:
        """Kill it together with its children, as a container's end would."""
        sessions.end_session(self.pid, self._started)
        self._popen.wait()

    def pause(self) -> None:
        """Stop it and its children, as a frozen container would."""
        sessions.signal_each(sessions.list_members(self.pid), signal.SIGSTOP)

    def resume(self) -> None:
        """Let it and its children go on after `pause`."""
        sessions.signal_each(sessions.list_members(self.pid), signal.SIGCONT)

    def wait(self, timeout: float) -> int:
        """Return its exit code once it has ended.

        Args:
            timeout: Seconds after which the wait has failed.

        Raises:
            AssertionError: It still runs; the message has its last output.
        """
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            tail = self.output()[-4000:]
            message = f"{self!r} still runs after {timeout:g} s:\n{tail}"
            raise AssertionError(message) from None

    def end(self) -> None:
        """Kill what is left of its session; a second call does nothing."""
        self.kill9_all()
        sessions.forget(self.pid, self._started)


def import_path() -> dict[str, str]:
    """Return the variable by which a Python program finds the tests' modules."""
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(TESTS), *([known] if known else [])])}
