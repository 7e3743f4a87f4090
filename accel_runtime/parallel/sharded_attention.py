"""Exact attention over sequences that are sharded over ranks, in two forms: keys are gathered (`cp`), or heads exchanged (`sp`).

A form computes torch's attention and calls attention functions of transformers. It has the checks of its calls, which all ranks
make together. `ShardedSequences` cuts and gathers sequences, and lets the ranks agree before a collective.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from typing_extensions import override

from accel_runtime.collectives.handshake import Handshake, call_at_site
from accel_runtime.collectives.transport import GlooTransport
from accel_runtime.foundation.torch_internals import group_timeout, storage_id, without_compilation

__all__ = [
    "Form",
    "FormRatios",
    "ShardedAttention",
    "ShardedSequences",
    "build_attention",
    "compare_forms",
    "describe_tensor",
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


# Attention ---------------------------------------------------------------------------

_HEADS, _POSITIONS = -3, -2
"""Dimensions of queries, keys and values."""
_WITH_HEADS = 3
"""The least number of dimensions of a tensor with heads."""
_PER_HEAD = ("head_mask", "s_aux")
"""Arguments of attention functions of transformers that have a value for each head."""


def build_attention(sequences: ShardedSequences) -> ShardedAttention:
    """Return attention in the form of the sequences."""
    forms: dict[str, type[ShardedAttention]] = {"cp": GatheredKeys, "sp": ExchangedHeads}
    return forms[sequences.form](sequences)


class FormRatios(NamedTuple):
    """Costs of attention with exchanged heads (`sp`), divided by those with gathered keys (`cp`), for a rank and a layer."""

    sent: float
    """Bytes sent."""
    held: float
    """Keys and values of full sequences."""


def compare_forms(heads: int, key_heads: int, parts: int) -> FormRatios | None:
    """Return the costs of both forms for a number of ranks; None if heads cannot be exchanged.

    For each position of a rank, `cp` sends the keys and values to all others. `sp` sends each other rank a part of the queries and
    of the results, and the keys and values of its heads.
    """
    if heads % parts or heads % key_heads:
        return None
    needed = _list_needed(heads, key_heads, parts)
    aligned = max(map(len, needed)) if _is_aligned(heads, key_heads, parts) else heads // parts
    sent = (heads + sum(map(len, needed))) / (parts * key_heads)
    return FormRatios(sent, aligned / key_heads)


def describe_tensor(tensor: Any) -> str:
    """Return the dtype and the shape of a tensor; `none` for anything else."""
    if not isinstance(tensor, torch.Tensor):
        return "none"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class _Call(NamedTuple):
    """The tensors of a call of attention on this rank."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None

    def __str__(self) -> str:
        tensors = ", ".join(map(describe_tensor, self[:3]))
        return f"attention of {tensors} with the mask {describe_tensor(self.mask)}"

    @property
    def mask_size(self) -> tuple[int, int]:
        """Rows and columns of the mask."""
        assert self.mask is not None
        rows, columns = (1, *self.mask.shape)[-2:]
        return rows, columns


