from __future__ import annotations

import logging
import re
import socket
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio
from harness import Server, free_port
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from task_lease import InvalidConfig, Lease, Leases, StoreUnavailable, log_event
from task_lease.connection import client_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from core.conftest import MakeLeases

    Stranger = Callable[..., str]

PASSWORD = "open:sesame/7?"  # noqa: S105 - of a server that lives as long as a test
#: What a server that is no Redis answers to each command.
STRANGE_ANSWERS = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "smtp": b"220 mail.example.org ESMTP\r\n",
    "tls": b"\x16\x03\x01\x02\x00",
    "ok": b"+OK\r\n",
    "queued": b"+QUEUED\r\n",
    "error": b"-ERR unknown command\r\n",
    "number": b":1\r\n",
    "nothing": b"$-1\r\n",
    "empty list": b"*0\r\n",
    "short list": b"*1\r\n:1\r\n",
    "list of words": b"*2\r\n:1\r\n$5\r\nwords\r\n",
    "refusal of nobody": b"*2\r\n:0\r\n:0\r\n",
    "nested": b"*2\r\n*1\r\n:1\r\n*1\r\n:1\r\n",
    "bad length": b"$abc\r\n",
    "bad count": b"*-7\r\n",
    "unfinished": b"*2\r\n+a\r\n",
    "map": b"%1\r\n+a\r\n+b\r\n",
    "blank": b"\r\n",
    "binary": b"\xff\xfe\x00",
    "silence": b"",
}
#: The commands that a lease needs; those of parking are not among them.
NEEDED = (
    *("evalsha", "eval", "script|load", "get", "set", "mget", "del", "time", "exists"),
    *("pttl", "pexpire", "zadd", "zrange", "zrem", "zscore", "hset", "hget", "hdel"),
    *("publish", "subscribe", "ping", "select", "hello", "client"),
)
BROKEN_URLS = [
    "",
    "localhost",
    "localhost:6379",
    f"user:{PASSWORD}@localhost:6379",
    f"http://:{PASSWORD}@localhost:6379",
    f"redis:/:{PASSWORD}@localhost",
    f"REDIS://:{PASSWORD}@localhost",
    f"redis://:{PASSWORD}@localhost:6379/0",
    f"redis://:[{PASSWORD}@localhost:6379/0",
    "redis://localhost:99999",
    "redis://localhost:port",
    "redis://localhost?socket_timeout=soon",
    "redis://localhost?no_such_option=1",
    "rediss://localhost?ssl_cert_reqs=perhaps",
]


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    with ExitStack() as stack:

        def serve(answer: bytes | None) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            talk = threading.Thread(target=talk_to_all, args=(listener, answer))
            talk.start()
            stack.callback(talk.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return f"redis://127.0.0.1:{listener.getsockname()[1]}/0"

        yield serve


def talk_to_all(listener: socket.socket, answer: bytes | None) -> None:
    with ExitStack() as held:
        while True:
            try:
                guest = held.enter_context(listener.accept()[0])
            except OSError:
                return
            if answer is None:
                guest.close()
            else:
                talk = threading.Thread(target=talk_to, args=(guest, answer))
                talk.daemon = True
                talk.start()


def talk_to(guest: socket.socket, answer: bytes) -> None:
    with suppress(OSError):
        while asked := guest.recv(65_536):
            commands = len(re.findall(rb"^\*\d+\r\n", asked, re.MULTILINE))
            guest.sendall(answer * commands)


def everything_said(error: BaseException, caplog: pytest.LogCaptureFixture) -> str:
    return "".join(traceback.format_exception(error)) + caplog.text + repr(error)


def try_one_life(leases: Leases, name: str = "invoice:42") -> None:
    lease = leases.acquire(name)
    assert lease.fence
    assert leases.try_acquire(name) is None
    lease.renew()
    assert lease.release()
    assert isinstance(leases.try_acquire(name), Lease)


@pytest.mark.parametrize("decode_responses", [False, True])
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16"])
def test_lease_works_whatever_the_client_decodes(
    url: str,
    make_leases: MakeLeases,
    decode_responses: bool,  # noqa: FBT001
    protocol: int,
    encoding: str,
) -> None:
    options = {"decode_responses": decode_responses, "encoding": encoding}
    with redis.Redis.from_url(url, protocol=protocol, **options) as client:
        try_one_life(make_leases(client), "Zoë's 🦀")


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode_responses", [False, True])
def test_waiter_is_woken_whatever_the_client_decodes(
    url: str,
    make_leases: MakeLeases,
    protocol: int,
    decode_responses: bool,  # noqa: FBT001
) -> None:
    class OwnPool(redis.ConnectionPool):
        """Not copied, so the client is used as it is."""

    pool = OwnPool.from_url(url, protocol=protocol, decode_responses=decode_responses)
    with redis.Redis(connection_pool=pool) as client:
        leases = make_leases(client, ttl=60)
        held = leases.acquire("invoice:42")
        release = threading.Timer(0.3, held.release)
        release.start()

        leases.acquire("invoice:42", timeout=20).release()

        release.join()


def test_copy_has_time_limits_and_no_retries_when_the_client_has(url: str) -> None:
    slow = Retry(ConstantBackoff(60), 5)
    with redis.Redis.from_url(url, retry=slow, retry_on_timeout=True) as client:
        copy = client_for(client, 2.5)

        settings = copy.connection_pool.connection_kwargs
        assert settings["socket_timeout"] == settings["socket_connect_timeout"] == 2.5
        assert settings["retry"]._retries == 0
        assert settings["db"] == client.connection_pool.connection_kwargs["db"]
        assert client.connection_pool.connection_kwargs["retry"] is slow


def test_store_is_soon_unavailable_when_the_client_would_retry_long() -> None:
    slow = Retry(ConstantBackoff(60), 5)
    with redis.Redis(port=free_port(), retry=slow) as client:
        began_at = time.monotonic()

        with pytest.raises(StoreUnavailable, match="ConnectionError"):
            Leases(client).acquire("invoice:42")

        assert time.monotonic() - began_at < 30


@pytest.mark.parametrize("wraps", [list, lambda client: client])
def test_client_stays_as_it_was_when_a_copy_is_taken(
    url: str, wraps: Callable[[Any], Any]
) -> None:
    with redis.Redis.from_url(url, decode_responses=True, socket_timeout=9) as client:
        before = wraps(client.connection_pool.connection_kwargs.items())

        client_for(client, 2.5)

        assert wraps(client.connection_pool.connection_kwargs.items()) == before
        assert client.echo("text") == "text"


@pytest.mark.parametrize("kind", [redis.ConnectionPool, redis.BlockingConnectionPool])
def test_copy_shares_no_connection_when_the_pool_is_full(
    url: str, make_leases: MakeLeases, kind: Any
) -> None:
    pool = kind.from_url(url, max_connections=1)
    with redis.Redis(connection_pool=pool, single_connection_client=True) as client:
        client.ping()

        try_one_life(make_leases(client))


def test_client_is_used_as_it_is_when_its_pool_is_special(url: str) -> None:
    class OwnPool(redis.ConnectionPool):
        pass

    with redis.Redis(connection_pool=OwnPool.from_url(url)) as client:
        assert client_for(client, 2.5) is client


def test_factory_is_asked_for_a_client(url: str, make_leases: MakeLeases) -> None:
    try_one_life(make_leases(lambda: redis.Redis.from_url(url)))


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        (None, "NoneType"),
        (5, "int"),
        (b"redis://localhost", "bytes"),
        (["redis://localhost"], "list"),
        (object(), "object"),
        (lambda: None, "NoneType"),
        (lambda: "redis://localhost", "str"),
    ],
)
def test_store_is_refused_when_it_is_no_client(store: Any, shown: str) -> None:
    with pytest.raises(InvalidConfig, match="must be a Redis client, a URL") as refused:
        Leases(store)

    assert (refused.value.setting, refused.value.value) == ("store", shown)


