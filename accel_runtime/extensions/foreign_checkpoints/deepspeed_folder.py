"""Read checkpoints that DeepSpeed wrote, of any ZeRO stage and world size, as those of accel are read.

DeepSpeed saves one state of the model for all ranks, or for each in stage 3, and for each rank its part of the float32 weights
and of the optimizer state, as flat tensors without names (deepspeed/utils/zero_to_fp32.py, 0.19.8). Their layout follows from
`param_shapes`: in stages 1 and 2 the parameters of a group stand one after another, and are cut into equal parts; in stage 3
each parameter is cut into equal parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_runtime.extensions.foreign_checkpoints.folders import MODEL_STATES
from accel_runtime.extensions.foreign_checkpoints.torch_file import Unknown, is_plain_tensor, read_torch_file
from accel_runtime.storage.errors import CheckpointError, format_names
from accel_runtime.storage.file_system import FileSystem

__all__ = ["SavedEngine", "TensorParts", "read_engine"]

_OPTIMIZER_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PIPELINE = re.compile(r"layer_\d+-model.*_states\.pt")
_EXPERTS = re.compile(r".*exp(?:ert)?_\w+_states\.pt|expp_rank_.*_states\.pt")
_SHARDED_STAGE = 3
"""The stage in which each parameter is cut."""
_UNIVERSAL = "zero"
"""Folder of a universal checkpoint with a folder for each parameter."""
CONVERT = "Convert it with `python -m deepspeed.checkpoint.ds_to_universal`, with the options that its model needs, and load the result"


@dataclass(frozen=True)
class SavedEngine:
    """State of one engine: a model and its optimizer."""

    model_file: str
    common: Mapping[str, Any]
    """State of the model on the first rank."""
    weights: Mapping[str, Any]
    """Parameters and buffers by name, as ranges of a tensor with its shape; other values as they are."""
    ties: Mapping[str, str]
    """Names of tied parameters, with the name that has the values."""
    frozen: frozenset[str]
    """Parameters without optimizer state."""
    optimizer: Any
    """State of the optimizer with ranges; None without one."""
    scaler: Any
    world_size: int

    @property
    def precision(self) -> str:
        """Name of the dtype of weights beside their float32 copies; empty without mixed precision."""
        config = self.common.get("ds_config") or {}
        sections = {"bf16": "bfloat16", "fp16": "float16"}
        return next(
            (dtype for name, dtype in sections.items() if (config.get(name) or {}).get("enabled") is True), ""
        )

    @property
    def steps(self) -> int:
        """Number of steps of the optimizer."""
        return max(0, int(self.common.get("global_steps", 0)) - int(self.common.get("skipped_steps", 0)))


@dataclass(frozen=True)
class TensorParts:
    """A tensor in parts, one after another."""

    shape: tuple[int, ...]
    parts: tuple[torch.Tensor, ...]

    @property
    def key(self) -> Hashable:
        """A value that is equal for tensors of the same bytes."""
        return self.shape, *((part.data_ptr(), part.dtype, part.stride()) for part in self.parts)


def read_engine(folder: Path) -> SavedEngine:
    """Read what the files of an engine contain, except the values of tensors."""
    names = sorted(FileSystem().list_names(folder))
    model_files = _list_ranks(folder, names, MODEL_STATES)
    optimizer_files = _list_ranks(folder, names, _OPTIMIZER_STATES)
    _refuse_other_engines(folder, names)
    states = [read_torch_file(folder / name) for name in model_files]
    common = states[0]
    if not isinstance(common, dict) or not isinstance(common.get("module"), dict):
        raise CheckpointError(f"{folder / model_files[0]} is not a state of a model of DeepSpeed")
    if "ds_autoep_layers" in common or "autoep_layers" in common:
        raise CheckpointError(f"{folder} has layers of AutoEP, which are not supported. {CONVERT}.")
    shards: Sequence[_RankState] = []
    optimizer: Any = None
    weights: dict[str, Any] = {}
    if (folder / _UNIVERSAL).is_dir():
        universal = _read_universal(folder / _UNIVERSAL, common)
        weights |= universal.weights
        optimizer, scaler = universal.optimizer, universal.scaler
    elif optimizer_files:
        shards = _read_shards(folder, optimizer_files)
        groups = _read_groups(shards, common["param_shapes"], folder)
        weights |= {name: each.weight for group in groups for name, each in group.items()}
        optimizer = _build_optimizer(
            shards[0].group_options, shards[0].find_groups(len(groups)), groups, shards[0].moments
        )
        scaler = shards[0].scaler
    else:
        optimizer, scaler = common.get("optimizer"), None
        if isinstance(optimizer, dict) and "param_groups" not in optimizer:
            # In stage 0 with 16 bits, float32 weights and moments have no names. The weights of the model remain.
            optimizer = None
    trained = frozenset(weights)
    weights |= _read_frozen(states, trained, model_files)
    shared = common.get("shared_params") or {}
    ties = {**_find_shared(weights), **{alias: name for alias, name in shared.items() if name in weights}}
    ordered = [*(name for name in common["module"] if name in weights), *weights]
    ordered_weights = {name: weights[name] for name in dict.fromkeys(ordered) if name not in ties}
    frozen = frozenset(ordered_weights) - trained
    world_size = len(shards) or int(common.get("dp_world_size", 1))
    return SavedEngine(
        model_files[0], common, ordered_weights, ties, frozen, optimizer, _read_scaler(scaler), world_size
    )


def _find_shared(weights: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the names of weights that are the same bytes as an earlier one, as tied ones are in stage 0."""
    first: dict[Any, str] = {}
    ties = {}
    for name, parts in weights.items():
        if isinstance(parts, TensorParts) and parts.parts and 0 not in parts.shape:
            known = first.setdefault(parts.key, name)
            if known != name:
                ties[name] = known
    return ties


