"""The bucket of a job: upload and removal of the bundle, and download of the results."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.sagemaker.aws import Account, get_error_code

__all__ = [
    "check_bucket",
    "create_bucket",
    "delete_bucket",
    "delete_prefix",
    "download_results",
    "upload_bundle",
]

_CHUNK = 1 << 20
_MISSING = frozenset({"404", "NoSuchBucket", "NoSuchKey", "NotFound"})


def check_bucket(account: Account, bucket: str, owner: str) -> bool:
    """Return whether a bucket exists; refuse one of another account or region."""
    with account.translate_errors(f"access bucket {bucket}"):
        s3 = account.client("s3")
        try:
            response = s3.head_bucket(Bucket=bucket, ExpectedBucketOwner=owner)
        except s3.exceptions.ClientError as error:
            code = get_error_code(error)
            if code in _MISSING:
                return False
            if code in {"403", "AccessDenied"}:
                raise UsageError(
                    f"Cannot access bucket {bucket}: account {owner} does not own it, or you lack s3:ListBucket on it. "
                    "Set launcher.bucket to another bucket."
                ) from error
            raise
        region = response.get("BucketRegion", account.region)
    if region != account.region:
        raise UsageError(
            f"Bucket {bucket} is in {region}, and the job would run in {account.region}: SageMaker needs both in one region. "
            f"Set launcher.region to {region}, or launcher.bucket to a bucket in {account.region}."
        )
    return True


def create_bucket(account: Account, bucket: str) -> None:
    """Create a bucket. S3 encrypts it, and closes it to the public."""
    # S3 refuses the name of this region, which is the default.
    region = account.region if account.region != "us-east-1" else None
    configuration = {"CreateBucketConfiguration": {"LocationConstraint": region}} if region else {}
    with account.translate_errors(f"create bucket {bucket}"):
        s3 = account.client("s3")
        # Another launch may be faster.
        with suppress(s3.exceptions.BucketAlreadyOwnedByYou):
            s3.create_bucket(Bucket=bucket, **configuration)


def delete_bucket(account: Account, bucket: str) -> None:
    """Delete an empty bucket; one with objects in it, or one that cannot be deleted, stays."""
    with suppress(AccelError), account.translate_errors(f"delete bucket {bucket}"):
        account.client("s3").delete_bucket(Bucket=bucket)


def upload_bundle(account: Account, folder: Path, bucket: str, prefix: str, owner: str) -> None:
    """Upload a folder to a prefix that holds nothing else; boto3 aborts the upload that fails."""
    uri, start = f"s3://{bucket}/{prefix}/", time.monotonic()
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    with (
        account.translate_errors(f"upload the files to {uri}"),
        console.transfer_progress("uploading", size) as advance,
    ):
        for path in files:
            account.client("s3").upload_file(
                str(path),
                bucket,
                f"{prefix}/{path.relative_to(folder)}",
                ExtraArgs={"ExpectedBucketOwner": owner},
                Callback=advance,
            )
    console.note(f"sent {console.format_size(size)} to {uri} in {time.monotonic() - start:.1f} s")


def delete_prefix(account: Account, bucket: str, prefix: str, owner: str) -> str:
    """Delete all objects of a folder in a bucket, and return a sentence that states the result."""
    assert prefix.strip("/")
    uri, failure = f"s3://{bucket}/{prefix}/", ""
    try:
        with account.translate_errors(f"delete {uri}"):
            s3, request = account.client("s3"), {"Bucket": bucket, "ExpectedBucketOwner": owner}
            for page in s3.get_paginator("list_objects_v2").paginate(**request, Prefix=f"{prefix}/"):
                keys = [{"Key": item["Key"]} for item in page.get("Contents", ())]
                if keys:
                    response = s3.delete_objects(**request, Delete={"Objects": keys, "Quiet": True})
                    for item in response.get("Errors", ()):
                        failure = f"{item.get('Key')}: {item.get('Message')}"
    except (AccelError, KeyboardInterrupt) as error:
        if get_error_code(error.__cause__) in _MISSING:
            return "Nothing was uploaded."
        failure = str(error) or "interrupted"
    if failure:
        return f"Uploaded files may remain ({failure}). Delete them: aws s3 rm --recursive {uri}"
    return "Nothing remains in S3."


def download_results(account: Account, job: Mapping[str, Any], parent: Path) -> Path:
    """Download what a job left into a new folder with the job's name, which appears complete or not at all."""
    name = str(job["TrainingJobName"])
    folder = parent / name
    if folder.is_symlink() or folder.exists():
        raise UsageError(f"{folder} exists already. Move it away, or choose another folder with -o.")
    output = f"{job['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{name}/output/"
    model = job.get("ModelArtifacts", {}).get("S3ModelArtifacts") or f"{output}model.tar.gz"
    with _create_temporary_folder(parent, name) as temporary:
        files, archive = temporary / "files", temporary / "archive"
        for uri, subfolder in ((model, ""), (f"{output}output.tar.gz", "output")):
            if not uri.endswith("/") and _download(account, uri, archive):
                _unpack(uri, archive, _choose_folder(files, subfolder))
        if job["OutputDataConfig"].get("CompressionType") == "NONE":
            _download_folder(account, output, files)
        if not files.exists():
            raise UsageError(
                f"Job {name} left nothing in {output}. A script that writes to /opt/ml/model (SM_MODEL_DIR), or to "
                "launcher.model_dir, leaves a model."
            )
        if not (files / ".gitignore").exists():
            # The next launch sends what git does not ignore.
            (files / ".gitignore").write_text("*\n", encoding="utf-8")
        files.rename(folder)
    return folder


