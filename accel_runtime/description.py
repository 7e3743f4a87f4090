"""What a run will do, as data and as a panel to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.data.loader import PreparedLoader
from accel_runtime.env import Settings, variable
from accel_runtime.scheduler import PreparedScheduler
from accel_runtime.topology import DataPlace

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "Description",
    "LoaderFacts",
    "ModelFacts",
    "OptionFacts",
    "ProcessFacts",
    "SchedulerFacts",
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
        for optimizer in self.optimizers:
            yield "optimizer", optimizer
        yield "gradients", self.gradients
        for scheduler in self.schedulers:
            yield "scheduler", f"{scheduler.name}: {scheduler.advances}"
        for loader in self.loaders:
            yield "loader", _loader(loader, self.accumulation_steps)
        usual = Settings()
        for name, option in self.options.items():
            # A launcher says all of them, and mostly what they are anyway.
            if option.value != getattr(usual, name):
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
        given: Which were given as an argument.
        environ: The environment they were read from.
    """

    def origin(name: str) -> str:
        if given.get(name):
            return "argument"
        return variable(name) if variable(name) in environ else "default"

    return {f.name: OptionFacts(getattr(settings, f.name), origin(f.name)) for f in fields(settings)}


def model_facts(
    original: nn.Module,
    computes_in: torch.dtype | None,
    reduces_in: str | None,
    wrapping: str,
) -> ModelFacts:
    """What there is to say of a prepared model.

    Args:
        original: The script's own module.
        computes_in: What autocast computes in, if it does.
        reduces_in: What a communication hook makes of gradients, if there is one.
        wrapping: What replicates it; `none` where nothing does.
    """
    parameters = list(original.parameters())
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    dtypes = tuple(sorted({_name(parameter.dtype) for parameter in parameters}))
    averaged = tuple(sorted({_name(parameter.dtype) for parameter in learning}))
    return ModelFacts(
        name=type(original).__name__,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in learning),
        dtypes=dtypes,
        computes_in=_name(computes_in) if computes_in else ", ".join(dtypes),
        reduces_in="" if wrapping == "none" else reduces_in or ", ".join(averaged),
        wrapping=wrapping,
    )


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
