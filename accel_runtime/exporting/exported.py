"""Weights that come from elsewhere: what `save_model` or another writer of the layout left, read into a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import nn

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.exporting.export import CHECKSUMS, INDEX, SINGLE
from accel_runtime.exporting.ties import aliases, completed

__all__ = [
    "Weights",
    "all_there",
    "checked",
    "files_of",
    "fitting",
    "indexed",
    "misfits",
    "read_weights",
    "refuse",
    "sharded",
    "shards",
    "weights_in",
]

_ONE, _INDEX = ".safetensors", ".safetensors.index.json"
_SLICE = 1 << 22
_LISTED = 10
"""So many names are listed in a message."""


@dataclass(frozen=True)
class Weights:
    """What lies in the files of an export; its tensors are read when they are used."""

    source: Path
    """The file or the index."""
    tensors: Mapping[str, torch.Tensor]
    ties: Mapping[str, str]
    """Names that are left out, and under which name each tensor is kept, as far as the files tell."""


def files_of(path: Path) -> tuple[Path, bool]:
    """Where weights are told of: one file that holds them all, or the index of several.

    Args:
        path: A directory with one of them, or the file or index itself.

    Returns:
        It, and whether it is an index.

    Raises:
        CheckpointError: There is no such thing.
    """
    if path.is_file() and path.name.endswith((_ONE, _INDEX)):
        return path, path.name.endswith(_INDEX)
    single, index = path / SINGLE, path / INDEX
    if single.is_file():
        return single, False
    if not index.is_file():
        raise CheckpointError(f"{path} holds no weights: there is neither {SINGLE} nor {INDEX}")
    return index, True


def weights_in(path: Path) -> Weights:
    """The weights in a directory, or of a file: one file, or shards and their index.

    Raises:
        CheckpointError: There are none, or something is missing, damaged, or of another export than the index.
    """
    source, several = files_of(path)
    return sharded(source) if several else read_weights([source], source)


def sharded(index: Path) -> Weights:
    """The weights of which an index tells.

    Raises:
        CheckpointError: As for `weights_in`.
    """
    files, places, checksums = indexed(index)
    for file, wanted in checksums.items():
        checked(index, file, wanted)
    weights = read_weights(files, index)
    all_there(index, places, weights.tensors)
    return weights


def indexed(index: Path) -> tuple[list[Path], dict[str, str], dict[str, str]]:
    """What an index says: the files, which of them has each tensor, and what each must hash to.

    Raises:
        CheckpointError: It is no index, or a file is missing.
    """
    places, checksums = _parsed(index)
    return _files(index, places), places, checksums


def checked(index: Path, file: str, wanted: str) -> None:
    """Compare a file with what its index says that it hashes to.

    Raises:
        CheckpointError: It is another one.
    """
    found = _checksum(index.parent / file)
    if found != wanted:
        raise CheckpointError(
            f"{index.parent / file} is not the file that {index} tells of: it is damaged, or of another export "
            f"({CHECKSUMS} {found} in place of {wanted})"
        )


def all_there(index: Path, places: Iterable[str], found: Iterable[str]) -> None:
    """See whether files hold what their index tells of.

    Raises:
        CheckpointError: Something is in none of them.
    """
    if lost := sorted(set(places) - set(found)):
        raise CheckpointError(f"{index} tells of {_listed(lost)}, and no file holds it")


def shards(index: Path) -> list[Path]:
    """The files of which an index tells.

    Raises:
        CheckpointError: It is no index, or a file is missing.
    """
    places, _ = _parsed(index)
    return _files(index, places)


def read_weights(files: list[Path], source: Path) -> Weights:
    """The tensors in safetensors files.

    Raises:
        CheckpointError: One is missing or damaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    about: dict[str, str] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in list(file.keys())}
                about |= file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    about.pop("format", None)
    return Weights(source, tensors, {name: kept for name, kept in about.items() if kept in tensors})


def fitting(weights: Weights, model: nn.Module, live: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The weights as the model's own state dict, every name, shape and kind of number checked.

    Args:
        weights: What lies in files.
        model: What they are for.
        live: Its state as files take it, where its own tensors do not show which are one; None is its own.

    Raises:
        CheckpointError: They are not those of this model; the message says what differs.
    """
    live = model.state_dict() if live is None else live
    state = completed(
        weights.tensors, {k: v for k, v in live.items() if isinstance(v, torch.Tensor)}, weights.ties
    )
    refuse(weights.source, misfits(state, live) + _torn(state, live))
    return state


def misfits(stored: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """What of stored tensors does not fit a model, a line each.

    Args:
        stored: By name, what has a `shape` and a `dtype`.
        live: The model's state.
    """
    return [
        *(f"it has no {name}" for name in sorted(live.keys() - stored.keys())),
        *(f"it has {name}, and the model has not" for name in sorted(stored.keys() - live.keys())),
        *(
            problem
            for name in sorted(live.keys() & stored.keys())
            if (problem := _misfit(name, stored[name], live[name]))
        ),
    ]


def refuse(source: Path, wrong: Sequence[str]) -> None:
    """Say what does not fit, where something does not.

    Raises:
        CheckpointError: There is such a thing.
    """
    if wrong:
        more = f"\n  and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        lines = "".join(f"\n  {line}" for line in wrong[:_LISTED])
        raise CheckpointError(f"{source} does not fit the model, which is as it was:{lines}{more}")


def _misfit(name: str, stored: Any, live: Any) -> str | None:
    if not isinstance(live, torch.Tensor):
        return f"{name} is a {type(live).__name__} in the model, and a tensor in it"
    if stored.shape != live.shape:
        return f"{name} has shape {list(stored.shape)} in it, and {list(live.shape)} in the model"
    if not torch.can_cast(stored.dtype, live.dtype):
        return f"{name} is {stored.dtype} in it, which does not become {live.dtype}"
    return None


def _torn(state: Mapping[str, torch.Tensor], live: Mapping[str, Any]) -> list[str]:
    """Weights that the model ties, and that have two values in the file."""
    ties = aliases({name: value for name, value in live.items() if isinstance(value, torch.Tensor)})
    return [
        f"{name} and {kept} are one tensor in the model, and differ in it"
        for name, kept in ties.items()
        if name in state
        and kept in state
        and state[name] is not state[kept]
        and not _alike(state[name], state[kept])
    ]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(
        torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True)
    )


def _files(index: Path, places: Mapping[str, str]) -> list[Path]:
    return [index.parent / file for file in sorted(set(places.values()))]


def _parsed(index: Path) -> tuple[dict[str, str], dict[str, str]]:
    try:
        said = json.loads(index.read_text())
        places = {str(name): str(file) for name, file in said["weight_map"].items()}
        checksums = dict((said.get("metadata") or {}).get(CHECKSUMS) or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {type(error).__name__}: {error}") from error
    for file in {*places.values(), *checksums}:
        if Path(file).name != file:
            raise CheckpointError(f"{index} tells of {file!r}, which is not in its directory")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index.parent / file} is missing: {index} tells of it")
    return places, checksums


def _checksum(path: Path) -> str:
    whole = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(_SLICE):
            whole.update(piece)
    return whole.hexdigest()


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
