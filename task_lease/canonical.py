"""The bytes that stand for a value in a digest.

First, a value becomes what a worker may receive in its place, as an instance of one
of the types in ``_ENCODERS``; the order of the questions is that of Celery's JSON
serialiser. Then that is written down.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath, PureWindowsPath
from types import NoneType
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from task_lease.errors import InvalidArgument

_DEEPEST = 100
_LONGEST_PATH = 8
_LONGEST_SHOWN = 30
_TOO_DEEP = "is nested too deeply or holds itself"
_TWO_IN_ONE = "holds two keys that are one after serialisation, as 1 and '1'"
_NO_FORM = "of type {} has no stable form: say with key= what names the lease"


def canonical_form(value: object) -> bytes:
    """Return the bytes that stand for a value in a digest.

    Two values have the same form when a serialiser may make them equal, and only
    then. Each form says its type and where it ends, so forms can be joined.

    Raises:
        InvalidArgument: The value, or one inside it, has no stable form.
    """
    return encode_argument("value", value)


class Unstable(Exception):
    """A value, at a path inside of an argument, has no canonical form."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []


class _Record(NamedTuple):
    kind: str
    fields: dict[str, object]


def encode_argument(name: str, value: object) -> bytes:
    """Return an argument's form, or refuse it by its name and the path inside."""
    try:
        return _encode(value, 0)
    except Unstable as unstable:
        path = unstable.path[:_LONGEST_PATH]
        more = "..." if len(unstable.path) > _LONGEST_PATH else ""
        argument = name + "".join(path) + more
        raise InvalidArgument(argument, unstable.problem) from None


def encode_default(default: object) -> bytes | None:
    """Return the form of a default, or None where it has none."""
    with contextlib.suppress(Unstable):
        return _encode(default, 0)
    return None


def _encode(value: object, depth: int) -> bytes:
    encode = _ENCODERS.get(type(value))
    if encode is None:
        value = received(value, depth)
        encode = _ENCODERS[type(value)]
    return encode(value, depth)


def received(value: Any, depth: int = 0) -> object:
    """Return what a worker may receive in place of a value, as an encodable type."""
    kind = type(value)
    for base, receive in _NATIVE:
        if issubclass(kind, base):
            return receive(value)
    if depth > _DEEPEST:
        raise Unstable(_TOO_DEEP)
    if callable(getattr(kind, "__json__", None)):
        return received(value.__json__(), depth + 1)
    for base, receive in _CARRIED:
        if issubclass(kind, base):
            return receive(value)
    return _received_object(value, kind, depth)


def _received_object(value: Any, kind: type, depth: int) -> object:
    if issubclass(kind, Enum):
        return received(value.value, depth + 1)
    if dataclasses.is_dataclass(kind):
        names = [f.name for f in dataclasses.fields(kind) if f.compare]
        fields = {n: getattr(value, n) for n in names if hasattr(value, n)}
        return _Record(f"{kind.__module__}.{kind.__qualname__}", fields)
    if any(_is_lazy_text(base) for base in kind.__mro__):
        return str(value)
    raise Unstable(_NO_FORM.format(kind.__name__))


def _is_lazy_text(base: type) -> bool:
    # Celery's JSON serialiser sends Django's lazy translations as text.
    return (base.__module__, base.__name__) == ("django.utils.functional", "Promise")


def received_str(value: str) -> str:
    """Return text as a worker receives it, as a plain str."""
    try:
        str.encode(value)
    except UnicodeEncodeError:
        # JSON joins two surrogates that make a pair.
        paired = str.encode(value, "utf-16-le", "surrogatepass")
        return paired.decode("utf-16-le", "surrogatepass")
    return str.__str__(value)


_Receive: TypeAlias = tuple[type, Callable[[Any], object]]
_NATIVE: tuple[_Receive, ...] = (
    (str, received_str),
    (bool, bool),
    (int, int.__index__),
    (float, float.__float__),
    (list, list),
    (tuple, list),
    (dict, lambda value: _open(dict(value.items()))),
    (NoneType, lambda _: None),
)
_CARRIED: tuple[_Receive, ...] = (
    (datetime, lambda value: datetime.fromisoformat(datetime.isoformat(value))),
    (date, lambda value: date.fromisoformat(date.isoformat(value))),
    (time, lambda value: time.fromisoformat(time.isoformat(value))),
    (Decimal, Decimal),
    (UUID, lambda value: UUID(int=value.int)),
    (bytes, lambda value: bytes(memoryview(value))),
    # From here on, only other serialisers carry them.
    (bytearray, bytes),
    (memoryview, bytes),
    (set, frozenset),
    (frozenset, frozenset),
    (timedelta, timedelta.__pos__),
    (PurePosixPath, PurePosixPath),
    (PureWindowsPath, PureWindowsPath),
)
TEXTUAL = {NoneType, bool, int, float, str, datetime, date, time, Decimal, UUID}
_NUMBERED = {NoneType, bool, int, float}


