"""The table of formats: checkpoints that other programs write as folders on disk. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_runtime.environment.registry import Registry
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import NAME, Checkpoint
from accel_runtime.storage.store import Snapshot

__all__ = ["FORMATS", "Format", "find_format"]


@dataclass(frozen=True)
class Format:
    """Checkpoints of another program."""

    title: str
    """Name of the program in messages."""
    recognize: Callable[[Path], bool]
    """Return whether a folder is such a checkpoint."""
    explain: Callable[[Path], str]
    """Return why a folder is not a checkpoint of accel, with the cure."""
    open: Callable[[Path], Snapshot]
    """Open a folder for reading, with a manifest of its files; raise `CheckpointError` if it cannot be read so."""
    restore: Callable[..., Checkpoint] | None = None
    """Restore a run for `load_state`, on all ranks: `restore(folder, training_state, items, all_gather, strict=...)`. None if a folder
    must be imported first."""


FORMATS: Registry[Format] = Registry(
    {
        "deepspeed": "accel_runtime.extensions.foreign_checkpoints.formats:DEEPSPEED",
        "accelerate": "accel_runtime.extensions.foreign_checkpoints.formats:ACCELERATE",
        "dcp": "accel_runtime.extensions.foreign_checkpoints.formats:DCP",
    },
    group="accel.formats",
    error=CheckpointError,
)
"""The formats by name, in the order in which they are tried."""


def find_format(folder: Path, *, loads: bool) -> str:
    """Return the name of the format of a folder, among those that `load_state` loads or the others; empty if there is none."""
    with suppress(OSError):
        if folder.is_dir() and not (folder / NAME).is_file():
            for name in FORMATS:
                if (FORMATS[name].restore is not None) == loads and FORMATS[name].recognize(folder):
                    return name
    return ""
