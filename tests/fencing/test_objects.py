from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.exceptions import ClientError
from fencing.tickets import NEW, OLD, TWIN, UNGUARDED, Ticket
from moto.server import ThreadedMotoServer

from task_lease import StaleFence
from task_lease.fencing import FileStore, ObjectGuard
from task_lease.fencing.s3 import S3Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from task_lease.fencing import ObjectStore


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """Give a client of moto's S3, with a bucket named "bucket"."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "open sesame"}
    address = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=address, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="bucket")
    yield client
    client.close()
    server.stop()


@pytest.fixture(params=["files", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Give a store; a test's objects have names that no other test uses."""
    if request.param == "files":
        return FileStore(tmp_path / "objects")
    return S3Store(request.getfixturevalue("s3"), "bucket")


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """Give the key of an object that is not there."""
    return f"../{request.node.name}"


def test_put_is_done_only_when_the_object_is_as_expected(
    store: ObjectStore, key: str
) -> None:
    first = store.put(key, b"1", replaces=None)
    second = store.put(key, b"2", replaces=first)

    assert first != second
    assert store.put(key, b"x", replaces=None) is None
    assert store.put(key, b"x", replaces=first) is None
    assert store.put(f"{key}-none", b"x", replaces=first) is None
    assert store.get(f"{key}-none") is None
    assert store.get(key) == (b"2", second)


@pytest.mark.parametrize("late", [OLD, TWIN], ids=["lower", "equal"])
def test_object_is_refused_to_whoever_was_overtaken(
    store: ObjectStore, key: str, late: Ticket
) -> None:
    guard, first = ObjectGuard(store), OLD if late == TWIN else NEW
    guard.claim(first, key).write(b"1")

    with pytest.raises(StaleFence) as caught:
        guard.claim(late, key)

    assert caught.value.args == (key, late.fence, first.fence)
    assert guard.read(key) == b"1"


def test_late_write_is_refused_when_another_claimed_meanwhile_and_wrote_nothing(
    store: ObjectStore, key: str
) -> None:
    guard = ObjectGuard(store)
    late = guard.claim(OLD, key)
    late.write(b"1")
    newer = guard.claim(NEW, key)

    with pytest.raises(StaleFence) as caught:
        late.write(b"0")
    with pytest.raises(StaleFence):
        late.delete()
    assert (caught.value.fence, caught.value.stored) == (OLD.fence, NEW.fence)

    newer.write(newer.data + b"2" if newer.data else b"")
    assert guard.read(key) == b"12"


def test_deleted_object_still_knows_whom_to_refuse(
    store: ObjectStore, key: str
) -> None:
    guard = ObjectGuard(store)
    guard.claim(NEW, key).write(b"1")
    guard.claim(NEW, key).delete()

    with pytest.raises(StaleFence):
        guard.claim(OLD, key)

    assert guard.read(key) is None
    assert guard.read(f"{key}-never") is None


def test_claim_is_refused_when_the_run_has_no_fence(
    store: ObjectStore, key: str
) -> None:
    with pytest.raises(StaleFence):
        ObjectGuard(store).claim(UNGUARDED, key)

    assert store.get(key) is None


def test_one_of_many_puts_at_once_is_done(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    tag = store.put("a", b"", replaces=None)
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            data = [b"%d %d" % (number, writer) for writer in range(8)]
            put = [pool.submit(store.put, "a", one, replaces=tag) for one in data]

            (tag,) = filter(None, [each.result() for each in put])


def test_claim_gives_up_when_every_put_finds_another_one(key: str) -> None:
    class Store:
        def get(self, key: str) -> None:  # noqa: ARG002
            return None

        def put(self, key: str, data: bytes, *, replaces: str | None) -> None:
            """Find another one."""

    with pytest.raises(OSError, match="changed by others 100 times"):
        ObjectGuard(Store()).claim(OLD, key)


def test_missing_bucket_is_an_error_and_no_refusal(s3: Any) -> None:
    store = S3Store(s3, "no-bucket")

    with pytest.raises(ClientError, match="NoSuchBucket"):
        store.get("a")
    with pytest.raises(ClientError, match="NoSuchBucket"):
        store.put("a", b"", replaces=None)
