"""Load checkpoints that Accelerate or DeepSpeed wrote: everything is read and checked before anything changes."""

from __future__ import annotations

import logging
import os
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel_runtime.backends.rng import (
    NumPyState,
    ProcessRandomStates,
    PythonState,
    RandomStates,
    derive_random_states,
)
from accel_runtime.checkpoint.serialization import serialize
from accel_runtime.checkpoint.state_items import ModelItem, StateItem
from accel_runtime.checkpoint.training_state import (
    AccumulationState,
    RNGItemState,
    StepCountState,
    TrainingState,
)
from accel_runtime.export.load_model import find_weights, list_shards
from accel_runtime.export.objects import read_pickle
from accel_runtime.export.save_model import add_aliases
from accel_runtime.extensions.foreign_checkpoints.dcp_manifest import find_fsdp_folders, open_dcp_checkpoint
from accel_runtime.extensions.foreign_checkpoints.deepspeed_manifest import open_deepspeed_checkpoint
from accel_runtime.extensions.foreign_checkpoints.folders import is_deepspeed_checkpoint
from accel_runtime.extensions.foreign_checkpoints.states import ForeignStates, OpenForeign
from accel_runtime.foundation import nested
from accel_runtime.foundation.module_names import match_names
from accel_runtime.storage.errors import (
    AllGatherObjects,
    CheckpointError,
    errors_on_all_ranks,
    format_names,
)
from accel_runtime.storage.manifest import Checkpoint, Manifest, TensorEntry
from accel_runtime.storage.schema import write_record
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.gradients import numbered_name

__all__ = [
    "read_accelerate_checkpoint",
    "read_random_states",
    "restore_accelerate_checkpoint",
]

_LOG = logging.getLogger("accel_runtime.checkpoint")
_UNCHECKED = {"loader", "accumulation", "step_counts", "random", "replicas"}
"""Items that Accelerate does not write, or in another form."""


def restore_accelerate_checkpoint(
    path: Path, run: TrainingState, items: Sequence[StateItem], all_gather: AllGatherObjects, *, strict: bool
) -> Checkpoint:
    """Restore items from a checkpoint of Accelerate or DeepSpeed; return it with a manifest of what is known."""
    topology = run.backend.topology
    with ExitStack() as stack:
        with errors_on_all_ranks(all_gather):
            checkpoint = read_accelerate_checkpoint(path, topology.rank, run.backend.device)
            engines = None
            if (open_engines := _select_engines(path)) is not None:
                engines = stack.enter_context(
                    ForeignStates(open_engines, items, without=tuple(checkpoint.items))
                )
            trees, left_out = _plan_restore(checkpoint, engines, run, items, strict=strict)
        try:
            with errors_on_all_ranks(all_gather):
                if engines is not None:
                    trees |= engines.read(items, topology.rank, topology.world_size)
            with errors_on_all_ranks(all_gather):
                for item in items:
                    if item.name in trees:
                        item.restore(trees[item.name])
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nThe training state is now inconsistent ({path} was loaded partially). Load another checkpoint or "
                "restart."
            ) from error
    if topology.rank == 0:
        _LOG.warning(
            "%s was written by %s, and loaded without: %s",
            path,
            "Accelerate" if checkpoint.world_size or engines is None else "DeepSpeed",
            "; ".join(left_out),
        )
    saved_at = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    world_size = checkpoint.world_size
    saved_items = dict.fromkeys(checkpoint.items)
    if engines is not None:
        world_size = world_size or engines.manifest.world_size
        saved_items |= dict.fromkeys(engines.manifest.items)
    return Checkpoint(os.fspath(path), Manifest("", saved_at, world_size, run.step, {}, saved_items))


def _select_engines(path: Path) -> OpenForeign | None:
    """Return the function that opens the folders of DeepSpeed or FSDP in a checkpoint; None if there are none."""
    if is_deepspeed_checkpoint(path):
        return partial(open_deepspeed_checkpoint, path)
    return (lambda adapt: open_dcp_checkpoint(path, adapt=adapt)[0]) if find_fsdp_folders(path) else None


