"""What a module does under tensor parallel, by the words that torch and transformers have for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from typing_extensions import override

from accel_runtime.env import nearest

__all__ = ["WORDS", "divided_dimensions", "gives_a_part", "stays_plain", "style_of"]


class _Whole(ParallelStyle):
    """Every process has all of the module."""

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class _InTurn(ParallelStyle):
    """Several styles, one after the other."""

    def __init__(self, styles: Sequence[ParallelStyle]) -> None:
        self._styles = tuple(styles)

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self._styles:
            parallelize_module(module, device_mesh, style, src_data_rank=self.src_data_rank)
        return module


def _columns() -> ParallelStyle:
    return ColwiseParallel()


def _columns_gathered() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _rows() -> ParallelStyle:
    return RowwiseParallel()


def _rows_of_whole_input() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


def _sequence() -> ParallelStyle:
    # Alone, torch's style takes what comes for a part of the sequence already, and adds gradients up that are whole.
    parts, whole = Shard(1), Replicate()
    return _InTurn(
        [
            PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(parts,)),
            SequenceParallel(),
            PrepareModuleOutput(output_layouts=(parts,), desired_output_layouts=(whole,)),
        ]
    )


def _between() -> ParallelStyle:
    # What comes is this process's heads. Which dimension counts them is no matter: a norm has nothing to do with any
    # but the last.
    return SequenceParallel(sequence_dim=0, use_local_output=True)


WORDS: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": _columns,
    "colwise_gather_output": _columns_gathered,
    "colwise_rep": _columns_gathered,
    "embedding_colwise": _columns_gathered,
    "embedding_rowwise": _rows_of_whole_input,
    "replicate": _Whole,
    "replicated_with_grad_allreduce": _between,
    "rowwise": _rows,
    "rowwise_rep": _rows_of_whole_input,
    "rowwise_split_input": _rows_of_whole_input,
    "sequence_parallel": _sequence,
}
"""The styles a plan may name, as transformers spells them."""

_CLASSES = {
    "ColwiseParallel": "colwise",
    "RowwiseParallel": "rowwise",
    "SequenceParallel": "sequence_parallel",
}
_OTHERS = (
    "all_reduce", "gather", "local", "local_colwise", "local_packed_rowwise", "local_params", "local_rowwise",
    "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts", "packed_colwise", "packed_rowwise",
)  # fmt: skip


def style_of(word: str, module: nn.Module) -> ParallelStyle:
    """What torch does to the module for this word.

    Raises:
        ValueError: A word that is none, or that this kind of module cannot honour.
    """
    word = _CLASSES.get(word, word)
    if word not in WORDS:
        raise ValueError(_unknown(word))
    if word.startswith("embedding_") and not isinstance(module, nn.Embedding):
        raise ValueError(f"{word} is for nn.Embedding, and this is a {type(module).__name__}")
    if "wise" in word and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ValueError(f"{word} divides nn.Linear and nn.Embedding, and this is a {type(module).__name__}")
    # The numbers that an embedding looks up are never divided.
    return WORDS["embedding_rowwise" if word == "rowwise" and isinstance(module, nn.Embedding) else word]()


def _unknown(word: str) -> str:
    if word in _OTHERS:
        return (
            f"{word!r} is a style for experts or fused weights that only transformers has; give tp_plan in the profile "
            "without it"
        )
    meant = nearest(word, [*WORDS, *_CLASSES])
    return f"{word!r} is no style" + (
        f"; did you mean {meant}?" if meant else f"; styles are {', '.join(WORDS)}"
    )


def divided_dimensions(module: nn.Module, style: ParallelStyle) -> dict[str, int]:
    """The parameters of a module that a style divides, and along which dimension of each."""
    if isinstance(style, ColwiseParallel):
        dimension = 1 if isinstance(module, nn.Embedding) else 0
        return {name: dimension for name, _ in module.named_parameters(recurse=False)}
    if isinstance(style, RowwiseParallel):
        return {"weight": 0 if isinstance(module, nn.Embedding) else 1}
    return {}


def gives_a_part(style: ParallelStyle) -> bool:
    """Whether each process goes on with its own part of what the module computes."""
    return isinstance(style, ColwiseParallel) and style.output_layouts != (Replicate(),)


def stays_plain(style: ParallelStyle) -> bool:
    """Whether the module is left as it is."""
    return isinstance(style, _Whole)
