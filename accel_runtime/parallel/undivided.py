"""Parameters that every process of a tensor parallel group has whole: their gradients have to be equal there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_runtime.checkpoint.live import some
from accel_runtime.parallel.boxes import local

__all__ = ["check"]

_NEAR = 1e-2
"""How much norms of the same gradient may differ, relative to the larger: rounding is far less, heads are far more."""


@torch.no_grad()
def check(models: Iterable[nn.Module], tp: DeviceMesh) -> None:
    """See whether what a plan leaves whole learns the same on all processes that divide layers; they call it together.

    A module between `colwise` and `rowwise` sees a part of the activations. If it has parameters, and the plan says nothing
    of them, each process trains its own, and nothing else would show it.

    Args:
        models: Divided, after a backward pass.
        tp: The processes that divide layers.

    Raises:
        ValueError: Gradients differ; the message names parameters.
    """
    whole = {
        name: parameter
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not _divided(parameter)
    }
    if not whole:
        return
    norms = torch.stack([_norm(parameter.grad) for parameter in whole.values()])
    largest, least = norms.to(tp.device_type), norms.to(tp.device_type, copy=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=tp.get_group())
    dist.all_reduce(least, dist.ReduceOp.MIN, group=tp.get_group())
    apart = (largest - least > _NEAR * largest).tolist()
    if names := [name for name, differs in zip(whole, apart, strict=True) if differs]:
        raise ValueError(
            f"tensor parallel: the gradients of {some(names)} differ between the processes that divide layers, and would "
            "drift apart. Such a module is between colwise and rowwise and sees a part only: have parallel.tp_plan say "
            "replicated_with_grad_allreduce of it"
        )


def _divided(parameter: nn.Parameter) -> bool:
    """Whether tensor parallel divides it; `fully_shard` divides others too, alike on all processes of a group."""
    names: Mapping[str, object] = dict(
        zip(
            getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or (),
            getattr(parameter, "placements", ()),
            strict=False,
        )
    )
    placement = names.get("tp")
    return placement is not None and not getattr(placement, "is_replicate", bool)()


def _norm(gradient: torch.Tensor | None) -> torch.Tensor:
    """The norm of this process's part: `[]`; 0 where there is none, or an overflow, which the loss scaler sees to."""
    if gradient is None:
        return torch.zeros((), dtype=torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(local(gradient).float())
    return norm.nan_to_num(0.0, 0.0, 0.0).cpu()
