from __future__ import annotations

import os
import signal
import threading

import pytest

from task_lease import Leases


# Later versions of Python warn of what is tested here.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_child_can_acquire_when_the_pool_was_in_use_at_the_fork(url: str) -> None:
    leases = Leases(url)
    leases.acquire("before").release()
    pool = leases._store.client.connection_pool
    held, forked = threading.Event(), threading.Event()

    def use_pool() -> None:
        with pool._lock:
            held.set()
            forked.wait(10)

    thread = threading.Thread(target=use_pool)
    thread.start()
    assert held.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        os._exit(0 if leases.try_acquire("mine") else 1)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
