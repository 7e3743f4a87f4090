"""Functions of deepspeed, and its sharded optimizers, whose gradients and states have no public interface.

Seen in deepspeed 0.19.8. No other module touches a private member of deepspeed.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from accel_runtime.extensions.deepspeed.compiled_operators import (
    check_installation,
    prepare_environment,
    provide_local_rank,
)
from accel_runtime.extensions.deepspeed.fragments import Fragment, FragmentStates
from accel_runtime.extensions.deepspeed.settings import ZERO_3

check_installation()
prepare_environment("cuda" if torch.cuda.is_available() else "cpu")
with warnings.catch_warnings():
    # Of torch, at each import of modules that deepspeed uses.
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.utils import combine_grad_norm_groups
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

__all__ = [
    "SCHEDULERS",
    "VERSION",
    "DynamicLossScaler",
    "ShardedOptimizer",
    "build_engine",
    "gather",
    "hide_deprecations",
    "hide_warnings",
    "is_available",
    "is_partitioned",
    "keep_graph",
    "set_leaf_modules",
]

VERSION: str = deepspeed.__version__
SCHEDULERS: Mapping[str, Any] = {
    name: getattr(lr_schedules, name)
    for name in ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
}
"""deepspeed's schedulers by name."""
_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""Attribute of the ZeRO optimizer with the shards of gradients by the id of the parameter."""
_LOG = logging.getLogger("DeepSpeed")
_LOG.setLevel(logging.WARNING)
# Collectives in the shared memory of CPUs, which every start would wait half a minute for to be compiled.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def build_engine(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Mapping[str, Any]) -> Any:
    """Return deepspeed's engine for a model, equal on all ranks, and its optimizer, which it changes in place; collective."""
    hide_deprecations()
    # It warns of every optimizer that is not its own; which ones can be trained is checked before.
    quiet = nullcontext() if "log_level" in config else hide_warnings()
    with warnings.catch_warnings(), _skip_broadcast(), _accept_number_formats(), _set_local_rank(), quiet:
        warnings.simplefilter("ignore")  # as above: it imports more modules here
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
        )
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function"):
        if hasattr(offload, name):
            setattr(offload, name, _leave_inference_mode(getattr(offload, name)))
    return engine


def hide_deprecations() -> None:
    """Hide the warnings of torch 2.13 about names of collectives that deepspeed uses, one at each call."""
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


@contextmanager
def hide_warnings() -> Iterator[None]:
    """Return a context in which deepspeed logs errors only: its schedulers warn of their own construction."""
    level = _LOG.level
    _LOG.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _LOG.setLevel(level)


@contextmanager
def _accept_number_formats() -> Iterator[None]:
    """Build engines of stage 3 whatever the number format of the first parameter is, which may be a frozen table of integers.

    deepspeed creates modules in that format, of which there are none here, and refuses all but three.
    """
    init = parameter_offload.Init

    def build(*arguments: Any, dtype: torch.dtype, **options: Any) -> Any:
        known = {torch.float16, torch.bfloat16, torch.float32}
        return init(*arguments, dtype=dtype if dtype in known else torch.float32, **options)

    parameter_offload.Init = build
    try:
        yield
    finally:
        parameter_offload.Init = init


@contextmanager
def _skip_broadcast() -> Iterator[None]:
    """Build engines without the broadcast of all parameters, which are equal; it raises for parameters without dimensions."""
    engine_class = deepspeed.DeepSpeedEngine
    broadcast = engine_class._broadcast_model  # noqa: SLF001
    engine_class._broadcast_model = lambda _: None  # noqa: SLF001
    try:
        yield
    finally:
        engine_class._broadcast_model = broadcast  # noqa: SLF001


@contextmanager
def _set_local_rank() -> Iterator[None]:
    """Build engines in a process without a launcher, too."""
    with provide_local_rank() as is_missing:
        if is_missing:
            # It also reads the variable in forward passes, to compare the only rank with itself.
            partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
        yield


