"""The formats of this package in the table of formats. Imports no torch."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from accel_runtime.extensions.foreign_checkpoints.dcp_folder import explain_dcp_folder, is_dcp_folder
from accel_runtime.extensions.foreign_checkpoints.dcp_manifest import open_dcp_checkpoint
from accel_runtime.extensions.foreign_checkpoints.deepspeed_folder import is_deepspeed_checkpoint
from accel_runtime.extensions.foreign_checkpoints.deepspeed_manifest import open_deepspeed_checkpoint
from accel_runtime.storage.errors import RequestError
from accel_runtime.storage.formats import Format
from accel_runtime.storage.manifest import NAME, Checkpoint
from accel_runtime.storage.store import Snapshot

__all__ = ["ACCELERATE", "DCP", "DEEPSPEED", "is_accelerate_checkpoint"]

_ACCELERATE = re.compile(
    r"random_states_\d+\.pkl|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt|custom_checkpoint_\d+\.pkl"
    r"|pytorch_model_fsdp.*"
)
"""File names that only Accelerate's `save_state` writes; weights alone may have another origin."""


def is_accelerate_checkpoint(folder: Path) -> bool:
    """Return whether a directory is a checkpoint of Accelerate."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:
        return False
    return NAME not in names and any(map(_ACCELERATE.fullmatch, names))


def _restore(*arguments: Any, strict: bool) -> Checkpoint:
    from accel_runtime.extensions.foreign_checkpoints.accelerate_format import (  # noqa: PLC0415 - imports torch
        restore_accelerate_checkpoint,
    )

    return restore_accelerate_checkpoint(*arguments, strict=strict)


def _explain_written_by(title: str, folder: Path) -> str:
    return f"{folder} was written by {title}, without checksums: accelerator.load_state() loads it"


def _refuse_to_open(folder: Path) -> Snapshot:
    raise RequestError(ACCELERATE.explain(folder))


DEEPSPEED = Format(
    "DeepSpeed",
    is_deepspeed_checkpoint,
    partial(_explain_written_by, "DeepSpeed"),
    open_deepspeed_checkpoint,
    _restore,
)
ACCELERATE = Format(
    "Accelerate",
    is_accelerate_checkpoint,
    partial(_explain_written_by, "Accelerate"),
    _refuse_to_open,
    _restore,
)
DCP = Format(
    "torch.distributed.checkpoint",
    is_dcp_folder,
    explain_dcp_folder,
    lambda folder: open_dcp_checkpoint(folder)[0],
)