def test_store_is_refused_when_it_is_a_client_for_asyncio() -> None:
    with pytest.raises(InvalidConfig, match="without async"):
        Leases(redis.asyncio.Redis())  # type: ignore[arg-type]


@pytest.mark.parametrize("url", BROKEN_URLS)
def test_url_is_refused_without_its_password_when_it_is_broken(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    with pytest.raises(InvalidConfig, match=r"^url=") as refused:
        Leases(url)

    assert not said_of_password(everything_said(refused.value, caplog), url)


def said_of_password(said: str, url: str) -> list[str]:
    # The test's own source lines show the URL's name, not its text.
    assert url not in said or not url
    return [part for part in ("sesame", "open:") if part in said]


@pytest.mark.parametrize("as_client", [False, True])
def test_password_is_given_to_the_store_but_shown_nowhere(
    server_kind: str,
    as_client: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with Server(server_kind, requirepass=PASSWORD) as server:
        store = server.client(3) if as_client else server.url(3)
        leases = Leases(store, observers=[log_event])

        lease = leases.acquire("invoice:42")
        shown = [repr(leases), repr(lease), str(lease), repr(lease.holder)]
        server.kill()
        with pytest.raises(StoreUnavailable) as unavailable:
            lease.renew()
        lease.release()

    said = everything_said(unavailable.value, caplog)
    assert "invoice:42" in caplog.text
    assert [text for text in (*shown, said) if "sesame" in text] == []


def test_wrong_password_is_told_but_not_shown(
    server_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with Server(server_kind, requirepass="another") as server:
        url = f"redis://:sesame@127.0.0.1:{server.port}/0"

        with pytest.raises(StoreUnavailable, match="AuthenticationError") as refused:
            Leases(url).acquire("invoice:42")

    assert "sesame" not in everything_said(refused.value, caplog)


def test_acl_user_needs_no_more_than_the_keys_of_leases(
    private_server: Server, make_leases: MakeLeases
) -> None:
    with private_server.client() as admin:
        admin.acl_setuser(
            "worker",
            enabled=True,
            passwords=["+word"],
            keys=["tl1:*"],
            channels=["tl1:*"],
            categories=["-@all"],
            commands=[f"+{name}" for name in NEEDED],
        )
    url = f"redis://worker:word@127.0.0.1:{private_server.port}/0"
    leases = make_leases(url, ttl=60)

    held = leases.acquire("invoice:42")
    release = threading.Timer(0.3, held.release)
    release.start()
    leases.acquire("invoice:42", timeout=20).release()

    release.join()


def test_lease_works_over_a_unix_socket(
    server_kind: str, make_leases: MakeLeases
) -> None:
    with Server(server_kind, options={"unixsocket": "redis.sock"}) as server:
        url = f"unix://{server.folder}/redis.sock?db=4"

        try_one_life(make_leases(url))

        with server.client(4) as client:
            assert client.exists("tl1:{invoice:42}")


def test_lease_is_in_the_database_of_the_url(
    url: str, server: Server, make_leases: MakeLeases
) -> None:
    make_leases(url).acquire("invoice:42")

    with server.client(0) as client:
        assert client.keys() == []


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("answer", STRANGE_ANSWERS)
def test_store_is_unavailable_when_a_stranger_answers(
    answer: str, protocol: int, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("task_lease.client.REQUEST_TIMEOUT", 0.3)
    url = f"{stranger(STRANGE_ANSWERS[answer])}?protocol={protocol}"

    with pytest.raises(StoreUnavailable, match="failed at acquire"):
        Leases(url).acquire("invoice:42")


def test_store_is_unavailable_when_a_stranger_hangs_up(stranger: Stranger) -> None:
    with pytest.raises(StoreUnavailable, match="ConnectionError"):
        Leases(stranger(None)).acquire("invoice:42")


def test_store_is_unavailable_when_nobody_answers(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("task_lease.client.REQUEST_TIMEOUT", 0.3)

    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        Leases(stranger(b"")).acquire("invoice:42")


def test_store_is_unavailable_when_nobody_listens() -> None:
    with pytest.raises(StoreUnavailable, match="ConnectionError"):
        Leases(f"redis://127.0.0.1:{free_port()}/0").acquire("invoice:42")
