"""Wheels of the few packages that accel itself imports on a host, so that a job needs no network for them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import platformdirs

from accel_cli.console import mask_secrets
from accel_cli.container.packages import NEEDED

__all__ = ["PYTHONS", "command", "fetch"]

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""What an image may have whose Python is not known."""
_TIMEOUT_S = 120
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
"""Older ones are meant by the first; AWS's images have a glibc of 2.31 or newer."""


def fetch(into: Path, python: str | None, *, machine: str = "x86_64", cache: Path | None = None) -> str:
    """Put the wheels that a container may lack into a folder: from this user's cache, else by pip.

    Args:
        into: The folder; it is made where there are any.
        python: The container's Python, as `3.12`; None fetches for each that it may be.
        machine: The container's processors, `x86_64` or `aarch64`.
        cache: Where they are kept for the next time; None is this user's cache folder.

    Returns:
        Why there are none, for a person; empty if there are. The container's own pip is the way then.
    """
    try:
        pins = [f"{name}=={version(name)}" for name in NEEDED.values()]
    except PackageNotFoundError as error:
        return _told(f"{error.name} is not installed here")
    base = cache or platformdirs.user_cache_path("accel") / "wheels"
    said = [_fetch(into, base, pins, one, machine) for one in ([python] if python else PYTHONS)]
    return _told(said[-1]) if all(said) else ""


def command(into: Path, pins: Sequence[str], python: str, machine: str) -> list[str]:
    """How pip is asked; where it looks is the person's own configuration."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_{machine}")]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "1"]
    which = ["--only-binary=:all:", "--no-deps", "--implementation", "cp", "--python-version", python]
    return [sys.executable, "-m", "pip", "download", *quiet, *which, *platforms, "--dest", str(into), *pins]


def _fetch(into: Path, base: Path, pins: Sequence[str], python: str, machine: str) -> str:
    """The wheels for one Python; why not, or nothing."""
    kept = base / hashlib.sha256("\n".join([*pins, python, machine]).encode()).hexdigest()[:16]
    with suppress(OSError):  # a cache that cannot be read is none
        shutil.copytree(kept, into, dirs_exist_ok=True)
        return ""
    with tempfile.TemporaryDirectory() as scratch:
        if said := _download(command(Path(scratch), pins, python, machine)):
            return said
        shutil.copytree(scratch, into, dirs_exist_ok=True)
        _keep(Path(scratch), kept)
    return ""


def _download(asked: Sequence[str]) -> str:
    """Run pip; why it failed, or nothing."""
    try:
        done = subprocess.run(
            asked, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"pip took longer than {_TIMEOUT_S} s"
    except OSError as error:
        return f"pip cannot be run: {error.strerror}"
    if not done.returncode:
        return ""
    # Only its last word: what it says before may show addresses of a person's own, with logins.
    said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
    return mask_secrets("", said[-1].removeprefix("ERROR: "))


def _keep(scratch: Path, kept: Path) -> None:
    """Put the wheels into the cache, all at once; a cache that cannot be written is none."""
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=kept.parent, prefix=".new-"))
        try:
            shutil.copytree(scratch, fresh, dirs_exist_ok=True)
            fresh.replace(kept)  # another launch may have been there first
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _told(why: str) -> str:
    return f"{', '.join(NEEDED.values())} are not sent with the job ({why}); its hosts fetch those that their image lacks"
