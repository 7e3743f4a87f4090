"""What Accelerate's `save_state` wrote, as the items of a checkpoint of ours; nothing in its files runs.

The layout: https://huggingface.co/docs/accelerate/usage_guides/checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.manifest import NAME
from accel_runtime.exporting.exported import read_weights, sharded, shards
from accel_runtime.exporting.unpickling import read_pickle

__all__ = ["Foreign", "Refused", "read", "recognised", "streams"]

_MARKS = re.compile(
    r"random_states_\d+\.pkl|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt|custom_checkpoint_\d+\.pkl"
    r"|pytorch_model_fsdp.*"
)
"""Names that only `save_state` gives; weights alone may be anybody's."""
_WEIGHTS = re.compile(r"(?:pytorch_)?model(?:_(\d+))?\.(?:safetensors|bin)(?:\.index\.json)?")
_SHARDED_STATE = re.compile(r"pytorch_model_fsdp(?:_rank\d+|_\d+)?(?:\.bin)?|pytorch_model(?:_\d+)?")
_POSITION = re.compile(r"(?:sampler|dl_state_dict)(?:_\d+)?\.bin")
_LOADERS = (
    "Accelerate keeps no position of loaders{}: skip what was trained on with accelerator.skip_first_batches(loader, n) "
    "in the first epoch"
)


@dataclass(frozen=True)
class Refused:
    """A part of a run's state that does not come back."""

    item: str
    """What it is called in a checkpoint: `optimizer`, `registered_1`, `loader`, ..."""
    file: Path | None
    """Where it would be; None for what Accelerate does not write."""
    reason: str
    """A sentence, and what to do."""


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of Accelerate."""

    path: Path
    items: Mapping[str, Any]
    """State trees by item: `model`, `optimizer`, `scheduler`, `scaler`, `registered`, `random` and `counters`; those of
    which there are several are counted: `model_1`, ... Names of tied weights may be missing from a model."""
    refused: tuple[Refused, ...]
    """What is not among the items; `loader` always."""
    world_size: int
    """How many processes have written it."""


def recognised(folder: Path) -> bool:
    """Whether a directory is what Accelerate's `save_state` wrote."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:
        return False
    return NAME not in names and any(map(_MARKS.fullmatch, names))


def read(folder: Path, rank: int, device: torch.device | None = None) -> Foreign:
    """Read a checkpoint of Accelerate, with the random states of one rank.

    Args:
        folder: Its directory.
        rank: Whose random states. A rank that did not take part in the save gets none: see `streams`.
        device: The rank's device, whose own random state is read too.
    """
    reader = _Reader(folder)
    for index in reader.indices(_WEIGHTS, "model", "model{}.safetensors"):
        reader.take(_numbered("model", index), *_model(folder, index))
    for kind, shape in (("optimizer", _optimizer), ("scheduler", _mapping)):
        for index in reader.indices(re.compile(rf"{kind}(?:_(\d+))?\.bin"), kind, f"{kind}{{}}.bin"):
            reader.take(_numbered(kind, index), folder / f"{_numbered(kind, index)}.bin", shape)
    for index in reader.indices(
        re.compile(r"custom_checkpoint_(\d+)\.pkl"), "registered", "custom_checkpoint_{}.pkl"
    ):
        reader.take(_numbered("registered", index), folder / f"custom_checkpoint_{index}.pkl", read_pickle)
    if (folder / "scaler.pt").exists():
        reader.take("scaler", folder / "scaler.pt", _mapping)
    ranks = reader.indices(_streams_of(r"(\d+)"), "random", "random_states_{}.pkl")
    world_size = max(ranks, default=-1) + 1
    reader.take_streams(rank, world_size, device)
    reader.refuse_the_rest()
    return Foreign(folder, reader.items, tuple(reader.refused), world_size)


def streams(folder: Path, device: torch.device | None = None) -> list[dict[str, Any]]:
    """The random states of every rank that saved, in their order.

    Raises:
        CheckpointError: One is missing or damaged.
    """
    ranks = sorted(_indices(folder, _streams_of(r"(\d+)")))
    return [_streams(_states(folder, rank), device) for rank in range(ranks[-1] + 1 if ranks else 0)]


