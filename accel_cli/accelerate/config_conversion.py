"""Convert an Accelerate config file to a profile, with an answer for each of its keys.

Accelerate's launcher turns a file into variables (`accel_cli.accelerate.variables`), and these mean settings
(`accel_runtime.environment.accelerate`), whose names are those of a profile. Only the keys of the launcher itself, which
have no variable, are converted here, and those that are left out have a reason in the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from accel_cli.accelerate.config_values import (
    EMPTY,
    ENGINE_RULES,
    OFF,
    SHARDING_KEYS,
    SHARDING_TYPES,
    AccelerateConfig,
    Answer,
    InvalidValueError,
    JobRules,
    KeyRule,
    build_rule,
    by_meaning,
    drop,
    dropped,
    format_value,
    normalize,
    parse_mapping,
    sets,
)
from accel_cli.accelerate.variables import build_job_variables, build_variables, read_section
from accel_cli.errors import Problem, ProfileError, UsageError
from accel_cli.launchers import LAUNCHERS
from accel_cli.profile import layers
from accel_cli.profile.layers import Layer, nest
from accel_cli.profile.schema import Profile
from accel_cli.profile.validation_errors import did_you_mean, explain
from accel_runtime.environment.accelerate import launch, megatron, sharding
from accel_runtime.environment.accelerate.setting import ConfigSection, Setting
from accel_runtime.environment.accelerate.sharding import EngineWords, Fsdp1Strategy
from accel_runtime.environment.accelerate.variables import read_strategy, translate
from accel_runtime.environment.registry import Registry
from accel_runtime.environment.settings import (
    Parallel,
    Settings,
    SettingsError,
    find_nearest,
    variable_name,
)

__all__ = [
    "Imported",
    "convert",
    "find_engine",
    "find_engine_file",
    "find_job_rules",
    "name_keys_of_engine_file",
    "read_engine_file",
    "wrap_engine_file",
]

KeyPath = tuple[str, ...]
"""The keys that lead to a value: `fsdp_config`, `fsdp_version`."""


# Keys of the launcher: they have no variable, or their result depends on other keys too.

_POD = "use accel xla pod NAME, which starts the script on all hosts of a TPU pod"
_SECTION = KeyRule(lambda *_: OFF, parse_mapping)


def _convert_environment(word: str, config: AccelerateConfig) -> Answer:
    if word == launch.LOCAL:
        return Answer("accel runs on this machine")
    if not config.job_launcher:
        raise InvalidValueError("this installation of accel has no launcher for it")
    return Answer(f"launcher.kind: {config.job_launcher}")


def _convert_distributed_type(kind: str, config: AccelerateConfig) -> Answer:
    if kind in sharding.ENGINE_TYPES and not config.engine:
        raise InvalidValueError("this installation of accel does not have this engine")
    parallel = config.parallel
    values = {"launcher.kind": config.launcher, "device": config.device, **parallel, **config.engine_values}
    text = sets({key: value for key, value in values.items() if (key, value) != ("device", "auto")}).text
    if kind == "MEGATRON_LM":
        text = f"{text} ({megatron.MEGATRON_LM.reason})"
    elif (
        kind in {sharding.FSDP.distributed_type, *sharding.ENGINE_TYPES}
        and not parallel
        and not config.keeps_engine
    ):
        text += ", and models are replicated on every process (DDP)"
    return Answer(text, kind != "MEGATRON_LM", {**values, "mixed_precision": config.precision})


def _convert_num_processes(number: int, config: AccelerateConfig) -> Answer:
    if config.is_tpu:  # Accelerate starts one on every core too, whatever the number.
        return sets({"launcher.replicas": 1 if number == config.num_machines == 1 else "all"})
    if config.is_multi_process:
        return sets({"launcher.nproc_per_node": "auto" if number == -1 else number // config.num_machines})
    return Answer(config.explain_single_process(), is_applied=number <= 1)


def _convert_num_machines(number: int, config: AccelerateConfig) -> Answer:
    if config.is_tpu:
        return dropped(_POD) if number > 1 else Answer("one host of a TPU")
    if config.is_multi_process:
        return sets({"launcher.nnodes": number})
    return Answer(config.explain_single_process(), is_applied=number == 1)


def _convert_rendezvous(value: Any, config: AccelerateConfig) -> Answer:
    """Convert `main_process_ip` or `main_process_port`."""
    if config.needs_rendezvous:
        return sets({"launcher.rdzv_endpoint": str(config.endpoint)})
    reason = _POD if config.num_machines > 1 and config.is_tpu else "not needed on one node"
    return Answer(reason, is_applied=value == 0)


def _convert_fp16(_: bool, config: AccelerateConfig) -> Answer:
    if config.precision == "fp16":
        return Answer("mixed_precision: fp16")
    return dropped("mixed_precision takes precedence, as in Accelerate")


def _convert_gpu_ids(ids: str, config: AccelerateConfig) -> Answer:
    if ids.lower() == "all":
        return Answer("accel uses all GPUs")
    if config.device in {"cpu", "mps", "xla"}:
        return dropped(f"no GPUs to select on device: {config.device}")
    has_key = "gpu_ids" in LAUNCHERS[config.launcher].model_fields
    if has_key and all(name.isdecimal() for name in ids.split(",")):
        return sets({"launcher.gpu_ids": ids})
    return sets({"env.ZE_AFFINITY_MASK" if config.device == "xpu" else "env.CUDA_VISIBLE_DEVICES": ids})


def _convert_function(name: str, config: AccelerateConfig) -> Answer:
    if config.is_tpu and name:
        return sets({"launcher.main_training_function": name})
    return Answer("accel runs the script, not a function of it", is_applied=name in {"", "main"})


def _convert_tpu_env(entries: list[str], config: AccelerateConfig) -> Answer:
    if not config.is_tpu:
        return dropped("used only on TPUs")
    if any(not re.fullmatch(r"[^=\0]+=[^\0]*", entry, re.DOTALL) for entry in entries):
        raise InvalidValueError("expected a list of NAME=VALUE")
    variables = {f"env.{name}": value for name, _, value in (entry.partition("=") for entry in entries)}
    return Answer(", ".join(variables), values=variables)


# Keys that mean one key of the profile together.


def _find_strategy(word: str) -> Fsdp1Strategy | None:
    text = word.lower()
    return sharding.find_strategy({"true": "full_shard", "false": "shard_grad_op"}.get(text, text))


def _convert_strategy(version: int, word: str, config: AccelerateConfig) -> Answer:
    """Convert the key that has the strategy with a version of FSDP."""
    if config.distributed_type != sharding.FSDP.distributed_type:
        return dropped(config.explain_unused(sharding.FSDP.key))
    if _find_strategy(word) != config.strategy:
        return dropped(f"Accelerate uses it with {sharding.VERSION.key}: {version} only")
    if not config.strategy.shards:
        return Answer("models are replicated")
    is_hybrid = config.strategy.is_hybrid and config.num_machines > 1
    note = f"parallel.dp_replicate: {config.num_machines}, one replica for each node" if is_hybrid else ""
    return sets({sharding.RESHARD_AFTER_FORWARD.profile_key: config.strategy.reshards}, note)


def _convert_wrap_policy(_: str, config: AccelerateConfig) -> Answer:
    key = sharding.AUTO_WRAP_POLICY.profile_key
    wrap = config.values.get(key, "auto")
    return sets({key: wrap}, "_no_split_modules of the model" if wrap == "auto" else "")


def _wrap_with(setting: Setting) -> KeyRule:
    """Return the rule of a key that Accelerate uses with one policy of wrapping only."""
    (policy,) = (policy for policy, used in sharding.WRAP_POLICIES.items() if used is setting)
    rule = by_meaning(setting, sharding.FSDP.key, f"Accelerate uses it with {policy.upper()} only")
    return replace(rule, off=EMPTY)


def _convert_ignored_modules(names: list[str] | str, config: AccelerateConfig) -> Answer:
    key = sharding.IGNORED_MODULES.profile_key
    if isinstance(names, str):
        return dropped(f"regular expressions are not supported: list names or patterns in {key}")
    return by_meaning(sharding.IGNORED_MODULES, sharding.FSDP.key).convert(names, config)


# The rules of all keys.

JOB_RULES: Registry[JobRules] = Registry(
    {
        "sagemaker": "accel_cli.extensions.sagemaker.accelerate_rules:RULES",
    }
)
"""The rules of each launcher's `compute_environment`."""
_ENGINES = tuple(words for words in sharding.ENGINES if words.name in ENGINE_RULES.names)
ENGINE_KEYS = {words.name: ENGINE_RULES[words.name].keys for words in _ENGINES}
"""Keys at the top of the file of each engine."""
_JOBS = tuple(JOB_RULES[name] for name in JOB_RULES.names)
_CONVERTED: Mapping[Setting, KeyRule] = {
    # `no` is a value of the profile too.
    launch.MIXED_PRECISION: KeyRule(lambda word, _: sets({launch.MIXED_PRECISION.profile_key: word})),
    launch.FP16: KeyRule(_convert_fp16, off=EMPTY),
    launch.USE_CPU: KeyRule(lambda _, config: Answer(f"device: {config.device}")),
    launch.GPU_IDS: KeyRule(_convert_gpu_ids),
    launch.COMPUTE_ENVIRONMENT: KeyRule(_convert_environment),
    launch.DISTRIBUTED_TYPE: KeyRule(_convert_distributed_type),
    launch.NUM_PROCESSES: KeyRule(_convert_num_processes),
    launch.NUM_MACHINES: KeyRule(_convert_num_machines),
    launch.MAIN_PROCESS_IP: KeyRule(_convert_rendezvous),
    launch.MAIN_PROCESS_PORT: KeyRule(_convert_rendezvous),
    launch.MAIN_TRAINING_FUNCTION: KeyRule(_convert_function),
    launch.TPU_ENV: KeyRule(_convert_tpu_env, off=EMPTY),
    sharding.VERSION: KeyRule(lambda *_: Answer("accel uses FSDP2 (fully_shard)")),
    sharding.SHARDING_STRATEGY: KeyRule(partial(_convert_strategy, 1)),
    sharding.RESHARD_AFTER_FORWARD: KeyRule(partial(_convert_strategy, 2)),
    sharding.AUTO_WRAP_POLICY: KeyRule(_convert_wrap_policy),
    **{setting: _wrap_with(setting) for setting in (sharding.TRANSFORMER_CLS, sharding.MIN_NUM_PARAMS)},
    sharding.IGNORED_MODULES: KeyRule(_convert_ignored_modules, off=EMPTY),
    sharding.TP_CONFIG_SIZE: by_meaning(sharding.MESH_SIZES[2], sharding.TP.key),
    **{setting: rule for job in _JOBS for setting, rule in job.converted.items()},
    **{
        setting: by_meaning(setting, launch.DYNAMO.key, "nothing is compiled without a backend")
        for setting in launch.DYNAMO_SETTINGS
    },
}
"""The rules of keys of the launcher, and of those that mean one key together; the setting has the parser."""


