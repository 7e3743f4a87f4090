"""Weights and optimizer states of sharded models in files of their own, under the names of Accelerate's `utils.fsdp_utils`.

The files are those of accel: safetensors for weights, and torch's format without code for optimizers. They load on any number
of processes, and without processes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from accel_runtime.checkpoint import folder
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.manifest import NAME
from accel_runtime.checkpoint.shell.merging import Wish, merge
from accel_runtime.exporting.exported import files_of, shards
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.state import PartialState

if TYPE_CHECKING:
    from accel_runtime.accelerator import Accelerator

__all__ = [
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]

Folder: TypeAlias = "str | os.PathLike[str]"

_MODEL = "pytorch_model_fsdp_"


def save_fsdp_model(  # noqa: PLR0913, PLR0917 - the signature scripts know
    fsdp_plugin: Any,  # noqa: ARG001 - its kind of state dict does not change the files
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a sharded model's weights into `output_dir/pytorch_model_fsdp_N`, as `Accelerator.save_model` does.

    All ranks make the call.

    Args:
        fsdp_plugin: Not needed: the files are the same for each kind of state dict.
        accelerator: The one that prepared the model.
        model: The prepared model.
        output_dir: Where the directory of the model is made.
        model_index: N.
        adapter_only: False only.
        use_dcp: True only; the files are those of `save_model`, not of `torch.distributed.checkpoint`.

    Raises:
        ValueError: `adapter_only=True` or `use_dcp=False`.
        CheckpointError: As `Accelerator.save_model`.
    """
    _refuse_options("save_fsdp_model", adapter_only=adapter_only, use_dcp=use_dcp)
    accelerator.save_model(model, _model_folder(output_dir, model_index))


def load_fsdp_model(  # noqa: PLR0913, PLR0917 - the signature scripts know
    fsdp_plugin: Any,  # noqa: ARG001
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_model` wrote into a prepared model, on any number of ranks; arguments are the same.

    Raises:
        ValueError: As `save_fsdp_model`.
        CheckpointError: There are no such weights, they are damaged, or do not fit the model.
    """
    _refuse_options("load_fsdp_model", adapter_only=adapter_only, use_dcp=use_dcp)
    accelerator.load_model(model, _model_folder(input_dir, model_index))


def save_fsdp_optimizer(  # noqa: PLR0913, PLR0917 - the signature scripts know
    fsdp_plugin: Any,  # noqa: ARG001
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: Folder,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the full state of a sharded model's optimizer into `output_dir/optimizer.bin`; all ranks make the call.

    Args:
        fsdp_plugin: Not needed.
        accelerator: The one that prepared both.
        optimizer: The prepared optimizer.
        model: The prepared model.
        output_dir: Where the file is made.
        optimizer_index: N of `optimizer_N.bin`; 0 is `optimizer.bin`.
        use_dcp: True only.

    Raises:
        ValueError: `use_dcp=False`.
    """
    _refuse_options("save_fsdp_optimizer", use_dcp=use_dcp)
    state = get_optimizer_state_dict(accelerator.unwrap_model(model), _inner(optimizer), options=_full())
    path = _optimizer_file(output_dir, optimizer_index)
    if accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
    accelerator.save(state, path)
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(  # noqa: PLR0913, PLR0917 - the signature scripts know
    fsdp_plugin: Any,  # noqa: ARG001
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: Folder,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_optimizer` wrote into a prepared optimizer, on any number of ranks; arguments are the same.

    Raises:
        ValueError: `adapter_only=True` or `use_dcp=False`.
        CheckpointError: The file is not there or damaged, or needs code to be read.
    """
    _refuse_options("load_fsdp_optimizer", adapter_only=adapter_only, use_dcp=use_dcp)
    state = accelerator.load(_optimizer_file(input_dir, optimizer_index))
    set_optimizer_state_dict(
        accelerator.unwrap_model(model), _inner(optimizer), optim_state_dict=state, options=_full()
    )


def merge_fsdp_weights(
    checkpoint_dir: Folder,
    output_path: Folder,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the full weights of a sharded model into `output_path/model.safetensors`.

    The first rank writes, the others wait.

    Args:
        checkpoint_dir: A directory of `Accelerator.save_state` or `save_fsdp_model`; its `pytorch_model_fsdp_N` is the
            model number N of a directory of `save_state`.
        output_path: The directory of the file; it is made if need be.
        safe_serialization: True only.
        remove_checkpoint_dir: Remove the checkpoint when the file is written.

    Raises:
        ValueError: `safe_serialization=False`.
        CheckpointError: There is no such checkpoint, or it is damaged, or one of `torch.distributed.checkpoint`.
    """
    if not safe_serialization:
        raise ValueError(
            "merge_fsdp_weights writes safetensors only, which run no code when they are read. Leave safe_serialization out."
        )
    state = PartialState()
    try:
        if state.is_main_process:
            source = _merge(Path(checkpoint_dir), Path(output_path))
            if remove_checkpoint_dir:
                shutil.rmtree(source)
    finally:
        state.wait_for_everyone()


def _merge(source: Path, output: Path) -> Path:
    """Write the weights; return the directory that they were read from."""
    if (source / ".metadata").exists():
        raise CheckpointError(
            f"{source} cannot be merged: torch.distributed.checkpoint wrote it, and reading its metadata runs code in it. "
            "Run Accelerate's own `accelerate merge-weights` on a directory whose writer you know."
        )
    if source.is_dir() and not (source / NAME).exists():
        first, indexed = files_of(source)
        output.mkdir(parents=True, exist_ok=True)
        for file in [*(shards(first) if indexed else []), first]:
            shutil.copyfile(file, output / file.name)
        return source
    index = source.name.removeprefix(_MODEL)
    number, checkpoint = (int(index), source.parent) if index.isdigit() else (0, source)
    item = f"model_{number}" if number else "model"
    found = folder.find(checkpoint)
    output.mkdir(parents=True, exist_ok=True)
    merge(found, output / "model.safetensors", Wish(item=item))
    return checkpoint


def _model_folder(directory: Folder, index: int) -> Path:
    return Path(directory) / f"{_MODEL}{index}"


def _optimizer_file(directory: Folder, index: int) -> Path:
    return Path(directory) / (f"optimizer_{index}.bin" if index else "optimizer.bin")


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _full() -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, cpu_offload=True)


def _refuse_options(function: str, *, use_dcp: bool, adapter_only: bool = False) -> None:
    if adapter_only:
        raise ValueError(
            f"{function} cannot take adapter_only=True: it handles all weights of the model. Write those of an adapter with "
            "accelerator.unwrap_model(model).save_pretrained(directory, state_dict=accelerator.get_state_dict(model))."
        )
    if not use_dcp:
        raise ValueError(
            f"{function} cannot take use_dcp=False: it writes no file for each rank. Leave use_dcp out."
        )
