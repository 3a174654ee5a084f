from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from harness import Process, Server, eventually
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from task_lease import (
    InvalidConfig,
    Lease,
    LeaseConflict,
    Leases,
    StoreUnavailable,
)
from task_lease.answers import Released
from task_lease.claims import Claim, Conflict
from task_lease.host import this_process
from task_lease.keys import lease_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis
    from conftest import Spawn
    from core.conftest import AllExpire, Clock, Events, MakeLeases, Strike

KEY = "tl1:{invoice:42}"
NO_SECONDS: list[Any] = [-1, float("nan"), float("inf"), "1", True, [1], 10**400]

HOLDER = textwrap.dedent(
    """
    import sys, time
    from task_lease import Leases

    lease = Leases(sys.argv[1], ttl=60).acquire("invoice:42")
    print(lease.fence, flush=True)
    time.sleep(600)
    """
)


@pytest.fixture
def start_holder(spawn: Spawn, url: str) -> Callable[[], Process]:
    """Start a process that holds the lease, and return once it does."""

    def start() -> Process:
        process = spawn([sys.executable, "-c", HOLDER, url])
        eventually(lambda: process.output().strip(), 20, "it has the lease")
        return process

    return start


def forge_holder(client: redis.Redis, ttl: float, **about: object) -> None:
    """Let somebody else hold the lease, as its record says."""
    record = {**this_process()._asdict(), "task": "billing.send", **about}
    ms = round(ttl * 1000)
    client.set(KEY, f"stranger 17 {ms} {json.dumps(record)}", px=ms)


# Getting a lease


def test_only_one_gets_the_lease(make_leases: MakeLeases) -> None:
    one, other = make_leases(), make_leases()

    lease = one.try_acquire("invoice:42")

    assert isinstance(lease, Lease)
    assert one.try_acquire("invoice:42") is None
    assert other.try_acquire("invoice:42") is None
    assert isinstance(other.try_acquire("invoice:43"), Lease)
    assert lease.release()
    assert isinstance(other.try_acquire("invoice:42"), Lease)


def test_only_one_gets_the_lease_when_many_threads_race(leases: Leases) -> None:
    inside: list[str] = []
    fences: list[int | None] = []
    overlaps: list[list[str]] = []

    def work(name: str) -> None:
        for _ in range(15):
            with leases.acquire("invoice:42", timeout=60) as lease:
                inside.append(name)
                fences.append(lease.fence)
                if len(inside) > 1:
                    overlaps.append(list(inside))
                inside.remove(name)

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)

    assert overlaps == []
    assert len(fences) == 8 * 15
    assert fences == sorted(set(fences), key=lambda fence: fence or 0)


def test_lease_says_who_holds_it(leases: Leases, url: str) -> None:
    claim = Claim("invoice:42", 10, "billing.send", "8f", "7e", 2, "mail")
    held = leases.ask(claim)

    answer = leases.ask(claim._replace(id="9a"))

    assert isinstance(held, Lease)
    assert isinstance(answer, Conflict)
    holder: dict[str, Any] = dict(answer.refused.holder.items())
    here = this_process()
    assert abs(holder.pop("since") - time.time()) < 60
    assert holder == held.holder
    assert holder["host"] == here.host
    assert (holder["pid"], holder["start"]) == (os.getpid(), here.start)
    assert {
        "task": "billing.send",
        "id": "8f",
        "queue": "mail",
    }.items() <= holder.items()
    assert {"parent": "7e", "attempt": 2}.items() <= holder.items()
    assert answer.error.args == ("invoice:42", answer.refused.holder, answer[0][0])
    assert url not in repr(answer)


def test_acquire_asks_once_when_it_has_no_time(
    leases: Leases, client: redis.Redis
) -> None:
    leases.acquire("invoice:42", ttl=60)
    client.config_resetstat()

    with pytest.raises(LeaseConflict):
        leases.acquire("invoice:42", timeout=0)

    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 1
    assert client.exists(f"{KEY}:q") == 0


