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

from accel_runtime.foundation.torch_internals import function_modes
from accel_runtime.parallel.sequence_shards import ShardedSequences, sequence_dim, sequence_slices
from accel_runtime.parallel.transformers_attention import shard_transformers

__all__ = ["gather_sequence", "shard_sequences"]

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
_COMPILED_CHECKPOINT = "tag_activation_checkpoint"
"""The operation into which torch.compile puts a checkpointed function, out of reach of a mode."""
_BATCHED_PRODUCTS = {
    "__matmul__": 0,
    "__rmatmul__": 0,
    "matmul": 0,
    "bmm": 0,
    "baddbmm": 1,
    "einsum": 1,
}
"""Products that attention of a script's own uses, by function name, with the index of the first factor."""
_FACTORS, _BATCHED = 2, 3
"""Factors of a product of queries and keys, and the least number of their dimensions."""


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
        MismatchError: The ranks have buffers of different shapes.
        RuntimeError: The contexts are nested.
    """
    if any(isinstance(mode, _PatchedAttention) for mode in function_modes()):
        raise RuntimeError(
            "Cannot nest maybe_context_parallel: sequences would be sharded twice. Pass all buffers to one."
        )
    tensors, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept_ids = {id(tensor) for tensor in no_restore_buffers or ()}
    is_alone = group is None or group.size() == 1
    problem = _find_problem(tensors, dims, kept_ids, 1 if group is None else group.size())
    if group is None or is_alone:
        if problem:
            raise ValueError(problem)
        yield
        return
    shapes = ", ".join(
        f"{list(tensor.shape)} along {dim}" for tensor, dim in zip(tensors, dims, strict=False)
    )
    ShardedSequences(group).agree(f"maybe_context_parallel of buffers of shape {shapes or 'none'}", problem)
    # Replace the storage instead of its values, since inputs and labels are often views of one tensor.
    full_tensors = [tensor.data for tensor in tensors]
    try:
        for tensor, dim in zip(tensors, dims, strict=True):
            tensor.data = ShardedSequences(group).slice(tensor.data, dim)
        sequences = ShardedSequences(group, tensors, dims)
        patched = _PatchedAttention(_Attention(sequences))
        with patched, shard_transformers(sequences, patched.allow_products):
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
        MismatchError: The shapes of the ranks differ.
    """
    dim = sequence_dim(tensor, dim)
    if group is None or group.size() == 1:
        return tensor
    sequences = ShardedSequences(group)
    sequences.agree(f"gather_sequence of {_describe(tensor)} along {dim}")
    return sequences.gather(tensor, dim)


def _find_problem(tensors: list[torch.Tensor], dims: list[int], kept_ids: set[int], parts: int) -> str | None:
    """Return why sequences cannot be sharded, or None."""
    if len(tensors) != len(dims):
        return (
            f"maybe_context_parallel cannot shard its buffers: there are {len(tensors)} buffers and {len(dims)} dimensions. Give "
            "the sequence dimension of every buffer in buffer_seq_dims."
        )
    if kept_ids - {id(tensor) for tensor in tensors}:
        return (
            "maybe_context_parallel cannot keep a tensor sharded: no_restore_buffers has one that is not among buffers. Give it in "
            "both, or in neither."
        )
    try:
        for tensor, dim in zip(tensors, dims, strict=True):
            sequence_slices(tensor.shape[sequence_dim(tensor, dim)], parts, 0)
            if tensor.requires_grad:
                return (
                    f"maybe_context_parallel cannot shard a buffer of shape {list(tensor.shape)}: it is a tensor that requires "
                    "gradients, which sharding in place would lose. Give inputs, labels and positions as buffers, and no parameters."
                )
    except ValueError as error:
        return str(error)
    return None


