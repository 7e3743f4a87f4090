"""The description of a run by `Accelerator.describe`, as data and as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.accelerator.options import OptionFacts
from accel_runtime.data.loader import PreparedLoader
from accel_runtime.data.source import len_or_none
from accel_runtime.environment.layouts import name_dimension
from accel_runtime.environment.settings import Settings, flatten_settings
from accel_runtime.environment.topology import DataRank, RankGrid
from accel_runtime.foundation.precision import name_dtype
from accel_runtime.foundation.process_mesh import GroupFacts
from accel_runtime.foundation.torch_internals import BatchNorm
from accel_runtime.parallel.dtensor import class_of
from accel_runtime.parallel.strategy import ModelLayout

if TYPE_CHECKING:
    from rich.console import RenderableType

    from accel_runtime.accelerator.run import Run

__all__ = [
    "Description",
    "LoaderFacts",
    "ModelFacts",
    "ProcessFacts",
    "SchedulerFacts",
    "SequenceFacts",
    "describe_division",
    "describe_run",
    "loader_facts",
    "model_facts",
]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class ProcessFacts:
    """The process and its group."""

    world_size: int
    rank: int
    local_world_size: int
    device: str
    process_group: str
    """The backend of collectives; empty on one process."""


@dataclass(frozen=True)
class ModelFacts:
    """A prepared model."""

    name: str
    parameters: int
    trainable: int
    dtypes: tuple[str, ...]
    """The dtypes of the parameters."""
    computes_in: str
    """The dtype of autocast, else those of the parameters."""
    reduces_in: str
    """The dtype of gradient averaging; empty without averaging."""
    wrapping: str
    """The wrapper that replicates or shards it; `none` on one process and without trainable parameters."""
    groups: tuple[GroupFacts, ...] = ()
    """The parameters of a sharded model; empty for a replicated one."""


@dataclass(frozen=True)
class LoaderFacts:
    """A prepared loader."""

    dataset: str
    samples: int | None
    """None if the dataset has no length."""
    steps: int | None
    """Steps per epoch, equal on all ranks."""
    script_batch_size: int | None
    """Samples in a batch of the loader that the script made; None if batches have no fixed size."""
    batch_size: int | None
    """Samples of one rank in a full step, at most; None if batches have no fixed size."""
    parts: int
    """The number of shards of a global batch."""
    ranks_a_part: int
    """The number of model-parallel ranks, which have the same shard."""
    global_batch: int | None
    """Samples of all ranks in a full step."""
    micro_batches: int
    """Steps of an optimizer step."""
    samples_a_step: int | None
    """Samples per optimizer step: `global_batch_size`, or the global batch times the accumulation steps."""
    counts_samples: bool
    """True if an optimizer step has `global_batch_size` samples, whatever the number of ranks."""
    end: str
    """The treatment of the last batch of an epoch."""


@dataclass(frozen=True)
class SchedulerFacts:
    """A prepared scheduler."""

    name: str
    advances: str
    """The effect of a call of `step()`."""


@dataclass(frozen=True)
class SequenceFacts:
    """The attention of a prepared model whose sequences are split over ranks."""

    model: str
    form: str
    """The key of the profile: `cp` gathers keys and values, `sp` exchanges heads."""
    ranks: int
    heads: int
    """Heads of a layer on a rank."""
    key_heads: int
    """Heads of keys and values of a layer on a rank."""
    sent: float | None
    """Bytes that `sp` sends, divided by those of `cp`; None if `sp` does not divide the heads."""
    held: float | None
    """Keys and values of full sequences with `sp` on a rank, divided by those with `cp`."""
    recommended: str
    """`cp` or `sp`."""
    long_from: int | None
    """The length from which `sp` is recommended although it sends more; None if no length changes the recommendation."""


@dataclass(frozen=True)
class Description:
    """Description of a run: processes, precision, prepared objects and options."""

    processes: ProcessFacts
    precision: str
    accumulation_steps: int
    gradients: str
    """The items over which the gradients of an optimizer step are averaged."""
    depends_on_division: str
    """The parts of the models that depend on how a global batch is divided; empty without `global_batch_size`."""
    models: tuple[ModelFacts, ...]
    optimizers: tuple[str, ...]
    schedulers: tuple[SchedulerFacts, ...]
    loaders: tuple[LoaderFacts, ...]
    options: Mapping[str, OptionFacts]
    device: Mapping[str, str]
    """Properties reported by the runtime of the device, by title."""
    strategy: Mapping[str, OptionFacts] = field(default_factory=dict)
    """Options of the strategy, such as those in a file of an engine, by path; values that were `auto` are filled in."""
    sequences: tuple[SequenceFacts, ...] = ()
    """The models whose sequences are split, and have a known number of heads."""

    def as_dict(self) -> dict[str, Any]:
        """Return the description as plain dicts, lists, numbers and text."""
        return asdict(self)

    def lines(self) -> Iterable[tuple[str, str]]:
        """Yield the lines of the text as pairs of title and text."""
        processes = self.processes
        over = f" over {processes.process_group}" if processes.process_group else ""
        yield (
            "processes",
            f"{processes.world_size}{over}, {processes.local_world_size} on this machine; this is rank {processes.rank}",
        )
        yield "device", processes.device
        yield from self.device.items()
        yield "precision", self.precision
        for model in self.models:
            yield "model", _format_model(model)
            yield from (("", _format_group(group)) for group in model.groups)
        for sequence in self.sequences:
            yield "sequences", _format_sequences(sequence)
        for optimizer in self.optimizers:
            yield "optimizer", optimizer
        yield "gradients", self.gradients
        if self.depends_on_division:
            yield "", self.depends_on_division
        for scheduler in self.schedulers:
            yield "scheduler", f"{scheduler.name}: {scheduler.advances}"
        for loader in self.loaders:
            yield "loader", _format_loader(loader)
        defaults = dict(flatten_settings(Settings()))
        for name, option in self.options.items():
            # A launcher sets the variables of all options, most of them to the default.
            if option.value != defaults.get(name):
                yield "option", f"{name} = {option.value} ({option.origin})"
        for name, option in self.strategy.items():
            yield "", f"{name} = {option.value} ({option.origin})"

    @override
    def __str__(self) -> str:
        return "\n".join(f"{title:<10} {text}" for title, text in self.lines())

    def __rich__(self) -> RenderableType:
        """Return a panel for `rich.print`."""
        from rich.panel import Panel  # noqa: PLC0415 - rich is optional
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table.grid(padding=(0, 2))
        for title, text in self.lines():
            table.add_row(Text(title, style="bold"), Text(text))
        return Panel(table, title="this run", title_align="left", expand=False)


def describe_run(run: Run) -> Description:
    """Describe a run with the objects that are prepared so far."""
    options, backend, strategy, accumulation = run.options, run.backend, run.strategy, run.accumulation
    options.read_plugin(strategy)
    topology, data_ranks = backend.topology, backend.data_rank
    computes_in, hook = run.precision.format.dtype, options.ddp_options.get("comm_hook")
    return Description(
        processes=ProcessFacts(
            world_size=topology.world_size,
            rank=topology.rank,
            local_world_size=topology.local_world_size,
            device=str(backend.device),
            process_group=backend.collective_backend or "",
        ),
        precision=run.precision.description,
        accumulation_steps=accumulation.steps,
        gradients=accumulation.describe(
            data_ranks.world_size, split_batches=options.loaders.split_batches and not accumulation.weighted
        ),
        depends_on_division=""
        if accumulation.global_batch_size is None
        else describe_division(map(strategy.unwrap_model, run.prepared.models)),
        models=tuple(
            model_facts(
                strategy.unwrap_model(model),
                computes_in,
                getattr(hook, "value", None),
                strategy.describe_model(model, computes_in),
                strategy.read_shape,
            )
            for model in run.prepared.models
        ),
        optimizers=tuple(type(optimizer.optimizer).__name__ for optimizer in run.prepared.optimizers),
        schedulers=tuple(
            SchedulerFacts(type(scheduler.scheduler).__name__, scheduler.advances)
            for scheduler in run.prepared.schedulers
        ),
        loaders=tuple(
            loader_facts(loader, data_ranks, accumulation.steps) for loader in run.prepared.loaders
        ),
        options=options.find_origins(),
        device=backend.runtime.describe(),
        strategy={
            name: OptionFacts(value, origin) for name, (value, origin) in strategy.describe_options().items()
        },
        sequences=tuple(
            facts
            for model in run.prepared.models
            if (facts := sequence_facts(strategy.unwrap_model(model), backend.grid, computes_in))
        ),
    )


def describe_division(models: Iterable[nn.Module]) -> str:
    """Return which parts of models depend on the division of a batch among micro-batches and processes; empty if none does."""
    modules = {id(module): module for model in models for module in model.modules()}.values()
    norms = sorted({class_of(each) for each in modules if isinstance(each, BatchNorm)})
    drops = sorted({class_of(each) for each in modules if isinstance(each, _DROPOUTS) and each.p})
    parts = []
    if norms:
        parts.append(f"{', '.join(norms)} has the statistics of a micro-batch")
    if drops:
        parts.append(f"{', '.join(drops)} draws other numbers")
    return f"not independent of the number of processes: {' and '.join(parts)}" if parts else ""


def model_facts(
    original: nn.Module,
    computes_in: torch.dtype | None,
    reduces_in: str | None,
    layout: ModelLayout,
    read_shape: Callable[[torch.Tensor], torch.Size],
) -> ModelFacts:
    """Describe a prepared model; dtypes are those of autocast and of a communication hook."""
    wrapping, groups = layout
    parameters = list(original.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    dtypes = _join(name_dtype(parameter.dtype) for parameter in parameters)
    if groups:
        reduced = _join(group.reduces_in for group in groups)
    elif wrapping == "none":
        reduced = ""
    else:
        reduced = reduces_in or _join(name_dtype(parameter.dtype) for parameter in trainable)
    return ModelFacts(
        name=class_of(original),
        parameters=sum(read_shape(parameter).numel() for parameter in parameters),
        trainable=sum(read_shape(parameter).numel() for parameter in trainable),
        dtypes=tuple(sorted({name_dtype(parameter.dtype) for parameter in parameters})),
        computes_in=_join(group.computes_in for group in groups)
        or (name_dtype(computes_in) if computes_in else dtypes),
        reduces_in=reduced,
        wrapping=wrapping,
        groups=groups,
    )


def sequence_facts(
    original: nn.Module, grid: RankGrid, computes_in: torch.dtype | None
) -> SequenceFacts | None:
    """Describe the attention of a model over split sequences; None if they are not split, or its heads are unknown."""
    ranks = grid.size("sequence")
    if ranks == 1 or (known := _find_heads(original)) is None:
        return None
    heads, key_heads, head_size = known
    heads, key_heads = (max(count // grid.size("tensor"), 1) for count in (heads, key_heads))
    from accel_runtime.parallel.sharded_attention import compare_forms  # noqa: PLC0415 - its imports are slow

    ratios = compare_forms(heads, key_heads, ranks)
    prefers_sp = ratios is not None and ratios.sent <= 1
    parameter = next(original.parameters(), None)
    dtype = computes_in or (torch.get_default_dtype() if parameter is None else parameter.dtype)
    return SequenceFacts(
        model=class_of(original),
        form=name_dimension(grid, "sequence"),
        ranks=ranks,
        heads=heads,
        key_heads=key_heads,
        sent=ratios and ratios.sent,
        held=ratios and ratios.held,
        recommended="sp" if prefers_sp else "cp",
        # The causal mask of cp has length ** 2 / ranks bytes, and its keys and values 2 * key_heads * head_size elements a position.
        long_from=None
        if ratios is None or prefers_sp
        else 2 * ranks * key_heads * head_size * dtype.itemsize,
    )


def _find_heads(model: nn.Module) -> tuple[int, int, int] | None:
    """Return heads, heads of keys, and elements of a head of a model of transformers or with torch's attention."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", heads) // heads
        return heads, key_heads, size
    layers = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    if not layers:
        return None
    layer = min(layers, key=lambda each: each.num_heads)
    return layer.num_heads, layer.num_heads, layer.head_dim


