"""Functions over nested batches that need no other process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from accel_runtime import tree

__all__ = [
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "honor_type",
    "is_torch_tensor",
    "listify",
    "recursively_apply",
    "send_to_device",
]


def is_torch_tensor(tensor: object) -> bool:
    """Whether this is a tensor."""
    return isinstance(tensor, torch.Tensor)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Nested data with its tensors, and what else can move itself, on a device.

    Args:
        tensor: The data.
        device: Where to.
        non_blocking: Do not wait for copies from pinned memory.
        skip_keys: What stands under these keys of a mapping stays where it is.
    """
    target = torch.empty(0, device=device).device if isinstance(device, int) else torch.device(device)
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def sent(data: Any) -> Any:
        if isinstance(data, Mapping):
            return tree.rebuilt(data, {k: v if k in skipped else sent(v) for k, v in data.items()})
        if isinstance(data, (list, tuple)):
            return tree.rebuilt(data, [sent(item) for item in data])
        return tree.send(data, target, non_blocking=non_blocking)

    return sent(tensor) if skipped else tree.send(tensor, target, non_blocking=non_blocking)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Batches of the same nesting as one: their tensors are concatenated.

    Args:
        data: At least one batch.
        dim: Along which dimension.

    Raises:
        TypeError: Something in the batches is no tensor.
        ValueError: There is no batch.
    """
    if not data:
        raise ValueError("there is nothing to concatenate")
    first = data[0]
    if isinstance(first, Mapping):
        keys = first.keys()  # a TensorDict itself iterates over rows
        return tree.rebuilt(first, {k: concatenate([batch[k] for batch in data], dim) for k in keys})
    if isinstance(first, (list, tuple)):
        return tree.rebuilt(first, [concatenate(items, dim) for items in zip(*data, strict=True)])
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"only tensors can be concatenated; there is {type(first).__name__}")
    return torch.cat(list(data), dim)


def find_batch_size(data: Any) -> int:
    """Rows of the first tensor of a batch.

    Raises:
        ValueError: There is no tensor with rows in it.
    """
    for leaf in tree.leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise ValueError("there is no tensor with rows in this batch, so it has no size")


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Nested data with `func(leaf, *args, **kwargs)` in place of each leaf that `test_type` accepts.

    Raises:
        TypeError: `error_on_other_type`, and it does not accept a leaf.
    """

    def applied(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"{func!r} cannot be applied to {type(leaf).__name__}")
        return leaf

    return tree.map_leaves(applied, data)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items as a list or tuple of `obj`'s own type, named tuples too."""
    return tree.rebuilt(obj, list(generator))


def listify(data: Any) -> Any:
    """Nested data with numbers, in lists, in place of tensors."""
    return tree.map_tensors(lambda tensor: tensor.tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Nested data with its fp16 and bf16 tensors in fp32."""
    half = (torch.float16, torch.bfloat16)
    return tree.map_tensors(lambda t: t.float() if t.dtype in half else t, tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass whose fp16 and bf16 outputs are fp32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **options: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **options))

    return forward
