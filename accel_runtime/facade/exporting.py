"""The part of the facade that takes results out of a run, and back in: weights, and single files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_runtime.checkpoint.alone import write_without
from accel_runtime.checkpoint.sizes import size_of
from accel_runtime.checkpoint.together import together
from accel_runtime.env import Settings
from accel_runtime.exchange.objects import share_objects
from accel_runtime.exporting import objects
from accel_runtime.exporting.divided import export_divided
from accel_runtime.exporting.export import Export, export
from accel_runtime.exporting.exported import fitting, weights_in
from accel_runtime.exporting.streams import Streams, streamed
from accel_runtime.exporting.writers import written
from accel_runtime.facade.processes import Processes
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.parallel.gathering import at_rest, gathered, is_divided, whole_state
from accel_runtime.parallel.materializing import Memory
from accel_runtime.project import ProjectConfiguration
from accel_runtime.unwrapping import unwrapped

__all__ = ["Exporting"]


class Exporting(Processes):
    """What `Accelerator` gives away of a model, and takes over."""

    _optimizers: list[PreparedOptimizer]
    project_configuration: ProjectConfiguration
    settings: Settings

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The script's own module, whose parameter names are those it had.

        It is also taken out of `DataParallel` and `DistributedDataParallel` that the script has put it into.

        Args:
            model: A prepared model, or any module.
            keep_fp32_wrapper: False also takes autocast off its forward pass.
            keep_torch_compile: False also takes `torch.compile` off it.
        """
        return unwrapped(
            model, self._backend, keep_autocast=keep_fp32_wrapper, keep_compiled=keep_torch_compile
        )

    def get_state_dict(
        self, model: nn.Module, unwrap: bool = True, *, everywhere: bool = False
    ) -> dict[str, Any]:
        """A model's whole state.

        Of a model that every process has whole, on every process, in the dtypes and on the devices it has. Of a sharded
        model, whole tensors on the CPU of the first process, put together one by one, and an empty dict on the others;
        every process has to call it.

        Args:
            model: A prepared model, or any module.
            unwrap: Use the names of the script's own module. False gives those of `DistributedDataParallel`, which begin with
                `module.`, where the model is in one.
            everywhere: Have a sharded model's state on every process too.
        """
        own = self.unwrap_model(model) if unwrap else model
        at_rest([own])
        if is_divided(own):
            return whole_state(own, keep=everywhere or self.process_index == 0)
        if isinstance(own, DistributedDataParallel):
            return DistributedDataParallel.state_dict(own)
        state: dict[str, Any] = own.state_dict()
        return state

    def gathered(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Inside, a sharded model's parameters are whole plain tensors on every process: for generation, or export.

        They are in the format in which they compute, and nothing is sent in a forward pass, so processes may call the
        model as often as each likes. At the end, also by an exception, every process has its shards again; changes of the
        whole tensors are lost. Layers that `tp` divides stay divided, which a warning says. A model that is not sharded is
        as it is.

        Args:
            model: A prepared model.

        Returns:
            A context manager that gives the model. Every process has to enter and leave it.

        Raises:
            RuntimeError: Inside, an optimizer steps.
        """
        optimizers = [prepared.optimizer for prepared in self._optimizers]
        return gathered(self.unwrap_model(model), optimizers)

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
        gets its names. Tied weights are written once. A sharded model is put together tensor by tensor: the process that
        writes has one file's tensors in memory at a time. The first process writes; with
        `ProjectConfiguration(save_on_each_node=True)` the first of every machine. Every process calls it, and returns when
        the weights are there. If some go on training instead, the first of those that call it writes; of a sharded model
        that is an error.

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
        each = self.project_configuration.save_on_each_node
        own, folder = self.unwrap_model(model), Path(save_directory)
        absence = self._backend.wait_for_ranks("save_model")
        at_rest([own])
        if is_divided(own) and absence is None:
            export_divided(own, folder, limit, self._backend, tied=_tied(own), each_machine=each)
            return

        def write() -> None:
            plan = Export.planned(self._backend.hosted(own.state_dict()), limit, _tied(own))
            export(plan, folder, writer=self.process_index)

        if absence is not None:

            def write_alone() -> str:
                write()
                return ""

            write_without("save_model", absence, self._backend, write_alone, sharded=is_divided(own))
            return
        written("save_model", write, self._backend, each_machine=each)

    def load_model(self, model: nn.Module, directory: str | os.PathLike[str]) -> None:
        """Read weights that `save_model` wrote, or another writer of the same layout, into a model.

        Every process reads; of a sharded model, its own parts only, straight into place. Names, shapes and kinds of numbers
        are checked on all of them before any weight changes; numbers are converted to the formats the model has. A model
        that was made on the meta device gets its memory here, and its optimizers keep working.

        Args:
            model: A prepared model, or any module.
            directory: What `save_model` was given; or a safetensors file, or the index of several.

        Raises:
            CheckpointError: On every process: there are no such weights, they are damaged, or do not fit the model.
        """
        self._backend.settle()
        own, share = (
            self.unwrap_model(model),
            partial(share_objects, "load_model", agreement=self._backend.agreement),
        )
        at_rest([own])
        if streamed(own):
            Streams(share, self.process_index, self.num_processes, self._memory).load(own, Path(directory))
            return
        state: dict[str, Any] = {}

        def check() -> None:
            live = self._backend.hosted(own.state_dict())
            state.update(fitting(weights_in(Path(directory)), own, live))

        together(share, check)
        own.load_state_dict(state)
        self._backend.settle()

    @property
    def _memory(self) -> Memory:
        """Where models that have none get theirs."""
        return Memory(
            self.device, torch.device("cpu") if self.settings.fully_shard.cpu_offload else self.device
        )

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write an object once, from the main process; a file appears whole or not at all.

        With `ProjectConfiguration(save_on_each_node=True)` the first process of every machine writes it. The others
        do not wait for it.

        Args:
            obj: What `torch.save` can write; tensors by name with `safe_serialization`.
            f: A path, or an open binary file.
            safe_serialization: Write safetensors; `f` must then be a path. Tensors that share memory, as tied
                weights do, are written under each of their names.

        Raises:
            ValueError: On every process: a tensor that is divided among processes.
        """
        self._backend.settle()
        objects.refuse_divided(obj)
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
