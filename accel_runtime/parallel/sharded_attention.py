"""Exact attention over sequences that are sharded over ranks, in two forms: keys are gathered (`cp`), or heads exchanged (`sp`).

A form computes torch's attention and calls attention functions of transformers. It has the checks of its calls, which all ranks
make together.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from typing_extensions import override

from accel_runtime.parallel.sequence_shards import (
    ShardedSequences,
    join_sequence,
    sequence_slices,
    split_sequence,
)

__all__ = ["FormRatios", "ShardedAttention", "build_attention", "compare_forms", "describe_tensor"]

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
