"""The bucket of a job: yours, in the job's region; the default one is made if it is not there."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.sagemaker.aws import Account, code

__all__ = ["default", "is_there", "make", "unmake"]

_NO_CONSTRAINT = "us-east-1"
"""The region whose buckets must not be told where they are."""
_OLD = {"EU": "eu-west-1"}
"""What the oldest buckets say of where they are."""
_PRIVATE = {
    "BlockPublicAcls": True,
    "IgnorePublicAcls": True,
    "BlockPublicPolicy": True,
    "RestrictPublicBuckets": True,
}
_ENCRYPTED = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]}


def default(region: str, number: str) -> str:
    """The bucket that AWS's own tools take: its name is in the rights of roles that the console makes."""
    return f"sagemaker-{region}-{number}"


def is_there(account: Account, bucket: str, number: str) -> bool:
    """Whether there is this bucket, where a job can use it.

    Args:
        account: Who asks, and where the job runs.
        bucket: Its name.
        number: The account it has to belong to.

    Raises:
        UsageError: It is somebody else's, or in another region.
    """
    with account.speaking(f"look at bucket {bucket}"):
        s3 = account.client("s3")
        try:
            found = s3.head_bucket(Bucket=bucket, ExpectedBucketOwner=number)
        except s3.exceptions.ClientError as error:
            if code(error) in {"404", "NoSuchBucket"}:
                return False
            if code(error) in {"403", "AccessDenied"}:
                raise _foreign(bucket, number) from error
            raise
        region = found.get("BucketRegion") or _location(s3, bucket)
    if region != account.region:
        raise UsageError(
            f"bucket {bucket} is in {region}, and the job would run in {account.region}; SageMaker wants both in one "
            f"region: set launcher.region to {region}, or launcher.bucket to another one"
        )
    return True


def make(account: Account, bucket: str) -> None:
    """Make a bucket that nobody else may read; whole, or not at all.

    Raises:
        UsageError: AWS refuses, or somebody else has one of this name.
    """
    where = {} if account.region == _NO_CONSTRAINT else {"LocationConstraint": account.region}
    with account.speaking(f"make bucket {bucket}"):
        s3 = account.client("s3")
        try:
            s3.create_bucket(Bucket=bucket, **({"CreateBucketConfiguration": where} if where else {}))
        except s3.exceptions.BucketAlreadyOwnedByYou:
            return  # by another launch, just now
        except s3.exceptions.BucketAlreadyExists as error:
            raise _foreign(bucket) from error
        try:
            s3.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=_PRIVATE)
            s3.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration=_ENCRYPTED)
        except BaseException:
            unmake(account, bucket)
            raise


def unmake(account: Account, bucket: str) -> None:
    """Take a bucket away again that was made for nothing; one that holds something stays."""
    with suppress(AccelError), account.speaking(f"delete bucket {bucket}"):
        account.client("s3").delete_bucket(Bucket=bucket)


def _location(s3: Any, bucket: str) -> str:
    """Where a bucket is, as services answer that do not say it by the way."""
    found = str(s3.get_bucket_location(Bucket=bucket)["LocationConstraint"] or _NO_CONSTRAINT)
    return _OLD.get(found, found)


def _foreign(bucket: str, number: str = "") -> UsageError:
    yours = f" of account {number}" if number else ""
    return UsageError(
        f"bucket {bucket} is none{yours} that you may use: it belongs to somebody else, or you lack the right "
        "s3:ListBucket on it; set launcher.bucket to one of yours"
    )
