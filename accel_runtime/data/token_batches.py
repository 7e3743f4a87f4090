"""Batches by a budget of tokens: the lengths of samples, and the batches of an epoch, packed in windows of its order."""

from __future__ import annotations

import logging
import math
import weakref
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from heapq import heapify, heapreplace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import IsolatedRNG, RandomStates, hash_text
from accel_runtime.foundation.epoch_progress import StepInfo
from accel_runtime.foundation.options import TokenBudget

__all__ = [
    "EpochPlan",
    "LengthOf",
    "TokenBatchSampler",
    "estimate_padding",
    "find_lengths",
    "pack_window",
    "plan_epoch",
]

LengthOf = Callable[[Any], int] | str | Sequence[int]
"""Function that returns the length of a sample, the name of a column of the dataset, or the lengths themselves."""
_GROUP = 16
"""Number of batches of nearly equal cost that stay next to each other when the batches of a window are shuffled."""
_SEEDED = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}
"""Samplers that are drawn from a seed and the number of the epoch."""
_LOG = logging.getLogger("accel_runtime.data")


class EpochPlan(NamedTuple):
    """All batches of an epoch, which do not depend on the number of ranks."""

    samples: torch.Tensor
    """Indices of the samples of all batches, one batch after the other: `[samples]`, int64."""
    ends: torch.Tensor
    """Number of samples up to the end of each batch: `[batches]`, int64."""
    positions: int
    """Positions in all batches: their tokens and, if batches are padded to their longest sample, that padding."""

    @property
    def num_batches(self) -> int:
        """Return the number of batches."""
        return len(self.ends)

    @property
    def fingerprint(self) -> int:
        """Return a number of 32 bits that depends on all samples and on the ends of the batches."""
        values = torch.cat([self.samples, self.ends])
        # The product and the sum wrap, which is the same everywhere.
        factors = torch.arange(1, len(values) + 1) * 0x9E3779B1 + 1
        return int((values * factors).sum()) % 2**32

    def iterate(self, offset: int = 0) -> Iterator[list[int]]:
        """Yield the batches from an offset on, which counts batches."""
        begin = int(self.ends[offset - 1]) if 0 < offset <= len(self.ends) else 0
        for end in self.ends[offset:].tolist():
            yield self.samples[begin:end].tolist()
            begin = end


def plan_epoch(
    order: torch.Tensor, lengths: torch.Tensor, budget: TokenBudget, seed: int | None
) -> EpochPlan:
    """Return the batches of an epoch.

    The order is cut into windows of nearly equal size, so that the last one is not much smaller, and each window is packed.

    Args:
        order: The indices of the samples in the order of the epoch: `[samples]`, int64.
        lengths: The length of each sample of the dataset: `[dataset]`, int64.
        budget: The budget.
        seed: The seed by which the batches of each window are shuffled; None leaves them in the order of their first samples.

    Raises:
        ValueError: A sample is longer than the budget.
    """
    drawn = lengths[order]
    if len(order) and int(drawn.max()) > budget.max_tokens:
        sample = int(order[drawn.argmax()])
        raise ValueError(
            f"Cannot build batches of max_tokens={budget.max_tokens}: sample {sample} has the length {int(lengths[sample])}. "
            "Truncate such samples, leave them out of the dataset, or raise max_tokens."
        )
    count = len(order)
    num_windows = max(1, round(count / budget.window))
    samples: list[torch.Tensor] = []
    sizes: list[int] = []
    positions = 0
    for number in range(num_windows):
        part = slice(number * count // num_windows, (number + 1) * count // num_windows)
        # A sample without a token takes part in a batch like any other.
        costs = drawn[part].clamp(min=1).tolist()
        batches = pack_window(costs, budget)
        positions += sum(budget.count_positions([costs[at] for at in batch]) for batch in batches)
        if seed is None:
            batches.sort(key=min)
        else:
            batches = _shuffle(batches, costs, budget, hash_text(f"{seed} {number}"))
        samples.append(order[part][torch.tensor([*chain.from_iterable(batches)], dtype=torch.int64)])
        sizes += map(len, batches)
    return EpochPlan(torch.cat(samples), torch.tensor([*accumulate(sizes)], dtype=torch.int64), positions)


def estimate_padding(lengths: torch.Tensor, batch_size: int, *, shuffled: bool) -> float:
    """Return the share of padding in batches of a fixed size that are padded to their longest sample.

    Args:
        lengths: The length of each sample: `[dataset]`, int64.
        batch_size: The samples in a batch.
        shuffled: If true, in a random order, which is not that of the run; otherwise in the order of the dataset.
    """
    if shuffled:
        lengths = lengths[torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))]
    values: list[int] = lengths.tolist()
    batches = [values[begin : begin + batch_size] for begin in range(0, len(values), batch_size)]
    positions = sum(len(batch) * max(batch) for batch in batches)
    return 1 - sum(values) / max(positions, 1)