def _describe(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class _Attention:
    """`scaled_dot_product_attention` for sharded sequences.

    Keys and values are gathered, and each rank computes the rows of its queries. With a causal mask a rank has a chunk of the
    front and one of the end of a sequence, so the work is balanced.
    """

    def __init__(self, sequences: ShardedSequences) -> None:
        self.sequences = sequences
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
        self._agree(query, key, value, attn_mask, causal=is_causal)
        key, value = (self.sequences.gather(tensor, -2) for tensor in (key, value))
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

    def _agree(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        causal: bool,
    ) -> None:
        """Compare the call with the other ranks, and raise on all of them if one cannot do it."""
        # A nested tensor has no shape.
        problem = self._find_nested(query, key, value)
        if problem:
            self.sequences.reject(problem)
        problem = self._find_problem(query, key, mask, causal=causal) or self._find_mask_problem(
            mask, query, key
        )
        tensors = ", ".join(map(_describe, (query, key, value)))
        self.sequences.agree(
            f"attention of {tensors} with the mask {_describe(mask)}{' and is_causal' if causal else ''}",
            problem,
        )

    @staticmethod
    def _find_nested(*tensors: torch.Tensor) -> str | None:
        if not any(tensor.is_nested for tensor in tensors):
            return None
        return (
            "Attention over sharded sequences failed: nested tensors cannot be divided along the sequence. Pad them, or set cp to "
            "1."
        )

    def _find_problem(
        self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
    ) -> str | None:
        # torch's CausalBias, without importing its slow module.
        bias = sys.modules.get("torch.nn.attention.bias")
        is_causal_bias = bias is not None and isinstance(mask, bias.CausalBias)
        if is_causal_bias or (causal and mask is not None):
            return (
                "Attention over sharded sequences failed: it has is_causal=True or a CausalBias, and a mask. Give is_causal=True or "
                "a mask of tensors, one of them."
            )
        if causal and query.size(-2) != key.size(-2):
            return (
                f"Attention over sharded sequences failed: is_causal needs as many queries as keys, and this rank has "
                f"{query.size(-2)} and {key.size(-2)}. Give a mask of tensors."
            )
        if not self.sequences.is_shard(key.size(-2)):
            lengths = ", ".join(map(str, sorted(self.sequences.lengths)))
            return (
                f"Attention over sharded sequences failed: attention has {key.size(-2)} keys on this rank, and its part of the "
                f"sequence is {lengths} long. Give every sequence that is attended to in buffers of maybe_context_parallel; a cache "
                "of keys, as for generating text, needs cp to be 1."
            )
        return None

    def _find_mask_problem(
        self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
    ) -> str | None:
        if mask is None:
            return None
        num_queries, num_keys = query.size(-2), key.size(-2) * self._parts
        rows, columns = (1, *mask.shape)[-2:]
        if (columns == key.size(-2) and rows == 1) or (
            columns in {1, num_keys} and rows in {1, num_queries, num_queries * self._parts}
        ):
            return None
        return (
            f"Attention over sharded sequences failed: the attention mask has {rows} rows and {columns} columns on this rank, which "
            f"has {num_queries} of the sequence's {num_keys} positions. Give the rows of this rank, or all, with a column for every "
            f"one of the {num_keys} keys; or one row with this rank's keys; or is_causal=True and no mask."
        )

    def _local_mask(
        self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor | None:
        """Return this rank's rows of a mask, for all keys."""
        if mask is None:
            return None
        rows, columns = (1, *mask.shape)[-2:]
        if rows == 1 and columns == key.size(-2) // self._parts:
            return self.sequences.gather(mask.contiguous(), -1)
        return mask if rows in {1, query.size(-2)} else self.sequences.slice(mask, -2)


class _PatchedAttention(overrides.TorchFunctionMode):
    """Replace torch's attention inside of the context, also in recomputation."""

    def __init__(self, attention: _Attention) -> None:
        super().__init__()
        self._attention = attention
        self._products_allowed = False

    @contextmanager
    def allow_products(self) -> Iterator[None]:
        """Allow products of queries and keys inside of the context, since the keys are gathered."""
        self._products_allowed = True
        try:
            yield
        finally:
            self._products_allowed = False

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs or {})
        if func in _CALLERS_OF_ATTENTION:
            if func is F.multi_head_attention_forward and (
                problem := _find_multi_head_problem(*args, **kwargs or {})
            ):
                self._attention.sequences.reject(problem)
            with self:
                return _without_dispatch(func)(*args, **kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _UNSUPPORTED_KERNELS:
            self._attention.sequences.reject(
                f"Attention over sharded sequences failed: {_UNSUPPORTED_KERNELS[name]} sees this rank's part of the sequence only. "
                "Use torch.nn.functional.scaled_dot_product_attention inside maybe_context_parallel."
            )
        if name == _COMPILED_CHECKPOINT:
            self._attention.sequences.reject(
                "Compiling with context parallelism failed: torch.compile does not let attention in activation checkpoints be "
                "replaced. Compile the model without activation checkpointing, or only what is inside of a checkpoint."
            )
        result = func(*args, **kwargs or {})
        if name in _BATCHED_PRODUCTS and not self._products_allowed:
            self._check_product(result, args[_BATCHED_PRODUCTS[name] :])
        return result

    def _check_product(self, product: Any, factors: tuple[Any, ...]) -> None:
        """Reject the product of the queries and keys of this rank, which attention of a script's own computes."""
        sequences = self._attention.sequences
        factors = tuple(factors[0]) if isinstance(factors[0], (list, tuple)) else factors[:2]
        # A weight has two dimensions. An outer product, as for rotary embeddings, sums over one element, and a product with values
        # of a full sequence over all of them.
        if (
            _is_batch_of_squares(product, sequences.lengths)
            and len(factors) == _FACTORS
            and all(factor.dim() >= _BATCHED for factor in factors)
            and factors[0].size(-1) not in {1, *(length * sequences.parts for length in sequences.lengths)}
        ):
            sequences.reject(
                f"Attention over sharded sequences failed: a product of shape {list(product.shape)} has the queries and keys of "
                "this rank only. Use torch.nn.functional.scaled_dot_product_attention inside maybe_context_parallel."
            )


def _is_batch_of_squares(product: Any, lengths: AbstractSet[int]) -> bool:
    if not isinstance(product, torch.Tensor) or product.dim() < _BATCHED:
        return False
    return product.size(-1) == product.size(-2) and product.size(-1) in lengths


def _find_multi_head_problem(*args: Any, **options: Any) -> str | None:
    """Return why arguments of `multi_head_attention_forward` do not use `scaled_dot_product_attention`, or None."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **options)
    bound.apply_defaults()
    arguments = bound.arguments
    if arguments["need_weights"]:
        return (
            "nn.MultiheadAttention over sharded sequences failed: attention weights are computed over this rank's part of the "
            "sequence only. Call it with need_weights=False inside maybe_context_parallel."
        )
    if arguments["bias_k"] is not None or arguments["add_zero_attn"]:
        return (
            "nn.MultiheadAttention over sharded sequences failed: add_bias_kv and add_zero_attn add keys that are not of the "
            "sequence, and every rank would add them. Create it without, or set cp to 1."
        )
    return None


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