class _Reader:
    """Takes one item after the other, and keeps what cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.items: dict[str, Any] = {}
        self.refused: list[Refused] = []

    def indices(self, pattern: re.Pattern[str], kind: str, named: str) -> list[int]:
        """The numbers of the files of a kind; those that are missing in between are told."""
        found = _indices(self._folder, pattern)
        for index in range(max(found, default=0)):
            if index not in found:
                ending = str(index) if "_{}" in named else f"_{index}" if index else ""
                file = self._folder / named.format(ending)
                last = max(found)
                item = _numbered(kind, index) if kind != "random" else kind
                reason = f"{file} is missing, and there is one with the number {last}"
                self.refused.append(Refused(item, file, reason))
        return sorted(found)

    def take(self, item: str, file: Path, shape: Callable[[Path], Any]) -> None:
        try:
            self.items[item] = shape(file)
        except CheckpointError as error:
            self.refused.append(Refused(item, file, str(error)))

    def take_streams(self, rank: int, world_size: int, device: torch.device | None) -> None:
        """The random states of a rank, and the step, which all ranks have alike."""
        first = self._folder / "random_states_0.pkl"
        file = self._folder / f"random_states_{rank}.pkl" if world_size else first
        if rank < world_size and file.exists():
            self.take("random", file, lambda _: _streams(_states(self._folder, rank), device))
        elif not world_size:
            self.refused.append(Refused("random", file, f"{file} is missing"))
        elif rank >= world_size:
            reason = f"the checkpoint was written by {world_size} processes: it has no random states of rank {rank}"
            self.refused.append(Refused("random", None, reason))
        self.take("counters", first, lambda _: _counters(self._folder))

    def refuse_the_rest(self) -> None:
        """Tell of positions of loaders, which are no state of ours, and of what other engines wrote."""
        names = sorted(path.name for path in self._folder.iterdir())
        kept = [name for name in names if _POSITION.fullmatch(name)]
        held = f" that others can use ({', '.join(kept)})" if kept else ""
        self.refused.append(
            Refused("loader", self._folder / kept[0] if kept else None, _LOADERS.format(held))
        )
        for name in names:
            path = self._folder / name
            if _SHARDED_STATE.fullmatch(name):
                reason = (
                    f"{path} was written for a model that is shared out among processes: Accelerate's own "
                    "`accelerate merge-weights` makes one file of it, for accelerator.load_model"
                )
                self.refused.append(Refused("model", path, reason))
            elif re.fullmatch(r"optimizer_\d+", name) and path.is_dir():
                reason = f"{path} was written for an optimizer that is shared out among processes"
                self.refused.append(Refused("optimizer", path, reason))


# Files -----------------------------------------------------------------------------------


def _model(folder: Path, index: int) -> tuple[Path, Callable[[Path], Any]]:
    """The file that holds a model, in Accelerate's order of preference, and what reads it."""
    ending = f"_{index}" if index else ""
    known: list[tuple[str, Callable[[Path], Any]]] = [
        (f"model{ending}.safetensors", lambda path: dict(read_weights([path], path).tensors)),
        (f"model{ending}.safetensors.index.json", lambda path: dict(sharded(path).tensors)),
        (f"pytorch_model{ending}.bin", _weights),
        (f"pytorch_model{ending}.bin.index.json", _sharded_weights),
    ]
    return next((folder / name, reader) for name, reader in known if (folder / name).exists())


def _weights(path: Path) -> dict[str, torch.Tensor]:
    state = _mapping(path)
    if strange := [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise CheckpointError(f"{path} holds no weights: {strange[0]} is no tensor")
    return dict(state)


def _sharded_weights(index: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in shards(index) for name, tensor in _weights(file).items()}


def _optimizer(path: Path) -> dict[str, Any]:
    state = _mapping(path)
    if not {"state", "param_groups"} <= state.keys():
        raise CheckpointError(
            f"{path} holds no state of an optimizer of torch: it has {', '.join(map(str, state))}"
        )
    return {"format": "torch", "state_dict": state}


def _mapping(path: Path) -> dict[str, Any]:
    state = read_pickle(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, and no state by names")
    return state


def _states(folder: Path, rank: int) -> dict[str, Any]:
    return _mapping(folder / f"random_states_{rank}.pkl")


def _counters(folder: Path) -> dict[str, int]:
    step = _states(folder, 0).get("step")
    if type(step) is not int:
        raise CheckpointError(f"{folder / 'random_states_0.pkl'} does not say how many steps were made")
    return {"step": step}


def _streams(states: Mapping[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Accelerate's random states as those of our own checkpoints."""
    try:
        version, words, spare = states["random_state"]
        name, keys, *rest = states["numpy_random_seed"]
        found = {
            "torch": states["torch_manual_seed"],
            "python": [version, torch.tensor(words), spare],
            "numpy": [name, keys.to(torch.int64), *rest],
        }
        if device is not None and (every := states.get(f"torch_{device.type}_manual_seed")):
            # Every process keeps the states of all devices that it sees, and draws from its own.
            found[device.type] = every[device.index or 0]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the random states are not Accelerate's: {type(error).__name__}: {error}"
        ) from error
    return found


def _streams_of(rank: str) -> re.Pattern[str]:
    return re.compile(rf"random_states_{rank}\.pkl")


def _indices(folder: Path, pattern: re.Pattern[str]) -> set[int]:
    matches = (pattern.fullmatch(path.name) for path in folder.iterdir())
    return {int(matched[1] or 0) for matched in matches if matched}


def _numbered(kind: str, index: int) -> str:
    return f"{kind}_{index}" if index else kind
