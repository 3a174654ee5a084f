from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from rq import Queue
from rq.job import Job, JobStatus

from rq_lease.guard import claim_of
from rq_lease.parking import park_of
from task_lease import Lease, Leases
from task_lease.answers import Parked
from task_lease.claims import Claim, Conflict
from task_lease.config import LeaseConfig
from task_lease.keys import PARKED_INDEX, lease_keys
from task_lease.parking import Parking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import redis


NAME = "invoices:7"
CONFIG = LeaseConfig(ttl=2.0)


@pytest.fixture
def queue(client: redis.Redis) -> Queue:
    return Queue("reports", connection=client)


@pytest.fixture
def leases(url: str) -> Leases:
    return Leases(url)


def nothing() -> None:
    pass


def popped(queue: Queue) -> Job:
    """Enqueue a job and pop it, as a worker does."""
    job = queue.enqueue(nothing)
    queue.connection.lmove(queue.key, queue.intermediate_queue_key)
    return Job.fetch(job.id, connection=queue.connection)


def claim_for(job: Job, queue: Queue, execution: str = "e", name: str = NAME) -> Claim:
    claim = claim_of(job, queue.name, "invoices", name, CONFIG)
    return claim._replace(park=park_of(job, queue, execution))


def park(
    leases: Leases, claim: Claim, *, limit: int | None = None
) -> Lease | Conflict | Parked:
    assert claim.park is not None
    return Parking(leases).park(claim, claim.park, counts=True, limit=limit)


def parked(leases: Leases, queue: Queue, name: str = NAME) -> Job:
    job = popped(queue)
    assert isinstance(park(leases, claim_for(job, queue, name=name)), Parked)
    return job


def parked_ids(client: redis.Redis, name: str = NAME) -> int:
    return client.zcard(lease_keys(name).parked)


def hold(leases: Leases, name: str = NAME) -> Lease:
    lease = leases.try_acquire(name)
    assert lease is not None
    return lease


def commands(client: redis.Redis) -> int:
    return sum(stats["calls"] for stats in client.info("commandstats").values())


def test_parked_job_shows_as_deferred_when_lease_is_held(
    leases: Leases, queue: Queue
) -> None:
    hold(leases)

    job = parked(leases, queue)

    assert job.get_status() == JobStatus.DEFERRED
    assert queue.deferred_job_registry.get_job_ids() == [job.id]
    assert queue.connection.llen(queue.intermediate_queue_key) == 0
    assert queue.connection.smembers(PARKED_INDEX)


def test_parking_gets_the_lease_when_it_is_free(leases: Leases, queue: Queue) -> None:
    job = popped(queue)

    lease = park(leases, claim_for(job, queue))

    assert isinstance(lease, Lease)
    assert job.get_status() == JobStatus.QUEUED


def test_release_hands_over_one_job_in_order_of_arrival(
    leases: Leases, queue: Queue
) -> None:
    lease = hold(leases)
    first, second = parked(leases, queue), parked(leases, queue)
    waiting = queue.enqueue(nothing)

    lease.release()

    assert queue.job_ids == [first.id, waiting.id]
    assert first.get_status() == JobStatus.QUEUED
    assert queue.deferred_job_registry.get_job_ids() == [second.id]


def test_hand_over_keeps_the_instant_of_enqueueing(
    leases: Leases, queue: Queue
) -> None:
    lease = hold(leases)
    job = parked(leases, queue)

    lease.release()

    fetched = Job.fetch(job.id, connection=queue.connection)
    assert fetched.enqueued_at == job.enqueued_at


def test_handed_job_gets_the_lease_and_a_newcomer_does_not(
    leases: Leases, queue: Queue
) -> None:
    lease = hold(leases)
    job = parked(leases, queue)
    lease.release()

    newcomer = leases.try_acquire(NAME)
    handed = leases.ask(claim_for(job, queue, "other"))

    assert newcomer is None
    assert isinstance(handed, Lease)
    assert handed.fence is not None
    assert lease.fence is not None
    assert handed.fence > lease.fence


def test_waiting_handed_job_gets_the_lease_when_it_asks(
    leases: Leases, queue: Queue
) -> None:
    lease = hold(leases)
    job = parked(leases, queue)
    lease.release()

    handed = leases.wait(claim_for(job, queue, "other"), lambda _: 0.0)

    assert handed.state == "held"