def _leave_inference_mode(function: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Return a function that gathers parameters as tensors that a later backward pass can use."""

    @functools.wraps(function)
    def call(module: nn.Module) -> None:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):
                function(module)
        else:
            function(module)

    return call


def set_leaf_modules(model: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    """Let stage 3 gather the parameters of modules of these classes together."""
    deepspeed.utils.set_z3_leaf_modules(model, list(classes))


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether stage 3 has partitioned a parameter."""
    return hasattr(parameter, "ds_id")


def is_available(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is full on this rank."""
    return not is_partitioned(parameter) or parameter.ds_status.name == "AVAILABLE"  # type: ignore[attr-defined]


@contextmanager
def gather(parameters: Sequence[nn.Parameter], *, writer: int | None = None) -> Iterator[None]:
    """Return a context in which partitioned parameters are full; `writer` is the rank whose changes are kept."""
    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=writer):
        yield


def _refuse_group(_: Any) -> None:
    raise RuntimeError(
        "add_param_group() is not supported with ZeRO, which has sharded the parameters of the optimizer. Add all groups before "
        "prepare()."
    )


@contextmanager
def keep_graph(models: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context for a backward pass whose graph is used again.

    Stage 3 gathers the parameters of a module in as many backward passes as there were forward passes.
    """
    modules = {module: None for model in models for module in model.modules()}
    counts = [
        (module, name, vars(module)[name])
        for module in modules
        for name in ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
        if name in vars(module)
    ]
    yield
    for module, name, count in counts:
        setattr(module, name, count)


class ShardedOptimizer:
    """The ZeRO optimizer of an engine: its gradients, norm, step and state.

    The engine itself is not called in training. Its forward pass loses a loss if two follow each other, and its backward pass
    ends an accumulation cycle; the optimizer's hooks on parameters work without both.

    Args:
        engine: deepspeed's engine.
        stage: The ZeRO stage, 1 to 3.
    """

    def __init__(self, engine: Any, stage: int) -> None:
        self._zero: Any = engine.optimizer
        self._engine = engine  # keeps what the hooks of the module use
        self.stage = stage
        """The ZeRO stage."""
        self._shards_gradients, self._shards_parameters = stage > 1, stage == ZERO_3
        vars(self._zero.optimizer)["add_param_group"] = _refuse_group
        self.fragments = self._list_fragments()
        """The fragments of this rank, which has none of some parameters."""
        self.states = FragmentStates(self._zero.optimizer, self.fragments)
        """The states of the optimizer by parameter."""

    # Backward passes -------------------------------------------------------------------

    def begin_cycle(self) -> None:
        """Clear what an earlier cycle has left in buffers.

        deepspeed overwrites the gradient of a parameter in the first backward pass only. One that it does not reach would have
        the gradient of the cycle before.
        """
        zero = self._zero
        if self._shards_parameters:
            zero.grad_partitions_flat_buffer.zero_()
        flats = self.list_flats() if self._is_offloaded else ()
        for tensor in (
            *(flat.grad for flat in flats),
            *getattr(zero, "accumulated_grads_in_cpu", {}).values(),
        ):
            if tensor is not None:
                tensor.zero_()

    def begin_backward(self) -> None:
        """Add the gradients of the next backward pass to those of the cycle."""
        zero = self._zero
        zero.set_gradient_accumulation_boundary(False)
        zero.clear_backward_seen_flag()
        if self._shards_parameters:
            zero.backward_prologue()

    def divide_backward(self) -> None:
        """Combine the gradients of a backward pass as they are, and add the following ones to them; collective."""
        if self._shards_gradients:
            self._zero.overlapping_partition_gradients_reduce_epilogue()
            self._zero.clear_backward_seen_flag()

    def end_backward(self, *, has_gradients: bool) -> None:
        """Combine the gradients of a backward pass over the ranks, if the stage shards them; collective."""
        if has_gradients and self._shards_gradients:
            self._zero.overlapping_partition_gradients_reduce_epilogue()
        if self._shards_parameters:
            self._zero.backward_epilogue()

    def finish_cycle(self) -> None:
        """Make the gradients of a cycle final; collective in stage 1."""
        if self._shards_gradients:
            self._zero.finalize_gradient_accumulation_boundary()
        else:
            self._zero.set_gradient_accumulation_boundary(True)
            self._zero.reduce_gradients()

    def compute_norm(self) -> torch.Tensor:
        """Return the norm of the final gradients of all ranks: `[]`; collective."""
        self._zero.custom_loss_scaler, self._zero.external_loss_scale = True, 1.0
        norm = (
            combine_grad_norm_groups(self._zero._get_norm_groups())  # noqa: SLF001
            if self._shards_parameters
            else self._zero.scaled_global_norm()
        )
        return torch.as_tensor(norm, dtype=torch.float32)

    def compute_unfinished_norm(self) -> torch.Tensor:
        """Return the norm of the gradients of a cycle so far: `[]`; in stage 1 of this rank, else of all ranks, collective."""
        if not self._shards_gradients:
            gradients = [p.grad for group in self._zero.bit16_groups for p in group if p.grad is not None]
            norms = torch.stack([gradient.float().norm() for gradient in gradients])
            return torch.as_tensor(torch.linalg.vector_norm(norms))
        parts = [part.float().square().sum() for _, part in self.list_gradients()]
        squares = torch.stack(parts).sum() if parts else torch.zeros(())
        squares = squares.to(deepspeed.accelerator.get_accelerator().current_device_name())
        torch.distributed.all_reduce(squares)
        norm: torch.Tensor = squares.sqrt()
        return norm

    def step(self, divisor: float, reached: Collection[nn.Parameter]) -> bool:
        """Divide the final gradients, step the reached parameters, and clear gradients; return False if they were not finite.

        Collective.
        """
        zero = self._zero
        self.states.set_reached(reached)
        zero.custom_loss_scaler, zero.external_loss_scale = True, divisor
        zero.step()
        zero.zero_grad()
        return not zero.overflow

    def clear_gradients(self) -> None:
        """Discard the gradients of a cycle."""
        zero = self._zero
        zero.clear_backward_seen_flag()
        zero.zero_grad()
        if self._is_offloaded:
            zero.reset_cpu_buffers()
        if self._shards_parameters:
            zero._offload_boundary_param_ids = set()  # noqa: SLF001
            zero.inf_or_nan_tracker.zero_()
            return
        zero.micro_step_id = -1
        zero._release_preflattened_grad_buffers()  # noqa: SLF001
        for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))
        zero._offload_accumulated_param_ids = set()  # noqa: SLF001

    def list_gradients(self) -> list[tuple[Fragment, torch.Tensor]]:
        """Return the parts of the gradients of an unfinished cycle that this rank has, `[length]`, to read or write."""
        if self._shards_parameters:
            partitions: dict[int, torch.Tensor] = getattr(self._zero, _PARTITIONS)
            return [(f, partitions[f.parameter.ds_id].narrow(0, 0, f.length)) for f in self.fragments]  # type: ignore[attr-defined]
        return [(f, gradient) for f in self.fragments if (gradient := self._find_gradient(f)) is not None]

    def _find_gradient(self, fragment: Fragment) -> torch.Tensor | None:
        zero, parameter, number = self._zero, fragment.parameter, fragment.group
        if not self._shards_gradients:
            return None  # in `parameter.grad`
        if zero._use_compact_grad_partition_buffer(number):  # noqa: SLF001
            buffer = zero._get_compact_grad_partition_buffer(number).flat_partition  # noqa: SLF001
            return fragment.select(buffer.view(-1))
        if zero.cpu_offload:
            gradient = zero.accumulated_grads_in_cpu.get(zero.get_param_id(parameter))
        else:
            parameters = zero.params_in_partition[number]
            position = next(i for i, other in enumerate(parameters) if other is parameter)
            gradients = zero.all_grad_tensors.get(number)
            gradient = None if gradients is None else gradients[position]
        return None if gradient is None else gradient.view(-1).narrow(0, fragment.offset, fragment.length)

    def begin_restored_cycle(self) -> None:
        """Allocate the gradients of a cycle, to be written by `list_gradients`; further backward passes add to them."""
        zero = self._zero
        if not self._shards_gradients:
            return
        zero.micro_step_id = 1
        if self._shards_parameters:
            zero._offload_boundary_param_ids |= {p.ds_id for group in zero.fp16_groups for p in group}  # noqa: SLF001
            return
        for number, parameters in enumerate(zero.params_in_partition):
            ids = [zero.get_param_id(parameter) for parameter in parameters]
            if zero.cpu_offload:
                zero._offload_accumulated_param_ids |= set(ids)  # noqa: SLF001
                for key, parameter in zip(ids, parameters, strict=True):
                    zero.accumulated_grads_in_cpu[key] = torch.zeros(
                        parameter.numel(), dtype=parameter.dtype, device=zero.device
                    )
            else:
                zero.all_grad_tensors[number] = [
                    torch.zeros_like(parameter, dtype=zero.gradient_accumulation_dtype)
                    for parameter in parameters
                ]

    # State -----------------------------------------------------------------------------

    @property
    def is_swapped(self) -> bool:
        """Return whether the master weights are on a local disk."""
        return bool(getattr(self._zero, "swap_optimizer", False))

    @property
    def _is_offloaded(self) -> bool:
        return bool(self._zero.offload_optimizer if self._shards_parameters else self._zero.cpu_offload)

    def list_flats(self) -> list[torch.Tensor]:
        """Return the master weights of each group of parameters on this rank: `[n]`."""
        zero = self._zero
        flats: list[torch.Tensor] = (
            zero.fp32_partitioned_groups_flat
            if self._shards_parameters
            else zero.single_partition_of_fp32_groups
        )
        return flats

    def _list_fragments(self) -> list[Fragment]:
        fragments = [
            fragment
            for number in range(len(self.list_flats()))
            for fragment in (
                self._list_partitions(number) if self._shards_parameters else self._list_overlaps(number)
            )
        ]
        return [fragment for fragment in fragments if fragment.length > 0]

    def _list_partitions(self, number: int) -> Iterator[Fragment]:
        """Yield the fragments of a group in stage 3, which divides each parameter apart."""
        zero, flat, rank = self._zero, self.list_flats()[number], torch.distributed.get_rank()
        for parameter in zero.fp16_groups[number]:
            _, start, size = zero.grad_position[zero.get_param_id(parameter)]
            offset = rank * parameter.partition_numel()
            yield Fragment(parameter, number, flat, start, offset, min(size, parameter.ds_numel - offset))

    def _list_overlaps(self, number: int) -> Iterator[Fragment]:
        """Yield the fragments of a group in stages 1 and 2, which divide all of its parameters together."""
        zero, flat = self._zero, self.list_flats()[number]
        size = int(zero.partition_size[number])
        first = torch.distributed.get_rank() * size
        for parameter, position in zip(
            zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number], strict=True
        ):
            begin, end = max(position, first), min(position + parameter.numel(), first + size)
            yield Fragment(parameter, number, flat, begin - first, begin - position, end - begin)

    def refresh_parameters(self) -> None:
        """Set the parameters of the model to the master weights; collective."""
        zero = self._zero
        if not self._shards_parameters:
            zero.update_lp_params()
            return
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001
        if persistent := zero.persistent_parameters:
            persistent[0].all_gather(persistent)

    def refresh_master_weights(self) -> None:
        """Set master weights to those parameters of the model that the script has changed, and keep the digits of the others."""
        for fragment in self.fragments:
            master = fragment.select(fragment.flat.detach())
            values: torch.Tensor = (
                fragment.parameter.ds_tensor.narrow(0, 0, fragment.length)  # type: ignore[attr-defined]
                if self._shards_parameters
                else fragment.parameter.detach().view(-1).narrow(0, fragment.offset, fragment.length)
            ).to(master.device)
            master.copy_(torch.where(values == master.to(values.dtype), master, values.to(master.dtype)))
