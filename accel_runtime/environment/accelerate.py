"""Translation of the variables of Accelerate's launcher to settings of accel; standard library only.

A script may still be started by `accelerate launch`, or in an environment that was written for it. Each variable that
changes a training there is translated, rejected with its replacement, or reported as having no effect, as of Accelerate
1.15.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from accel_runtime.environment.layouts import FALSE, FSDP1, FSDP1_STRATEGIES, TRUE, SettingsError, read_switch

__all__ = ["Equivalent", "Translation", "translate"]

_UNSET = FALSE | {"none"}
"""Values that mean unset: Accelerate's launcher writes all variables of a kind, even those that were not chosen."""
_PREFIXES = ("ACCELERATE_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
_FIELDS: Mapping[str, tuple[str, tuple[str, ...], str]] = MappingProxyType(
    {
        "mixed_precision": (
            "ACCELERATE_MIXED_PRECISION",
            ("bf16", "fp16"),
            " Set ACCEL_MIXED_PRECISION to bf16, fp16 or no.",
        ),
        "device": (
            "ACCELERATE_TORCH_DEVICE",
            ("cpu", "cuda", "mps", "xpu"),
            " Choose one of several devices with CUDA_VISIBLE_DEVICES.",
        ),
        "log_level": ("ACCELERATE_LOG_LEVEL", ("debug", "info", "warning", "error", "critical"), ""),
    }
)
"""Variables by the field of `Settings` that they set: name, words, and advice for another value."""
_NAMES = re.compile(r"[\w.*-]+(,[\w.*-]+)*")

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "ACCELERATE_USE_DEEPSPEED": "accel shards models by torch's fully_shard instead of DeepSpeed; unset it, and set "
        "ACCEL_PARALLEL_DP_SHARD=auto, or convert the configuration file with `accel config import`",
        "ACCELERATE_USE_MEGATRON_LM": "accel shards models by torch instead of Megatron-LM; unset it, and set "
        "ACCEL_PARALLEL_TP or ACCEL_PARALLEL_DP_SHARD",
        "ACCELERATE_DOWNCAST_BF16": "it rounds weights and optimizer state too; unset it, and set ACCEL_MIXED_PRECISION=bf16",
    }
)
"""Switches that accel rejects."""
_HARMLESS = frozenset(
    {
        "ACCELERATE_DEBUG_MODE",  # collectives are always compared
        "ACCELERATE_DEBUG_RDV_FILE",
        "ACCELERATE_ENABLE_RICH",
        "ACCELERATE_IN_TPU_POD",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",
        "ACCELERATE_USE_SAGEMAKER",
    }
)
"""Variables that do not change a training."""
_FSDP: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {f"FSDP_{name.upper()}": option.same for name, option in FSDP1.items() if option.same}
    | {"FSDP_VERSION": ("1", "2")}
)
"""Variables that do not change the results of a training, with the values that accel matches anyway."""
_FSDP_READ = (
    "FSDP_SHARDING_STRATEGY",
    "FSDP_RESHARD_AFTER_FORWARD",
    "FSDP_OFFLOAD_PARAMS",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "FSDP_MIN_NUM_PARAMS",
    "FSDP_ACTIVATION_CHECKPOINTING",
    "FSDP_IGNORED_MODULES",
)
"""Variables that are translated."""
_SIZES = {
    "DP_REPLICATE_SIZE": "parallel_dp_replicate",
    "DP_SHARD_SIZE": "parallel_dp_shard",
    "TP_SIZE": "parallel_tp",
    "CP_SIZE": "parallel_cp",
}


class Equivalent(NamedTuple):
    """Translation of one variable of Accelerate."""

    variable: str
    """Name of Accelerate's variable."""
    text: str
    """Value, in the form of accel's own variable."""


@dataclass(frozen=True)
class Translation:
    """Translation of the variables of Accelerate in an environment."""

    settings: Mapping[str, Equivalent]
    """Translations by field of `Settings`, in its flat form."""
    arguments: Mapping[str, Equivalent]
    """Translations by argument of `Accelerator`: `gradient_accumulation_steps`, and names with the prefix `dynamo_`."""
    idle: tuple[str, ...]
    """Sentences on variables that are set and have no effect."""


