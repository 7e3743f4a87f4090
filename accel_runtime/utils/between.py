"""Functions between processes that are not told the backend: they use the current one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from accel_runtime import collectives, rng, splitting
from accel_runtime.backends.base import Reduction
from accel_runtime.current import current_backend
from accel_runtime.unwrapping import unwrap_parts, unwrapped

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "extract_model_from_parallel",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "split_between_processes",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "wait_for_everyone",
]

_T = TypeVar("_T")


def gather(tensor: Any) -> Any:
    """Every process's tensors, concatenated along the first dimension; see `collectives.gather`."""
    return collectives.gather(tensor, current_backend())


def gather_object(object: list[_T]) -> list[_T]:  # noqa: A002 - the name scripts know
    """Every process's list of picklable objects, joined into one; see `collectives.gather_object`."""
    joined: list[_T] = collectives.gather_object(object, current_backend())
    return joined


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The tensors of one process on all of them, in the same nesting; see `collectives.broadcast`."""
    return collectives.broadcast(tensor, current_backend(), from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """One process's picklable objects, written into the list on all of them.

    Returns:
        The list given.
    """
    return collectives.broadcast_object_list(object_list, current_backend(), from_process)


def reduce(tensor: Any, reduction: Reduction = "mean", scale: float = 1.0) -> Any:
    """Every process's tensors combined element by element, then multiplied; see `collectives.reduce`."""
    return collectives.reduce(tensor, reduction, current_backend(), scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Tensors made as long as the longest of all processes; see `collectives.pad_across_processes`."""
    return collectives.pad_across_processes(tensor, current_backend(), dim, pad_index, pad_first)


def split_between_processes(inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
    """A context that gives this process's part of the inputs; see `Processes.split_between_processes`."""
    place = current_backend().data
    return nullcontext(splitting.split(inputs, place.rank, place.world_size, pad=apply_padding))


def wait_for_everyone() -> None:
    """Wait until every process is here."""
    current_backend().barrier()


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Give every process the first one's state of one random number generator.

    Args:
        rng_type: `torch`, `cuda`, `xpu`; or `generator` for the one given.
        generator: A generator of the script's own.

    Raises:
        ValueError: An unknown kind; or `generator` without one, or one without `generator`.
    """
    if rng_type not in rng.RNG_TYPES:
        raise ValueError(f"rng_type must be one of {', '.join(rng.RNG_TYPES)}; it is {rng_type!r}")
    if (rng_type == "generator") != (generator is not None):
        raise ValueError("rng_type='generator' and a generator go together; only one of them was given")
    backend = current_backend()
    if generator is not None:
        generator.set_state(backend.broadcast(generator.get_state()))
    else:
        rng.share_states([str(rng_type)], backend)


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """`synchronize_rng_state` for each kind; the generator is for the kind `generator`."""
    for kind in rng_types:
        synchronize_rng_state(kind, generator if kind == "generator" else None)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The script's own module out of a prepared one.

    Args:
        model: A prepared model, or any module.
        keep_fp32_wrapper: False also takes autocast off its forward pass.
        keep_torch_compile: False also gives the module a compiled one was made from.
        recursive: True also replaces modules inside the model that the script has put into `DataParallel` or
            `DistributedDataParallel` by the modules in them.
    """
    original = unwrapped(
        model, current_backend(), keep_autocast=keep_fp32_wrapper, keep_compiled=keep_torch_compile
    )
    return unwrap_parts(original) if recursive else original
