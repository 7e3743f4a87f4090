"""Environment variables that the launcher passes to the script; standard library only.

This is the one file that spells a variable of accel. The launcher writes `Settings.to_env()` into the environment of
the processes it starts; the runtime reads it with `Settings.from_env()`. A user may set any of these variables by hand.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from accel_runtime.environment.accelerate import Translation, decode_variables, translate
from accel_runtime.environment.engines import ENGINES, Engine, EngineConflict, list_engines
from accel_runtime.environment.layouts import (
    FullyShard,
    Number,
    Parallel,
    SettingsError,
    check_layout,
    read_switch,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ACCELERATE_LIMITS",
    "BEAT",
    "BEAT_ENTRY",
    "BEAT_HISTORY",
    "BEAT_HISTORY_RANGE",
    "BEAT_NUMBERS",
    "BEAT_RECENT",
    "BEAT_RECENT_RANGE",
    "BEAT_SIZE",
    "BEAT_TEXT_RANGE",
    "CHECKPOINTS",
    "CONFIGURATION",
    "CONTROL",
    "DESCRIPTION",
    "EXPORTED",
    "FAILURE_FILE",
    "HOME",
    "LAUNCH",
    "METRICS",
    "NODE_NAME",
    "NUM_PROCESSES",
    "PJRT",
    "PREFIX",
    "PROFILE",
    "RANK_FOLDER",
    "RANK_PROCESS",
    "RDZV_SOCKET",
    "RECORD",
    "RUN_FILE",
    "TRUSTED_PROJECTS",
    "Compile",
    "CompileMode",
    "Device",
    "FullyShard",
    "LogLevel",
    "MixedPrecision",
    "Number",
    "Parallel",
    "ProcessGroupBackend",
    "Settings",
    "SettingsError",
    "__version__",
    "accelerate_variables",
    "check_layout",
    "find_engine_conflict",
    "find_nearest",
    "find_rank_process",
    "find_user_variables",
    "flatten_settings",
    "format_rank_process",
    "format_size",
    "is_placed_by_device",
    "read_switch",
]

__version__ = "0.1.0"

PREFIX = "ACCEL_"
HOME = "ACCEL_HOME"
"""Directory of the user's profiles, instead of the platform's own."""
PROFILE = "ACCEL_PROFILE"
"""Name of the profile to use without `--profile`."""
TRUSTED_PROJECTS = "ACCEL_TRUSTED_PROJECTS"
"""Directories whose project file is used whoever owns it, separated as in PATH."""
TRUST_NETWORK = "ACCEL_TRUST_NETWORK"
"""Switch: processes of one node that cannot connect over Unix sockets exchange objects over TCP."""
RANK_FOLDER = "ACCEL_RANK_FOLDER"
"""Directory of this process in the launcher's run directory; not set if `accel launch` keeps none."""
RECORD = "ACCEL_RECORD_"
"""Beginning of the variables that switch on recorders of a rank, each with the name of one."""
LAUNCH = "ACCEL_LAUNCH"
"""Unique name that `accel launch` gives a run, and that its checkpoints contain."""
RANK_PROCESS = "ACCEL_RANK_PROCESS"
"""Process id of a rank, and the variables with which it has connected, for the processes that it starts."""
NODE_NAME = "ACCEL_NODE_NAME"
"""Name of this node in messages, for containers whose host name means nothing."""
FAILURE_FILE = "ACCEL_FAILURE_FILE"
"""File to which `accel launch` writes the reason of a failure on this node."""
RUN_FILE = "ACCEL_RUN_FILE"
"""File to which `accel launch` writes the folder of its run on this node, unless it has one."""
NUM_PROCESSES = "ACCEL_NUM_PROCESSES"
"""Number of processes on all nodes, for nodes that run different numbers; 0 if it is not known."""
CONTROL = "ACCEL_CONTROL"
"""File descriptor with the requests of another machine that has started the launch, and the seconds of silence that end it."""
RDZV_SOCKET = "ACCEL_RDZV_SOCKET"
"""File descriptor of a socket that is bound to the port of the rendezvous, for the launch that serves it."""
EXPORTED = "ACCEL_EXPORTED"
"""The variables of Accelerate that a launch has set, with their values: those that still have them are not the user's."""
ACCELERATE_LIMITS = "ACCEL_ACCELERATE_LIMITS"
"""What has no effect in a script that uses Accelerate itself, as JSON: sentences, and a reason to refuse the script."""
BEAT = "beat"
"""File in that directory with the progress of the process: numbers, text, ring and history, each in a range of bytes."""
BEAT_NUMBERS = (
    "pid",
    "steps",
    "batches",
    "collectives",
    "inside",
    "changed_ns",
    "started_ns",
    "started_epoch_ns",
    "epoch",
    "epoch_length",
    "epoch_first",
    "epoch_base",
    "epoch_ns",
    "first_batch_ns",
    "ended_ns",
    "failed",
    "flops",
    "peak_flops",
    "part",
    "timed_steps",
    "entries",
    "thinnings",
    "sampled_steps",
    "sampled_ns",
    "own_ns",
    "data_ns",
    "forward_ns",
    "backward_ns",
    "update_ns",
    "wait_ns",
    "samples",
    "tokens",
)
"""Names of the whole numbers of 8 bytes; times are those of the monotonic clock, except `started_epoch_ns`.

`inside` is 1 in a collective, `changed_ns` the time of the last progress other than a step. `epoch` and the four after it
describe the loader that returned the last batch: its epoch began at `epoch_ns` with `epoch_first` batches skipped, and has
returned or skipped `batches - epoch_base` since. `first_batch_ns` is the time of the first batch of all, up to a tenth of a second
later. `flops` are the floating-point operations of one step of this rank, and
`peak_flops` those that its device can execute per second; 0 if they are unknown. `part` is the index of the number of the
part of a step in which a rank without progress is, such as that of `data_ns`; -1 for a rank in progress, or if it is unknown.
`timed_steps` is the number of steps whose times are in the ring: it follows `steps` within a tenth of a second.

The history has `entries` entries. `thinnings` is incremented when every second one begins to be removed, and when that has
ended: it is odd meanwhile.

The numbers from `sampled_steps` on are totals at the end of the last step that was measured, of which there are at most ten a
second: the number of steps then, its time, and times since the first step, in which steps between measured ones count as those do.
`own_ns` is the time in which the rank does not wait for others, `data_ns` that of waits for batches, `forward_ns` that from a
batch to its backward pass, `backward_ns` that of backward passes, `update_ns` that from a backward pass to the end of the optimizer
step, and `wait_ns` that in collectives and at the end of backward passes that average gradients. The rest of `own_ns` is the time
from the end of a step to the next batch. `samples` and `tokens` are exact, those of all ranks that were trained on.
"""
BEAT_RECENT = 64
"""Number of steps in the ring: the time of step `n` is in slot `(n - 1) % BEAT_RECENT`.

Times are known of the last step before each look at the rank, of which there are ten a second; the others are evenly spaced between them.
"""
BEAT_HISTORY = 1024
"""Number of entries of the history: the totals at the end of step 1, where times are 0, and of measured steps."""
BEAT_ENTRY = BEAT_NUMBERS[BEAT_NUMBERS.index("sampled_steps") :]
"""Names of the numbers of an entry."""
BEAT_TEXT_RANGE = slice(8 * len(BEAT_NUMBERS), 8 * len(BEAT_NUMBERS) + 512)
"""Range of the newest collective and its line, in UTF-8."""
BEAT_RECENT_RANGE = slice(BEAT_TEXT_RANGE.stop, BEAT_TEXT_RANGE.stop + 8 * BEAT_RECENT)
BEAT_HISTORY_RANGE = slice(
    BEAT_RECENT_RANGE.stop, BEAT_RECENT_RANGE.stop + 8 * len(BEAT_ENTRY) * BEAT_HISTORY
)
"""Range of the history."""
BEAT_SIZE = BEAT_HISTORY_RANGE.stop
"""Bytes of the file, which never grows."""
METRICS = "metrics.jsonl"
"""File in that directory with the values of `Accelerator.log`, from the main process."""
CONFIGURATION = "configuration.json"
"""File in that directory with the configuration that the script has given to its trackers, secrets masked."""
DESCRIPTION = "description.json"
"""File in that directory with the result of `Accelerator.describe`, from the main process."""
CHECKPOINTS = "checkpoints.jsonl"
"""File in that directory with the checkpoints that were saved and loaded, from the main process."""
EARLY_FP16 = "USE_FP16"
"""Switch of the first Accelerate releases, used if `ACCEL_MIXED_PRECISION` is not set."""
PJRT = "PJRT_DEVICE"
"""Device of torch_xla; if it is set, the device `auto` is `xla`."""