def test_two_round_trips_and_ten_commands_when_nobody_competes(
    leases: Leases, client: redis.Redis
) -> None:
    leases.acquire("invoice:42", ttl=60).release()
    client.config_resetstat()

    leases.acquire("invoice:42", ttl=60).release()

    stats = {
        name.removeprefix("cmdstat_"): about["calls"]
        for name, about in client.info("commandstats").items()
    }
    asked_for_here = stats.pop("config|resetstat", 0) + stats.pop("info", 0)
    assert asked_for_here <= 2
    assert stats["evalsha"] == 2
    assert sum(stats.values()) <= 10, stats


def test_lease_ends_when_its_process_is_gone_and_was_elsewhere(
    make_leases: MakeLeases, client: redis.Redis
) -> None:
    forge_holder(client, 1.5, identity="another host", pid=1, start=1)
    leases = make_leases()
    began_at = time.monotonic()

    lease = leases.acquire("invoice:42", timeout=20)

    assert 1 < time.monotonic() - began_at < 1.5 + 1
    assert lease.state == "held"


# Bad input


@pytest.mark.parametrize("name", ["", None, 42, b"invoice", ["invoice"], True])
def test_name_is_refused_when_it_is_no_text(
    leases: Leases, client: redis.Redis, name: Any
) -> None:
    for get in (leases.try_acquire, leases.acquire):
        with pytest.raises(InvalidConfig, match=r"^name="):
            get(name)

    assert client.keys() == []


@pytest.mark.parametrize("ttl", [*NO_SECONDS, 0, 0.01, 86_401])
@pytest.mark.parametrize("held", [False, True])
def test_ttl_is_refused_before_anything_is_asked(
    leases: Leases,
    client: redis.Redis,
    ttl: Any,
    held: bool,  # noqa: FBT001
) -> None:
    lease = leases.acquire("invoice:42") if held else None
    client.config_resetstat()

    for get in (leases.try_acquire, leases.acquire):
        with pytest.raises(InvalidConfig, match=r"^ttl="):
            get("invoice:42", ttl=ttl)
    with pytest.raises(InvalidConfig, match=r"^ttl="):
        Leases(client, ttl=ttl)

    assert "cmdstat_set" not in client.info("commandstats")
    if lease:
        lease.release()


@pytest.mark.parametrize("timeout", NO_SECONDS)
@pytest.mark.parametrize("held", [False, True])
def test_timeout_is_refused_whether_or_not_it_would_be_needed(
    leases: Leases,
    client: redis.Redis,
    timeout: Any,
    held: bool,  # noqa: FBT001
) -> None:
    if held:
        leases.acquire("invoice:42", ttl=60)
    before = client.dbsize()

    with pytest.raises(InvalidConfig, match=r"^timeout="):
        leases.acquire("invoice:42", timeout=timeout)

    assert client.dbsize() == before


@pytest.mark.parametrize("life", [*NO_SECONDS, 10 * 366 * 86_400])
def test_fence_life_is_refused_when_it_is_no_time(url: str, life: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"^fence_life="):
        Leases(url, fence_life=life)


AWKWARD = [
    "x" * 10_240,
    "{" * 10_240,
    "🦀" * 2560,
    "{invoice}",
    "}{",
    "tl1:{invoice:42}",
    "line\nbreak",
    "\x00",
    "a\x00b",
    " ",
    "%",
    "~",
    "Zoë's 🦀",
    "\ud800",
    "%s %d {0} $1",
    "*",
    "[a-z]?",
]