def _plan_restore(
    checkpoint: AccelerateCheckpoint,
    engines: ForeignStates | None,
    run: TrainingState,
    items: Sequence[StateItem],
    *,
    strict: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Return the states to restore by item, except those of engines, and reasons for what is not restored."""
    path, topology = checkpoint.path, run.backend.topology
    trees = dict(checkpoint.items)
    for item in items:
        if isinstance(item, ModelItem) and item.name in trees:
            state = run.backend.runtime.state_to_host(item.tree())
            names = match_names(trees[item.name], state)
            renamed = {names[name]: value for name, value in trees[item.name].items()}
            trees[item.name] = add_aliases(renamed, state)
    errors = []
    if checkpoint.world_size not in {0, topology.world_size}:
        try:
            saved = read_random_states(path, run.backend.device)
            derived = derive_random_states(saved, topology.rank, topology.world_size)
            trees["random"] = write_record(RNGItemState(derived))
        except CheckpointError as error:
            errors = [f"random: {error}"]
            trees.pop("random", None)
    steps = []
    for index in range(len(run.optimizers)):
        name = numbered_name("optimizer", index)
        is_of_engine = engines is not None and name in engines.manifest.values
        steps.append(engines.manifest.step if engines and is_of_engine else _count_steps(trees.get(name)))
    trees["step_counts"] = write_record(StepCountState(tuple(steps)))
    # The state between two accumulation cycles.
    fresh = Accumulation(run.accumulation.plugin).capture_cycle()
    trees["accumulation"] = write_record(AccumulationState(fresh))
    mismatches = list(dict.fromkeys([*_find_mismatches(checkpoint, engines, trees, items), *errors]))
    if mismatches and strict:
        listed = "\n".join(f"  {sentence}" for sentence in mismatches)
        raise CheckpointError(
            f"{path} does not fit this run, and nothing was loaded. Pass strict=False to leave out:\n{listed}"
        )
    lost = [f"{skipped.item}: {skipped.reason}" for skipped in checkpoint.refused if skipped.item == "loader"]
    if engines is not None and not checkpoint.world_size:
        lost = ["DeepSpeed does not save random states, nor the position of loaders"]
    lost += engines.missing if engines is not None else []
    if engines is not None and "scaler" in engines.manifest.values.keys() - {item.name for item in items}:
        lost.append("scaler: this run scales no loss")
    micro_batches = checkpoint.step % run.accumulation.steps
    if micro_batches:
        lost.append(
            f"accumulation: the checkpoint was saved {micro_batches} micro-batches into an accumulation cycle, and Accelerate does not "
            "save their gradients; a new cycle begins"
        )
    return trees, [*mismatches, *lost]


def _find_mismatches(
    checkpoint: AccelerateCheckpoint,
    engines: ForeignStates | None,
    trees: Mapping[str, Any],
    items: Sequence[StateItem],
) -> list[str]:
    # Every checkpoint of Accelerate lacks loaders and step counts, and another world size needs no random states.
    refused = [
        skipped
        for skipped in checkpoint.refused
        if skipped.item not in {"loader", "step_counts"} and (skipped.item != "random" or skipped.file)
    ]
    stored = {} if engines is None else dict(engines.manifest.values)
    if engines is not None and not checkpoint.world_size:  # DeepSpeed alone
        refused = [skipped for skipped in refused if skipped.item != "random"]
    reasons = [f"{skipped.item}: {skipped.reason}" for skipped in refused]
    names, refused_items = {item.name for item in items}, {skipped.item for skipped in refused}
    unchecked = _UNCHECKED | {"scaler"} if "scaler" in stored else _UNCHECKED
    reasons += [
        f"{name}: it is not prepared here" for name in {**trees, **stored} if name not in names | unchecked
    ]
    for item in items:
        if engines is not None and item.name in stored:
            reasons += engines.find_mismatches(item)
            continue
        if item.name in trees:
            encoded, tensors = serialize(trees[item.name], item.name)
            entries = {
                name: TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), ())
                for name, tensor in tensors.items()
            }
            reasons += item.find_mismatches(encoded, entries)
        elif item.name.split("_")[0] not in _UNCHECKED and item.name not in refused_items:
            reasons.append(f"{item.name}: it is not in the checkpoint")
    return reasons


def _count_steps(tree: Any) -> int:
    """Return the number of steps of an optimizer according to its state; 0 without one."""
    states = tree["state_dict"]["state"].values() if tree else ()
    return max(
        (int(state["step"]) for state in states if isinstance(state, dict) and "step" in state), default=0
    )


_WEIGHTS = re.compile(r"(?:pytorch_)?model(?:_(\d+))?\.(?:safetensors|bin)(?:\.index\.json)?")
_SHARDED_STATE = re.compile(r"pytorch_model_fsdp(?:_rank\d+|_\d+)?(?:\.bin)?|pytorch_model(?:_\d+)?")
_RNG_FILE = re.compile(r"random_states_(\d+)\.pkl")
_POSITION = re.compile(r"(?:sampler|dl_state_dict)(?:_\d+)?\.bin")
_LOADERS = (
    "Accelerate does not save the position of loaders{}. Skip processed batches with "
    "accelerator.skip_first_batches(loader, n) in the first epoch."
)


@dataclass(frozen=True)
class SkippedItem:
    """An item that is not restored."""

    item: str
    """Name of the item in a checkpoint: `optimizer`, `registered_1`, `loader`, ..."""
    file: Path | None
    """Its file; None if Accelerate does not write one."""
    reason: str
    """Reason and cure."""


@dataclass(frozen=True)
class AccelerateCheckpoint:
    """A checkpoint of Accelerate."""

    path: Path
    items: Mapping[str, Any]
    """State trees by item: `model`, `model_1`, `optimizer`, `scheduler`, `scaler`, `registered`, `random`.

    Aliases of tied weights may be missing from a model.
    """
    refused: tuple[SkippedItem, ...]
    """Items that are not restored, always with `loader`."""
    world_size: int
    """Number of processes that wrote the checkpoint."""
    step: int
    """Number of micro-batches before the save; 0 if it is unknown."""


def read_accelerate_checkpoint(
    folder: Path, rank: int, device: torch.device | None = None
) -> AccelerateCheckpoint:
    """Read a checkpoint of Accelerate, with the random states of a rank and its device."""
    reader = _AccelerateReader(folder)
    for index in reader.indices(_WEIGHTS, "model", "model{}.safetensors"):
        reader.take(numbered_name("model", index), *_find_model_file(folder, index))
    for kind, shape in (("optimizer", _read_optimizer), ("scheduler", _read_mapping)):
        for index in reader.indices(re.compile(rf"{kind}(?:_(\d+))?\.bin"), kind, f"{kind}{{}}.bin"):
            reader.take(numbered_name(kind, index), folder / f"{numbered_name(kind, index)}.bin", shape)
    for index in reader.indices(
        re.compile(r"custom_checkpoint_(\d+)\.pkl"), "registered", "custom_checkpoint_{}.pkl"
    ):
        reader.take(
            numbered_name("registered", index), folder / f"custom_checkpoint_{index}.pkl", read_pickle
        )
    if (folder / "scaler.pt").exists():
        reader.take("scaler", folder / "scaler.pt", _read_mapping)
    ranks = reader.indices(_RNG_FILE, "random", "random_states_{}.pkl")
    world_size = max(ranks, default=-1) + 1
    reader.take_streams(rank, world_size, device)
    reader.skip_the_rest()
    return AccelerateCheckpoint(folder, reader.items, tuple(reader.refused), world_size, reader.step)


def read_random_states(folder: Path, device: torch.device | None = None) -> list[ProcessRandomStates]:
    """Return the random states of every saved rank, in order."""
    ranks = sorted(_indices(folder, _RNG_FILE))
    return [_read_states(folder, rank, device) for rank in range(ranks[-1] + 1 if ranks else 0)]


class _AccelerateReader:
    """Reads one item after another, and records what cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.items: dict[str, Any] = {}
        self.refused: list[SkippedItem] = []
        self.step = 0

    def indices(self, pattern: re.Pattern[str], kind: str, pattern_name: str) -> list[int]:
        """Return the numbers of the files of a kind; record missing ones in between."""
        indices = _indices(self._folder, pattern)
        for index in range(max(indices, default=0)):
            if index not in indices:
                suffix = str(index) if "_{}" in pattern_name else f"_{index}" if index else ""
                file = self._folder / pattern_name.format(suffix)
                last = max(indices)
                item = numbered_name(kind, index) if kind != "random" else kind
                reason = f"{file} is missing, but there is one with the number {last}"
                self.refused.append(SkippedItem(item, file, reason))
        return sorted(indices)

    def take(self, item: str, file: Path, shape: Callable[[Path], Any]) -> None:
        try:
            self.items[item] = shape(file)
        except CheckpointError as error:
            self.refused.append(SkippedItem(item, file, str(error)))

    def take_streams(self, rank: int, world_size: int, device: torch.device | None) -> None:
        """Read the random states of a rank, and the step count, which is equal on all ranks."""
        first = self._folder / "random_states_0.pkl"
        file = self._folder / f"random_states_{rank}.pkl" if world_size else first
        if rank < world_size and file.exists():
            self.take(
                "random",
                file,
                lambda _: write_record(RNGItemState(_read_states(self._folder, rank, device))),
            )
        elif not world_size:
            self.refused.append(SkippedItem("random", file, f"{file} is missing"))
        elif rank >= world_size:
            reason = f"the checkpoint was written by {world_size} processes and has no random states of rank {rank}"
            self.refused.append(SkippedItem("random", None, reason))
        try:
            self.step = _read_step(self._folder)
        except CheckpointError as error:
            self.refused.append(SkippedItem("step_counts", first, str(error)))

    def skip_the_rest(self) -> None:
        """Record loader positions, which have another form, and files of other engines."""
        of_fsdp = set(find_fsdp_folders(self._folder).values())
        names = sorted(path.name for path in self._folder.iterdir() if path not in of_fsdp)
        kept = [name for name in names if _POSITION.fullmatch(name)]
        files = f" that others can use ({', '.join(kept)})" if kept else ""
        self.refused.append(
            SkippedItem("loader", self._folder / kept[0] if kept else None, _LOADERS.format(files))
        )
        for name in names:
            path = self._folder / name
            if re.fullmatch(r"(pytorch_model_fsdp|optimizer)_\d+", name) and path.is_dir():
                kind = "optimizer" if name.startswith("optimizer") else "model"
                reason = f"{path} is not complete: it has no .metadata, which is written last"
                self.refused.append(SkippedItem(kind, path, reason))
            elif _SHARDED_STATE.fullmatch(name) and not is_deepspeed_checkpoint(path):
                reason = (
                    f"{path} was written for a sharded model. Merge it with `accelerate merge-weights`, and load the file with "
                    "accelerator.load_model."
                )
                self.refused.append(SkippedItem("model", path, reason))


# Files -----------------------------------------------------------------------------------


def _find_model_file(folder: Path, index: int) -> tuple[Path, Callable[[Path], Any]]:
    """Return the file of a model in Accelerate's order of preference, and its reader."""
    suffix = f"_{index}" if index else ""
    candidates: list[tuple[str, Callable[[Path], Any]]] = [
        (f"model{suffix}.safetensors", lambda path: find_weights(path).read()),
        (f"model{suffix}.safetensors.index.json", lambda path: find_weights(path).read()),
        (f"pytorch_model{suffix}.bin", _read_weights),
        (f"pytorch_model{suffix}.bin.index.json", _read_sharded_weights),
    ]
    return next((folder / name, reader) for name, reader in candidates if (folder / name).exists())


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    state = _read_mapping(path)
    if others := [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise CheckpointError(f"{path} does not contain weights: {others[0]} is not a tensor")
    return dict(state)


def _read_sharded_weights(index: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in list_shards(index) for name, tensor in _read_weights(file).items()}


def _read_optimizer(path: Path) -> dict[str, Any]:
    state = _read_mapping(path)
    if not {"state", "param_groups"} <= state.keys():
        raise CheckpointError(
            f"{path} does not contain the state of a torch optimizer: its keys are {format_names([str(key) for key in state])}"
        )
    return {"format": "torch", "state_dict": state}


_MAX_EXPANDED = 1 << 26
"""Bytes that tensors may have beyond those of their file."""


def _read_mapping(path: Path) -> dict[str, Any]:
    state = read_pickle(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} contains a {type(state).__name__}, not a dict")
    # An expanded tensor has one element in the file, and would have all of them after a conversion.
    try:
        needed = sum(leaf.nbytes for leaf in nested.leaves(state) if isinstance(leaf, torch.Tensor))
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read: it is nested too deep, or contains itself") from None
    size = path.stat().st_size
    if needed > _MAX_EXPANDED + 4 * size:
        raise CheckpointError(
            f"{path} cannot be read: its tensors need {needed} bytes, and the file has {size}"
        )
    return state


def _read_step(folder: Path) -> int:
    path = folder / "random_states_0.pkl"
    step = _read_mapping(path).get("step")
    if type(step) is not int:
        raise CheckpointError(f"{path} does not contain the number of steps")
    return step


def _read_states(folder: Path, rank: int, device: torch.device | None) -> ProcessRandomStates:
    """Return the random states of a rank."""
    states = _read_mapping(folder / f"random_states_{rank}.pkl")
    try:
        version, words, gauss = states["random_state"]
        name, keys, offset, has_gauss, numpy_gauss = states["numpy_random_seed"]
        random = RandomStates(
            states["torch_manual_seed"].numpy().tobytes(),
            PythonState(version, array("I", words).tobytes(), gauss),
            NumPyState(
                str(name),
                keys.numpy().astype("uint32").tobytes(),
                int(offset),
                int(has_gauss),
                float(numpy_gauss),
            ),
        )
        if device is None or not (device_states := states.get(f"torch_{device.type}_manual_seed")):
            return ProcessRandomStates(random)
        # Every process saves the states of all devices that it sees.
        state = device_states[device.index or 0].numpy().tobytes()
        return ProcessRandomStates(random, {device.type: state})
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise CheckpointError(
            f"the random states are not those of Accelerate: {type(error).__name__}: {error}"
        ) from error


def _indices(folder: Path, pattern: re.Pattern[str]) -> set[int]:
    matches = (pattern.fullmatch(path.name) for path in folder.iterdir())
    return {int(match[1] or 0) for match in matches if match}
