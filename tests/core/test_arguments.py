from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import pickle
import tempfile
from collections import Counter, OrderedDict, defaultdict
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, localcontext
from enum import Enum, IntEnum, IntFlag
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from kombu.utils import json as kombu_json
from rq.serializers import DefaultSerializer, JSONSerializer
from typing_extensions import override

from task_lease.arguments import Binder
from task_lease.canonical import canonical_form
from task_lease.errors import InvalidArgument, InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GOLDEN = json.loads(Path(__file__).with_name("golden_names.json").read_text("ascii"))
BERLIN = ZoneInfo("Europe/Berlin")


class Colour(Enum):
    RED = "red"
    BLUE = 2


class Odd(Enum):
    THING = object()


class Size(str, Enum):
    SMALL = "small"


class Level(IntEnum):
    LOW = 1


class Rights(IntFlag):
    READ = 1
    WRITE = 2


class Holiday(date, Enum):
    NEW_YEAR = 2020, 1, 1


class Point(NamedTuple):
    x: int
    y: int


class Loud(str):
    __slots__ = ()

    @override
    def __str__(self) -> str:
        return "loud"

    @override
    def __format__(self, spec: str) -> str:
        return "louder"


class Moment(datetime):
    pass


class Money:
    def __init__(self, amount: str) -> None:
        self.amount = amount

    def __json__(self) -> dict[str, object]:
        return {"amount": Decimal(self.amount), "currency": "EUR"}


class Precise(Money):
    @override
    def __json__(self) -> dict[str, object]:
        return {"__type__": "decimal", "__value__": self.amount}


class Endless:
    def __json__(self) -> object:
        return self


class Plain:
    pass


@dataclasses.dataclass(frozen=True)
class Order:
    number: int
    lines: Any = ()
    seen: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass(frozen=True)
class Bill:
    number: int
    lines: Any = ()


