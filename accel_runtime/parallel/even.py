"""Whether tensor parallel comes out even: dimensions, heads and tied parameters, asked before anything is divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from accel_runtime.parallel.styles import divided_dimensions, gives_a_part, stays_plain

__all__ = ["check"]

_HEADS = (
    "n_head", "n_heads", "nhead", "num_attention_heads", "num_heads",
    "n_kv_heads", "num_key_value_heads", "num_kv_heads",
)  # fmt: skip
"""What configurations and modules call their numbers of heads."""


def check(model: nn.Module, tp: int, styles: Mapping[str, ParallelStyle]) -> None:
    """Refuse what cannot be divided exactly.

    Args:
        model: As the script made it.
        tp: Processes that divide a layer.
        styles: By the module's name.

    Raises:
        ValueError: `tp` does not divide a dimension or a number of heads, or tied parameters would come apart; or the
            model is divided already.
    """
    divided = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if divided:
        raise ValueError(
            f"{divided[0]} is divided already: `prepare` divides the model itself; make or load it whole, without a plan"
        )
    for name, style in styles.items():
        _even(name, model.get_submodule(name), tp, style)
    for where, what, heads in _heads(model, styles):
        if heads % tp:
            raise ValueError(
                f"parallel.tp={tp} does not divide {what}={heads} of {where}; tp may be {_divisors(heads)}"
            )
    _together(model, styles)


def _even(name: str, module: nn.Module, tp: int, style: ParallelStyle) -> None:
    for own, dimension in divided_dimensions(module, style).items():
        length = module.get_parameter(own).shape[dimension]
        if length % tp:
            cure = f", or pad it to {length + tp - length % tp}" if isinstance(module, nn.Embedding) else ""
            raise ValueError(
                f"parallel.tp={tp} does not divide dimension {dimension} of {name}.{own}, which is {length}: choose a tp "
                f"that does{cure}, or leave {name} out of the plan"
            )


def _heads(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> Iterator[tuple[str, str, int]]:
    """The numbers of heads of what is divided by heads: where each stands, its name, and the number."""
    parents = dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if gives_a_part(style))
    for parent in parents:
        yield from ((parent or type(model).__name__, *own) for own in _counts(model.get_submodule(parent)))
    config = getattr(model, "config", None)
    if any("att" in parent.lower() for parent in parents):
        yield from (("model.config", *own) for own in _counts(getattr(config, "text_config", config)))


def _counts(holder: Any) -> Iterator[tuple[str, int]]:
    for name in _HEADS:
        count = getattr(holder, name, None)
        if isinstance(count, int):
            yield name, count


def _divisors(number: int) -> str:
    return ", ".join(str(some) for some in range(1, number + 1) if number % some == 0)


def _together(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    first: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layout = _layout(model, name, styles)
        before, other = first.setdefault(id(parameter), (name, layout))
        if layout != other:
            raise ValueError(
                f"{before} and {name} are one parameter, and the plan has the first {other} and the second {layout}: give "
                "both modules a place in the plan that fits (embedding: embedding_rowwise and head: colwise_rep), or none"
            )


def _layout(model: nn.Module, name: str, styles: Mapping[str, ParallelStyle]) -> str:
    where, _, own = name.rpartition(".")
    style = styles.get(where)
    if style is None or stays_plain(style):
        return "whole"
    dimension = divided_dimensions(model.get_submodule(where), style).get(own)
    return "copied" if dimension is None else f"divided along dimension {dimension}"
