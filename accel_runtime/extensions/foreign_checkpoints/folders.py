"""Recognise the folders of other programs by the names of their files, and select what is in them. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import NAME

__all__ = [
    "METADATA",
    "MODEL_STATES",
    "DcpSelection",
    "find_engine_folders",
    "is_accelerate_checkpoint",
    "is_dcp_folder",
    "is_deepspeed_checkpoint",
]

METADATA = ".metadata"
MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_ENGINE = re.compile(r"pytorch_model(?:_(\d+))?")
"""Folders of DeepSpeed in a checkpoint of Accelerate."""
_LATEST = ("latest", "latest_universal")
"""Files that contain the name of the newest folder."""

_ACCELERATE = re.compile(
    r"random_states_\d+\.pkl|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt|custom_checkpoint_\d+\.pkl"
    r"|pytorch_model_fsdp.*"
)
"""File names that only Accelerate's `save_state` writes; weights alone may have another origin."""


@dataclass(frozen=True)
class DcpSelection:
    """Models and optimizers to read, by the keys that lead to them, separated by dots; empty ones are found."""

    models: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()


def is_deepspeed_checkpoint(folder: Path) -> bool:
    """Return whether a directory is a checkpoint of DeepSpeed: that of an engine, or one that contains such."""
    try:
        return NAME not in FileSystem().list_names(folder) and bool(_list_engines(folder))
    except (OSError, CheckpointError):
        return False


def find_engine_folders(folder: Path) -> list[Path]:
    """Return the folders of the engines that saved a checkpoint, in the order of their models.

    Raises:
        CheckpointError: There is none, or it is not known which is meant.
    """
    found = _list_engines(folder)
    if not found:
        raise CheckpointError(f"{folder} is not a checkpoint of DeepSpeed: it has no file *_model_states.pt")
    return found


def _list_engines(folder: Path) -> list[Path]:
    names = sorted(FileSystem().list_names(folder))
    if any(map(MODEL_STATES.fullmatch, names)):
        return [folder]
    numbered = {int(match[1] or 0): name for name in names if (match := _ENGINE.fullmatch(name))}
    if of_accelerate := [folder / numbered[number] for number in sorted(numbered)]:
        return of_accelerate if all(map(_has_states, of_accelerate)) else []
    for latest in _LATEST:
        if latest in names:
            tag = (folder / latest).read_text(errors="replace").strip()
            if _has_states(folder / tag):
                return [folder / tag]
            raise CheckpointError(
                f"{folder / latest} names {tag!r}, which has no file *_model_states.pt. Give the folder to load."
            )
    return []


def _has_states(folder: Path) -> bool:
    return folder.is_dir() and any(map(MODEL_STATES.fullmatch, FileSystem().list_names(folder)))


def is_dcp_folder(folder: Path) -> bool:
    """Return whether a directory has the metadata of DCP."""
    return (folder / METADATA).is_file()


def is_accelerate_checkpoint(folder: Path) -> bool:
    """Return whether a directory is a checkpoint of Accelerate."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:
        return False
    return NAME not in names and any(map(_ACCELERATE.fullmatch, names))
