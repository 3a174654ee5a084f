from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import redis
from harness import Server, eventually, read_stat
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from task_lease import LeaseLost, StoreUnavailable
from task_lease.answers import Granted, Refused
from task_lease.connection import client_for
from task_lease.keys import lease_keys
from task_lease.scripts import (
    ACQUIRE,
    RELEASE,
    RENEW,
    Place,
    Renewal,
    Store,
    milliseconds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from core.conftest import AllExpire

KEYS = lease_keys("invoice:42")
OTHER_KEYS = lease_keys("invoice:43")
RECORD = '{"task":"billing.send"}'
DAY = 86_400
SOON = 3600.0


class LosesReplies:
    """A line to a server on which some of the replies get lost.

    Attributes:
        loses: How many of the next replies are lost, each with its connection.
    """

    def __init__(self, port: int) -> None:
        self.loses = 0
        self.lost: list[bytes] = []
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._server) as far, suppress(OSError):
            while asked := near.recv(1_000_000):
                far.sendall(asked)
                answered = far.recv(1_000_000)
                if b"EVALSHA" in asked and self.loses:
                    self.loses -= 1
                    self.lost.append(answered)
                    return
                near.sendall(answered)


@pytest.fixture
def line(server: Server) -> Iterator[LosesReplies]:
    line = LosesReplies(server.port)
    yield line
    line.close()


@pytest.fixture
def lossy(url: str, line: LosesReplies, store: Store) -> Store:
    store.acquire(OTHER_KEYS, "warm-up", 1, RECORD)
    store.release(OTHER_KEYS, "warm-up")
    store.renew([Renewal(OTHER_KEYS, "warm-up", 1)])
    database = url.rsplit("/", 1)[1]
    client = client_for(f"redis://127.0.0.1:{line.port}/{database}", 5)
    return Store(client, fence_life=SOON)


@pytest.fixture
def store(url: str) -> Store:
    return Store(client_for(url, 5), fence_life=SOON)


@pytest.fixture
def forgets(url: str) -> Store:
    return Store(client_for(url, 5), fence_life=0)


def granted(store: Store, owner: str, *, keys: Any = KEYS, ttl: float = 10) -> int:
    reply = store.acquire(keys, owner, ttl, RECORD)
    assert isinstance(reply, Granted)
    return reply.fence


def refused(
    store: Store, owner: str, *, place: Place | None = None, ttl: float = 10
) -> Refused:
    reply = store.acquire(KEYS, owner, ttl, RECORD, place)
    assert isinstance(reply, Refused)
    return reply


def place(patience: float = 60, channel: str = "tl1:wake:test") -> Place:
    return Place(channel, patience)


def server_ms(client: Any) -> int:
    seconds, us = client.time()
    return int(seconds) * 1000 + int(us) // 1000


def holder_of(client: Any) -> str | None:
    stored = client.get(KEYS.lease)
    return stored.decode().split(" ")[0] if stored else None


# Acquire


def test_acquire_gives_the_same_answer_when_it_is_repeated(store: Store) -> None:
    first = granted(store, "me")

    assert granted(store, "me") == first
    assert granted(store, "me") == first


def test_acquire_sets_the_full_ttl_again_when_it_is_mine(
    store: Store, client: Any
) -> None:
    granted(store, "me", ttl=10)
    client.pexpire(KEYS.lease, 500)

    granted(store, "me", ttl=20)

    assert 19_000 < client.pttl(KEYS.lease) <= 20_000


def test_conflict_says_all_about_the_holder(store: Store) -> None:
    fence = granted(store, "me", ttl=20)

    answer = refused(store, "you")

    assert 19 < answer.remaining <= 20
    assert (answer.ttl, answer.fence, answer.owner) == (20, fence, "me")
    assert answer.holder == {"task": "billing.send", "since": fence / 1e6}
    assert answer.arrival == ""