def _build_rules(
    settings: Iterable[Setting], section: str = "", converted: Mapping[Setting, KeyRule] = _CONVERTED
) -> dict[str, KeyRule]:
    return {each.key: build_rule(each, converted, section) for each in settings if each.key}


def _build_section(
    section: ConfigSection, converted: Mapping[Setting, KeyRule] = _CONVERTED
) -> dict[str, KeyRule]:
    others = {"*": drop(section.reason, *section.off)} if section.reason else {}
    return {**_build_rules(section.settings, section.key, {**_CONVERTED, **converted}), **others}


CLUSTER_KEYS: Mapping[str, KeyRule] = {
    **_build_rules(launch.CLUSTER),
    **{section.key: _SECTION for section in launch.SECTIONS},
}
"""The keys of a file of `compute_environment: LOCAL_MACHINE`."""
JOB_KEYS: Mapping[str, Mapping[str, KeyRule]] = {
    job.environment: {
        **_build_rules(job.settings),
        **dict.fromkeys((launch.DYNAMO.key, job.section), _SECTION),
    }
    for job in _JOBS
}
"""The keys of a file of each other `compute_environment`."""
SECTIONS: Mapping[str, Mapping[str, KeyRule]] = {
    **{section.key: _build_section(section) for section in launch.SECTIONS},
    **{words.file.key: ENGINE_RULES[words.name].file for words in _ENGINES},
    **{job.section: job.arguments for job in _JOBS},
}
"""The rules of each section; `*` is any other key."""
_KEPT = {
    words.section.key: _build_section(words.section, ENGINE_RULES[words.name].kept) for words in _ENGINES
}
"""The rules of the section of an engine that the profile keeps."""
_SHARDED = {
    words.section.key: _build_section(words.section, ENGINE_RULES[words.name].sharded) for words in _ENGINES
}
"""The rules of the section of an engine that becomes `fully_shard`."""
_PREFIXES = {section.key: section.prefix for section in launch.SECTIONS}
"""Accelerate adds the prefix to keys without it."""


