from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
import sessions
from harness import (
    Process,
    Server,
    eventually,
    free_port,
    list_members,
    read_stat,
)
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Spawn

pytestmark = pytest.mark.fault

ONCE = Retry(NoBackoff(), 0)

TEST_RUN = textwrap.dedent(
    """
    import os, sys, threading, time
    from harness import Process, Server

    server = Server(sys.argv[1])
    # In a thread that ends, for a server must not die with the thread either.
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    server.client().ping()
    if os.fork():  # the child keeps the watchdog's pipe open
        print(server.pid, flush=True)
    time.sleep(60)
    """
)
FAMILY = textwrap.dedent(
    """
    import os, time
    if os.fork() == 0:
        os.setpgid(0, 0)  # as the work-horse of RQ does
    print("up", flush=True)
    time.sleep(60)
    """
)


def is_gone(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat.state in "ZX"


@pytest.fixture
def family(spawn: Spawn) -> Iterator[Process]:
    process = spawn([sys.executable, "-c", FAMILY])
    eventually(lambda: process.output().count("up") == 2, 10, "parent and child run")
    yield process
    process.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_server_dies_when_its_test_process_is_ended_by(
    number: signal.Signals, server_kind: str, spawn: Spawn, tmp_path: Path
) -> None:
    run = spawn(
        [sys.executable, "-c", TEST_RUN, server_kind], env={"TMPDIR": str(tmp_path)}
    )
    pid = int(eventually(lambda: run.output().strip(), 20, "the server runs"))
    assert not is_gone(pid)

    os.kill(run.pid, number)

    eventually(lambda: is_gone(pid), 10, f"server {pid} dies")


def test_stop_ends_only_its_own_when_two_servers_run(server_kind: str) -> None:
    with Server(server_kind) as one, Server(server_kind) as other:
        one.stop()

        assert not one.is_running
        assert other.client().ping()
        assert one.port != other.port


def test_restart_keeps_port_and_data_when_it_was_saved(private_server: Server) -> None:
    port, pid = private_server.port, private_server.pid
    private_server.client().set("word", "kept")

    private_server.restart()

    assert private_server.port == port
    assert private_server.pid != pid
    assert private_server.client().get("word") == b"kept"


def test_restart_empty_keeps_port_but_no_data(private_server: Server) -> None:
    port = private_server.port
    private_server.client().set("word", "lost")
    private_server.client().save()

    private_server.restart_empty()

    assert private_server.port == port
    assert private_server.client().dbsize() == 0


def test_restart_elsewhere_keeps_data_but_not_the_port(private_server: Server) -> None:
    port = private_server.port
    private_server.client().set("word", "kept")

    private_server.restart_elsewhere()

    assert private_server.port != port
    assert private_server.client().get("word") == b"kept"


def test_start_gives_the_log_when_the_server_refuses(server_kind: str) -> None:
    server = Server(server_kind, options={"maxmemory-policy": "nonsense"})

    with pytest.raises(AssertionError, match="maxmemory-policy"):
        server.start()

    server.close()


def test_start_is_not_fooled_when_a_stranger_has_the_port(server_kind: str) -> None:
    with Server(server_kind) as stranger, Server(server_kind) as server:
        server.stop()
        server._port = stranger.port

        with pytest.raises(AssertionError, match="did not start"):
            server.start()

        assert stranger.is_running


def test_pause_leaves_requests_unanswered_until_resume(private_server: Server) -> None:
    with private_server.client(socket_timeout=0.2, retry=ONCE) as client:
        client.ping()

        private_server.pause()

        with pytest.raises(redis.TimeoutError):
            client.ping()
        private_server.resume()
        assert client.ping()


def test_kill_refuses_connections_until_start(private_server: Server) -> None:
    private_server.kill()

    with pytest.raises(redis.ConnectionError):
        private_server.client(retry=ONCE).ping()
    private_server.start()
    assert private_server.client().ping()


def test_requirepass_refuses_a_client_that_does_not_give_it(server_kind: str) -> None:
    with Server(server_kind, requirepass="open/sesame") as server:
        assert redis.Redis.from_url(server.url(3)).ping()

        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port, retry=ONCE).ping()


def test_url_names_an_empty_database_when_another_test_wrote(
    client: redis.Redis, server: Server
) -> None:
    assert client.info("keyspace") == {}
    assert client.connection_pool.connection_kwargs["db"] != 0

    client.set("left", "behind")
    assert server.client().dbsize() == 0


def test_kill9_leaves_the_children_of_the_process_alive(family: Process) -> None:
    (child,) = family.children()

    family.kill9()

    assert family.returncode == -signal.SIGKILL
    assert not is_gone(child)


def test_end_reaches_a_child_when_it_left_the_process_group(family: Process) -> None:
    (child,) = family.children()

    family.end()

    assert is_gone(child)
    assert list_members(family.pid) == []


def test_end_session_spares_a_stranger_when_the_pid_is_its_own(family: Process) -> None:
    stat = read_stat(family.pid)
    assert stat is not None

    sessions.end_session(family.pid, stat.started - 1)

    assert family.is_alive
    assert len(list_members(family.pid)) == 2


def test_pause_stops_the_children_too_until_resume(family: Process) -> None:
    everyone = [family.pid, *family.children()]

    family.pause()
    eventually(lambda: {states(everyone)} == {"TT"}, 5, "all stop")

    family.resume()
    eventually(lambda: "T" not in states(everyone), 5, "all go on")


def states(pids: list[int]) -> str:
    return "".join(stat.state for stat in map(read_stat, pids) if stat)


def test_terminate_ends_a_process_with_its_signal(family: Process) -> None:
    family.terminate()

    assert family.wait(5) == -signal.SIGTERM


def test_eventually_names_what_it_waited_for_when_it_fails() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: rain .*None"):
        eventually(lambda: None, 0.05, "rain")


def test_free_port_is_none_that_a_client_is_given() -> None:
    range_for_clients = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()

    assert free_port() < int(range_for_clients.split()[0])


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_missing_server_is_skipped_locally_but_is_an_error_in_ci(
    ci: str, outcome: str, spawn: Spawn, tmp_path: Path
) -> None:
    nowhere = {"CI": ci, "PATH": str(tmp_path), "TASK_LEASE_TEST_SERVERS": "redis"}
    chosen = f"{__file__}::test_stop_ends_only_its_own_when_two_servers_run"

    run = spawn([sys.executable, "-m", "pytest", chosen], env=nowhere)

    run.wait(60)
    assert outcome in run.output()