@pytest.mark.parametrize("name", AWKWARD)
def test_any_text_can_be_a_name(
    leases: Leases, client: redis.Redis, all_expire: AllExpire, name: str
) -> None:
    lease = leases.acquire(name)
    with pytest.raises(LeaseConflict) as conflict:
        leases.acquire(name, timeout=0.01)
    others = [leases.try_acquire(other) for other in (f"{name}y", f"y{name}")]
    all_expire()

    assert conflict.value.name == name
    assert all(others)
    lease.check(remote=True)
    assert lease.release()
    left = list(client.scan_iter())
    assert all(key.startswith(b"tl1:{") and len(key) < 256 for key in left)
    all_expire()


@given(st.text(st.characters(), min_size=1), st.text(st.characters(), min_size=1))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_different_names_are_different_leases(
    leases: Leases, one: str, other: str
) -> None:
    with leases.acquire(one):
        lease = leases.try_acquire(other)

        assert (lease is None) == (one == other)
        if lease:
            lease.release()


# A store that fails


def test_store_is_unavailable_when_it_is_down(
    private_server: Server, make_leases: MakeLeases
) -> None:
    leases = make_leases(private_server.url())
    private_server.kill()

    for get in (leases.try_acquire, leases.acquire):
        with pytest.raises(StoreUnavailable, match="failed at acquire"):
            get("invoice:42")
    assert leases.leases() == []
    private_server.start()
    assert isinstance(leases.try_acquire("invoice:42"), Lease)