_IDENTITY = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a rank that another run, also one that a rank starts, has with other values."""


def format_rank_process(environ: Mapping[str, str], pid: int) -> str:
    """Return the value of `RANK_PROCESS` for a rank with these variables."""
    return " ".join([str(pid), *(environ.get(name, "") for name in _IDENTITY)])


def find_rank_process(environ: Mapping[str, str]) -> int | None:
    """Return the process id of the rank whose variables this process has inherited, while that rank runs; else None.

    A process that replaces itself by exec stays the rank, and so does one that is started when the rank has ended.
    """
    text = environ.get(RANK_PROCESS, "").partition(" ")[0]
    if not text.isdigit() or int(text) == os.getpid() or environ.get("WORLD_SIZE", "1") == "1":
        return None
    pid = int(text)
    if environ[RANK_PROCESS] != format_rank_process(environ, pid):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # it belongs to another user
        pass
    return pid


Device = Literal["auto", "cpu", "cuda", "mps", "xla", "xpu"]
LogLevel = Literal["auto", "debug", "info", "warning", "error", "critical"]
MixedPrecision = Literal["no", "bf16", "fp16"]
ProcessGroupBackend = Literal["auto", "gloo", "nccl", "smddp"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True)
class Compile:
    """Arguments of `torch.compile` for prepared models."""

    backend: str = "no"
    """Name of the compiler, such as `inductor`; `no` does not compile."""
    mode: CompileMode = "default"
    """What the compiler optimizes for."""
    fullgraph: bool = False
    """If true, a graph break is an error."""
    dynamic: Literal["auto"] | bool = "auto"
    """If true, shapes may change; `auto` lets torch detect it."""
    regional: bool = False
    """If true, repeated blocks are compiled separately: the first is compiled, and the others reuse it."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+-]+", self.backend):
            raise SettingsError(
                f"Invalid compile.backend {self.backend!r}: expected the name of a compiler, or no."
            )
        changed = [f.name for f in fields(self) if f.name != "backend" and getattr(self, f.name) != f.default]
        if self.backend == "no" and changed:
            raise SettingsError(
                f"compile.{changed[0]} has no effect with compile.backend: no. Set compile.backend, such as inductor."
            )


