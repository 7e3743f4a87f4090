"""Collectives over nested data: every tensor of a batch in one call, checked before it is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accel_runtime import tree
from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.packing import gather_all, reduce_all

__all__ = ["MismatchError", "gather", "gather_valid", "reduce"]


class MismatchError(RuntimeError):
    """The ranks called different collectives, or with data of different shape; the message lists them."""


def gather(data: Any, backend: Backend) -> Any:
    """Every rank's tensors, concatenated along the first dimension in rank order.

    Args:
        data: A tensor, or tensors nested in dicts, lists and tuples, of equal shape on all ranks:
            `[n, ...]` becomes `[world_size * n, ...]`, and a scalar `[]` becomes `[world_size]`.
        backend: Carries it.

    Returns:
        The same structure; on one process `data` itself.

    Raises:
        TypeError: Something in `data` is no tensor.
        MismatchError: The ranks' data differ in structure, shape or dtype. Raised on every rank.
    """
    if backend.topology.world_size == 1:
        return data
    _agree("gather", data, backend)
    return _replaced(data, map(_concatenated, gather_all(_tensors(data), backend)))


def gather_valid(data: Any, steps: Any, backend: Backend) -> Any:
    """Stand-in until the branch lands."""
    if backend.topology.world_size == 1:
        return data
    everyone = backend.all_gather_objects(data)
    return _join(everyone, steps)


def _join(everyone: list[Any], steps: Any) -> Any:
    first = everyone[0]
    if isinstance(first, dict):
        return {k: _join([e[k] for e in everyone], steps) for k in first}
    if isinstance(first, torch.Tensor) and first.dim() == 0:
        return torch.stack(everyone)
    if isinstance(first, tuple):
        return tuple(_join(list(c), steps) for c in zip(*everyone, strict=True))
    cut = []
    at = [0] * len(everyone)
    for share in steps or []:
        for r, e in enumerate(everyone):
            k = len(e) // sum(s.sizes[r] for s in steps)
            cut.append(e[at[r] : at[r] + k * share.valid[r]])
            at[r] += k * share.sizes[r]
    cut = cut if steps else everyone
    return torch.cat(cut) if isinstance(first, torch.Tensor) else [x for c in cut for x in c]


def reduce(data: Any, reduction: Reduction, backend: Backend) -> Any:
    """Every tensor combined over the ranks, element by element.

    Args:
        data: A tensor, or tensors nested in dicts, lists and tuples, of equal shape on all ranks.
        reduction: `sum`, `mean`, `max` or `min`. The mean of whole numbers is a float32 tensor.
        backend: Carries it.

    Returns:
        The same structure, of new tensors.

    Raises:
        ValueError: An unknown reduction.
        TypeError: Something in `data` is no tensor.
        MismatchError: The ranks' data differ. Raised on every rank.
    """
    if reduction not in {"sum", "mean", "max", "min"}:
        raise ValueError(f"reduction must be sum, mean, max or min; it is {reduction!r}")
    _agree(f"reduce {reduction}", data, backend)

    exact = [t if reduction != "mean" or _divisible(t) else t.float() for t in _tensors(data)]
    return _replaced(data, reduce_all(exact, reduction, backend))


def _tensors(data: Any) -> list[torch.Tensor]:
    return [leaf.detach() for leaf in tree.leaves(data)]


def _replaced(data: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """The structure of `data` with other tensors, in the order of its own."""
    following = iter(tensors)
    return tree.map_leaves(lambda _: next(following), data)


def _divisible(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _agree(operation: str, data: Any, backend: Backend) -> None:
    """See to it that nothing of unequal shape is sent, and nothing but tensors.

    Raises:
        TypeError: Something in `data` is no tensor, on all ranks alike.
        MismatchError: The ranks differ.
    """
    found = list(tree.paths(data))
    _compare(f"{operation} " + ", ".join(f"{place}: {_described(leaf)}" for place, leaf in found), backend)
    for place, leaf in found:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"only tensors can be gathered or reduced; data{place} is {_described(leaf)}")


def _compare(call: str, backend: Backend) -> None:
    """Send eight bytes that tell whether all ranks make this very call."""
    if backend.topology.world_size == 1:
        return
    digest = hashlib.blake2b(call.encode(), digest_size=8).digest()
    print_ = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(backend.device)
    prints = backend.all_gather(print_)
    if bool((prints == prints[0]).all()):
        return
    calls = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(backend.all_gather_objects(call)))
    raise MismatchError(f"the ranks do not agree on this collective; each called:\n{calls}")


def _described(leaf: Any) -> str:
    """What has to be equal on all ranks, as text."""
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} on {leaf.device.type}"
    return type(leaf).__name__


def _concatenated(everyone: torch.Tensor) -> torch.Tensor:
    """`[world_size, n, ...]` as `[world_size * n, ...]`; `[world_size]` of scalars as it is."""
    return everyone.flatten(0, 1) if everyone.dim() > 1 else everyone


def _without_repeats(everyone: torch.Tensor, valid: tuple[int, ...], size: int) -> torch.Tensor:
    if everyone.dim() == 1 or all(count == size for count in valid):
        return _concatenated(everyone)
    rows = everyone.shape[1]
    if rows % size:
        raise ValueError(
            f"gather_for_metrics got a tensor of {rows} rows for a batch of {size} samples: which rows are "
            "repeats is not known. Give one or a whole number of rows a sample, or use gather()."
        )
    per_sample = rows // size
    return torch.cat([own[: count * per_sample] for own, count in zip(everyone, valid, strict=True)])


def _gather_objects(data: Any, valid: tuple[int, ...], size: int, backend: Backend) -> Any:
    """Data that holds more than tensors: it travels pickled, and is merged leaf by leaf."""
    everyone = backend.all_gather_objects(tree.map_tensors(lambda t: t.detach().cpu(), data))
    return tree.send(_merged(everyone, valid, size), backend.device)


def _merged(everyone: list[Any], valid: tuple[int, ...], size: int) -> Any:
    """The ranks' values of one place as one value: columns joined without repeats, the rest listed."""
    first = everyone[0]
    if isinstance(first, torch.Tensor):
        return _without_repeats(torch.stack(everyone), valid, size)
    if isinstance(first, Mapping):
        return tree.rebuilt(
            first, {key: _merged([own[key] for own in everyone], valid, size) for key in first}
        )
    if not isinstance(first, (list, tuple)):
        return everyone
    if _holds_columns(first):
        columns = zip(*everyone, strict=True)
        return tree.rebuilt(first, [_merged(list(items), valid, size) for items in columns])
    kept = [own[:count] if len(own) == size else own for own, count in zip(everyone, valid, strict=True)]
    return [item for own in kept for item in own]


def _holds_columns(items: list[Any] | tuple[Any, ...]) -> bool:
    """Whether the items are one a column, rather than one a sample."""
    if any(isinstance(item, torch.Tensor) for item in items):
        return True
    return isinstance(items, tuple) and any(isinstance(item, (Mapping, list, tuple)) for item in items)
