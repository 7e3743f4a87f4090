"""The formats of this package in the table of formats. Imports no torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from accel_runtime.extensions.foreign_checkpoints.folders import (
    is_accelerate_checkpoint,
    is_dcp_folder,
    is_deepspeed_checkpoint,
)
from accel_runtime.storage.errors import RequestError
from accel_runtime.storage.formats import Format
from accel_runtime.storage.manifest import Checkpoint
from accel_runtime.storage.store import Snapshot

__all__ = ["ACCELERATE", "DCP", "DEEPSPEED"]


def _restore(*arguments: Any, strict: bool) -> Checkpoint:
    from accel_runtime.extensions.foreign_checkpoints.accelerate_format import (  # noqa: PLC0415 - imports torch
        restore_accelerate_checkpoint,
    )

    return restore_accelerate_checkpoint(*arguments, strict=strict)


def _open_deepspeed(folder: Path) -> Snapshot:
    from accel_runtime.extensions.foreign_checkpoints.deepspeed_manifest import (  # noqa: PLC0415 - imports torch
        open_deepspeed_checkpoint,
    )

    return open_deepspeed_checkpoint(folder)


def _open_dcp(folder: Path) -> Snapshot:
    from accel_runtime.extensions.foreign_checkpoints.dcp_manifest import (  # noqa: PLC0415 - imports torch
        open_dcp_checkpoint,
    )

    return open_dcp_checkpoint(folder)[0]


def _explain_dcp(folder: Path) -> str:
    return f"{folder} was written by torch.distributed.checkpoint. Import it with `accel checkpoint import {folder} -o DIR`, and use DIR."


def _explain_written_by(title: str, folder: Path) -> str:
    return f"{folder} was written by {title}, without checksums: accelerator.load_state() loads it"


def _refuse_to_open(folder: Path) -> Snapshot:
    raise RequestError(ACCELERATE.explain(folder))


DEEPSPEED = Format(
    "DeepSpeed",
    is_deepspeed_checkpoint,
    partial(_explain_written_by, "DeepSpeed"),
    _open_deepspeed,
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
    _explain_dcp,
    _open_dcp,
)
