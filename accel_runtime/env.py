"""The contract between launcher and script: what a process is told through its environment.

Standard library only, and the one file that spells a variable of accel. The launcher writes
`Settings.to_env()` into the environment of the processes it starts; the runtime reads it back with
`Settings.from_env()`. A user may set any of these variables by hand.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "BEAT",
    "BEAT_NUMBERS",
    "BEAT_SIZE",
    "HOME",
    "LAUNCH",
    "PJRT",
    "PREFIX",
    "PROFILE",
    "RANK_FOLDER",
    "ROUNDING",
    "Device",
    "FullyShard",
    "LogLevel",
    "MixedPrecision",
    "Number",
    "Parallel",
    "ProcessGroupBackend",
    "Settings",
    "SettingsError",
    "flat",
    "nearest",
    "placed_by_device",
]

PREFIX = "ACCEL_"
HOME = "ACCEL_HOME"
"""The folder that holds the user's profiles, in place of the platform's own."""
PROFILE = "ACCEL_PROFILE"
"""The name of the profile to use, where `--profile` does not say."""
RANK_FOLDER = "ACCEL_RANK_FOLDER"
"""The folder of this process in the launcher's run folder; absent where `accel launch` keeps none."""
LAUNCH = "ACCEL_LAUNCH"
"""A name that `accel launch` gives a run, and no other run has; its checkpoints bear it."""
BEAT = "beat"
"""The file in that folder in which a process shows how far it is: whole numbers of 8 bytes, then text."""
BEAT_NUMBERS = ("pid", "steps", "batches", "collectives", "inside", "news_ns")
"""What the numbers count: `inside` is 1 in a collective, `news_ns` when any other changed (monotonic clock)."""
BEAT_SIZE = 512
"""Bytes of the file; what follows the numbers names the newest collective and its line, in UTF-8."""
ROUNDING = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_F16", "XLA_DOWNCAST_FP16")
"""Variables with which torch_xla computes in another format than the script says: refused on both sides."""
EARLY_FP16 = "USE_FP16"
"""The switch of the first Accelerate releases: honoured where `ACCEL_MIXED_PRECISION` is not set."""
PJRT = "PJRT_DEVICE"
"""What torch_xla is to compute on: where it is set, the device `auto` is `xla`."""

Device = Literal["auto", "cpu", "cuda", "mps", "xla", "xpu"]
LogLevel = Literal["auto", "debug", "info", "warning", "error", "critical"]
MixedPrecision = Literal["no", "bf16", "fp16"]
ProcessGroupBackend = Literal["auto", "gloo", "nccl", "smddp"]
Number = Literal["auto", "fp32", "bf16", "fp16"]
"""A number format of sharded parameters; what `auto` is stands with the field."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


class SettingsError(ValueError):
    """An environment variable that says something we cannot do; the message names the variable."""


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
        if self.dp_shard == "auto":
            others = self.dp_replicate * self.cp * self.tp
            shard = 1 if world_size is None else max(world_size // others, 1)
        else:
            shard = self.dp_shard
        sizes = (self.dp_replicate, shard, self.cp, self.tp)
        if world_size is None or self._product(sizes) == world_size:
            return sizes
        if not self.shards and self._product(sizes) == 1:
            return (world_size, 1, 1, 1)
        raise SettingsError(self._refusal(sizes, world_size))

    def _refusal(self, sizes: tuple[int, int, int, int], world_size: int) -> str:
        said = f"dp_replicate={sizes[0]} x dp_shard={self.dp_shard} x cp={sizes[2]} x tp={sizes[3]}"
        rest, beyond = divmod(
            world_size, self._product(sizes) if self.dp_shard != "auto" else sizes[0] * sizes[2] * sizes[3]
        )
        if self.dp_shard == "auto" or beyond:
            return f"parallel: {said} does not divide {world_size} process(es); their product has to be the number of processes"
        return (
            f"parallel: {said} is {self._product(sizes)}, and there are {world_size} processes; the product has to be their "
            f"number. For {rest} times as many, set dp_replicate: {sizes[0] * rest} (whole models) or dp_shard: auto (shards)"
        )

    @staticmethod
    def _product(sizes: tuple[int, int, int, int]) -> int:
        return sizes[0] * sizes[1] * sizes[2] * sizes[3]


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


@dataclass(frozen=True)
class Settings:
    """What a process is told: every field travels as `ACCEL_<FIELD>`.

    `from_env(to_env(s)) == s` for every `s`.
    """

    device: Device = "auto"
    """The hardware to compute on; `auto` is `xla` where `PJRT_DEVICE` is set, else the accelerator torch finds, else the
    CPU. That torch_xla is installed says nothing."""
    mixed_precision: MixedPrecision = "no"
    """The number format of the forward pass; `no` keeps what the model has."""
    process_group_backend: ProcessGroupBackend = "auto"
    """What carries collectives; `auto` is torch's own choice for the device, `smddp` is SageMaker's library."""
    process_group_timeout: int = 1800
    """Seconds a collective may wait for the other processes before it is an error."""
    log_level: LogLevel = "auto"
    """The level that `get_logger` sets; `auto` leaves levels to the script."""
    spmd: bool = False
    """Whether torch_xla computes on all devices of a machine as on one, in one process."""
    resume: bool = False
    """Whether `Accelerator.resume` goes on from the newest checkpoint."""
    shared_files: bool = True
    """Whether all machines see the same files; where they do not, the first one writes all of a checkpoint."""
    parallel: Parallel = field(default_factory=Parallel)
    """Into how many parts what is divided: `ACCEL_PARALLEL_DP_SHARD` and so on."""
    fully_shard: FullyShard = field(default_factory=FullyShard)
    """How models are sharded: `ACCEL_FULLY_SHARD_WRAP` and so on."""

    def to_env(self) -> dict[str, str]:
        """The environment variables that say this."""
        return {variable(name): _text(value) for name, value in flat(self)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read the variables back; a field whose variable is absent keeps its default.

        Two variables of others are heard where ours do not say: `USE_FP16` of the first Accelerate releases, and
        `PJRT_DEVICE`. Who sets that wants torch_xla, which computes on nothing else: it makes the device `xla`.

        Raises:
            SettingsError: A variable holds a value we cannot use, or is a near miss of a known name.
        """
        _refuse_near_misses(environ)
        values = _read(cls, environ)
        if "mixed_precision" not in values and _switch(EARLY_FP16, environ.get(EARLY_FP16, "")):
            values["mixed_precision"] = "fp16"
        if values.get("device", "auto") == "auto" and environ.get(PJRT):
            values["device"] = "xla"
        return cls(**values)


