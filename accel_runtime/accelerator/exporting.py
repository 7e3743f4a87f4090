"""Unwrapping, export and loading of models and single objects by an `Accelerator`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_runtime.accelerator.properties import AcceleratorProperties
from accel_runtime.collectives.calls import collective
from accel_runtime.collectives.handshake import all_gather_objects, call_at_site
from accel_runtime.export import objects
from accel_runtime.export.load_model import WeightLoader, find_weights, is_streamed
from accel_runtime.export.objects import refuse_sharded, write_object
from accel_runtime.export.save_model import (
    ExportPlan,
    export_model,
    export_sharded_model,
    write_on_main_process,
)
from accel_runtime.foundation import module_names
from accel_runtime.parallel.dtensor import (
    gather_parameters,
    gather_state_dict,
    is_sharded_model,
    reshard_models,
)
from accel_runtime.storage.errors import errors_on_all_ranks
from accel_runtime.storage.file_system import parse_size
from accel_runtime.training.forward import unwrap

__all__ = ["ExportMethods"]


class ExportMethods(AcceleratorProperties):
    """Methods of `Accelerator` that export and load models and objects."""

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the module of the script, with its original parameter names.

        `DataParallel` and `DistributedDataParallel` wrappers that the script added are removed, too.

        Args:
            model: A prepared model, or any module.
            keep_fp32_wrapper: If False, remove autocast from the forward pass.
            keep_torch_compile: If False, remove `torch.compile`.
        """
        return unwrap(
            model,
            self._strategy.unwrap_model,
            keep_autocast=keep_fp32_wrapper,
            keep_compiled=keep_torch_compile,
        )

    @collective("model")
    def get_state_dict(
        self, model: nn.Module, unwrap: bool = True, *, everywhere: bool = False
    ) -> dict[str, Any]:
        """Return the full state of a model.

        For a replicated model, the result is available on every process, with its dtypes and devices. For a sharded model,
        the main process gets full tensors on the CPU, gathered one by one, and the others an empty dict; all processes must
        call it.

        Args:
            model: A prepared model, or any module.
            unwrap: Use the parameter names of the script. With False, names begin with `module.` if the model is wrapped in
                `DistributedDataParallel`.
            everywhere: Return the full state of a sharded model on every process.
        """
        module = self.unwrap_model(model) if unwrap else model
        reshard_models([module])
        if is_sharded_model(module):
            # The gathering itself is torch's, which compares nothing.
            self._backend.handshake.exchange(call_at_site("get_state_dict", anywhere=True))
            return gather_state_dict(module, keep=everywhere or self.process_index == 0)
        if unwrap:
            return module_names.state_dict(module)
        if isinstance(module, DistributedDataParallel):
            return DistributedDataParallel.state_dict(module)
        state: dict[str, Any] = module.state_dict()
        return state

    @collective("model")
    def gathered(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Gather the parameters of a sharded model on every process inside the context, for generation or export.

        Parameters are plain full tensors in the dtype of the computation. A forward pass needs no communication, so each
        process may call the model any number of times. At the end, also after an exception, every process has its shards
        again; changes of the full tensors are lost. Layers sharded by `tp` stay sharded, with a warning. A model that is not
        sharded does not change.

        Args:
            model: A prepared model.

        Returns:
            A context manager that yields the model. All processes must enter and exit it.

        Raises:
            RuntimeError: If an optimizer steps inside the context.
        """
        optimizers = [prepared.optimizer for prepared in self._optimizers]
        module = self.unwrap_model(model)
        if is_sharded_model(module):
            self._backend.handshake.exchange(call_at_site("gathered", anywhere=True))
        return gather_parameters(module, optimizers)

    @collective("model", "save_directory", "safe_serialization")
    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Export the weights of a model as safetensors, in the layout of the Hugging Face Hub.

        The files are `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with
        `model.safetensors.index.json`. They are verified against the model before they get their names. Tied weights are
        written once. A sharded model is gathered tensor by tensor: the writing process holds the tensors of one file in
        memory. The main process writes; with `ProjectConfiguration(save_on_each_node=True)` the first process of every
        node. All processes must call it, and return when the files are complete. If some continue training instead, the
        first process that calls it writes; for a sharded model, that is an error.

        Args:
            model: A prepared model, or any module.
            save_directory: The directory, created if missing. Weights of an earlier export are replaced.
            max_shard_size: The maximum size of a file: `"500MB"`, `"10GB"`, `"2GiB"`, or a number of bytes. A larger
                tensor gets a separate file.
            safe_serialization: Must be True.

        Raises:
            ValueError: If the size is invalid, or `safe_serialization=False`.
            CheckpointError: On every process, if the files cannot be written or differ from the model, or the format does
                not support a tensor of the model.
        """
        if not safe_serialization:
            raise ValueError(
                "save_model cannot write pickles (safe_serialization=False): reading them runs code. Leave out "
                "safe_serialization, or call accelerator.save(accelerator.get_state_dict(model), 'pytorch_model.bin')."
            )
        limit = parse_size(max_shard_size, "max_shard_size")
        self._strategy.synchronize()
        each = self.project_configuration.save_on_each_node
        module, directory = self.unwrap_model(model), Path(save_directory)
        absence = self._backend.wait_for_ranks("save_model")
        reshard_models([module])
        tied = _tied_names(module)
        if is_sharded_model(module) and absence is None:
            export_sharded_model(module, directory, limit, self._backend, tied=tied, each_machine=each)
            return

        def write() -> None:
            plan = ExportPlan.from_state(
                self._backend.runtime.state_to_host(module_names.state_dict(module)), limit, tied
            )
            export_model(plan, directory)

        if absence is not None:
            from accel_runtime.checkpoint.save import write_without_missing_ranks  # noqa: PLC0415 - slow to import

            def write_alone() -> str:
                write()
                return ""

            write_without_missing_ranks(
                "save_model", absence, self._backend, write_alone, sharded=is_sharded_model(module)
            )
            return
        write_on_main_process("save_model", write, self._backend, each_machine=each)

    @collective("model", "directory")
    def load_model(self, model: nn.Module, directory: str | os.PathLike[str]) -> None:
        """Load weights of `save_model`, or of another writer of the same layout, into a model.

        Every process reads; for a sharded model, only its own shards. Names, shapes and dtypes are checked on all processes
        before any weight changes; values are converted to the dtypes of the model. A model on the meta device is
        materialized, and its optimizers stay valid.

        Args:
            model: A prepared model, or any module.
            directory: The directory of `save_model`, a safetensors file, or the index of several.

        Raises:
            CheckpointError: On every process, if no weights are found, or they are damaged or do not match the model.
        """
        self._strategy.synchronize()
        module = self.unwrap_model(model)
        all_gather = partial(all_gather_objects, "load_model", handshake=self._backend.handshake)
        reshard_models([module])
        if is_streamed(module):
            loader = WeightLoader(all_gather, self.process_index, self.num_processes, self._meta_models)
            loader.load(module, Path(directory))
            return
        with errors_on_all_ranks(all_gather):
            current = self._backend.runtime.state_to_host(module_names.state_dict(module))
            weights = find_weights(Path(directory))
            state = weights.read(weights.match(current))
        module_names.load_state_dict(module, state)
        self._strategy.synchronize()

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write an object on the main process; a path is replaced atomically.

        With `ProjectConfiguration(save_on_each_node=True)` the first process of every node writes. The other processes
        do not wait.

        Args:
            obj: An object that `torch.save` supports; tensors by name with `safe_serialization`.
            f: A path, or an open binary file.
            safe_serialization: Write safetensors; `f` must then be a path. Tensors that share memory, such as tied
                weights, are written under each of their names.

        Raises:
            ValueError: On every process, if a tensor is sharded.
        """
        self._strategy.synchronize()
        refuse_sharded(obj)
        each = self.project_configuration.save_on_each_node
        if self.is_local_main_process if each else self.is_main_process:
            write_object(self._backend.runtime.state_to_host(obj), f, safe_serialization=safe_serialization)

    def load(
        self, f: str | os.PathLike[str] | BinaryIO, map_location: Any = None, *, weights_only: bool = True
    ) -> Any:
        """Read a file of `save`, in either format, on the calling process, without running code in it.

        Args:
            f: A path, or an open binary file.
            map_location: The device for tensors, or another value that `torch.load` accepts; None means the CPU.
            weights_only: Must be True.

        Raises:
            CheckpointError: If the file is missing or damaged, or contains objects that need code to be loaded; the
                message explains how to convert it.
            ValueError: If `weights_only=False`, which would run code in the file.
        """
        return objects.load(f, map_location, weights_only=weights_only)


def _tied_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of tied weights that a model of the transformers library omits from files."""
    keys: Any = getattr(model, "_tied_weights_keys", None) or ()
    return tuple(keys) if isinstance(keys, (list, tuple, set, Mapping)) else ()
