"""What a run will do, as data and as a panel to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.data.loader import PreparedLoader
from accel_runtime.env import Settings, accelerate_variables, flat, variable
from accel_runtime.scheduler import PreparedScheduler
from accel_runtime.topology import DataPlace

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "Description",
    "GroupFacts",
    "LoaderFacts",
    "ModelFacts",
    "OptionFacts",
    "ProcessFacts",
    "SchedulerFacts",
    "class_of",
    "loader_facts",
    "model_facts",
    "origins",
    "scheduler_facts",
]


@dataclass(frozen=True)
class ProcessFacts:
    """Who computes, and over what they talk."""

    world_size: int
    rank: int
    local_world_size: int
    device: str
    process_group: str
    """What carries collectives; empty on one process."""


@dataclass(frozen=True)
class GroupFacts:
    """Parameters of a divided model that are treated alike: of one module, or of several that are alike."""

    modules: tuple[str, ...]
    """The names of the modules; `""` is the model."""
    kind: str
    """The class of the modules."""
    parameters: int
    """Tensors in each module."""
    elements: int
    """Numbers in each module, on all ranks together."""
    dtype: str
    """Of the parameters, as the optimizer has them."""
    gradients: str
    """Of the gradients, as the optimizer has them; empty where nothing learns."""
    computes_in: str
    """What they are gathered in for the forward and the backward pass, else what autocast computes in."""
    reduces_in: str
    """In what gradients are averaged between processes; empty where they are not."""
    layout: str
    """Who has which part."""
    bytes_here: int
    """What this rank has of the parameters of all modules."""
    computed_again: bool
    """Whether activations are computed again in the backward pass."""


@dataclass(frozen=True)
class ModelFacts:
    """A prepared model."""

    name: str
    parameters: int
    trainable: int
    dtypes: tuple[str, ...]
    """Of its parameters."""
    computes_in: str
    """What autocast computes in, else the parameters' own dtypes."""
    reduces_in: str
    """In what gradients are averaged between processes; empty where they are not."""
    wrapping: str
    """What replicates or shards it; `none` on one process and for models that learn nothing."""
    groups: tuple[GroupFacts, ...] = ()
    """The parameters of a divided model; empty where every rank has all of it."""


@dataclass(frozen=True)
class LoaderFacts:
    """A prepared loader."""

    dataset: str
    samples: int | None
    """None where the dataset has no length."""
    steps: int | None
    """Steps of an epoch, on every rank."""
    batch_size: int | None
    """Samples of one rank in a full step; None where batches have no fixed size."""
    parts: int
    """Into how many parts a global batch is divided."""
    ranks_a_part: int
    """Ranks that have the same part, and compute it together."""
    global_batch: int | None
    """Samples of all ranks in a full step."""
    samples_a_step: int | None
    """Samples that make one optimizer step: the global batch times the accumulation steps."""
    end: str
    """What becomes of the end of an epoch."""


@dataclass(frozen=True)
class SchedulerFacts:
    """A prepared scheduler."""

    name: str
    advances: str
    """What a call of `step()` means."""


@dataclass(frozen=True)
class OptionFacts:
    """An option in force."""

    value: Any
    origin: str
    """Where it comes from: `argument`, the name of an environment variable, or `default`."""