@contextmanager
def _create_temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """Create a folder on the disk of the download, and remove it at the end."""
    temporary = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
        yield temporary
    except OSError as error:
        raise AccelError(
            f"Cannot write the results of job {name} to {parent}: {error.strerror or error}."
        ) from None
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def _download(account: Account, uri: str, path: Path) -> bool:
    """Download an object, and return whether it exists."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    with account.translate_errors(f"download {uri}"):
        s3 = account.client("s3")
        try:
            size = s3.head_object(Bucket=bucket, Key=key)["ContentLength"]
        except s3.exceptions.ClientError as error:
            if get_error_code(error) not in _MISSING:
                raise
            return False
        with console.transfer_progress(Path(key).name, size) as advance:
            s3.download_file(bucket, key, str(path), Callback=advance)
    return True


def _download_folder(account: Account, uri: str, files: Path) -> None:
    """Download the files that a job has left without compression: those of the model, and the others below `output`."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    with account.translate_errors(f"list {uri}"):
        pages = account.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
    for key in keys:
        folder, _, name = key.removeprefix(prefix).partition("/")
        path = Path(files, name) if folder == "model" else Path(files, "output", name or folder)
        # An object without a name is a folder of the console.
        if name.endswith("/") or not (name or folder):
            continue
        if not path.resolve().is_relative_to(files.resolve()):
            raise AccelError(f"s3://{bucket}/{key} has a name that is not safe as a path.")
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(account, f"s3://{bucket}/{key}", path)


def _choose_folder(files: Path, subfolder: str) -> Path:
    """Create a folder for an archive, with a name that no file of the model has."""
    folder = files / subfolder
    while subfolder and folder.exists():
        folder = folder.with_name(f"{folder.name}_")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _unpack(uri: str, path: Path, folder: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise UsageError("This Python cannot unpack archives safely. Use 3.11.4, 3.12 or newer.")
    try:
        with gzip.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                archive.extractall(folder, filter="data")
            # tarfile accepts an archive that was cut off; gzip reports it once it is read to its end.
            while stream.read(_CHUNK):
                pass
    except tarfile.FilterError as error:
        raise AccelError(f"{uri} holds a file that is not safe to unpack: {error}.") from None
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise AccelError(f"Cannot unpack {uri}: {error}.") from None
    path.unlink()
