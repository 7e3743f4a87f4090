"""Functions on nested batches and collectives, under the name of Accelerate's `utils.operations`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn

from accel_runtime.accelerator.state import split_items
from accel_runtime.backends import current_backend, find_accelerator, rng, tensors
from accel_runtime.backends.base import Reduction
from accel_runtime.collectives.signatures import collective
from accel_runtime.data import metrics
from accel_runtime.foundation import nested
from accel_runtime.foundation.options import RNG_TYPES
from accel_runtime.training.compile import unwrap, unwrap_submodules

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "gather",
    "gather_object",
    "honor_type",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
]

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=nn.Module)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def is_torch_tensor(tensor: object) -> bool:
    """Return whether an object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def send_to_device(
    tensor: _T,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> _T:
    """Move the tensors of nested data, and other objects with a `to` method, to a device.

    Args:
        tensor: The data.
        device: The device.
        non_blocking: Do not wait for copies from pinned memory.
        skip_keys: Keys of mappings whose values are not moved.
    """
    target = torch.empty(0, device=device).device if isinstance(device, int) else torch.device(device)
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def send(data: Any) -> Any:
        if isinstance(data, Mapping):
            return nested.rebuild(data, {k: v if k in skipped else send(v) for k, v in data.items()})
        if isinstance(data, (list, tuple)):
            return nested.rebuild(data, [send(item) for item in data])
        return nested.send_to(data, target, non_blocking=non_blocking)

    sent = send(tensor) if skipped else nested.send_to(tensor, target, non_blocking=non_blocking)
    return cast("_T", sent)


def concatenate(data: Sequence[_T], dim: int = 0) -> _T:
    """Concatenate the tensors of batches with the same nesting.

    Args:
        data: At least one batch.
        dim: The dimension of concatenation.

    Raises:
        TypeError: If an object in the batches is not a tensor.
        ValueError: If there is no batch.
    """
    if not data:
        raise ValueError("concatenate() needs at least one batch: data is empty.")
    return cast("_T", _concatenate(data, dim))


def _concatenate(data: Sequence[Any], dim: int) -> Any:
    first = data[0]
    if isinstance(first, Mapping):
        keys = first.keys()  # iterating over a TensorDict yields rows
        return nested.rebuild(first, {k: _concatenate([batch[k] for batch in data], dim) for k in keys})
    if isinstance(first, (list, tuple)):
        return nested.rebuild(first, [_concatenate(items, dim) for items in zip(*data, strict=True)])
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"Cannot concatenate {type(first).__name__}: expected tensors.")
    return torch.cat(list(data), dim)


def find_batch_size(data: Any) -> int:
    """Return the number of rows of the first tensor of a batch.

    Raises:
        ValueError: If there is no tensor with rows.
    """
    for leaf in nested.leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise ValueError("Cannot find the batch size: the batch contains no tensor with rows.")


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Replace each leaf of nested data that `test_type` accepts by `func(leaf, *args, **kwargs)`.

    Raises:
        TypeError: If `error_on_other_type`, and `test_type` does not accept a leaf.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"Cannot apply {func!r} to {type(leaf).__name__}: test_type does not accept it.")
        return leaf

    return nested.map_leaves(apply, data, objects=False)


def honor_type(obj: _T, generator: Iterable[Any]) -> _T:
    """Return items as a list or tuple of the type of `obj`, which may be a named tuple."""
    return cast("_T", nested.rebuild(obj, list(generator)))


def listify(data: Any) -> Any:
    """Convert the tensors of nested data to lists of numbers."""
    return nested.map_tensors(lambda tensor: tensor.tolist(), data)


def convert_to_fp32(tensor: _T) -> _T:
    """Convert the fp16 and bf16 tensors of nested data to fp32."""
    half = (torch.float16, torch.bfloat16)
    return cast("_T", nested.map_tensors(lambda t: t.float() if t.dtype in half else t, tensor))


