"""How gathered tensors travel: beside the agreement if they are small, else in one buffer a kind of device."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.exchange.agreement import ROOM, Call
from accel_runtime.exchange.packing import Layout, layout, pack, packing, unpack, unpack_each
from accel_runtime.exchange.structure import Spec, Survey

__all__ = ["Everyone", "everyones"]


class _Plan(NamedTuple):
    """How tensors of these specs travel."""

    rows: bytes
    """The first dimension of each, as bytes."""
    counts: list[int]
    """The same as numbers."""
    kinds: dict[str, tuple[list[int], Layout]]
    """For every kind of device, which tensors are on it, and where they lie in its buffer."""
    inline: bool
    """Whether what is on the CPU fits beside the rows."""


@lru_cache(maxsize=256)
def _planned(specs: tuple[Spec, ...]) -> _Plan:
    counts = [spec.shape[0] if spec.shape else 1 for spec in specs]
    # Twice eight bytes, so that what follows begins where any dtype may.
    even = [*counts, *[0] * (len(counts) % 2)]
    numbers = struct.pack(f"={len(even)}q", *even)
    kinds: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        kinds.setdefault(spec.device, []).append(index)
    kinds.setdefault("cpu", [])
    found = {
        kind: (own, layout(tuple(specs[i].dtype for i in own), tuple(tuple(specs[i].shape) for i in own)))
        for kind, own in sorted(kinds.items())
    }
    inline = len(numbers) + found["cpu"][1].size <= ROOM
    return _Plan(numbers, counts, found, inline)


class Everyone(NamedTuple):
    """What all ranks have gathered."""

    rows: Sequence[Sequence[int]]
    """For every rank, the first dimension of each tensor; 1 for a scalar."""
    whole: list[torch.Tensor] | None
    """Joined already, where all shapes were equal."""
    pieces: list[list[torch.Tensor]]
    """Else, for every tensor, what each rank has of it."""

    def joined(self) -> list[torch.Tensor]:
        """One tensor for all ranks' pieces of it."""
        if self.whole is not None:
            return self.whole
        return [torch.cat([piece if piece.dim() else piece.view(1) for piece in own]) for own in self.pieces]


def everyones(call: Call, found: Survey, backend: Backend) -> Everyone:
    """Exchange tensors whose first dimensions may differ.

    Raises:
        MismatchError: Something else differs.
    """
    plan = _planned(found.specs)
    kept, near = plan.kinds["cpu"]
    own = [found.tensors[index] for index in kept]
    start = len(plan.rows)
    fill = packing(own, near)

    def write(room: memoryview) -> None:
        room[:start] = plan.rows
        if plan.inline:
            fill(room[start:])

    met = backend.agreement.exchange(call, start + near.size if plan.inline else start, write)
    if met.same:
        blobs = met.blobs
        assert isinstance(blobs, torch.Tensor)
        return _alike(call, found, plan, blobs[:, start:], backend)
    return _ragged(call, found, plan, met.blobs, backend)


def _alike(call: Call, found: Survey, plan: _Plan, inline: torch.Tensor, backend: Backend) -> Everyone:
    done: dict[int, torch.Tensor] = {}
    for kind, (indices, where) in plan.kinds.items():
        if kind == "cpu" and plan.inline:
            everyone = inline
        elif kind == "cpu":
            sizes = [where.size] * backend.topology.world_size
            shared = backend.agreement.share(_buffer(found, indices, where), sizes, call)
            assert isinstance(shared, torch.Tensor)
            everyone = shared
        else:
            everyone = backend.all_gather(_buffer(found, indices, where))
        tensors = unpack(everyone, where, [found.specs[index].shape for index in indices])
        done |= zip(indices, tensors, strict=True)
    rows = [plan.counts] * backend.topology.world_size
    return Everyone(rows, [done[index] for index in range(len(done))], [])


def _ragged(
    call: Call, found: Survey, plan: _Plan, blobs: Sequence[torch.Tensor] | torch.Tensor, backend: Backend
) -> Everyone:
    start = len(plan.rows)
    rows = [blob[:start].view(torch.int64).tolist()[: len(found.specs)] for blob in blobs]
    plans = [_planned(_resized(found.specs, counts)) for counts in rows]
    pieces: list[list[torch.Tensor]] = [[] for _ in found.specs]
    for kind, (indices, where) in plan.kinds.items():
        layouts = [theirs.kinds[kind][1] for theirs in plans]
        if kind == "cpu":
            inline = [theirs.inline for theirs in plans]
            outside = [0 if fits else at.size for fits, at in zip(inline, layouts, strict=True)]
            own = (
                _buffer(found, indices, where)
                if not plan.inline
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            large = backend.agreement.share(own, outside, call) if any(outside) else blobs
            buffers = [blobs[r][start:] if fits else large[r] for r, fits in enumerate(inline)]
        else:
            buffers = _padded_gather(_buffer(found, indices, where), [at.size for at in layouts], backend)
        for buffer, at, counts in zip(buffers, layouts, rows, strict=True):
            shapes = [tuple(spec.shape) for spec in _resized(found.specs, counts)]
            parts = unpack_each(buffer, at, [shapes[index] for index in indices])
            for index, part in zip(indices, parts, strict=True):
                pieces[index].append(part)
    return Everyone(rows, None, pieces)


def _resized(specs: tuple[Spec, ...], rows: Sequence[int]) -> tuple[Spec, ...]:
    return tuple(
        spec._replace(shape=(count, *spec.shape[1:])) if spec.shape else spec
        for spec, count in zip(specs, rows, strict=True)
    )


def _buffer(found: Survey, indices: Sequence[int], where: Layout) -> torch.Tensor:
    """`[where.size]` bytes of these tensors; not a copy where there is one that lies so already."""
    own = [found.tensors[index].detach() for index in indices]
    if len(own) == 1 and own[0].is_contiguous() and not own[0].is_conj():
        return own[0].reshape(-1).view(torch.uint8)
    buffer = torch.empty(where.size, dtype=torch.uint8, device=own[0].device if own else None)
    pack(own, where, buffer)
    return buffer


def _padded_gather(own: torch.Tensor, sizes: Sequence[int], backend: Backend) -> list[torch.Tensor]:
    """Every rank's bytes of a device, over a collective that needs equal shapes."""
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own
    return [row[:size] for row, size in zip(backend.all_gather(padded), sizes, strict=True)]
