"""What DistributedDataParallel remembers from step to step: which gradients travel together, and whether buffers do.

The sum of three or more ranks depends on where in a message a number stands, and after its first step DDP arranges
messages anew. A fresh one would thus add up the first gradients after a resume in another order than the run that
went on. What is asked here of torch has no public name (torch 2.9 to 2.13); where it is missing, nothing is kept,
and the last bits of one step may be others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["captured", "restored"]


_DIST: Any = torch.distributed


def captured(model: DistributedDataParallel) -> dict[str, Any]:
    """What it goes on from: the same on all ranks, which call this together. Names, numbers and lists."""
    return {"buckets": _layout(model), "synced": model.require_forward_param_sync}


def restored(model: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Go on from what `captured` gave, of a model with the same parameters; of another's, nothing is taken over."""
    model.require_forward_param_sync = bool(state["synced"])
    wanted = state["buckets"]
    if wanted is None or model.static_graph or wanted == _layout(model):
        return
    with suppress(AttributeError, TypeError):
        _arrange(model, wanted)


def _layout(model: Any) -> list[list[str]] | None:
    """The names of the parameters in every bucket, once one that is due has been arranged anew."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    try:
        with suppress(RuntimeError):  # the step before is not complete: the next forward pass says so
            model.reducer._rebuild_buckets()  # noqa: SLF001
        with _WithoutCopies():  # type: ignore[no-untyped-call]
            buckets = model.reducer._get_zeros_like_grad_buckets()  # noqa: SLF001
    except AttributeError:
        return None
    return [[names.get(id(parameter), "") for parameter in bucket.parameters()] for bucket in buckets]


def _arrange(model: Any, wanted: list[list[str]]) -> None:
    parameters, sparse = model._build_params_for_reducer()  # noqa: SLF001
    named = dict(model.module.named_parameters())
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    found = [[places.get(id(named.get(name)), -1) for name in bucket] for bucket in wanted]
    if sorted(place for bucket in found for place in bucket) != list(range(len(parameters))):
        return
    names = model._build_debug_param_to_name_mapping(parameters)  # noqa: SLF001
    with _Assigned(lambda *_: (found[::-1], [model.bucket_bytes_cap] * len(found))):
        model._ddp_init_helper(parameters, sparse, names, model.static_graph)  # noqa: SLF001
    for hook, state in model._comm_hooks:  # noqa: SLF001
        _DIST._register_comm_hook(model.reducer, state, hook)  # noqa: SLF001


class _Assigned:
    """Inside, DDP divides parameters into buckets as it is told."""

    def __init__(self, assign: Callable[..., Any]) -> None:
        self._assign = assign

    def __enter__(self) -> None:
        self._own = _DIST._compute_bucket_assignment_by_size  # noqa: SLF001
        _DIST._compute_bucket_assignment_by_size = self._assign  # noqa: SLF001

    def __exit__(self, *_: object) -> None:
        _DIST._compute_bucket_assignment_by_size = self._own  # noqa: SLF001


class _WithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, zeros of a tensor's form are that tensor: only what stands in buckets is wanted, not their memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.ops.aten.zeros_like.default else func(*args, **(kwargs or {}))
