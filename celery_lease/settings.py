"""Turns Celery's configuration into lease settings, once per app and task."""

from __future__ import annotations

import inspect
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from celery_lease.events import EventSender
from celery_lease.signals import send_signal
from task_lease.arguments import Binder
from task_lease.client import Leases
from task_lease.config import SETTINGS, LeaseConfig, check_flag, check_seconds
from task_lease.errors import InvalidConfig
from task_lease.observers import log_event

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from celery import Celery, Task

PREFIX = "lease_"
#: The key of the request under which a run finds what the main process wrote.
RECEIPT = "task_lease"

# Beside the settings of a lease, which an app may set as defaults for its tasks.
_OF_APP = frozenset(
    {"url", "queues", "eager", "checks", "fence_life", "proof_of_death"},
)
_CHECKS = ("warn", "error", "off")
# What two calls of a task have in common is a matter of the task alone.
_DEFAULTS = frozenset(SETTINGS) - {"key"}
_REDIS_URLS = ("redis://", "rediss://")
# Celery's default for Redis, in seconds, and the share of it that a delay may have:
# a message that is not acknowledged by then is delivered again.
_VISIBILITY_TIMEOUT = 3600.0
_SHARE = 0.5
_ATTRIBUTE = "_task_lease"


@dataclass(frozen=True, slots=True)
class Plan:
    """How one task is leased when it comes from one queue."""

    config: LeaseConfig
    binder: Binder