def _sized(tag: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(data), data)


def encode_str(value: str, _: int = 0) -> bytes:
    """Return the form of text."""
    try:
        return _sized(b"s", value.encode())
    except UnicodeEncodeError:
        return _sized(b"s", received_str(value).encode("utf-8", "surrogatepass"))


def _encode_list(value: list[object], depth: int) -> bytes:
    items = _encode_each(value, depth, "[{}]".format)
    return b"l%d:" % len(items) + b"".join(items)


def _encode_set(value: frozenset[object], depth: int) -> bytes:
    items = sorted(_encode_each(value, depth, "{{...}}".format))
    return b"e%d:" % len(items) + b"".join(items)


def _encode_dict(value: dict[object, object], depth: int) -> bytes:
    opened = _open(value)
    if opened is not value:
        return _encode(opened, depth)
    keys = list(value)
    heads = _encode_each(keys, depth, ".keys()".format, _encode_key)
    if len(set(heads)) < len(heads):
        raise Unstable(_TWO_IN_ONE)
    items = _encode_each(value.values(), depth, lambda index: _shown(keys[index]))
    pairs = sorted(zip(heads, items, strict=True))
    return b"m%d:" % len(pairs) + b"".join(head + item for head, item in pairs)


def _encode_key(key: object, depth: int) -> bytes:
    if type(key) is str:
        return encode_str(key)
    plain = received(key, depth)
    if type(plain) in _NUMBERED:
        # JSON has no other keys than text. A number too long for it stays one.
        with contextlib.suppress(ValueError):
            plain = json.dumps(plain)
    return _encode(plain, depth)


def _encode_record(value: _Record, depth: int) -> bytes:
    names = sorted(value.fields)
    items = _encode_each(
        [value.fields[name] for name in names], depth, lambda i: f".{names[i]}"
    )
    pairs = zip(map(encode_str, names), items, strict=True)
    head = b"o%d:" % len(names) + encode_str(value.kind)
    return head + b"".join(name + item for name, item in pairs)


def _encode_each(
    values: Iterable[object],
    depth: int,
    where: Callable[[int], str],
    encode: Callable[[object, int], bytes] = _encode,
) -> list[bytes]:
    if depth >= _DEEPEST:
        raise Unstable(_TOO_DEEP)
    encoded: list[bytes] = []
    try:
        for value in values:
            encoded.append(encode(value, depth + 1))  # noqa: PERF401
    except Unstable as unstable:
        unstable.path.insert(0, where(len(encoded)))
        raise
    return encoded


def _shown(key: object) -> str:
    # A key that may be data, such as an address, is no more shown than a value.
    short = type(key) is str and len(key) <= _LONGEST_SHOWN and key.isidentifier()
    return f"[{key!r}]" if short else "[...]"


#: How Celery's JSON serialiser marks a type. A dictionary like that arrives as one.
_ENVELOPE = {"__type__", "__value__"}
_OPENERS: dict[object, Callable[[Any], object]] = {
    "bytes": str.encode,
    "base64": base64.b64decode,
    "datetime": datetime.fromisoformat,
    "date": lambda text: datetime.fromisoformat(text).date(),
    "time": time.fromisoformat,
    "decimal": Decimal,
    "uuid": lambda fields: UUID(**fields),
}
_UNOPENED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def _open(value: dict[object, object]) -> object:
    if value.keys() == _ENVELOPE:
        with contextlib.suppress(*_UNOPENED):
            return _OPENERS[value["__type__"]](value["__value__"])
    return value


_ENCODERS: dict[type, Callable[[Any, int], bytes]] = {
    NoneType: lambda _value, _: b"n",
    bool: lambda value, _: b"t" if value else b"f",
    int: lambda value, _: b"i%x;" % value,
    float: lambda value, _: b"d%b;" % repr(value).encode(),
    str: encode_str,
    bytes: lambda value, _: _sized(b"b", value),
    list: _encode_list,
    tuple: _encode_list,
    dict: _encode_dict,
    datetime: lambda value, _: _sized(b"T", value.isoformat().encode()),
    date: lambda value, _: _sized(b"D", value.isoformat().encode()),
    time: lambda value, _: _sized(b"C", value.isoformat().encode()),
    # The context decides about the case of its exponent.
    Decimal: lambda value, _: _sized(b"N", str(value).upper().encode()),
    UUID: lambda value, _: _sized(b"U", value.hex.encode()),
    frozenset: _encode_set,
    timedelta: lambda value, _: b"P%d;" % (value // timedelta(microseconds=1)),
    PurePosixPath: lambda value, _: b"/" + encode_str(str(value)),
    PureWindowsPath: lambda value, _: b"\\" + encode_str(str(value)),
    _Record: _encode_record,
}