def translate(environ: Mapping[str, str], overrides: Mapping[str, str]) -> Translation:
    """Translate the variables of Accelerate; `overrides` are the variables of accel by field, which take precedence.

    Raises SettingsError if a variable requires an unsupported feature.
    """
    read = _VariableReader(environ)
    settings: dict[str, Equivalent] = {}
    for field in _FIELDS:
        if field in overrides:
            read.overrule(field, overrides[field])
        elif equivalent := _translate_word(read, field):
            settings[field] = equivalent
    if not any(field.startswith(("parallel_", "fully_shard_")) for field in overrides):
        for name, reason in _REFUSED.items():
            if read.is_on(name):
                raise SettingsError(f"{name}={environ[name]} is not supported: {reason}.")
        settings |= _sizes(read)
        settings |= _sharding(read, settings)
    arguments = _arguments(read)
    return Translation(settings, arguments, read.idle())


class _VariableReader:
    """Reader of variables that records which were read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._used = set(_HARMLESS)
        self._idle: dict[str, str] = {}

    def text(self, name: str) -> str:
        """Return a value; empty if it means unset."""
        self._used.add(name)
        value = self.environ.get(name, "").strip()
        return "" if value.lower() in _UNSET else value

    def is_on(self, name: str) -> bool:
        """Return the value of a switch."""
        return read_switch(name, self.text(name))

    def number(self, name: str) -> str:
        """Return a whole number above 0 as text; empty if it is unset."""
        text = self.text(name)
        if text and not (text.isascii() and text.isdigit()):
            raise SettingsError(f"Invalid {name} {self.environ[name]!r}: expected a whole number.")
        return text

    def one_of(self, name: str, values: tuple[str, ...], instead: str = "") -> str:
        """Return one of some words, in lower case; empty if it is unset."""
        text = self.text(name).lower()
        if text and text not in values:
            raise SettingsError(
                f"Invalid {name} {self.environ[name]!r}: expected one of {', '.join(values)}.{instead}"
            )
        return text

    def ignore(self, name: str, reason: str) -> None:
        """Record that a variable has no effect."""
        self._idle[name] = reason

    def overrule(self, field: str, text: str) -> None:
        """Record that a variable of accel takes precedence over one of Accelerate, if they differ."""
        reader = _VariableReader(self.environ)
        try:
            equivalent = _translate_word(reader, field)
        except SettingsError:
            equivalent = Equivalent(min(reader._used - _HARMLESS), "")
        self._used |= reader._used
        if equivalent and equivalent.text != text:
            self.ignore(equivalent.variable, f"accel's own variable for {field} is {text!r}, and wins")

    def idle(self) -> tuple[str, ...]:
        """Return sentences on variables without effect: those recorded, and those that were never read."""
        unread = [
            name
            for name in sorted(self.environ)
            if (name.startswith(_PREFIXES) or name in _FSDP or name in _FSDP_READ)
            and name not in self._used
            and self.text(name)
        ]
        return (
            *(f"{name}={self.environ[name]} has no effect: {reason}." for name, reason in self._idle.items()),
            *([f"{', '.join(unread)}: no effect here."] if unread else []),
        )


def _translate_word(read: _VariableReader, field: str) -> Equivalent | None:
    """Translate the variable of a field whose value is a word."""
    if field == "device" and read.is_on("ACCELERATE_USE_CPU"):
        return Equivalent("ACCELERATE_USE_CPU", "cpu")
    name, values, advice = _FIELDS[field]
    text = read.one_of(name, values, advice)
    return Equivalent(name, text) if text else None


def _sizes(read: _VariableReader) -> dict[str, Equivalent]:
    """Translate the sizes of a mesh."""
    if not read.is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return {}
    prefix = "PARALLELISM_CONFIG_"
    if read.number(f"{prefix}SP_SIZE") not in {"", "1"}:
        raise SettingsError(
            f"{prefix}SP_SIZE={read.environ[f'{prefix}SP_SIZE']} is not supported: it is for DeepSpeed. Split sequences with "
            f"{prefix}CP_SIZE."
        )
    for name in [name for name in read.environ if name.startswith(f"{prefix}SP_")]:
        read.text(name)
    settings = {
        field: Equivalent(prefix + name, read.number(prefix + name)) for name, field in _SIZES.items()
    }
    settings = {field: equivalent for field, equivalent in settings.items() if equivalent.text}
    if (
        read.one_of(f"{prefix}CP_COMM_STRATEGY", ("allgather", "alltoall")) == "alltoall"
        and "parallel_cp" in settings
    ):
        read.ignore(f"{prefix}CP_COMM_STRATEGY", "keys and values are always exchanged by allgather")
    read.one_of(f"{prefix}CP_BACKEND", ("torch",))
    return settings


def _sharding(read: _VariableReader, sizes: Mapping[str, Equivalent]) -> dict[str, Equivalent]:
    """Translate the variables of FSDP."""
    if not read.is_on("ACCELERATE_USE_FSDP"):
        return {}
    for name, usual in _FSDP.items():
        if (text := read.text(name).lower()) and text not in usual:
            read.ignore(name, "fully_shard has no such option, and it changes no number")
    strategy = _strategy(read)
    texts = {name: read.text(name) for name in _FSDP_READ}
    if strategy.text == "no_shard":
        return {}
    settings: dict[str, Equivalent] = {}
    if "parallel_dp_shard" not in sizes:
        settings["parallel_dp_shard"] = Equivalent("ACCELERATE_USE_FSDP", "auto")
        if strategy.text.startswith("hybrid") and (nodes := _nodes(read.environ)) > 1:
            settings["parallel_dp_replicate"] = Equivalent(strategy.variable, str(nodes))
    if strategy.text in {"shard_grad_op", "hybrid_shard_zero2"}:
        settings["fully_shard_reshard_after_forward"] = Equivalent(strategy.variable, "0")
    for name, field in (
        ("FSDP_OFFLOAD_PARAMS", "fully_shard_cpu_offload"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "fully_shard_activation_checkpointing"),
    ):
        settings |= {field: Equivalent(name, "1")} if read.is_on(name) else {}
    return settings | _wrap(read) | _ignored(texts["FSDP_IGNORED_MODULES"])


def _strategy(read: _VariableReader) -> Equivalent:
    """Return FSDP1's sharding strategy."""
    reshards, name = "FSDP_RESHARD_AFTER_FORWARD", "FSDP_SHARDING_STRATEGY"
    strategy = read.environ.get(reshards, "").lower()
    if read.text("FSDP_VERSION") == "2" or strategy in FSDP1_STRATEGIES:
        name = reshards
        if strategy in TRUE | {""}:
            strategy = "full_shard"
        elif strategy in _UNSET:
            strategy = "shard_grad_op"
    else:
        strategy = read.text(name).lower() or "full_shard"
        strategy = FSDP1_STRATEGIES[int(strategy) - 1] if strategy in {"1", "2", "3", "4", "5"} else strategy
    if strategy not in FSDP1_STRATEGIES:
        raise SettingsError(
            f"Invalid {name} {read.environ[name]!r}: expected true, false or one of {', '.join(FSDP1_STRATEGIES).upper()}."
        )
    return Equivalent(name, strategy)