def test_store_is_unavailable_when_it_hangs(
    private_server: Server, make_leases: MakeLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("task_lease.client.REQUEST_TIMEOUT", 0.3)
    leases = make_leases(private_server.url())
    leases.acquire("another")
    private_server.pause()

    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        leases.acquire("invoice:42")
    private_server.resume()


@pytest.mark.parametrize(
    "refusal", ["readonly", "out of memory", "no permission", "busy"]
)
def test_store_is_unavailable_when_it_refuses(
    private_server: Server, make_leases: MakeLeases, refusal: str
) -> None:
    leases = make_leases(private_server.url())
    with private_server.client() as admin:
        if refusal == "readonly":
            admin.replicaof("127.0.0.1", 1)
        elif refusal == "out of memory":
            admin.config_set("maxmemory", 1)
        elif refusal == "no permission":
            admin.acl_setuser(
                "default", enabled=True, nopass=True, categories=["-@all"]
            )
        else:
            admin.config_set("busy-reply-threshold", 1)
            script = "while true do redis.call('ping') end"
            endless = threading.Thread(target=end_quietly, args=(admin.eval, script, 0))
            endless.start()

        def ask() -> bool:
            lease = leases.try_acquire("invoice:42")
            return lease is not None and not lease.release()

        with pytest.raises(StoreUnavailable, match="failed at acquire"):
            eventually(ask, 10, "it is refused")

        assert leases.leases() == []


def end_quietly(call: Callable[..., object], *args: object) -> None:
    with suppress(Exception):
        call(*args)


def test_full_store_still_lets_a_lease_go(
    private_server: Server, make_leases: MakeLeases
) -> None:
    leases = make_leases(private_server.url(), ttl=60)
    lease = leases.acquire("invoice:42")
    with private_server.client() as admin:
        admin.config_set("maxmemory", 1)

        lease.check(remote=True)
        assert lease.release()

        assert admin.exists(KEY) == 0


def test_lease_is_given_back_when_the_answer_comes_too_late(
    make_leases: MakeLeases, clock: Clock, client: redis.Redis, events: Events
) -> None:
    leases = make_leases(clock=clock, ttl=10)
    ask = leases._store.acquire

    def ask_slowly(*args: Any) -> Any:
        answer = ask(*args)
        clock.ahead += 9.5
        return answer

    leases._store.acquire = ask_slowly  # type: ignore[method-assign,assignment]

    with pytest.raises(StoreUnavailable, match="after its deadline"):
        leases.acquire("invoice:42")

    assert client.exists(KEY) == 0
    assert leases.leases() == []
    assert "acquired" not in events.kinds()


def test_trust_is_counted_from_the_request_when_the_answer_is_slow(
    make_leases: MakeLeases, clock: Clock
) -> None:
    leases = make_leases(clock=clock, ttl=600)
    ask = leases._store.acquire

    def ask_slowly(*args: Any) -> Any:
        answer = ask(*args)
        clock.ahead += 300
        return answer

    leases._store.acquire = ask_slowly  # type: ignore[method-assign,assignment]
    asked_at = clock()

    lease = leases.acquire("invoice:42")

    assert lease.trusted_until == pytest.approx(asked_at + 540, abs=5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_lease_is_given_back_when_nobody_gets_to_have_it(
    make_leases: MakeLeases, client: redis.Redis, error: type[BaseException]
) -> None:
    def strike(_: object) -> None:
        raise error

    leases = make_leases(ttl=60, observers=[strike])

    with pytest.raises(error):
        leases.acquire("invoice:42")

    assert client.exists(KEY) == 0
    assert leases.leases() == []


# Taking over from the dead


def test_lease_of_a_killed_process_is_taken_over_at_once(
    make_leases: MakeLeases, events: Events, start_holder: Callable[[], Process]
) -> None:
    leases = make_leases(ttl=60)
    took = []
    for _ in range(3):  # the best of three, for the machine may be busy
        process = start_holder()
        fence = int(process.output())
        process.kill9()
        began_at = time.monotonic()

        lease = leases.try_acquire("invoice:42")

        took.append(time.monotonic() - began_at)
        assert isinstance(lease, Lease)
        assert lease.fence is not None
        assert lease.fence > fence
        lease.release()
        process.end()

    assert min(took) < 0.2
    assert events.kinds()[:2] == ["takeover", "acquired"]
    assert (events[0].holder or {}).get("pid") != os.getpid()


def test_lease_of_a_living_process_is_never_taken_over(
    make_leases: MakeLeases, start_holder: Callable[[], Process]
) -> None:
    process = start_holder()
    process.pause()

    assert make_leases().try_acquire("invoice:42") is None


def test_lease_of_a_killed_process_waits_for_its_ttl_when_proof_is_off(
    make_leases: MakeLeases, start_holder: Callable[[], Process]
) -> None:
    start_holder().kill9()

    assert make_leases(proof_of_death=False).try_acquire("invoice:42") is None


def test_two_who_take_over_at_once_do_not_both_get_it(
    make_leases: MakeLeases, events: Events, start_holder: Callable[[], Process]
) -> None:
    start_holder().kill9()
    all_leases = [make_leases(ttl=60) for _ in range(6)]
    for leases in all_leases:
        leases.leases()
    start = threading.Barrier(6)
    got: list[Lease] = []

    def contend(leases: Leases) -> None:
        start.wait()
        lease = leases.try_acquire("invoice:42")
        if lease:
            got.append(lease)

    threads = [
        threading.Thread(target=contend, args=(leases,)) for leases in all_leases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(got) == 1
    assert events.kinds().count("takeover") == 1


def test_takeover_jumps_no_queue(
    make_leases: MakeLeases,
    client: redis.Redis,
    start_holder: Callable[[], Process],
) -> None:
    process = start_holder()
    patient = make_leases(ttl=60, proof_of_death=False)
    got: list[Lease] = []
    waiter = threading.Thread(
        target=lambda: got.append(patient.acquire("invoice:42", timeout=60))
    )
    waiter.start()
    eventually(lambda: client.zcard(f"{KEY}:q"), 10, "it stands in the queue")

    process.kill9()

    assert make_leases(ttl=60).try_acquire("invoice:42") is None
    waiter.join(20)
    assert [lease.state for lease in got] == ["held"]


def test_takeover_passes_over_waiters_that_are_dead_as_well(
    make_leases: MakeLeases,
    client: redis.Redis,
    start_holder: Callable[[], Process],
    spawn: Spawn,
    url: str,
) -> None:
    holder = start_holder()
    program = HOLDER.replace('("invoice:42")', '("invoice:42", timeout=60)')
    waiting = [spawn([sys.executable, "-c", program, url]) for _ in range(3)]
    eventually(lambda: client.zcard(f"{KEY}:q") == 3, 30, "they stand in the queue")

    for process in (holder, *waiting):
        process.kill9()

    assert isinstance(make_leases().try_acquire("invoice:42"), Lease)


@pytest.mark.parametrize(
    "about",
    [
        {"identity": "another host"},
        {"identity": ""},
        {"pid": "1"},
        {"pid": -1},
        {"pid": 0},
        {"pid": None},
        {"pid": 2**40},
        {"pid": [1]},
        {"start": "1"},
        {"start": 0},
        {"start": None},
        {"group": 1},
        {"group": None},
    ],
)
def test_nobody_is_dead_whose_record_does_not_prove_it(
    make_leases: MakeLeases, client: redis.Redis, about: dict[str, object]
) -> None:
    forge_holder(client, 60, **{"start": 1, **about})
    before = client.get(KEY)

    assert make_leases().try_acquire("invoice:42") is None
    assert client.get(KEY) == before


def test_process_number_that_was_given_out_again_proves_a_death(
    make_leases: MakeLeases, client: redis.Redis
) -> None:
    forge_holder(client, 60, start=1)

    assert isinstance(make_leases().try_acquire("invoice:42"), Lease)


def test_takeover_gives_up_when_the_dead_come_back_for_ever(
    make_leases: MakeLeases, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge_holder(client, 60)
    monkeypatch.setattr("task_lease.client.is_proven_dead", lambda _: True)
    leases = make_leases()
    tries: list[object] = []

    def release_in_vain(*about: object) -> Released:
        tries.append(about)
        return Released(mine=False)

    monkeypatch.setattr(leases._store, "release", release_in_vain)

    assert leases.try_acquire("invoice:42") is None
    assert 0 < len(tries) < 20


# Threads and memory


# What strikes in a finalizer of redis-py is told as a warning, and harms nothing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_lease_is_renewed_for_nobody_wherever_acquire_is_interrupted(
    make_leases: MakeLeases,
    client: redis.Redis,
    strike: Strike,
) -> None:
    leases = make_leases(ttl=60)
    place = 0
    handed_over: list[int] = []

    def acquire_and_release() -> None:
        with leases.acquire("invoice:42"):
            pass

    while strike(place := place + 1, acquire_and_release):
        assert not leases._heartbeat._mutex.locked()
        # What the store may still hold ends by its ttl, for no beat keeps it, except
        # in the moment in which it is handed to the caller.
        kept = [lease for lease in leases.leases() if lease.is_live]
        if kept:
            handed_over.append(place)
            kept[0].release()
        client.delete(KEY)
    assert place > 100
    assert not handed_over or handed_over[-1] - handed_over[0] < 40, handed_over
    with leases.acquire("invoice:42") as lease:
        lease.check(remote=True)


def test_leases_lists_what_this_process_holds(leases: Leases) -> None:
    held = [leases.acquire(name) for name in ("a", "b")]
    leases.try_acquire("a")

    assert leases.leases() == held
    held[0].release()
    assert leases.leases() == held[1:]


def test_process_of_a_waiter_that_ends_leaves_nothing_endless(
    leases: Leases,
    client: redis.Redis,
    spawn: Spawn,
    url: str,
    all_expire: AllExpire,
) -> None:
    leases.acquire("invoice:42", ttl=60)
    program = HOLDER.replace('("invoice:42")', '("invoice:42", timeout=60)')
    process = spawn([sys.executable, "-c", program, url])
    eventually(lambda: client.zcard(f"{KEY}:q"), 20, "it stands in the queue")

    process.kill9()

    all_expire()
    assert client.pttl(lease_keys("invoice:42").queue) <= 60_000 + 20_000