class ShardedAttention(ABC):
    """Attention over sharded sequences, with the arguments of `scaled_dot_product_attention`."""

    def __init__(self, sequences: ShardedSequences) -> None:
        self.sequences = sequences
        self.is_full = False
        """True while attention is computed from full sequences, so that its kernels and products are those of one process."""
        self._parts, self._rank = sequences.parts, sequences.rank

    def __call__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Compute torch's attention over full sequences."""
        call = _Call(query, key, value, attn_mask)
        # A nested tensor has no shape.
        if any(tensor.is_nested for tensor in call[:3]):
            self.sequences.reject(
                f"Attention over sharded sequences failed: nested tensors cannot be divided along the sequence. Pad them, or set "
                f"{self.sequences.form} to 1."
            )
        problem = self._find_problem(call, causal=is_causal) or self._find_mask_problem(call)
        problem = problem or self._find_heads_problem(call, shares=options.get("enable_gqa", False))
        self.sequences.agree(
            f"{call}{' and is_causal' if is_causal else ''}",
            problem and f"Attention over sharded sequences failed: {problem}",
        )
        attention = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, **options)
        return self._compute(attention, call, causal=is_causal)

    @abstractmethod
    def _compute(self, attention: Callable[..., torch.Tensor], call: _Call, *, causal: bool) -> torch.Tensor:
        """Compute attention for the queries of this rank; collective."""

    @abstractmethod
    def _find_heads_problem(self, call: _Call, *, shares: bool) -> str | None:
        """Return why the heads of a call cannot be computed in this form, or None; `shares` if heads may share keys."""

    @abstractmethod
    def wrap(self, function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
        """Return an attention function of transformers that computes over full sequences; collective."""

    @abstractmethod
    def mask_slices(self, length: int) -> list[tuple[int, int]]:
        """Return the rows of the mask of a full sequence that attention on this rank needs, as pairs of begin and end."""

    @abstractmethod
    def find_call_problem(
        self, module: Any, query: torch.Tensor, mask: Any, options: Mapping[str, Any]
    ) -> str | None:
        """Return why an attention function of transformers would make other decisions than in one process, or None."""

    @contextmanager
    def allow_full(self) -> Iterator[None]:
        """Leave attention inside of the context as it is, since it has full sequences."""
        self.is_full = True
        try:
            yield
        finally:
            self.is_full = False

    def _find_problem(self, call: _Call, *, causal: bool) -> str | None:
        # torch's CausalBias, without importing its slow module.
        bias = sys.modules.get("torch.nn.attention.bias")
        is_causal_bias = bias is not None and isinstance(call.mask, bias.CausalBias)
        if is_causal_bias or (causal and call.mask is not None):
            return "it has is_causal=True or a CausalBias, and a mask. Give is_causal=True or a mask of tensors, one of them."
        num_queries, num_keys = call.query.size(-2), call.key.size(-2)
        if causal and num_queries != num_keys:
            return f"is_causal needs as many queries as keys, and this rank has {num_queries} and {num_keys}. Give a mask of tensors."
        if not self.sequences.is_shard(num_keys):
            lengths = ", ".join(map(str, sorted(self.sequences.lengths)))
            return (
                f"attention has {num_keys} keys on this rank, and its part of the sequence is {lengths} long. Give every sequence "
                "that is attended to in buffers of maybe_context_parallel; a cache of keys, as for generating text, needs "
                f"{self.sequences.form} to be 1."
            )
        return None

    def _find_mask_problem(self, call: _Call) -> str | None:
        if call.mask is None:
            return None
        num_queries, num_keys = call.query.size(-2), call.key.size(-2) * self._parts
        rows, columns = call.mask_size
        if (columns == call.key.size(-2) and rows == 1) or (
            columns in {1, num_keys} and rows in {1, num_queries, num_queries * self._parts}
        ):
            return None
        return (
            f"the attention mask has {rows} rows and {columns} columns on this rank, which has {num_queries} of the sequence's "
            f"{num_keys} positions. Give the rows of this rank, or all, with a column for every one of the {num_keys} keys; or one "
            "row with this rank's keys; or is_causal=True and no mask."
        )

    def _agree(self, module: Any, call: _Call, implementation: str, problem: str | None = None) -> None:
        """Compare a call of transformers with the other ranks, and raise on all of them if one cannot do it."""
        problem = self._find_shape_problem(call) or problem
        self.sequences.agree(
            f"{implementation} {call}",
            problem and f"Attention of {type(module).__name__} with {self.sequences.title} failed: {problem}",
        )

    def _find_shape_problem(self, call: _Call) -> str | None:
        num_queries, num_keys = call.query.size(-2), call.key.size(-2) * self._parts
        if not self.sequences.is_shard(call.key.size(-2)):
            return (
                f"it has {call.key.size(-2)} keys on this rank, which is not the length of its part of the sequence. Give every "
                "sequence that is attended to in buffers of maybe_context_parallel, and use_cache=False."
            )
        if call.mask is None:
            return None
        rows, columns = call.mask_size
        if columns in {1, num_keys} and rows in {1, num_queries, num_queries * self._parts}:
            return None
        return (
            f"its mask has {rows} rows and {columns} columns, and the sequence has {num_keys} positions. Give a mask of the full "
            "sequence, or none."
        )


class GatheredKeys(ShardedAttention):
    """Attention of the queries of this rank, for which keys and values of all ranks are gathered.

    With a causal mask a rank has a chunk of the front and one of the end of a sequence, so the work is balanced.
    """

    @override
    def _compute(self, attention: Callable[..., torch.Tensor], call: _Call, *, causal: bool) -> torch.Tensor:
        query = call.query
        key, value = (self.sequences.gather(tensor, -2) for tensor in (call.key, call.value))
        if not causal:
            return attention(query, key, value, attn_mask=self._local_mask(call))
        slices = sequence_slices(key.size(-2), self._parts, self._rank)
        pieces = torch.split(query, [end - begin for begin, end in slices], -2)
        outputs = [
            attention(
                piece,
                key[..., :end, :],
                value[..., :end, :],
                attn_mask=torch.ones(end - begin, end, dtype=torch.bool, device=query.device).tril(begin),
            )
            for piece, (begin, end) in zip(pieces, slices, strict=True)
        ]
        return torch.cat(outputs, -2)

    def _local_mask(self, call: _Call) -> torch.Tensor | None:
        """Return this rank's rows of a mask, for all keys."""
        if call.mask is None:
            return None
        rows, columns = call.mask_size
        if rows == 1 and columns == call.key.size(-2):
            return self.sequences.gather(call.mask.contiguous(), -1)
        return call.mask if rows in {1, call.query.size(-2)} else self.sequences.slice(call.mask, -2)

    @override
    def _find_heads_problem(self, call: _Call, *, shares: bool) -> str | None:
        return None

    @override
    def mask_slices(self, length: int) -> list[tuple[int, int]]:
        return sequence_slices(length, self._parts, self._rank)

    @override
    def find_call_problem(
        self, module: Any, query: torch.Tensor, mask: Any, options: Mapping[str, Any]
    ) -> str | None:
        is_causal = options.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if query.size(-2) == 1 and mask is None and is_causal:
            return (
                f"Attention of {type(module).__name__} with {self.sequences.title} failed: one position per rank is not masked by "
                "transformers. Pad the sequence to twice the number of context parallel ranks."
            )
        return None

    @override
    def wrap(self, function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
        if implementation == "sdpa":
            return function  # it calls torch's attention

        def attend(
            module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **options: Any
        ) -> Any:
            self._agree(module, _Call(query, key, value, mask), implementation, _find_mask_of_a_layer(module))
            key, value = self.sequences.gather(key, -2), self.sequences.gather(value, -2)
            if mask is not None and mask.size(-2) not in {1, query.size(-2)}:
                mask = self.sequences.slice(mask, -2)
            with self.allow_full():
                return function(module, query, key, value, mask, *args, **options)

        return attend


def _find_mask_of_a_layer(module: Any) -> str | None:
    """Return why rows of full sequences cannot be computed by an attention layer, or None."""
    if any(buffer.dim() > 1 and buffer.size(-1) == buffer.size(-2) > 1 for buffer in module.buffers(False)):
        return (
            "the layer has a mask of its own, which starts at position 0 on every rank. Create the model with "
            'attn_implementation="sdpa".'
        )
    return None


class ExchangedHeads(ShardedAttention):
    """Attention of full sequences for a part of the heads (Ulysses).

    Each rank receives its heads of the positions of all ranks, and sends the results of other positions back.
    """

    @override
    def _compute(self, attention: Callable[..., torch.Tensor], call: _Call, *, causal: bool) -> torch.Tensor:
        mask = self._full_mask(call)
        query, key, value = self._exchange_heads(call)
        output = attention(query, key, value, attn_mask=mask, is_causal=causal)
        return self._return_heads(output, _HEADS, _POSITIONS)

    def _exchange_heads(self, call: _Call) -> list[torch.Tensor]:
        """Return queries, keys and values of the heads of this rank with the positions of all ranks.

        Keys that several heads share are sent once to each rank that needs them. If the heads of a rank do not share them evenly,
        there is one for each head.
        """
        tensors = call[:3]
        heads = call.query.size(_HEADS)
        needed = [_list_needed(heads, tensor.size(_HEADS), self._parts) for tensor in tensors]
        pieces = [_split_heads(tensor, each) for tensor, each in zip(tensors, needed, strict=True)]
        shapes = [
            [*tensor.shape[:_HEADS], len(each[self._rank]), *tensor.shape[_POSITIONS:]]
            for tensor, each in zip(tensors, needed, strict=True)
        ]
        by_rank = self.sequences.exchange(list(zip(*pieces, strict=True)), [shapes] * self._parts)
        by_tensor = zip(tensors, zip(*by_rank, strict=True), strict=True)
        return [
            # Tensors of several dtypes are sent in one that has the values of all.
            self._align_heads(join_sequence(list(shards), -2).to(tensor.dtype), heads, tensor.size(_HEADS))
            for tensor, shards in by_tensor
        ]

    def _align_heads(self, tensor: torch.Tensor, heads: int, shared: int) -> torch.Tensor:
        """Return keys that the heads of this rank share evenly."""
        if _is_aligned(heads, shared, self._parts):
            return tensor
        size, group = heads // self._parts, heads // shared
        first = self._rank * size
        return _select_heads(tensor, [(first + head) // group - first // group for head in range(size)])

    def _return_heads(self, output: torch.Tensor, heads_dim: int, positions_dim: int) -> torch.Tensor:
        """Return the results of all heads for the positions of this rank."""
        shards = split_sequence(output, positions_dim, self._parts)
        shape = list(shards[0].shape)
        by_rank = self.sequences.exchange([[shard] for shard in shards], [[shape]] * self._parts)
        return torch.cat([tensor for (tensor,) in by_rank], heads_dim)

    def _full_mask(self, call: _Call) -> torch.Tensor | None:
        """Return all rows and columns of a mask, for the heads of this rank; collective."""
        mask = call.mask
        if mask is None:
            return None
        rows, columns = call.mask_size
        if rows == 1 and columns == call.key.size(_POSITIONS):
            mask = self.sequences.gather(mask.contiguous(), -1)
        elif rows == call.query.size(_POSITIONS) and mask.dim() > 1:
            mask = self.sequences.gather(mask.contiguous(), -2)
        heads = call.query.size(_HEADS)
        if mask.dim() >= _WITH_HEADS and mask.size(_HEADS) == heads:
            size = heads // self._parts
            return mask.narrow(_HEADS, self._rank * size, size)
        return mask

    @override
    def _find_heads_problem(self, call: _Call, *, shares: bool) -> str | None:
        if min(tensor.dim() for tensor in call[:3]) < _WITH_HEADS:
            return "queries and keys have no dimension of heads, which sp divides. Use cp instead of sp."
        heads, parts = call.query.size(_HEADS), self._parts
        if heads % parts:
            divisors = [str(size) for size in range(2, parts) if heads % size == 0]
            cure = f"Set sp to {' or '.join(divisors)}, or use" if divisors else "Use"
            return f"its number of heads, {heads} on this rank, is not a multiple of sp: {parts}. {cure} cp instead of sp."
        for tensor in (call.key, call.value):
            shared = tensor.size(_HEADS)
            if heads % shared or (shared not in {1, heads} and not shares):
                return f"{heads} heads of queries cannot share {shared} heads of keys and values. Give a divisor, with enable_gqa=True."
        mask = call.mask
        if mask is not None and mask.dim() >= _WITH_HEADS and mask.size(_HEADS) not in {1, heads}:
            return f"its mask is for {mask.size(_HEADS)} heads, and there are {heads}. Give a mask of 1 or {heads} heads."
        return None

    @override
    def mask_slices(self, length: int) -> list[tuple[int, int]]:
        return [(0, length)]

    @override
    def find_call_problem(
        self, module: Any, query: torch.Tensor, mask: Any, options: Mapping[str, Any]
    ) -> str | None:
        heads = query.size(_HEADS)
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        names = [name for name in _PER_HEAD if options.get(name) is not None]
        names += [name for name, tensor in own if heads in tensor.shape]
        if not names:
            return None
        return (
            f"Attention of {type(module).__name__} with {self.sequences.title} failed: it has values for all heads "
            f"({', '.join(names)}), and a rank computes a part of them. Use cp instead of sp."
        )

    @override
    def wrap(self, function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
        def attend(
            module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **options: Any
        ) -> Any:
            call = _Call(query, key, value, mask)
            self._agree(module, call, implementation, self._find_heads_problem(call, shares=True))
            group = query.size(_HEADS) // key.size(_HEADS)
            mask = self._full_mask(call)
            # Before transformers repeats the keys that heads share.
            query, key, value = self._exchange_heads(call)
            local_group = query.size(_HEADS) // key.size(_HEADS)
            layer = module if local_group == group else _LayerWithGroups(module, local_group)
            with self.allow_full():
                output, _ = function(layer, query, key, value, mask, *args, **options)
            return self._return_heads(output, 2, 1), None

        return attend


class _LayerWithGroups:
    """An attention layer of transformers in which another number of heads share a key.

    Args:
        layer: The layer.
        groups: Heads of queries for each head of keys.
    """

    def __init__(self, layer: Any, groups: int) -> None:
        self._layer = layer
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _list_needed(heads: int, shared: int, parts: int) -> list[range]:
    """Return the heads of keys that the heads of each rank need."""
    size, group = heads // parts, heads // shared
    return [range(rank * size // group, ((rank + 1) * size - 1) // group + 1) for rank in range(parts)]


def _is_aligned(heads: int, shared: int, parts: int) -> bool:
    """Return whether the heads of each rank share its keys evenly."""
    size, group = heads // parts, heads // shared
    return size % group == 0 or group % size == 0


def _split_heads(tensor: torch.Tensor, needed: Sequence[range]) -> Sequence[torch.Tensor]:
    """Return the heads that each rank needs."""
    heads = [head for each in needed for head in each]
    if heads != list(range(tensor.size(_HEADS))):
        tensor = _select_heads(tensor, heads)
    return torch.split(tensor, [len(each) for each in needed], _HEADS)


def _select_heads(tensor: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    if tensor.size(_HEADS) == 1:
        return tensor.expand(*tensor.shape[:_HEADS], len(heads), *tensor.shape[_POSITIONS:])
    return tensor.index_select(_HEADS, torch.tensor(heads, device=tensor.device))