@dataclass(frozen=True)
class Settings:
    """Settings of a process; every field has a variable `ACCEL_<FIELD>`.

    `from_env(to_env(s)) == s` for every `s`.
    """

    device: Device = "auto"
    """Device; `auto` is `xla` if `PJRT_DEVICE` is set, otherwise the accelerator that torch finds, otherwise the CPU.
    An installed torch_xla alone has no effect."""
    mixed_precision: MixedPrecision = "no"
    """Number format of the forward pass; `no` keeps that of the model."""
    process_group_backend: ProcessGroupBackend = "auto"
    """Backend of collectives; `auto` is torch's choice for the device, `smddp` is SageMaker's library."""
    process_group_timeout: int = 1800
    """Seconds that a collective may wait for the other processes."""
    log_level: LogLevel = "auto"
    """Level set by `get_logger`; `auto` leaves levels to the script."""
    spmd: bool = False
    """If true, torch_xla computes on all devices of a node as on one, in one process."""
    resume: bool = False
    """If true, `Accelerator.resume` continues from the newest checkpoint."""
    gradient_accumulation_steps: int = 1
    """Number of micro-batches per optimizer step, unless the script passes another one."""
    global_batch_size: int | Literal["none"] = "none"
    """Samples per optimizer step over all processes, unless the script passes another number; `none` counts micro-batches."""
    measure_flops: bool = False
    """If true, the floating-point operations of the third step are counted."""
    check_replay: int | Literal["never"] = "never"
    """Number of forward passes of each prepared model of which one is run again, twice, and compared."""
    shared_files: bool = True
    """If true, all nodes share a file system; otherwise the first one writes all of a checkpoint."""
    node_dir: str = ""
    """Directory on the disk of each node for most checkpoints with automatic names; empty is none."""
    store_every: int = 10
    """Number of saves of which one goes to the project directory if there is a `node_dir`."""
    store_timeout: int = 180
    """Seconds for which a failing call to an object store is repeated."""
    parallel: Parallel = field(default_factory=Parallel)
    """Sizes of the layout: `ACCEL_PARALLEL_DP_SHARD` and so on."""
    fully_shard: FullyShard = field(default_factory=FullyShard)
    """Options of `fully_shard`: `ACCEL_FULLY_SHARD_WRAP` and so on."""
    engines: tuple[Engine, ...] = field(default_factory=list_engines)
    """Options of each engine: `ACCEL_<ENGINE>_<FIELD>`; at most one is used."""
    compile: Compile = field(default_factory=Compile)
    """Arguments of `torch.compile`, unless the script passes its own: `ACCEL_COMPILE_BACKEND` and so on."""

    @property
    def engine(self) -> Engine | None:
        """Return the options of the engine that trains models; None if torch does."""
        return next((engine for engine in self.engines if engine.is_used), None)

    def get_section(self, name: str) -> Any:
        """Return a section by its name in a profile, such as `parallel` or that of an engine."""
        return next((engine for engine in self.engines if engine.name == name), None) or getattr(self, name)

    def with_engine(self, engine: Engine) -> Settings:
        """Return these settings with other options of an engine."""
        return replace(
            self, engines=tuple(engine if one.name == engine.name else one for one in self.engines)
        )

    def to_env(self) -> dict[str, str]:
        """Return the environment variables of these settings."""
        return {variable_name(name): _format_value(value) for name, value in flatten_settings(self)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str], *, accelerate: bool = True) -> Settings:
        """Read the settings from environment variables; a field without its variable keeps its default.

        Two foreign variables are used if accel's own are not set: `USE_FP16` of the first Accelerate releases, and
        `PJRT_DEVICE`, which makes the device `xla`.

        Args:
            environ: The environment.
            accelerate: If true, use variables of Accelerate's launcher for fields whose own variables are not set.

        Raises:
            SettingsError: A variable has an invalid value, or nearly the name of a known variable.
        """
        _refuse_near_misses(environ)
        translations = accelerate_variables(environ).settings if accelerate else {}
        environ = {
            variable_name(field): translation.text for field, translation in translations.items()
        } | dict(environ)
        try:
            values = _read(cls, environ)
            _refuse_conflict(cls(**values))
        except SettingsError as error:
            text = str(error)
            for field, translation in translations.items():
                text = text.replace(f"{variable_name(field)} ", f"{translation.variable} ")
            raise SettingsError(text) from None
        if "mixed_precision" not in values and read_switch(EARLY_FP16, environ.get(EARLY_FP16, "")):
            values["mixed_precision"] = "fp16"
        if values.get("device", "auto") == "auto" and environ.get(PJRT):
            values["device"] = "xla"
        settings = cls(**values)
        _refuse_conflict(settings)
        return settings


