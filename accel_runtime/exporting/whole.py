"""A file that appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel_runtime.checkpoint.files import Disk

__all__ = ["whole"]


@contextmanager
def whole(path: Path, disk: Disk | None = None) -> Iterator[Path]:
    """Gives the name to write under; at the end the file gets its own name, and both it and the name are on the disk.

    Args:
        path: The file's own name. What is there stays there until the new one is whole.
        disk: Does it.

    Raises:
        OSError: It cannot be written.
    """
    disk = disk or Disk()
    path = path.resolve()
    scratch = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        # What writes may leave a file that only its owner can read: it is to have the rights of any other.
        scratch.touch()
        mode = scratch.stat().st_mode
        yield scratch
        scratch.chmod(mode)
        opened = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
        try:
            disk.sync(opened)
        finally:
            disk.close(opened)
        disk.rename(scratch, path)
        disk.sync_directory(path.parent)
    finally:
        scratch.unlink(missing_ok=True)
