"""Objects of S3, put on conditions: ``If-Match`` and ``If-None-Match``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from task_lease.fencing.objects import Stored

if TYPE_CHECKING:
    from collections.abc import Mapping

# 409 is another conditional put at the same moment; 404 that it was deleted meanwhile.
_NOT_AS_EXPECTED = frozenset({404, 409, 412})


class S3Store:
    """The objects of a bucket, for an `ObjectGuard`.

    Needs a service that honours conditional writes, as Amazon S3 does: one that
    ignores the headers guards nothing.

    Args:
        client: What ``boto3.client("s3")`` returns.
        bucket: The bucket's name.
    """

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def get(self, key: str) -> Stored | None:
        """Return an object, None if there is none."""
        try:
            found = self._client.get_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") == "NoSuchKey":
                return None
            raise
        with found["Body"] as body:
            return Stored(body.read(), found["ETag"])

    def put(self, key: str, data: bytes, *, replaces: str | None) -> str | None:
        """Put an object if it has this tag, None for not there; return the new tag."""
        condition: Mapping[str, str]
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        try:
            done = self._client.put_object(
                Bucket=self._bucket, Key=key, Body=data, **condition
            )
        except ClientError as error:
            if _status_of(error) in _NOT_AS_EXPECTED and not _is_no_bucket(error):
                return None
            raise
        tag: str = done["ETag"]
        return tag


def _status_of(error: ClientError) -> int:
    status: int = error.response["ResponseMetadata"]["HTTPStatusCode"]
    return status


def _is_no_bucket(error: ClientError) -> bool:
    code: str = error.response["Error"]["Code"]
    return code == "NoSuchBucket"