def test_job_keeps_its_place_when_it_conflicts_again(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    lease = hold(leases)
    first, second = parked(leases, queue), parked(leases, queue)
    lease.release()
    client.delete(lease_keys(NAME).lease)  # its worker was too slow, and another came
    lease = hold(leases)

    assert isinstance(park(leases, claim_for(first, queue, "again")), Parked)
    client.delete(queue.key)
    lease.release()

    assert client.lrange(queue.key, 0, -1) == [first.id.encode()]
    assert second.get_status() == JobStatus.DEFERRED


def test_parking_fails_when_job_conflicted_too_often(
    leases: Leases, queue: Queue
) -> None:
    hold(leases)
    job = popped(queue)

    first = park(leases, claim_for(job, queue, "one"), limit=1)
    second = park(leases, claim_for(job, queue, "two"), limit=1)

    assert isinstance(first, Parked)
    assert isinstance(second, Conflict)


def cancel(job: Job) -> None:
    job.cancel()


def delete(job: Job) -> None:
    job.delete()


def lose(job: Job) -> None:
    job.connection.delete(job.key)


def requeue(job: Job) -> None:
    Queue(job.origin, connection=job.connection).enqueue_job(job)


def finish(job: Job) -> None:
    job.set_status(JobStatus.FINISHED)


@pytest.mark.parametrize("call_off", [cancel, delete, lose, requeue, finish])
def test_hand_over_goes_on_with_the_next_when_job_is_not_wanted(
    leases: Leases, queue: Queue, call_off: Callable[[Job], None]
) -> None:
    lease = hold(leases)
    first, second = parked(leases, queue), parked(leases, queue)
    call_off(first)
    queue.connection.delete(queue.key)

    lease.release()

    assert queue.connection.lrange(queue.key, 0, -1) == [second.id.encode()]
    assert parked_ids(queue.connection) == 0
    assert queue.deferred_job_registry.get_job_ids() == []


def test_park_leaves_no_trace_when_job_was_cancelled_before(
    leases: Leases, queue: Queue
) -> None:
    hold(leases)
    job = popped(queue)
    job.cancel()

    assert isinstance(park(leases, claim_for(job, queue)), Parked)

    assert job.get_status() == JobStatus.CANCELED
    assert parked_ids(queue.connection) == 0


def test_many_cancelled_jobs_are_dropped_when_swept(
    leases: Leases, queue: Queue
) -> None:
    lease = hold(leases)
    for _ in range(120):
        parked(leases, queue).cancel()
    last = parked(leases, queue)
    lease.release()

    for _ in range(3):
        Parking(leases).sweep()

    assert queue.job_ids == [last.id]


def test_copy_leaves_status_alone_when_original_runs(
    leases: Leases, queue: Queue
) -> None:
    job = popped(queue)
    lease = leases.ask(claim_for(job, queue, "one"))
    job.set_status(JobStatus.STARTED)

    copy = park(leases, claim_for(job, queue, "two"))

    assert isinstance(lease, Lease)
    assert isinstance(copy, Parked)
    assert job.get_status() == JobStatus.STARTED
    job.set_status(JobStatus.FINISHED)
    lease.release()
    assert queue.job_ids == []
    assert parked_ids(queue.connection) == 0


def test_copy_is_handed_over_when_original_died(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    job = popped(queue)
    assert isinstance(leases.ask(claim_for(job, queue, "one")), Lease)
    job.set_status(JobStatus.STARTED)
    assert isinstance(park(leases, claim_for(job, queue, "two")), Parked)
    client.delete(lease_keys(NAME).lease)

    Parking(leases).sweep()

    assert queue.job_ids == [job.id]


def test_newer_attempt_is_handed_over_when_older_run_has_ended(
    leases: Leases, queue: Queue
) -> None:
    older = popped(queue)
    lease = leases.ask(claim_for(older, queue, "one"))
    queue.enqueue_job(Job.fetch(older.id, connection=queue.connection))
    queue.connection.lpop(queue.key)
    newer = Job.fetch(older.id, connection=queue.connection)
    assert isinstance(park(leases, claim_for(newer, queue, "two")), Parked)
    older.set_status(JobStatus.FINISHED)
    older.save()  # as RQ does, with the older instant of enqueueing
    queue.connection.expire(older.key, 500)

    assert isinstance(lease, Lease)
    lease.release()

    assert queue.job_ids == [older.id]
    fetched = Job.fetch(older.id, connection=queue.connection)
    assert fetched.get_status() == JobStatus.QUEUED
    assert fetched.enqueued_at == newer.enqueued_at
    assert queue.connection.ttl(older.key) == -1


def test_refused_hand_over_ends_the_lease_and_keeps_the_job(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    lease = hold(leases)
    stuck = parked(leases, queue)
    other = Queue("other", connection=client)
    next_job = parked(leases, other)
    client.set(queue.key, "no list")

    assert lease.release()
    lease_of_next = leases.ask(claim_for(next_job, other))
    client.delete(queue.key)
    assert isinstance(lease_of_next, Lease)
    lease_of_next.release()

    assert other.job_ids == [next_job.id]
    assert queue.job_ids == [stuck.id]


def test_refused_hand_over_is_told_when_nobody_else_waits(
    url: str, queue: Queue, client: redis.Redis
) -> None:
    events: list[Any] = []
    leases = Leases(url, observers=[events.append])
    lease = hold(leases)
    parked(leases, queue)
    client.set(queue.key, "no list")

    lease.release()

    assert "WRONGTYPE" in events[-1].detail
    assert client.exists(lease_keys(NAME).lease) == 0
    assert parked_ids(client) == 1


@pytest.fixture
def restricted(client: redis.Redis, url: str) -> Iterator[str]:
    """Give the URL of a user who may not touch the keys of RQ."""
    name = "leases-only"
    client.acl_setuser(
        name,
        enabled=True,
        passwords=["+secret"],
        categories=["+@all"],
        keys=["tl1:*"],
        channels=["*"],
    )
    yield url.replace("redis://", f"redis://{name}:secret@")
    client.acl_deluser(name)


def test_hand_over_is_left_to_the_sweep_when_releaser_may_not_touch_rq(
    leases: Leases, restricted: str, queue: Queue
) -> None:
    lease = hold(Leases(restricted))
    job = parked(leases, queue)

    assert lease.release()
    assert queue.job_ids == []
    Parking(leases).sweep()

    assert queue.job_ids == [job.id]


def test_newcomer_gets_the_lease_when_it_may_not_hand_over(
    leases: Leases, restricted: str, queue: Queue, client: redis.Redis
) -> None:
    hold(leases)
    parked(leases, queue)
    client.delete(lease_keys(NAME).lease)

    assert Leases(restricted).try_acquire(NAME) is not None
    assert parked_ids(client) == 1


def test_release_hands_over_when_server_is_full(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    lease = hold(leases)
    job = parked(leases, queue)
    client.config_set("maxmemory", "1")
    try:
        lease.release()
    finally:
        client.config_set("maxmemory", "0")

    assert queue.job_ids == [job.id]
    assert parked_ids(client) == 0


def test_job_is_parked_once_when_the_answer_was_lost(
    leases: Leases, queue: Queue
) -> None:
    hold(leases)
    claim = claim_for(popped(queue), queue)

    park(leases, claim)
    park(leases, claim)

    assert parked_ids(queue.connection) == 1


def test_job_does_not_run_beside_its_park_when_the_answer_was_lost(
    leases: Leases, queue: Queue
) -> None:
    lease = hold(leases)
    job = popped(queue)
    claim = claim_for(job, queue)
    park(leases, claim)
    lease.release()

    repeated = park(leases, claim)

    assert isinstance(repeated, Parked)
    assert queue.job_ids == [job.id]


def test_park_is_gone_when_the_same_attempt_got_the_lease(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    hold(leases)
    job = parked(leases, queue)
    client.delete(lease_keys(NAME).lease)

    assert isinstance(leases.ask(claim_for(job, queue, "other")), Lease)

    assert parked_ids(client) == 0
    assert queue.deferred_job_registry.get_job_ids() == []


def test_newcomer_hands_over_when_lease_ended_without_release(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    hold(leases)
    job = parked(leases, queue)
    client.delete(lease_keys(NAME).lease)

    assert leases.try_acquire(NAME) is None
    assert queue.job_ids == [job.id]


def test_job_that_does_not_come_keeps_nobody_back(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    lease = hold(leases)
    parked(leases, queue)
    second = parked(leases, queue)
    lease.release()
    client.delete(lease_keys(NAME).lease)  # the reservation has ended

    newcomer = hold(leases)
    Parking(leases).sweep()
    assert second.get_status() == JobStatus.DEFERRED
    newcomer.release()

    assert second.get_status() == JobStatus.QUEUED


def test_sweep_waits_for_the_job_that_is_on_its_way(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    lease = hold(leases)
    parked(leases, queue)
    second = parked(leases, queue)
    lease.release()
    client.delete(lease_keys(NAME).lease)

    Parking(leases).sweep()
    before = second.get_status()
    client.delete(lease_keys(NAME).handed)
    Parking(leases).sweep()

    assert before == JobStatus.DEFERRED
    assert second.get_status() == JobStatus.QUEUED


def test_sweep_forgets_a_lease_when_nothing_is_parked(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    lease = hold(leases)
    parked(leases, queue)
    lease.release()

    Parking(leases).sweep()

    assert client.exists(PARKED_INDEX) == 0


def test_one_of_all_sweepers_takes_the_turn(
    leases: Leases, queue: Queue, url: str
) -> None:
    hold(leases)
    assert not Parking(leases).takes_turn(60.0)

    parked(leases, queue)

    assert [Parking(of).takes_turn(60.0) for of in (leases, Leases(url))] == [
        True,
        False,
    ]


def test_waiter_and_job_are_served_in_order_of_arrival(
    leases: Leases, queue: Queue, url: str, client: redis.Redis
) -> None:
    lease = hold(leases)
    first = parked(leases, queue)
    got: list[Lease] = []
    waiter = threading.Thread(
        target=lambda: got.append(Leases(url).acquire(NAME, timeout=20))
    )
    waiter.start()
    while not client.exists(lease_keys(NAME).queue):
        pass
    second = parked(leases, queue)

    lease.release()
    of_first = leases.ask(claim_for(first, queue, "x"))
    assert isinstance(of_first, Lease)
    assert not got
    of_first.release()
    waiter.join(20)
    assert got
    assert second.get_status() == JobStatus.DEFERRED
    got[0].release()

    assert second.get_status() == JobStatus.QUEUED


def release_each_round(
    barrier: threading.Barrier, held: list[Lease], rounds: int
) -> None:
    for _ in range(rounds):
        barrier.wait()
        held.pop().release()
        barrier.wait()
        barrier.wait()


def test_no_wake_up_is_lost_when_parking_races_with_release(
    url: str, queue: Queue, client: redis.Redis
) -> None:
    rounds = 2000
    one, two = Leases(url), Leases(url)
    claims = [claim_for(popped(queue), queue, str(n)) for n in range(rounds)]
    barrier = threading.Barrier(2, timeout=30)
    held = [hold(one)]
    releasing = (barrier, held, rounds)
    releaser = threading.Thread(target=release_each_round, args=releasing)
    releaser.start()
    parked_at_all = 0

    for claim in claims:
        barrier.wait()
        answer = park(two, claim)
        barrier.wait()
        if isinstance(answer, Parked):
            parked_at_all += 1
            assert client.lpop(queue.key) == claim.id.encode()
            answer = one.ask(claim)
        assert isinstance(answer, Lease)
        held.append(answer)
        barrier.wait()
    releaser.join(30)

    assert 0 < parked_at_all < rounds


def test_commands_grow_with_the_jobs_and_not_faster(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    def count(jobs: int) -> int:
        lease = hold(leases)
        for _ in range(jobs):
            parked(leases, queue)
        client.config_resetstat()
        for _ in range(jobs):
            lease.release()
            job = Job.fetch(queue.pop_job_id() or "", connection=client)
            answer = leases.ask(claim_for(job, queue, "x"))
            assert isinstance(answer, Lease)
            lease = answer
        lease.release()
        return commands(client)

    few, many = count(100), count(1000)

    assert many <= few * 10 * 1.1


def test_uncontended_run_costs_no_more_commands_than_before(
    leases: Leases, queue: Queue, client: redis.Redis
) -> None:
    claim = claim_for(popped(queue), queue)
    for _ in range(2):  # the first time, the server has to learn the operations
        client.config_resetstat()
        lease = leases.ask(claim)
        assert isinstance(lease, Lease)
        lease.release()

    counted = {
        name.removeprefix("cmdstat_"): stats["calls"]
        for name, stats in client.info("commandstats").items()
    }
    counted.pop("config|resetstat")
    assert counted == {
        "evalsha": 2,
        "mget": 1,
        "time": 1,
        "exists": 2,
        "set": 2,
        "get": 1,
        "del": 1,
    }