#: What plain JSON carries, with the types that it takes for others.
JSON_VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "zero": 0,
    "one": 1,
    "minus": -255,
    "big": 10**400,
    "float": 1.0,
    "minus zero": -0.0,
    "tiny": 5e-324,
    "huge": 1e300,
    "nan": math.nan,
    "inf": math.inf,
    "minus inf": -math.inf,
    "empty": "",
    "digit": "1",
    "umlaut": "Zo\xeb",
    "decomposed": "Zoe\u0308",
    "emoji": "\U0001f980",
    "pair": "\ud83e\udd80",
    "lone": "a\ud800b",
    "nul": "\x00",
    "list": [1, [2, [3]], "x"],
    "tuple": (1, (2, (3,)), "x"),
    "named tuple": Point(1, 2),
    "empty list": [],
    "empty tuple": (),
    "empty dict": {},
    "dict": {"b": 1, "a": {"c": [None]}},
    "other order": {"a": {"c": (None,)}, "b": 1},
    "ordered": OrderedDict(b=1, a=0),
    "counter": Counter("aab"),
    "default dict": defaultdict(list, a=[1]),
    "keys": {1: "i", 2.5: "f", False: "b", None: "n", math.inf: "inf"},
    "nan key": {math.nan: 1},
    "lone key": {"\ud800": 1, "\ud83e\udd80": 2},
    "enum keys": {Size.SMALL: 1, Level.LOW: 2},
    "str enum": Size.SMALL,
    "int enum": Level.LOW,
    "flag": Rights.READ | Rights.WRITE,
    "str subclass": Loud("quiet"),
}
#: What Celery's JSON carries besides.
CELERY_VALUES: dict[str, Any] = {
    "uuid": UUID("6f6f1c1e-0d6a-4c0e-8d5b-0d6f2f0f6d11"),
    "naive": datetime(2020, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001
    "midnight": datetime(2020, 1, 2),  # noqa: DTZ001
    "utc": datetime(2020, 1, 2, 3, tzinfo=timezone.utc),
    "zoned": datetime(2020, 7, 2, 3, tzinfo=BERLIN),
    "folded": datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=BERLIN),
    "odd offset": datetime(2020, 1, 1, tzinfo=timezone(-timedelta(seconds=3661))),
    "moment": Moment(2020, 1, 2, 3, tzinfo=BERLIN),
    "date": date(2020, 1, 2),
    "holiday": Holiday.NEW_YEAR,
    "time": time(3, 4, 5, 6),
    "zoned time": time(3, 4, tzinfo=BERLIN),
    "utc time": time(3, 4, tzinfo=timezone.utc),
    "decimal": Decimal("1.0"),
    "longer decimal": Decimal("1.00"),
    "exponent": Decimal("1E+3"),
    "decimal nan": Decimal("NaN"),
    "bytes": b"abc",
    "empty bytes": b"",
    "binary": b"\xff\x00",
    "nested": {"a": [UUID(int=1), {"b": (Decimal(1), b"\xff", date(2020, 1, 2))}]},
    "reduced": Money("1.50"),
    "reduced to a mark": Precise("1.50"),
    "mark": {"__type__": "uuid", "__value__": {"hex": "0" * 32}},
    "all marks": [
        {"__type__": "bytes", "__value__": "abc"},
        {"__type__": "base64", "__value__": "/wA="},
        {"__type__": "datetime", "__value__": "2020-01-02"},
        {"__type__": "date", "__value__": "2020-01-02"},
        {"__type__": "time", "__value__": "03:04"},
        {"__type__": "decimal", "__value__": "1.0"},
    ],
}
#: What only pickle (the default of RQ) carries besides.
PICKLE_VALUES: dict[str, Any] = {
    "enum": Colour.RED,
    "number enum": Colour.BLUE,
    "set": {"a", "b", "c"},
    "frozen copy": frozenset({"a", "b", "c"}),
    "frozen set": frozenset({1, "1", None}),
    "byte array": bytearray(b"abc"),
    "timedelta": timedelta(days=-1, microseconds=1),
    "path": PurePosixPath("/a/b"),
    "real path": Path("/a/b"),
    "windows path": PureWindowsPath("C:/a"),
    "data class": Order(1, [Decimal(1)]),
    "tuple key": {(1, 2): 3, Colour.BLUE: 4, UUID(int=1): 5, b"x": 6},
    "unknown mark": {"__type__": "money", "__value__": 1},
    "broken mark": {"__type__": "uuid", "__value__": {"hex": "no"}},
    "odd mark": {"__type__": [], "__value__": 1},
    "odder mark": {"__type__": "uuid", "__value__": {"hex": 1}},
    "number beyond text": {10**5000: -(10**5000)},
}
VALUES = JSON_VALUES | CELERY_VALUES | PICKLE_VALUES
#: Groups of values that a journey makes equal.
EQUAL = [
    {"list", "tuple"},
    {"dict", "other order"},
    {"empty list", "empty tuple"},
    {"one", "int enum"},
    {"emoji", "pair"},
    {"path", "real path"},
    {"bytes", "byte array"},
    {"set", "frozen copy"},
]


def table(values: Mapping[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("value", list(values.values()), ids=list(values))


def as_celery(value: Any) -> Any:
    return kombu_json.loads(kombu_json.dumps(value))


def as_rq_json(value: Any) -> Any:
    serializer: Any = JSONSerializer
    return serializer.loads(serializer.dumps(value))


def as_pickle(value: Any) -> Any:
    return DefaultSerializer.loads(DefaultSerializer.dumps(value))


# The journey of a value.


@table(JSON_VALUES | CELERY_VALUES)
def test_form_is_equal_when_celery_has_carried_value(value: Any) -> None:
    assert canonical_form(as_celery(value)) == canonical_form(value)


@table(JSON_VALUES)
def test_form_is_equal_when_json_of_rq_has_carried_value(value: Any) -> None:
    assert canonical_form(as_rq_json(value)) == canonical_form(value)


@table(VALUES)
def test_form_is_equal_when_pickle_has_carried_value(value: Any) -> None:
    assert canonical_form(as_pickle(value)) == canonical_form(value)


@pytest.mark.parametrize("labels", EQUAL, ids=sorted)
def test_form_is_equal_when_a_journey_makes_values_equal(labels: set[str]) -> None:
    assert len({canonical_form(VALUES[label]) for label in labels}) == 1


def test_form_differs_when_values_still_differ_on_arrival() -> None:
    merged = set[str]().union(*EQUAL)
    distinct = [VALUES[next(iter(sorted(group)))] for group in EQUAL]
    distinct += [value for label, value in VALUES.items() if label not in merged]

    forms = Counter(map(canonical_form, distinct))

    assert [form for form, count in forms.items() if count > 1] == []


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.integers(),
    st.sampled_from([0.0, -0.0, 1.0, 2.0]),
    st.floats(),
    st.sampled_from(["", "0", "1", "true", "a"]),
    st.text(st.characters()),
    st.binary(max_size=3),
    st.sampled_from([Size.SMALL, Level.LOW, Loud("a"), Money("1"), Precise("1")]),
    st.decimals(),
    st.sampled_from([Decimal(1), Decimal("1.0"), Decimal("-0")]),
    st.uuids(),
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.none() | st.sampled_from([BERLIN, timezone.utc])),
)
keys = st.one_of(
    st.sampled_from(["a", "b", "1", "true", "null", "1.5", "NaN"]),
    st.sampled_from([1, True, None, 1.5, math.nan, Size.SMALL, Level.LOW]),
    st.text(st.characters(), max_size=2),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=6,
)


