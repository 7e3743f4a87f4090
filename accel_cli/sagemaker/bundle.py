"""The bundle of a job, one folder: archives of source and accel, wheels, `entry.py` and `job.json`."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import platformdirs

import accel_cli
from accel_cli.console import mask_secrets
from accel_cli.errors import AccelError, UsageError
from accel_cli.sagemaker.files import SelectedFile, Selection, format_name, is_clutter

__all__ = ["Bundle", "build_bundle", "fetch_wheels", "list_requirements", "select_accel", "write_archive"]

_PACKAGES = ("accel_cli", "accel_runtime")
_ENTRY = "accel_cli/sagemaker/entry.py"
_PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""Python versions to fetch wheels for, if that of the image is not known."""
_PIP_TIMEOUT_S = 120
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
"""Tags of wheels that run on AWS's images, whose glibc is 2.31 or newer; the first also means older ones."""


@dataclass(frozen=True)
class Bundle:
    """A folder that is uploaded as it is."""

    folder: Path
    note: str = ""
    """A sentence for the user about wheels that are missing."""

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def build_bundle(
    job_spec: Mapping[str, Any],
    source: Selection,
    folder: Path,
    python: str | None,
    architecture: str = "x86_64",
) -> Bundle:
    """Write the bundle of a job.

    Args:
        job_spec: The content of `job.json`.
        source: The files of the source.
        folder: An empty folder.
        python: The Python version of the container, such as `3.12`; None if it is not known.
        architecture: The container's processors, `x86_64` or `aarch64`.

    Raises:
        UsageError: If a file keeps changing, or cannot be read.
        AccelError: If the folder cannot be written, or the installation of accel is incomplete.
    """
    accel, requirements = select_accel(), list_requirements()
    write_archive(source, folder / "source.tar.gz")
    write_archive(accel, folder / "accel.tar.gz")
    try:
        shutil.copyfile(accel.source / _ENTRY, folder / "entry.py")
        # Arguments need not be text: JSON escapes lone surrogates and brings them back.
        text = json.dumps({**job_spec, "packages": requirements}, indent=1)
        (folder / "job.json").write_text(text, encoding="ascii")
        reason = fetch_wheels(folder / "wheels", requirements, python, architecture)
    except OSError as error:
        raise AccelError(f"Cannot write {folder}: {error.strerror or error}.") from None
    note = f"the packages that accel needs are not sent with the job ({reason}); its hosts install what the image lacks"
    return Bundle(folder, note if reason else "")


def list_requirements() -> list[str]:
    """Return the packages that accel needs besides torch and numpy, which an image has, as pip spells them."""
    texts = requires("accel-runtime") or []
    return [text for text in texts if "extra ==" not in text and not re.match(r"(torch|numpy)\b", text)]


def select_accel() -> Selection:
    """Return the files of the installation of accel that is running.

    Raises:
        AccelError: If files are missing.
    """
    root = Path(str(accel_cli.__file__)).resolve().parent.parent
    for part in (*_PACKAGES, _ENTRY):
        if not (root / part).exists():
            raise AccelError(f"File not found: {root / part}. Install accel again.")
    names = sorted(name for package in _PACKAGES for name in _list_package(root, package))
    return Selection(root, tuple(SelectedFile(name, (root / name).stat().st_size) for name in names))


def _list_package(root: Path, folder: str) -> Iterator[str]:
    for path in (root / folder).iterdir():
        name = f"{folder}/{path.name}"
        if path.name.startswith(".") or is_clutter(path):
            continue
        if path.is_dir():
            yield from _list_package(root, name)
        elif path.is_file():
            yield name


def write_archive(selection: Selection, path: Path) -> None:
    """Write files to a `.tar.gz`, each as it is at one moment.

    Raises:
        UsageError: If a file keeps changing, or cannot be read.
        AccelError: If the archive cannot be written.
    """
    try:
        with tarfile.open(
            path,
            "w:gz",
            compresslevel=6,
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
        ) as archive:
            for file in selection.files:
                # A new TarInfo has no owner and no time.
                member, data = tarfile.TarInfo(file.name), b""
                if file.link:
                    member.type, member.linkname = tarfile.SYMTYPE, file.link
                else:
                    data, is_executable = _read_file(selection.source, file.name)
                    member.size, member.mode = len(data), 0o755 if is_executable else 0o644
                archive.addfile(member, io.BytesIO(data))
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise AccelError(f"Cannot write {path}: {error.strerror or error}.") from None
        raise


