"""Sizes of parallel layouts, options of torch's `fully_shard`, and the values of switches; standard library only.

The launcher uses it to reject impossible layouts before it starts processes, and the runtime to check the rest.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Literal

from accel_runtime.environment.topology import RankGrid, Role

__all__ = [
    "DIMENSION_NAMES",
    "FALSE",
    "STYLES",
    "TRUE",
    "FullyShard",
    "Number",
    "Parallel",
    "SettingsError",
    "check_layout",
    "name_dimension",
    "read_switch",
]

Number = Literal["auto", "fp32", "bf16", "fp16"]
"""Number format of sharded parameters; each field documents its `auto`."""
TRUE = frozenset({"1", "true", "yes", "y", "t", "on"})
FALSE = frozenset({"", "0", "false", "no", "n", "f", "off"})
"""Values of variables that are on or off, in lower case."""
_WORDS = frozenset({"auto", "none"})
"""Values of `wrap` that are neither classes nor a number."""
_WITHOUT_SHARDS = frozenset({"wrap", "activation_checkpointing"})
"""Options that also apply to models with tensor-parallel layers and unsharded parameters."""

STYLES = (
    "colwise", "colwise_gather_output", "colwise_rep", "embedding_colwise", "embedding_rowwise", "replicate",
    "replicated_with_grad_allreduce", "rowwise", "rowwise_rep", "rowwise_split_input", "sequence_parallel",
    "ColwiseParallel", "RowwiseParallel", "SequenceParallel",
)  # fmt: skip
"""Styles of modules under tensor parallel, implemented in `accel_runtime.parallel.tensor_parallel`."""

DIMENSION_NAMES: dict[Role, str] = {
    "data": "dp_replicate",
    "shard": "dp_shard",
    "sequence": "cp",
    "tensor": "tp",
}
"""Keys of the profile for the roles that it can give several ranks, which are also the names in torch's device mesh; outermost
first. A grid may have other names, as `sp`."""


def name_dimension(grid: RankGrid, role: Role) -> str:
    """Return the name of a dimension of a grid in the profile and in torch's device mesh."""
    return dict(grid.names).get(role) or DIMENSION_NAMES.get(role, role)


class SettingsError(ValueError):
    """Invalid value of an environment variable; the message names the variable."""


def read_switch(name: str, text: str) -> bool:
    """Read the value of a variable that is on or off; empty is off. Raise SettingsError for any other value."""
    if text.lower() in TRUE | FALSE:
        return text.lower() in TRUE
    raise SettingsError(f"Invalid {name} {text!r}: expected one of 1, true, yes, on, 0, false, no, off.")


