"""Files of weights and optimizer states of sharded models, under the name of Accelerate's `utils.fsdp_utils`.

Weights are safetensors files, optimizer states files of torch without code. Both load on any number of processes, and outside
of a process group.
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

from accel_runtime.accelerator.state import PartialState
from accel_runtime.environment.locations import is_url, join_location, normalize_location
from accel_runtime.export.load_model import find_weight_file, list_shards
from accel_runtime.export.objects import refuse_url
from accel_runtime.storage.any_store import open_store
from accel_runtime.storage.formats import FORMATS, find_format
from accel_runtime.storage.manifest import NAME
from accel_runtime.storage.store import split_key
from accel_runtime.storage.tensor_file import MergeRequest, merge_tensors
from accel_runtime.training.optimizer import PreparedOptimizer

if TYPE_CHECKING:
    from accel_runtime.accelerator.accelerator import Accelerator

__all__ = [
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]

Folder: TypeAlias = "str | os.PathLike[str]"

_MODEL = "pytorch_model_fsdp_"
_FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_fsdp_model(  # noqa: PLR0913, PLR0917 - the signature scripts know
    fsdp_plugin: Any,  # noqa: ARG001 - the files are the same for each type of state dict
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of a sharded model into `output_dir/pytorch_model_fsdp_N` with `Accelerator.save_model`.

    All ranks must call it.

    Args:
        fsdp_plugin: Not used: the files are the same for each type of state dict.
        accelerator: The `Accelerator` that prepared the model.
        model: The prepared model.
        output_dir: The parent of the directory of the model.
        model_index: N.
        adapter_only: Must be False.
        use_dcp: Must be True; the files are those of `save_model`, not of `torch.distributed.checkpoint`.

    Raises:
        ValueError: If `adapter_only=True` or `use_dcp=False`.
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
    """Load weights of `save_fsdp_model` into a prepared model, on any number of ranks; the arguments are the same.

    Raises:
        ValueError: As `save_fsdp_model`.
        CheckpointError: If no weights are found, or they are damaged or do not match the model.
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
    """Write the full state of the optimizer of a sharded model into `output_dir/optimizer.bin`; all ranks must call it.

    Args:
        fsdp_plugin: Not used.
        accelerator: The `Accelerator` that prepared both.
        optimizer: The prepared optimizer.
        model: The prepared model.
        output_dir: The directory of the file.
        optimizer_index: N of `optimizer_N.bin`; 0 is `optimizer.bin`.
        use_dcp: Must be True.

    Raises:
        ValueError: If `use_dcp=False`.
    """
    _refuse_options("save_fsdp_optimizer", use_dcp=use_dcp)
    path = _optimizer_file(output_dir, optimizer_index)
    state = get_optimizer_state_dict(
        accelerator.unwrap_model(model), _unwrap_optimizer(optimizer), options=_FULL_STATE
    )
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
    """Load a state of `save_fsdp_optimizer` into a prepared optimizer, on any number of ranks; the arguments are the same.

    Raises:
        ValueError: If `adapter_only=True` or `use_dcp=False`.
        CheckpointError: If the file is missing or damaged, or needs code to be read.
    """
    _refuse_options("load_fsdp_optimizer", adapter_only=adapter_only, use_dcp=use_dcp)
    state = accelerator.load(_optimizer_file(input_dir, optimizer_index))
    set_optimizer_state_dict(
        accelerator.unwrap_model(model),
        _unwrap_optimizer(optimizer),
        optim_state_dict=state,
        options=_FULL_STATE,
    )


def merge_fsdp_weights(
    checkpoint_dir: Folder,
    output_path: Folder,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the full weights of a sharded model into `output_path/model.safetensors`.

    The main process writes, the others wait.

    Args:
        checkpoint_dir: A directory of `Accelerator.save_state` or `save_fsdp_model`, or one of `torch.distributed.checkpoint`;
            `pytorch_model_fsdp_N` in a directory of `save_state` means its model number N. The URL of a checkpoint is read too.
        output_path: The directory of the file, created if missing.
        safe_serialization: Must be True.
        remove_checkpoint_dir: Remove the checkpoint after the file is written.

    Raises:
        ValueError: If `safe_serialization=False`.
        CheckpointError: If no checkpoint is found, or it is damaged.
    """
    if not safe_serialization:
        raise ValueError(
            "merge_fsdp_weights cannot write pickles (safe_serialization=False): reading them runs code. Leave "
            "safe_serialization out."
        )
    state = PartialState()
    try:
        if state.is_main_process:
            refuse_url(output_path, "merge_fsdp_weights")
            # A path without a trailing slash, since its last name is the number of the model.
            source = (
                normalize_location(checkpoint_dir)
                if is_url(checkpoint_dir)
                else os.fspath(Path(checkpoint_dir))
            )
            checkpoint = _merge(source, Path(output_path))
            if remove_checkpoint_dir and is_url(checkpoint):
                open_store().delete(checkpoint)
            elif remove_checkpoint_dir:
                shutil.rmtree(checkpoint)
    finally:
        state.wait_for_everyone()


def _merge(location: str, output: Path) -> str:
    """Write the weights, and return the location of their checkpoint."""
    source = Path(location)
    if not is_url(location) and (other := find_format(source, loads=False)):
        with FORMATS[other].open(source) as snapshot:
            output.mkdir(parents=True, exist_ok=True)
            merge_tensors(snapshot, output / "model.safetensors", MergeRequest())
        return location
    if not is_url(location) and source.is_dir() and not (source / NAME).exists():
        weights, is_index = find_weight_file(source)
        first = source / weights.name
        output.mkdir(parents=True, exist_ok=True)
        for file in [*(list_shards(first) if is_index else []), first]:
            shutil.copyfile(file, output / file.name)
        return location
    checkpoint, item = _split_model(location)
    with open_store().open(checkpoint) as snapshot:
        output.mkdir(parents=True, exist_ok=True)
        merge_tensors(snapshot, output / "model.safetensors", MergeRequest(item=item))
    return checkpoint


def _split_model(location: str) -> tuple[str, str]:
    """Return the checkpoint and the item of `CHECKPOINT/pytorch_model_fsdp_N`, or of a checkpoint."""
    parent, name = split_key(location)
    index = name.removeprefix(_MODEL)
    if not index.isdigit():
        return location, "model"
    return parent, f"model_{index}" if int(index) else "model"


def _model_folder(directory: Folder, index: int) -> str:
    return join_location(directory, f"{_MODEL}{index}")


def _optimizer_file(directory: Folder, index: int) -> Path:
    refuse_url(directory, "An optimizer of its own")
    return Path(directory) / (f"optimizer_{index}.bin" if index else "optimizer.bin")


def _unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _refuse_options(function: str, *, use_dcp: bool, adapter_only: bool = False) -> None:
    if adapter_only:
        raise ValueError(
            f"{function} does not support adapter_only=True. Write the weights of an adapter with "
            "accelerator.unwrap_model(model).save_pretrained(directory, state_dict=accelerator.get_state_dict(model))."
        )
    if not use_dcp:
        raise ValueError(f"{function} does not support use_dcp=False (one file per rank). Leave use_dcp out.")
