from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from task_lease.errors import InvalidConfig
from task_lease.keys import (
    PARKED_INDEX,
    PREFIX,
    done_key,
    escape,
    keys_of,
    lease_keys,
    wake_channel,
)

GOLDEN = json.loads(Path(__file__).with_name("golden_names.json").read_text("ascii"))
SAFE = re.compile(r"[A-Za-z0-9_.:/@=+,%~-]{1,200}")

AWKWARD = [
    "{",
    "}",
    "{}",
    "a}b{c",
    "tl1:{a}",
    "a b",
    " ",
    "line\nbreak\r\n",
    "\x00",
    "a\x00",
    "*?[a]^\\",
    "%",
    "%7B",
    "~",
    "Zoë",
    "🦀",
    "\ud800",
    "\ud83e\udd80",
    "x" * 10_240,
    "{" * 10_240,
    "🦀" * 10_240,
]

texts = st.one_of(
    st.text(st.characters(), min_size=1),
    st.text("a%7Ee~{}\n", min_size=1, max_size=6),
    st.text("a{", min_size=50, max_size=220),
)


def test_keys_stay_what_they_are_when_code_changes() -> None:
    current = {name: list(lease_keys(name)) for name in GOLDEN["keys"]}

    assert current == GOLDEN["keys"]


def test_prefix_carries_version_when_anything_is_stored() -> None:
    keys = [*lease_keys("a"), done_key("a", "b"), wake_channel("c"), PARKED_INDEX]

    assert all(key.startswith(f"{PREFIX}:") for key in keys)


@pytest.mark.parametrize("name", ["app.tasks.send:tenant:7", "migrate", "a/b-c_d@e=1"])
def test_escape_changes_nothing_when_name_is_ordinary(name: str) -> None:
    assert escape(name) == name


@pytest.mark.parametrize("name", AWKWARD, ids=lambda name: ascii(name)[:20])
def test_escape_gives_safe_ascii_when_name_is_awkward(name: str) -> None:
    assert SAFE.fullmatch(escape(name))


def test_escape_gives_different_text_for_each_awkward_name() -> None:
    assert len({escape(name) for name in AWKWARD}) == len(AWKWARD)


@given(texts)
def test_escape_loses_nothing_when_name_is_not_cut(name: str) -> None:
    escaped = escape(name)

    assert SAFE.fullmatch(escaped)
    if "~" not in escaped:
        assert unquote(escaped, errors="surrogatepass") == name


@given(texts, texts)
def test_escape_keeps_names_apart_when_they_differ(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@pytest.mark.parametrize("tail", ["", "x", "{", "~"])
def test_escape_keeps_long_names_apart_when_their_ends_differ(tail: str) -> None:
    name = "x" * 10_240

    escaped = escape(name + tail)

    assert (escaped == escape(name)) == (tail == "")
    assert escaped.startswith("x" * 100)


def test_escape_never_meets_a_cut_name_when_given_its_result() -> None:
    cut = escape("x" * 10_240)

    assert escape(cut) != cut


@pytest.mark.parametrize("length", [200, 201])
def test_escape_cuts_only_when_name_is_longer_than_limit(length: int) -> None:
    escaped = escape("x" * length)

    assert ("~" in escaped) == (length > 200)


@pytest.mark.parametrize("lead", ["", "x", "xx"])
def test_escape_cuts_between_characters_when_name_is_long(lead: str) -> None:
    head, _ = escape(lead + "{" * 300).split("~")

    assert set(unquote(head)) <= {"x", "{"}


@pytest.mark.parametrize("name", ["", None, 7, b"name"])
def test_escape_names_rule_when_name_is_unusable(name: str) -> None:
    with pytest.raises(InvalidConfig, match=r"^name=.*: must be text and must not be"):
        escape(name)


@given(texts, texts)
def test_keys_share_a_slot_when_they_belong_to_one_lease(name: str, task: str) -> None:
    keys = [*lease_keys(name), done_key(name, task)]

    assert len({key_slot(key.encode("ascii")) for key in keys}) == 1
    assert len(set(keys)) == 7


@given(texts)
def test_keys_are_found_again_when_only_the_first_is_known(name: str) -> None:
    assert keys_of(lease_keys(name).lease) == lease_keys(name)


@given(texts, texts)
def test_keys_never_meet_when_names_differ(one: str, other: str) -> None:
    if one != other:
        assert not set(lease_keys(one)) & set(lease_keys(other))


@given(texts, texts)
def test_done_keys_never_meet_when_attempts_differ(one: str, other: str) -> None:
    assert (done_key("a", one) == done_key("a", other)) == (one == other)


@given(texts, texts)
def test_wake_channels_never_meet_when_processes_differ(one: str, other: str) -> None:
    assert (wake_channel(one) == wake_channel(other)) == (one == other)
    assert wake_channel(one) != PARKED_INDEX


def test_done_key_names_setting_when_attempt_has_no_id() -> None:
    with pytest.raises(InvalidConfig, match=r"^attempt_id="):
        done_key("a", "")


def test_wake_channel_names_setting_when_process_has_no_id() -> None:
    with pytest.raises(InvalidConfig, match=r"^process="):
        wake_channel("")