@dataclass(frozen=True)
class Parallel:
    """Sizes of a parallel layout; their product is the number of processes.

    Neighbouring ranks differ in `tp` first, then in `cp` or `sp`, `dp_shard` and `dp_replicate`.
    """

    dp_replicate: int = 1
    """Number of model replicas, whose gradients are averaged."""
    dp_shard: int | Literal["auto"] = 1
    """Number of ranks that shard parameters, gradients and optimizer state; `auto` is all remaining ranks."""
    tp: int = 1
    """Number of ranks that split the computation of single layers."""
    cp: int = 1
    """Number of ranks that split sequences, and gather keys and values for attention."""
    sp: int = 1
    """Number of ranks that split sequences, and exchange them for heads in attention (Ulysses); not with `cp`."""
    tp_plan: tuple[tuple[str, str], ...] = ()
    """Names of modules, in which `*` is any text without a dot, and the style of each under `tp`."""

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
            value = getattr(self, name)
            if value == "auto" and name == "dp_shard":
                continue
            if type(value) is not int or value < 1:
                or_auto = ", or auto" if name == "dp_shard" else ""
                raise SettingsError(
                    f"Invalid parallel.{name} {value!r}: expected a whole number above 0{or_auto}."
                )
        if self.cp > 1 and self.sp > 1:
            raise SettingsError(
                f"Invalid parallel.sp {self.sp}: parallel.cp is {self.cp}, and both split sequences. Set one of them."
            )
        for pattern, style in self.tp_plan:
            failure = f"Invalid parallel.tp_plan {f'{pattern}={style}'!r}"
            if not (_is_transportable(pattern) and _is_transportable(style)) or "=" in pattern:
                raise SettingsError(
                    f"{failure}: expected pairs like layers.*.up=colwise, without commas or spaces in them."
                )
            if style not in STYLES:
                nearest = difflib.get_close_matches(style, STYLES, n=1)
                hint = f"Did you mean {nearest[0]}?" if nearest else f"Styles are {', '.join(STYLES)}."
                raise SettingsError(f"{failure}: unknown style {style!r}. {hint}")

    @property
    def shards(self) -> bool:
        """Return whether parameters are sharded, even on one process."""
        return self.dp_shard != 1

    @property
    def plain(self) -> bool:
        """Return whether models are only replicated."""
        return self.dp_replicate * self.splits_sequences * self.tp == 1 and not self.shards

    @property
    def splits_sequences(self) -> int:
        """Return the number of ranks that split sequences, in either form."""
        return self.cp * self.sp

    def build_grid(self, world_size: int | None) -> RankGrid:
        """Return the grid of the ranks; by default every process has a replica.

        If `world_size` is None, it is unknown and `auto` counts as 1. Raises SettingsError if the product of the sizes is not
        `world_size`.
        """
        others = self.dp_replicate * self.splits_sequences * self.tp
        shard = self.dp_shard if self.dp_shard != "auto" else max((world_size or 1) // others, 1)
        replicas = self.dp_replicate
        if world_size is not None and others * shard != world_size:
            if self.shards or others > 1:
                raise SettingsError(self._format_size_error(others, world_size))
            replicas = world_size
        sizes: tuple[tuple[Role, int], ...] = (
            ("data", replicas),
            ("shard", shard),
            ("sequence", self.splits_sequences),
            ("tensor", self.tp),
        )
        return RankGrid(sizes, (("sequence", "sp"),) if self.sp > 1 else ())

    def _format_size_error(self, others: int, world_size: int) -> str:
        sequences = f"sp: {self.sp}" if self.sp > 1 else f"cp: {self.cp}"
        sizes = f"dp_replicate: {self.dp_replicate} x dp_shard: {self.dp_shard} x {sequences} x tp: {self.tp}"
        available = f"there {'is 1 process' if world_size == 1 else f'are {world_size} processes'}"
        if self.dp_shard == "auto":
            return f"parallel: {sizes} does not fit: {available}, and {world_size} is not a multiple of {others}. Change the sizes."
        product = others * self.dp_shard
        more, rest = divmod(world_size, product)
        if rest:
            return f"parallel: {sizes} is {product}, and {available}. Start {product}, or change the sizes."
        return (
            f"parallel: {sizes} is {product}, and {available}. Start {product}, or set dp_replicate: "
            f"{self.dp_replicate * more} (more replicas) or dp_shard: auto (more shards)."
        )


@dataclass(frozen=True)
class FullyShard:
    """Options of torch's `fully_shard`, used if `Parallel.shards`."""

    wrap: str = "auto"
    """Modules whose parameters are gathered together: comma-separated class names, a minimum number of parameters,
    `auto` (the model's own `_no_split_modules`, or the items of its ModuleLists), or `none`."""
    reshard_after_forward: bool | int = True
    """If true, gathered parameters are freed after the forward pass and gathered again; a number shards over as many
    ranks."""
    param_dtype: Number = "auto"
    """Dtype of gathered parameters and computation; `auto` is the format of `mixed_precision`."""
    reduce_dtype: Number = "auto"
    """Dtype of the reduction of gradients; `auto` is fp32."""
    output_dtype: Number = "auto"
    """Dtype of the model's outputs; `auto` leaves it to `mixed_precision`."""
    cast_forward_inputs: bool = True
    """If true, inputs of gathered modules are cast to `param_dtype`."""
    cpu_offload: bool = False
    """If true, shards, gradients and optimizer state are kept in host memory."""
    activation_checkpointing: bool = False
    """If true, activations of wrapped modules are recomputed in the backward pass."""
    ignore: tuple[str, ...] = ()
    """Names of parameters or modules that are not sharded; `*` is any text without a dot."""

    def __post_init__(self) -> None:
        if not _is_wrap(self.wrap):
            raise SettingsError(
                f"Invalid fully_shard.wrap {self.wrap!r}: expected auto, none, a number of parameters above 0, or names of classes "
                "with commas between."
            )
        if isinstance(self.reshard_after_forward, int) and self.reshard_after_forward < 0:
            raise SettingsError(
                f"Invalid fully_shard.reshard_after_forward {self.reshard_after_forward}: expected true, false or a number above 1."
            )
        for name in self.ignore:
            if not _is_transportable(name):
                raise SettingsError(
                    f"Invalid fully_shard.ignore {name!r}: expected names without commas or spaces."
                )

    def idle(self, parallel: Parallel) -> list[str]:
        """Return the options that are set and have no effect in this layout."""
        sizes = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if parallel.shards or parallel.splits_sequences > 1:
            return []
        return [name for name in sizes if parallel.tp == 1 or name not in _WITHOUT_SHARDS]


def check_layout(parallel: Parallel, options: FullyShard, world_size: int | None) -> RankGrid:
    """Return the grid of a layout, after checking that it is possible and every option has an effect.

    See `Parallel.build_grid`. Raises SettingsError otherwise. `world_size` is None if it is unknown.
    """
    grid = parallel.build_grid(world_size)
    if parallel.tp_plan and parallel.tp == 1:
        raise SettingsError(
            "parallel.tp_plan has no effect with tp: 1, which splits no layer. Set parallel.tp."
        )
    if idle := options.idle(parallel):
        raise SettingsError(
            f"fully_shard.{idle[0]} has no effect with parallel.dp_shard: 1, which shards nothing. Set parallel.dp_shard: auto, "
            "or leave it out."
        )
    shards, reshard = grid.size("shard", "sequence"), options.reshard_after_forward
    known = world_size is not None or parallel.dp_shard != "auto"
    if known and reshard not in {True, False} and shards % reshard:
        raise SettingsError(
            f"fully_shard.reshard_after_forward: {reshard} does not divide the {shards} "
            "processes that share the parameters. Use a divisor, true or false."
        )
    return grid


def _is_transportable(text: str) -> bool:
    """Return whether a text can be an item of a comma-separated variable."""
    return bool(text) and not any(letter in {",", "\0"} or letter.isspace() for letter in text)


def _is_wrap(text: str) -> bool:
    if text in _WORDS:
        return True
    if text.isascii() and text.isdigit():
        return int(text) > 0
    return all(name.isidentifier() and name not in _WORDS for name in text.split(","))
