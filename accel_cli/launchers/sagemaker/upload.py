"""Sends a bundle to S3: all of it, or nothing is left there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from boto3.s3.transfer import TransferConfig

from accel_cli import console
from accel_cli.errors import AccelError
from accel_cli.launchers.sagemaker.bundle import Bundle

__all__ = ["remove", "send"]

_MANY = 1000
"""Objects that S3 deletes at once."""

Speaking = Callable[[str], AbstractContextManager[None]]
"""What puts errors of botocore into words: `aws.Account.speaking`."""


def send(
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
        client: boto3's client of S3.
        bundle: What is sent.
        bucket: Where to.
        prefix: The folder in it, which is the job's alone.
        speaking: Puts errors of botocore into words.
        account: Whose bucket it has to be.
        kms_key: The key of KMS that S3 encrypts with; None is what the bucket says.

    Returns:
        The address of the folder.

    Raises:
        AccelError: It could not all be sent; nothing is left of it, or the message says what is.
        KeyboardInterrupt: The person broke it off; nothing is left of it, or a note says what is.
    """
    address = f"s3://{bucket}/{prefix.strip('/')}/"
    extra = {"ExpectedBucketOwner": account} if account else {}
    secure = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
    begun = time.monotonic()
    try:
        with speaking(f"send the files to {address}"), console.moving("uploading", bundle.size) as moved:
            # Its other engine for transfers does not know the client's own way to try again.
            config = TransferConfig(preferred_transfer_client="classic")
            for name, path in bundle.files.items():
                client.upload_file(
                    str(path),
                    bucket,
                    f"{prefix.strip('/')}/{name}",
                    ExtraArgs={**extra, **secure},
                    Callback=moved,
                    Config=config,
                )
    except AccelError as error:
        raise type(error)(f"{error}; {_left(client, bucket, prefix, account, speaking)}") from error
    except KeyboardInterrupt:
        console.note(f"the upload is broken off; {_left(client, bucket, prefix, account, speaking)}")
        raise
    took = time.monotonic() - begun
    console.note(f"sent {console.size(bundle.size)} to {address} in {took:.1f} s")
    return address


def remove(client: Any, bucket: str, prefix: str, *, account: str | None = None) -> int:
    """Delete all that is in a folder of a bucket, also what was sent in part only.

    Returns:
        How many objects there were.

    Raises:
        botocore.exceptions.ClientError: S3 refuses, or does not answer.
    """
    whose = {"Bucket": bucket, **({"ExpectedBucketOwner": account} if account else {})}
    folder = {**whose, "Prefix": f"{prefix.strip('/')}/"}
    for page in client.get_paginator("list_multipart_uploads").paginate(**folder):
        for begun in page.get("Uploads", ()):
            client.abort_multipart_upload(**whose, Key=begun["Key"], UploadId=begun["UploadId"])
    count = 0
    for page in client.get_paginator("list_objects_v2").paginate(**folder):
        keys = [{"Key": found["Key"]} for found in page.get("Contents", ())]
        if keys:
            client.delete_objects(**whose, Delete={"Objects": keys, "Quiet": True})
        count += len(keys)
    return count
