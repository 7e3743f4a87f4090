"""An Accelerate config file in typed values: parsers, the settings that several keys decide, and the form of rules and answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from accel_cli.console import mask_secrets
from accel_cli.planning.network import Endpoint
from accel_cli.profile.layers import flatten
from accel_cli.profile.schema import Profile
from accel_cli.profile.validation_errors import did_you_mean, one_of
from accel_runtime.environment.accelerate import launch, sharding
from accel_runtime.environment.accelerate.setting import Choices, ConfigSection, IntegerRange, Setting, Values
from accel_runtime.environment.accelerate.sharding import EngineWords, Fsdp1Strategy
from accel_runtime.environment.registry import Registry
from accel_runtime.environment.settings import find_nearest

__all__ = [
    "EMPTY",
    "ENGINE_RULES",
    "OFF",
    "SHARDING_KEYS",
    "SHARDING_TYPES",
    "AccelerateConfig",
    "Answer",
    "EngineRules",
    "InvalidValueError",
    "JobRules",
    "KeyRule",
    "Parser",
    "add_prefix",
    "build_parser",
    "build_rule",
    "by_meaning",
    "choice",
    "drop",
    "dropped",
    "format_value",
    "get_default",
    "integer",
    "keep",
    "normalize",
    "pairs",
    "parse_bool",
    "parse_class_names",
    "parse_gpu_ids",
    "parse_host",
    "parse_instance_type",
    "parse_mapping",
    "parse_module_names",
    "parse_or",
    "parse_text",
    "parse_texts",
    "same",
    "sets",
    "take",
]

_DEFAULT_PORT = 29500
# Accelerate reads YAML 1.1, where these words are booleans.
_YAML_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:]*")
_GPU_IDS = re.compile(r"[A-Za-z0-9_.:/-]+(\s*,\s*[A-Za-z0-9_.:/-]+)*")


class InvalidValueError(ValueError):
    """A value that a key does not accept."""

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.hint = hint


Parser = Callable[[Any], Any]
"""Returns the parsed value of a key, or raises InvalidValueError."""


def format_value(name: str, value: object) -> str:
    """Return a value on one line, as YAML writes it, without secrets."""
    if isinstance(value, Mapping):
        items = (f"{key}: {format_value(f'{name}.{key}', inner)}" for key, inner in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(format_value(name, entry) for entry in value) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value)
    # A command or an assignment names its secret itself.
    words = re.split(r"[=\s]+", text)
    masked = [mask_secrets(each, text) for each in (name, *(words if len(words) > 1 else ()))]
    text = "***" if "***" in masked else masked[0]
    return text if text and text.isprintable() else repr(text)


def normalize(value: Any) -> str:
    """Return a value as text in lower case: `true` also for `yes`, and `1` also for 1.0."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    text = str(whole).strip().lower()
    return _YAML_1_1.get(text, text)


