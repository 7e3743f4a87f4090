"""Unwrapping, export and loading of models and single objects of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, BinaryIO, TypeVar, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_runtime.accelerator.run import Run
from accel_runtime.backends.quantized_tensors import PackedWeights
from accel_runtime.checkpoint.save import write_without_missing_ranks
from accel_runtime.collectives.handshake import all_gather_objects, call_at_site
from accel_runtime.export.load_model import WeightLoader, find_weights, is_streamed
from accel_runtime.export.objects import refuse_sharded, write_object
from accel_runtime.export.save_model import (
    ExportPlan,
    export_model,
    export_sharded_model,
    is_writer,
    write_on_main_process,
)
from accel_runtime.foundation import module_names
from accel_runtime.parallel.dtensor import gather_state_dict, reshard_models
from accel_runtime.storage.errors import errors_on_all_ranks
from accel_runtime.storage.file_system import parse_size
from accel_runtime.training.compile import unwrap

__all__ = ["Exports"]

_Model = TypeVar("_Model", bound=nn.Module)


class Exports:
    """Export and load the models of a run; see the methods of `Accelerator` with these names.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def unwrap_model(
        self, model: _Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> _Model:
        """Return the module of the script."""
        module = unwrap(
            model,
            self._run.strategy.unwrap_model,
            keep_autocast=keep_fp32_wrapper,
            keep_compiled=keep_torch_compile,
        )
        return cast("_Model", module)

    def get_state_dict(
        self, model: nn.Module, unwrap: bool = True, *, everywhere: bool = False
    ) -> dict[str, Any]:
        """Return the full state of a model; collective for a sharded one."""
        module = self.unwrap_model(model) if unwrap else model
        reshard_models([module])
        if self._run.strategy.is_sharded(module):
            # The gathering itself is torch's, which compares nothing.
            self._run.backend.handshake.exchange(call_at_site("get_state_dict", anywhere=True))
            view = self._run.strategy.open_full_state(module, "get_state_dict").models[0]
            return gather_state_dict(view, keep=everywhere or self._run.backend.topology.rank == 0)
        if unwrap:
            return module_names.state_dict(module)
        if isinstance(module, DistributedDataParallel):
            return DistributedDataParallel.state_dict(module)
        state: dict[str, Any] = module.state_dict()
        return state

    def gathered(self, model: _Model) -> AbstractContextManager[_Model]:
        """Gather the parameters of a sharded model on every process inside the context; collective."""
        optimizers = [prepared.optimizer for prepared in self._run.prepared.optimizers]
        module = self.unwrap_model(model)
        if self._run.strategy.is_sharded(module):
            self._run.backend.handshake.exchange(call_at_site("gathered", anywhere=True))
        return cast("AbstractContextManager[_Model]", self._run.strategy.gathered(module, optimizers))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Export the weights of a model as safetensors; collective."""
        if not safe_serialization:
            raise ValueError(
                "save_model cannot write pickles (safe_serialization=False): reading them runs code. Leave out "
                "safe_serialization, or call accelerator.save(accelerator.get_state_dict(model), 'pytorch_model.bin')."
            )
        limit = parse_size(max_shard_size, "max_shard_size")
        self._run.strategy.synchronize()
        each = self._run.options.project.save_on_each_node
        module, location = self.unwrap_model(model), os.fspath(save_directory)
        absence = self._run.backend.wait_for_ranks("save_model")
        reshard_models([module])
        tied = _tied_names(module)
        is_sharded = self._run.strategy.is_sharded(module)
        if is_sharded and absence is None:
            state = self._run.strategy.open_full_state(module, "save_model").models[0]
            export_sharded_model(state, location, limit, self._run.backend, tied=tied, each_machine=each)
            return

        def write() -> None:
            plan = ExportPlan.from_state(
                self._run.backend.runtime.state_to_host(module_names.state_dict(module)), limit, tied
            )
            export_model(plan, location)

        if absence is not None:

            def write_alone() -> str:
                write()
                return ""

            write_without_missing_ranks(
                "save_model", absence, self._run.backend, write_alone, sharded=is_sharded
            )
            return
        write_on_main_process("save_model", write, self._run.backend, each_machine=each)

    def load_model(self, model: nn.Module, directory: str | os.PathLike[str]) -> None:
        """Load weights of `save_model` into a model; collective for a sharded one."""
        self._run.strategy.synchronize()
        module = self.unwrap_model(model)
        all_gather = partial(all_gather_objects, "load_model", handshake=self._run.backend.handshake)
        reshard_models([module])
        if is_streamed(module) or self._run.strategy.is_sharded(module):
            loader = WeightLoader(
                all_gather,
                self._run.backend.topology.rank,
                self._run.backend.topology.world_size,
                self._run.meta_models,
            )
            view = self._run.strategy.open_full_state(module, "load_model")
            loader.load(view.models[0], directory)
            view.write_back()
            return
        with errors_on_all_ranks(all_gather):
            live = module_names.state_dict(module)
            packed = PackedWeights(module, live)
            current = self._run.backend.runtime.state_to_host(live)
            weights = find_weights(directory)
            state = weights.read(weights.match(current, packed=packed))
            packed.restore(state)
        module_names.load_state_dict(
            module, {name: value for name, value in state.items() if name not in packed.scales}
        )
        self._run.strategy.synchronize()

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write an object on the main process."""
        self._run.strategy.synchronize()
        refuse_sharded(obj)
        each = self._run.options.project.save_on_each_node
        if is_writer(self._run.backend.topology, each_machine=each):
            write_object(
                self._run.backend.runtime.state_to_host(obj), f, safe_serialization=safe_serialization
            )


def _tied_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of tied weights that a model of the transformers library omits from files."""
    keys: Any = getattr(model, "_tied_weights_keys", None) or ()
    return tuple(keys) if isinstance(keys, (list, tuple, set, Mapping)) else ()