def _refuse_conflict(settings: Settings) -> None:
    if (engine := settings.engine) and (conflict := engine.find_conflict(settings)):
        chosen, other = (variable_name(key.replace(".", "_")) for key in (engine.key, conflict.key))
        raise SettingsError(
            f"Cannot use {chosen} {engine.choice} with {other} {_format_value(conflict.value)}: {conflict.reason}. Unset one of them."
        )


def find_engine_conflict(settings: Settings) -> EngineConflict | None:
    """Return the first setting that cannot be used with the engine; None without one, or without an engine."""
    return settings.engine.find_conflict(settings) if settings.engine else None


def is_placed_by_device(environ: Mapping[str, str]) -> bool:
    """Return whether ranks of replicas are defined by the device, as with torch_xla; cheap enough for every log record."""
    device = environ.get(variable_name("device"), "auto")
    return device == "xla" or (device == "auto" and bool(environ.get(PJRT)))


def variable_name(field: str) -> str:
    """Return the environment variable of a field of `Settings`."""
    return PREFIX + field.upper()


def accelerate_variables(environ: Mapping[str, str]) -> Translation:
    """Return the translation of Accelerate's variables in an environment; those of accel take precedence.

    Raises SettingsError if a variable requires an unsupported feature.
    """
    names = {name: variable_name(name) for name, _ in flatten_settings(Settings())}
    overrides = {name: environ[ours] for name, ours in names.items() if ours in environ}
    return translate(find_user_variables(environ), overrides)


