"""How models are divided among processes: the sizes of the layout, and what torch's `fully_shard` is told.

Standard library only: the launcher refuses with it what cannot be before anything starts, the runtime what is left.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

__all__ = ["FSDP1", "STYLES", "FullyShard", "Number", "Parallel", "SettingsError", "check_layout", "fsdp1"]

Number = Literal["auto", "fp32", "bf16", "fp16"]
"""A number format of sharded parameters; what `auto` is stands with the field."""
_WORDS = frozenset({"auto", "none"})
"""What `wrap` may say instead of classes or a number."""
_WITHOUT_SHARDS = frozenset({"wrap", "activation_checkpointing"})
"""Options that say something of a model whose layers are divided, and whose parameters are not sharded."""

STYLES = (
    "colwise", "colwise_gather_output", "colwise_rep", "embedding_colwise", "embedding_rowwise", "replicate",
    "replicated_with_grad_allreduce", "rowwise", "rowwise_rep", "rowwise_split_input", "sequence_parallel",
    "ColwiseParallel", "RowwiseParallel", "SequenceParallel",
)  # fmt: skip
"""What a module may do under tensor parallel; how, is in `accel_runtime.parallel.styles`."""

FSDP1: Mapping[str, str] = MappingProxyType({
    "sharding_strategy": "say reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP), with dp_replicate for the "
    "hybrid ones; dp_shard: 1 is NO_SHARD",
    "backward_prefetch": "fully_shard always gathers the next module early in the backward pass; leave it out",
    "forward_prefetch": "fully_shard gathers the next module early in the forward pass by itself; leave it out",
    "use_orig_params": "parameters always keep their names and shapes; leave it out",
    "limit_all_gathers": "fully_shard frees memory in the order it is used, so there is nothing to limit; leave it out",
    "sync_module_states": "every process ends up with the parameters of the first one; leave it out",
    "state_dict_type": "checkpoints are always sharded, and save_model writes whole weights; leave it out",
    "auto_wrap_policy": "say wrap: auto, none, a number of parameters, or names of classes",
    "transformer_layer_cls_to_wrap": "say wrap: with the names of the classes",
    "transformer_cls_names_to_wrap": "say wrap: with the names of the classes",
    "min_num_params": "say wrap: with the number",
    "ignored_modules": "say ignore: with their names",
    "offload_params": "say cpu_offload: true",
    "mixed_precision": "say param_dtype, reduce_dtype and output_dtype",
    "mixed_precision_policy": "say param_dtype, reduce_dtype and output_dtype",
    "cpu_ram_efficient_loading": "create the model on the meta device, and let accelerator.load_model() read the file; leave it "
    "out",
    "version": "there is only version 2; leave it out",
})  # fmt: skip
"""Words of FSDP1 and of Accelerate's plugin for it, in place of which `fully_shard:` says something else."""


class SettingsError(ValueError):
    """An environment variable that says something we cannot do; the message names the variable."""


def fsdp1(word: str) -> str | None:
    """What is said today in place of a word of FSDP1, also of one with `fsdp_` before it; None for other words."""
    return FSDP1.get(word.removeprefix("fsdp_"))


