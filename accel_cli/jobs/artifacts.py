"""Brings home what a training job left in S3: both archives, unpacked into one folder that is whole or not there."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.sagemaker.aws import code

if TYPE_CHECKING:
    from accel_cli.launchers.sagemaker.aws import Account

__all__ = ["bring"]

_CHUNK = 1 << 20
_ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})


@dataclass(frozen=True)
class _Archive:
    bucket: str
    key: str
    size: int
    into: str
    """Folder below the job's; empty for the job's own."""

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def bring(account: Account, told: Mapping[str, Any], into: Path) -> Path:
    """Fetch and unpack what a job left.

    Args:
        account: Whose job it is.
        told: What SageMaker says of it.
        into: The folder that gets a folder of the job's name.

    Returns:
        That folder.

    Raises:
        AccelError: An archive cannot be unpacked, or the disk is full.
        UnreachableError: AWS does not answer now.
        UsageError: The job left nothing, or its folder is there already.
    """
    name = str(told["TrainingJobName"])
    folder = into / name
    if folder.is_symlink() or folder.exists():
        raise UsageError(f"{folder} is there already; move it away, or name another folder with -o")
    archives = list(_found(account, told))
    if not archives:
        raise UsageError(
            f"job {name} has left nothing in {_output(told)}: what a script writes to /opt/ml/model (SM_MODEL_DIR), or "
            "into launcher.model_dir, is kept as its model"
        )
    with _beside(into, name) as fresh:
        for archive in archives:
            _fetch(account, archive, fresh)
        _keep_out_of_git(fresh / "files")
        (fresh / "files").rename(folder)
    return folder


def _keep_out_of_git(folder: Path) -> None:
    """A model is no source: neither is it committed by accident, nor sent along with the next job."""
    if not (folder / ".gitignore").exists():
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")


def _found(account: Account, told: Mapping[str, Any]) -> Iterator[_Archive]:
    """The archives that are there; a job that failed has no model, and few have other output."""
    model = told.get("ModelArtifacts", {}).get("S3ModelArtifacts") or f"{_output(told)}model.tar.gz"
    for uri, into in ((model, ""), (f"{_output(told)}output.tar.gz", "output")):
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        with account.speaking(f"look for {uri}"):
            try:
                said = account.client("s3").head_object(Bucket=bucket, Key=key)
            except ClientError as error:
                if code(error) not in _ABSENT:
                    raise
            else:
                yield _Archive(bucket, key, said["ContentLength"], into)


def _output(told: Mapping[str, Any]) -> str:
    return f"{told['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{told['TrainingJobName']}/output/"


@contextmanager
def _beside(into: Path, name: str) -> Iterator[Path]:
    """A folder for what is not whole yet, on the disk where it will be; nothing of it is left."""
    fresh = None
    try:
        into.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=into))
        (fresh / "files").mkdir()
        yield fresh
    except OSError as error:
        raise AccelError(f"{into} cannot take what job {name} left: {error.strerror or error}") from None
    finally:
        if fresh:
            shutil.rmtree(fresh, ignore_errors=True)


def _fetch(account: Account, archive: _Archive, fresh: Path) -> None:
    path = fresh / "archive"
    with (
        account.speaking(f"fetch {archive.uri}"),
        console.moving(Path(archive.key).name, archive.size) as moved,
    ):
        account.client("s3").download_file(
            archive.bucket,
            archive.key,
            str(path),
            Callback=moved,
            # Its other engine for transfers does not know the client's own way to try again.
            Config=TransferConfig(preferred_transfer_client="classic"),
        )
    if path.stat().st_size != archive.size:
        raise AccelError(
            f"{archive.uri} has {archive.size} bytes, and {path.stat().st_size} came: it was changed meanwhile. Try again"
        )
    _unpack(archive, path, _free(fresh / "files", archive.into))
    path.unlink()


def _free(folder: Path, name: str) -> Path:
    """A folder that no file of the model has the name of."""
    found = folder / name
    while name and found.exists():
        found = found.with_name(f"{found.name}_")
    found.mkdir(exist_ok=True)
    return found


def _unpack(archive: _Archive, path: Path, folder: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise UsageError("this Python cannot unpack archives safely; use 3.10.12, 3.11.4, 3.12 or newer")
    try:
        with gzip.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as packed:
                packed.extractall(folder, filter="data")
            # Of an archive that was cut off, tarfile takes what is there; gzip knows better, once it is read to its end.
            while stream.read(_CHUNK):
                pass
    except tarfile.FilterError as error:
        raise AccelError(f"{archive.uri} holds what may not be unpacked: {error}") from None
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise AccelError(f"{archive.uri} is no archive that can be read: {error}") from None