def _nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes from the variables of torchrun; 1 if they are not set."""
    world, local = (environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return int(world) // int(local) if world.isdigit() and local.isdigit() and int(local) else 1


def _wrap(read: _VariableReader) -> dict[str, Equivalent]:
    """Translate the wrapping policy."""
    policy, classes, smallest = "FSDP_AUTO_WRAP_POLICY", "FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_MIN_NUM_PARAMS"
    kind = read.one_of(policy, ("transformer_based_wrap", "size_based_wrap", "no_wrap"))
    if kind == "no_wrap":
        return {"fully_shard_wrap": Equivalent(policy, "none")}
    if kind == "size_based_wrap":
        return {"fully_shard_wrap": Equivalent(smallest, read.number(smallest) or "100000000")}
    if kind and read.text(classes):
        names = ",".join(name.strip() for name in read.text(classes).split(","))
        return {"fully_shard_wrap": Equivalent(classes, names)}
    return {}


def _ignored(text: str) -> dict[str, Equivalent]:
    """Translate the modules that are not sharded."""
    if not text:
        return {}
    if not _NAMES.fullmatch(text):
        raise SettingsError(
            f"FSDP_IGNORED_MODULES={text} is not supported: it is a regular expression. Unset it, and list the names in "
            "ACCEL_FULLY_SHARD_IGNORE, with * for any text without a dot."
        )
    return {"fully_shard_ignore": Equivalent("FSDP_IGNORED_MODULES", text)}


def _arguments(read: _VariableReader) -> dict[str, Equivalent]:
    """Translate variables that replace arguments of `Accelerator`."""
    steps, dynamo = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_DYNAMO_"
    arguments = {}
    if read.text(steps) not in {"", "auto"}:
        arguments["gradient_accumulation_steps"] = Equivalent(steps, read.number(steps))
    names = ("BACKEND", "MODE", "USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION")
    texts = {name: read.text(dynamo + name) for name in names}
    if texts["BACKEND"]:
        arguments |= {
            f"dynamo_{name.lower()}": Equivalent(dynamo + name, text.lower())
            for name, text in texts.items()
            if text
        }
    return arguments