def placed_by_device(environ: Mapping[str, str]) -> bool:
    """Whether the device alone knows which replica this is, as with torch_xla; cheap, for every line of a log."""
    wanted = environ.get(variable("device"), "auto")
    return wanted == "xla" or (wanted == "auto" and bool(environ.get(PJRT)))


def variable(field: str) -> str:
    """The environment variable of a field of `Settings`."""
    return PREFIX + field.upper()


def nearest(name: str, known: list[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7)), None)


def flat(settings: object, before: str = "") -> list[tuple[str, Any]]:
    """The fields by name, those of a section under the section's name and their own: `parallel_tp`."""
    found: list[tuple[str, Any]] = []
    for f in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, f.name)
        name = before + f.name
        found += flat(value, f"{name}_") if is_dataclass(value) else [(name, value)]
    return found


def _read(kind: type[Any], environ: Mapping[str, str], before: str = "") -> dict[str, Any]:
    hints, values = get_type_hints(kind), {}
    for f in fields(kind):
        name = variable(before + f.name)
        if is_dataclass(hints[f.name]):
            values[f.name] = hints[f.name](**_read(hints[f.name], environ, f"{before}{f.name}_"))
        elif name in environ:
            values[f.name] = _parse(name, environ[name], hints[f.name])
    return values


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join("=".join(some) if isinstance(some, tuple) else some for some in value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _parse(name: str, text: str, kind: object) -> object:
    plain: dict[Any, Callable[[], object]] = {
        str: lambda: text,
        bool: lambda: _switch(name, text),
        bool | int: lambda: int(text) if _whole(text) and int(text) > 1 else _switch(name, text),
        tuple[str, ...]: lambda: tuple(_parts(text)),
        tuple[tuple[str, str], ...]: lambda: tuple(_pair(name, part) for part in _parts(text)),
    }
    if kind in plain:
        return plain[kind]()
    alternatives = get_args(kind) if int in get_args(kind) else (kind,)
    words = [word for some in alternatives for word in get_args(some)]
    if text in words:
        return text
    if int not in alternatives:
        raise SettingsError(f"{name} must be one of {', '.join(words)}; it is {text!r}")
    if _whole(text) and int(text) > 0:
        return int(text)
    raise SettingsError(
        f"{name} must be a whole number above 0{''.join(f', or {word}' for word in words)}; it is {text!r}"
    )


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pair(name: str, text: str) -> tuple[str, str]:
    first, equals, second = (part.strip() for part in text.partition("="))
    if not (first and equals and second):
        raise SettingsError(
            f"{name} must be pairs like layers.*.up=colwise, with commas between; it holds {text!r}"
        )
    return first, second


def _switch(name: str, text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise SettingsError(f"{name} must be one of 1, true, yes, on, 0, false, no, off; it is {text!r}")


def _refuse_near_misses(environ: Mapping[str, str]) -> None:
    # The prefix is left out of the comparison: it alone would make any short name a near miss.
    ours = [HOME, LAUNCH, PROFILE, RANK_FOLDER, *(variable(name) for name, _ in flat(Settings()))]
    known = [name.removeprefix(PREFIX) for name in ours]
    for name in environ:
        own = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and own not in known and (meant := nearest(own, known)):
            raise SettingsError(f"{name} is not a variable of accel; did you mean {PREFIX}{meant}?")
