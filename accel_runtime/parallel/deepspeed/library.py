"""What is used of deepspeed: functions of the library, and the members of its optimizers that have no public name.

Seen in deepspeed 0.19.8. No other module touches a private member of deepspeed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.utils import combine_grad_norm_groups

__all__ = [
    "VERSION",
    "DynamicLossScaler",
    "Fragment",
    "ShardedOptimizer",
    "build_engine",
    "gather",
    "is_partitioned",
]

VERSION: str = deepspeed.__version__
_STAGE_OF_PARAMETERS = 3
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def build_engine(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Mapping[str, Any]) -> Any:
    """Return deepspeed's engine for a model and its optimizer, which it changes in place; collective."""
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
    )
    return engine


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether stage 3 has partitioned a parameter."""
    return hasattr(parameter, "ds_id")


@contextmanager
def gather(parameters: Sequence[nn.Parameter], *, writer: int | None = None) -> Iterator[None]:
    """Return a context in which partitioned parameters are full; `writer` is the rank whose changes are kept."""
    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=writer):
        yield


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter whose master weights and optimizer state this rank has, in a flat tensor of a group."""

    parameter: nn.Parameter
    flat: torch.Tensor
    """The master weights of a group of parameters on this rank, `[n]`; the key of their state."""
    start: int
    """Offset in `flat`."""
    offset: int
    """Offset in the flattened parameter."""
    length: int

    def select(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the fragment of a tensor with the shape of `flat`: `[length]`."""
        return flat.narrow(0, self.start, self.length)


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
        self._shards_gradients, self._shards_parameters = stage > 1, stage == _STAGE_OF_PARAMETERS

    # Backward passes -------------------------------------------------------------------

    def begin_cycle(self) -> None:
        """Clear what an earlier cycle has left in buffers.

        deepspeed overwrites the gradient of a parameter in the first backward pass only. One that it does not reach would have
        the gradient of the cycle before.
        """
        zero = self._zero
        if self._shards_parameters:
            zero.grad_partitions_flat_buffer.zero_()
        flats = self._list_flats() if self._is_offloaded else ()
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

    def step(self, divisor: float) -> bool:
        """Divide the final gradients, step, and clear them; return False if they were not finite. Collective."""
        zero = self._zero
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

    # State -----------------------------------------------------------------------------

    @property
    def _is_offloaded(self) -> bool:
        return bool(self._zero.offload_optimizer if self._shards_parameters else self._zero.cpu_offload)

    def _list_flats(self) -> list[torch.Tensor]:
        zero = self._zero
        flats: list[torch.Tensor] = (
            zero.fp32_partitioned_groups_flat
            if self._shards_parameters
            else zero.single_partition_of_fp32_groups
        )
        return flats

    def list_fragments(self) -> list[Fragment]:
        """Return the fragments of this rank."""
        zero, rank = self._zero, torch.distributed.get_rank()
        fragments = []
        for number, flat in enumerate(self._list_flats()):
            if self._shards_parameters:
                for parameter in zero.fp16_groups[number]:
                    _, start, size = zero.grad_position[zero.get_param_id(parameter)]
                    offset = rank * parameter.partition_numel()
                    fragments.append(
                        Fragment(
                            parameter, flat, start, offset, max(min(size, parameter.ds_numel - offset), 0)
                        )
                    )
                continue
            size = int(zero.partition_size[number])
            parameters = zip(
                zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number], strict=True
            )
            for parameter, position in parameters:
                begin, end = max(position, rank * size), min(position + parameter.numel(), (rank + 1) * size)
                if begin < end:
                    fragments.append(
                        Fragment(parameter, flat, begin - rank * size, begin - position, end - begin)
                    )
        return fragments

    def get_state(self, flat: torch.Tensor) -> dict[str, Any]:
        """Return the state of the wrapped optimizer for a flat tensor."""
        state: dict[str, Any] = self._zero.optimizer.state.get(flat, {})
        return state

    def set_state(self, flat: torch.Tensor, state: dict[str, Any]) -> None:
        """Set the state of the wrapped optimizer for a flat tensor."""
        self._zero.optimizer.state[flat] = state

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
        for fragment in self.list_fragments():
            master = fragment.select(fragment.flat.detach())
            values: torch.Tensor = (
                fragment.parameter.ds_tensor.narrow(0, 0, fragment.length)  # type: ignore[attr-defined]
                if self._shards_parameters
                else fragment.parameter.detach().view(-1).narrow(0, fragment.offset, fragment.length)
            ).to(master.device)
            master.copy_(torch.where(values == master.to(values.dtype), master, values.to(master.dtype)))