def test_conflict_changes_nothing_of_the_holder(store: Store, client: Any) -> None:
    granted(store, "me", ttl=20)
    before = client.get(KEYS.lease)

    refused(store, "you")

    assert client.get(KEYS.lease) == before
    assert set(client.keys()) == {KEYS.lease.encode(), KEYS.fence.encode()}


@pytest.mark.parametrize(
    "step_back",
    [
        lambda client: client.persist(KEYS.lease),
        lambda client: client.pexpire(KEYS.lease, DAY * 1000),
        lambda client: client.pexpire(KEYS.lease, 20_001 + 1000),
    ],
)
def test_conflict_cuts_the_rest_to_the_ttl_when_the_clock_stepped_back(
    store: Store, client: Any, step_back: Callable[[Any], object]
) -> None:
    granted(store, "me", ttl=20)
    step_back(client)

    answer = refused(store, "you")

    assert 19 < answer.remaining <= 20
    assert 19_000 < client.pttl(KEYS.lease) <= 20_000


def test_conflict_leaves_the_rest_alone_when_it_is_within_the_ttl(
    store: Store, client: Any
) -> None:
    granted(store, "me", ttl=20)
    client.pexpire(KEYS.lease, 5000)

    assert refused(store, "you").remaining <= 5
    assert client.pttl(KEYS.lease) <= 5000


@pytest.mark.parametrize("record", ["", "{", "[1]", "null", "7", "text", '"x"'])
def test_conflict_has_an_unknown_holder_when_the_record_is_none(
    store: Store, client: Any, record: str
) -> None:
    client.set(KEYS.lease, f"me 17 20000 {record}", px=20_000)

    answer = refused(store, "you")

    assert answer.holder == {"since": 17 / 1e6}
    assert answer.owner == "me"


@pytest.mark.parametrize("text", ["", "me", "me 17", "me x 20000 {}", "{}"])
def test_acquire_leaves_a_key_alone_that_is_no_lease(
    store: Store, client: Any, text: str
) -> None:
    client.set(KEYS.lease, text, px=20_000)

    with pytest.raises(StoreUnavailable, match="TASKLEASE the lease key holds"):
        store.acquire(KEYS, "you", 10, RECORD)

    assert client.get(KEYS.lease) == text.encode()
    assert client.keys() == [KEYS.lease.encode()]


# The fence


def test_fences_grow_from_holder_to_holder(store: Store) -> None:
    fences = []
    for turn in range(200):
        fences.append(granted(store, f"owner-{turn}"))
        store.release(KEYS, f"owner-{turn}")

    assert fences == sorted(set(fences))


def test_fence_is_the_time_of_the_server_when_there_is_no_floor(
    store: Store, client: Any
) -> None:
    before = server_ms(client)

    fence = granted(store, "me")

    assert before * 1000 <= fence <= (server_ms(client) + 1) * 1000


@pytest.mark.parametrize(
    "floor", [4_102_444_800_000_001, 9_000_000_000_000_123, 9_007_199_254_739_000]
)
def test_fence_stays_above_the_floor_to_the_last_digit(
    store: Store, client: Any, floor: int
) -> None:
    client.set(KEYS.fence, floor, px=1_000_000)

    fence = granted(store, "me")

    assert floor < fence <= floor + 1000
    assert client.get(KEYS.lease).split(b" ")[1] == b"%d" % fence
    assert client.get(KEYS.fence) == b"%d" % fence
    assert refused(store, "you").fence == fence


def test_fences_differ_when_two_sides_of_a_failover_issue_them(
    store: Store, client: Any
) -> None:
    drawn = set()
    for _ in range(20):
        client.delete(KEYS.lease)
        client.set(KEYS.fence, 4_102_444_800_000_001, px=1_000_000)
        drawn.add(granted(store, "me"))

    assert len(drawn) > 1


def test_floor_outlives_the_time_at_which_the_clock_reaches_its_fence(
    store: Store, client: Any
) -> None:
    ahead_ms = server_ms(client) + DAY * 1000
    client.set(KEYS.fence, ahead_ms * 1000, px=5000)

    fence = granted(store, "me")

    expires_at_ms = client.execute_command("PEXPIRETIME", KEYS.fence)
    assert expires_at_ms >= fence / 1000 + SOON * 1000
    assert expires_at_ms <= fence / 1000 + SOON * 1000 + 1