def _read_file(folder: Path, name: str) -> tuple[bytes, bool]:
    """Return the content of a file, and whether it is executable.

    Raises:
        UsageError: If it keeps changing, or cannot be read.
    """
    for _ in range(2):
        try:
            # A file that became a pipe since it was selected must not block.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(folder / name, flags), "rb") as file:
                before = os.fstat(file.fileno())
                data = file.read() if stat.S_ISREG(before.st_mode) else None
                after = os.fstat(file.fileno())
        except OSError as error:
            raise UsageError(f"Cannot read {format_name(str(folder / name))}: {error.strerror}.") from None
        unchanged = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        if data is not None and unchanged and len(data) == before.st_size:
            return data, bool(before.st_mode & stat.S_IXUSR)
    raise UsageError(
        f"Cannot pack {format_name(name)} in {folder}: it keeps changing. Wait until it is written, or add it to "
        "launcher.exclude."
    )


def fetch_wheels(
    folder: Path,
    requirements: Sequence[str],
    python: str | None,
    architecture: str = "x86_64",
    *,
    cache: Path | None = None,
) -> str:
    """Put wheels of packages, and of those that they need, into a folder: from the user's cache, else by pip.

    Args:
        folder: The folder; it is created if there are wheels.
        requirements: The packages, as pip spells them.
        python: The Python version of the container, such as `3.12`; None fetches wheels for every version.
        architecture: The container's processors, `x86_64` or `aarch64`.
        cache: The folder of the cache; None takes that of the user.

    Returns:
        The reason if there are none, else an empty string. The container's own pip is then the fallback.
    """
    base = cache or platformdirs.user_cache_path("accel") / "wheels"
    reasons = []
    for each in [python] if python else _PYTHONS:
        key = hashlib.sha256("\n".join([*requirements, each, architecture]).encode()).hexdigest()[:16]
        reasons.append(_copy_or_download(folder, base / key, requirements, each, architecture))
    return reasons[-1] if all(reasons) else ""


def _copy_or_download(
    folder: Path, cached: Path, requirements: Sequence[str], python: str, architecture: str
) -> str:
    """Fetch the wheels for one Python version, and return the reason if that failed."""
    with suppress(OSError):  # a cache that cannot be read counts as empty
        shutil.copytree(cached, folder, dirs_exist_ok=True)
        return ""
    with tempfile.TemporaryDirectory() as scratch:
        if reason := _download_wheels(Path(scratch), requirements, python, architecture):
            return reason
        shutil.copytree(scratch, folder, dirs_exist_ok=True)
        with suppress(OSError):  # so does one that cannot be written
            _store(Path(scratch), cached)
    return ""


def _download_wheels(folder: Path, requirements: Sequence[str], python: str, architecture: str) -> str:
    """Run `pip download` with the user's own pip configuration, and return the reason if it failed."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_{architecture}")]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--retries", "1",
        "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms,
        "--dest", str(folder), *requirements,
    ]  # fmt: skip
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_PIP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"pip took longer than {_PIP_TIMEOUT_S} s"
    except OSError as error:
        return f"pip cannot be run: {error.strerror}"
    if result.returncode == 0:
        return ""
    # The last line only: lines before it may show addresses of private indexes, with logins.
    lines = result.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {result.returncode}"]
    return mask_secrets("", lines[-1].removeprefix("ERROR: "))


def _store(wheels: Path, cached: Path) -> None:
    """Put wheels into the cache in one step."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=cached.parent, prefix=".new-"))
    try:
        shutil.copytree(wheels, fresh, dirs_exist_ok=True)
        fresh.replace(cached)  # fails if another launch was faster
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