def find_job_rules(environment: Any) -> JobRules | None:
    """Return the rules of a `compute_environment`, not parsed, whose scripts are jobs; None for others."""
    return next((job for job in _JOBS if normalize(job.environment) == normalize(environment)), None)


def _find_rule(section: str, names: KeyPath, config: AccelerateConfig) -> KeyRule:
    """Return the rule of a key in a section, by the names that lead to it."""
    of_engine = _KEPT if config.keeps_engine else _SHARDED
    rules, key = of_engine.get(section, SECTIONS[section]), names[0]
    job = next((job for job in _JOBS if job.section == section), None)
    if job and (rule := job.find_argument(names)):
        return rule
    prefix = _PREFIXES.get(section, "")
    for name in (".".join(names), key, prefix + key, "*"):
        if name in rules:
            return rules[name]
    known = [*rules, *(name.removeprefix(prefix) for name in rules)]
    nearest = find_nearest(key, known) or next((name for name in rules if name.endswith(f"_{key}")), None)
    unknown = "accel" if job else "Accelerate"
    hint = f" ({did_you_mean(nearest)})" if nearest else ""
    return KeyRule(lambda *_: dropped(f"{unknown} does not know this key{hint}"))


# Files.


@dataclass(frozen=True)
class Imported:
    """A profile made from an Accelerate config file; every key of the file is in `mapped` or in `left`."""

    data: dict[str, Any]
    """The profile, its version first."""
    mapped: tuple[tuple[str, str], ...]
    """The keys that are applied, and what they became: `num_processes: 8`, `launcher.nproc_per_node: 8`."""
    left: tuple[tuple[str, str], ...]
    """The other keys, and why they are left out."""