def loader_facts(loader: PreparedLoader[Any], data_rank: DataRank, accumulation_steps: int) -> LoaderFacts:
    """Describe a prepared loader."""
    is_sized = loader.source_batch_size is not None
    global_batch = loader.local_batch_size * data_rank.world_size if is_sized else None
    micro_batches, samples_a_step = loader.steps_per_cycle, loader.total_batch_size if is_sized else None
    if not loader.counts_samples:
        micro_batches = accumulation_steps
        samples_a_step = global_batch * micro_batches if global_batch else None
    return LoaderFacts(
        dataset=type(loader.dataset).__name__,
        samples=len_or_none(loader.dataset),
        steps=len_or_none(loader),
        script_batch_size=loader.source_batch_size,
        batch_size=loader.local_batch_size if is_sized else None,
        parts=data_rank.world_size,
        ranks_a_part=data_rank.model_parallel_size,
        global_batch=global_batch,
        micro_batches=micro_batches,
        samples_a_step=samples_a_step,
        counts_samples=loader.counts_samples,
        end=loader.end,
    )


def _format_model(model: ModelFacts) -> str:
    reduced = f", averaged in {model.reduces_in}" if model.reduces_in else ""
    return (
        f"{model.name}: {model.parameters:,} parameters ({model.trainable:,} learn) in "
        f"{', '.join(model.dtypes) or 'no dtype'}, computes in {model.computes_in or 'nothing'}{reduced}; "
        f"wrapping {model.wrapping}"
    )