def find_user_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of Accelerate that have the value of a launch of accel."""
    exported = decode_variables(environ.get(EXPORTED, ""))
    return {name: value for name, value in environ.items() if exported.get(name) != value}


def find_nearest(name: str, known: list[str]) -> str | None:
    """Return the known name that `name` is probably a typo of, or None."""
    # RUN_NAME and NODE_NAME, which share little but an ending, have a ratio of 0.71; timeout and rdzv_timeout have 0.74.
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.72)), None)


def format_size(size: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, base, decimals in (("TB", 10**12, 2), ("GB", 10**9, 2), ("MB", 10**6, 1), ("kB", 10**3, 1)):
        if size >= base:
            return f"{size / base:.{decimals}f} {unit}"
    return f"{size:.0f} B"


def flatten_settings(settings: object, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the fields by name, those of a section prefixed with the section's name: `parallel_tp`."""
    items: list[tuple[str, Any]] = []
    for f in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, f.name)
        name = prefix + f.name
        if f.name == "engines":
            items += [item for engine in value for item in flatten_settings(engine, f"{engine.name}_")]
        else:
            items += flatten_settings(value, f"{name}_") if is_dataclass(value) else [(name, value)]
    return items


def _read(kind: type[Any], environ: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for f in fields(kind):
        name = variable_name(prefix + f.name)
        if f.name == "engines":
            values[f.name] = tuple(_read_section(ENGINES[one], one, environ) for one in ENGINES.names)
        elif is_dataclass(hints[f.name]):
            values[f.name] = _read_section(hints[f.name], f.name, environ)
        elif name in environ:
            values[f.name] = _parse_value(name, environ[name], hints[f.name])
    return values


def _read_section(kind: type[Any], name: str, environ: Mapping[str, str]) -> object:
    """Return a section of the settings; errors name the variable instead of the profile key."""
    values = _read(kind, environ, f"{name}_")
    try:
        return kind(**values)
    except SettingsError as error:
        raise SettingsError(
            re.sub(rf"{name}\.(\w+)", lambda key: variable_name(f"{name}_{key[1]}"), str(error))
        ) from None


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join("=".join(item) if isinstance(item, tuple) else item for item in value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _parse_value(name: str, text: str, kind: object) -> object:
    if kind is str:
        return text
    if kind is bool or kind is float:
        return read_switch(name, text) if kind is bool else _parse_float(name, text)
    if bool in get_args(kind):
        # Besides true and false, a number above 1 or a word.
        is_other = (
            text.isascii() and text.isdigit() and int(text) > 1 if int in get_args(kind) else text == "auto"
        )
        return (int(text) if text.isdigit() else text) if is_other else read_switch(name, text)
    if kind == tuple[str, ...]:
        return tuple(_split_items(text))
    if kind == tuple[tuple[str, str], ...]:
        return tuple(_parse_pair(name, item) for item in _split_items(text))
    return _parse_word_or_number(name, text, get_args(kind) if int in get_args(kind) else (kind,))


def _parse_word_or_number(name: str, text: str, kinds: tuple[object, ...]) -> str | int:
    words = [word for item in kinds for word in get_args(item)]
    if text in words:
        return text
    if int not in kinds:
        raise SettingsError(f"Invalid {name} {text!r}: expected one of {', '.join(words)}.")
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise SettingsError(
        f"Invalid {name} {text!r}: expected a whole number above 0{''.join(f', or {word}' for word in words)}."
    )


def _parse_float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"Invalid {name} {text!r}: expected a number.") from None


def _split_items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _parse_pair(name: str, text: str) -> tuple[str, str]:
    first, equals, second = (item.strip() for item in text.partition("="))
    if not (first and equals and second):
        raise SettingsError(
            f"Invalid {name} {text!r}: expected pairs like layers.*.up=colwise, with commas between."
        )
    return first, second


def _refuse_near_misses(environ: Mapping[str, str]) -> None:
    # The prefix is left out of the comparison: it alone would make any short name a near miss.
    ours = [
        HOME,
        LAUNCH,
        PROFILE,
        TRUST_NETWORK,
        RANK_FOLDER,
        RANK_PROCESS,
        NODE_NAME,
        FAILURE_FILE,
        RUN_FILE,
        NUM_PROCESSES,
        CONTROL,
        RDZV_SOCKET,
        EXPORTED,
        ACCELERATE_LIMITS,
        TRUSTED_PROJECTS,
        *(variable_name(name) for name, _ in flatten_settings(Settings())),
    ]
    known = [name.removeprefix(PREFIX) for name in ours]
    for name in environ:
        suffix = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and suffix not in known and (nearest := find_nearest(suffix, known)):
            raise SettingsError(f"{name} is not a variable of accel; did you mean {PREFIX}{nearest}?")
