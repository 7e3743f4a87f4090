"""Gather the results of all ranks for samples without padding, and objects of any kind."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.backends.tensors import check_rank, find_cure, gather_tensors, replace_tensors
from accel_runtime.collectives.handshake import MismatchError, all_gather_objects, call_at_site
from accel_runtime.collectives.signatures import collective
from accel_runtime.environment.layouts import name_dimension
from accel_runtime.environment.text import encode_text
from accel_runtime.environment.topology import RankGrid
from accel_runtime.foundation import nested
from accel_runtime.foundation.epoch_progress import StepInfo
from accel_runtime.foundation.nested import FlattenedData, flatten_data, list_locations

__all__ = [
    "broadcast_object_list",
    "drop_model_parallel_duplicates",
    "gather_object",
    "gather_samples",
]


def gather_samples(
    data: Any, steps: Sequence[StepInfo], backend: Backend, *, as_objects: bool = False
) -> Any:
    """Gather the results of all ranks for the samples of some steps: every sample once, in dataset order.

    Model-parallel ranks have the same batch, and the first of them counts. Ranks that shard sequences must pass equal values.

    Args:
        data: As for `gather`: the tensors of a rank contain its batches of these steps one after the other, with a whole
            number of rows per sample; scalars are kept from every rank. If data contain more than tensors, a list has one
            entry per sample; columns go into a dict or a tuple, or into a list with tensors. A list of another length is
            kept in full, from every rank.
        steps: Usually one; several to gather once after a loop; none gathers all rows.
        backend: Connects the ranks.
        as_objects: Send tensors as objects too, so that a list of tensors has one entry per sample.

    Returns:
        The same structure; `data` itself on one process without padding.

    Raises:
        ValueError: The first dimension of a tensor does not fit the batches, or ranks that shard sequences passed different
            values. Raised on every rank.
        TypeError: A leaf is a kind of tensor whose rows torch cannot concatenate. Raised on every rank.
        MismatchError: Data or calls differ between ranks. Raised on every rank.
        StallError: A rank does not join.
    """
    sizes = GatheredSteps(tuple(step.num_valid for step in steps), tuple(step.batch_sizes for step in steps))
    is_list = as_objects and isinstance(data, (list, tuple))
    flat = flatten_data(data)
    refusal = None if is_list or flat.unsupported is None else _find_refusal(flat.structure)
    if backend.data_rank.world_size == backend.grid.size("sequence") == 1:
        if refusal:
            raise TypeError(refusal)
        return _trim_single_process(data, sizes, flat, is_list=is_list) if steps else data
    if refusal:
        backend.handshake.exchange(call_at_site("gather_for_metrics", flat.structure, free="first"))
        raise TypeError(refusal)
    if as_objects or flat.unsupported is not None or not flat.tensors:
        return _gather_objects(data, sizes, backend, is_list=is_list)
    call = call_at_site(f"gather_for_metrics{_describe_steps(sizes)}", flat.structure, free="first")
    gathered = gather_tensors(call, flat, backend)
    tensors = []
    for index, concatenated in enumerate(gathered.tensors):
        rows = [rank_rows[index] for rank_rows in gathered.rows]
        unique, counts = _drop_duplicate_rows(concatenated, rows, backend.grid)
        tensors.append(sizes.select_rows(unique, counts) if flat.specs[index].shape else unique)
    return replace_tensors(data, tensors)


@collective("obj", "backend")
def gather_object(obj: Any, backend: Backend) -> list[Any]:
    """Concatenate the items of all ranks in one list, by rank.

    Args:
        obj: A list or another iterable; a tensor is iterated over by rows.
        backend: Connects the ranks.

    Returns:
        The items of all ranks; on one process `obj` itself.

    Raises:
        TypeError: `obj` is a dict or text, of which Accelerate would gather keys and letters, or not iterable.
        MismatchError: The calls differ, or an item cannot be pickled. Raised on every rank.
        StallError: A rank does not join.
    """
    if isinstance(obj, (dict, str, bytes)) or not hasattr(obj, "__iter__"):
        raise TypeError(
            f"gather_object cannot gather a {type(obj).__name__}: it concatenates the lists of all ranks. Put it into a list."
        )
    if backend.topology.world_size == 1:
        return obj  # type: ignore[no-any-return]
    return [
        item
        for items in all_gather_objects("gather_object", obj, backend.handshake, compare_lines=True)
        for item in items
    ]


@collective("objects", "backend")
def broadcast_object_list(objects: list[Any], backend: Backend, from_process: int = 0) -> list[Any]:
    """Copy the objects of one rank into the lists of all others; return `objects`.

    Raises:
        ValueError: `from_process` is not a rank.
        MismatchError: The lengths of the lists or the calls differ. Raised on every rank.
        StallError: A rank does not join.
    """
    check_rank(from_process, backend)
    if backend.topology.world_size == 1:
        return objects
    sent = list(objects) if backend.topology.rank == from_process else None
    operation = f"broadcast_object_list of {len(objects)}"
    objects[:] = all_gather_objects(operation, sent, backend.handshake, compare_lines=True)[from_process]
    return objects


_MERGEABLE = {"sparse_coo tensor", "quantized tensor"}
"""Kinds of tensors whose rows torch can concatenate and select."""


def _find_refusal(structure: tuple[Any, ...]) -> str | None:
    """Return the reason why data cannot be merged, or None."""
    for location, leaf in list_locations(structure):
        if isinstance(leaf, str) and leaf.endswith(" tensor") and leaf not in _MERGEABLE:
            return f"gather_for_metrics cannot merge data{location}, {leaf}: torch cannot concatenate its rows. {find_cure(leaf)}"
    return None


def _gather_objects(data: Any, steps: GatheredSteps, backend: Backend, *, is_list: bool) -> Any:
    """Gather data that contain more than tensors, pickled, and merge them leaf by leaf."""
    operation = f"gather_for_metrics of {'a list of ' if is_list else ''}objects{_describe_steps(steps)}"
    detached = nested.map_tensors(torch.Tensor.detach, data)
    by_rank = all_gather_objects(operation, detached, backend.handshake, compare_lines=True)
    by_rank = drop_model_parallel_duplicates(by_rank, backend.grid)
    merged = steps.merge_lists(by_rank) if is_list else merge_steps(by_rank, steps)
    return nested.send_to(merged, backend.device)


def _drop_duplicate_rows(
    joined: torch.Tensor, rows: list[int], grid: RankGrid
) -> tuple[torch.Tensor, list[int]]:
    """Return the rows without those of model-parallel duplicates, and the number of rows per data rank."""
    if len(grid.first_ranks) == grid.world_size:
        return joined, rows
    pieces = drop_model_parallel_duplicates(torch.split(joined, rows), grid)
    return torch.cat(pieces), [len(piece) for piece in pieces]


def _trim_single_process(data: Any, steps: GatheredSteps, flat: FlattenedData, *, is_list: bool) -> Any:
    """Return the data of a single process without padding."""
    if is_list:
        return steps.merge_lists([data])
    if flat.unsupported is not None or not flat.tensors:
        return trim_padding(data, steps)
    return nested.map_tensors(lambda tensor: trim_padding(tensor, steps), data)


def _describe_steps(steps: GatheredSteps) -> str:
    """Describe the samples for the handshake."""
    if not steps.sizes:
        return ""
    if len(steps.sizes) == 1:
        return f" with {steps.valid[0]} valid samples of {steps.sizes[0]}"
    return f" over {len(steps.sizes)} steps, {zlib.crc32(encode_text(repr(steps))):x}"


class GatheredSteps(NamedTuple):
    """The steps of gathered rows; every rank has its batches of them one after the other."""

    valid: tuple[tuple[int, ...], ...]
    """By step and rank, the number of samples before the padding."""
    sizes: tuple[tuple[int, ...], ...]
    """By step and rank, the number of samples with padding."""

    @property
    def totals(self) -> list[int]:
        """The number of samples of each rank."""
        return [sum(sizes) for sizes in zip(*self.sizes, strict=True)]

    def select_rows(self, joined: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the rows of samples without padding, in dataset order.

        Args:
            joined: `[sum(rows), ...]`, rank by rank.
            rows: The number of rows of each rank.
        """
        if not self.sizes:
            return joined
        if set(rows) == {1} and set(self.totals) != {1}:  # one row for several samples, such as a loss
            return joined
        per_sample = self._rows_per_sample(rows)
        if len(self.sizes) == 1 and self.valid == self.sizes:
            return joined
        return joined.index_select(0, self._row_indices(per_sample).to(joined.device))

    def _rows_per_sample(self, rows: Sequence[int]) -> int:
        totals = self.totals
        per_sample = max(
            (count // total for count, total in zip(rows, totals, strict=True) if total), default=0
        )
        if any(count != total * per_sample for count, total in zip(rows, totals, strict=True)):
            raise ValueError(
                f"gather_for_metrics got tensors of {_format_counts(rows)} rows for batches of {_format_counts(totals)} samples, so it "
                "cannot find the padding. Pass the same number of rows per sample on all ranks, a single value per rank as a "
                "scalar or one row, and anything else to gather()."
            )
        return per_sample

    def _row_indices(self, per_sample: int) -> torch.Tensor:
        """Return the indices of the rows to keep."""
        sizes, valid = (torch.tensor(each, device="cpu") for each in (self.sizes, self.valid))
        before_rank = torch.cat(
            [torch.zeros(1, dtype=torch.int64, device="cpu"), sizes.sum(0).cumsum(0)[:-1]]
        )
        starts = (before_rank + sizes.cumsum(0) - sizes).flatten() * per_sample
        counts = valid.flatten() * per_sample
        ends = counts.cumsum(0)
        shifts = (starts - (ends - counts)).repeat_interleave(counts)
        return torch.arange(len(shifts), device="cpu") + shifts

    def merge_lists(self, by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """Return lists of one entry per sample without padding, in dataset order; other lists are concatenated."""
        if not self.sizes or [len(items) for items in by_rank] != self.totals:
            return [item for items in by_rank for item in items]
        iterators = [iter(items) for items in by_rank]
        entries = []
        for valid, sizes in zip(self.valid, self.sizes, strict=True):
            for items, count, size in zip(iterators, valid, sizes, strict=True):
                entries += [next(items) for _ in range(size)][:count]
        return entries


def merge_steps(by_rank: list[Any], steps: GatheredSteps) -> Any:
    """Merge the values of all ranks: columns are concatenated without padding, other values listed."""
    first = by_rank[0]
    if any(_merge_type(value) is not _merge_type(first) for value in by_rank):
        return by_rank
    if isinstance(first, torch.Tensor):
        return _merge_tensors(by_rank, steps)
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in by_rank):
            raise MismatchError(_format_difference("keys", [list(value.keys()) for value in by_rank]))
        keys = first.keys()  # a TensorDict itself iterates over rows
        return nested.rebuild(
            first, {key: merge_steps([value[key] for value in by_rank], steps) for key in keys}
        )
    if not isinstance(first, (list, tuple)):
        return _merge_objects(by_rank, steps)
    if any(_holds_columns(value) for value in by_rank):
        if any(len(value) != len(first) for value in by_rank):
            raise MismatchError(_format_difference("numbers of columns", [len(value) for value in by_rank]))
        return nested.rebuild(
            first, [merge_steps(list(items), steps) for items in zip(*by_rank, strict=True)]
        )
    return steps.merge_lists(by_rank)


def _merge_objects(by_rank: list[Any], steps: GatheredSteps) -> Any:
    """Merge the attributes of data objects; list other values."""
    attributes = [nested.list_attributes(value) or {} for value in by_rank]
    names = attributes[0].keys()
    if not names or any(each.keys() != names for each in attributes):
        return by_rank
    merged = {name: merge_steps([each[name] for each in attributes], steps) for name in names}
    return nested.rebuild(by_rank[0], merged)


def trim_padding(value: Any, steps: GatheredSteps) -> Any:
    """Remove padding from the values of a single rank; other values are returned as they are."""
    if isinstance(value, torch.Tensor):
        return steps.select_rows(value, [len(value)]) if value.dim() else value
    if isinstance(value, Mapping):
        return nested.rebuild(value, {key: trim_padding(item, steps) for key, item in value.items()})
    if not isinstance(value, (list, tuple)):
        attributes = nested.list_attributes(value)
        if not attributes:
            return value
        return nested.rebuild(value, {key: trim_padding(item, steps) for key, item in attributes.items()})
    if _holds_columns(value):
        return nested.rebuild(value, [trim_padding(column, steps) for column in value])
    return steps.merge_lists([value])


def _merge_tensors(by_rank: list[torch.Tensor], steps: GatheredSteps) -> torch.Tensor:
    first = by_rank[0]
    if any(
        (tensor.dtype, tensor.shape[1:], tensor.dim()) != (first.dtype, first.shape[1:], first.dim())
        for tensor in by_rank
    ):
        raise MismatchError(
            _format_difference("tensors", [f"{tensor.dtype}{list(tensor.shape)}" for tensor in by_rank])
        )
    if not first.dim():
        return torch.stack(by_rank)
    return steps.select_rows(torch.cat(by_rank), [len(tensor) for tensor in by_rank])


def _merge_type(item: Any) -> type:
    """Return the type that decides how values are merged."""
    for kind in (torch.Tensor, Mapping):
        if isinstance(item, kind):
            return kind
    return type(item) if isinstance(item, (list, tuple)) else object


def _holds_columns(items: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether the items are columns rather than samples."""
    if any(isinstance(item, torch.Tensor) for item in items):
        return True
    return isinstance(items, tuple) and any(isinstance(item, (Mapping, list, tuple)) for item in items)


def _format_difference(subject: str, by_rank: list[Any]) -> str:
    lines = "\n".join(f"  rank {rank}: {value}" for rank, value in enumerate(by_rank))
    return f"gather_for_metrics cannot merge the data of the ranks: {subject} differ:\n{lines}"


def _format_counts(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) if len(set(counts)) > 1 else str(counts[0])


def drop_model_parallel_duplicates(by_rank: Sequence[Any], grid: RankGrid) -> list[Any]:
    """Return the values of the first of each group of model-parallel ranks.

    Raises ValueError if ranks that shard sequences gave different values.
    """
    for first in grid.first_ranks:
        if not all(_equal_trees(by_rank[rank], by_rank[first]) for rank in grid.ranks_of(first, "sequence")):
            raise ValueError(
                f"gather_for_metrics got different values from ranks that shard each sequence ({name_dimension(grid, 'sequence')}: {grid.size('sequence')}), so no rank "
                "has the full value. Call accelerator.gather_sequence(tensor, dim=1) first, or reduce a loss over all ranks "
                'with accelerator.reduce(loss, "mean").'
            )
    return [by_rank[first] for first in grid.first_ranks]


def _equal_trees(one: Any, other: Any) -> bool:
    if one is other:
        return True
    leaves, others = nested.leaves(one), nested.leaves(other)
    return len(leaves) == len(others) and all(map(_equal_leaves, leaves, others))


def _equal_leaves(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # Compare bytes, so that nan equals nan.
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and torch.equal(_as_bytes(one), _as_bytes(other))
        )
    return type(one) is type(other) and bool(one == other)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
