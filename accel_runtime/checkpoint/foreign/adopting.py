"""A run goes on from a checkpoint that Accelerate wrote: everything is read and checked before anything changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from accel_runtime.accumulation import Accumulation
from accel_runtime.checkpoint import random
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.foreign.reading import Foreign, Refused, read, streams
from accel_runtime.checkpoint.items import Item
from accel_runtime.checkpoint.manifest import Manifest, Stored
from accel_runtime.checkpoint.models import Model
from accel_runtime.checkpoint.run import Run
from accel_runtime.checkpoint.together import Share, own
from accel_runtime.checkpoint.values import packed
from accel_runtime.exporting.ties import completed

__all__ = ["adopt"]

_LOG = logging.getLogger("accel_runtime.checkpoint")
_OURS = {"loader", "window", "counters", "random", "replicas"}
"""Items that Accelerate does not write, or not as we do."""


@dataclass(frozen=True)
class _Plan:
    """What is restored, and what is not."""

    found: Foreign
    trees: Mapping[str, Any]
    wrong: Sequence[str]
    """Why something does not come back though it should."""
    lost: Sequence[str]
    """What Accelerate does not keep."""


def adopt(path: Path, run: Run, items: Sequence[Item], share: Share, *, strict: bool) -> Found:
    """Restore items from a checkpoint of Accelerate.

    Args:
        path: Its directory.
        run: The run that goes on.
        items: What it consists of.
        share: Exchanges objects between the ranks.
        strict: False leaves out what does not fit, and says so.

    Returns:
        The checkpoint, as far as a manifest can tell of it.

    Raises:
        CheckpointError: Something cannot be read or does not fit; nothing was changed.
    """
    plan = own(share, lambda: _planned(path, run, items, strict=strict))

    def restore() -> None:
        for item in items:
            if item.name in plan.trees:
                item.restore(plan.trees[item.name])

    own(share, restore)
    if run.backend.topology.rank == 0:
        _LOG.warning(
            "%s was written by Accelerate, and loaded without: %s", path, "; ".join([*plan.wrong, *plan.lost])
        )
    return Found(path, _manifest(path, plan.found, run.step))


def _planned(path: Path, run: Run, items: Sequence[Item], *, strict: bool) -> _Plan:
    topology, device = run.backend.topology, run.backend.device
    found = read(path, topology.rank, device)
    trees = {name: tree for name, tree in found.items.items() if name != "counters"}
    for item in items:
        if isinstance(item, Model) and item.name in trees:
            trees[item.name] = completed(trees[item.name], run.backend.hosted(item.tree()))
    broken = []
    if found.world_size not in {0, topology.world_size}:
        try:
            trees["random"] = random.derived(streams(path, device), topology.rank, topology.world_size)
        except CheckpointError as error:
            broken = [f"random: {error}"]
            trees.pop("random", None)
    trees["counters"] = {"steps": [_steps(trees, index) for index in range(len(run.optimizers))]}
    trees["window"] = _no_window(run.accumulation)
    wrong = list(dict.fromkeys([*_wrong(found, trees, items), *broken]))
    if wrong and strict:
        told = "\n".join(f"  {sentence}" for sentence in wrong)
        raise CheckpointError(
            f"{path} does not fit this run, and nothing was loaded; strict=False leaves out:\n{told}"
        )
    return _Plan(found, trees, wrong, [*_lost(found, run)])


def _wrong(found: Foreign, trees: Mapping[str, Any], items: Sequence[Item]) -> list[str]:
    refused = [one for one in found.refused if not _is_usual(one)]
    wrong = [f"{one.item}: {one.reason}" for one in refused]
    names, told = {item.name for item in items}, {one.item for one in refused}
    wrong += [f"{name}: nothing of the kind is prepared here" for name in trees if name not in names | _OURS]
    for item in items:
        if item.name in trees:
            text, tensors = packed(trees[item.name], item.name)
            wrong += item.wrong(text, {name: _stored(tensor) for name, tensor in tensors.items()})
        elif item.name.split("_")[0] not in _OURS and item.name not in told:
            wrong.append(f"{item.name}: the checkpoint has none")
    return wrong


def _is_usual(one: Refused) -> bool:
    """Whether it is what every checkpoint of Accelerate lacks, or what another number of processes has no use for."""
    return one.item in {"loader", "counters"} or (one.item == "random" and one.file is None)


def _lost(found: Foreign, run: Run) -> list[str]:
    lost = [f"{one.item}: {one.reason}" for one in found.refused if one.item == "loader"]
    held = found.items.get("counters", {}).get("step", 0) % run.accumulation.steps
    if held:
        lost.append(
            f"window: it was saved {held} micro-batches into an accumulation window, and Accelerate does not keep "
            "their gradients; a new window begins"
        )
    return lost


def _no_window(accumulation: Accumulation) -> dict[str, Any]:
    """The state between two windows."""
    fresh = Accumulation(accumulation.plugin).state_dict()
    return {"accumulation": fresh, "unit": None, "used": [], "gradients": {}, "weights": {}}


def _steps(trees: Mapping[str, Any], index: int) -> int:
    """How many steps an optimizer has made, as far as its own state tells."""
    tree = trees.get(f"optimizer_{index}" if index else "optimizer")
    states = tree["state_dict"]["state"].values() if tree else ()
    return max(
        (int(state["step"]) for state in states if isinstance(state, dict) and "step" in state), default=0
    )


def _stored(tensor: torch.Tensor) -> Stored:
    return Stored(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), ())


def _manifest(path: Path, found: Foreign, step: int) -> Manifest:
    when = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    items = dict.fromkeys(found.items)
    return Manifest("", when.strftime("%Y-%m-%dT%H:%M:%SZ"), found.world_size, step, {}, items)