def is_ambiguous(value: Any) -> bool:
    if isinstance(value, dict):
        written = {next(iter(as_celery({key: 0}))) for key in value}
        return len(written) < len(value) or any(map(is_ambiguous, value.values()))
    return isinstance(value, list | tuple) and any(map(is_ambiguous, value))


def delivered(value: Any) -> str:
    return kombu_json.dumps(as_celery(value), sort_keys=True)


@given(values)
def test_form_survives_celery_for_any_value_that_is_clear(value: Any) -> None:
    assume(not is_ambiguous(value))

    assert canonical_form(as_celery(value)) == canonical_form(value)


@given(values)
def test_form_is_refused_exactly_when_keys_become_one(value: Any) -> None:
    if is_ambiguous(value):
        with pytest.raises(InvalidArgument, match="two keys that are one"):
            canonical_form(value)
    else:
        canonical_form(value)


@given(values, values)
@example([[], []], [[[]]])
@example(["ab", "c"], ["a", "bc"])
@example({"a": 1, "b": 2}, {"a": 2, "b": 1})
@example([{}, []], [[], {}])
def test_form_is_equal_exactly_when_celery_delivers_equals(one: Any, two: Any) -> None:
    assume(not is_ambiguous([one, two]))

    assert (canonical_form(one) == canonical_form(two)) == (
        delivered(one) == delivered(two)
    )


@given(st.lists(st.one_of(leaves, st.sets(st.integers() | st.text())), max_size=4))
def test_form_survives_pickle_for_any_value(value: Any) -> None:
    assert canonical_form(pickle.loads(pickle.dumps(value))) == canonical_form(value)  # noqa: S301


def test_form_ignores_capitals_that_the_decimal_context_asks_for() -> None:
    expected = canonical_form(Decimal("1E+9"))

    with localcontext(Context(capitals=0)):
        assert canonical_form(Decimal("1E+9")) == expected


def test_form_of_data_class_ignores_fields_that_do_not_compare() -> None:
    form = canonical_form(Order(1, seen=1.0))

    assert form == canonical_form(Order(1, seen=2.0))
    assert form != canonical_form(Order(2))
    assert form != canonical_form(Bill(1))


def test_form_of_data_class_leaves_out_a_field_that_is_not_set() -> None:
    unset = object.__new__(Bill)

    assert canonical_form(unset).endswith(b"s5:linesl0:")


def test_form_of_memory_view_is_that_of_its_bytes() -> None:
    assert canonical_form(memoryview(b"abc")) == canonical_form(b"abc")


def test_form_of_lazy_translation_is_its_text() -> None:
    lazy = type("Promise", (), {"__str__": lambda _: "text"})
    lazy.__module__ = "django.utils.functional"

    assert canonical_form(type("Lazy", (lazy,), {})()) == canonical_form("text")


# Values without a form.


def nested(depth: int, *, inside: Any = 1) -> Any:
    value = inside
    for _ in range(depth):
        value = [value]
    return value


