from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from deadlines import eventually
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from task_lease import host
from task_lease.host import is_proven_dead, this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from task_lease.errors import Holder

    StartBody = Callable[..., "Body"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

BODY = """
import ctypes, os, sys, threading
{setup}
print(flush=True)
{work}
sys.stdin.read()
"""
END_FIRST_THREAD = """
def work_on():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=work_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""
JUDGE = """
import json, os, sys
from task_lease.host import is_proven_dead, this_process
records = json.loads(sys.argv[1])
{setup}
verdicts = [is_proven_dead(record) for record in records]
print(json.dumps([this_process().identity, verdicts]))
"""
NOBODY = 65534
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class Body(NamedTuple):
    process: subprocess.Popen[bytes]
    record: Holder


def answer(script: str, *arguments: str, wrapper: tuple[str, ...] = ()) -> Any:
    finished = subprocess.run(
        [*wrapper, sys.executable, "-c", script, *arguments],
        input=b"",
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        timeout=30,
        check=True,
    )
    return json.loads(finished.stdout)


@pytest.fixture
def start_body() -> Iterator[StartBody]:
    with ExitStack() as stack:

        def start(setup: str = "", work: str = "") -> Body:
            process = subprocess.Popen(
                [sys.executable, "-c", BODY.format(setup=setup, work=work)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            wait_for_line(process)
            return Body(process, record_of(process.pid))

        yield start


@pytest.fixture
def namespaces() -> Callable[[str], tuple[str, ...]]:
    unshare = shutil.which("unshare")
    probe = [unshare or "false", "--mount", "--pid", "--fork", "true"]
    if unshare is None or subprocess.run(probe, check=False).returncode:
        pytest.skip("may not make namespaces here")
    return lambda options: (unshare, *options.split())


def end_unreaped(body: Body) -> None:
    os.kill(body.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, body.process.pid, os.WEXITED | os.WNOWAIT)


def end_reaped(body: Body) -> None:
    body.process.kill()
    body.process.wait()


def stop(body: Body) -> None:
    os.kill(body.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, body.process.pid, os.WSTOPPED | os.WNOWAIT)


def stat_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state_of(body: Body) -> str:
    return stat_of(body.process.pid)[0]


def record_of(pid: int) -> Holder:
    return {
        "identity": this_process().identity,
        "pid": pid,
        "start": int(stat_of(pid)[19]),
        "group": os.getpgid(pid) == pid,
    }


def wait_for_line(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"


def wait_until_zombie(body: Body) -> None:
    eventually(lambda: state_of(body) == "Z", 30, "the first thread has ended")


def altered(record: Holder, **fields: object) -> Any:
    return {**record, **fields}


# --- the body's own process -------------------------------------------------


def test_process_is_not_proven_dead_when_it_lives(start_body: StartBody) -> None:
    body = start_body()

    assert not is_proven_dead(body.record)


def test_process_is_not_proven_dead_when_it_is_the_one_that_asks() -> None:
    assert not is_proven_dead(altered({}, **this_process()._asdict()))


def test_process_is_proven_dead_when_reaped(start_body: StartBody) -> None:
    body = start_body()

    end_reaped(body)

    assert is_proven_dead(body.record)


def test_process_is_proven_dead_when_it_is_a_zombie(start_body: StartBody) -> None:
    body = start_body()

    end_unreaped(body)

    assert state_of(body) == "Z"
    assert is_proven_dead(body.record)


def test_process_is_proven_dead_when_it_vanishes_while_read(
    dead_record: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(_path: Path) -> bytes:
        raise ProcessLookupError

    this_process()
    monkeypatch.setattr(Path, "read_bytes", vanish)

    assert is_proven_dead(dead_record)


def test_process_is_not_proven_dead_when_stopped(start_body: StartBody) -> None:
    body = start_body()

    stop(body)

    assert state_of(body) == "T"
    assert not is_proven_dead(body.record)


def test_process_is_proven_dead_only_when_its_last_thread_ended(
    start_body: StartBody,
) -> None:
    body = start_body(work=END_FIRST_THREAD)
    wait_until_zombie(body)

    dead_while_a_thread_works = is_proven_dead(body.record)
    assert body.process.stdin is not None
    body.process.stdin.close()
    os.waitid(os.P_PID, body.process.pid, os.WEXITED | os.WNOWAIT)

    assert not dead_while_a_thread_works
    assert is_proven_dead(body.record)


def test_process_is_read_right_when_its_name_looks_like_a_stat(
    start_body: StartBody,
) -> None:
    body = start_body(setup="open('/proc/self/comm', 'w').write(') Z 1 1 1 (')")

    assert Path(f"/proc/{body.process.pid}/comm").read_text() == ") Z 1 1 1 (\n"
    assert not is_proven_dead(body.record)


@pytest.mark.parametrize("leads_group", [False, True])
def test_process_is_proven_dead_when_its_number_was_given_out_again(
    start_body: StartBody,
    leads_group: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    body = start_body(setup="os.setpgrp()" if leads_group else "")

    earlier = altered(body.record, start=body.record["start"] - 1)

    assert body.record["group"] is leads_group
    assert is_proven_dead(earlier)


def test_process_is_not_proven_dead_when_of_another_host(
    start_body: StartBody,
) -> None:
    body = start_body()
    end_reaped(body)

    assert not is_proven_dead(altered(body.record, identity="0" * 32))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_process_of_another_user_is_judged_right_when_unprivileged(
    start_body: StartBody,
) -> None:
    live, zombie, dead = bodies = [start_body() for _ in range(3)]
    end_unreaped(zombie)
    end_reaped(dead)

    records = json.dumps([body.record for body in bodies])
    identity, verdicts = answer(JUDGE.format(setup=f"os.setuid({NOBODY})"), records)

    assert identity == live.record["identity"]
    assert verdicts == [False, True, True]


# --- the body's process group -----------------------------------------------


@pytest.mark.parametrize("end_leader", [end_reaped, end_unreaped])
@pytest.mark.parametrize("end_member", [end_reaped, end_unreaped])
def test_group_is_proven_dead_only_when_no_member_lives(
    start_body: StartBody,
    end_leader: Callable[[Body], None],
    end_member: Callable[[Body], None],
) -> None:
    leader = start_body(setup="os.setpgrp()")
    member = start_body(setup=f"os.setpgid(0, {leader.process.pid})")

    end_leader(leader)
    dead_while_a_member_lives = is_proven_dead(leader.record)
    end_member(member)

    assert leader.record["group"]
    assert not dead_while_a_member_lives
    eventually(lambda: is_proven_dead(leader.record), 30, "no process ends meanwhile")


def test_group_is_not_proven_dead_when_a_member_is_stopped(
    start_body: StartBody,
) -> None:
    leader = start_body(setup="os.setpgrp()")
    member = start_body(setup=f"os.setpgid(0, {leader.process.pid})")

    end_reaped(leader)
    stop(member)

    assert not is_proven_dead(leader.record)


def test_group_is_not_proven_dead_when_a_member_lost_its_first_thread(
    start_body: StartBody,
) -> None:
    leader = start_body(setup="os.setpgrp()")
    join = f"os.setpgid(0, {leader.process.pid})"
    member = start_body(setup=join, work=END_FIRST_THREAD)

    end_reaped(leader)
    wait_until_zombie(member)

    assert not is_proven_dead(leader.record)


def test_group_is_not_proven_dead_when_made_after_the_record(
    start_body: StartBody,
) -> None:
    leader = start_body(work="sys.stdin.readline(); os.setpgrp(); print(flush=True)")
    assert leader.process.stdin is not None
    leader.process.stdin.write(b"\n")
    leader.process.stdin.flush()
    wait_for_line(leader.process)
    start_body(setup=f"os.setpgid(0, {leader.process.pid})")

    end_reaped(leader)

    assert not leader.record["group"]
    assert not is_proven_dead(leader.record)


def test_group_does_not_count_when_it_is_not_the_bodys_own(
    start_body: StartBody,
) -> None:
    leader = start_body(setup="os.setpgrp()")
    body = start_body(setup=f"os.setpgid(0, {leader.process.pid})")

    end_reaped(body)

    assert not body.record["group"]
    assert is_proven_dead(body.record)


def show_in_turn(monkeypatch: pytest.MonkeyPatch, *looks: list[Body]) -> None:
    turns = iter(looks)

    def list_bodies(_path: Path) -> list[Path]:
        return [Path(str(body.process.pid)) for body in next(turns)]

    monkeypatch.setattr(Path, "iterdir", list_bodies)


def test_group_is_not_proven_dead_when_a_member_died_while_looking(
    start_body: StartBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = start_body(setup="os.setpgrp()")
    member = start_body(setup=f"os.setpgid(0, {leader.process.pid})")
    end_unreaped(leader)
    end_unreaped(member)

    show_in_turn(monkeypatch, [leader], [leader, member])
    dead_while_it_changes = is_proven_dead(leader.record)
    show_in_turn(monkeypatch, [leader, member], [leader, member])

    assert not dead_while_it_changes
    assert is_proven_dead(leader.record)


def test_group_is_not_proven_dead_when_a_process_vanished_while_looking(
    start_body: StartBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = start_body(setup="os.setpgrp()")
    end_unreaped(leader)
    vanished = start_body()
    end_reaped(vanished)

    show_in_turn(monkeypatch, [vanished, leader], [vanished, leader])

    assert not is_proven_dead(leader.record)


# --- what a mount hides or cannot show ---------------------------------------


class FakeProc:
    """A tree in the form of ``/proc`` that shows this process only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        pid = os.getpid()
        self.write("sys/kernel/random/boot_id", "boot\n")
        self.write("self/status", f"Name:\tx\nNSpid:\t{pid}\nNSpgid:\t{pid}\n")
        self.write("self/mountinfo", "22 28 0:21 / /proc rw - proc proc rw\n")
        (root / "self/ns").mkdir()
        (root / "self/ns/pid").symlink_to("pid:[1]")
        (root / "self/ns/time").symlink_to("time:[1]")
        self.write_stat(pid, start=7)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write_stat(
        self, pid: int, state: str = "S", threads: int = 1, start: int = 7
    ) -> None:
        fields = [state, *"1" * 16, str(threads), "0", str(start), "0"]
        self.write(f"{pid}/task/{pid}/stat", f"{pid} (x) {' '.join(fields)}\n")


@pytest.fixture
def fake_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProc]:
    proc = FakeProc(tmp_path)
    monkeypatch.setattr(host, "_PROC", tmp_path)
    host._identify.cache_clear()
    yield proc
    host._identify.cache_clear()