def _format_group(group: GroupFacts) -> str:
    count = (
        f"{len(group.modules)} x {group.kind}" if len(group.modules) > 1 else group.modules[0] or group.kind
    )
    each = " each" if len(group.modules) > 1 else ""
    gradients = f"gradients {group.gradients}" if group.gradients else "frozen"
    reduced = f", averaged in {group.reduces_in}" if group.reduces_in else ""
    recomputed = "; activations computed again" if group.computed_again else ""
    return (
        f"{count}: {group.elements:,} parameters{each} in {group.dtype}, {gradients}, computed in {group.computes_in}{reduced}; "
        f"{group.layout}; {_format_size(group.bytes_here)} here{recomputed}"
    )


def _format_sequences(facts: SequenceFacts) -> str:
    shared = f", {facts.key_heads} of keys" if facts.key_heads != facts.heads else ""
    split = f"{facts.model}: {facts.heads} heads{shared} a layer; {facts.form} {facts.ranks}"
    if facts.sent is None or facts.held is None:
        return f"{split}; sp does not divide the heads, use cp"
    prefer = f"prefer {facts.recommended}"
    if facts.long_from is not None:
        prefer += f", and sp for causal sequences from {facts.long_from:,} positions"
    return f"{split}; sp sends {facts.sent:.3g} times the bytes of cp and holds {facts.held:.3g} of its keys and values: {prefer}"


def _format_size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted({name for name in names if name}))


def _format_loader(loader: LoaderFacts) -> str:
    samples = "unknown samples" if loader.samples is None else _count(loader.samples, "sample")
    steps = "an unknown number of steps" if loader.steps is None else _count(loader.steps, "step")
    if loader.batch_size is None:
        size = "batches of different sizes"
    else:
        shards = (
            f"{_count(loader.parts, 'part')}, {loader.ranks_a_part} ranks each"
            if loader.ranks_a_part > 1
            else _count(loader.parts, "rank")
        )
        size = (
            f"{loader.batch_size} x {shards} x {loader.micro_batches} accumulation = "
            f"{_count(loader.samples_a_step or 0, 'sample')} an optimizer step"
        )
        if loader.batch_size * loader.parts * loader.micro_batches != loader.samples_a_step:
            size = (
                f"{_count(loader.samples_a_step or 0, 'sample')} an optimizer step, divided evenly over {shards} x "
                f"{_count(loader.micro_batches, 'micro-batch', 'es')} of at most {loader.batch_size}"
            )
    return f"{loader.dataset}: {samples} in {steps}; {size}; {loader.end}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"