def looped_list() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def looped_dict() -> Any:
    value: dict[str, Any] = {}
    value["self"] = {"a": value}
    return value


def looped_order() -> Any:
    lines: list[Any] = []
    order = Order(1, lines)
    lines.append(order)
    return order


UNSTABLE: dict[str, tuple[Any, str, str]] = {
    "object": (object(), "a", "of type object has no stable form"),
    "plain": (Plain(), "a", "of type Plain has no stable form"),
    "class": (Money, "a", "of type type has no stable form"),
    "function": (looped_list, "a", "of type function has no stable form"),
    "lambda": (lambda: 1, "a", "of type function has no stable form"),
    "generator": ((x for x in "a"), "a", "of type generator has no stable form"),
    "range": (range(3), "a", "of type range has no stable form"),
    "complex": (1j, "a", "of type complex has no stable form"),
    "inside": ({"x": [1, 2, Plain()]}, "a['x'][2]", "of type Plain has no"),
    "behind another key": ({"x": 1, "y": Plain()}, "a['y']", "of type Plain has no"),
    "in set": ({Plain}, "a{...}", "of type type has no"),
    "in data class": (Order(1, [Plain()]), "a.lines[0]", "of type Plain has no"),
    "as key": ({"x": {Plain: 1}}, "a['x'].keys()", "of type type has no"),
    "under odd key": ({"bob@example.com": Plain()}, "a[...]", "of type Plain has no"),
    "under number": ({4711: Plain()}, "a[...]", "of type Plain has no"),
    "under long key": ({"x" * 31: Plain()}, "a[...]", "of type Plain has no"),
    "two keys": ([{1: "a", "1": "b"}], "a[0]", "holds two keys that are one"),
    "two truths": ({True: 1, "true": 2}, "a", "holds two keys that are one"),
    "two nans": ({math.nan: 1, float("nan"): 2}, "a", "holds two keys"),
    "two pairs": ({"\ud83e\udd80": 1, "\U0001f980": 2}, "a", "holds two keys"),
    "enum of object": (Odd.THING, "a", "of type object has no"),
    "too deep": (nested(101), "a" + "[0]" * 8 + "...", "is nested too deeply"),
    "far too deep": (nested(50_000), "a" + "[0]" * 8 + "...", "is nested too"),
    "list in itself": (looped_list(), "a" + "[0]" * 8 + "...", "is nested too"),
    "dict in itself": (looped_dict(), "a" + "['self']['a']" * 4 + "...", "is nested"),
    "order in itself": (looped_order(), "a" + ".lines[0]" * 4 + "...", "is nested"),
    "endless": (Endless(), "a", "is nested too deeply or holds itself"),
}


def one(a: object) -> None:
    """Take one argument."""


@pytest.mark.parametrize(
    ("value", "argument", "problem"), list(UNSTABLE.values()), ids=list(UNSTABLE)
)
def test_name_is_refused_when_value_has_no_form(
    value: Any, argument: str, problem: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Binder("t", one).name((value,), {})

    assert caught.value.argument == argument
    assert caught.value.problem.startswith(problem)


def test_name_is_refused_when_argument_is_an_open_file() -> None:
    with (
        tempfile.TemporaryFile() as file,
        pytest.raises(InvalidArgument, match=r"^argument 'a' of type .* with key="),
    ):
        Binder("t", one).name((file,), {})


def test_name_accepts_nesting_when_it_is_not_absurd() -> None:
    assert Binder("t", one).name((nested(100),), {})


def test_refusal_quotes_no_value_when_data_is_secret() -> None:
    data = {"secret one": "secret two", "x": ["secret three", {"secret@four": Plain()}]}

    with pytest.raises(InvalidArgument) as caught:
        Binder("t", one).name((data,), {})

    assert "secret" not in repr(caught.value) + str(caught.value)


# Calls.


def simple(a: object, b: object = 2) -> None:
    """Take a default."""


def rich(
    a: object, /, b: object = (), *rest: object, c: object = None, **more: object
) -> None:
    """Take every kind of parameter."""


ONE_NAME: list[tuple[Callable[..., object], list[tuple[Sequence[Any], dict[str, Any]]]]]
ONE_NAME = [
    (simple, [((1,), {}), ((1, 2), {}), ((1,), {"b": 2}), ((), {"b": 2, "a": 1})]),
    (rich, [((1,), {}), ((1, []), {}), ([1], {"b": ()}), ((1, ()), {"c": None})]),
    (rich, [((1, 2, 3), {"c": 4, "d": 5}), ((1, 2, 3), {"d": 5, "c": 4})]),
    (rich, [((1,), {"a": 2, "b": 3}), ((1, 3), {"a": 2})]),
]
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    (("1",), {}),
    ((True,), {}),
    ((1.0,), {}),
    ((2,), {}),
    ((1, 1), {}),
    ((1, None), {}),
    ((1, 2), {}),
    ((1, 2, 3), {}),
    ((1, 2, 3, 4), {}),
    ((1, 2, [3, 4]), {}),
    ((1, [2, 3]), {}),
    ((1,), {"c": 2}),
    ((1,), {"d": 2}),
    ((1,), {"a": 2}),
    ((1,), {"rest": 2}),
    ((1,), {"more": {"d": 2}}),
    ((1,), {"d": {"d": 2}}),
]