class AppLeases:
    """The leases of one Celery app.

    Args:
        app: The app, already configured.

    Raises:
        InvalidConfig: If a ``lease_`` setting of the app is not allowed.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        settings = dict(_app_settings(app))
        queues = settings.pop("queues", None)
        self.eager = check_flag("lease_eager", settings.pop("eager", False))
        self.checks = _checked_choice("checks", settings.pop("checks", "warn"))
        of_store: dict[str, Any] = {
            name: settings.pop(name)
            for name in ("fence_life", "proof_of_death")
            if name in settings
        }
        url = settings.pop("url", None)
        #: What puts the events of these leases on Celery's own stream.
        self.events = EventSender(app)
        store = _url(app) if url is None else url
        self.leases = _leases(store, of_store, self.events)
        self._defaults = _checked("", settings, _DEFAULTS)
        self._queues = _checked_queues({} if queues is None else queues)
        self._plans: dict[tuple[str, str], Plan | None] = {}
        self._routes: dict[tuple[str, str], str] | None = None
        options = app.conf.get("broker_transport_options") or {}
        timeout = options.get("visibility_timeout")
        #: Seconds after which a broker delivers again what is not acknowledged.
        self.visibility_timeout = check_seconds(
            "visibility_timeout", _VISIBILITY_TIMEOUT if timeout is None else timeout
        )
        #: Seconds that a task which comes back may be delayed at the most.
        self.longest_delay = max(self.visibility_timeout * _SHARE, 1.0)

    @classmethod
    def of(cls, app: Celery) -> AppLeases:
        """Return the leases of an app, made at the first call.

        Raises:
            InvalidConfig: If a ``lease_`` setting of the app is not allowed.
        """
        found = cls.made_for(app)
        if found is None:
            found = cls(app)
            setattr(app, _ATTRIBUTE, found)
        return found

    @classmethod
    def made_for(cls, app: Celery) -> AppLeases | None:
        """Return the leases of an app, None if there was no call for them yet."""
        return cast("AppLeases | None", app.__dict__.get(_ATTRIBUTE))

    @property
    def queues(self) -> frozenset[str]:
        """The names of the queues that have settings of their own."""
        return frozenset(self._queues)

    def plan(self, task: Task[Any, Any], queue: str, *, exclusive: bool) -> Plan | None:
        """Return how a task is leased, or None if it is not.

        Args:
            task: The task.
            queue: The queue from which it came.
            exclusive: Whether the task wants a lease from whatever queue it comes.

        Raises:
            InvalidConfig: If the settings do not fit together.
        """
        found = (task.name, queue)
        if found not in self._plans:
            wanted = exclusive or queue in self._queues
            self._plans[found] = self._new_plan(task, queue) if wanted else None
        return self._plans[found]

    def queue_of(self, request: Mapping[str, Any]) -> str:
        """Return the name of the queue that a message came from, as far as known.

        Args:
            request: The request's fields, with what the main process wrote into it.
        """
        receipt = request.get(RECEIPT)
        if isinstance(receipt, dict) and receipt.get("queue"):
            return str(receipt["queue"])
        info = request.get("delivery_info") or {}
        exchange = info.get("exchange") or ""
        routing_key = info.get("routing_key") or ""
        if not exchange:
            return routing_key
        if self._routes is None:
            self._routes = {
                (queue.exchange.name, queue.routing_key): name
                for name, queue in self._app.amqp.queues.items()
            }
        return self._routes.get((exchange, routing_key), routing_key)

    def may_be_copied(self, acks_late: object, request: Mapping[str, Any]) -> bool:
        """Return whether the broker may have delivered a run's message again.

        Args:
            acks_late: Whether the message is acknowledged only after the run.
            request: The request's fields, with what the main process wrote into it.
        """
        receipt = request.get(RECEIPT)
        if acks_late or not isinstance(receipt, dict):
            return bool(acks_late)
        # Received, then kept back for its time to come, or for a free process.
        return time.time() - float(receipt["received"]) > self.visibility_timeout

    def _new_plan(self, task: Task[Any, Any], queue: str) -> Plan:
        config = LeaseConfig().with_settings(
            {
                **self._defaults,
                **self._queues.get(queue, {}),
                **task_settings(type(task)),
            }
        )
        return Plan(config, Binder(task.name, task.run, config.key))


def task_settings(task: type[Task[Any, Any]]) -> dict[str, object]:
    """Return the ``lease_`` attributes of a task's class, without the prefix.

    Raises:
        InvalidConfig: If one of them is no setting or its value not allowed.
    """
    found = {
        name.removeprefix(PREFIX): getattr(task, name)
        for name in dir(task)
        if name.startswith(PREFIX)
        and not isinstance(inspect.getattr_static(task, name), property)
    }
    return _checked(f"{task.name}: ", found, frozenset(SETTINGS))


@contextmanager
def naming_setting(where: str) -> Iterator[None]:
    """Let an error name a setting as the user wrote it, and where.

    Args:
        where: What stands in front of the setting's name.
    """
    try:
        yield
    except InvalidConfig as error:
        setting = f"{where}{PREFIX}{error.setting}"
        raise InvalidConfig(setting, error.value, error.rule) from error


def _app_settings(app: Celery) -> Iterator[tuple[str, object]]:
    """Yield the lease settings of an app, whatever namespace they are written in."""
    conf = app.conf
    known = _DEFAULTS | _OF_APP
    for name in sorted(known):
        value = conf.get(PREFIX + name, _MISSING)
        if value is not _MISSING:
            yield name, value
    namespace = (conf.prefix or "").lower()
    for key in conf:
        name = str(key).lower().removeprefix(namespace)
        if name.startswith(PREFIX):
            written = name.removeprefix(PREFIX)
            _refuse_unknown("lease_", {written: conf.get(str(key))}, known)


_MISSING = object()


def _refuse_unknown(
    where: str, settings: Mapping[str, object], known: frozenset[str]
) -> None:
    for name, value in settings.items():
        if name not in known:
            rule = f"is no setting; there are {', '.join(sorted(known))}"
            shown = value if isinstance(value, (int, float)) else type(value).__name__
            raise InvalidConfig(f"{where}{name}", shown, rule)


def _checked(
    where: str, settings: Mapping[str, object], known: frozenset[str]
) -> dict[str, object]:
    _refuse_unknown(f"{where}{PREFIX}", settings, known)
    with naming_setting(where):
        LeaseConfig().with_settings(settings)
    return dict(settings)


def _leases(store: Any, settings: Mapping[str, Any], events: EventSender) -> Leases:
    try:
        return Leases(store, observers=(log_event, send_signal, events), **settings)
    except InvalidConfig as error:
        setting = "url" if error.setting == "store" else error.setting
        raise InvalidConfig(f"{PREFIX}{setting}", error.value, error.rule) from error


def _checked_choice(name: str, value: object) -> str:
    if value not in _CHECKS:
        rule = f"must be one of {', '.join(_CHECKS)}"
        raise InvalidConfig(f"{PREFIX}{name}", value, rule)
    return str(value)


def _checked_queues(queues: object) -> dict[str, dict[str, object]]:
    rule = "must be a dictionary of queue names to dictionaries of settings"
    if not isinstance(queues, dict):
        raise InvalidConfig("lease_queues", queues, rule)
    checked: dict[str, dict[str, object]] = {}
    for queue, settings in queues.items():
        if not isinstance(settings, dict) or not isinstance(queue, str):
            raise InvalidConfig("lease_queues", queues, rule)
        plain = {str(name).removeprefix(PREFIX): v for name, v in settings.items()}
        checked[queue] = _checked(f"lease_queues[{queue!r}]: ", plain, _DEFAULTS)
    return checked


def _url(app: Celery) -> str:
    for name in ("result_backend", "broker_url"):
        url = app.conf.get(name)
        if isinstance(url, str) and url.startswith(_REDIS_URLS):
            return url
    rule = (
        "must name the lease store, as neither result_backend nor broker_url is Redis"
    )
    raise InvalidConfig("lease_url", None, rule)