@dataclass(frozen=True)
class Description:
    """What a run will do."""

    processes: ProcessFacts
    precision: str
    accumulation_steps: int
    gradients: str
    """What the gradients of an optimizer step are the mean of."""
    models: tuple[ModelFacts, ...]
    optimizers: tuple[str, ...]
    schedulers: tuple[SchedulerFacts, ...]
    loaders: tuple[LoaderFacts, ...]
    options: Mapping[str, OptionFacts]
    device: Mapping[str, str]
    """What the device's runtime says of itself, by title; empty where there is nothing to say."""

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts, lists, numbers and text."""
        return asdict(self)

    def lines(self) -> Iterable[tuple[str, str]]:
        """What is to be read, as pairs of a title and a text."""
        of = self.processes
        over = f" over {of.process_group}" if of.process_group else ""
        yield (
            "processes",
            f"{of.world_size}{over}, {of.local_world_size} on this machine; this is rank {of.rank}",
        )
        yield "device", of.device
        yield from self.device.items()
        yield "precision", self.precision
        for model in self.models:
            yield "model", _model(model)
            yield from (("", _group(group)) for group in model.groups)
        for optimizer in self.optimizers:
            yield "optimizer", optimizer
        yield "gradients", self.gradients
        for scheduler in self.schedulers:
            yield "scheduler", f"{scheduler.name}: {scheduler.advances}"
        for loader in self.loaders:
            yield "loader", _loader(loader, self.accumulation_steps)
        usual = dict(flat(Settings()))
        for name, option in self.options.items():
            # A launcher says all of them, and mostly what they are anyway.
            if option.value != usual.get(name):
                yield "option", f"{name} = {option.value} ({option.origin})"

    @override
    def __str__(self) -> str:
        return "\n".join(f"{title:<10} {text}" for title, text in self.lines())

    def __rich__(self) -> RenderableType:
        """A panel, for `rich.print`."""
        from rich.panel import Panel  # noqa: PLC0415 - a run that asks for no panel does not pay for rich
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table.grid(padding=(0, 2))
        for title, text in self.lines():
            table.add_row(Text(title, style="bold"), Text(text))
        return Panel(table, title="this run", title_align="left", expand=False)


def origins(
    settings: Settings, given: Mapping[str, bool], environ: Mapping[str, str]
) -> dict[str, OptionFacts]:
    """Where each setting comes from.

    Args:
        settings: What they came to.
        given: Which were given as an argument; `dynamo` and `gradient` stand for all arguments of that kind.
        environ: The environment they were read from.
    """
    told = dict(flat(Settings.from_env(environ)))
    others = accelerate_variables(environ)

    def origin(name: str, value: object) -> str:
        # Of a section, an argument may have said a part only.
        if given.get(name) or (value != told[name] and any(name.startswith(f"{one}_") for one in given)):
            return "argument"
        if variable(name) in environ:
            return variable(name)
        return others.settings[name].variable if name in others.settings else "default"

    found = {name: OptionFacts(value, origin(name, value)) for name, value in flat(settings)}
    return found | {
        name: OptionFacts(other.text, other.variable)
        for name, other in others.arguments.items()
        if not given.get(name.partition("_")[0])
    }


def model_facts(
    original: nn.Module,
    computes_in: torch.dtype | None,
    reduces_in: str | None,
    wrapping: str,
    groups: tuple[GroupFacts, ...] = (),
) -> ModelFacts:
    """What there is to say of a prepared model.

    Args:
        original: The script's own module.
        computes_in: What autocast computes in, if it does.
        reduces_in: What a communication hook makes of gradients, if there is one.
        wrapping: What replicates it; `none` where nothing does.
        groups: Its parameters, where it is divided.
    """
    parameters = list(original.parameters())
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    dtypes = tuple(sorted({_name(parameter.dtype) for parameter in parameters}))
    averaged = tuple(sorted({_name(parameter.dtype) for parameter in learning}))
    return ModelFacts(
        name=class_of(original),
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in learning),
        dtypes=dtypes,
        computes_in=_each(group.computes_in for group in groups)
        or (_name(computes_in) if computes_in else ", ".join(dtypes)),
        reduces_in=_each(group.reduces_in for group in groups)
        if groups
        else ""
        if wrapping == "none"
        else reduces_in or ", ".join(averaged),
        wrapping=wrapping,
        groups=groups,
    )


def class_of(model: nn.Module) -> str:
    """The name of a module's class, as the script knows it."""
    name = type(model).__name__
    # fully_shard puts a class of its own before the script's.
    divided = any(base.__name__ == "FSDPModule" for base in type(model).__mro__)
    return name.removeprefix("FSDP") if divided else name


def loader_facts(loader: PreparedLoader, place: DataPlace, accumulation_steps: int) -> LoaderFacts:
    """What there is to say of a prepared loader."""
    whole = loader.total_batch_size if loader.source_batch_size is not None else None
    return LoaderFacts(
        dataset=type(loader.dataset).__name__,
        samples=_length(loader.dataset),
        steps=_length(loader),
        batch_size=whole // place.world_size if whole else None,
        parts=place.world_size,
        ranks_a_part=place.copies,
        global_batch=whole,
        samples_a_step=whole * accumulation_steps if whole else None,
        end=loader.end,
    )


def scheduler_facts(scheduler: PreparedScheduler) -> SchedulerFacts:
    """What there is to say of a prepared scheduler."""
    return SchedulerFacts(type(scheduler.scheduler).__name__, scheduler.advances)


def _model(model: ModelFacts) -> str:
    reduced = f", averaged in {model.reduces_in}" if model.reduces_in else ""
    return (
        f"{model.name}: {model.parameters:,} parameters ({model.trainable:,} learn) in "
        f"{', '.join(model.dtypes) or 'no dtype'}, computes in {model.computes_in or 'nothing'}{reduced}; "
        f"wrapping {model.wrapping}"
    )


def _group(group: GroupFacts) -> str:
    count = (
        f"{len(group.modules)} x {group.kind}" if len(group.modules) > 1 else group.modules[0] or group.kind
    )
    each = " each" if len(group.modules) > 1 else ""
    learns = f"gradients {group.gradients}" if group.gradients else "frozen"
    reduced = f", averaged in {group.reduces_in}" if group.reduces_in else ""
    again = "; activations computed again" if group.computed_again else ""
    return (
        f"{count}: {group.elements:,} parameters{each} in {group.dtype}, {learns}, computed in {group.computes_in}{reduced}; "
        f"{group.layout}; {_size(group.bytes_here)} here{again}"
    )


def _size(count: int) -> str:
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count} B"


def _each(names: Iterable[str]) -> str:
    return ", ".join(sorted({name for name in names if name}))


def _loader(loader: LoaderFacts, accumulation_steps: int) -> str:
    samples = "unknown" if loader.samples is None else f"{loader.samples:,}"
    steps = "an unknown number of" if loader.steps is None else f"{loader.steps:,}"
    if loader.batch_size is None:
        size = "batches of different sizes"
    else:
        together = f", {loader.ranks_a_part} ranks each" if loader.ranks_a_part > 1 else ""
        who = f"{loader.parts} parts{together}" if together else f"{loader.parts} ranks"
        size = (
            f"{loader.batch_size} x {who} x {accumulation_steps} accumulation = "
            f"{loader.samples_a_step} samples an optimizer step"
        )
    return f"{loader.dataset}: {samples} samples in {steps} steps; {size}; {loader.end}"


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
