"""The part of the facade that takes results out of a run, and back in: weights, and single files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch import nn

from accel_runtime.checkpoint.sizes import size_of
from accel_runtime.checkpoint.together import together
from accel_runtime.exchange.objects import share_objects
from accel_runtime.exporting import objects
from accel_runtime.exporting.export import Export, export
from accel_runtime.exporting.exported import fitting, weights_in
from accel_runtime.exporting.writers import written
from accel_runtime.facade.processes import Processes
from accel_runtime.project import ProjectConfiguration
from accel_runtime.unwrapping import unwrapped

__all__ = ["Exporting"]


class Exporting(Processes):
    """What `Accelerator` gives away of a model, and takes over."""

    project_configuration: ProjectConfiguration

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The script's own module, whose parameter names are those it had.

        Args:
            model: A prepared model, or any module.
            keep_fp32_wrapper: False also takes autocast off its forward pass.
            keep_torch_compile: False also takes `torch.compile` off it.
        """
        return unwrapped(
            model, self._backend, keep_autocast=keep_fp32_wrapper, keep_compiled=keep_torch_compile
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """A model's whole state on every process, in the dtypes and on the devices it has.

        Args:
            model: A prepared model, or any module.
            unwrap: Use the names of the script's own module, instead of those of what `prepare` made of it.
        """
        state: dict[str, Any] = (self.unwrap_model(model) if unwrap else model).state_dict()
        return state

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for elsewhere: safetensors, in the layout of the Hugging Face Hub.

        That is `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with
        `model.safetensors.index.json`. What was written is read again and compared with the live model before it
        gets its names. Tied weights are written once. The first process writes; with
        `ProjectConfiguration(save_on_each_node=True)` the first of every machine. Every process has to call it, and
        returns when the weights are there.

        Args:
            model: A prepared model, or any module.
            save_directory: Where; it is made if need be. Weights of an earlier export in it are replaced.
            max_shard_size: How large a file may be: `"500MB"`, `"10GB"`, `"2GiB"`, or a number of bytes. A larger
                tensor has a file of its own.
            safe_serialization: True, and no other.

        Raises:
            ValueError: A size that is none, or `safe_serialization=False`.
            CheckpointError: On every process: it could not be written, is not what the model is, or the model holds
                what the format cannot.
        """
        if not safe_serialization:
            raise ValueError(
                "save_model writes safetensors only, which run no code when they are read; "
                "accelerator.save(accelerator.get_state_dict(model), 'pytorch_model.bin') writes torch's own format"
            )
        limit = size_of(max_shard_size, "max_shard_size")
        self._backend.settle()

        def write() -> None:
            own = self.unwrap_model(model)
            plan = Export.planned(self._backend.hosted(own.state_dict()), limit, _tied(own))
            export(plan, Path(save_directory), writer=self.process_index)

        each = self.project_configuration.save_on_each_node
        written("save_model", write, self._backend, each_machine=each)

    def load_model(self, model: nn.Module, directory: str | os.PathLike[str]) -> None:
        """Read weights that `save_model` wrote, or another writer of the same layout, into a model.

        Every process reads. Names, shapes and kinds of numbers are checked on all of them before any weight changes;
        numbers are converted to the formats the model has.

        Args:
            model: A prepared model, or any module.
            directory: What `save_model` was given.

        Raises:
            CheckpointError: On every process: there are no such weights, they are damaged, or do not fit the model.
        """
        self._backend.settle()
        own = self.unwrap_model(model)
        state: dict[str, Any] = {}

        def check() -> None:
            live = self._backend.hosted(own.state_dict())
            state.update(fitting(weights_in(Path(directory)), own, live))

        together(partial(share_objects, "load_model", agreement=self._backend.agreement), check)
        own.load_state_dict(state)
        self._backend.settle()

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write an object once, from the main process; a file appears whole or not at all.

        With `ProjectConfiguration(save_on_each_node=True)` the first process of every machine writes it. The others
        do not wait for it.

        Args:
            obj: What `torch.save` can write; tensors by name with `safe_serialization`.
            f: A path, or an open binary file.
            safe_serialization: Write safetensors; `f` must then be a path. Tensors that share memory, as tied
                weights do, are written under each of their names.
        """
        self._backend.settle()
        each = self.project_configuration.save_on_each_node
        if self.is_local_main_process if each else self.is_main_process:
            objects.write(self._backend.hosted(obj), f, safe_serialization=safe_serialization)

    def load(
        self, f: str | os.PathLike[str] | BinaryIO, map_location: Any = None, *, weights_only: bool = True
    ) -> Any:
        """What `save` has written, in either format, on the process that calls it; nothing in the file runs.

        Args:
            f: A path, or an open binary file.
            map_location: The device for tensors, or what else `torch.load` takes; None is the CPU.
            weights_only: True, and no other.

        Raises:
            CheckpointError: The file is not there, is damaged, or holds objects that only their own code can make;
                the message says how to convert it.
            ValueError: `weights_only=False`, which would run code in the file.
        """
        return objects.load(f, map_location, weights_only=weights_only)


def _tied(model: nn.Module) -> tuple[str, ...]:
    """The names of tied weights that a model of the transformers library expects to be left out."""
    told: Any = getattr(model, "_tied_weights_keys", None) or ()
    return tuple(told) if isinstance(told, (list, tuple, set, Mapping)) else ()
