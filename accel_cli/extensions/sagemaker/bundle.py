"""The bundle of a job, one folder: archives of the source and of accel, wheels, `entry.py` and `job.json`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs

import accel_cli
from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.source_files import SelectedFile, Selection, format_name, walk_files, write_archive
from accel_runtime.environment import installation
from accel_runtime.environment.text import encode_text

__all__ = [
    "build_bundle",
    "check_size",
    "fetch_wheels",
    "list_requirements",
    "select_accel",
]

_MB = 10**6
_PACKAGES = ("accel_cli", "accel_runtime")
_ENTRY = "accel_cli/extensions/sagemaker/entry.py"
_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Python versions to fetch wheels for, if that of the image is not known."""
_PIP_TIMEOUT_S = 120
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
"""Tags of wheels that run on AWS's images, whose glibc is 2.31 or newer; the first also means older ones."""


def build_bundle(
    job_spec: Mapping[str, Any],
    source: Selection,
    folder: Path,
    python: str | None,
    architecture: str = "x86_64",
) -> str:
    """Write the bundle of a job, and return the reason if wheels are missing, else an empty string.

    Args:
        job_spec: The content of `job.json`.
        source: The files of the source.
        folder: An empty folder.
        python: The Python version of the container, such as `3.12`; None if it is not known.
        architecture: The container's processors, `x86_64` or `aarch64`.
    """
    accel, requirements = select_accel(), list_requirements()
    write_archive(source, folder / "source.tar.gz")
    write_archive(accel, folder / "accel.tar.gz")
    try:
        shutil.copyfile(accel.source / _ENTRY, folder / "entry.py")
        # Arguments need not be text: JSON escapes lone surrogates and brings them back.
        text = json.dumps({**job_spec, "packages": requirements}, indent=1)
        (folder / "job.json").write_text(text, encoding="ascii")
        return fetch_wheels(folder / "wheels", requirements, python, architecture)
    except OSError as error:
        raise AccelError(f"Cannot write {folder}: {error.strerror or error}.") from None


def check_size(selection: Selection, limit_mb: int) -> None:
    """Raise UsageError, naming the largest files, if a selection is larger than a limit."""
    if selection.size <= limit_mb * _MB:
        return
    largest = ", ".join(
        f"{format_name(file.name)} ({console.format_size(file.size)})" for file in selection.largest
    )
    raise UsageError(
        f"The {len(selection.files)} files in {selection.source} have {console.format_size(selection.size)}: "
        f"launcher.max_upload_size is {limit_mb} MB. The largest are {largest}. Add files to launcher.exclude or .gitignore, "
        "pass data as an input channel (launcher.inputs), or raise launcher.max_upload_size."
    )


def list_requirements() -> list[str]:
    """Return the packages that a job needs besides torch and numpy, which an image has, as pip spells them."""
    return [
        text
        for text in installation.list_requirements()
        if not re.match(r"(torch|numpy|libcst|pathspec|detect-secrets)\b", text)
    ]


def select_accel() -> Selection:
    """Return the files of the installation of accel that is running."""
    root = Path(str(accel_cli.__file__)).resolve().parent.parent
    for part in (*_PACKAGES, _ENTRY):
        if not (root / part).exists():
            raise AccelError(f"File not found: {root / part}. Install accel again.")
    names = sorted(f"{package}/{name}" for package in _PACKAGES for name in walk_files(root / package))
    # Editors keep hidden files and broken links in the packages of an editable installation.
    names = [name for name in names if "/." not in name and (root / name).is_file()]
    return Selection(root, tuple(SelectedFile(name, (root / name).stat().st_size) for name in names))


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
    pythons, reasons = [python] if python else _PYTHONS, []
    for number, each in enumerate(pythons, 1):
        key = hashlib.sha256(encode_text("\n".join([*requirements, each, architecture]))).hexdigest()[:16]
        if not (base / key).is_dir():
            count = f", {number} of {len(pythons)} since that of the image is not known" if not python else ""
            console.note(f"downloading the packages of accel for Python {each} (about 8 MB, once{count})")
        reasons.append(_copy_or_download(folder, base / key, requirements, each, architecture))
    return reasons[-1] if all(reasons) else ""


def _copy_or_download(
    folder: Path, cached: Path, requirements: Sequence[str], python: str, architecture: str
) -> str:
    """Fetch the wheels for one Python version, and return the reason if that failed."""
    with suppress(OSError):  # a cache that cannot be read counts as empty
        shutil.copytree(cached, folder, dirs_exist_ok=True)
        return ""
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
    parent = cached.parent if cached.parent.is_dir() and os.access(cached.parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, prefix=".new-") as scratch:
        wheels = Path(scratch, "wheels")
        if reason := _download_wheels(wheels, requirements, python, architecture):
            return reason
        shutil.copytree(wheels, folder, dirs_exist_ok=True)
        with suppress(OSError):  # another launch was faster, or the cache cannot be written
            wheels.replace(cached)
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
    return console.mask_secrets("", lines[-1].removeprefix("ERROR: "))
