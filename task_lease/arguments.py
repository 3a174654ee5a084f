"""The name of a lease, from the arguments of a task.

A sender and a worker compute the same name, whatever the serialiser did to the
values in between: a tuple arrives as a list, the dictionary key 1 as "1", an enum
as its value. What still differs on arrival has different names. A value that has
no form which survives the journey is refused, and never quoted in the error.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from task_lease.canonical import (
    TEXTUAL,
    Unstable,
    encode_argument,
    encode_default,
    encode_str,
    received,
    received_str,
)
from task_lease.errors import InvalidArgument, InvalidConfig

Key: TypeAlias = str | list[str] | tuple[str, ...] | Callable[..., object]

_Parameters: TypeAlias = Mapping[str, inspect.Parameter]
_Description: TypeAlias = Callable[[Mapping[str, object]], str]
_Piece: TypeAlias = tuple[str, str | None, str, str | None]

_VERSION = b"1"
_NO_TEXT = "of type {} has no stable text: use a list or a callable as key="
_ABSENT = object()
_COLLECTED: dict[Any, object] = {
    inspect.Parameter.VAR_POSITIONAL: (),
    inspect.Parameter.VAR_KEYWORD: {},
}


class Binder:
    """Computes the names of one task's leases from the arguments of its calls.

    Without a key, a name ends in a digest over all arguments, bound to their
    parameters. An argument that equals its default does not count, so a parameter
    that is added with a default does not change the names.

    Example:
        >>> Binder("app.send", lambda tenant, day=1: None, "t:{tenant}").name([7], {})
        'app.send:t:7'
    """

    def __init__(
        self,
        task: str,
        function: Callable[..., object] | inspect.Signature,
        key: Key | None = None,
    ) -> None:
        """Prepare for the calls of one task.

        Args:
            task: The task's name.
            function: What the task runs, or its signature.
            key: What tells the task's leases apart: a format string over the
                arguments (``"tenant:{tenant_id}"``), the names of the arguments
                that count, or a callable that takes all arguments by name. Text
                that it returns is used as it is, anything else as a digest. A
                format string quotes nothing: arguments side by side need a
                separator that is never part of their values.

        Raises:
            InvalidConfig: The key cannot work with this function.
        """
        if not isinstance(function, inspect.Signature):
            function = inspect.signature(function)
        self._signature = function
        # With its colons escaped, no task's name reaches into another's keys.
        self._prefix = task.replace("%", "%25").replace(":", "%3A") + ":"
        self._describe = _description(key, function.parameters)

    def name(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Return the name of the lease for a call with these arguments.

        Raises:
            TypeError: The task cannot be called like this.
            InvalidArgument: An argument that counts has no stable form.
        """
        bound = self._signature.bind(*args, **kwargs)
        return self._prefix + self._describe(bound.arguments)


# After the task, a name goes on with a digest, with text, or with what a callable of
# the user returned. What makes it is prepared once and called with the arguments.


def _description(key: object, parameters: _Parameters) -> _Description:
    if key is None:
        return _digest_over(parameters)
    if isinstance(key, str):
        return _text(key, parameters)
    if isinstance(key, list | tuple):
        for name in key:
            _check_name(key, name, parameters)
        return _digest_over({name: parameters[name] for name in key})
    if callable(key):
        return _choice(key, parameters)
    rule = "must be a format string, a list of argument names or a callable"
    raise InvalidConfig("key", key, rule)


def _digest_over(parameters: _Parameters) -> _Description:
    counted = [
        (name, encode_str(name), default, encode_default(default))
        for name, default in sorted(_defaults(parameters).items())
    ]

    def describe(arguments: Mapping[str, object]) -> str:
        form = _VERSION
        for name, head, default, encoded_default in counted:
            value = arguments.get(name, default)
            # A default needs no stable form, as long as nothing else is given.
            if value is not default:
                encoded = encode_argument(name, value)
                form += b"" if encoded == encoded_default else head + encoded
        return _digest(form)

    return describe


def _text(template: str, parameters: _Parameters) -> _Description:
    pieces = _parse(template)
    for piece in pieces:
        _check_piece(template, piece, parameters)
    defaults = _defaults(parameters)

    def describe(arguments: Mapping[str, object]) -> str:
        values = {**defaults, **arguments}
        return "".join([_fill(piece, values) for piece in pieces])

    return describe


def _choice(choose: Callable[..., object], parameters: _Parameters) -> _Description:
    defaults = _defaults(parameters)
    _check_choice(choose, defaults)

    def describe(arguments: Mapping[str, object]) -> str:
        chosen = choose(**{**defaults, **arguments})
        if isinstance(chosen, str):
            return received_str(chosen)
        return _digest(_VERSION + encode_argument("key", chosen))

    return describe


def _defaults(parameters: _Parameters) -> dict[str, object]:
    return {
        name: _COLLECTED.get(
            p.kind, _ABSENT if p.default is inspect.Parameter.empty else p.default
        )
        for name, p in parameters.items()
    }


def _check_name(key: object, name: object, parameters: _Parameters) -> None:
    if not isinstance(name, str) or name not in parameters:
        known = ", ".join(parameters) or "none"
        rule = f"{name!r} is no parameter of the task, whose parameters are: {known}"
        raise InvalidConfig("key", key, rule)


def _check_choice(choose: Callable[..., object], names: Iterable[str]) -> None:
    try:
        signature = inspect.signature(choose)
    except ValueError:
        return  # Some builtins do not tell.
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        rule = f"must take all arguments of the task by name: {error}"
        raise InvalidConfig("key", choose, rule) from None


def _parse(template: str) -> list[_Piece]:
    try:
        pieces = [
            (literal, name, spec or "", conversion)
            for literal, name, spec, conversion in string.Formatter().parse(template)
        ]
    except ValueError as error:
        raise InvalidConfig("key", template, f"is no format string: {error}") from None
    if not pieces:
        raise InvalidConfig("key", template, "must not be empty")
    return pieces


def _check_piece(template: str, piece: _Piece, parameters: _Parameters) -> None:
    _, name, spec, conversion = piece
    if name is None:
        return
    if not name.isidentifier():
        rule = "may hold nothing but names of arguments in braces"
        raise InvalidConfig("key", template, rule)
    if "{" in spec or conversion not in (None, "a", "r", "s"):
        rule = f"the format of {name!r} is nested or its conversion unknown"
        raise InvalidConfig("key", template, rule)
    _check_name(template, name, parameters)
    if parameters[name].kind in _COLLECTED:
        rule = f"{name!r} collects arguments: use a callable to pick from them"
        raise InvalidConfig("key", template, rule)


def _fill(piece: _Piece, values: Mapping[str, object]) -> str:
    literal, name, spec, conversion = piece
    if name is None:
        return literal
    value = values[name]
    with contextlib.suppress(Unstable):
        value = received(value)
    if type(value) not in TEXTUAL:
        raise InvalidArgument(name, _NO_TEXT.format(type(value).__name__))
    try:
        converted = string.Formatter().convert_field(value, conversion)
        return literal + format(converted, spec)
    except (TypeError, ValueError):
        raise InvalidArgument(name, "does not fit its format in key=") from None


def _digest(form: bytes) -> str:
    return hashlib.sha256(form).hexdigest()[:32]