@pytest.mark.parametrize(("function", "calls"), ONE_NAME)
def test_name_is_one_when_calls_mean_the_same(
    function: Callable[..., object], calls: list[tuple[Sequence[Any], dict[str, Any]]]
) -> None:
    binder = Binder("t", function)

    assert len({binder.name(args, kwargs) for args, kwargs in calls}) == 1


def test_name_differs_for_each_call_that_means_another() -> None:
    binder = Binder("t", rich)

    names = {binder.name(args, kwargs) for args, kwargs in CALLS}

    assert len(names) == len(CALLS)


@given(values, values)
def test_name_is_one_exactly_when_celery_delivers_the_same_call(a: Any, b: Any) -> None:
    assume(not is_ambiguous([a, b]))
    binder = Binder("t", simple)

    sent, swapped = binder.name((a, b), {}), binder.name((b, a), {})

    assert sent == binder.name((), as_celery({"b": b, "a": a}))
    assert (sent == swapped) == (delivered(a) == delivered(b))


def test_name_is_one_when_given_function_or_signature() -> None:
    signature = inspect.signature(simple)

    assert Binder("t", signature).name((1,), {}) == Binder("t", simple).name((1,), {})


def test_name_stays_when_a_parameter_with_default_is_added() -> None:
    def newer(first: object = None, /, *, a: object, b: object = 2) -> None: ...

    assert Binder("t", newer).name((), {"a": 1}) == Binder("t", simple).name((1,), {})


def test_name_needs_no_form_when_a_default_is_kept() -> None:
    marker = object()

    def function(a: object, b: object = marker) -> None: ...

    binder = Binder("t", function)

    assert binder.name((1,), {}) == binder.name((1, marker), {})
    with pytest.raises(InvalidArgument, match="'b' of type object"):
        binder.name((1, object()), {})


def test_name_keeps_tasks_apart_when_their_names_hold_colons() -> None:
    names = {
        Binder("a", one, "b:{a}").name((1,), {}),
        Binder("a:b", one, "{a}").name((1,), {}),
        Binder("a%3Ab", one, "{a}").name((1,), {}),
    }

    assert len(names) == 3


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'a'"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"a": 2}, "multiple values for argument 'a'"),
        ((1,), {"z": 2}, "unexpected keyword argument 'z'"),
    ],
)
@pytest.mark.parametrize("key", [None, "{a}", ["a"], lambda **_: 1])
def test_name_raises_what_a_wrong_call_would_raise(
    args: Sequence[Any], kwargs: dict[str, Any], message: str, key: Any
) -> None:
    with pytest.raises(TypeError, match=message) as caught:
        Binder("t", simple, key).name(args, kwargs)

    assert not isinstance(caught.value, InvalidArgument)


# A key of the user's.

