"""What worker processes write down for the demo: leases, and that they are ready."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from celery import signals
from typing_extensions import override

from example_project.stage.history import HISTORY, record

if TYPE_CHECKING:
    from task_lease import LeaseEvent


class _Recorder(logging.Handler):
    """Writes down the events that task-lease logs."""

    @override
    def emit(self, entry: logging.LogRecord) -> None:
        event: LeaseEvent | None = getattr(entry, "lease_event", None)
        if event is not None:
            record(
                event.kind,
                lease=event.name,
                id=event.id,
                fence=event.fence,
                seconds=event.seconds,
                detail=event.detail,
                other=(event.holder or {}).get("pid", 0),
            )


def record_leases() -> None:
    """Write down what happens to leases in this process and those it forks.

    The default observer logs every event together with the `LeaseEvent` itself, so a
    handler is all it takes.
    """
    if os.environ.get(HISTORY):
        logger = logging.getLogger("task_lease")
        logger.setLevel(logging.DEBUG)
        if not any(isinstance(handler, _Recorder) for handler in logger.handlers):
            logger.addHandler(_Recorder())


def record_workers() -> None:
    """Write down when the Celery worker of this process is ready."""
    signals.worker_ready.connect(_on_ready)


def _on_ready(**_: object) -> None:
    record("ready")
