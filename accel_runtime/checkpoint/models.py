"""The item `model`: parameters and buffers, which are read into the live ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.checkpoint.items import Item
from accel_runtime.checkpoint.live import fitting, is_sharded, is_tensor, memory, named, some, unlike, write
from accel_runtime.checkpoint.manifest import Stored
from accel_runtime.parallel.materializing import Memory, empty

__all__ = ["Model"]


class Model(Item):
    """A model's parameters and buffers; they are read into the live ones.

    Args:
        name: As for every item.
        model: The script's own module.
        state: Its state, where hooks of the script have had a say in it.
        strict: False takes what fits, and leaves the rest as it is.
        memory: Where a model without memory gets it when it is loaded.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        state: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(name)
        self._model, self._strict, self._memory = model, strict, memory
        self._state = model.state_dict() if state is None else state

    @property
    @override
    def about(self) -> str:
        # `fully_shard` makes a class of its own out of that of the script.
        kind = type(self._model)
        return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 0)].__qualname__

    @override
    def tree(self) -> Any:
        return dict(self._state)

    @override
    def wrong(self, text: Any, tensors: Mapping[str, Stored]) -> list[str]:
        missing = [name for name in self._state if name not in text]
        beyond = [name for name in text if name not in self._state]
        wrong = []
        if missing:
            wrong.append(f"{self.name}: the checkpoint has no {some(missing)}")
        if beyond:
            wrong.append(f"{self.name}: the model here has no {some(beyond)}")
        live = named(text, self._state)
        for name, tensor in live.items():
            if name in tensors and (said := unlike(tensors[name], tensor)):
                wrong.append(f"{name} is {said}")
        return wrong

    @override
    def targets(self, text: Any, tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        if self._memory is not None and empty(self._model):
            self._memory.materialize(self._model)
            self._state = self._model.state_dict()
        return fitting(named(text, self._state), tensors)

    @override
    def restore(self, tree: Any) -> None:
        known = {name: value for name, value in tree.items() if name in self._state}
        for name, value in known.items():
            write(value, self._state[name])
        if self._needs_its_own():
            self._model.load_state_dict(known, strict=self._strict)

    def _needs_its_own(self) -> bool:
        """Whether the module has to take its state over by itself: it is not all in its parameters and buffers."""
        live = {memory(t) for t in (*self._model.parameters(), *self._model.buffers()) if not is_sharded(t)}
        plain = (t for t in self._state.values() if is_tensor(t) and not is_sharded(t) and t.numel())
        extra = any(not is_tensor(value) for value in self._state.values())
        return extra or any(memory(tensor) not in live for tensor in plain)
