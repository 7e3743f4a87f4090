"""Fit a checkpoint that another program wrote to the models and optimizers of a run, and read its tensors into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from accel_runtime.checkpoint.load import fit_manifest
from accel_runtime.checkpoint.state_items import ModelItem, StateItem, tensor_name_of
from accel_runtime.foundation.precision import name_dtype
from accel_runtime.storage.manifest import Manifest, TensorEntry
from accel_runtime.storage.store import Snapshot

__all__ = ["ForeignStates", "OpenForeign"]

_HALF = ("bfloat16", "float16")


OpenForeign = Callable[[Callable[[Manifest], Manifest]], Snapshot]
"""Opens a checkpoint of another program, with its manifest changed by a function."""


class ForeignStates:
    """States of another program in a folder, as items of a run; a context manager, since its files are open.

    Args:
        open_checkpoint: Opens the folder.
        items: The items of the run.
        without: Names of items that are read from other files.
    """

    def __init__(
        self, open_checkpoint: OpenForeign, items: Sequence[StateItem], without: Sequence[str] = ()
    ) -> None:
        self.missing: list[str] = []
        """What the files do not contain, with its item."""

        def adapt(manifest: Manifest) -> Manifest:
            self.missing = _list_missing(manifest)
            return fit_manifest(_remove_items(manifest, without), items)

        self._snapshot = open_checkpoint(adapt)

    @property
    def manifest(self) -> Manifest:
        """The manifest, with the names of the run."""
        return self._snapshot.checkpoint.manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._snapshot.close()

    def find_mismatches(self, item: StateItem) -> list[str]:
        """Return a sentence for each reason that the state of an item does not fit, before tensors are read."""
        encoded = self.manifest.values[item.name]
        entries = {name: self.manifest.tensors[name] for name in self.manifest.tensors_of(item.name)}
        if isinstance(item, ModelItem):
            entries |= self._find_converted(encoded, entries, item.tree())
        return item.find_mismatches(encoded, entries)

    def _find_converted(
        self, encoded: Any, entries: Mapping[str, TensorEntry], state: Any
    ) -> dict[str, TensorEntry]:
        """Return the weights that are converted without loss, or as DeepSpeed does, with the dtype of the model.

        DeepSpeed has frozen parameters in the number format of mixed precision only, and the others in float32.
        """
        precision, converted = self.manifest.run.get("precision", ""), {}
        for key, node in encoded.items():
            entry, live = entries.get(tensor_name_of(node)), state.get(key)
            if entry is None or not isinstance(live, torch.Tensor):
                continue
            dtype = name_dtype(live.dtype)
            widened = entry.dtype in _HALF and dtype == "float32"
            if widened or (entry.dtype == "float32" and dtype == precision):
                converted[tensor_name_of(node)] = replace(entry, dtype=dtype)
        return converted

    def read(self, items: Sequence[StateItem], rank: int, world_size: int) -> dict[str, Any]:
        """Return the states of items, with tensors read into the live ones that an item names."""
        from accel_runtime.checkpoint.load import StateReader  # noqa: PLC0415 - slow to import

        stored = [item for item in items if item.name in self.manifest.values]
        reader = StateReader(self._snapshot, stored, rank, world_size)
        reader.check()
        return reader.read()


def _list_missing(manifest: Manifest) -> list[str]:
    """Return the optimizers whose groups have no options, as DeepSpeed saves them with `elastic_checkpoint`."""
    return [
        f"{name}: with elastic_checkpoint, DeepSpeed does not save learning rates and other options of groups"
        for name, value in manifest.values.items()
        if any(set(group) == {"params"} for group in value.get("groups", ()))
    ]


def _remove_items(manifest: Manifest, names: Sequence[str]) -> Manifest:
    return replace(
        manifest, values={name: value for name, value in manifest.values.items() if name not in names}
    )
