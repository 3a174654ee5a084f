"""Lease settings of a worker, from its class and from the environment.

The stock ``rq worker`` command hands no settings module on to the worker, so what a
deployment wants to change is in variables: ``RQ_LEASE_URL``, ``RQ_LEASE_QUEUES`` and
one for each default, like ``RQ_LEASE_TTL``. A variable replaces what the class says.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from task_lease.client import Leases
from task_lease.config import SETTINGS, LeaseConfig
from task_lease.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import redis

#: What all variables begin with.
PREFIX = "RQ_LEASE_"

# What two calls of a function have in common is a matter of the function alone.
_DEFAULTS = frozenset(SETTINGS) - {"key"}
_OF_STORE = frozenset({"fence_life", "proof_of_death"})
_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}
_KNOWN = _DEFAULTS | _OF_STORE | {"url", "queues"}


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker knows about leases, checked.

    Attributes:
        url: The lease store, None for the connection of the jobs themselves.
        of_store: Settings of the store.
        defaults: Settings for every function.
        queues: Settings for every job of a queue, decorated or not.
    """

    url: redis.Redis | str | None
    of_store: Mapping[str, Any]
    defaults: Mapping[str, object]
    queues: Mapping[str, Mapping[str, object]]

    def config(self, queue: str, options: Mapping[str, object]) -> LeaseConfig:
        """Return the settings of a function whose job comes from a queue.

        Args:
            queue: The queue's name.
            options: What the function itself says, which goes before all else.
        """
        of_queue = self.queues.get(queue, {})
        return LeaseConfig().with_settings({**self.defaults, **of_queue, **options})

    def leases(self, connection: redis.Redis) -> Leases:
        """Return the leases in the store.

        Args:
            connection: The connection of the jobs.

        Raises:
            InvalidConfig: If the store or one of its settings is not allowed.
        """
        store: Any = connection if self.url is None else self.url
        try:
            return Leases(store, **self.of_store)
        except InvalidConfig as error:
            raise _renamed(PREFIX + error.setting.upper(), error) from error


def read_settings(
    *,
    url: redis.Redis | str | None = None,
    queues: Mapping[str, Mapping[str, object]] | None = None,
    defaults: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> WorkerSettings:
    """Return the settings of a worker.

    Args:
        url: The lease store as the worker's class names it.
        queues: The settings per queue of the worker's class.
        defaults: The settings for every function of the worker's class.
        environ: The variables that replace them.

    Raises:
        InvalidConfig: If a setting or a variable is not allowed; it says which.
    """
    found = dict(_variables(environ))
    if "queues" in found:
        of_queues = _checked_queues(f"{PREFIX}QUEUES", found.pop("queues"))
    else:
        of_queues = _checked_queues("lease_queues", queues or {})
    store: Any = found.pop("url", url)
    _checked(lambda name: f"{PREFIX}{name.upper()}", found, _DEFAULTS | _OF_STORE)
    known = _DEFAULTS | _OF_STORE
    of_class = _checked(lambda name: f"lease_defaults[{name!r}]", defaults or {}, known)
    both = {**of_class, **found}
    of_store = {name: both.pop(name) for name in _OF_STORE & both.keys()}
    return WorkerSettings(store, of_store, both, of_queues)


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in _KNOWN:
            known = ", ".join(sorted(PREFIX + known.upper() for known in _KNOWN))
            raise InvalidConfig(variable, text, f"is no setting; there are {known}")
        yield name, text if name == "url" else _read(variable, text)


def _read(variable: str, text: str) -> object:
    # As JSON has it, and as Python and this documentation spell it.
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text)
    except ValueError as error:
        if variable == f"{PREFIX}QUEUES":
            raise InvalidConfig(variable, text, f"is no JSON: {error}") from error
        # A bare word: "retry" needs no quotes.
        return text


def _checked(
    called: Callable[[str], str], settings: Mapping[str, object], known: frozenset[str]
) -> dict[str, object]:
    for name, value in settings.items():
        if name not in known:
            rule = f"is no setting; there are {', '.join(sorted(known))}"
            raise InvalidConfig(called(name), value, rule)
    of_lease = {name: v for name, v in settings.items() if name in _DEFAULTS}
    try:
        LeaseConfig().with_settings(of_lease)
    except InvalidConfig as error:
        raise _renamed(called(error.setting), error) from error
    return dict(settings)


def _checked_queues(where: str, queues: object) -> dict[str, dict[str, object]]:
    rule = "must map names of queues to settings, each a mapping itself"
    if not isinstance(queues, dict):
        raise InvalidConfig(where, queues, rule)
    checked: dict[str, dict[str, object]] = {}
    for queue, settings in queues.items():
        if not isinstance(queue, str) or not isinstance(settings, dict):
            raise InvalidConfig(where, queues, rule)
        called = f"{where}[{queue!r}][{{!r}}]".format
        checked[queue] = _checked(called, settings, _DEFAULTS)
    return checked


def _renamed(setting: str, error: InvalidConfig) -> InvalidConfig:
    return InvalidConfig(setting, error.value, error.rule)
