"""The contract between launcher and script: what a process is told through its environment.

Standard library only, and the one file that spells a variable of accel. The launcher writes
`Settings.to_env()` into the environment of the processes it starts; the runtime reads it back with
`Settings.from_env()`. A user may set any of these variables by hand.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from accel_runtime.accelerate_env import Translation, translate
from accel_runtime.layouts import FullyShard, Number, Parallel, SettingsError, check_layout, fsdp1

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    "TRUSTED_PROJECTS",
    "Device",
    "FullyShard",
    "LogLevel",
    "MixedPrecision",
    "Number",
    "Parallel",
    "ProcessGroupBackend",
    "Settings",
    "SettingsError",
    "accelerate_variables",
    "check_layout",
    "flat",
    "fsdp1",
    "nearest",
    "placed_by_device",
    "read_switch",
]

PREFIX = "ACCEL_"
HOME = "ACCEL_HOME"
"""The folder that holds the user's profiles, in place of the platform's own."""
PROFILE = "ACCEL_PROFILE"
"""The name of the profile to use, where `--profile` does not say."""
TRUSTED_PROJECTS = "ACCEL_TRUSTED_PROJECTS"
"""Folders whose project file is used whoever owns it, separated as in PATH."""
TRUST_NETWORK = "ACCEL_TRUST_NETWORK"
"""A switch: processes of one machine that cannot connect over Unix sockets exchange objects over TCP."""
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

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


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
    def from_env(cls, environ: Mapping[str, str], *, accelerate: bool = True) -> Settings:
        """Read the variables back; a field whose variable is absent keeps its default.

        Args:
            environ: The environment.
            accelerate: Take over variables of Accelerate's launcher, for fields whose own variables are absent.

        Two variables of others are heard where ours do not say: `USE_FP16` of the first Accelerate releases, and
        `PJRT_DEVICE`. Who sets that wants torch_xla, which computes on nothing else: it makes the device `xla`.

        Raises:
            SettingsError: A variable holds a value we cannot use, or is a near miss of a known name.
        """
        _refuse_near_misses(environ)
        others = accelerate_variables(environ).settings if accelerate else {}
        environ = {variable(field): other.text for field, other in others.items()} | dict(environ)
        try:
            values = _read(cls, environ)
        except SettingsError as error:
            text = str(error)
            for field, other in others.items():
                text = text.replace(f"{variable(field)} ", f"{other.variable} ")
            raise SettingsError(text) from None
        if "mixed_precision" not in values and read_switch(EARLY_FP16, environ.get(EARLY_FP16, "")):
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


def accelerate_variables(environ: Mapping[str, str]) -> Translation:
    """Return what the variables of Accelerate in an environment are in accel; those of accel win.

    Raises:
        SettingsError: A variable asks for what accel does not do.
    """
    names = {name: variable(name) for name, _ in flat(Settings())}
    return translate(environ, {name: environ[ours] for name, ours in names.items() if ours in environ})


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
            values[f.name] = _section(hints[f.name], f.name, environ)
        elif name in environ:
            values[f.name] = _parse(name, environ[name], hints[f.name])
    return values


def _section(kind: type[Any], name: str, environ: Mapping[str, str]) -> object:
    """A part of the settings; what is wrong with it is said of the variable, not of the key that has its name."""
    values = _read(kind, environ, f"{name}_")
    try:
        return kind(**values)
    except SettingsError as error:
        key, _, rest = str(error).partition(" ")
        raise SettingsError(f"{variable(key.replace('.', '_'))} {rest}") from None


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join("=".join(some) if isinstance(some, tuple) else some for some in value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _parse(name: str, text: str, kind: object) -> object:
    if kind is str:
        return text
    if kind is bool:
        return read_switch(name, text)
    if kind == bool | int:
        return int(text) if text.isascii() and text.isdigit() and int(text) > 1 else read_switch(name, text)
    if kind == tuple[str, ...]:
        return tuple(_parts(text))
    if kind == tuple[tuple[str, str], ...]:
        return tuple(_pair(name, part) for part in _parts(text))
    return _word_or_number(name, text, get_args(kind) if int in get_args(kind) else (kind,))


def _word_or_number(name: str, text: str, kinds: tuple[object, ...]) -> str | int:
    words = [word for some in kinds for word in get_args(some)]
    if text in words:
        return text
    if int not in kinds:
        raise SettingsError(f"{name} must be one of {', '.join(words)}; it is {text!r}")
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise SettingsError(
        f"{name} must be a whole number above 0{''.join(f', or {word}' for word in words)}; it is {text!r}"
    )


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pair(name: str, text: str) -> tuple[str, str]:
    first, equals, second = (part.strip() for part in text.partition("="))
    if not (first and equals and second):
        raise SettingsError(
            f"{name} must be pairs like layers.*.up=colwise, with commas between; it holds {text!r}"
        )
    return first, second


def read_switch(name: str, text: str) -> bool:
    """Read the value of a variable that is on or off; empty is off.

    Raises:
        SettingsError: It is neither.
    """
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise SettingsError(f"{name} must be one of 1, true, yes, on, 0, false, no, off; it is {text!r}")


def _refuse_near_misses(environ: Mapping[str, str]) -> None:
    # The prefix is left out of the comparison: it alone would make any short name a near miss.
    ours = [
        HOME,
        LAUNCH,
        PROFILE,
        TRUST_NETWORK,
        RANK_FOLDER,
        TRUSTED_PROJECTS,
        *(variable(name) for name, _ in flat(Settings())),
    ]
    known = [name.removeprefix(PREFIX) for name in ours]
    for name in environ:
        own = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and own not in known and (meant := nearest(own, known)):
            raise SettingsError(f"{name} is not a variable of accel; did you mean {PREFIX}{meant}?")
