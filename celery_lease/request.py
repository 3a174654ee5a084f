"""What the worker's main process knows of a run: where it came from, how it died."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from celery.worker.request import Request
from typing_extensions import override

from celery_lease.events import are_wanted
from celery_lease.settings import RECEIPT, AppLeases
from task_lease.errors import LeaseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from task_lease.client import Leases

logger = logging.getLogger("celery_lease")


class LeaseRequest(Request):
    """A request that ends the lease of a run whose process died.

    A child that ends in order releases by itself. The host's failure hooks come
    while a child that is killed may still write, so the lease ends only after its
    process is seen to be dead.
    """

    @override
    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Handle a time limit as Celery does, then see to the lease."""
        super().on_timeout(soft, timeout)
        if not soft:
            _release_when_dead(self)

    @override
    def on_failure(
        self,
        exc_info: Any,
        send_failed_event: bool = True,
        return_ok: bool = False,
    ) -> None:
        """Handle a failure as Celery does, then see to the lease."""
        try:
            super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            # Otherwise the child has reported the failure itself, and lives.
            if not return_ok:
                _release_when_dead(self)


def write_receipt(sender: Any, request: Request, **_: object) -> None:
    """Tell a run from which queue its message came, and when."""
    message_info = getattr(request.message, "delivery_info", None) or {}
    request.request_dict[RECEIPT] = {
        "queue": _queue_of(sender, message_info),
        "received": time.time(),
        "events": are_wanted(sender),
    }


def _queue_of(consumer: Any, delivery_info: Mapping[str, Any]) -> str:
    """Return the name of the queue that the consumer took a message from.

    A broker that names the consumer's tag says it itself; the virtual ones of kombu
    (Redis) tell exchange and routing key only.
    """
    taken = getattr(consumer, "task_consumer", None)
    tags: Mapping[str, str] = getattr(taken, "_active_tags", None) or {}
    tag = delivery_info.get("consumer_tag")
    for queue, active in tags.items():
        if tag == active:
            return queue
    exchange = delivery_info.get("exchange") or ""
    routing_key = str(delivery_info.get("routing_key") or "")
    for queue in getattr(taken, "queues", None) or ():
        if (queue.exchange.name, queue.routing_key) == (exchange, routing_key):
            return str(queue.name)
    return "" if exchange else routing_key


def _release_when_dead(request: Request) -> None:
    try:
        task = request.task
        app_leases = AppLeases.of(task.app)
        queue = app_leases.queue_of(request.request_dict)
        wanted = bool(getattr(task, "wants_lease", False))
        plan = app_leases.plan(task, queue, exclusive=wanted)
        if plan is None:
            return
        name = plan.binder.name(request.args, request.kwargs)
    except Exception:
        # Mostly the run had no lease either. But a `key` of the user's may need what
        # only a child has, and this process must not fall for it.
        logger.debug("The lease of %s ends by its ttl", request.id, exc_info=True)
        return
    about = (app_leases.leases, name, request.id, plan.config.ttl)
    threading.Thread(
        target=_release, args=about, name="task-lease-mourner", daemon=True
    ).start()


def _release(leases: Leases, name: str, task_id: str, ttl: float) -> None:
    try:
        leases.release_dead(name, task_id, patience=ttl)
    except LeaseError as error:
        logger.warning("The lease %s ends by its ttl: %s", name, error)