def _list_ranks(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
    """Return the files of a kind in the order of their ranks; raise if one is missing, or of a model-parallel rank."""
    matches = {name: match for name in names if (match := pattern.fullmatch(name))}
    if any(int(match[2]) for match in matches.values()):
        count = 1 + max(int(match[2]) for match in matches.values())
        raise CheckpointError(
            f"{folder} was written by {count} model-parallel ranks, whose parts of a parameter are not described in it. {CONVERT}."
        )
    by_rank = {int(match[1] or 0): name for name, match in matches.items()}
    if len(by_rank) != len(matches):
        raise CheckpointError(f"{folder} has several files of one rank: {format_names(sorted(matches))}")
    for rank in range(max(by_rank, default=-1)):
        if rank not in by_rank:
            last = by_rank[max(by_rank)]
            raise CheckpointError(f"{folder} has {last}, and no such file of rank {rank}: it is incomplete")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _refuse_other_engines(folder: Path, names: Sequence[str]) -> None:
    for pattern, feature in ((_PIPELINE, "its pipeline engine"), (_EXPERTS, "a mixture of experts")):
        if any(map(pattern.fullmatch, names)):
            raise CheckpointError(
                f"{folder} was written by DeepSpeed with {feature}, which is not supported. Export the weights with DeepSpeed."
            )


def _read_frozen(
    states: Sequence[Mapping[str, Any]], trained: frozenset[str], files: Sequence[str]
) -> Mapping[str, Any]:
    """Return the entries of the state of the model that the optimizer lacks: frozen parameters, buffers, other values."""
    common = states[0]
    is_sharded = files[0].startswith("zero_pp_rank_")
    shapes = common.get("frozen_param_shapes") or {}
    found: dict[str, Any] = {}
    for name, value in common["module"].items():
        if name in trained:
            continue
        if is_sharded and name in shapes:
            fragments = [state["frozen_param_fragments"][name] for state in states]
            found[name] = _join_shards(fragments, tuple(shapes[name]), files[0], name)
        elif is_plain_tensor(value):
            found[name] = TensorParts(tuple(value.shape), (value,))
        else:
            found[name] = value
    return found


def _join_shards(
    fragments: Sequence[torch.Tensor], shape: tuple[int, ...], file: str, name: str
) -> TensorParts:
    """Return a tensor that is cut into equal parts, of which the last ones are filled up."""
    remaining, parts = math.prod(shape), []
    for fragment in fragments:
        if not fragment.is_contiguous():
            raise CheckpointError(
                f"{file} or that of another rank has {name} in another order of its elements"
            )
        parts.append(fragment.view(-1)[:remaining])
        remaining -= parts[-1].numel()
    if remaining:
        raise CheckpointError(f"{file} and those of the other ranks lack elements of {name}")
    return TensorParts(shape, tuple(parts))


# The parts of the ranks ------------------------------------------------------------------


@dataclass(frozen=True)
class _RankState:
    """Part of an optimizer that one rank saved."""

    file: Path
    stage: int
    weights: Sequence[torch.Tensor]
    """float32 weights, by group, or by sub-group in stage 3."""
    paddings: Sequence[int]
    """Elements at the end of each part that are not in the file."""
    moments: Sequence[Mapping[str, Any]]
    """Optimizer state by the same number; empty before the first step."""
    group_options: Sequence[Mapping[str, Any]]
    """Options of the groups of parameters."""
    gaps: Sequence[Sequence[int]] | None
    """Elements after each parameter of a group that belong to none."""
    fragments: Sequence[Mapping[str, Unknown]] | None
    """Location of each parameter in the parts, as DeepSpeed has it."""
    partition_count: int
    scaler: Any

    def find_groups(self, count: int) -> list[int]:
        """Return the group of parameters of each part."""
        if self.stage < _SHARDED_STAGE or not self.group_options:
            return list(range(count))
        groups = {
            part: index for index, options in enumerate(self.group_options) for part in options["params"]
        }
        return [groups[part] for part in range(count)]


def _read_shards(folder: Path, files: Sequence[str]) -> list[_RankState]:
    shards = [_read_shard(folder / name) for name in files]
    counts = {shard.partition_count for shard in shards}
    if counts != {len(files)}:
        raise CheckpointError(
            f"{folder} has optimizer states of {len(files)} ranks, and was written in {max(counts)} parts. Files are missing, or "
            "of another save."
        )
    return shards


def _read_shard(path: Path) -> _RankState:
    content = read_torch_file(path)
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not an optimizer state of DeepSpeed")
    if state.get("ds_zero_partition_groups"):
        raise CheckpointError(
            f"{path} has groups of processes of AutoEP, which are not supported. {CONVERT}."
        )
    stage = int(state.get("zero_stage", 1))
    weights: Any = state.get(
        "fp32_flat_groups" if stage == _SHARDED_STAGE else "single_partition_of_fp32_groups"
    )
    base: Any = state.get("optimizer_state_dict" if stage == _SHARDED_STAGE else "base_optimizer_state")
    if weights is None:
        raise CheckpointError(
            f"{path} has no float32 weights: it was written by another version of DeepSpeed"
        )
    # With `elastic_checkpoint`, the state alone, by group.
    moments = base if isinstance(base, list) else [base["state"].get(i, {}) for i in range(len(weights))]
    if isinstance(base, list) and "base_optimizer_state_step" in state:
        moments = [{**moment, "step": state["base_optimizer_state_step"]} for moment in moments]
    counts = state.get("partition_count", 1)
    return _RankState(
        file=path,
        stage=stage,
        weights=weights,
        paddings=state.get("group_paddings") or [0] * len(weights),
        moments=moments,
        group_options=() if isinstance(base, list) else base["param_groups"],
        gaps=state.get("param_alignment_paddings"),
        fragments=state.get("param_slice_mappings"),
        partition_count=max(counts) if isinstance(counts, list) else int(counts),
        scaler=state.get("loss_scaler"),
    )


@dataclass(frozen=True)
class _ParameterState:
    """A parameter that the optimizer changes."""

    weight: TensorParts
    moments: Mapping[str, TensorParts]
    """Optimizer state of the same shape."""


def _read_groups(
    shards: Sequence[_RankState], shapes: Sequence[Mapping[str, Sequence[int]]], folder: Path
) -> list[Mapping[str, _ParameterState]]:
    """Return the parameters of each part by name."""
    if not shapes or len(shapes) != len(shards[0].weights):
        raise CheckpointError(
            f"{folder} has float32 weights in {len(shards[0].weights)} groups, and names of {len(shapes or ())}"
        )
    groups: list[Mapping[str, _ParameterState]] = []
    for part, named in enumerate(shapes):
        sizes = {name: tuple(map(int, shape)) for name, shape in named.items()}
        locate = _locate_sharded if shards[0].stage == _SHARDED_STAGE else _locate_flat
        places = locate(shards, part, sizes)
        keys = _list_moments(shards, part)
        groups.append(
            {
                name: _ParameterState(
                    _take(shards, part, None, places[name], shape),
                    {key: _take(shards, part, key, places[name], shape) for key in keys},
                )
                for name, shape in sizes.items()
            }
        )
    return groups


_Place = tuple[int, int, int]
"""Rank, offset in its part, and number of elements."""


def _locate_sharded(
    shards: Sequence[_RankState], part: int, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, list[_Place]]:
    """Return the places of parameters of which each is cut into equal parts, as stage 3 does."""
    places, offset = {}, 0
    for name, shape in shapes.items():
        count, length = math.prod(shape), -(-math.prod(shape) // len(shards))
        places[name] = [
            (rank, offset, max(0, min(length, count - rank * length))) for rank in range(len(shards))
        ]
        offset += length
    for shard in shards:
        if shard.weights[part].numel() != offset:
            raise CheckpointError(
                f"{shard.file} has {shard.weights[part].numel()} weights in group {part}, and its parameters need {offset}. It is "
                "damaged, or its state was offloaded to files: save it without offload to nvme."
            )
    return places


def _locate_flat(
    shards: Sequence[_RankState], part: int, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, list[_Place]]:
    """Return the places of parameters that stand one after another and are cut into equal parts, as stages 1 and 2 do."""
    size = shards[0].weights[part].numel() + shards[0].paddings[part]
    gaps = shards[0].gaps[part] if shards[0].gaps else [0] * len(shapes)
    places: dict[str, list[_Place]] = {}
    offset = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end, places[name] = offset + math.prod(shape), []
        while offset < end:
            rank, inside = divmod(offset, size)
            if rank >= len(shards):
                raise CheckpointError(
                    f"{shards[0].file} and those of the other ranks lack elements of {name}"
                )
            length = min(end - offset, size - inside)
            places[name].append((rank, inside, length))
            offset += length
        offset += gap
    _compare_fragments(shards, part, places)
    return places


def _compare_fragments(shards: Sequence[_RankState], part: int, places: Mapping[str, list[_Place]]) -> None:
    """Raise `CheckpointError` if DeepSpeed's own list of locations says otherwise."""
    for number, shard in enumerate(shards):
        if shard.fragments is None:
            continue
        expected = {
            name: (address.fields["start"], address.fields["numel"])
            for name, address in shard.fragments[part].items()
        }
        found = {
            name: (start, length)
            for name, ranges in places.items()
            for rank, start, length in ranges
            if rank == number
        }
        if {name: each for name, each in expected.items() if each[1]} != found:
            raise CheckpointError(
                f"{shard.file} has its parameters at other places than their order says: it is damaged, or of another version of "
                "DeepSpeed"
            )


def _list_moments(shards: Sequence[_RankState], part: int) -> list[str]:
    """Return the names of optimizer state that has an element for each of a weight; raise if there is other state."""
    flat = {key: value for key, value in shards[0].moments[part].items() if _is_flat(value)}
    for key, value in flat.items():
        if not _is_moment(shards[0], part, value):
            raise CheckpointError(
                f"{shards[0].file} has {key} of {value.numel()} elements for {shards[0].weights[part].numel()} weights in group {part}: "
                "the state of this optimizer cannot be divided into parameters"
            )
    return list(flat)


def _is_moment(shard: _RankState, part: int, value: torch.Tensor) -> bool:
    count = shard.weights[part].numel()
    return len(value.shape) == 1 and value.numel() in {count, count + shard.paddings[part]}


def _take(
    shards: Sequence[_RankState], part: int, key: str | None, places: Sequence[_Place], shape: tuple[int, ...]
) -> TensorParts:
    parts = []
    for rank, start, length in places:
        shard = shards[rank]
        tensor = shard.weights[part] if key is None else shard.moments[part][key]
        if not tensor.is_contiguous():
            raise CheckpointError(
                f"{shard.file} has {key or 'the weights'} in group {part} in another order of their elements"
            )
        if start + length > tensor.numel():
            raise CheckpointError(
                f"{shard.file} has {tensor.numel()} elements of {key or 'the weights'} in group {part}, too few"
            )
        parts.append(tensor.view(-1)[start : start + length])
    return TensorParts(shape, tuple(parts))


def _build_optimizer(
    options: Sequence[Mapping[str, Any]],
    group_of: Sequence[int],
    parts: Sequence[Mapping[str, _ParameterState]],
    states: Sequence[Mapping[str, Any]],
) -> Any:
    """Return the state of an optimizer by the names of parameters; `group_of` has the group of each part."""
    groups: list[dict[str, Any]] = [
        {key: value for key, value in each.items() if key not in {"params", "step"}} | {"params": []}
        for each in (options or [{}] * len(parts))
    ]
    state: dict[str, dict[str, Any]] = {}
    for part, (index, named) in enumerate(zip(group_of, parts, strict=True)):
        groups[index]["params"] += list(named)
        shared = {key: value for key, value in states[part].items() if not _is_flat(value)}
        if "step" not in shared and options and "step" in options[index] and states[part]:
            shared["step"] = options[index]["step"]  # as DeepSpeed's FusedAdam has it
        for name, each in named.items():
            if own := {**shared, **each.moments}:
                state[name] = own
    return {"groups": groups, "state": state, "other": {}, "extra": {}}


def _is_flat(value: Any) -> bool:
    return is_plain_tensor(value) and value.dim() == 1


# Universal checkpoints -------------------------------------------------------------------


@dataclass(frozen=True)
class _Universal:
    weights: Mapping[str, Any]
    optimizer: Any
    scaler: Any


def _read_universal(folder: Path, common: Mapping[str, Any]) -> _Universal:
    """Return the parameters of a universal checkpoint, which has a folder for each."""
    path = folder / "optimizer_state.pt"
    state = read_torch_file(path) if path.is_file() else {}
    options = state.get("param_groups") or ()
    inner = state.get("optimizer_state_dict")
    states = inner["state"] if isinstance(inner, dict) else {}
    parts: list[Mapping[str, _ParameterState]] = []
    shared: list[Mapping[str, Any]] = []
    steps: dict[str, Any] = {}
    for index, shapes in enumerate(common["param_shapes"] or ()):
        found = {}
        for name, shape in shapes.items():
            files = {file.stem: file for file in sorted((folder / name).glob("*.pt"))}
            if "fp32" not in files:
                raise CheckpointError(f"{folder / name / 'fp32.pt'} is missing")
            values = {key: _unwrap(read_torch_file(file)) for key, file in files.items()}
            if "step" in values:
                steps[name] = values.pop("step")
            tensors = {
                key: TensorParts(tuple(map(int, shape)), (value,))
                for key, value in values.items()
                if is_plain_tensor(value) and value.numel() == math.prod(shape)
            }
            if "fp32" not in tensors:
                raise CheckpointError(f"{files['fp32']} is not a tensor of shape {list(shape)}")
            found[name] = _ParameterState(tensors.pop("fp32"), tensors)
        parts.append(found)
        shared.append({key: value for key, value in states.get(index, {}).items() if not _is_flat(value)})
    is_grouped = bool(options) and max((p for each in options for p in each["params"]), default=0) < len(
        parts
    )
    group_of = {part: index for index, each in enumerate(options) for part in each["params"]}
    optimizer = _build_optimizer(
        options, [group_of.get(i, i) if is_grouped else i for i in range(len(parts))], parts, shared
    )
    for name, step in steps.items():
        optimizer["state"].setdefault(name, {})["step"] = step
    weights = {name: each.weight for named in parts for name, each in named.items()}
    for file in sorted(folder.glob("*/fp32.pt")):
        name, value = file.parent.name, common["module"].get(file.parent.name)
        # Frozen parameters, which the state of a model in stage 3 has in shards.
        if name in (common.get("frozen_param_shapes") or {}) and is_plain_tensor(value) and not value.numel():
            tensor = _unwrap(read_torch_file(file))
            weights[name] = TensorParts(tuple(common["frozen_param_shapes"][name]), (tensor,))
    return _Universal(weights, optimizer, state.get("loss_scaler"))


def _unwrap(content: Any) -> Any:
    return content["param"] if isinstance(content, dict) and "param" in content else content


def _read_scaler(scaler: Any) -> Any:
    """Return the state of torch's GradScaler for the dynamic loss scaler of DeepSpeed; None for a constant scale."""
    if not isinstance(scaler, Unknown) or not scaler.fields.get("dynamic"):
        return None
    values = scaler.fields
    interval = int(values["scale_window"])
    return {
        "scale": float(values["cur_scale"]),
        "growth_factor": float(values["scale_factor"]),
        "backoff_factor": 1 / float(values["scale_factor"]),
        "growth_interval": interval,
        "_growth_tracker": (int(values["cur_iter"]) - int(values["last_overflow_iter"]) - 1) % interval,
    }
