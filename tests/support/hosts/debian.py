"""Install Debian packages that tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence


class UnavailableError(RuntimeError):
    """This machine does not have a program that a test needs, and cannot install it."""


def install(packages: Sequence[str], programs: Sequence[str]) -> None:
    """Install packages with apt-get, unless all programs are installed.

    Raises:
        UnavailableError: The packages cannot be installed.
    """
    if all(map(shutil.which, programs)):
        return
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise UnavailableError(
            f"{' and '.join(programs)} are not installed, and apt-get as root is needed for that"
        )
    quiet = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, "capture_output": True, "text": True}
    subprocess.run(["apt-get", "update", "-q"], check=False, **quiet)
    options = ["-o", "DPkg::Lock::Timeout=120", "-y", "-q", "--no-install-recommends"]
    process = subprocess.run(["apt-get", "install", *options, *packages], check=False, **quiet)
    if not all(map(shutil.which, programs)):
        raise UnavailableError(f"apt-get cannot install {' '.join(packages)}: {process.stderr[-500:]}")
