"""Acquire, renew, release, expire and wait in any order, against a real server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from typing_extensions import override

from task_lease.answers import Granted, Refused
from task_lease.connection import client_for
from task_lease.keys import lease_keys
from task_lease.scripts import Place, Renewal, Store

if TYPE_CHECKING:
    from task_lease.keys import LeaseKeys

NAMES = ("invoice:42", "invoice:43")
OWNERS = ("ann", "bob", "cid", "dan")
#: Longer than any run of the machine.
TTL = 600.0
PATIENCE = 600.0
#: A handed lease that is not taken ends after two seconds; a slow machine must not
#: see that happen behind its back.
HANDED_FOR = 1.0

names = st.sampled_from(NAMES)
owners = st.sampled_from(OWNERS)


class Model:
    """What must be true of one lease."""

    def __init__(self) -> None:
        self.holder: str | None = None
        self.handed_at: float | None = None
        self.fence = 0
        self.queue: list[str] = []
        self.arrivals: dict[str, str] = {}

    def give(self, owner: str | None, *, handed: bool = False) -> None:
        self.holder = owner
        self.handed_at = time.monotonic() if handed else None

    def hand_over(self) -> None:
        self.give(self.queue.pop(0) if self.queue else None, handed=True)

    def stand_in_line(self, owner: str, arrival: str) -> None:
        self.arrivals[owner] = arrival
        if owner not in self.queue:
            self.queue.append(owner)
            # Whoever shows the place that it had before gets it back.
            self.queue.sort(key=lambda one: (int(self.arrivals[one]), one))


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self, url: str, *, fence_life: float) -> None:
        super().__init__()
        self.store = Store(client_for(url, 5), fence_life=fence_life)
        self.client: Any = self.store.client
        self.client.flushdb()
        self.models = {name: Model() for name in NAMES}

    @override
    def teardown(self) -> None:
        self.client.close()

    @rule(name=names, owner=owners, repeats=st.booleans())
    def acquire(self, name: str, owner: str, repeats: bool) -> None:  # noqa: FBT001
        model, keys = self.fresh(name)
        waits = owner in model.queue

        replies = [self.ask(keys, owner) for _ in range(1 + repeats)]

        self.judge_acquire(model, owner, replies[0], place=None)
        if repeats:
            self.judge_acquire(model, owner, replies[1], place=None)
        if waits and model.holder != owner:
            assert owner in model.queue

    @rule(name=names, owner=owners, remembers=st.booleans())
    def wait(self, name: str, owner: str, remembers: bool) -> None:  # noqa: FBT001
        model, keys = self.fresh(name)
        arrival = model.arrivals.get(owner, "") if remembers else ""
        place = Place("tl1:wake:machine", PATIENCE, arrival)

        reply = self.ask(keys, owner, place)

        self.judge_acquire(model, owner, reply, place)

    @rule(name=names, owner=owners, repeats=st.booleans())
    def release(self, name: str, owner: str, repeats: bool) -> None:  # noqa: FBT001
        model, keys = self.fresh(name)
        mine = model.holder == owner

        assert self.store.release(keys, owner).mine == mine
        if mine:
            model.hand_over()
        elif owner in model.queue:
            model.queue.remove(owner)
        if repeats and model.holder != owner:
            assert not self.store.release(keys, owner).mine
            if owner in model.queue:
                model.queue.remove(owner)

    @rule(owner=owners)
    def renew(self, owner: str) -> None:
        models = [self.fresh(name) for name in NAMES]

        replies = self.store.renew([Renewal(keys, owner, TTL) for _, keys in models])

        assert replies == [model.holder == owner for model, _ in models]
        for model, _ in models:
            if model.holder == owner:
                model.handed_at = None

    @rule(name=names)
    def expire(self, name: str) -> None:
        model, keys = self.fresh(name)
        if self.client.exists(keys.lease):
            self.client.pexpire(keys.lease, 0)
        model.give(None)

    @precondition(lambda self: any(model.queue for model in self.models.values()))
    @rule(name=names)
    def first_waiter_dies(self, name: str) -> None:
        model, keys = self.fresh(name)
        if not model.queue:
            return
        entry = self.client.hget(keys.waiters, model.queue[0])
        _, rest = entry.split(b" ", 1)
        self.client.hset(keys.waiters, model.queue[0], b"1 " + rest)
        # It is passed over as soon as somebody looks, which only its own asking stops.
        self.client.zrem(keys.queue, model.queue[0])
        model.queue.pop(0)

    @rule(name=names)
    def clock_steps_back(self, name: str) -> None:
        _, keys = self.fresh(name)
        self.client.pexpire(keys.lease, round(TTL * 2000), gt=True)

    @rule()
    def server_forgets_the_scripts(self) -> None:
        self.client.script_flush()

    @invariant()
    def store_agrees_who_holds_it(self) -> None:
        for name in NAMES:
            model, keys = self.fresh(name)
            stored = self.client.get(keys.lease)
            holder = stored.decode().split(" ")[0] if stored else None
            assert holder == model.holder
            if stored:
                fence = int(stored.split(b" ")[1])
                assert fence >= model.fence
                model.fence = fence

    @invariant()
    def store_agrees_who_waits(self) -> None:
        for name in NAMES:
            model, keys = self.fresh(name)
            queue = [owner.decode() for owner in self.client.zrange(keys.queue, 0, -1)]
            assert queue == model.queue

    @invariant()
    def nothing_stays_for_ever(self) -> None:
        for key in self.client.scan_iter():
            assert self.client.pttl(key) != -1, key

    def ask(
        self, keys: LeaseKeys, owner: str, place: Place | None = None
    ) -> Granted | Refused:
        reply = self.store.acquire(keys, owner, TTL, "{}", place)
        assert isinstance(reply, (Granted, Refused))
        return reply

    def judge_acquire(
        self, model: Model, owner: str, reply: Granted | Refused, place: Place | None
    ) -> None:
        if model.holder is None and model.queue and model.queue[0] != owner:
            # Newcomers do not jump in: it goes to the one who waits longest.
            model.hand_over()
        if model.holder not in (None, owner):
            assert isinstance(reply, Refused)
            assert reply.owner == model.holder
            assert 0 < reply.remaining <= reply.ttl <= TTL
            if place is not None:
                model.stand_in_line(owner, reply.arrival)
            return
        assert isinstance(reply, Granted)
        new = model.holder is None
        assert reply.fence > model.fence if new else reply.fence >= model.fence
        model.fence = reply.fence
        model.give(owner)
        if owner in model.queue:
            model.queue.remove(owner)

    def fresh(self, name: str) -> tuple[Model, LeaseKeys]:
        model, keys = self.models[name], lease_keys(name)
        if model.handed_at and time.monotonic() > model.handed_at + HANDED_FOR:
            self.client.delete(keys.lease)
            model.give(None)
        return model, keys


@pytest.mark.timeout(600)  # to make a failure small takes long
@pytest.mark.parametrize("fence_life", [3600.0, 1.0])
def test_lease_has_one_owner_and_growing_fences_whatever_happens(
    url: str, fence_life: float
) -> None:
    class Machine(LeaseMachine):
        def __init__(self) -> None:
            super().__init__(url, fence_life=fence_life)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        ),
    )