TEXTS: list[tuple[str, Any, str]] = [
    ("all", 1, "all"),
    ("tenant:{a}", "acme", "tenant:acme"),
    ("{{{a}}}", 1, "{1}"),
    ("{a}-{b}-{a}", 1, "1-2-1"),
    ("{a:05d}", 7, "00007"),
    ("{a!r}", "x", "'x'"),
    ("{a!s:>3}", 7, "  7"),
    ("{a:%Y-%m}", date(2020, 1, 2), "2020-01"),
    ("{a:%Z}", datetime(2020, 1, 2, tzinfo=BERLIN), "UTC+01:00"),
    ("{a}", None, "None"),
    ("{a}", True, "True"),
    ("{a}", 1.0, "1.0"),
    ("{a}", Decimal("1.50"), "1.50"),
    ("{a}", UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    ("{a}", datetime(2020, 1, 2, tzinfo=BERLIN), "2020-01-02 00:00:00+01:00"),
    ("{a}", time(1, 2), "01:02:00"),
    ("{a}", Holiday.NEW_YEAR, "2020-01-01"),
    ("{a}", Size.SMALL, "small"),
    ("{a!r}", Level.LOW, "1"),
    ("{a}", Loud("quiet"), "quiet"),
    ("{a}", Precise("1.5"), "1.5"),
    ("{a}", "\ud83e\udd80", "\U0001f980"),
    ("{a}", "{b}\x00\n", "{b}\x00\n"),
]


@pytest.mark.parametrize(("template", "value", "text"), TEXTS)
def test_text_key_is_filled_in_alike_at_sender_and_worker(
    template: str, value: Any, text: str
) -> None:
    binder = Binder("t", simple, template)

    assert binder.name((value,), {}) == f"t:{text}"
    assert binder.name(as_celery([value]), {}) == f"t:{text}"


@pytest.mark.parametrize(
    "value", [[1], (1,), {"b": 1}, b"x", {1}, Money("1"), Plain(), Order(1)], ids=type
)
def test_text_key_is_refused_when_value_has_no_stable_text(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^argument 'a' of type \w+ has no"):
        Binder("t", simple, "{a}").name((value,), {})


@pytest.mark.parametrize(
    ("template", "value"),
    [("{a:d}", "secret"), ("{a:>9}", None), ("{a}", 10**5000)],
    ids=["text", "none", "number"],
)
def test_text_key_is_refused_when_value_does_not_fit_format(
    template: str, value: Any
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Binder("t", simple, template).name((value,), {})

    assert str(caught.value) == "argument 'a' does not fit its format in key="


def test_list_key_makes_only_its_arguments_count() -> None:
    binder = Binder("t", simple, ["b"])

    assert binder.name((1,), {}) == binder.name((Plain(), 2), {})
    assert binder.name((1,), {}) != binder.name((1, 3), {})


def test_list_key_is_the_digest_of_all_when_it_names_all() -> None:
    expected = Binder("t", simple).name((1, 3), {})

    assert Binder("t", simple, ["b", "a", "b"]).name((1, 3), {}) == expected
    assert Binder("t", simple, ("a", "b")).name((1, 3), {}) == expected


def test_list_key_makes_one_lease_per_task_when_it_is_empty() -> None:
    binder = Binder("t", simple, [])

    assert binder.name((1,), {}) == binder.name((Plain(), 3), {})


def test_callable_key_is_given_every_argument_by_its_name() -> None:
    seen: list[object] = []

    def choose(**arguments: object) -> None:
        seen.append(arguments)

    Binder("t", rich, choose).name((1, 2, 3), {"d": 4})
    Binder("t", rich, choose).name((1,), {})

    assert seen == [
        {"a": 1, "b": 2, "rest": (3,), "c": None, "more": {"d": 4}},
        {"a": 1, "b": (), "rest": (), "c": None, "more": {}},
    ]


def test_callable_key_is_used_as_it_is_when_it_returns_text() -> None:
    assert Binder("t", simple, lambda a, **_: f"x{a}").name((1,), {}) == "t:x1"
    assert Binder("t", one, lambda a: a).name((Loud("quiet"),), {}) == "t:quiet"
    assert Binder("t", one, lambda **_: "\ud83e\udd80").name((1,), {}) == "t:\U0001f980"


def test_callable_key_is_digested_when_it_returns_anything_else() -> None:
    binder = Binder("t", simple, lambda a, b: [a, {"b": b}])

    assert binder.name((1,), {}) == binder.name(as_celery([1]), {"b": 2})
    assert len({binder.name((a,), {}) for a in [1, "1", 1.0, (), None]}) == 5


def test_callable_key_stays_what_it_is_when_code_changes() -> None:
    name = Binder("t", simple, lambda a, b: [a, b]).name((1,), {})

    assert name == "t:" + hashlib.sha256(b"1l2:i1;i2;").hexdigest()[:32]


def test_callable_key_raises_its_own_error_when_it_fails() -> None:
    error = LookupError("mine")

    def choose(**_: object) -> object:
        raise error

    with pytest.raises(LookupError) as caught:
        Binder("t", simple, choose).name((1,), {})

    assert caught.value is error


def test_callable_key_is_refused_when_it_returns_what_has_no_form() -> None:
    binder = Binder("t", simple, lambda a, b: [a, b, Plain()])

    with pytest.raises(InvalidArgument, match=r"^argument 'key\[2\]' of type Plain"):
        binder.name((1,), {})


def test_callable_key_is_accepted_when_its_signature_is_unknown() -> None:
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(dict)

    assert Binder("t", one, dict).name((1,), {})


BAD_KEYS: list[tuple[Any, str]] = [
    ("", "must not be empty"),
    ("{", "is no format string: "),
    ("{a", "is no format string: "),
    ("a}", "is no format string: "),
    ("{}", "may hold nothing but names of arguments in braces"),
    ("{0}", "may hold nothing but names"),
    ("{a.b}", "may hold nothing but names"),
    ("{a[0]}", "may hold nothing but names"),
    ("{a b}", "may hold nothing but names"),
    ("{a:{b}}", "the format of 'a' is nested"),
    ("{a!x}", "the format of 'a' is nested or its conversion unknown"),
    ("{tenant}", "'tenant' is no parameter of the task, whose parameters are: a, b,"),
    ("{rest}", "'rest' collects arguments"),
    ("{more}", "'more' collects arguments"),
    (["tenant"], "'tenant' is no parameter of the task"),
    (["a", 1], "1 is no parameter of the task"),
    (("a", ["b"]), "['b'] is no parameter of the task"),
    ({"a"}, "must be a format string, a list of argument names or a callable"),
    (7, "must be a format string"),
    (b"{a}", "must be a format string"),
    (lambda a: a, "must take all arguments of the task by name: "),
    (lambda *rest: rest, "must take all arguments of the task by name: "),
]


@pytest.mark.parametrize(("key", "rule"), BAD_KEYS)
def test_key_is_refused_when_task_is_set_up(key: Any, rule: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Binder("t", rich, key)

    assert (caught.value.setting, caught.value.value) == ("key", key)
    assert caught.value.rule.startswith(rule)


def test_key_is_refused_clearly_when_task_takes_no_arguments() -> None:
    with pytest.raises(InvalidConfig, match="whose parameters are: none"):
        Binder("t", lambda: None, "{a}")


# What must never change within one version of the protocol.


def test_forms_stay_what_they_are_when_code_changes() -> None:
    current = {
        label: canonical_form(VALUES[label]).decode("latin-1")
        for label in GOLDEN["forms"]
    }

    assert current == GOLDEN["forms"]
    assert set(VALUES) - set(GOLDEN["forms"]) == {"data class", "number beyond text"}


def test_form_of_data_class_stays_what_it_is_when_code_changes() -> None:
    named = dataclasses.make_dataclass("Order", ["number", "lines"])
    named.__module__ = "shop.orders"

    form = canonical_form(named(1, [Decimal(1)]))

    assert form == b"o2:s17:shop.orders.Orders5:linesl1:N1:1s6:numberi1;"


@pytest.mark.parametrize("label", list(GOLDEN["names"]))
def test_names_stay_what_they_are_when_code_changes(label: str) -> None:
    golden = GOLDEN["names"][label]
    functions: dict[str, Callable[..., object]] = {"simple": simple, "rich": rich}

    binder = Binder(golden["task"], functions[golden["function"]], golden["key"])

    assert binder.name(golden["args"], golden["kwargs"]) == golden["name"]
