"""Sequences that are sharded over ranks: how they are cut and gathered, and the agreement of the ranks before a collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from accel_runtime.collectives.handshake import Handshake, call_at_site
from accel_runtime.collectives.transport import GlooTransport
from accel_runtime.foundation.torch_internals import group_timeout, storage_id, without_compilation

__all__ = [
    "Form",
    "ShardedSequences",
    "join_sequence",
    "sequence_dim",
    "sequence_slices",
    "slice_sequence",
    "split_sequence",
]

# torch 2.13 has other names for them, and warns of the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


Form = Literal["cp", "sp"]
"""The key of the profile that shards sequences: attention gathers the keys of all ranks (`cp`), or exchanges heads (`sp`)."""
_TITLES: dict[Form, str] = {"cp": "context parallelism", "sp": "sequence parallelism"}


class ShardedSequences:
    """Sequences that the ranks of a group have sharded.

    A call that some ranks reject, or make with other shapes, fails on every rank before its collective: the ranks compare it in
    a handshake of their own on the CPU, which does not wait for a device. It is compared every time, since a rank whose call
    is new to it could not know that another rank skips the comparison.

    Args:
        group: The ranks, more than one.
        buffers: The shards of this rank.
        dims: The sequence dimension of each.
        form: The key of the profile.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        buffers: Sequence[torch.Tensor] = (),
        dims: Sequence[int] = (),
        form: Form = "cp",
    ) -> None:
        self.group, self.parts, self.rank = group, group.size(), group.rank()
        self.form: Form = form
        self.title = _TITLES[form]
        self.lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
        """The lengths of this rank's shards; empty without buffers."""
        self._storages = {storage_id(buffer) for buffer in buffers}

    def is_buffer(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a buffer or a view of one."""
        return storage_id(tensor) in self._storages

    def is_shard(self, length: int) -> bool:
        """Return whether a length can be that of this rank's shard."""
        return not self.lengths or length in self.lengths

    @without_compilation
    def agree(self, operation: str, problem: str | None = None) -> None:
        """Compare an operation with the other ranks; collective.

        Args:
            operation: The operation and its shapes.
            problem: Why this rank cannot do it.

        Raises:
            ValueError: All ranks have this problem.
            MismatchError: The operations or the problems differ; raised on every rank.
        """
        text = operation if problem is None else f"{operation}, and it fails: {problem}"
        _connect(self.group).exchange(call_at_site(text, anywhere=True))
        if problem is not None:
            raise ValueError(problem)

    def reject(self, problem: str) -> NoReturn:
        """Raise ValueError on all ranks, or MismatchError if the others have no such problem; collective."""
        # torch compiles flex_attention without graph breaks.
        if not torch.compiler.is_compiling():
            self.agree(self.title, problem)
        raise ValueError(problem)

    def gather(self, shard: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather full sequences with gradients, without a comparison of the shapes; collective."""
        full: torch.Tensor = _GatherSequence.apply(shard, dim % shard.dim(), self.group)  # type: ignore[no-untyped-call]
        return full

    def slice(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard of a full sequence."""
        return slice_sequence(full, dim, self.parts, self.rank)

    def exchange(
        self, pieces: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[torch.Tensor]]:
        """Send pieces to each rank and receive those of each, with gradients, in one collective.

        Args:
            pieces: For each rank, the tensors that it receives.
            shapes: For each rank, the shapes of the tensors that it sends to this one.

        Returns:
            For each rank, its tensors.
        """
        flat = torch.cat([piece.reshape(-1) for sent in pieces for piece in sent])
        sizes = [[math.prod(shape) for shape in received] for received in shapes]
        counts = [sum(piece.numel() for piece in sent) for sent in pieces]
        received: torch.Tensor = _AllToAll.apply(flat, counts, [sum(each) for each in sizes], self.group)  # type: ignore[no-untyped-call]
        items = iter(torch.split(received, [size for each in sizes for size in each]))
        return [[next(items).view(*shape) for shape in each] for each in shapes]


@cache
def _connect(group: dist.ProcessGroup) -> Handshake:
    """Connect the ranks of a group for handshakes, once; collective."""
    # Ranks of other groups need not take part, and may come at another time or never.
    ranks, timeout = dist.get_process_group_ranks(group), group_timeout(group)
    control = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
    transport = GlooTransport(control, control.get_group_store(), timeout)
    return Handshake(transport, group.rank(), group.size())


class _GatherSequence(torch.autograd.Function):
    """Gather shards in the forward pass; reduce-scatter gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        shards = shard.new_empty((group.size(), *shard.shape))
        # Flat, since backends support different shapes otherwise.
        _all_gather(shards.view(-1), shard.reshape(-1), group=group)
        return join_sequence(list(shards.unbind()), dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        count = ctx.group.size()
        shards = torch.stack([slice_sequence(grad, ctx.dim, count, rank) for rank in range(count)])
        shard = shards.new_empty(shards.shape[1:])
        _reduce_scatter(shard.view(-1), shards.view(-1), group=ctx.group)
        return shard, None, None


class _AllToAll(torch.autograd.Function):
    """Send a part of a flat tensor to each rank; send gradients back in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, flat: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output = flat.new_empty(sum(received))
        dist.all_to_all_single(output, flat, received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        output = grad.new_empty(sum(ctx.sent))
        dist.all_to_all_single(output, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return output, None, None, None


def sequence_slices(length: int, parts: int, part: int, form: Form = "cp") -> list[tuple[int, int]]:
    """Return the chunks of a shard, as pairs of begin and end.

    A shard has a chunk of the front and its mirror image at the end, to balance causal attention. A length that is only
    divisible by the number of shards is sharded contiguously.

    Raises:
        ValueError: The length is not divisible.
    """
    if length % parts:
        near = f"{length - length % parts} or {length + parts - length % parts}"
        raise ValueError(
            f"A sequence of {length} cannot be sharded: {parts} ranks ({form}: {parts}) need equal shards. Pad or truncate it to {near}."
        )
    if parts == 1:
        return [(0, length)]
    if length % (2 * parts):
        size = length // parts
        return [(part * size, (part + 1) * size)]
    size = length // (2 * parts)
    mirror = 2 * parts - 1 - part
    return [(part * size, (part + 1) * size), (mirror * size, (mirror + 1) * size)]


def sequence_dim(tensor: torch.Tensor, dim: int) -> int:
    """Return a dimension counted from the front; raise ValueError if it does not exist."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"Invalid sequence dimension {dim}: the tensor has shape {list(tensor.shape)}.")
    return dim % tensor.dim()


def slice_sequence(tensor: torch.Tensor, dim: int, parts: int, part: int) -> torch.Tensor:
    """Return a shard of a full sequence in new memory."""
    slices = sequence_slices(tensor.shape[dim], parts, part)
    return torch.cat([tensor.narrow(dim, begin, end - begin) for begin, end in slices], dim)


def split_sequence(tensor: torch.Tensor, dim: int, parts: int) -> list[torch.Tensor]:
    """Return all shards of a full sequence; its gradient is joined in one operation."""
    length = tensor.shape[dim]
    slices = [sequence_slices(length, parts, part) for part in range(parts)]
    begins = sorted(begin for each in slices for begin, _ in each)
    ends = [*begins[1:], length]
    chunks = torch.split(tensor, [end - begin for begin, end in zip(begins, ends, strict=True)], dim)
    by_begin = dict(zip(begins, chunks, strict=True))
    return [torch.cat([by_begin[begin] for begin, _ in each], dim) for each in slices]


def join_sequence(shards: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the full sequence from all shards."""
    parts, length = len(shards), shards[0].shape[dim] * len(shards)
    pieces: list[tuple[int, torch.Tensor]] = []
    for part, tensor in enumerate(shards):
        slices = sequence_slices(length, parts, part)
        chunks = torch.split(tensor, [end - begin for begin, end in slices], dim)
        pieces += [(begin, piece) for (begin, _), piece in zip(slices, chunks, strict=True)]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)
