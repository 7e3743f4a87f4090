"""Context and sequence parallelism: sequences sharded over ranks, in whose context attention covers full sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import overrides
from typing_extensions import override

from accel_runtime.foundation.torch_internals import function_modes
from accel_runtime.parallel.sharded_attention import (
    Form,
    ShardedAttention,
    ShardedSequences,
    build_attention,
    describe_tensor,
    sequence_dim,
    sequence_slices,
)
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
    form: Form = "cp",
) -> Iterator[None]:
    """Shard sequences inside of the context; attention covers the full sequence.

    Args:
        group: The ranks that shard sequences; with None or one rank nothing is sharded.
        buffers: Tensors with a sequence dimension, which are sharded in place.
        buffer_seq_dims: The sequence dimension of each.
        no_restore_buffers: Buffers that stay sharded at the end.
        form: The key of the profile: attention gathers keys (`cp`), or exchanges heads (`sp`).

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
    problem = _find_problem(tensors, dims, kept_ids, 1 if group is None else group.size(), form)
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
        attention = build_attention(ShardedSequences(group, tensors, dims, form))
        with _PatchedAttention(attention), shard_transformers(attention):
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
    sequences.agree(f"gather_sequence of {describe_tensor(tensor)} along {dim}")
    return sequences.gather(tensor, dim)


def _find_problem(
    tensors: list[torch.Tensor], dims: list[int], kept_ids: set[int], parts: int, form: Form
) -> str | None:
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
            sequence_slices(tensor.shape[sequence_dim(tensor, dim)], parts, 0, form)
            if tensor.requires_grad:
                return (
                    f"maybe_context_parallel cannot shard a buffer of shape {list(tensor.shape)}: it is a tensor that requires "
                    "gradients, which sharding in place would lose. Give inputs, labels and positions as buffers, and no parameters."
                )
    except ValueError as error:
        return str(error)
    return None


class _PatchedAttention(overrides.TorchFunctionMode):
    """Replace torch's attention inside of the context, also in recomputation."""

    def __init__(self, attention: ShardedAttention) -> None:
        super().__init__()
        self._attention = attention

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._attention.is_full:
            return func(*args, **kwargs or {})
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
                f"Compiling with {self._attention.sequences.title} failed: torch.compile does not let attention in activation checkpoints be "
                "replaced. Compile the model without activation checkpointing, or only what is inside of a checkpoint."
            )
        result = func(*args, **kwargs or {})
        if name in _BATCHED_PRODUCTS:
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
            "sequence, and every rank would add them. Create it without, or set cp and sp to 1."
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