def record_of_other(pid: int, start: int = 7, **fields: object) -> Any:
    identity = this_process().identity
    assert identity
    record = {"identity": identity, "pid": pid, "start": start, "group": False}
    return {**record, **fields}


@pytest.mark.parametrize(
    ("state", "threads", "dead"),
    [
        ("Z", 1, True),
        ("X", 1, True),
        ("Z", 2, False),
        ("X", 0, False),
        ("t", 1, False),
        ("D", 1, False),
        ("R", 1, False),
    ],
)
def test_state_proves_death_only_when_it_is_final(
    fake_proc: FakeProc,
    state: str,
    threads: int,
    dead: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    fake_proc.write_stat(4321, state=state, threads=threads)

    assert is_proven_dead(record_of_other(4321)) is dead


def test_process_is_not_proven_dead_when_the_mount_hides_it(
    fake_proc: FakeProc,
) -> None:
    pid = os.getppid()

    assert not (fake_proc.root / str(pid)).exists()
    assert not is_proven_dead(record_of_other(pid))


def test_process_is_not_proven_dead_when_hidden_and_of_another_user(
    fake_proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)

    assert not (fake_proc.root / "4321").exists()
    assert not is_proven_dead(record_of_other(4321))


@pytest.mark.parametrize("text", ["", "4321 (x", "4321 (x) Z", "1 (x) Z" + " x" * 30])
def test_process_is_not_proven_dead_when_its_stat_is_malformed(
    fake_proc: FakeProc, text: str
) -> None:
    fake_proc.write("4321/task/4321/stat", text)

    assert not is_proven_dead(record_of_other(4321))


def test_process_is_not_proven_dead_when_its_stat_is_unreadable(
    fake_proc: FakeProc,
) -> None:
    (fake_proc.root / "4321/task/4321/stat").mkdir(parents=True)

    assert not is_proven_dead(record_of_other(4321))


def test_group_is_not_proven_dead_when_the_mount_may_hide_members(
    start_body: StartBody, fake_proc: FakeProc
) -> None:
    leader = start_body(setup="os.setpgrp()")
    end_unreaped(leader)
    pid = leader.process.pid
    fake_proc.write_stat(pid, state="Z")
    dead = [is_proven_dead(record_of_other(pid, group=True))]

    mount = "22 28 0:21 / /proc rw - proc proc rw,hidepid=invisible\n"
    fake_proc.write("self/mountinfo", mount)
    dead.append(is_proven_dead(record_of_other(pid, group=True)))

    assert dead == [True, False]


def test_group_is_not_proven_dead_when_a_member_cannot_be_read(
    start_body: StartBody, fake_proc: FakeProc
) -> None:
    leader = start_body(setup="os.setpgrp()")
    member = start_body(setup=f"os.setpgid(0, {leader.process.pid})")
    end_unreaped(leader)
    fake_proc.write_stat(leader.process.pid, state="Z")

    (fake_proc.root / str(member.process.pid)).mkdir()

    assert not is_proven_dead(record_of_other(leader.process.pid, group=True))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_death_is_judged_right_when_a_real_mount_hides_others(
    start_body: StartBody, namespaces: Callable[[str], tuple[str, ...]]
) -> None:
    live, zombie, dead, leader = bodies = [
        start_body(setup=setup) for setup in ("", "", "", "os.setpgrp()")
    ]
    end_unreaped(zombie)
    end_reaped(dead)
    end_unreaped(leader)
    hide = "subprocess.run(['mount','-t','proc','-ohidepid=2','proc','/proc'],check=1)"
    setup = f"import subprocess; {hide}; os.setuid({NOBODY})"

    records = json.dumps([body.record for body in bodies])
    unshare = namespaces("--mount")
    identity, verdicts = answer(JUDGE.format(setup=setup), records, wrapper=unshare)

    assert identity == live.record["identity"]
    assert verdicts[0] is False
    assert verdicts[2:] == [True, False]


# --- hostile records ---------------------------------------------------------


@pytest.fixture(scope="module")
def dead_record() -> Holder:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        record = record_of(process.pid)
    assert is_proven_dead(record)
    return record


@pytest.mark.parametrize(
    "pid", [0, -1, -4321, 2**22 + 1, 2**31, 2**64, True, 4321.0, "4321", None, [4321]]
)
def test_record_sends_no_signal_when_its_pid_is_hostile(
    dead_record: Holder, monkeypatch: pytest.MonkeyPatch, pid: object
) -> None:
    sent: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))

    assert not is_proven_dead(altered(dead_record, pid=pid))
    assert not is_proven_dead(altered(dead_record, pid=pid, group=True))
    assert sent == []


