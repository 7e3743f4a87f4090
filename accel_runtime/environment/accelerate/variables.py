"""Translation of the variables of Accelerate's launcher to settings of accel; standard library only.

A script may still be started by `accelerate launch`, or in an environment that was written for it. Each variable that
changes a training there is translated, rejected with its replacement, or reported as having no effect, as of Accelerate
1.15.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, urlencode

from accel_runtime.environment.accelerate import launch, megatron, sharding
from accel_runtime.environment.accelerate.setting import Setting
from accel_runtime.environment.accelerate.sharding import Fsdp1Strategy
from accel_runtime.environment.layouts import FALSE, TRUE, SettingsError, read_switch
from accel_runtime.environment.registry import Registry

__all__ = [
    "ENGINE_VARIABLES",
    "EngineVariables",
    "Equivalent",
    "Translation",
    "VariableReader",
    "decode_variables",
    "encode_variables",
    "read_strategy",
    "translate",
    "translate_supported",
]

_UNSET = FALSE | {"none"}
"""Values that mean unset: Accelerate's launcher writes all variables of a kind, even those that were not chosen."""
_PREFIXES = ("ACCELERATE_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
_FIELDS = (launch.MIXED_PRECISION, launch.TORCH_DEVICE, launch.LOG_LEVEL)
"""Settings whose values are words of accel too."""
_NAMES = re.compile(r"[\w.*-]+(,[\w.*-]+)*")
_REFUSED = (megatron.USE_MEGATRON_LM, launch.DOWNCAST_BF16)
"""Switches that accel rejects."""
_HARMLESS = frozenset(setting.variable for setting in (launch.DEBUG, *launch.OTHER_VARIABLES))
"""Variables that do not change a training."""
_FSDP = tuple(setting for setting in sharding.FSDP.settings if setting.variable)


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
    """Translations by argument of `Accelerator`, which they replace: `gradient_accumulation_steps`."""
    idle: tuple[str, ...]
    """Sentences on variables that are set and have no effect."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """The reasons why variables that were read have no effect, by their names."""


class EngineVariables(Protocol):
    """The variables of Accelerate that mean the section of an engine."""

    def translate(self, read: VariableReader) -> dict[str, Equivalent]:
        """Return the fields of the settings that the variables mean, in their flat form."""

    def export(self, section: Any) -> dict[Setting, str]:
        """Return the variables of a section of the settings."""

    def export_implied(self, values: Mapping[Setting, str]) -> dict[Setting, str]:
        """Return the variables that exported ones imply, and for which a profile has no key."""

    def list_limits(self, section: Any) -> Iterator[str]:
        """Yield sentences on options that differ in a script that uses Accelerate itself."""

    def explain_refusal(self, section: Any, device: str) -> str:
        """Return why such a script cannot run on a type of device; empty if it can."""


ENGINE_VARIABLES: Registry[EngineVariables] = Registry(
    {
        "deepspeed": "accel_runtime.extensions.deepspeed.accelerate_variables:DeepSpeedVariables",
    }
)
"""The variables of each engine, by its name."""


def translate(environ: Mapping[str, str], overrides: Mapping[str, str]) -> Translation:
    """Translate the variables of Accelerate; `overrides` are the variables of accel by field, which take precedence.

    Raises SettingsError if a variable requires an unsupported feature.
    """
    read = VariableReader(environ)
    settings: dict[str, Equivalent] = {}
    for setting in _FIELDS:
        if setting.field in overrides:
            read.overrule(setting, overrides[setting.field])
        else:
            settings |= _translate_field(read, setting)
    # A launch of accel sets all of its variables, also those that shard nothing.
    is_sharded = overrides.get(sharding.MESH_SIZES[1].field, "1") != "1"
    unused = [engine.switch for engine in sharding.ENGINES if overrides.get(engine.switch.field) == "no"]
    if not is_sharded:
        _check_sequence_parallel(read)
        for setting in (*_REFUSED, *unused):
            if read.is_on(name := setting.variable):
                raise SettingsError(f"{name}={environ[name]} is not supported: {setting.refusal}.")
    for section, translate_section in (
        (("parallel_", "fully_shard_", *(f"{name}_" for name in ENGINE_VARIABLES.names)), _translate_layout),
        (("compile_",), _translate_compile),
    ):
        own = {field: text for field, text in overrides.items() if field.startswith(section)}
        if own:
            read.overrule_section(own, translate_section)
        else:
            settings |= translate_section(read)
    return Translation(settings, _translate_arguments(read), read.idle(), read.ignored)


def translate_supported(environ: Mapping[str, str]) -> dict[str, Equivalent]:
    """Translate the variables of Accelerate by field of `Settings`, and leave out those that accel does not support.

    The processes inherit these as they are: a script that uses Accelerate itself reads them.
    """
    read = VariableReader(environ)
    parts: list[Callable[[], Mapping[str, Equivalent]]] = [
        *(partial(_translate_field, read, setting) for setting in _FIELDS),
        partial(_translate_compile, read),
        partial(_translate_arguments, read),
    ]
    with suppress(SettingsError):
        if not any(read.is_on(setting.variable) for setting in _REFUSED):
            parts.append(partial(_translate_layout, read))
    translated: dict[str, Equivalent] = {}
    for part in parts:
        with suppress(SettingsError):
            translated |= part()
    return translated


def _translate_field(read: VariableReader, setting: Setting) -> dict[str, Equivalent]:
    equivalent = _translate_word(read, setting)
    return {setting.field: equivalent} if equivalent else {}


def encode_variables(variables: Mapping[str, str]) -> str:
    """Return names and values as one text."""
    return urlencode(variables)


def decode_variables(text: str) -> dict[str, str]:
    """Return the names and values of `encode_variables`."""
    return dict(parse_qsl(text, keep_blank_values=True))


class VariableReader:
    """Reader of variables that records which were read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._used = set(_HARMLESS)
        self.ignored: dict[str, str] = {}
        """The reasons why variables have no effect, by their names."""

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

    def word(self, setting: Setting) -> str:
        """Return one of the words of a setting, in lower case; empty if it is unset."""
        name, words = setting.variable, setting.words
        text = self.text(name).lower()
        if text and text not in words:
            raise SettingsError(
                f"Invalid {name} {self.environ[name]!r}: expected one of {', '.join(words)}.{setting.hint}"
            )
        return text

    def ignore(self, name: str, reason: str) -> None:
        """Record that a variable has no effect."""
        self.ignored[name] = reason

    def overrule(self, setting: Setting, text: str) -> None:
        """Record that a variable of accel takes precedence over one of Accelerate, if they differ."""
        reader = VariableReader(self.environ)
        try:
            equivalent = _translate_word(reader, setting)
        except SettingsError:
            equivalent = Equivalent(min(reader._used - _HARMLESS), "")
        self._used |= reader._used
        if equivalent and equivalent.text != text:
            self.ignore(
                equivalent.variable, f"accel's own variable for {setting.field} is {text!r}, and wins"
            )

    def overrule_section(
        self, texts: Mapping[str, str], translate_section: Callable[[VariableReader], dict[str, Equivalent]]
    ) -> None:
        """Record that variables of accel take precedence over those of Accelerate for a section, if they differ."""
        reader = VariableReader(self.environ)
        try:
            equivalents = translate_section(reader)
        except SettingsError:
            return
        if all(texts.get(field) == equivalent.text for field, equivalent in equivalents.items()):
            self._used |= reader._used

    def idle(self) -> tuple[str, ...]:
        """Return sentences on variables without effect: those recorded, and those that were never read."""
        of_fsdp = {setting.variable for setting in _FSDP}
        unread = [
            name
            for name in sorted(self.environ)
            if (name.startswith(_PREFIXES) or name in of_fsdp) and name not in self._used and self.text(name)
        ]
        return (
            *(
                f"{name}={self.environ[name]} has no effect: {reason}."
                for name, reason in self.ignored.items()
            ),
            *([f"{', '.join(unread)}: no effect here."] if unread else []),
        )


def _translate_word(read: VariableReader, setting: Setting) -> Equivalent | None:
    """Translate the variable of a setting whose value is a word."""
    if setting is launch.TORCH_DEVICE and read.is_on(launch.USE_CPU.variable):
        return Equivalent(launch.USE_CPU.variable, "cpu")
    text = read.word(setting)
    return Equivalent(setting.variable, text) if text else None


def _translate_layout(read: VariableReader) -> dict[str, Equivalent]:
    """Translate the variables of meshes, of FSDP and of engines."""
    sizes = _sizes(read)
    settings = sizes | _sharding(read, sizes)
    for name in ENGINE_VARIABLES.names:
        settings |= ENGINE_VARIABLES[name].translate(read)
    return settings


def _translate_compile(read: VariableReader) -> dict[str, Equivalent]:
    """Translate the variables of `torch.compile`; without a backend, the others have no effect in Accelerate."""
    texts = [(setting, read.text(setting.variable).lower()) for setting in launch.DYNAMO_SETTINGS]
    if not texts[0][1]:
        return {}
    return {
        setting.field: Equivalent(setting.variable, "1" if setting.values == "boolean" else text)
        for setting, text in texts
        if text and text not in setting.off
    }


def _check_sequence_parallel(read: VariableReader) -> None:
    name = sharding.SP_SIZE.variable
    if read.is_on(sharding.USE_PARALLELISM_CONFIG.variable) and read.number(name) not in {"", "1"}:
        raise SettingsError(
            f"{name}={read.environ[name]} is not supported: it is the sequence parallelism of DeepSpeed, whose loader splits "
            "sequences. Set parallel.sp in the profile (ACCEL_PARALLEL_SP), and train inside of accelerator.maybe_context_parallel."
        )


def _sizes(read: VariableReader) -> dict[str, Equivalent]:
    """Translate the sizes of a mesh."""
    if not read.is_on(sharding.USE_PARALLELISM_CONFIG.variable):
        return {}
    _check_sequence_parallel(read)
    for name in [name for name in read.environ if name.startswith(sharding.SP_PREFIX)]:
        read.text(name)
    settings = {
        size.field: Equivalent(size.variable, read.number(size.variable)) for size in sharding.MESH_SIZES
    }
    settings = {field: equivalent for field, equivalent in settings.items() if equivalent.text}
    strategy = sharding.CP_COMM_STRATEGY
    if read.word(strategy) not in {"", *strategy.same_texts} and sharding.CP_SIZE.field in settings:
        read.ignore(strategy.variable, "keys and values are always exchanged by allgather")
    read.word(sharding.CP_BACKEND)
    return settings


def _sharding(read: VariableReader, sizes: Mapping[str, Equivalent]) -> dict[str, Equivalent]:
    """Translate the variables of FSDP."""
    if not read.is_on(sharding.USE_FSDP.variable):
        return {}
    for setting in _FSDP:
        # All are read, so that none is reported as unread.
        text = read.text(setting.variable).lower()
        is_known = setting is sharding.VERSION or text in setting.same_texts
        if setting.same is not None and text and not is_known:
            read.ignore(setting.variable, "fully_shard has no such option, and it changes no number")
    variable, strategy = _strategy(read)
    if not strategy.shards:
        return {}
    dp_replicate, dp_shard = (size.field for size in sharding.MESH_SIZES[:2])
    settings: dict[str, Equivalent] = {}
    shard, cp = (sizes.get(field, Equivalent("", "1")).text for field in (dp_shard, sharding.CP_SIZE.field))
    # FSDP shards over the ranks of context parallelism too.
    if dp_shard not in sizes or (shard == "1" and cp != "1"):
        settings[dp_shard] = Equivalent(sharding.USE_FSDP.variable, "auto")
    if dp_shard not in sizes and strategy.is_hybrid and (nodes := _nodes(read.environ)) > 1:
        settings[dp_replicate] = Equivalent(variable, str(nodes))
    if not strategy.reshards:
        settings[sharding.RESHARD_AFTER_FORWARD.field] = Equivalent(variable, "0")
    for setting in (sharding.CPU_OFFLOAD, sharding.ACTIVATION_CHECKPOINTING):
        settings |= {setting.field: Equivalent(setting.variable, "1")} if read.is_on(setting.variable) else {}
    return settings | _wrap(read) | _ignored(read)


def _strategy(read: VariableReader) -> tuple[str, Fsdp1Strategy]:
    """Return the variable that has FSDP1's sharding strategy, and the strategy.

    With version 1, Accelerate uses `FSDP_SHARDING_STRATEGY`, and its wizard writes the strategy under the name of version 2,
    which counts here unless both are set. Its launcher always sets the first one, so its default is taken as unset.
    """
    setting = sharding.RESHARD_AFTER_FORWARD
    text = read.environ.get(setting.variable, "").lower()
    is_strategy = text in {strategy.name for strategy in sharding.STRATEGIES}
    default = sharding.STRATEGIES[0].name
    of_version1 = read.text(sharding.SHARDING_STRATEGY.variable).lower() or default
    if read.text(sharding.VERSION.variable) != "2" and (not is_strategy or of_version1 != default):
        setting, strategy = sharding.SHARDING_STRATEGY, sharding.find_strategy(of_version1)
    elif text in TRUE | {""}:
        strategy = sharding.find_strategy("full_shard")
    elif text in _UNSET:
        strategy = sharding.find_strategy("shard_grad_op")
    else:
        strategy = sharding.find_strategy(text) if is_strategy else None
    if strategy is None:
        words = "true, false or one of" if setting is sharding.RESHARD_AFTER_FORWARD else "one of"
        names = ", ".join(strategy.name for strategy in sharding.STRATEGIES).upper()
        raise SettingsError(
            f"Invalid {setting.variable} {read.environ[setting.variable]!r}: expected {words} {names}."
        )
    return setting.variable, strategy


def read_strategy(environ: Mapping[str, str]) -> Fsdp1Strategy:
    """Return the sharding strategy of FSDP that the variables mean.

    Raises SettingsError if it is not known.
    """
    return _strategy(VariableReader(environ))[1]


def _nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes from the variables of torchrun; 1 if they are not set."""
    world, local = (environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return int(world) // int(local) if world.isdigit() and local.isdigit() and int(local) else 1


def _wrap(read: VariableReader) -> dict[str, Equivalent]:
    """Translate the wrapping policy."""
    policy, classes = sharding.AUTO_WRAP_POLICY, sharding.TRANSFORMER_CLS.variable
    kind = read.word(policy)
    if not kind:
        return {}
    setting = sharding.WRAP_POLICIES[kind]
    if setting is None:
        return {policy.field: Equivalent(policy.variable, "none")}
    if setting is sharding.MIN_NUM_PARAMS:
        number = read.number(setting.variable) or str(sharding.DEFAULT_MIN_NUM_PARAMS)
        return {policy.field: Equivalent(setting.variable, number)}
    if read.text(classes):
        names = ",".join(name.strip() for name in read.text(classes).split(","))
        return {policy.field: Equivalent(classes, names)}
    return {}


def _ignored(read: VariableReader) -> dict[str, Equivalent]:
    """Translate the modules that are not sharded."""
    setting = sharding.IGNORED_MODULES
    text = read.text(setting.variable)
    if not text:
        return {}
    text = text.replace("|", ",") if sharding.MODULE_NAMES.fullmatch(text) else text
    if not _NAMES.fullmatch(text):
        raise SettingsError(
            f"{setting.variable}={text} is not supported: it is a regular expression. Unset it, and list the names in "
            "ACCEL_FULLY_SHARD_IGNORE, with * for any text without a dot."
        )
    return {setting.field: Equivalent(setting.variable, text)}


def _translate_arguments(read: VariableReader) -> dict[str, Equivalent]:
    """Translate the variable that replaces an argument of `Accelerator`."""
    steps = sharding.GRADIENT_ACCUMULATION_STEPS
    if read.text(steps.variable) in {"", "auto"}:
        return {}
    return {steps.argument: Equivalent(steps.variable, read.number(steps.variable))}