def find_engine(data: Mapping[str, Any]) -> EngineWords | None:
    """Return the engine that an Accelerate config uses; None if it uses none."""
    kind = str(data.get(launch.DISTRIBUTED_TYPE.key, "")).strip().upper()
    return next((engine for engine in sharding.ENGINES if engine.section.distributed_type == kind), None)


def find_engine_file(data: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the path of the JSON file that an Accelerate config names for an engine; None if there is no such file.

    Args:
        data: The config, parsed.
        folder: The folder of the config, searched after the current one, where Accelerate itself looks.
    """
    for engine in sharding.ENGINES:
        section = data.get(engine.section.key)
        name = section.get(engine.file.key) if isinstance(section, Mapping) else None
        if isinstance(name, str) and name:
            return next((file.absolute() for file in (Path(name), folder / name) if file.is_file()), None)
    return None


def read_engine_file(data: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """Return the content of the file of `find_engine_file`; None without one.

    Raises:
        ProfileError: The file exists and is not a JSON object.
    """
    path = find_engine_file(data, folder)
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError([Problem(str(path), "", f"this is not JSON: {error}")]) from None
    if not isinstance(content, dict):
        raise ProfileError([Problem(str(path), "", "expected keys and values")])
    return content


def wrap_engine_file(path: Path) -> dict[str, Any] | None:
    """Return the Accelerate config that names a JSON file of an engine; None if it is another file."""
    if path.suffix != ".json":
        return None
    for engine in sharding.ENGINES:
        data: dict[str, Any] = {
            launch.COMPUTE_ENVIRONMENT.key: launch.LOCAL,
            launch.DISTRIBUTED_TYPE.key: engine.section.distributed_type,
            engine.section.key: {engine.file.key: str(path)},
        }
        content = read_engine_file(data, Path()) or {}
        if content.keys() & ENGINE_KEYS.get(engine.name, frozenset()):
            return data
    return None


def name_keys_of_engine_file(lines: Iterable[tuple[str, str]], file: Path) -> tuple[tuple[str, str], ...]:
    """Return the results of `wrap_engine_file`, with the keys of the JSON file itself."""
    prefixes = tuple(f"{engine.file.key}." for engine in sharding.ENGINES)
    named = []
    for line, text in lines:
        if prefix := next((prefix for prefix in prefixes if line.startswith(prefix)), None):
            named.append((line.removeprefix(prefix), text))
        elif line.startswith(f"{launch.DISTRIBUTED_TYPE.key}:"):
            named.append((str(file), text))
    return tuple(named)


# The meaning of a file.


def _read_keys(
    data: Mapping[str, Any], known: Mapping[str, KeyRule], config: AccelerateConfig
) -> dict[str, Any]:
    """Return the keys with valid values, parsed, by full key in sections; the others are reported with their answers."""
    keys: dict[str, Any] = {}
    for section in launch.SECTIONS:
        for name, value in read_section(data, section).items() if section.key in known else ():
            with suppress(InvalidValueError):
                rule = _find_rule(section.key, (name,), config)
                keys.setdefault(section.key, {})[name] = rule.parse(value)
    for key in known.keys() - {section.key for section in launch.SECTIONS}:
        if data.get(key) is not None:
            with suppress(InvalidValueError):
                keys[key] = known[key].parse(data[key])
    return keys


def _read_meaning(config: AccelerateConfig) -> AccelerateConfig:
    """Return a config with the meaning of the variables that Accelerate sets for its keys.

    Raises:
        SettingsError: Values contradict each other.
    """
    if launch.DISTRIBUTED_TYPE.key not in config.keys:
        return config
    variables = (build_job_variables if config.job_launcher else build_variables)(_select_keys(config))
    kept = config.engine.switch if config.engine and config.keeps_engine else None
    switches = {megatron.USE_MEGATRON_LM, *(words.switch for words in sharding.ENGINES)} - {kept}
    has_mesh = any(variables.get(size.variable, "1") != "1" for size in sharding.MESH_SIZES)
    if kept or not has_mesh:
        switches |= {sharding.USE_PARALLELISM_CONFIG}
    for switch in switches:
        variables.pop(switch.variable, None)
    # A hybrid strategy has a replica on each node.
    variables |= {"WORLD_SIZE": str(config.num_machines), "LOCAL_WORLD_SIZE": "1"}
    translation = translate(variables, {})
    texts = {**translation.settings, **translation.arguments}
    settings = Settings.from_env(
        {variable_name(name): text for name, (_, text) in texts.items()}, accelerate=False
    )
    defaults, meant = dict(layers.list_values(Settings())), dict(layers.list_values(settings))
    values = {
        key: _to_plain(key, value)
        for key, value in meant.items()
        if value != defaults[key] and key not in {"device", "mixed_precision"}
    }
    if config.engine and not kept and not any(key.startswith("parallel.") for key in values):
        values |= {"parallel.dp_shard": "auto"} if ENGINE_RULES[config.engine.name].is_sharded(config) else {}
    if not SHARDING_KEYS & values.keys():
        # A mesh without shards has no place for these options, and a launch would refuse them.
        values = {key: value for key, value in values.items() if not key.startswith("fully_shard.")}
    return replace(
        config,
        values=values,
        sources={key: texts[name].variable for key in values if (name := key.replace(".", "_")) in texts},
        ignored={name: _name_keys(reason, config)[0] for name, reason in translation.ignored.items()},
        precision=_read_precision(config),
        strategy=read_strategy(variables),
    )


def _select_keys(config: AccelerateConfig) -> dict[str, Any]:
    """Return the keys of a file whose variables mean settings, in the form of Accelerate 1.15."""
    data = dict(config.keys)
    for section in launch.SECTIONS:
        values = config.get_section(section)
        data[section.key] = {
            each.key: values[each.key]
            for each in section.settings
            if each.key in values
            and (each.profile_key or each in {sharding.VERSION, sharding.SHARDING_STRATEGY})
            # A regular expression, which is left out.
            and not (each is sharding.IGNORED_MODULES and isinstance(values[each.key], str))
        }
    fsdp = data[sharding.FSDP.key]
    if fsdp.get(sharding.VERSION.key, 1) == 1 and sharding.SHARDING_STRATEGY.key in fsdp:
        fsdp.pop(sharding.RESHARD_AFTER_FORWARD.key, None)  # Accelerate does not use it either
    tp = config.get_section(sharding.TP).get(sharding.TP_CONFIG_SIZE.key, 1)
    sizes, name = data[sharding.PARALLELISM.key], sharding.MESH_SIZES[2].key
    if tp > 1:
        sizes[name] = max(tp, sizes.get(name, 1))
    if config.engine:
        section, file = data[config.engine.section.key], config.engine.file.key
        section.pop(file, None)
        section |= {file: config.engine_path} if config.engine_path and config.keeps_engine else {}
    return data


def _read_precision(config: AccelerateConfig) -> str:
    """Return the number format: of the file itself, of its early key, or of the engine's file."""
    if word := config.keys.get(launch.MIXED_PRECISION.key):
        return str(word)
    if config.keys.get(launch.FP16.key):
        return "fp16"
    # The file of an engine that is kept decides at the launch.
    is_converted = config.engine and not config.keeps_engine
    return ENGINE_RULES[config.engine.name].read_precision(config) if config.engine and is_converted else "no"


def _to_plain(key: str, value: Any) -> Any:
    """Return a value as a file of a profile has it."""
    if key != sharding.AUTO_WRAP_POLICY.profile_key or value in {"auto", "none"}:
        return value
    return int(value) if value.isdigit() else value.split(",")


def _find_conflicts(config: AccelerateConfig, data: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the values that exclude each other: key, expectation, value."""
    keys = config.keys
    if config.is_tpu and config.precision == "fp16":
        key = launch.MIXED_PRECISION.key if keys.get(launch.MIXED_PRECISION.key) else launch.FP16.key
        yield key, "fp16 is for GPUs, and Accelerate refuses it on a TPU too; use bf16", "fp16"
    if keys.get(launch.USE_CPU.key) and config.device_of_type not in {"auto", "cpu"}:
        kind = f"{launch.DISTRIBUTED_TYPE.key}: {config.distributed_type}"
        yield launch.USE_CPU.key, f"this contradicts {kind}", "true"
    if config.num_processes != -1:
        try:
            sizes = {key.partition(".")[2]: value for key, value in config.parallel.items()}
            Parallel(**sizes).build_grid(config.num_processes)
        except SettingsError as error:
            yield sharding.PARALLELISM.key, str(error), ""
    given = data.get(sharding.FSDP.key)
    count = sum(value is not None for value in given.values()) if isinstance(given, Mapping) else 0
    is_fsdp = config.distributed_type == sharding.FSDP.distributed_type
    if is_fsdp and len(read_section(data, sharding.FSDP)) < count:
        prefix = sharding.FSDP.prefix
        yield sharding.FSDP.key, f"a key stands here with and without {prefix}; remove one of them", ""
    if config.needs_rendezvous:
        yield from _find_rendezvous_conflicts(config)


def _find_rendezvous_conflicts(config: AccelerateConfig) -> Iterator[tuple[str, str, str]]:
    nodes = f"{config.num_machines} nodes ({launch.NUM_MACHINES.key})"
    address = config.keys.get(launch.MAIN_PROCESS_IP.key, "")
    if not address:
        yield launch.MAIN_PROCESS_IP.key, f"{nodes} need the address of one of them", "nothing"
    elif config.endpoint.is_loopback:
        yield launch.MAIN_PROCESS_IP.key, f"expected an address that all {nodes} can reach", address
    if config.keys.get(launch.MAIN_PROCESS_PORT.key) == 0:
        yield launch.MAIN_PROCESS_PORT.key, "several nodes need a fixed port", "0"
    if config.num_processes != -1 and config.num_processes % config.num_machines:
        reason = (
            f"expected a multiple of num_machines, {config.num_machines}: every node starts the same number"
        )
        yield launch.NUM_PROCESSES.key, reason, str(config.num_processes)


# The conversion.


def convert(
    data: Mapping[str, Any],
    where: str,
    engine_file: Mapping[str, Any] | None = None,
    *,
    engine_path: Path | None = None,
    section: str = "fully_shard",
) -> Imported:
    """Return the profile of an Accelerate config file.

    Args:
        data: The file, parsed.
        where: The name of the file in errors.
        engine_file: The JSON file that it names for an engine, parsed.
        engine_path: The path of that file.
        section: The section of the profile that the settings of an engine become.

    Raises:
        ProfileError: All keys that are not known and values that are not accepted.
    """
    job = find_job_rules(data.get(launch.COMPUTE_ENVIRONMENT.key))
    known = JOB_KEYS[job.environment] if job else CLUSTER_KEYS
    config = AccelerateConfig(
        engine_file=engine_file,
        engine_path=str(engine_path or ""),
        target=section,
        job_launcher=job.launcher if job else "",
    )
    # The type of a job is not that of a launch.
    config = replace(config, keys=_read_keys(data, known, config))
    contradictions: list[Problem] = []
    try:
        config = _read_meaning(config)
    except SettingsError as error:
        contradictions.append(_locate(error, config, where))
    entries = dict(_list_entries(data, known, engine_file))
    entries.setdefault((launch.DISTRIBUTED_TYPE.key,), None)
    answers: dict[KeyPath, Answer] = {}
    problems: dict[str, Problem] = {}
    for path, value in entries.items():
        key = ".".join(path)
        if len(path) == 1 and key not in known:
            problems[key] = _build_unknown_key(key, known, where)
            continue
        try:
            answers[path] = _answer(path, value, known, config)
        except InvalidValueError as error:
            shown = format_value(key, value)
            shown = repr(shown) if isinstance(value, str) else shown
            problems[key] = Problem(where, key, error.expected, shown, error.hint)
    for key, expected, shown in _find_conflicts(config, data):
        if not any(known_key.startswith(key) for known_key in problems):
            problems[key] = Problem(where, key, expected, shown)
    if problems or contradictions:
        raise ProfileError([*problems.values(), *contradictions])
    defaults = (launch.NUM_PROCESSES.key, launch.NUM_MACHINES.key)
    values = {"mixed_precision": config.precision, **config.values} if not job else {}
    for key, number in zip(defaults, (config.num_processes, config.num_machines), strict=True):
        values |= _answer((key,), number, known, config).values if key in known else {}
    profile = _build_profile(values, answers, where)
    if config.engine and config.keeps_engine:
        _check_engine(profile, where, config.engine)
    lines = [
        (f"{'.'.join(path)}: {format_value('.'.join(path), entries[path])}", answer)
        for path, answer in answers.items()
    ]
    return Imported(
        data=profile,
        mapped=tuple((line, answer.text) for line, answer in lines if answer.is_applied),
        left=tuple((line, answer.text) for line, answer in lines if not answer.is_applied),
    )


def _name_keys(text: str, config: AccelerateConfig) -> tuple[str, str]:
    """Return a sentence about variables with keys for their names, and one of these with its section.

    It is the first that the file has, or else the first of all.
    """
    original = text
    named: list[tuple[bool, str, str]] = []
    for section in launch.SECTIONS:
        for setting in filter(lambda each: each.key and each.variable, section.settings):
            names = {setting.variable: setting.key, variable_name(setting.field): setting.profile_key}
            for name, key in names.items():
                if re.search(rf"\b{name}\b", original):
                    text = re.sub(rf"\b{name}\b", key, text)
                    named.append((setting.key not in config.get_section(section), section.key, setting.key))
    return text, ".".join(min(named, key=lambda each: each[0])[1:]) if named else ""


def _locate(error: SettingsError, config: AccelerateConfig, where: str) -> Problem:
    """Return the problem of values that contradict each other."""
    text, key = _name_keys(str(error), config)
    engine = config.engine.section.key if config.engine and config.keeps_engine else ""
    return Problem(where, key or engine or sharding.PARALLELISM.key, text)


def _check_engine(profile: Mapping[str, Any], where: str, engine: EngineWords) -> None:
    """Raise ProfileError if the engine's JSON file is invalid, or contradicts the other keys."""
    try:
        layers.resolve([Layer(where, {**layers.flatten(profile)}, {"": where})]).complete_engine()
    except ProfileError:
        raise
    except UsageError as error:
        raise ProfileError([Problem(where, engine.section.key, str(error))]) from None


def _list_entries(
    data: Mapping[str, Any], keys: Mapping[str, KeyRule], engine_file: Mapping[str, Any] | None
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the values that have an answer of their own, with the keys that lead to them."""
    for key, value in data.items():
        if key not in keys or key not in SECTIONS or not isinstance(value, Mapping) or not value:
            yield (key,), value
            continue
        for name, inner in value.items():
            if name == "environment" and isinstance(inner, Mapping) and inner:
                yield from (((key, name, str(variable)), each) for variable, each in inner.items())
            else:
                yield (key, str(name)), inner
    for engine in sharding.ENGINES:
        if isinstance(data.get(engine.section.key), Mapping) and data[engine.section.key].get(
            engine.file.key
        ):
            yield from _list_leaves(engine_file or {}, (engine.file.key,))


def _list_leaves(data: Mapping[str, Any], above: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _list_leaves(value, (*above, str(key)))
        else:
            yield (*above, str(key)), value


def _answer(path: KeyPath, value: Any, keys: Mapping[str, KeyRule], config: AccelerateConfig) -> Answer:
    """Return the answer for a key; values that do not apply are not checked.

    Raises:
        InvalidValueError: The key does not accept the value.
    """
    section, *names = path
    if not names:
        if value is None and section == launch.DISTRIBUTED_TYPE.key:
            raise InvalidValueError("required in every Accelerate config file")
        answer = keys[section].apply(value, config)
        if answer.values and keys[section].target in _list_argument_values(config):
            return dropped("additional_args take precedence, as in Accelerate")
        return answer
    file = next((engine.file for engine in sharding.ENGINES if engine.file.key == section), None)
    if file and config.keeps_engine:
        return Answer(f"in {file.profile_key}")
    if file and normalize(value) == "auto":
        return Answer("filled in from the script, as in Accelerate")
    unused = config.explain_unused(section)
    try:
        answer = _find_rule(section, tuple(names), config).apply(value, config)
    except InvalidValueError:
        if not unused or SHARDING_TYPES.get(section) == config.distributed_type:
            raise
        return dropped(unused)
    return dropped(unused) if unused and answer.values else answer


def _build_unknown_key(key: str, keys: Mapping[str, KeyRule], where: str) -> Problem:
    hint = did_you_mean(find_nearest(key, list(keys)))
    owners = [name for name, known in {launch.LOCAL: CLUSTER_KEYS, **JOB_KEYS}.items() if key in known]
    if owners:
        hint = f"it belongs to {launch.COMPUTE_ENVIRONMENT.key}: {owners[0]}"
    return Problem(where, key, "Accelerate does not know this key", hint=hint)


def _list_argument_values(config: AccelerateConfig) -> Iterator[str]:
    """Yield the keys of the profile that the arguments of the service's own library set."""
    for section in (job.section for job in _JOBS):
        for name, value in config.keys.get(section, {}).items():
            with suppress(InvalidValueError):
                yield from _find_rule(section, (str(name),), config).apply(value, config).values


def _build_profile(values: dict[str, Any], answers: Mapping[KeyPath, Answer], where: str) -> dict[str, Any]:
    """Return the checked data of the profile, without defaults that the file does not ask for."""
    origins = {"": where}
    for path, answer in answers.items():
        values |= answer.values
        origins |= dict.fromkeys(answer.values, f"{where}: {'.'.join(path)}")
    requested = nest(values)
    try:
        data = Profile.model_validate(requested).data()
    except ValidationError as error:
        raise ProfileError(explain(error, origins)) from None
    kept = {key: value for key, value in data.items() if key in {"schema_version", *requested}}
    kept["launcher"] = {key: value for key, value in data["launcher"].items() if key in requested["launcher"]}
    return kept
