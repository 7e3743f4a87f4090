"""Weights in files, streamed into a live model: each rank reads what it has of every tensor, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.together import Share, together
from accel_runtime.exporting.exported import all_there, checked, files_of, indexed, misfits, refuse
from accel_runtime.exporting.slices import Slice, alike, fill, headers
from accel_runtime.parallel.boxes import box_of, local
from accel_runtime.parallel.materializing import Memory, empty, with_buffers

__all__ = ["Streams", "streamed"]


def streamed(model: nn.Module) -> bool:
    """Whether a model's weights are to be read part by part: it is sharded, or has no memory yet."""
    return any(tensor.is_meta or hasattr(tensor, "device_mesh") for tensor in model.parameters()) or bool(
        empty(model)
    )


@dataclass(frozen=True)
class _Files:
    """Weights that lie in files, and of which nothing is read yet."""

    source: Path
    slices: Mapping[str, Slice]
    ties: Mapping[str, str]
    """Names that are left out, and under which name each tensor is kept, as far as the files tell."""
    checksums: Mapping[str, str]
    """By file, where an index tells."""


@dataclass(frozen=True)
class Streams:
    """How weights come into the models of a run.

    Args:
        share: Exchanges objects between the ranks.
        rank: This rank.
        world_size: How many there are.
        memory: Where models that have none get theirs.
    """

    share: Share
    rank: int
    world_size: int
    memory: Memory

    def load(self, model: nn.Module, path: Path) -> None:
        """Read weights into a model; every rank calls it.

        Args:
            model: The script's own module.
            path: A directory, a safetensors file, or an index.

        Raises:
            CheckpointError: On every rank: there are no such weights, they are damaged, or do not fit the model, which
                is as it was; or reading failed half-way, and the message says so.
        """
        known: list[_Files] = []
        together(self.share, lambda: known.append(self._checked(model, path)))
        with ExitStack() as stack:
            together(self.share, _said(lambda: stack.enter_context(with_buffers(model, self.memory.device))))
            try:
                together(self.share, lambda: self._fill(model, known[0]))
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}\nWhat the model has now is neither what it had nor all of {known[0].source}: load it again"
                ) from error

    def _checked(self, model: nn.Module, path: Path) -> _Files:
        files = _found(path)
        state = model.state_dict(keep_vars=True)
        own = _completed(files, state)
        refuse(files.source, misfits(own, state) + _made(model, state) + self._torn(own, state))
        _said(lambda: [box_of(tensor, name) for name, tensor in state.items()])()
        for number, (file, wanted) in enumerate(files.checksums.items()):
            if number % self.world_size == self.rank:
                checked(files.source, file, wanted)
        return _Files(files.source, own, files.ties, files.checksums)

    def _torn(self, own: Mapping[str, Slice], state: Mapping[str, Any]) -> list[str]:
        """Weights that the model ties, and that have two values in the files; ranks share out the comparing."""
        first: dict[int, str] = {}
        wrong = []
        for number, (name, tensor) in enumerate(state.items()):
            kept = first.setdefault(id(tensor), name)
            mine = number % self.world_size == self.rank
            if kept != name and mine and own[kept] != own[name] and not alike(own[kept], own[name]):
                wrong.append(f"{name} and {kept} are one tensor in the model, and differ in it")
        return wrong

    def _fill(self, model: nn.Module, files: _Files) -> None:
        self.memory.materialize(model)
        done: set[int] = set()
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if id(tensor) not in done:
                    done.add(id(tensor))
                    fill(local(tensor), files.slices[name], box_of(tensor, name))


def _found(path: Path) -> _Files:
    source, several = files_of(path)
    files, places, checksums = indexed(source) if several else ([source], {}, {})
    slices: dict[str, Slice] = {}
    about: dict[str, str] = {}
    for file in files:
        found, said = headers(file)
        slices |= found
        about |= said
    all_there(source, places, slices)
    return _Files(source, slices, {name: kept for name, kept in about.items() if kept in slices}, checksums)


def _completed(files: _Files, state: Mapping[str, Any]) -> dict[str, Slice]:
    """What files hold, also under the names of tied weights that they leave out."""
    found = dict(files.slices)
    place = {id(tensor): name for name, tensor in state.items() if name in files.slices}
    for name in state.keys() - files.slices.keys():
        source = place.get(id(state[name])) or files.ties.get(name)
        if source is not None:
            found[name] = files.slices[source]
    return found


def _made(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """What only the model itself knows how to take over."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [
        f"{name} is made by the model's own state_dict, and cannot be read into it part by part"
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and id(value) not in own
    ]


def _said(act: Callable[[], object]) -> Callable[[], None]:
    """The same, which says in the words of a checkpoint why it cannot be done."""

    def acted() -> None:
        try:
            act()
        except ValueError as error:
            raise CheckpointError(str(error)) from error

    return acted