def test_record_sends_only_signal_zero_when_it_is_sound(
    start_body: StartBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = start_body(setup="os.setpgrp()")
    pid = leader.process.pid
    end_reaped(leader)
    sent: list[tuple[int, int]] = []
    kill = os.kill

    def record_and_kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        kill(pid, number)

    monkeypatch.setattr(os, "kill", record_and_kill)

    assert is_proven_dead(leader.record)
    assert sent == [(pid, 0), (-pid, 0)]


def test_record_addresses_never_all_processes_when_pid_is_one(
    fake_proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_proc.write_stat(1, state="Z")
    sent: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))

    is_proven_dead(record_of_other(1, group=True))

    assert sent == []


@pytest.mark.parametrize("field", ["identity", "pid", "start", "group"])
def test_record_proves_nothing_when_a_field_is_missing(
    dead_record: Holder, field: str
) -> None:
    record: Any = {name: dead_record.get(name) for name in dead_record if name != field}

    assert not is_proven_dead(record)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
no_pids = json_values.filter(lambda pid: type(pid) is not int or not 0 < pid <= 2**22)
no_starts = json_values.filter(lambda start: type(start) is not int or start <= 0)
no_groups = json_values.filter(lambda group: type(group) is not bool)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
nonsense = st.one_of(
    st.fixed_dictionaries({"pid": no_pids}),
    st.fixed_dictionaries({"start": no_starts}),
    st.fixed_dictionaries({"group": no_groups}),
    st.fixed_dictionaries({"identity": json_values}),
)


