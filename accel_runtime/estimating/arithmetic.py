"""Bytes of a layout on its fullest device: pure arithmetic over shapes, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = [
    "Activations",
    "Formats",
    "Layout",
    "Measured",
    "Parameter",
    "Usage",
    "local",
    "splits",
    "usage",
    "variants",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """What is to be known of a parameter; one that several modules share is one."""

    name: str
    shape: Shape
    itemsize: int
    trained: bool
    floating: bool = True
    group: int | None = None
    """The wrapped module it is gathered with; None is the rest, which is gathered with the model itself."""
    dim: int | None = None
    """The dimension that tensor parallelism divides; None leaves it whole."""


@dataclass(frozen=True)
class Layout:
    """Into how many parts what is divided, and how the sharded part is computed."""

    dp_replicate: int
    dp_shard: int
    tp: int
    sharded: bool
    """Whether `fully_shard` is at work: it averages the gradients of whole parts under `tp` as well."""
    wrapped: bool = False
    """Whether it gathers module by module."""
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def division(self) -> tuple[int, ...]:
        """The order of preference: what slows a step least comes first."""
        # Layers in parts need fast links at every layer; what is computed twice costs a third of a step; shards
        # travel beside the computation.
        parts = (self.tp, int(self.activation_checkpointing), self.dp_shard, int(self.sharded))
        return (*parts, int(self.sharded and self.reshard_after_forward))


@dataclass(frozen=True)
class Formats:
    """How many bytes a number takes on its way; None is as the parameter has it."""

    gathered: int | None = None
    """A parameter that is gathered, and the gradient computed from it."""
    reduced: int | None = None
    """A gradient while it is averaged."""


@dataclass(frozen=True)
class Activations:
    """What the forward pass leaves for the backward pass, on one device."""

    whole: int
    """Everything is kept."""
    checkpointed: int
    """Wrapped modules keep their inputs; that of the one with the most inside is there as well."""
    largest: int
    """The largest tensor of them, whose gradient is there at the same time."""


@dataclass(frozen=True)
class Measured:
    """Bytes that were measured rather than computed."""

    optimizer: int
    """State of the optimizer over the local parts."""
    buffers: int = 0
    """The model's buffers, which are whole everywhere."""
    activations: Activations | None = None
    """What the forward pass leaves; None where there is nothing to run it with."""


@dataclass(frozen=True)
class Usage:
    """Bytes on the fullest device of a layout."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int | None
    """None where there was nothing to measure them with."""
    working: int
    """What comes and goes in a step: gathered parameters, gradients on their way, buckets, the optimizer's own."""

    @property
    def total(self) -> int:
        """All of them, though not all are there at the same moment."""
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        return held + (self.activations or 0) + self.working


def local(parameter: Parameter, layout: Layout) -> Shape:
    """The part of a parameter that the first rank of each group holds: the largest one.

    `tp` divides evenly. `fully_shard` divides the first dimension like `torch.chunk`, and pads every part to the size
    of the first one.
    """
    shape = list(parameter.shape)
    if parameter.dim is not None:
        shape[parameter.dim] //= layout.tp
    if layout.sharded and shape:
        shape[0] = math.ceil(shape[0] / layout.dp_shard)
    return tuple(shape)


def usage(
    parameters: Sequence[Parameter],
    layout: Layout,
    formats: Formats,
    measured: Measured,
) -> Usage:
    """What a layout takes on its fullest device.

    Args:
        parameters: All of the model.
        layout: How they are divided.
        formats: What they are gathered and averaged in.
        measured: What shapes of parameters do not tell, for this layout.
    """
    activations = measured.activations
    held = _bytes(parameters, layout)
    gradients = _bytes((p for p in parameters if p.trained), layout)
    kept = None
    if activations:
        kept = activations.checkpointed if layout.activation_checkpointing else activations.whole
    moving = _sharded(parameters, layout, formats) if layout.sharded else _replicated(gradients, layout)
    # A step of the optimizer computes as much again as it updates; the activations are gone by then.
    working = max(moving + (activations.largest if activations else 0), gradients - (kept or 0))
    return Usage(held, gradients, measured.optimizer, measured.buffers, kept, working)


def splits(devices: int) -> list[tuple[int, int, int]]:
    """All (dp_replicate, dp_shard, tp) whose product is the number of devices."""
    parts = [n for n in range(1, devices + 1) if devices % n == 0]
    return [
        (devices // (shard * tp), shard, tp) for tp in parts for shard in parts if devices % (shard * tp) == 0
    ]


def variants(split: tuple[int, int, int]) -> list[Layout]:
    """The layouts of a split: whole models one way; shards with and without what saves memory."""
    sharded = [
        Layout(
            *split, sharded=True, wrapped=True, reshard_after_forward=reshard, activation_checkpointing=again
        )
        for again in (False, True)
        for reshard in (False, True)
    ]
    dp_replicate, dp_shard, tp = split
    if dp_shard > 1:
        return sharded
    whole = Layout(*split, sharded=dp_replicate > 1 and tp > 1, reshard_after_forward=False)
    if tp > 1:
        return [whole, replace(whole, activation_checkpointing=True)]
    # `dp_shard: auto` on one process shards over one: its parts are whole, its activations can be checkpointed.
    return [whole, *sharded[2:]] if dp_replicate == 1 else [whole]


def _bytes(parameters: Iterable[Parameter], layout: Layout) -> int:
    return sum(math.prod(local(p, layout)) * p.itemsize for p in parameters)


def _replicated(gradients: int, layout: Layout) -> int:
    """DistributedDataParallel averages gradients in buckets, which hold them once more."""
    return gradients if layout.dp_replicate > 1 else 0


def _sharded(parameters: Sequence[Parameter], layout: Layout, formats: Formats) -> int:
    """Gathered parameters and whole gradients, where they are most.

    One module computes while the next one is gathered. What belongs to no wrapped module stays gathered from the
    forward to the backward pass. A gradient is there in the format it was computed in, and in that it is averaged in.
    """
    members: dict[int | None, list[Parameter]] = {}
    for parameter in parameters:
        members.setdefault(parameter.group if layout.wrapped else None, []).append(parameter)
    gathered = {group: _gathered(members[group], layout, formats.gathered) for group in members}
    wrapped = sorted((size for group, size in gathered.items() if group is not None), reverse=True)
    at_once = sum(wrapped[:2]) if layout.reshard_after_forward else sum(wrapped)
    return (
        gathered.get(None, 0)
        + at_once
        + max((_reduced(m, layout, formats) for m in members.values()), default=0)
    )


def _gathered(parameters: Iterable[Parameter], layout: Layout, itemsize: int | None) -> int:
    return sum(_whole(p, layout) * _itemsize(p, itemsize) for p in parameters)


def _reduced(parameters: Iterable[Parameter], layout: Layout, formats: Formats) -> int:
    trained = [p for p in parameters if p.trained]
    return _gathered(trained, layout, formats.gathered) + _gathered(trained, layout, formats.reduced)


def _whole(parameter: Parameter, layout: Layout) -> int:
    """How many numbers a gathered parameter has, with its padding."""
    part = math.prod(local(parameter, layout))
    return part * layout.dp_shard if parameter.shape else part


def _itemsize(parameter: Parameter, wanted: int | None) -> int:
    return wanted if wanted and parameter.floating else parameter.itemsize