def convert_outputs_to_fp32(model_forward: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a forward pass to convert its fp16 and bf16 outputs to fp32."""

    @functools.wraps(model_forward)
    def forward(*args: _P.args, **options: _P.kwargs) -> _R:
        return convert_to_fp32(model_forward(*args, **options))

    return forward


def gather(tensor: _T) -> _T:
    """Return the tensors of all processes, concatenated along the first dimension; see `tensors.gather`."""
    return tensors.gather(tensor, current_backend())


def gather_object(object: list[_T]) -> list[_T]:  # noqa: A002 - the name scripts know
    """Return the lists of picklable objects of all processes, joined into one; see `metrics.gather_object`."""
    joined: list[_T] = metrics.gather_object(object, current_backend())
    return joined


def broadcast(tensor: _T, from_process: int = 0) -> _T:
    """Return the nested tensors of one process on all of them; see `tensors.broadcast`."""
    return tensors.broadcast(tensor, current_backend(), from_process)


def broadcast_object_list(object_list: list[_T], from_process: int = 0) -> list[_T]:
    """Replace the items of a list by the picklable objects of one process.

    Returns:
        The same list.
    """
    return metrics.broadcast_object_list(object_list, current_backend(), from_process)


def reduce(tensor: _T, reduction: Reduction = "mean", scale: float = 1.0) -> _T:
    """Return the tensors of all processes, combined element by element and scaled; see `tensors.reduce`."""
    return tensors.reduce(tensor, reduction, current_backend(), scale)


def pad_across_processes(tensor: _T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> _T:
    """Pad tensors to the largest length of all processes; see `tensors.pad_across_processes`."""
    return tensors.pad_across_processes(tensor, current_backend(), dim, pad_index, pad_first)


def split_between_processes(inputs: _T, apply_padding: bool = False) -> AbstractContextManager[_T]:
    """Return a context with the shard of the inputs of this process; see `PartialState.split_between_processes`."""
    data = current_backend().data_rank
    return nullcontext(split_items(inputs, data.rank, data.world_size, pad=apply_padding))


def wait_for_everyone() -> None:
    """Wait until all processes make this call."""
    current_backend().barrier()


@collective("generator")
def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Copy the state of a random number generator from the main process to all others.

    Args:
        rng_type: `torch`, `cuda`, `xpu`; or `generator` for the argument `generator`.
        generator: A generator of the script.

    Raises:
        ValueError: If the type is unknown, or only one of `rng_type="generator"` and `generator` is passed.
    """
    if rng_type not in RNG_TYPES:
        raise ValueError(f"Invalid rng_type {rng_type!r}: expected one of {', '.join(RNG_TYPES)}.")
    if (rng_type == "generator") != (generator is not None):
        raise ValueError(
            "rng_type='generator' needs the argument generator, and the other way round. Pass both or none."
        )
    backend = current_backend()
    if generator is not None:
        generator.set_state(backend.broadcast_object(generator.get_state(), "random states of generator"))
    else:
        rng.broadcast_rng_types([str(rng_type)], backend)


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Call `synchronize_rng_state` for each type; the generator is for the type `generator`."""
    for kind in rng_types:
        synchronize_rng_state(kind, generator if kind == "generator" else None)


def extract_model_from_parallel(
    model: _Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> _Model:
    """Return the module of the script from a prepared one.

    Args:
        model: A prepared model, or any module.
        keep_fp32_wrapper: If False, remove autocast from the forward pass.
        keep_torch_compile: If False, remove `torch.compile`.
        recursive: If True, also remove `DataParallel` and `DistributedDataParallel` wrappers inside the model.
    """
    newest = find_accelerator()
    original = (
        unwrap(
            model, lambda module: module, keep_autocast=keep_fp32_wrapper, keep_compiled=keep_torch_compile
        )
        if newest is None
        else newest.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
    )
    return cast("_Model", unwrap_submodules(original) if recursive else original)