@unhurried
@given(fields=nonsense)
@example(fields={"pid": True})
@example(fields={"start": True})
@example(fields={"start": 0})
@example(fields={"start": -1})
@example(fields={"group": 1})
def test_record_proves_nothing_when_a_field_is_nonsense(
    dead_record: Holder, fields: dict[str, object]
) -> None:
    assert not is_proven_dead(altered(dead_record, **fields))


@unhurried
@given(record=json_values)
def test_record_proves_nothing_when_it_is_no_record(record: Any) -> None:
    assert not is_proven_dead(record)


# --- this process ------------------------------------------------------------


def test_identity_is_read_once_when_nothing_changes() -> None:
    assert this_process() is this_process()


def test_identity_shows_this_process_when_on_linux() -> None:
    me = this_process()

    assert me.pid == os.getpid()
    assert me.start > 0
    assert me.identity
    assert me.host == os.uname().nodename


def test_identity_is_new_when_the_process_has_forked() -> None:
    script = """
import json, os
from task_lease import host
parent = host.this_process()
reader, writer = os.pipe()
if not (pid := os.fork()):
    kept = host._identify.cache_info().currsize
    child = host.this_process()._asdict()
    os.write(writer, json.dumps([kept, os.getpid(), child]).encode())
    os._exit(0)
os.waitpid(pid, 0)
print(json.dumps([parent._asdict(), *json.loads(os.read(reader, 4096))]))
"""
    parent, kept, child_pid, child = answer(script)

    assert kept == 0
    assert child["pid"] == child_pid
    assert child["identity"] == parent["identity"]
    assert (child["pid"], child["start"]) != (parent["pid"], parent["start"])


