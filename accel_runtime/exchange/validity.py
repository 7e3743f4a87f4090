"""Which of the gathered rows are samples of the dataset and which are repeats, and in what order the samples come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from accel_runtime import tree
from accel_runtime.data.source import Share
from accel_runtime.exchange.agreement import MismatchError

__all__ = ["Steps", "merged", "trimmed"]


class Steps(NamedTuple):
    """The steps gathered rows come from; every rank has its batches of them one after the other."""

    valid: tuple[tuple[int, ...], ...]
    """For every step and rank, how many samples at the front of the batch are no repeats."""
    sizes: tuple[tuple[int, ...], ...]
    """For every step and rank, how many samples the batch has."""

    @classmethod
    def of(cls, shares: Sequence[Share]) -> Steps:
        """What ranks have to agree on of shares."""
        return cls(tuple(share.valid for share in shares), tuple(share.sizes for share in shares))

    @property
    def totals(self) -> list[int]:
        """How many samples each rank has."""
        return [sum(own) for own in zip(*self.sizes, strict=True)]

    def kept(self, joined: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The rows of samples, in the order of the dataset.

        Args:
            joined: `[sum(rows), ...]`, rank by rank.
            rows: How many of them each rank gave.

        Raises:
            ValueError: They are not a whole number for every sample.
        """
        if not self.sizes or self._one_a_rank(rows):
            return joined
        per_sample = self._rows_a_sample(rows)
        if len(self.sizes) == 1 and self.valid == self.sizes:
            return joined
        return joined.index_select(0, self._positions(per_sample).to(joined.device))

    def _one_a_rank(self, rows: Sequence[int]) -> bool:
        """Whether every rank gave a single row for more samples than one: a loss, say, of which none is a repeat."""
        return set(rows) == {1} and set(self.totals) != {1}

    def _rows_a_sample(self, rows: Sequence[int]) -> int:
        totals = self.totals
        per_sample = max((own // total for own, total in zip(rows, totals, strict=True) if total), default=0)
        if any(own != total * per_sample for own, total in zip(rows, totals, strict=True)):
            raise ValueError(
                f"gather_for_metrics got tensors of {_listed(rows)} rows for batches of {_listed(totals)} samples: "
                "which rows are repeats is not known. Give a whole number of rows a sample, the same on all ranks; "
                "a single value a rank as a scalar or as one row; for anything else there is gather()."
            )
        return per_sample

    def _positions(self, per_sample: int) -> torch.Tensor:
        """Where in the joined rows those lie that are kept, `[number of them]`."""
        sizes, valid = (torch.tensor(each, device="cpu") for each in (self.sizes, self.valid))
        before_rank = torch.cat(
            [torch.zeros(1, dtype=torch.int64, device="cpu"), sizes.sum(0).cumsum(0)[:-1]]
        )
        starts = (before_rank + sizes.cumsum(0) - sizes).flatten() * per_sample
        counts = valid.flatten() * per_sample
        ends = counts.cumsum(0)
        shifts = (starts - (ends - counts)).repeat_interleave(counts)
        return torch.arange(len(shifts), device="cpu") + shifts

    def entries(self, everyone: Sequence[Sequence[Any]]) -> list[Any]:
        """Lists of one entry a sample without repeats, in order; other lists one after the other, whole."""
        if not self.sizes or [len(own) for own in everyone] != self.totals:
            return [item for own in everyone for item in own]
        following = [iter(own) for own in everyone]
        found = []
        for valid, sizes in zip(self.valid, self.sizes, strict=True):
            for own, count, size in zip(following, valid, sizes, strict=True):
                found += [next(own) for _ in range(size)][:count]
        return found


def merged(everyone: list[Any], steps: Steps) -> Any:
    """The ranks' values of one place as one value: columns joined without repeats, the rest listed.

    Raises:
        MismatchError: The ranks' values have other keys, lengths or shapes, so that they cannot be joined.
        ValueError: A tensor's rows have nothing to do with the samples.
    """
    first = everyone[0]
    if any(_kind(own) is not _kind(first) for own in everyone):
        return everyone
    if isinstance(first, torch.Tensor):
        return _rows(everyone, steps)
    if isinstance(first, Mapping):
        if any(own.keys() != first.keys() for own in everyone):
            raise MismatchError(_differ("keys", [list(own.keys()) for own in everyone]))
        keys = first.keys()  # a TensorDict itself iterates over rows
        return tree.rebuilt(first, {key: merged([own[key] for own in everyone], steps) for key in keys})
    if not isinstance(first, (list, tuple)):
        return everyone
    if any(_holds_columns(own) for own in everyone):
        if any(len(own) != len(first) for own in everyone):
            raise MismatchError(_differ("numbers of columns", [len(own) for own in everyone]))
        return tree.rebuilt(first, [merged(list(items), steps) for items in zip(*everyone, strict=True)])
    return steps.entries(everyone)


def trimmed(own: Any, steps: Steps) -> Any:
    """The values of the only rank without repeats: as `merged`, but what it would list is left as it is.

    Raises:
        ValueError: A tensor's rows have nothing to do with the samples.
    """
    if isinstance(own, torch.Tensor):
        return steps.kept(own, [len(own)]) if own.dim() else own
    if isinstance(own, Mapping):
        return tree.rebuilt(own, {key: trimmed(value, steps) for key, value in own.items()})
    if not isinstance(own, (list, tuple)):
        return own
    if _holds_columns(own):
        return tree.rebuilt(own, [trimmed(item, steps) for item in own])
    return steps.entries([own])


def _rows(everyone: list[torch.Tensor], steps: Steps) -> torch.Tensor:
    first = everyone[0]
    if any(
        (own.dtype, own.shape[1:], own.dim()) != (first.dtype, first.shape[1:], first.dim())
        for own in everyone
    ):
        raise MismatchError(_differ("tensors", [f"{own.dtype}{list(own.shape)}" for own in everyone]))
    if not first.dim():
        return torch.stack(everyone)
    return steps.kept(torch.cat(everyone), [len(own) for own in everyone])


def _kind(item: Any) -> type:
    """What decides how values are joined."""
    for kind in (torch.Tensor, Mapping):
        if isinstance(item, kind):
            return kind
    return type(item) if isinstance(item, (list, tuple)) else object


def _holds_columns(items: list[Any] | tuple[Any, ...]) -> bool:
    """Whether the items are one a column, rather than one a sample."""
    if any(isinstance(item, torch.Tensor) for item in items):
        return True
    return isinstance(items, tuple) and any(isinstance(item, (Mapping, list, tuple)) for item in items)


def _differ(what: str, everyone: list[Any]) -> str:
    lines = "\n".join(f"  rank {rank}: {own}" for rank, own in enumerate(everyone))
    return f"gather_for_metrics cannot join what the ranks gave; {what} differ:\n{lines}"


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) if len(set(counts)) > 1 else str(counts[0])
