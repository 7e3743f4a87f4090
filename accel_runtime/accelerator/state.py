"""The state of a process among the ranks, of an `Accelerator`, and of gradient accumulation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist
from typing_extensions import override

from accel_runtime.backends import (
    connect_default_backend,
    current_state,
    find_accelerator,
    known_backend,
    set_current_backend,
)
from accel_runtime.backends.base import Backend
from accel_runtime.backends.single import DetachedBackend
from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.environment.engines import list_engines
from accel_runtime.environment.settings import MixedPrecision
from accel_runtime.foundation import nested
from accel_runtime.foundation.epoch_progress import StepInfo
from accel_runtime.foundation.options import DistributedType, InitProcessGroupKwargs
from accel_runtime.training.accumulation import Accumulation

if TYPE_CHECKING:
    from accel_runtime.accelerator.options import EngineOptions
    from accel_runtime.accelerator.run import Run

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "ProcessMethods",
    "is_initialized",
    "split_bounds",
    "split_items",
]


def split_bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the begin and end of the items of a rank; the first `length % world_size` ranks have one more."""
    each, extra = divmod(length, world_size)
    begin = rank * each + min(rank, extra)
    return begin, begin + each + (rank < extra)


def split_items(inputs: Any, rank: int, world_size: int, *, pad: bool = False) -> Any:
    """Return the items of a rank as `split_between_processes` does, with padding if `pad`."""
    length = _get_length(inputs)
    if pad and length == 0 and world_size > 1:
        raise ValueError(
            "split_between_processes cannot pad an empty input: apply_padding repeats the last item. Leave it out."
        )
    begin, end = split_bounds(length, rank, world_size)
    num_padding = -(-length // world_size) - (end - begin) if pad else 0
    return _slice_and_pad(inputs, begin, end, num_padding)


def _slice_and_pad(inputs: Any, begin: int, end: int, num_padding: int) -> Any:
    """Return items `begin` to `end`, and `num_padding` times the last item."""
    if isinstance(inputs, Mapping):
        return nested.rebuild(
            inputs, {k: _slice_and_pad(value, begin, end, num_padding) for k, value in inputs.items()}
        )
    if isinstance(inputs, torch.Tensor):
        rows = inputs[begin:end]
        if not num_padding:
            return rows
        return torch.cat([rows, inputs[-1:].expand(num_padding, *inputs.shape[1:])])
    if isinstance(inputs, (list, tuple)):
        items = [*inputs[begin:end], *inputs[-1:] * num_padding]
        # A slice of a named tuple cannot be a named tuple, because it lacks fields.
        return tuple(items) if hasattr(inputs, "_fields") else nested.rebuild(inputs, items)
    return inputs.select([*range(begin, end), *[len(inputs) - 1] * num_padding])


def _get_length(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        lengths = {str(key): _get_length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{key}: {length}" for key, length in lengths.items())
            raise ValueError(
                f"Cannot split a dict whose values differ in length ({listed}). Make the lengths equal."
            )
        return next(iter(lengths.values()), 0)
    sequence = isinstance(inputs, (list, tuple)) or callable(getattr(inputs, "select", None))
    # `Tensor.select` is unrelated to that of datasets, and a scalar has no dimension to split.
    if inputs.dim() if isinstance(inputs, torch.Tensor) else sequence:
        return len(inputs)
    raise TypeError(
        f"Cannot split a {type(inputs).__name__} between processes: expected a list, a tuple, a tensor, a dataset with "
        "`select`, or a dict of these."
    )


_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


class ProcessMethods:
    """Properties and methods of a process among the ranks, of `Accelerator` and `PartialState`."""

    _backend: Backend

    # Topology --------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return self._backend.device

    @property
    def num_processes(self) -> int:
        """Return the number of processes (world size)."""
        return self._backend.topology.world_size

    @property
    def process_index(self) -> int:
        """Return the rank of this process, from 0."""
        return self._backend.topology.rank

    @property
    def local_process_index(self) -> int:
        """Return the rank of this process on its node, from 0."""
        return self._backend.topology.local_rank

    @property
    def data_parallel_size(self) -> int:
        """Return the number of shards of a global batch: the processes divided by the model-parallel ranks."""
        return self._backend.data_rank.world_size

    @property
    def data_parallel_rank(self) -> int:
        """Return the data-parallel rank of this process, from 0."""
        return self._backend.data_rank.rank

    @property
    def is_main_process(self) -> bool:
        """Return whether this is the first process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Return whether this is the first process of its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Return whether this is the last process of all."""
        return self.process_index == self.num_processes - 1

    @property
    def distributed_type(self) -> DistributedType:
        """Return the kind of distribution: `NO`, `MULTI_CPU`, `MULTI_GPU`, ..."""
        return self._backend.distributed_type

    @property
    def use_distributed(self) -> bool:
        """Return whether there is more than one process."""
        return self.num_processes > 1

    # Execution on some processes -------------------------------------------------------

    def on_main_process(self, function: _F) -> _F:
        """Run a decorated function on the main process only; it returns None on the others."""
        return _run_if(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: _F) -> _F:
        """Run a decorated function on the first process of each node only; it returns None on the others."""
        return _run_if(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: _F) -> _F:
        """Run a decorated function on the last process only; it returns None on the others."""
        return _run_if(function, lambda: self.is_last_process)

    @overload
    def on_process(self, function: _F, process_index: int | None = ...) -> _F: ...
    @overload
    def on_process(self, function: None = ..., process_index: int | None = ...) -> Callable[[_F], _F]: ...
    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Run a decorated function on the process of this index only; it returns None on the others.

        Raises:
            ValueError: If `process_index` is missing or out of range.
        """
        index = _check_index("process_index", process_index, self.num_processes)
        if function is None:
            return functools.partial(self.on_process, process_index=index)
        return _run_if(function, lambda: self.process_index == index)

    @overload
    def on_local_process(self, function: _F, local_process_index: int | None = ...) -> _F: ...
    @overload
    def on_local_process(
        self, function: None = ..., local_process_index: int | None = ...
    ) -> Callable[[_F], _F]: ...
    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Run a decorated function on the process of this index of each node only; it returns None on the others.

        Raises:
            ValueError: If `local_process_index` is missing or out of range.
        """
        count = self._backend.topology.local_world_size
        index = _check_index("local_process_index", local_process_index, count)
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=index)
        return _run_if(function, lambda: self.local_process_index == index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the main process first, then on the others, for example to download to a cache once.

        The others wait on the store instead of a collective, so the block may take longer than the timeout of the process
        group. All processes must call it.

        Raises:
            RuntimeError: On the others, if the block of the main process raised.
        """
        return self._backend.run_first(0, "main_process_first()")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the first process of each node first; see `main_process_first`.

        Raises:
            RuntimeError: On the others, if the block of the first process raised.
        """
        first = self.process_index - self.local_process_index
        return self._backend.run_first(first, "local_main_process_first()")

    @contextmanager
    def split_between_processes(self, inputs: _T, apply_padding: bool = False) -> Iterator[_T]:
        """Yield the shard of the inputs of this process: each item on exactly one process, in order.

        Model-parallel ranks (tensor and context parallel) get the same items, and count as one process.

        Args:
            inputs: A list, a tuple, a tensor (split along its first dimension), a dataset with `select`, or a dict of
                these, also nested, all of one length. It is not changed. The first `len % num_processes` processes get one
                more item.
            apply_padding: Repeat the last item, so that every process has the same number and can call `gather`; the
                padding is at the end of the gathered result.

        Raises:
            TypeError: If the inputs cannot be split.
            ValueError: If the values of a dict differ in length, or an empty input is padded.
        """
        data = self._backend.data_rank
        yield split_items(inputs, data.rank, data.world_size, pad=apply_padding)

    # Synchronization -------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until all processes make this call."""
        self._backend.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the first process of each node only."""
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201 - the purpose of the method

    def _use_backend(self, backend: Backend) -> None:
        """Use a backend for this object and for module-level functions."""
        self._backend = backend
        set_current_backend(backend)


def _run_if(function: _F, condition: Callable[[], bool]) -> _F:
    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        return function(*args, **options) if condition() else None

    return run  # type: ignore[return-value]


def _check_index(name: str, index: int | None, count: int) -> int:
    if index is None:
        raise ValueError(f"{name} is missing: pass the index of the process that runs the function.")
    if not 0 <= index < count:
        raise ValueError(f"Invalid {name} {index}: expected an index from 0 to {count - 1}.")
    return index


class ProcessStateView(ProcessMethods):
    """Base of `PartialState` and `AcceleratorState`."""

    @property
    def backend(self) -> str | None:
        """Return the backend of the process group: `gloo`, `nccl`, ...; None on one process."""
        return self._backend.collective_backend

    @property
    def initialized(self) -> bool:
        """Return True: a state is initialized when it is created."""
        return True

    @property
    def default_device(self) -> torch.device:
        """Return the device of this process."""
        return self.device

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy the process group; the next `PartialState()` or `Accelerator()` creates another one.

        Args:
            group: A process group of torch to destroy instead; the default group stays.
        """
        if group is not None:
            dist.destroy_process_group(group)
            return
        self._backend.close()
        set_current_backend(None)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_backend": DetachedBackend.of(self._backend)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # A state that is unpickled on a rank becomes the state of that rank.
        self._backend = known_backend() or state["_backend"]

    def _repr_fields(self) -> dict[str, Any]:
        over = f" over {self.backend}" if self.backend else ""
        return {
            "Distributed": f"{self.distributed_type.value}{over}",
            "Processes": self.num_processes,
            "Process": f"{self.process_index} (on its machine: {self.local_process_index})",
            "Device": self.device,
        }

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._repr_fields().items())


class PartialState(ProcessStateView):
    """State of this process among the ranks, for scripts that train nothing.

    The process joins the process group, unless an `Accelerator` or `PartialState` of this thread has joined it already; then
    the state uses the backend of the newest one.

    Args:
        cpu: Compute on the CPU, even if other devices are available.
        **options: `backend`, `init_method` and `timeout` of `torch.distributed.init_process_group`.

    Raises:
        TypeError: If there is another option.
        RuntimeError: If the requested device is not available.
    """

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        self._use_backend(
            connect_default_backend(cpu=cpu, options=InitProcessGroupKwargs(**options).to_kwargs())
        )

    def set_device(self) -> None:
        """Make the device of this process the current one of torch again."""
        if self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)


class AcceleratorState(ProcessStateView):
    """State of an `Accelerator`: the process, the number format, and the plugins.

    A script that creates one gets the state of the newest `Accelerator` of this thread.

    Args:
        mixed_precision: None, or the number format that the `Accelerator` must have.
        cpu: Require that the `Accelerator` computes on the CPU.

    Raises:
        ValueError: If there is no `Accelerator`, or it has another number format or device.
    """

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False) -> None:
        state = current_state()
        if state is None:
            raise ValueError(
                "AcceleratorState() needs an Accelerator: none exists in this thread. Create one first: "
                "accelerator = Accelerator()."
            )
        if mixed_precision not in {None, state.mixed_precision} or (cpu and state.device.type != "cpu"):
            raise ValueError(
                f"AcceleratorState(mixed_precision={mixed_precision!r}, cpu={cpu}): the Accelerator has "
                f"mixed_precision={state.mixed_precision!r} and computes on {state.device}. Pass such options to Accelerator()."
            )
        vars(self).update(vars(state))

    @classmethod
    def of(cls, run: Run) -> AcceleratorState:
        """Return the state of an `Accelerator`."""
        state, options = cls.__new__(cls), run.options
        vars(state).update(
            _backend=run.backend,
            _distributed_type=run.strategy.distributed_type,
            _mixed_precision=options.settings.mixed_precision,
            _plugins={
                "dynamo_plugin": options.dynamo,
                "fsdp_plugin": options.fsdp_plugin,
                "parallelism_config": options.parallelism_config,
            },
            _engine=options.engine,
        )
        return state

    _distributed_type: DistributedType
    _mixed_precision: MixedPrecision
    _plugins: Mapping[str, Any]
    _engine: EngineOptions | None

    @property
    @override
    def distributed_type(self) -> DistributedType:
        """Return the kind of distribution, with that of the models: `NO`, `MULTI_GPU`, `FSDP`, ..."""
        return self._distributed_type

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Return the number format: `no`, `bf16` or `fp16`."""
        return self._mixed_precision

    @property
    def dynamo_plugin(self) -> Any:
        """Return the `TorchDynamoPlugin` by which models are compiled."""
        return self._plugins["dynamo_plugin"]

    @property
    def fsdp_plugin(self) -> Any:
        """Return the `FullyShardedDataParallelPlugin` by which models are sharded; None if they are not."""
        return self._plugins["fsdp_plugin"]

    @property
    def deepspeed_plugin(self) -> Any:
        """Return the selected options of DeepSpeed; None without DeepSpeed."""
        return None if self._engine is None else self._engine.plugin

    @property
    def deepspeed_plugins(self) -> dict[str, Any] | None:
        """Return all options of DeepSpeed by name; None without DeepSpeed."""
        return None if self._engine is None else self._engine.plugins

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the options of DeepSpeed with a name.

        Raises:
            ValueError: DeepSpeed is not in use, or has no options of this name.
        """
        plugins = self._require_engine().plugins
        if name not in plugins:
            raise ValueError(
                f"Invalid name of a DeepSpeedPlugin {name!r}: expected one of {', '.join(plugins)}."
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Use the options of DeepSpeed with a name for models that are prepared from now on.

        Raises:
            ValueError: DeepSpeed is not in use, or has no options of this name.
        """
        self._require_engine().select(name)

    def _require_engine(self) -> EngineOptions:
        if self._engine is None:
            engines = list_engines()
            titles = " or ".join(engine.title for engine in engines) or "An engine"
            keys = " or ".join(engine.key for engine in engines) or "its key"
            raise ValueError(
                f"{titles} is not in use: there is no plugin to get or select. Set {keys} in the profile, or pass "
                "Accelerator(deepspeed_plugin=...)."
            )
        return self._engine

    @property
    def parallelism_config(self) -> Any:
        """Return the same object as `Accelerator.parallelism_config`."""
        return self._plugins["parallelism_config"]

    @property
    def is_fsdp2(self) -> bool:
        """Return whether models are sharded by torch's `fully_shard`."""
        return self.fsdp_plugin is not None

    def _repr_fields(self) -> dict[str, Any]:
        return {**super()._repr_fields(), "Mixed precision": self.mixed_precision}


def is_initialized() -> bool:
    """Return whether an `Accelerator` exists in this thread."""
    return current_state() is not None


class GradientState:
    """State of gradient accumulation and of the current batch, `accelerator.gradient_state`.

    A script that creates one gets the state of the newest `Accelerator` of this thread. Before there is one, every backward
    pass ends with an optimizer step, and the object becomes the state of the next `Accelerator`.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._parts: tuple[Accumulation, ActiveLoops | None] | None = None

    @classmethod
    def of(cls, number: int, accumulation: Accumulation, loops: ActiveLoops) -> GradientState:
        """Return the state of the `Accelerator` with a number, of its accumulation and its open epoch iterators."""
        state = cls()
        state._number, state._parts = number, (accumulation, loops)
        return state

    def _find_parts(self) -> tuple[Accumulation, ActiveLoops | None]:
        if self._parts is None:
            newest = find_accelerator()
            if newest is None:
                return Accumulation(1), None
            vars(self).update(vars(newest.gradient_state))
            assert self._parts is not None
        return self._parts

    @property
    def _accumulation(self) -> Accumulation:
        return self._find_parts()[0]

    def _current_step(self) -> StepInfo | None:
        """Return the step of the innermost loop over a loader, or None outside of loops."""
        _, loops = self._find_parts()
        return None if loops is None else loops.current_step

    def __reduce__(self) -> tuple[Any, ...]:
        accumulation = self._accumulation
        return _unpickle_gradient_state, (self._number, accumulation.steps, accumulation.synced)

    @property
    def sync_gradients(self) -> bool:
        """Return whether the current backward pass completes an accumulation cycle."""
        return self._accumulation.synced

    @property
    def num_steps(self) -> int:
        """Return the number of micro-batches per optimizer step."""
        return self._accumulation.steps

    @property
    def in_dataloader(self) -> bool:
        """Return whether the script is in a loop over a prepared loader."""
        return self._current_step() is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Return whether the current batch is the last of the innermost loop."""
        step = self._current_step()
        return step is not None and step.is_last

    @property
    def remainder(self) -> int:
        """Return the number of samples without padding in the last global batch.

        0 means that there is no padding; the value is -1 before the last batch and outside of loops.
        """
        step = self._current_step()
        if step is None or not step.is_last:
            return -1
        return 0 if step.num_valid == step.batch_sizes else sum(step.num_valid)

    def __repr__(self) -> str:
        names = ("sync_gradients", "num_steps", "in_dataloader", "end_of_dataloader", "remainder")
        return "\n".join(f"{name}: {getattr(self, name)}" for name in names)


def _unpickle_gradient_state(number: int | None, steps: int, synced: bool) -> GradientState:
    """Return the state of the `Accelerator` of this process with a number, else a state outside of loops."""
    accelerator = None if number is None else find_accelerator(number)
    state: GradientState = GradientState() if accelerator is None else accelerator.gradient_state
    if number is not None and accelerator is None:
        accumulation = Accumulation(steps)
        accumulation.set_synced(synced)
        state._number, state._parts = number, (accumulation, None)  # noqa: SLF001 - of this module
    return state
