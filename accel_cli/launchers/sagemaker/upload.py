"""Sends a bundle to S3: all of it, or nothing is left there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from accel_cli import console
from accel_cli.errors import AccelError
from accel_cli.launchers.sagemaker.bundle import Bundle

__all__ = ["Speaking", "remove", "send"]

Speaking = Callable[[str], AbstractContextManager[None]]
"""What puts errors of botocore into words: `aws.Account.speaking`."""


def send(  # noqa: PLR0913 - who, what, where, and the bucket's own rules
    client: Any,
    bundle: Bundle,
    bucket: str,
    prefix: str,
    *,
    speaking: Speaking,
    account: str | None = None,
    kms_key: str | None = None,
) -> str:
    """Send a bundle, and show on a terminal how far that is.

    Args:
        client: boto3's client of S3; it tries again by itself.
        bundle: What is sent.
        bucket: Where to.
        prefix: The folder in it, which is the job's alone: all that is in it is deleted if this fails.
        speaking: Puts errors of botocore into words.
        account: Whose bucket it has to be.
        kms_key: The key of KMS that S3 encrypts with; None is what the bucket says.

    Returns:
        The address of the folder.

    Raises:
        AccelError: It could not all be sent; the message also says what became of what was.
        KeyboardInterrupt: The person broke it off; a note says what became of what was sent.
    """
    place = _Place(client, bucket, prefix, account)
    begun = time.monotonic()
    sent: list[str] = []
    try:
        with (
            speaking(f"send the files to {place.address}"),
            console.moving("uploading", bundle.size) as moved,
        ):
            for name in bundle.files:
                _send(place, bundle, name, kms_key, moved)
                sent.append(name)
    except BaseException as error:
        left = _cleared(place, speaking, some=bool(sent))
        if isinstance(error, AccelError):
            raise type(error)(f"{error}; {left}") from error
        console.note(f"the upload is broken off; {left}")
        raise
    console.note(f"sent {console.size(bundle.size)} to {place.address} in {time.monotonic() - begun:.1f} s")
    return place.address


def remove(client: Any, bucket: str, prefix: str, *, account: str | None = None) -> int:
    """Delete all that is in a folder of a bucket, also what was sent in part only.

    Returns:
        How many objects there were.

    Raises:
        AccelError: S3 keeps some of it.
        botocore.exceptions.ClientError: S3 refuses.
    """
    return _remove(_Place(client, bucket, prefix, account))


@dataclass(frozen=True)
class _Place:
    """A folder of a bucket."""

    client: Any
    bucket: str
    prefix: str
    account: str | None

    @property
    def folder(self) -> str:
        """Its name as S3 knows it; never all of the bucket."""
        name = self.prefix.strip("/")
        assert name
        return f"{name}/"

    @property
    def address(self) -> str:
        return f"s3://{self.bucket}/{self.folder}"

    @property
    def owner(self) -> dict[str, str]:
        """What every call says, so that none goes to a bucket of somebody else."""
        return {"ExpectedBucketOwner": self.account} if self.account else {}

    @property
    def itself(self) -> dict[str, str]:
        return {"Bucket": self.bucket, **self.owner}


def _send(
    place: _Place, bundle: Bundle, name: str, kms_key: str | None, moved: Callable[[int], None]
) -> None:
    from boto3.s3.transfer import TransferConfig  # noqa: PLC0415 - who has a client has it

    secure = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
    place.client.upload_file(
        str(bundle.files[name]),
        place.bucket,
        place.folder + name,
        ExtraArgs={**place.owner, **secure},
        Callback=moved,
        # Its other engine for transfers knows nothing of the client's way to try again.
        Config=TransferConfig(preferred_transfer_client="classic"),
    )


def _remove(place: _Place) -> int:
    count = 0
    for page in place.client.get_paginator("list_objects_v2").paginate(**place.itself, Prefix=place.folder):
        keys = [{"Key": found["Key"]} for found in page.get("Contents", ())]
        count += len(keys)
        if keys:
            answer = place.client.delete_objects(**place.itself, Delete={"Objects": keys, "Quiet": True})
            for kept in answer.get("Errors", ()):
                raise AccelError(f"S3 keeps s3://{place.bucket}/{kept.get('Key')}: {kept.get('Message')}")
    pages = place.client.get_paginator("list_multipart_uploads").paginate(**place.itself, Prefix=place.folder)
    for begun in (begun for page in pages for begun in page.get("Uploads", ())):
        place.client.abort_multipart_upload(**place.itself, Key=begun["Key"], UploadId=begun["UploadId"])
    return count


def _cleared(place: _Place, speaking: Speaking, *, some: bool) -> str:
    """Delete what was sent; what became of it, in words."""
    try:
        with speaking(f"delete {place.address}"):
            _remove(place)
    except (AccelError, KeyboardInterrupt) as error:
        if not some:
            return "nothing of it has arrived"
        why = str(error) or "that was broken off too"
        return f"what was sent is still there ({why}): aws s3 rm --recursive {place.address} deletes it"
    return "nothing of it is left there"