def test_floor_is_kept_when_the_holder_only_renews_or_asks_again(
    store: Store, client: Any
) -> None:
    fence = granted(store, "me")

    granted(store, "me")
    store.renew([Renewal(KEYS, "me", 10)])

    assert client.get(KEYS.fence) == b"%d" % fence
    assert client.pttl(KEYS.fence) > SOON * 1000 - 60_000


def test_no_floor_is_left_when_fences_have_no_life(forgets: Store, client: Any) -> None:
    first = granted(forgets, "me")
    forgets.release(KEYS, "me")

    assert client.keys() == []
    assert granted(forgets, "you") > first


# Renew


def test_renew_tells_apart_what_is_mine_in_a_batch(store: Store, client: Any) -> None:
    granted(store, "me", ttl=10)
    granted(store, "you", keys=OTHER_KEYS)
    client.pexpire(KEYS.lease, 500)

    batch = [
        Renewal(KEYS, "me", 10),
        Renewal(OTHER_KEYS, "me", 10),
        Renewal(lease_keys("nobody's"), "me", 10),
        Renewal(KEYS, "m", 10),
        Renewal(KEYS, "me2", 10),
    ]

    assert store.renew(batch) == [True, False, False, False, False]
    assert store.renew(batch) == [True, False, False, False, False]
    assert client.pttl(KEYS.lease) > 9000
    assert client.exists(lease_keys("nobody's").lease) == 0