def keep(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def parse_bool(value: Any) -> bool:
    """Return a boolean, also from a word, 1 or 0."""
    if type(value) is int and value in {0, 1}:
        return bool(value)
    if (text := normalize(value)) not in {"true", "false"}:
        raise InvalidValueError("expected true or false")
    return text == "true"


def integer(least: int, most: int | None = None, *, auto: int | None = None) -> Parser:
    """Return a parser of whole numbers between two; `auto` is one more number, which leaves it open."""
    expected = (
        f"expected a whole number from {least} to {most}"
        if most
        else f"expected a whole number of at least {least}"
    )
    expected += "" if auto is None else f", or {auto}"

    def parse(value: Any) -> int:
        text = normalize(value)
        number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
        if number is None or ((number < least or (most is not None and number > most)) and number != auto):
            raise InvalidValueError(expected)
        return number

    return parse


def choice(
    *words: str, aliases: Mapping[str, str] | None = None, refused: Mapping[str, str] | None = None
) -> Parser:
    """Return a parser of words in any case.

    Args:
        words: The words, as the parser returns them.
        aliases: Other values of a word, normalized.
        refused: The reasons why accel does not have a value of Accelerate, by normalized value.
    """
    known = {**{normalize(word): word for word in words}, **(aliases or {})}

    def parse(value: Any) -> str:
        name = normalize(value)
        if reason := (refused or {}).get(name):
            raise InvalidValueError(reason)
        if name not in known:
            nearest = find_nearest(name, list(known))
            raise InvalidValueError(one_of(words), did_you_mean(known[nearest] if nearest else None))
        return known[name]

    return parse


def parse_text(value: Any) -> str:
    """Return text, also from a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidValueError("expected text")
    return str(value)


def parse_texts(value: Any) -> list[str]:
    """Return a list of non-empty texts, also from a single one."""
    entries = value if isinstance(value, list) else [value]
    if any(isinstance(entry, (Mapping, list, bool)) for entry in entries):
        raise InvalidValueError("expected a list of texts")
    return [str(entry) for entry in entries if entry]


def parse_class_names(value: Any) -> list[str]:
    """Return names of classes from text with commas, or from a list."""
    names = [name.strip() for entry in parse_texts(value) for name in entry.split(",") if name.strip()]
    if not all(name.isidentifier() for name in names):
        raise InvalidValueError("expected names of classes with commas between")
    return names


def parse_mapping(value: Any) -> Mapping[str, Any]:
    """Return keys and values as they are."""
    if not isinstance(value, Mapping):
        raise InvalidValueError("expected keys and values")
    return value


def parse_module_names(value: Any) -> list[str] | str:
    """Return names of modules, from a list or from text with `|` between; other text is a regular expression."""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise InvalidValueError("expected names of modules, or a regular expression")
    text = "|".join(names)
    return text.split("|") if sharding.MODULE_NAMES.fullmatch(text) else text


def pairs(name: str, value: str) -> Parser:
    """Return a parser of names and values: a mapping, or a list of entries as in requests of AWS."""

    def parse(given: Any) -> dict[str, str]:
        entries = (
            [{name: key, value: each} for key, each in given.items()] if isinstance(given, Mapping) else given
        )
        if not isinstance(entries, list) or not all(
            isinstance(entry, Mapping) and set(entry) == {name, value} for entry in entries
        ):
            raise InvalidValueError(f"expected a list of entries with {name} and {value}")
        return {parse_text(entry[name]): parse_text(entry[value]) for entry in entries}

    return parse


def parse_host(value: Any) -> str:
    """Return the name or address of a node, without brackets."""
    name = value.strip().strip("[]") if isinstance(value, str) else ""
    if not _HOST.fullmatch(name):
        raise InvalidValueError("expected the name or address of a node")
    return name


def parse_gpu_ids(value: Any) -> str:
    """Return `all`, or ids of GPUs with commas between."""
    ids = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if not _GPU_IDS.fullmatch(ids):
        raise InvalidValueError("expected all, or ids such as 0,1")
    return "".join(ids.split())


def parse_instance_type(value: Any) -> str:
    """Return an instance type; Accelerate's wizard offers one that does not exist."""
    return parse_text(value).replace("ml.p4dn.24xlarge", "ml.p4d.24xlarge")


_PARSERS: Mapping[str, Parser] = {
    "any": keep,
    "boolean": parse_bool,
    "text": parse_text,
    "texts": parse_texts,
    "class names": parse_class_names,
    "host": parse_host,
    "GPU ids": parse_gpu_ids,
    "instance type": parse_instance_type,
    "keys and values": parse_mapping,
    "module names": parse_module_names,
}


def build_parser(values: Values) -> Parser:
    """Return the parser of the values that a key of Accelerate accepts."""
    if isinstance(values, Choices):
        return choice(*values.words, aliases=values.aliases, refused=values.refused)
    if isinstance(values, IntegerRange):
        return integer(values.minimum, values.maximum, auto=values.auto)
    return _PARSERS[values]


def parse_or(values: Values, value: Any, default: Any) -> Any:
    """Return a parsed value, or the default for one that is reported as invalid for its own key."""
    try:
        return build_parser(values)(value)
    except InvalidValueError:
        return default


def add_prefix(values: Mapping[str, Any], section: ConfigSection) -> dict[str, Any]:
    """Return the values of a section that are set, by full key; Accelerate adds the prefix to keys without it."""
    prefix = section.prefix
    return {
        f"{prefix}{str(key).removeprefix(prefix)}": value
        for key, value in values.items()
        if value is not None
    }


def get_default(key: str) -> Any:
    """Return the default of a dotted key of the profile."""
    return flatten(Profile().model_dump())[key]


SHARDING_KEYS = frozenset({"parallel.dp_shard", "parallel.cp"})
"""The keys of the profile whose dimensions shard a model with `fully_shard`."""
SHARDING_TYPES = {
    **{section.key: section.distributed_type for section in launch.SECTIONS if section.distributed_type},
    **{engine.file.key: engine.section.distributed_type for engine in sharding.ENGINES},
}
"""The `distributed_type` that uses a section."""


@dataclass(frozen=True)
class AccelerateConfig:
    """A config file: its keys with valid values, and the meaning of the variables that Accelerate sets for it."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    """The keys with valid values, parsed; those of a section are keys of its value."""
    engine_file: Mapping[str, Any] | None = None
    """The JSON file that the section of an engine names, parsed; None if there is no such file."""
    engine_path: str = ""
    """The path of that file; empty if there is no such file."""
    target: str = "fully_shard"
    """The section of the profile that the settings of an engine become."""
    job_launcher: str = ""
    """The launcher of a `compute_environment` whose scripts are jobs; empty if they run on this machine."""
    precision: str = "no"
    """The number format: of the file itself, of its early key, or of the engine's file."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values of the profile that the variables mean, without defaults, by dotted key."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The variable that each of them comes from."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """The reasons why variables have no effect, by their names."""
    strategy: Fsdp1Strategy = sharding.STRATEGIES[0]
    """The strategy of the section of FSDP, in the terms of FSDP1."""

    @property
    def distributed_type(self) -> str:
        """Return the word that decides the launcher and the device."""
        return str(self.keys.get(launch.DISTRIBUTED_TYPE.key, "NO"))

    @property
    def num_processes(self) -> int:
        """Return the number of processes on all nodes; -1 if it is left open."""
        return int(self.keys.get(launch.NUM_PROCESSES.key, -1))

    @property
    def num_machines(self) -> int:
        """Return the number of nodes."""
        return int(self.keys.get(launch.NUM_MACHINES.key, 1))

    @property
    def launcher(self) -> str:
        """Return `launcher.kind` of the profile."""
        return self.job_launcher or launch.DISTRIBUTED_TYPES[self.distributed_type][0]

    @property
    def device_of_type(self) -> str:
        """Return the device of the word that decides the launcher."""
        return "auto" if self.job_launcher else launch.DISTRIBUTED_TYPES[self.distributed_type][1]

    @property
    def device(self) -> str:
        """Return the device of the profile."""
        return "cpu" if self.keys.get(launch.USE_CPU.key) else self.device_of_type

    @property
    def is_tpu(self) -> bool:
        """Return True for a TPU, whose hosts know each other and run one replica on each core."""
        return self.launcher == "xla"

    @property
    def is_multi_process(self) -> bool:
        """Return True if the file counts the processes of each node."""
        return self.launcher == "torchrun"

    @property
    def needs_rendezvous(self) -> bool:
        """Return True if several nodes have to find each other."""
        return self.is_multi_process and self.num_machines > 1

    @property
    def endpoint(self) -> Endpoint:
        """Return the address and port of the rendezvous."""
        port = self.keys.get(launch.MAIN_PROCESS_PORT.key)
        return Endpoint(self.keys.get(launch.MAIN_PROCESS_IP.key, ""), port or _DEFAULT_PORT)

    @property
    def engine(self) -> EngineWords | None:
        """Return the words of the engine that the file uses; None if it uses none, or accel has none for it."""
        found = (each for each in sharding.ENGINES if each.section.distributed_type == self.distributed_type)
        return next((engine for engine in found if engine.name in ENGINE_RULES.names), None)

    @property
    def keeps_engine(self) -> bool:
        """Return True if the profile uses the engine."""
        return self.engine is not None and self.target == self.engine.name

    @property
    def engine_values(self) -> dict[str, Any]:
        """Return the values of the engine's section that follow from its use alone, by dotted key of the profile."""
        if self.engine is None or not self.keeps_engine:
            return {}
        given = self.get_section(self.engine.section)
        implied = {each.variable for each in self.engine.section.settings if each.key not in given}
        key = self.engine.switch.profile_key
        return {
            name: value for name, value in self.values.items() if name == key or self.sources[name] in implied
        }

    @property
    def parallel(self) -> dict[str, Any]:
        """Return the values of the section `parallel` of the profile, by dotted key."""
        return {key: value for key, value in self.values.items() if key.startswith("parallel.")}

    def get_section(self, section: ConfigSection) -> Mapping[str, Any]:
        """Return the values of a section that are set and valid, by full key."""
        values = self.keys.get(section.key)
        return values if isinstance(values, Mapping) else {}

    def explain_single_process(self) -> str:
        """Return why the file does not start processes to shard a model over; empty if it does."""
        if self.is_tpu:
            return "on a TPU, launcher.spmd: true shards a model as the script defines it"
        if self.is_multi_process:
            return ""
        return f"distributed_type: {self.distributed_type} is one process"

    def explain_unused(self, section: str) -> str:
        """Return why the options of a section do not apply; empty if they do."""
        kind = self.distributed_type
        used_by = SHARDING_TYPES.get(section, kind)
        if section in {sharding.PARALLELISM.key, sharding.TP.key}:
            return self._explain_no_mesh()
        if used_by != kind:
            return f"used only with distributed_type: {used_by}"
        if section == launch.DYNAMO.key and (self.is_tpu or kind in sharding.ENGINE_TYPES):
            return f"Accelerate does not compile with distributed_type: {kind}"
        if section not in SHARDING_TYPES or self.keeps_engine:
            return ""
        return "" if SHARDING_KEYS & self.values.keys() else "not used, because the model is not sharded"

    def _explain_no_mesh(self) -> str:
        if self.engine and self.keeps_engine:
            return f"{self.engine.title} shards models itself; use fully_shard for other dimensions"
        if self.distributed_type == "MULTI_CPU":
            return f"Accelerate does not use it with distributed_type: {self.distributed_type}"
        return self.explain_single_process()


@dataclass(frozen=True)
class Answer:
    """The result of converting a key."""

    text: str
    """The keys of the profile that it becomes, or the reason why it becomes none."""
    is_applied: bool = True
    """False if accel does not do what the key asks for."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values that it sets, by dotted key of the profile."""


@dataclass(frozen=True)
class KeyRule:
    """A row of a table: how a key is converted."""

    convert: Callable[[Any, AccelerateConfig], Answer]
    """Returns the answer for a parsed value."""
    parse: Parser = keep
    off: tuple[str, ...] = ()
    """The normalized values that ask for nothing."""
    target: str = ""
    """The dotted key of the profile, if the key is only renamed."""

    def apply(self, value: Any, config: AccelerateConfig) -> Answer:
        """Return the answer for a value of the file.

        Raises:
            InvalidValueError: The key does not accept the value.
        """
        if value is None:
            return Answer("not set")
        if normalize(value) in self.off:
            return OFF
        parsed = self.parse(value)
        return OFF if normalize(parsed) in self.off else self.convert(parsed, config)


OFF = Answer("off in accel as well")
EMPTY = ("", "false", "[]", "{}")


def take(target: str, parse: Parser, *off: str) -> KeyRule:
    """Return the rule of a key that the profile has under another name."""
    return KeyRule(lambda value, _: sets({target: value}), parse, (*EMPTY, *off), target)


def same(text: str, *values: Any, parse: Parser = keep) -> KeyRule:
    """Return the rule of a key that asks for what accel does anyway; with values, only if it has one of them."""
    return KeyRule(
        lambda value, _: Answer(text, is_applied=not values or value in values),
        parse,
        () if values and False not in values else EMPTY,
    )


def drop(reason: str, *off: str, parse: Parser = keep) -> KeyRule:
    """Return the rule of a key that no profile has."""
    return KeyRule(lambda *_: dropped(reason), parse, (*EMPTY, *off))


def dropped(reason: str) -> Answer:
    """Return the answer for a key that is left out."""
    return Answer(reason, is_applied=False)


def sets(values: Mapping[str, Any], note: str = "") -> Answer:
    """Return the answer for a key that sets values of the profile."""
    text = ", ".join(f"{key}: {format_value(key, value)}" for key, value in values.items())
    return Answer(f"{text} ({note})" if note else text, values=values)


def by_meaning(setting: Setting, section: str = "", reason: str = "") -> KeyRule:
    """Return the rule of a key whose variable means a key of the profile.

    Args:
        setting: The key.
        section: The section that it stands in; empty outside of sections.
        reason: The reason why the variable of another key may be used instead.
    """
    key = setting.profile_key

    def convert(_: Any, config: AccelerateConfig) -> Answer:
        if config.sources.get(key) == setting.variable:
            return sets({key: config.values[key]})
        reasons = (
            config.explain_unused(section),
            config.ignored.get(setting.variable),
            reason,
            setting.reason,
        )
        if why := next(filter(None, reasons), None):
            return dropped(why)
        return Answer(f"{key}: {format_value(key, config.values.get(key, get_default(key)))}")

    return KeyRule(convert, off=(*EMPTY, *setting.off))


def build_rule(setting: Setting, converted: Mapping[Setting, KeyRule], section: str = "") -> KeyRule:
    """Return the rule of a setting: one of those whose result depends on other keys, or what its words mean."""
    parse = build_parser(setting.values)
    if setting in converted:
        rule = converted[setting]
    elif setting.variable and setting.profile_key:
        rule = by_meaning(setting, section)
    elif setting.takes_any_value:
        rule = same(setting.reason)
    elif setting.same:
        rule = same(setting.reason, *setting.same)
    elif setting.reason:
        rule = drop(setting.reason, *setting.off)
    else:
        rule = take(setting.profile_key, keep, *setting.off)
    return replace(rule, parse=parse)


class JobRules(NamedTuple):
    """The rules of a `compute_environment` whose scripts are jobs of a service."""

    environment: str
    """Its value."""
    launcher: str
    """The launcher of these jobs."""
    settings: tuple[Setting, ...]
    """The keys of its files, without sections."""
    converted: Mapping[Setting, KeyRule]
    """Those of settings whose result depends on other keys."""
    section: str
    """The key of the section with arguments of the service's own library."""
    arguments: Mapping[str, KeyRule]
    find_argument: Callable[[tuple[str, ...]], KeyRule | None]
    """Returns the rule of an argument without a row, by the names that lead to it; None for one that is not known."""


class EngineRules(NamedTuple):
    """The rules of an engine, whose settings are variables, and of the JSON file that its section may name."""

    sharded: Mapping[Setting, KeyRule]
    """The keys of the section that become `fully_shard`; the others are left out for their reason."""
    kept: Mapping[Setting, KeyRule]
    """The keys of the section that become something else than the variable means."""
    file: Mapping[str, KeyRule]
    """The keys of the JSON file that become `fully_shard`."""
    keys: frozenset[str]
    """Keys at the top of such a file."""
    read_precision: Callable[[AccelerateConfig], str]
    """Returns the number format of the file; `no` without one."""
    is_sharded: Callable[[AccelerateConfig], bool]
    """Returns True if the engine shards models."""


ENGINE_RULES: Registry[EngineRules] = Registry(
    {
        "deepspeed": "accel_cli.extensions.deepspeed.accelerate_rules:RULES",
    }
)
"""The rules of each engine's section in a config file."""
