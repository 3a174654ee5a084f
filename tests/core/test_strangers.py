"""What other programs may have written where our keys are, and threads that fail."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
from harness import eventually

from task_lease import LeaseConfig, LeaseError, Leases
from task_lease.claims import Claim
from task_lease.exclusive import admit

if TYPE_CHECKING:
    import redis

KEY = "tl1:{invoice:42}"
CLAIM = Claim("invoice:42", 2.0, "task", "own-id", "parent-id")


@pytest.mark.parametrize(
    "stored",
    [
        "hello",
        "own 1 2000 no json",
        "own 1 2000 " + "[" * 100_000,
        f"own {'9' * 400} 2000 {{}}",
        f"own {'9' * 5000} 2000 {{}}",
        f"own 1 2000 {json.dumps({'pid': '1', 'start': [], 'identity': 5})}",
        f'own 1 2000 {{"pid": {"9" * 5000}}}',
    ],
    ids=lambda text: text[:16],
)
def test_stranger_at_the_lease_key_is_no_more_than_a_conflict_or_a_clear_error(
    client: redis.Redis, url: str, stored: str
) -> None:
    leases = Leases(url)
    client.set(KEY, stored, px=60_000)
    config = LeaseConfig(ttl=2.0, on_conflict="raise", on_error="raise")

    with pytest.raises(LeaseError) as caught:
        admit(leases, CLAIM, config)

    assert str(caught.value)
    assert client.get(KEY) == stored.encode()


def test_lease_is_renewed_when_the_user_may_load_no_script(
    client: redis.Redis, url: str
) -> None:
    client.acl_setuser(
        "beater",
        enabled=True,
        passwords=["+word"],
        categories=["+@all"],
        commands=["-script"],
        keys=["*"],
        channels=["*"],
    )
    leases = Leases(url.replace("//", "//beater:word@"), ttl=60.0)

    with leases.acquire("invoice:42", timeout=5) as lease:
        client.script_flush()
        lease.renew()

    client.acl_deluser("beater")


def test_beats_begin_with_the_next_lease_when_no_thread_could_be_started(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases(url, ttl=0.6)
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "task-lease-heartbeat":
            raise RuntimeError
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            leases.try_acquire("invoice:42")

    with leases.acquire("invoice:42", timeout=5) as lease:
        trusted_until = lease.trusted_until
        eventually(lambda: lease.trusted_until > trusted_until, 10, "it beats")