def test_group_is_seen_when_made_after_the_first_read() -> None:
    script = """
import json, os
from task_lease.host import this_process
before = this_process().group
os.setpgrp()
print(json.dumps([before, this_process().group]))
"""
    assert answer(script) == [False, True]


def test_identity_is_empty_when_proc_is_of_another_namespace(
    dead_record: Holder, namespaces: Callable[[str], tuple[str, ...]]
) -> None:
    unshare = namespaces("--pid --fork")

    script = JUDGE.format(setup="")
    identity, verdicts = answer(script, json.dumps([dead_record]), wrapper=unshare)

    assert identity == ""
    assert verdicts == [False]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("self/status", None),
        ("self/status", "Name:\tx\n"),
        ("self/status", "Name:\tx\nNSpid:\t{pid}1\n"),
        ("self/status", "Name:\tx\nNSpid:\t{pid}\t1\n"),
        ("self/ns/pid", None),
        ("sys/kernel/random/boot_id", None),
        ("{pid}/task/{pid}/stat", None),
        ("{pid}/task/{pid}/stat", "nonsense"),
    ],
)
def test_identity_is_empty_when_proc_does_not_tell(
    dead_record: Holder, fake_proc: FakeProc, name: str, text: str | None
) -> None:
    # Not in the parameters, for each process of a parallel run has its own.
    path = name.format(pid=os.getpid())
    (fake_proc.root / path).unlink()
    if text is not None:
        fake_proc.write(path, text.format(pid=os.getpid()))

    assert this_process().identity == ""
    assert not is_proven_dead(altered(dead_record, identity=""))


def test_identity_is_empty_when_the_start_is_unknown(fake_proc: FakeProc) -> None:
    fake_proc.write_stat(os.getpid(), start=0)

    assert this_process().identity == ""


def test_identity_is_known_when_there_are_no_time_namespaces(
    fake_proc: FakeProc,
) -> None:
    (fake_proc.root / "self/ns/time").unlink()

    assert this_process().identity


@pytest.mark.parametrize("part", ["boot", "pids", "clock", "host"])
def test_identity_differs_when_a_part_of_it_does(
    fake_proc: FakeProc, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    before = this_process().identity
    links = {"pids": "self/ns/pid", "clock": "self/ns/time"}

    if part == "boot":
        fake_proc.write("sys/kernel/random/boot_id", "another\n")
    elif part == "host":
        monkeypatch.setattr("socket.gethostname", lambda: "another")
    else:
        (fake_proc.root / links[part]).unlink()
        (fake_proc.root / links[part]).symlink_to("another:[2]")
    host._identify.cache_clear()

    assert this_process().identity not in {"", before}


def test_start_is_what_others_read_when_an_emulator_fakes_its_own(
    fake_proc: FakeProc,
) -> None:
    fake_proc.write(f"{os.getpid()}/stat", "1 (x) S" + " 1" * 30)

    assert this_process().start == 7


def test_identity_is_empty_when_there_is_no_proc(fake_proc: FakeProc) -> None:
    shutil.rmtree(fake_proc.root)

    me = this_process()

    assert (me.identity, me.pid, me.start) == ("", os.getpid(), 0)
