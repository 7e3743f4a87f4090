"""Sequences divided among ranks: attention that is exact over the whole of them, forward and backward."""

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

from accel_runtime.parallel.spans import own_part, sequence_dim, spans, whole_of

__all__ = ["divided", "gathered"]

# torch 2.13 has other names for them, and warns of the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

_COMPOSED = {
    F.multi_head_attention_forward,
    torch.Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
}
"""Functions of torch's with attention inside: as it is, or once more for the backward pass."""
_REFUSED = {
    "flex_attention": "flex_attention",
    "flex_attention_backward": "flex_attention",
    "_native_multi_head_attention": "the fused kernel of nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "the fused kernel of nn.TransformerEncoderLayer",
}
"""Attention that torch computes otherwise, by the name of the function: it would see a part of the sequence only."""


@contextmanager
def divided(
    group: dist.ProcessGroup | None,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: AbstractSet[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Inside, tensors hold this rank's part of every sequence, and attention is over the whole of it.

    Args:
        group: The ranks that divide sequences; None, or one rank: nothing is divided.
        buffers: Tensors with a dimension for the sequence, which are cut in place.
        buffer_seq_dims: For each, which dimension that is.
        no_restore_buffers: Those of them that stay cut at the end.

    Raises:
        ValueError: The arguments do not fit each other, or a sequence cannot be divided equally.
        RuntimeError: Sequences are divided already.
    """
    # What torch's own compiler asks; nothing public names it (torch 2.13).
    modes: list[Any] = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call] # noqa: SLF001
    if any(isinstance(mode, _Intercepted) for mode in modes):
        raise RuntimeError(
            "maybe_context_parallel inside maybe_context_parallel would divide sequences twice: name all buffers in one"
        )
    tensors, dims = list(buffers or ()), list(buffer_seq_dims or ())
    lasting = {id(tensor) for tensor in no_restore_buffers or ()}
    _check(tensors, dims, lasting)
    parts = 1 if group is None else group.size()
    lengths = {tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)}
    for length in lengths:
        spans(length, parts, 0)
    if group is None or parts == 1:
        yield
        return
    # Other storage, not other numbers in it: inputs and labels are often views of one tensor.
    before = [tensor.data for tensor in tensors]
    try:
        for tensor, dim in zip(tensors, dims, strict=True):
            tensor.data = own_part(tensor.data, dim, parts, group.rank())
        with _Intercepted(_Attention(group, {length // parts for length in lengths})):
            yield
    finally:
        for tensor, whole in zip(tensors, before, strict=True):
            if id(tensor) not in lasting:
                tensor.data = whole


def gathered(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The whole sequences out of the parts of a group's ranks; gradients flow back to the parts.

    Args:
        tensor: This rank's part, as `divided` cuts it; of equal shape on all ranks.
        dim: The dimension of the sequence.
        group: The ranks; None, or one rank: it is whole already.

    Raises:
        ValueError: There is no such dimension.
    """
    dim = sequence_dim(tensor, dim)
    if group is None or group.size() == 1:
        return tensor
    whole: torch.Tensor = _Gather.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return whole


def _check(tensors: list[torch.Tensor], dims: list[int], lasting: set[int]) -> None:
    if len(tensors) != len(dims):
        raise ValueError(
            f"buffer_seq_dims says for every buffer which dimension is the sequence: there are {len(tensors)} buffers and "
            f"{len(dims)} dimensions"
        )
    if lasting - {id(tensor) for tensor in tensors}:
        raise ValueError("no_restore_buffers holds a tensor that is not among buffers: give it in both")
    for tensor, dim in zip(tensors, dims, strict=True):
        sequence_dim(tensor, dim)
        if tensor.requires_grad:
            raise ValueError(
                f"buffers holds a tensor of shape {list(tensor.shape)} that requires gradients, and cutting it in place "
                "would lose them: cut inputs, labels and positions, and let parameters be whole"
            )


class _Gather(torch.autograd.Function):
    """Whole sequences out of the parts of all ranks; backward, every rank's share of the gradient of its part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        parts = own.new_empty((group.size(), *own.shape))
        # Flat: backends differ in what other shapes they take.
        _all_gather(parts.view(-1), own.reshape(-1), group=group)
        return whole_of(list(parts.unbind()), dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        count = ctx.group.size()
        parts = torch.stack([own_part(grad, ctx.dim, count, rank) for rank in range(count)])
        own = parts.new_empty(parts.shape[1:])
        _reduce_scatter(own.view(-1), parts.view(-1), group=ctx.group)
        return own, None, None


class _Attention:
    """`scaled_dot_product_attention` for ranks that have a part of every sequence each.

    Keys and values of all ranks are gathered, and a rank computes the rows of its own queries. A causal rank has a
    piece of the front and one of the end of a sequence, so that all have as much to do.

    Args:
        group: The ranks.
        lengths: How long this rank's parts of sequences are; empty where it is not known.
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
        """As torch's, over whole sequences.

        Raises:
            ValueError: Something of which it is not known which part of the sequence it belongs to.
        """
        self._check(query, key, attn_mask, causal=is_causal)
        key, value = (gathered(tensor, -2, self._group) for tensor in (key, value))
        rows: Callable[..., torch.Tensor] = partial(
            F.scaled_dot_product_attention, dropout_p=dropout_p, **options
        )
        if not is_causal:
            return rows(query, key, value, attn_mask=self._masked(attn_mask, query, key))
        own = spans(key.size(-2), self._parts, self._rank)
        pieces = torch.split(query, [end - begin for begin, end in own], -2)
        found = [
            rows(piece, key[..., :end, :], value[..., :end, :], attn_mask=_causal(begin, end, query.device))
            for piece, (begin, end) in zip(pieces, own, strict=True)
        ]
        return torch.cat(found, -2)

    def _check(
        self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
    ) -> None:
        if query.is_nested or key.is_nested:
            raise ValueError(
                "nested tensors cannot be divided along the sequence: pad them, or leave cp at 1"
            )
        if _is_causal_bias(mask) or (causal and mask is not None):
            raise ValueError(
                "attention over divided sequences takes is_causal=True or a mask of tensors, one of them"
            )
        if causal and query.size(-2) != key.size(-2):
            raise ValueError(
                f"is_causal over divided sequences needs as many queries as keys; there are {query.size(-2)} and "
                f"{key.size(-2)} on this rank"
            )
        if self._lengths and key.size(-2) not in self._lengths:
            lengths = ", ".join(map(str, sorted(self._lengths)))
            raise ValueError(
                f"attention has {key.size(-2)} keys on this rank, and its part of the sequence is {lengths} long: every "
                "sequence that is attended to has to be among the buffers of maybe_context_parallel (a cache of keys, as "
                "for generating text, cannot be divided)"
            )

    def _masked(
        self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor | None:
        """This rank's rows of a mask, for all keys."""
        if mask is None:
            return None
        own, whole = query.size(-2), key.size(-2)
        rows, columns = (1, *mask.shape)[-2:]
        if columns == whole // self._parts and rows == 1:
            return gathered(mask.contiguous(), -1, self._group)
        if columns not in {1, whole} or rows not in {1, own, own * self._parts}:
            raise ValueError(
                f"the attention mask has {rows} rows and {columns} columns on this rank, which has {own} of the sequence's "
                f"{whole} places: give the rows of this rank, or all, with a column for every one of the {whole} keys; one "
                "row with this rank's keys; or is_causal=True and no mask"
            )
        return mask if rows in {1, own} else own_part(mask, -2, self._parts, self._rank)


def _is_causal_bias(mask: object) -> bool:
    """Return True for torch's CausalBias; its module is slow to import, and need not be where a script has none."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


class _Intercepted(overrides.TorchFunctionMode):
    """Inside, torch's attention is this one, whoever calls it; also where activations are computed again."""

    def __init__(self, attention: _Attention) -> None:
        super().__init__()
        self._attention = attention

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs or {})
        if func in _COMPOSED:
            if func is F.multi_head_attention_forward:
                _check_heads(*args, **kwargs or {})
            with self:
                return _opened(func)(*args, **kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _REFUSED:
            raise ValueError(
                f"{_REFUSED[name]} sees this rank's part of the sequence only: inside maybe_context_parallel, use "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        return func(*args, **kwargs or {})


def _causal(begin: int, end: int, device: torch.device) -> torch.Tensor | None:
    """Which of the keys up to `end` the queries from `begin` may see: `[end - begin, end]`."""
    return torch.ones(end - begin, end, dtype=torch.bool, device=device).tril(begin)


def _check_heads(*args: Any, **options: Any) -> None:
    """Refuse what `multi_head_attention_forward` computes without `scaled_dot_product_attention`, or adds to it."""
    told = inspect.signature(F.multi_head_attention_forward).bind(*args, **options)
    told.apply_defaults()
    given = told.arguments
    if given["need_weights"]:
        raise ValueError(
            "nn.MultiheadAttention was asked for attention weights, and it computes those over this rank's part of the "
            "sequence only: call it with need_weights=False inside maybe_context_parallel"
        )
    if given["bias_k"] is not None or given["add_zero_attn"]:
        raise ValueError(
            "nn.MultiheadAttention with add_bias_kv or add_zero_attn adds keys that are not of the sequence, and every "
            "rank would add them: make it without, or leave cp at 1"
        )


def _opened(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's that does not ask modes to call it, so that one can be in force inside it."""
    inner: Any = inspect.unwrap(func)
    asking = [name for name in inner.__globals__ if name.startswith("has_torch_function")]
    names = inner.__globals__ | dict.fromkeys(asking, lambda *_: False)
    opened = FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
    opened.__kwdefaults__ = inner.__kwdefaults__
    return opened