def test_renew_judges_each_by_itself_when_one_key_is_broken(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    client.lpush(OTHER_KEYS.lease, "no lease")

    broken, mine = store.renew([Renewal(OTHER_KEYS, "me", 1), Renewal(KEYS, "me", 1)])

    assert isinstance(broken, StoreUnavailable)
    assert "WRONGTYPE" in broken.problem
    assert mine is True


def test_renew_of_nothing_is_nothing(store: Store) -> None:
    assert store.renew([]) == []


def test_renew_gives_back_an_expiry_that_somebody_took_away(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    client.persist(KEYS.lease)

    assert store.renew([Renewal(KEYS, "me", 10)]) == [True]
    assert 9000 < client.pttl(KEYS.lease) <= 10_000


# Release


def test_release_ends_only_what_is_mine(store: Store, client: Any) -> None:
    granted(store, "me")

    for stranger in ("you", "m", "me2", "", " ", "me "):
        assert not store.release(KEYS, stranger).mine
    assert holder_of(client) == "me"

    assert store.release(KEYS, "me").mine
    assert client.exists(KEYS.lease) == 0


def test_release_never_ends_the_next_lease_when_mine_ran_out(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    client.delete(KEYS.lease)
    granted(store, "you")

    assert not store.release(KEYS, "me").mine
    assert not store.release(KEYS, "me").mine
    assert holder_of(client) == "you"


def test_release_of_what_nobody_holds_leaves_nothing(store: Store, client: Any) -> None:
    assert not store.release(KEYS, "me").mine
    assert client.keys() == []


def test_release_leaves_only_the_floor(
    store: Store, client: Any, all_expire: AllExpire
) -> None:
    granted(store, "me")

    store.release(KEYS, "me")

    assert client.keys() == [KEYS.fence.encode()]
    all_expire()


# The queue


def test_waiters_are_handed_the_lease_first_come_first_served(
    store: Store, client: Any, all_expire: AllExpire
) -> None:
    fences = [granted(store, "w0")]
    for waiter in ("w1", "w2", "w3"):
        refused(store, waiter, place=place())
    all_expire()

    for last, next_one in (("w0", "w1"), ("w1", "w2"), ("w2", "w3")):
        assert store.release(KEYS, last).mine
        assert holder_of(client) == next_one
        all_expire()
        fences.append(granted(store, next_one))

    assert fences == sorted(set(fences))
    assert client.exists(KEYS.queue, KEYS.waiters) == 0


def test_handed_lease_is_short_until_the_waiter_takes_it(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    refused(store, "you", place=place(), ttl=60)

    store.release(KEYS, "me")
    short = client.pttl(KEYS.lease)
    reserved_fence = refused(store, "newcomer").fence
    fence = granted(store, "you", ttl=60)

    assert 0 < short <= 2000
    assert 50_000 < client.pttl(KEYS.lease) <= 60_000
    assert fence == reserved_fence


def test_handed_lease_is_never_longer_than_the_waiters_ttl(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    refused(store, "you", place=place(), ttl=0.5)

    store.release(KEYS, "me")

    assert 0 < client.pttl(KEYS.lease) <= 500


def test_waiter_is_told_on_its_channel_when_it_is_handed_the_lease(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    refused(store, "you", place=place(channel="tl1:wake:here"))
    with client.pubsub() as subscription:
        subscription.subscribe("tl1:wake:here")
        subscription.get_message(timeout=5)

        store.release(KEYS, "me")

        assert subscription.get_message(timeout=5)["data"] == b"you"


def test_newcomer_does_not_jump_in_when_somebody_waits(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    refused(store, "first", place=place())
    refused(store, "second", place=place())
    client.delete(KEYS.lease)

    assert refused(store, "newcomer").owner == "first"
    assert refused(store, "newcomer", place=place()).owner == "first"
    granted(store, "first")
    store.release(KEYS, "first")
    assert holder_of(client) == "second"


def test_second_waiter_gives_way_when_the_lease_ran_out(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    refused(store, "first", place=place())
    refused(store, "second", place=place())
    client.delete(KEYS.lease)

    assert refused(store, "second", place=place()).owner == "first"
    granted(store, "first")


def test_first_waiter_takes_what_ran_out_without_a_release(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    refused(store, "first", place=place())
    client.delete(KEYS.lease)

    granted(store, "first")

    assert client.exists(KEYS.queue, KEYS.waiters) == 0


def test_waiter_keeps_its_place_when_it_asks_again(store: Store, client: Any) -> None:
    granted(store, "me")
    arrival = refused(store, "first", place=place()).arrival
    refused(store, "second", place=place())

    again = refused(store, "first", place=place())
    told = refused(store, "first", place=place()._replace(arrival=arrival))

    assert again.arrival == told.arrival == arrival
    assert client.zrange(KEYS.queue, 0, -1) == [b"first", b"second"]


def test_waiter_gets_its_place_back_when_it_was_handed_and_came_too_late(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    arrival = refused(store, "late", place=place()).arrival
    refused(store, "other", place=place())
    store.release(KEYS, "me")
    client.delete(KEYS.lease)
    granted(store, "other")
    refused(store, "third", place=place())

    refused(store, "late", place=place()._replace(arrival=arrival))

    assert client.zrange(KEYS.queue, 0, -1) == [b"late", b"third"]


def test_dead_waiters_are_passed_over(store: Store, client: Any) -> None:
    granted(store, "me")
    for waiter in ("dead-1", "dead-2", "alive", "dead-3"):
        refused(store, waiter, place=place())
    for waiter in ("dead-1", "dead-2", "dead-3"):
        entry = client.hget(KEYS.waiters, waiter)
        past = server_ms(client) - 1
        client.hset(KEYS.waiters, waiter, b"%d %s" % (past, entry.split(b" ", 1)[1]))

    store.release(KEYS, "me")

    assert holder_of(client) == "alive"
    granted(store, "alive")
    store.release(KEYS, "alive")
    assert client.exists(KEYS.lease, KEYS.queue, KEYS.waiters) == 0


def test_waiter_without_its_particulars_is_passed_over(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    refused(store, "half", place=place())
    refused(store, "whole", place=place())
    client.hdel(KEYS.waiters, "half")

    store.release(KEYS, "me")

    assert holder_of(client) == "whole"


def test_queue_ends_by_itself_when_all_who_waited_are_gone(
    store: Store, client: Any, all_expire: AllExpire
) -> None:
    granted(store, "me", ttl=20)

    refused(store, "you", place=place(patience=5))

    for key in (KEYS.queue, KEYS.waiters):
        assert 20_000 < client.pttl(key) <= 25_000
    refused(store, "she", place=place(patience=60))
    refused(store, "you", place=place(patience=5))
    for key in (KEYS.queue, KEYS.waiters):
        assert 70_000 < client.pttl(key) <= 80_000
    all_expire()


def test_release_by_one_who_only_waits_leaves_the_queue(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    refused(store, "you", place=place())

    assert not store.release(KEYS, "you").mine

    assert client.exists(KEYS.queue, KEYS.waiters) == 0
    assert holder_of(client) == "me"


def test_handed_lease_goes_on_when_the_waiter_has_given_up(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    refused(store, "first", place=place())
    refused(store, "second", place=place())
    store.release(KEYS, "me")

    assert store.release(KEYS, "first").mine

    assert holder_of(client) == "second"


def test_lease_ends_all_the_same_when_the_hand_over_fails(
    store: Store, client: Any
) -> None:
    granted(store, "me")
    refused(store, "you", place=place())
    client.set(KEYS.fence, "no number", px=60_000)

    done = store.release(KEYS, "me")

    assert done.mine
    assert done.problem
    assert holder_of(client) != "me"


def test_everything_expires_after_each_step(
    store: Store, client: Any, all_expire: AllExpire
) -> None:
    for turn in range(30):
        me, you, she = f"me-{turn}", f"you-{turn}", f"she-{turn}"
        granted(store, me)
        refused(store, you, place=place())
        refused(store, she, place=place())
        store.renew([Renewal(KEYS, me, 10)])
        all_expire()
        store.release(KEYS, me)
        all_expire()
        store.release(KEYS, you)
        granted(store, she)
        all_expire()
        store.release(KEYS, she)

    assert client.keys() == [KEYS.fence.encode()]


# A server that forgot the scripts


def test_every_operation_works_when_the_server_forgot_its_script(
    store: Store, client: Any
) -> None:
    client.script_flush()
    granted(store, "me")
    client.script_flush()
    refused(store, "you", place=place())
    client.script_flush()
    assert store.renew([Renewal(KEYS, "me", 10), Renewal(KEYS, "you", 10)]) == [
        True,
        False,
    ]
    client.script_flush()
    assert store.release(KEYS, "me").mine
    assert holder_of(client) == "you"


def test_operation_is_called_by_its_digest_when_the_server_knows_it(
    store: Store, client: Any
) -> None:
    for _ in range(3):
        granted(store, "me")
        store.renew([Renewal(KEYS, "me", 10)])
        store.release(KEYS, "me")
    client.config_resetstat()

    granted(store, "me")
    store.renew([Renewal(KEYS, "me", 10)])
    store.release(KEYS, "me")

    assert client.script_exists(ACQUIRE.digest, RENEW.digest, RELEASE.digest) == [1] * 3
    stats = client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 3
    assert "cmdstat_eval" not in stats
    assert "cmdstat_script|load" not in stats


# A reply that gets lost


def test_acquire_is_granted_once_when_its_reply_was_lost(
    lossy: Store, line: LosesReplies, client: Any
) -> None:
    line.loses = 1

    fence = granted(lossy, "me")

    assert len(line.lost) == 1
    assert str(fence).encode() in line.lost[0]
    assert client.get(KEYS.lease).split(b" ")[1] == str(fence).encode()


def test_waiter_has_one_place_when_the_reply_was_lost(
    lossy: Store, line: LosesReplies, client: Any
) -> None:
    granted(lossy, "me")
    line.loses = 1

    refused(lossy, "you", place=place())

    assert len(line.lost) == 1
    assert client.zrange(KEYS.queue, 0, -1) == [b"you"]


def test_renewal_is_told_or_unknown_when_its_reply_was_lost(
    lossy: Store, line: LosesReplies
) -> None:
    granted(lossy, "me")
    line.loses = 1

    (first,) = lossy.renew([Renewal(KEYS, "me", 10)])
    (second,) = lossy.renew([Renewal(KEYS, "me", 10)])

    assert len(line.lost) == 1
    assert isinstance(first, StoreUnavailable) or first is True
    assert second is True


def test_release_was_mine_when_its_reply_was_lost(
    lossy: Store, line: LosesReplies, client: Any
) -> None:
    granted(lossy, "me")
    line.loses = 1

    assert lossy.release(KEYS, "me").mine

    assert len(line.lost) == 1
    assert client.exists(KEYS.lease) == 0


def test_hand_over_happens_once_when_the_reply_of_a_release_was_lost(
    lossy: Store, line: LosesReplies, client: Any
) -> None:
    granted(lossy, "me")
    refused(lossy, "first", place=place())
    refused(lossy, "second", place=place())
    line.loses = 1

    assert lossy.release(KEYS, "me").mine

    assert holder_of(client) == "first"
    assert client.zrange(KEYS.queue, 0, -1) == [b"second"]


def test_store_is_unavailable_when_two_replies_were_lost(
    lossy: Store, line: LosesReplies, client: Any
) -> None:
    line.loses = 2

    with pytest.raises(StoreUnavailable, match="acquire"):
        lossy.acquire(KEYS, "me", 10, RECORD)

    assert 0 < client.pttl(KEYS.lease) <= 10_000
    line.loses = 2
    with pytest.raises(StoreUnavailable, match="release"):
        lossy.release(KEYS, "me")
    assert client.exists(KEYS.lease) == 0


# An interruption between a request and its reply


class InterruptedConnection(redis.Connection):
    """Raises, once, after a request was sent and before its reply is read."""

    strikes = False

    @override
    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        if InterruptedConnection.strikes:
            InterruptedConnection.strikes = False
            raise LeaseLost
        return super().read_response(*args, **kwargs)


@pytest.mark.parametrize(
    "operation",
    [
        lambda store: store.acquire(KEYS, "me", 10, RECORD),
        lambda store: store.renew([Renewal(KEYS, "me", 10)]),
        lambda store: store.release(KEYS, "me"),
    ],
)
def test_reply_is_never_taken_for_that_of_an_interrupted_request(
    private_server: Server, operation: Callable[[Store], object]
) -> None:
    pool = redis.ConnectionPool(
        connection_class=InterruptedConnection,
        host="127.0.0.1",
        port=private_server.port,
    )
    store = Store(client_for(redis.Redis(connection_pool=pool), 5), fence_life=SOON)
    fence = granted(store, "you", keys=OTHER_KEYS)
    private_server.pause()
    eventually(lambda: is_stopped(private_server), 5, "the server stands still")
    InterruptedConnection.strikes = True

    with pytest.raises(LeaseLost):
        operation(store)
    resume = threading.Timer(0.1, private_server.resume)
    resume.start()

    # Any of the three would have been answered with the reply to another request.
    assert granted(store, "you", keys=OTHER_KEYS) == fence
    assert store.renew([Renewal(OTHER_KEYS, "you", 10)]) == [True]
    assert store.release(OTHER_KEYS, "you").mine
    resume.join()


def is_stopped(server: Server) -> bool:
    stat = read_stat(server.pid)
    return stat is not None and stat.state == "T"


# Small things


@given(st.floats(0, DAY))
def test_milliseconds_are_never_fewer_than_asked_for(seconds: float) -> None:
    assert seconds * 1000 <= milliseconds(seconds) <= seconds * 1000 + 1


def test_record_comes_back_as_it_was_given(store: Store) -> None:
    record = {"task": 'a "b" {c}\n\x00 🦀', "id": "x y", "pid": 2**53, "group": True}
    store.acquire(KEYS, "me", 10, json.dumps(record))

    holder = dict(refused(store, "you").holder)

    assert holder.pop("since")
    assert holder == record
