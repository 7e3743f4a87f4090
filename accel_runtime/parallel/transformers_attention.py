"""Attention of transformers models over sharded sequences: masks from full positions, and full sequences for each layer.

A model of transformers makes its attention mask from the lengths and positions that it sees, which are those of one rank. Inside
of `shard_transformers` its mask functions see full lengths, masks and positions, so they make the decisions of one process, and
return the rows that attention needs on this rank. The functions are replaced where all models look them up (transformers 4.57 to 5.23).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from accel_runtime.foundation.torch_internals import without_compilation
from accel_runtime.parallel.sharded_attention import (
    ShardedAttention,
    ShardedSequences,
    describe_tensor,
    slice_sequence,
)

__all__ = ["shard_transformers"]

_LAYERS_WITH_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_MASK_FUNCTIONS = (
    "_preprocess_mask_arguments",
    "packed_sequence_compatibility_function",
    "maybe_pad_block_sequence_ids",
    "ALL_MASK_ATTENTION_FUNCTIONS",
)
_PADDING_MASK_DIMENSIONS = 2
_SHIFTING_LOSSES = ("ForCausalLM", "ForConditionalGeneration")
_POOLING_LOSSES = ("ForQuestionAnswering", "ForSequenceClassification")
_POOLING_MODELS = ("ForSequenceClassification", "ForMultipleChoice")


@contextmanager
def shard_transformers(attention: ShardedAttention) -> Iterator[None]:
    """Make models of transformers attend to full sequences inside of the context.

    Args:
        attention: Attention over the sequences that are sharded.
    """
    # A model has imported both.
    models: Any = sys.modules.get("transformers.modeling_utils")
    masks: Any = sys.modules.get("transformers.masking_utils")
    if models is None:
        yield
        return
    interface: Any = getattr(models, "AttentionInterface", None)
    is_supported = hasattr(interface, "get_interface") and all(
        hasattr(masks, name) for name in _MASK_FUNCTIONS
    )
    checks = _ModelChecks(attention.sequences, is_supported=is_supported)
    with ExitStack() as stack:
        stack.enter_context(_replaced(models.PreTrainedModel, "__call__", checks.call))
        losses: Any = sys.modules.get("transformers.loss.loss_utils")
        for name in (*_SHIFTING_LOSSES, *_POOLING_LOSSES):
            if name in getattr(losses, "LOSS_MAPPING", {}):
                loss = losses.LOSS_MAPPING[name]
                losses.LOSS_MAPPING[name] = checks.wrap_loss(name, loss)
                stack.callback(losses.LOSS_MAPPING.__setitem__, name, loss)
        if is_supported:
            builder = _MaskBuilder(attention, masks)
            replacements = {
                "_preprocess_mask_arguments": builder.preprocess,
                "packed_sequence_compatibility_function": builder.separate_documents,
                "maybe_pad_block_sequence_ids": builder.pad_blocks,
                "ALL_MASK_ATTENTION_FUNCTIONS": builder.build_interface(),
            }
            for name, replacement in replacements.items():
                stack.enter_context(_replaced(masks, name, replacement))
            selection = _InterfaceSelection(attention, interface.get_interface)
            stack.enter_context(_replaced(interface, "get_interface", selection.select))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a class or module inside of the context."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class _ModelChecks:
    """Checks of the calls of models and of their losses."""

    def __init__(self, sequences: ShardedSequences, *, is_supported: bool) -> None:
        self._sequences, self._is_supported = sequences, is_supported
        self._is_inside = False
        checks = self

        # A function, since a class passes its instance only to those.
        def call(model: Any, *args: Any, **options: Any) -> Any:
            return checks.check_and_call(model, args, options)

        self.call = call

    def check_and_call(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Check the outermost model, and call any."""
        if self._is_inside:
            return nn.Module.__call__(model, *args, **options)
        if problem := self._find_problem(model, args, options):
            self._reject(model, problem)
        self._is_inside = True
        try:
            return nn.Module.__call__(model, *args, **options)
        finally:
            self._is_inside = False

    def wrap_loss(self, name: str, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loss function that rejects a loss which would be computed from other positions."""

        def check_and_compute(*args: Any, **options: Any) -> Any:
            if name in _POOLING_LOSSES:
                self._sequences.reject(
                    f"The loss {name} of transformers failed: it reads one position of a sequence, which one rank has. Gather the "
                    "logits with accelerator.gather_sequence and compute the loss from them."
                )
            if options.get("shift_labels") is None:
                self._sequences.reject(
                    f"The loss {name} of transformers failed: it shifts the labels of this rank, whose positions are not "
                    "consecutive. Shift labels before maybe_context_parallel, add them to its buffers, and give them as "
                    "shift_labels as well, or compute the loss from the logits."
                )
            return loss(*args, **options)

        return check_and_compute

    def _find_problem(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        if not self._is_supported:
            version = getattr(sys.modules.get("transformers"), "__version__", "")
            return f"accel cannot give transformers {version} the positions of other ranks. Install transformers 5"
        form = self._sequences.form
        if pooling := next((word for word in _POOLING_MODELS if word in type(model).__name__), None):
            return f"{pooling} reads one position of a sequence, which one rank has. Set {form} to 1"
        config = getattr(model, "config", None)
        layers = set(getattr(getattr(config, "text_config", config), "layer_types", None) or ())
        if others := layers - _LAYERS_WITH_ATTENTION:
            return (
                f"its layers {', '.join(sorted(others))} pass a state along the sequence, and see this rank's part only. Set {form} to "
                "1"
            )
        if getattr(config, "alibi", False):
            return f"its biases (ALiBi) are those of this rank's part of the sequence. Set {form} to 1"
        given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | options
        if form == "sp" and (given.get("output_attentions") or getattr(config, "output_attentions", False)):
            return "output_attentions needs the weights of all heads, and a rank computes a part of them. Use cp instead of sp"
        return _find_position_problem(model, given, form)

    def _reject(self, model: Any, problem: str) -> NoReturn:
        self._sequences.reject(f"{type(model).__name__} with {self._sequences.title} failed: {problem}.")


def _find_position_problem(model: Any, given: dict[str, Any], form: str) -> str | None:
    """Return why a model called with these arguments would have other positions than one process, or None."""
    positions, inputs = given.get("position_ids"), given.get("input_ids")
    if positions is None:
        # Models have it, and so do layers that are called with positions.
        models = (part for part in model.modules() if hasattr(part, "base_model_prefix"))
        if not any("position_ids" in inspect.signature(part.forward).parameters for part in models):
            return (
                f"it has no position_ids, so it counts positions from 0 on every rank. Set {form} to 1, or use a model with "
                "position_ids"
            )
        return (
            "position_ids is missing, and the model would count positions from 0 on every rank. Create the positions of the full "
            "sequence before maybe_context_parallel, add them to its buffers, and give them as position_ids"
        )
    if inputs is not None and positions.size(-1) != inputs.size(-1):
        return (
            f"position_ids has {positions.size(-1)} positions on this rank, and input_ids {inputs.size(-1)}. Add both to the buffers "
            "of maybe_context_parallel"
        )
    return None


class _MaskRequestedError(Exception):
    """A mask function was called, so the mask is needed."""


class _MaskBuilder:
    """Replacements for functions of `transformers.masking_utils`.

    Args:
        attention: Attention over the sequences that are sharded.
        masks: The module.
    """

    def __init__(self, attention: ShardedAttention, masks: Any) -> None:
        self._attention, self._sequences, self._masks = attention, attention.sequences, masks
        self._preprocess = masks._preprocess_mask_arguments  # noqa: SLF001 - all mask functions call it
        self._separate = masks.packed_sequence_compatibility_function
        self._pad_blocks = masks.maybe_pad_block_sequence_ids
        self._full_positions: torch.Tensor | None = None
        self._known: dict[int, torch.Tensor] = {}
        """Full tensors, which mask functions may read, by identity."""

    @without_compilation
    def preprocess(self, config: Any, inputs_embeds: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Call `_preprocess_mask_arguments` with the lengths, mask and positions of all ranks."""
        bound = inspect.signature(self._preprocess).bind(config, inputs_embeds, *args, **options)
        bound.apply_defaults()
        arguments = bound.arguments
        mask, positions = arguments["attention_mask"], arguments.get("position_ids")
        encoder = arguments.get("encoder_hidden_states")
        keys = inputs_embeds if encoder is None else encoder
        self._sequences.agree(
            f"the attention mask of a model with {describe_tensor(inputs_embeds)} embeddings, the mask {describe_tensor(mask)} and the positions "
            f"{describe_tensor(positions)}",
            _find_implementation_problem(getattr(config, "_attn_implementation", None), self._sequences)
            or self._find_problem(keys.size(1), mask, positions),
        )
        arguments["inputs_embeds"] = self._stretch(inputs_embeds)
        if encoder is not None:
            arguments["encoder_hidden_states"] = self._stretch(encoder)
        if _is_padding_mask(mask) and mask.size(1) == keys.size(1):
            arguments["attention_mask"] = self._sequences.gather(mask.contiguous(), 1)
        self._full_positions = None
        if isinstance(positions, torch.Tensor):
            self._full_positions = self._gather_positions(positions)
            arguments["position_ids"] = self._full_positions
        result = self._preprocess(*bound.args, **bound.kwargs)
        tensors = (item for item in (*result, self._full_positions) if isinstance(item, torch.Tensor))
        self._known = {id(tensor): tensor for tensor in tensors}
        return result

    @without_compilation
    def separate_documents(self, mask_function: Any, _: torch.Tensor, documents: torch.Tensor) -> Any:
        """Call `packed_sequence_compatibility_function` with the positions of all ranks."""
        assert self._full_positions is not None
        positions = self._full_positions.expand(documents.size(0), -1)
        self._known[id(positions)] = positions
        return self._separate(mask_function, positions, documents)

    @without_compilation
    def pad_blocks(self, block_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Call `maybe_pad_block_sequence_ids` with the blocks of all ranks."""
        self._sequences.agree(f"blocks of a model with the ids {describe_tensor(block_ids)}")
        if self._sequences.is_shard(block_ids.size(-1)):
            block_ids = self._sequences.gather(block_ids.contiguous(), -1)
        blocks = self._pad_blocks(block_ids, *args, **options)
        self._known[id(blocks)] = blocks
        return blocks

    def build_interface(self) -> Any:
        """Return the mapping of mask functions, which return the rows that this rank needs."""
        mapping = type(self._masks.ALL_MASK_ATTENTION_FUNCTIONS)()
        original = self._masks.ALL_MASK_ATTENTION_FUNCTIONS
        for name in ("sdpa", "eager"):
            mapping[name] = self._build_rows_function(original[name])
        return mapping

    def _build_rows_function(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def request(*_: Any) -> NoReturn:
            raise _MaskRequestedError

        @without_compilation
        def build_rows(**arguments: Any) -> Any:
            if arguments.get("use_vmap") and (
                problem := self._find_captured_shard(arguments["mask_function"])
            ):
                self._sequences.reject(problem)
            try:
                return build(**arguments | {"mask_function": request})
            except _MaskRequestedError:
                pass
            slices = self._attention.mask_slices(arguments["q_length"])
            if slices == [(0, arguments["q_length"])]:
                return build(**arguments)
            rows = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            offset = arguments.get("q_offset", 0)
            return torch.cat(
                [
                    build(**arguments | rows | {"q_length": end - begin, "q_offset": offset + begin})
                    for begin, end in slices
                ],
                -2,
            )

        return build_rows

    def _find_problem(self, length: int, mask: Any, positions: Any) -> str | None:
        full_length = length * self._sequences.parts
        lengths = ", ".join(map(str, sorted(self._sequences.lengths)))
        if not self._sequences.is_shard(length):
            return (
                f"The attention mask of a transformers model failed: its input has {length} positions on this rank, and its part of "
                f"the sequence is {lengths} long. Add the input to the buffers of maybe_context_parallel."
            )
        if isinstance(positions, torch.Tensor) and positions.size(-1) != length:
            return (
                f"The attention mask of a transformers model failed: position_ids has {positions.size(-1)} positions on this rank, "
                f"and the input {length}. Add position_ids to the buffers of maybe_context_parallel."
            )
        if _is_padding_mask(mask) and mask.size(1) not in {length, full_length}:
            return (
                f"The attention mask of a transformers model failed: attention_mask has {mask.size(1)} columns, and the sequence has "
                f"{full_length} positions. Give a mask of the full sequence, in the buffers of maybe_context_parallel or not."
            )
        return None

    def _gather_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the positions of all ranks; raise ValueError on all ranks if each counts from 0."""
        full = self._sequences.gather(positions.contiguous(), -1)
        length, parts = positions.size(-1), self._sequences.parts
        counted = torch.arange(length, device=positions.device).expand_as(positions)
        shards = [slice_sequence(full, -1, parts, rank) for rank in range(parts)]
        is_buffer = self._sequences.is_buffer(positions)
        if not is_buffer and all(bool((shard == counted).all()) for shard in shards):
            self._sequences.reject(
                "The attention mask of a transformers model failed: its positions start from 0 on every rank. Create the positions "
                "of the full sequence before maybe_context_parallel, add them to its buffers, and give them as position_ids."
            )
        return full

    def _stretch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without memory that has the full length of a shard."""
        batch, length, *rest = tensor.shape
        return tensor.new_empty(()).expand(batch, length * self._sequences.parts, *rest)

    def _find_captured_shard(self, mask_function: Any) -> str | None:
        """Return why a mask function of a model cannot be used, since it reads a tensor of this rank."""
        pending, seen = [mask_function], set()
        while pending:
            item = pending.pop()
            if id(item) in seen or id(item) in self._known:
                continue
            seen.add(id(item))
            if isinstance(item, torch.Tensor):
                return (
                    "The attention mask of a transformers model failed: its mask function reads a tensor of shape "
                    f"{list(item.shape)}, which has this rank's part of the sequence. Set {self._sequences.form} to 1."
                )
            if isinstance(item, (list, tuple)):
                pending += item
            pending += [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
        return None


class _InterfaceSelection:
    """The replacement of `AttentionInterface.get_interface`.

    Args:
        attention: Attention over the sequences that are sharded.
        select: The original method.
    """

    def __init__(self, attention: ShardedAttention, select: Callable[..., Callable[..., Any]]) -> None:
        self._attention = attention
        selection = self

        # A function, since a class passes its instance only to those.
        def select_and_wrap(interfaces: Any, implementation: Any, default: Any) -> Callable[..., Any]:
            function = select(interfaces, implementation, default)
            return selection._wrap(implementation, function)

        self.select = select_and_wrap

    def _wrap(self, implementation: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return an attention function that checks its call, and computes over full sequences."""
        sequences = self._attention.sequences
        compute = self._attention.wrap(function, implementation or "eager")

        def attend(
            module: Any,
            query: Any,
            key: Any,
            value: Any,
            attention_mask: Any = None,
            *args: Any,
            **options: Any,
        ) -> Any:
            problem = (
                _find_implementation_problem(implementation, sequences)
                or _find_bias_problem(module, options, sequences)
                or self._attention.find_call_problem(module, query, attention_mask, options)
            )
            if problem:
                sequences.reject(problem)
            return compute(module, query, key, value, attention_mask, *args, **options)

        return attend


def _find_implementation_problem(implementation: str | None, sequences: ShardedSequences) -> str | None:
    if implementation in {None, "sdpa", "eager"}:
        return None
    return (
        f"Attention of transformers with {sequences.title} failed: {implementation!r} sees this rank's part of the sequence only. "
        'Create the model with attn_implementation="sdpa".'
    )


def _find_bias_problem(module: Any, options: Mapping[str, Any], sequences: ShardedSequences) -> str | None:
    if options.get("position_bias") is None:
        return None
    return (
        f"Attention of {type(module).__name__} with {sequences.title} failed: its bias of relative positions is computed for this "
        f"rank's part of the sequence only. Set {sequences.form} to 1."
    )


def _is_padding_mask(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == _PADDING_MASK_DIMENSIONS
