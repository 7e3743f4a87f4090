"""The contract between launcher and script: what a process is told through its environment.

Standard library only, and the one file that spells a variable of accel. The launcher writes
`Settings.to_env()` into the environment of the processes it starts; the runtime reads it back with
`Settings.from_env()`. A user may set any of these variables by hand.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

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
    "Device",
    "LogLevel",
    "MixedPrecision",
    "ProcessGroupBackend",
    "Settings",
    "SettingsError",
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

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


class SettingsError(ValueError):
    """An environment variable that says something we cannot do; the message names the variable."""


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

    def to_env(self) -> dict[str, str]:
        """The environment variables that say this."""
        return {variable(f.name): _text(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read the variables back; a field whose variable is absent keeps its default.

        Two variables of others are heard where ours do not say: `USE_FP16` of the first Accelerate releases, and
        `PJRT_DEVICE`. Who sets that wants torch_xla, which computes on nothing else: it makes the device `xla`.

        Raises:
            SettingsError: A variable holds a value we cannot use, or is a near miss of a known name.
        """
        _refuse_near_misses(environ)
        hints = get_type_hints(cls)
        values: dict[str, Any] = {
            f.name: _parse(variable(f.name), environ[variable(f.name)], hints[f.name])
            for f in fields(cls)
            if variable(f.name) in environ
        }
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


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _parse(name: str, text: str, kind: object) -> object:
    if kind is bool:
        return _switch(name, text)
    if kind is not int:
        if text in get_args(kind):
            return text
        raise SettingsError(f"{name} must be one of {', '.join(get_args(kind))}; it is {text!r}")
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise SettingsError(f"{name} must be a whole number above 0; it is {text!r}")


def _switch(name: str, text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise SettingsError(f"{name} must be one of 1, true, yes, on, 0, false, no, off; it is {text!r}")


def _refuse_near_misses(environ: Mapping[str, str]) -> None:
    # The prefix is left out of the comparison: it alone would make any short name a near miss.
    ours = [HOME, LAUNCH, PROFILE, RANK_FOLDER, *(variable(f.name) for f in fields(Settings))]
    known = [name.removeprefix(PREFIX) for name in ours]
    for name in environ:
        own = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and own not in known and (meant := nearest(own, known)):
            raise SettingsError(f"{name} is not a variable of accel; did you mean {PREFIX}{meant}?")