def pack_window(costs: Sequence[int], budget: TokenBudget) -> list[list[int]]:
    """Return batches within the budget of all samples of a window, as positions in it.

    Args:
        costs: The length of each sample, from 1 to the budget.
        budget: The budget.
    """
    if not costs:
        return []
    if not budget.padded:
        return _pack_sums(costs, budget.max_tokens) if budget.balance else _fill(costs, budget.max_tokens)
    # Samples of similar length share a batch, the longest first, so there is little padding.
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    longest_first = [costs[at] for at in order]
    bound, sizes = budget.max_tokens, _cut(longest_first, budget.max_tokens)
    if budget.balance:
        # The smallest bound with as many batches: each of them is then nearly as large as the others.
        most = len(sizes)
        least = longest_first[0]
        bound = least + bisect_left(
            range(least, bound), True, key=lambda bound: len(_cut(longest_first, bound, most + 1)) <= most
        )
        sizes = _cut(longest_first, bound)
    return [order[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]


def _cut(longest_first: Sequence[int], bound: int, most: float = math.inf) -> list[int]:
    """Return the sizes of batches whose count times longest sample is within a bound; stop after `most` of them."""
    sizes: list[int] = []
    begin, count = 0, len(longest_first)
    while begin < count and len(sizes) < most:
        size = min(bound // longest_first[begin], count - begin)
        sizes.append(size)
        begin += size
    return sizes


def _pack_sums(costs: Sequence[int], bound: int) -> list[list[int]]:
    """Return batches with nearly equal sums: the longest sample first, each into the batch with the smallest sum."""
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    num_batches = max(-(-sum(costs) // bound), sum(2 * cost > bound for cost in costs))
    while (batches := _fill_smallest(order, costs, num_batches, bound)) is None:
        num_batches += 1 + num_batches // 64
    return batches


def _fill_smallest(
    order: Iterable[int], costs: Sequence[int], num_batches: int, bound: int
) -> list[list[int]] | None:
    """Return the batches of `_pack_sums`; None if they are too few."""
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    sums = [(0, number) for number in range(num_batches)]
    heapify(sums)
    for at in order:
        smallest, number = sums[0]
        if smallest + costs[at] > bound:
            return None
        batches[number].append(at)
        heapreplace(sums, (smallest + costs[at], number))
    return [batch for batch in batches if batch]


def _fill(costs: Sequence[int], bound: int) -> list[list[int]]:
    """Return batches of samples in their order, each filled until the next sample exceeds the bound."""
    batches: list[list[int]] = [[]]
    total = 0
    for at, cost in enumerate(costs):
        if total + cost > bound:
            batches.append([])
            total = 0
        batches[-1].append(at)
        total += cost
    return batches


def _shuffle(
    batches: list[list[int]], costs: Sequence[int], budget: TokenBudget, seed: int
) -> list[list[int]]:
    """Return the batches of a window in random order; with `balance`, those next to each other have nearly equal costs.

    Batches of similar cost form groups, whose size does not depend on the number of ranks. The batches of a group are shuffled,
    and so are the groups.
    """
    generator = torch.Generator().manual_seed(seed)
    size = 1
    if budget.balance:
        batches = sorted(
            batches, key=lambda batch: (budget.count_positions([costs[at] for at in batch]), batch)
        )
        size = _GROUP
    groups = [batches[begin : begin + size] for begin in range(0, len(batches), size)]
    groups = [groups[at] for at in torch.randperm(len(groups), generator=generator).tolist()]
    if size > 1:
        groups = [
            [group[at] for at in torch.randperm(len(group), generator=generator).tolist()] for group in groups
        ]
    return [*chain.from_iterable(groups)]


class TokenBatchSampler(Sampler[list[int]]):
    """Batch sampler of the batches of a budget of tokens, over the sampler of the script.

    Args:
        sampler: The sampler of the script, whose order is cut into windows.
        lengths: The length of each sample of the dataset: `[dataset]`, int64.
        budget: The budget.
        seed: The seed of shuffled orders and batches.
    """

    def __init__(self, sampler: Sampler[Any], lengths: torch.Tensor, budget: TokenBudget, seed: int) -> None:
        self.sampler, self.lengths, self.budget, self.seed = sampler, lengths, budget, seed
        self._epoch = 0
        self._newest: tuple[tuple[int, int], EpochPlan] | None = None
        """Plan of a known order, with its seed and the number of its epoch."""

    @property
    def description(self) -> str:
        """Return the sampler and the budget as text, to be compared with those of a saved state."""
        budget = self.budget
        return (
            f"{type(self.sampler).__qualname__} in batches of {budget.max_tokens} tokens (padded={budget.padded}, "
            f"balance={budget.balance}, window={budget.window})"
        )

    @property
    def is_known(self) -> bool:
        """Return whether the order of any epoch is known from the seed, before the epoch begins."""
        return type(self.sampler) is SequentialSampler or type(self.sampler) in _SEEDED

    def plan_known(self, seed: int, epoch: int) -> EpochPlan:
        """Return the batches of an epoch of a known order.

        Raises:
            TypeError: Only the sampler of the script knows the order.
        """
        if not self.is_known:
            raise TypeError(
                f"The number of steps is unknown: a {type(self.sampler).__name__} draws the order when an epoch begins, and the "
                "batches of max_tokens follow from the order. Use shuffle=True or a sampler of torch, or count the steps."
            )
        if self._newest is None or self._newest[0] != (seed, epoch):
            sampler = copy(self.sampler)
            if type(sampler) in _SEEDED:
                sampler.generator = torch.Generator().manual_seed(seed + epoch)  # type: ignore[attr-defined]
            self._newest = (seed, epoch), self.plan(sampler, seed, epoch)
        return self._newest[1]

    def plan(self, order: Iterable[Any], seed: int, epoch: int) -> EpochPlan:
        """Return the batches of an order.

        Raises:
            ValueError: A sample is longer than the budget, or the order has something else than indices of samples.
        """
        samples = [*order]
        count = len(self.lengths)
        for sample in samples:
            if not isinstance(sample, int) or not 0 <= sample < count:
                raise ValueError(
                    f"Cannot build batches of max_tokens={self.budget.max_tokens}: {type(self.sampler).__name__} yields {sample!r}, and "
                    f"lengths belong to the indices 0 to {count - 1}. Yield such indices, or leave out max_tokens."
                )
        is_ordered = type(self.sampler) is SequentialSampler
        shuffle_seed = None if is_ordered else hash_text(f"{seed} {epoch}")
        return plan_epoch(torch.tensor(samples, dtype=torch.int64), self.lengths, self.budget, shuffle_seed)

    def count_tokens(self, samples: Sequence[int], info: StepInfo) -> StepInfo:
        """Return the step info with the tokens of each rank's samples; `samples` are those of all ranks, padding included."""
        lengths = self.lengths[torch.tensor(samples, dtype=torch.int64)]
        begins = accumulate(info.batch_sizes, initial=0)
        return info._replace(
            tokens=tuple(
                int(lengths[begin : begin + valid].sum())
                for begin, valid in zip(begins, info.num_valid, strict=False)
            )
        )

    def find_padding(self, epoch: int) -> float:
        """Return the share of padding in all positions of an epoch of a known order."""
        plan = self.plan_known(self.seed, epoch)
        return 1 - int(self.lengths[plan.samples].sum()) / max(plan.positions, 1)

    def set_seed(self, seed: int) -> None:
        """Set the seed, which is that of a loaded state."""
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch of the next iterator."""
        self._epoch = epoch

    @override
    def __iter__(self) -> Iterator[list[int]]:
        known = self.is_known
        plan = (
            self.plan_known(self.seed, self._epoch)
            if known
            else self.plan(self.sampler, self.seed, self._epoch)
        )
        return plan.iterate()

    def __len__(self) -> int:
        return self.plan_known(self.seed, self._epoch).num_batches


# Lengths -----------------------------------------------------------------------------------

_MEASURED: dict[int, tuple[weakref.ref[Any], Any, torch.Tensor]] = {}
"""Lengths that a function has measured, with the dataset and the function, by the id of the dataset."""


def find_lengths(dataset: Any, length: LengthOf, backend: Backend) -> torch.Tensor:
    """Return the length of each sample of a dataset, equal on all ranks: `[dataset]`, int64.

    A function is called once for each sample and run; the ranks share the samples, and exchange the lengths. Random numbers that the
    dataset draws meanwhile do not change those of the script.

    Raises:
        ValueError: The dataset has no such column, there is not one length for each sample, one is not a number of at least 0, a
            function failed, or the ranks have different lengths.
    """
    if callable(length):
        return _measure_once(dataset, length, backend)
    name = "length"
    values: Any = length
    if isinstance(length, str):
        columns = list(getattr(dataset, "column_names", None) or getattr(dataset, "features", None) or ())
        if length not in columns:
            has = f"its columns are {', '.join(map(str, columns))}" if columns else "it has no columns"
            raise ValueError(
                f"Cannot read the lengths of samples: the {type(dataset).__name__} has no column {length!r}, {has}. Pass the name of a "
                "column of lengths or of token ids, a function of a sample, or the lengths."
            )
        name, values = f"column {length!r}", dataset[length]
    values = values.tolist() if hasattr(values, "tolist") else values
    lengths = array("q", [_to_length(value, f"{name}, sample {at}") for at, value in enumerate(values)])
    if len(lengths) != len(dataset):
        raise ValueError(
            f"Cannot build batches by length: there are {len(lengths)} lengths, and the {type(dataset).__name__} has {len(dataset)} "
            "samples. Pass the length of each sample, in the order of the dataset."
        )
    fingerprint = hash_text(lengths.tobytes().hex())
    if backend.topology.world_size > 1:
        gathered = backend.all_gather_numbers([fingerprint], "lengths of the samples")
        if len(set(gathered)) > 1:
            raise ValueError(
                "Cannot build batches by length: the ranks have different lengths. Load the same data and pass the same lengths on every "
                "rank."
            )
    return torch.tensor(lengths, dtype=torch.int64)


def _to_length(value: Any, where: str) -> int:
    """Return the length that a value is, or that it has, such as a list of token ids."""
    number = value
    if not isinstance(value, int):
        item = getattr(value, "item", None)
        if callable(item) and getattr(value, "ndim", 1) == 0:
            number = item()
        elif hasattr(value, "__len__"):
            number = len(value)
    return _check_length(number, where)


def _check_length(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f"Invalid length {value!r} ({where}): expected an integer of at least 0. Return or pass the number of tokens."
        )
    return value


def _measure_once(dataset: Any, length: Callable[[Any], int], backend: Backend) -> torch.Tensor:
    """Return the lengths that a function measures, or has measured for the same dataset."""
    known = _MEASURED.get(id(dataset))
    if known is not None and known[0]() is dataset and known[1] == length:
        return known[2]
    lengths = _measure(dataset, length, backend)
    try:
        reference = weakref.ref(dataset)
    except TypeError:  # a list; it is measured again if it is prepared again
        return lengths
    weakref.finalize(dataset, _MEASURED.pop, id(dataset), None)
    _MEASURED[id(dataset)] = reference, length, lengths
    return lengths


def _measure(dataset: Any, length: Callable[[Any], int], backend: Backend) -> torch.Tensor:
    rank, world_size = backend.topology.rank, backend.topology.world_size
    own: array[int] = array("q")
    measured: array[int] | str = own
    error: Exception | None = None
    at = rank
    try:
        with IsolatedRNG(RandomStates.capture())():
            for at in range(rank, len(dataset), world_size):
                number: Any = length(dataset[at])
                if callable(getattr(number, "item", None)):
                    number = number.item()
                own.append(_check_length(number, f"length() of sample {at}"))
    except Exception as failure:  # noqa: BLE001 - the other ranks wait for the lengths in any case
        error = failure
        measured = f"length() failed for sample {at}: {type(failure).__name__}: {failure}"
    gathered = (
        [measured] if world_size == 1 else backend.all_gather_objects(measured, "lengths of the samples")
    )
    if error is not None:
        raise error
    if failed := next((each for each in gathered if isinstance(each, str)), None):
        raise ValueError(f"Cannot measure the samples: {failed}. See the error of that rank.")
    lengths = torch.zeros(len(dataset), dtype=torch.int64)
    for first, part in enumerate(gathered):
        lengths[first::world_size] = torch.tensor(part, dtype=torch.int64)
    return lengths