@dataclass(frozen=True)
class Parallel:
    """Into how many parts what is divided; the product is the number of processes.

    Neighbouring ranks differ in `tp` first, then in `cp`, `dp_shard` and `dp_replicate`.
    """

    dp_replicate: int = 1
    """Groups of processes that have a whole model each, and average their gradients."""
    dp_shard: int | Literal["auto"] = 1
    """Processes that divide parameters, gradients and optimizer state among them; `auto` is as many as are left."""
    tp: int = 1
    """Processes that divide the computation of single layers among them."""
    cp: int = 1
    """Processes that divide sequences among them."""
    tp_plan: tuple[tuple[str, str], ...] = ()
    """Names of modules, in which `*` stands for any text without a dot, and what each does under `tp`."""

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "tp", "cp"):
            value = getattr(self, name)
            if value == "auto" and name == "dp_shard":
                continue
            if type(value) is not int or value < 1:
                or_auto = ", or auto" if name == "dp_shard" else ""
                raise SettingsError(
                    f"parallel.{name} must be a whole number above 0{or_auto}; it is {value!r}"
                )
        for pattern, style in self.tp_plan:
            if not (_travels(pattern) and _travels(style)) or "=" in pattern:
                raise SettingsError(
                    "parallel.tp_plan must be pairs like layers.*.up=colwise, without commas or spaces in them; it has "
                    f"{pattern!r} and {style!r}"
                )
            if style not in STYLES:
                raise SettingsError(
                    f"parallel.tp_plan must have styles for modules; {pattern} has {style!r}{_meant(style)}"
                )

    @property
    def shards(self) -> bool:
        """Whether parameters are sharded, be it on one process."""
        return self.dp_shard != 1

    @property
    def plain(self) -> bool:
        """Whether there is nothing but whole models."""
        return self.sizes(None) == (1, 1, 1, 1) and not self.shards

    def sizes(self, world_size: int | None) -> tuple[int, int, int, int]:
        """What `dp_replicate`, `dp_shard`, `cp` and `tp` come to.

        Nothing said is every process with a whole model.

        Args:
            world_size: The number of processes; None where it is not known, and `auto` counts as 1.

        Raises:
            SettingsError: They do not make this many processes.
        """
        others = self.dp_replicate * self.cp * self.tp
        shard = self.dp_shard if self.dp_shard != "auto" else max((world_size or 1) // others, 1)
        sizes = (self.dp_replicate, shard, self.cp, self.tp)
        if world_size is None or math.prod(sizes) == world_size:
            return sizes
        if not self.shards and others == 1:
            return (world_size, 1, 1, 1)
        raise SettingsError(self._refusal(others, world_size))

    def _refusal(self, others: int, world_size: int) -> str:
        said = (
            f"dp_replicate: {self.dp_replicate} x dp_shard: {self.dp_shard} x cp: {self.cp} x tp: {self.tp}"
        )
        there = f"there {'is 1 process' if world_size == 1 else f'are {world_size} processes'}"
        if self.dp_shard == "auto":
            return f"parallel: {said} cannot be: {there}, and {world_size} is no multiple of {others}"
        product = others * self.dp_shard
        more, beyond = divmod(world_size, product)
        if beyond:
            return f"parallel: {said} is {product}, and {there}: start {product}, or change the sizes"
        return (
            f"parallel: {said} is {product}, and {there}: start {product}, or set dp_replicate: "
            f"{self.dp_replicate * more} (more copies) or dp_shard: auto (more shards)"
        )


@dataclass(frozen=True)
class FullyShard:
    """How torch's `fully_shard` divides a model; it is at work where `Parallel.shards`."""

    wrap: str = "auto"
    """Modules whose parameters are gathered together: names of classes with commas, a number of parameters from which a
    module is one, `auto` (the model's own `_no_split_modules`, else what its ModuleLists hold), or `none`."""
    reshard_after_forward: bool | int = True
    """Whether gathered parameters go after the forward pass and are gathered again; a number shards over so many only."""
    param_dtype: Number = "auto"
    """What parameters are gathered and computed in; `auto` is the format of `mixed_precision`."""
    reduce_dtype: Number = "auto"
    """What gradients are averaged in; `auto` is fp32."""
    output_dtype: Number = "auto"
    """What the model gives back; `auto` leaves it to `mixed_precision`."""
    cast_forward_inputs: bool = True
    """Whether inputs of gathered modules are brought to `param_dtype`."""
    cpu_offload: bool = False
    """Whether shards, gradients and optimizer state stay in host memory."""
    activation_checkpointing: bool = False
    """Whether activations of wrapped modules are computed again in the backward pass."""
    ignore: tuple[str, ...] = ()
    """Names of parameters or modules that stay whole everywhere; `*` stands for any text without a dot."""

    def __post_init__(self) -> None:
        if not _is_wrap(self.wrap):
            raise SettingsError(
                "fully_shard.wrap must be auto, none, a number of parameters above 0, or names of classes with commas "
                f"between; it is {self.wrap!r}"
            )
        if isinstance(self.reshard_after_forward, int) and self.reshard_after_forward < 0:
            raise SettingsError(
                f"fully_shard.reshard_after_forward must be true, false or a number above 1; it is {self.reshard_after_forward}"
            )
        for name in self.ignore:
            if not _travels(name):
                raise SettingsError(
                    f"fully_shard.ignore must be names without commas or spaces; it has {name!r}"
                )

    def idle(self, parallel: Parallel) -> list[str]:
        """The options that say something, and have nothing to say it of in this layout."""
        said = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if parallel.shards or parallel.cp > 1:
            return []
        return [name for name in said if parallel.tp == 1 or name not in _WITHOUT_SHARDS]


def check_layout(
    parallel: Parallel, options: FullyShard, world_size: int | None
) -> tuple[int, int, int, int]:
    """What the sizes come to, once it is known that all that is said has an effect and can be.

    Args:
        parallel: The sizes.
        options: What `fully_shard` is told.
        world_size: The number of processes; None where it is not known.

    Raises:
        SettingsError: It cannot be, or says something of nothing.
    """
    sizes = parallel.sizes(world_size)
    if parallel.tp_plan and parallel.tp == 1:
        raise SettingsError("parallel.tp_plan has no say with tp: 1, which divides no layer; set parallel.tp")
    if idle := options.idle(parallel):
        raise SettingsError(
            f"fully_shard.{idle[0]} has no say with parallel.dp_shard: 1, which shards nothing; set parallel.dp_shard: auto, "
            "or leave it out"
        )
    known = world_size is not None or parallel.dp_shard != "auto"
    if known and not _divides(options.reshard_after_forward, sizes[1] * sizes[2]):
        raise SettingsError(
            f"fully_shard.reshard_after_forward: {options.reshard_after_forward} does not divide the {sizes[1] * sizes[2]} "
            "processes that share the parameters; take a number that does, true or false"
        )
    return sizes


def _divides(reshard: bool | int, shards: int) -> bool:
    return reshard in {True, False} or shards % reshard == 0


def _travels(text: str) -> bool:
    """Whether a text comes through a variable that has commas between texts."""
    return bool(text) and not any(letter in {",", "\0"} or letter.isspace() for letter in text)


def _meant(style: str) -> str:
    meant = difflib.get_close_matches(style, STYLES, n=1)
    return f"; did you mean {meant[0]}?" if meant else f"; styles are {', '.join(STYLES)}"


def _is_wrap(text: str) -> bool:
    if text in _WORDS:
        return True
    if text.isascii() and text.isdigit():
        return int(text) > 0
    return all(name.isidentifier() and name not in _WORDS for name in text.split(","))
