"""Context parallelism: exact attention over sequences that are sharded over ranks, forward and backward."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import overrides
from typing_extensions import override

from accel_runtime.torch_internals import function_modes

__all__ = [
    "gather_sequence",
    "join_sequence",
    "sequence_slices",
    "shard_sequences",
    "slice_sequence",
]

# torch 2.13 has other names for them, and warns of the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

_CALLERS_OF_ATTENTION = {
    F.multi_head_attention_forward,
    torch.Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
}
"""Functions of torch that call attention."""
_UNSUPPORTED_KERNELS = {
    "flex_attention": "flex_attention",
    "flex_attention_backward": "flex_attention",
    "_native_multi_head_attention": "the fused kernel of nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "the fused kernel of nn.TransformerEncoderLayer",
}
"""Attention kernels that would see only a shard of the sequence, by function name."""


@contextmanager
def shard_sequences(
    group: dist.ProcessGroup | None,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: AbstractSet[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Shard sequences inside of the context; attention covers the full sequence.

    Args:
        group: The context parallel ranks; with None or one rank nothing is sharded.
        buffers: Tensors with a sequence dimension, which are sharded in place.
        buffer_seq_dims: The sequence dimension of each.
        no_restore_buffers: Buffers that stay sharded at the end.

    Raises:
        ValueError: The arguments do not match, or a length is not divisible.
        RuntimeError: The contexts are nested.
    """
    if any(isinstance(mode, _PatchedAttention) for mode in function_modes()):
        raise RuntimeError(
            "Cannot nest maybe_context_parallel: sequences would be sharded twice. Pass all buffers to one."
        )
    tensors, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept_ids = {id(tensor) for tensor in no_restore_buffers or ()}
    _check(tensors, dims, kept_ids)
    parts = 1 if group is None else group.size()
    lengths = {tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)}
    for length in lengths:
        sequence_slices(length, parts, 0)
    if group is None or parts == 1:
        yield
        return
    # Replace the storage instead of its values, since inputs and labels are often views of one tensor.
    full_tensors = [tensor.data for tensor in tensors]
    try:
        for tensor, dim in zip(tensors, dims, strict=True):
            tensor.data = slice_sequence(tensor.data, dim, parts, group.rank())
        with _PatchedAttention(_Attention(group, {length // parts for length in lengths})):
            yield
    finally:
        for tensor, full in zip(tensors, full_tensors, strict=True):
            if id(tensor) not in kept_ids:
                tensor.data = full


def gather_sequence(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather full sequences from the shards of a group, with gradients.

    Args:
        tensor: The shard of this rank; of equal shape on all ranks.
        dim: The sequence dimension.
        group: The ranks; with None or one rank the tensor is returned.

    Raises:
        ValueError: The dimension does not exist.
    """
    dim = sequence_dim(tensor, dim)
    if group is None or group.size() == 1:
        return tensor
    full: torch.Tensor = _GatherSequence.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return full


def _check(tensors: list[torch.Tensor], dims: list[int], kept_ids: set[int]) -> None:
    if len(tensors) != len(dims):
        raise ValueError(
            f"buffer_seq_dims says for every buffer which dimension is the sequence: there are {len(tensors)} buffers and "
            f"{len(dims)} dimensions"
        )
    if kept_ids - {id(tensor) for tensor in tensors}:
        raise ValueError("no_restore_buffers holds a tensor that is not among buffers: give it in both")
    for tensor, dim in zip(tensors, dims, strict=True):
        sequence_dim(tensor, dim)
        if tensor.requires_grad:
            raise ValueError(
                f"buffers holds a tensor of shape {list(tensor.shape)} that requires gradients, and cutting it in place "
                "would lose them: cut inputs, labels and positions, and let parameters be whole"
            )


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


class _Attention:
    """`scaled_dot_product_attention` for sharded sequences.

    Keys and values are gathered, and each rank computes the rows of its queries. With a causal mask a rank has a chunk of the
    front and one of the end of a sequence, so the work is balanced.
    """

    def __init__(self, group: dist.ProcessGroup, lengths: set[int]) -> None:
        self._group, self._lengths = group, lengths
        self._parts, self._rank = group.size(), group.rank()

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
        self._check(query, key, attn_mask, causal=is_causal)
        key, value = (gather_sequence(tensor, -2, self._group) for tensor in (key, value))
        attention: Callable[..., torch.Tensor] = partial(
            F.scaled_dot_product_attention, dropout_p=dropout_p, **options
        )
        if not is_causal:
            return attention(query, key, value, attn_mask=self._local_mask(attn_mask, query, key))
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

    def _check(
        self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
    ) -> None:
        if query.is_nested or key.is_nested:
            raise ValueError(
                "nested tensors cannot be divided along the sequence: pad them, or leave cp at 1"
            )
        # torch's CausalBias, without importing its slow module.
        bias = sys.modules.get("torch.nn.attention.bias")
        is_causal_bias = bias is not None and isinstance(mask, bias.CausalBias)
        if is_causal_bias or (causal and mask is not None):
            raise ValueError(
                "attention over divided sequences takes is_causal=True or a mask of tensors, one of them"
            )
        if causal and query.size(-2) != key.size(-2):
            raise ValueError(
                f"is_causal with sharded sequences needs as many queries as keys, got {query.size(-2)} and {key.size(-2)} on this "
                "rank."
            )
        if self._lengths and key.size(-2) not in self._lengths:
            lengths = ", ".join(map(str, sorted(self._lengths)))
            raise ValueError(
                f"attention has {key.size(-2)} keys on this rank, and its part of the sequence is {lengths} long: every "
                "sequence that is attended to has to be among the buffers of maybe_context_parallel (a cache of keys, as "
                "for generating text, cannot be divided)"
            )

    def _local_mask(
        self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor | None:
        """Return this rank's rows of a mask, for all keys."""
        if mask is None:
            return None
        num_queries, num_keys = query.size(-2), key.size(-2)
        rows, columns = (1, *mask.shape)[-2:]
        if columns == num_keys // self._parts and rows == 1:
            return gather_sequence(mask.contiguous(), -1, self._group)
        if columns not in {1, num_keys} or rows not in {1, num_queries, num_queries * self._parts}:
            raise ValueError(
                f"the attention mask has {rows} rows and {columns} columns on this rank, which has {num_queries} of the sequence's "
                f"{num_keys} places: give the rows of this rank, or all, with a column for every one of the {num_keys} keys; one "
                "row with this rank's keys; or is_causal=True and no mask"
            )
        return mask if rows in {1, num_queries} else slice_sequence(mask, -2, self._parts, self._rank)


class _PatchedAttention(overrides.TorchFunctionMode):
    """Replace torch's attention inside of the context, also in recomputation."""

    def __init__(self, attention: _Attention) -> None:
        super().__init__()
        self._attention = attention

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs or {})
        if func in _CALLERS_OF_ATTENTION:
            if func is F.multi_head_attention_forward:
                _check_multi_head_options(*args, **kwargs or {})
            with self:
                return _without_dispatch(func)(*args, **kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _UNSUPPORTED_KERNELS:
            raise ValueError(
                f"{_UNSUPPORTED_KERNELS[name]} sees this rank's part of the sequence only: inside maybe_context_parallel, use "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        return func(*args, **kwargs or {})


def _check_multi_head_options(*args: Any, **options: Any) -> None:
    """Raise ValueError for arguments of `multi_head_attention_forward` that do not use `scaled_dot_product_attention`."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **options)
    bound.apply_defaults()
    arguments = bound.arguments
    if arguments["need_weights"]:
        raise ValueError(
            "nn.MultiheadAttention was asked for attention weights, and it computes those over this rank's part of the "
            "sequence only: call it with need_weights=False inside maybe_context_parallel"
        )
    if arguments["bias_k"] is not None or arguments["add_zero_attn"]:
        raise ValueError(
            "nn.MultiheadAttention with add_bias_kv or add_zero_attn adds keys that are not of the sequence, and every "
            "rank would add them: make it without, or leave cp at 1"
        )


def _without_dispatch(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a torch function without its dispatch to modes, so that a mode applies inside of it."""
    function: Any = inspect.unwrap(func)
    dispatch_checks = [name for name in function.__globals__ if name.startswith("has_torch_function")]
    names = function.__globals__ | dict.fromkeys(dispatch_checks, lambda *_: False)
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def sequence_slices(length: int, parts: int, part: int) -> list[tuple[int, int]]:
    """Return the chunks of a shard, as pairs of begin and end.

    A shard has a chunk of the front and its mirror image at the end, to balance causal attention. A length that is only
    divisible by the number of shards is sharded contiguously.

    Raises:
        ValueError: The length is not divisible.
    """
    if length % parts:
        near = f"{length - length % parts} or {length + parts - length % parts}"
        raise ValueError(
            f"a sequence of {length} cannot be divided equally among {parts} ranks (cp: {parts}): pad or cut it to {near}"
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


def join_sequence(shards: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the full sequence from all shards."""
    parts, length = len(shards), shards[0].shape[dim] * len(shards)
    pieces: list[tuple[int, torch.Tensor]] = []
    for part, tensor in enumerate(shards):
        slices = sequence_slices(length, parts, part)
        chunks = torch.split(tensor, [end - begin for begin, end in slices], dim)
        pieces += [(begin, piece) for (begin, _), piece in zip(slices, chunks, strict=True)]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)
