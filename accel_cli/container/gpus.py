"""The GPUs of a host, without asking torch: how many there are, and whose CUDA driver library is newer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["COMPAT", "compatible", "count", "needs_compat"]

COMPAT = Path("/usr/local/cuda/compat")
"""Where an image keeps a driver library of its own, for hosts whose driver is older than its CUDA."""
_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICE = re.compile(r"nvidia\d+")
_MODULE = re.compile(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)")
_LIBRARY = re.compile(r"libcuda\.so\.(\d+(?:\.\d+)+)")


def count(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """How many GPUs the processes of this host see."""
    there = sum(1 for entry in devices.iterdir() if _DEVICE.fullmatch(entry.name))
    said = environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return there
    # CUDA reads up to the first number that is no device.
    names = [name.strip() for name in said.split(",")]
    seen = next((place for place, name in enumerate(names) if name in {"", "-1"}), len(names))
    return min(there, seen)


def needs_compat(driver: str, libraries: Iterable[str]) -> bool:
    """Whether the driver is older than the image's own driver library.

    Args:
        driver: What `/proc/driver/nvidia/version` says.
        libraries: The files of the image's folder.
    """
    running = _MODULE.search(driver)
    brought = [_numbers(found[1]) for name in libraries if (found := _LIBRARY.fullmatch(name))]
    return bool(running and brought and _numbers(running[1]) < max(brought))


def compatible(environ: Mapping[str, str], folder: Path = COMPAT, driver: Path = _DRIVER) -> dict[str, str]:
    """The variable that lets CUDA find the image's own driver library, where the host's is older."""
    try:
        older = needs_compat(driver.read_text(encoding="utf-8"), [entry.name for entry in folder.iterdir()])
    except OSError:
        return {}
    path = environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{folder}:{path}" if path else str(folder)} if older else {}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
