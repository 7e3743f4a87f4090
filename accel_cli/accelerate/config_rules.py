"""The rules of all keys of an Accelerate config file.

The rule of a key follows from its setting in `accel_runtime.environment.accelerate`: the profile has it under another
name, accel does it anyway, or it is left out for a reason. The functions here convert the keys whose result depends on
other keys too. Engines and jobs of a service have their rules in the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from accel_cli.accelerate.config_values import (
    EMPTY,
    OFF,
    AccelerateConfig,
    Answer,
    EngineRules,
    InvalidValueError,
    JobRules,
    KeyRule,
    build_rule,
    drop,
    dropped,
    keep,
    normalize,
    parse_mapping,
    parse_or,
    parse_strategy,
    sets,
    take,
)
from accel_cli.launchers import LAUNCHERS
from accel_cli.profile.validation_errors import did_you_mean
from accel_runtime.environment.accelerate import launch, megatron, sharding
from accel_runtime.environment.accelerate.setting import ConfigSection, Setting
from accel_runtime.environment.registry import Registry
from accel_runtime.environment.settings import find_nearest

__all__ = [
    "CLUSTER_KEYS",
    "ENGINE_KEYS",
    "JOB_KEYS",
    "JOB_RULES",
    "SECTIONS",
    "Answer",
    "KeyRule",
    "dropped",
    "find_job_rules",
    "find_rule",
]


# Launch settings, with `compute_environment: LOCAL_MACHINE`.

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
    parallel = {f"parallel.{name}": size for name, size in config.parallel.items()}
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


# FSDP.


def _convert_strategy(word: str, config: AccelerateConfig) -> Answer:
    """Convert `sharding_strategy` of FSDP1 or `reshard_after_forward` of FSDP2."""
    strategy = parse_strategy(word)
    if strategy != config.fsdp_strategy:
        return dropped("sharding_strategy or reshard_after_forward takes precedence")
    if not strategy.shards:
        return Answer("models are replicated")
    is_hybrid = strategy.is_hybrid and config.num_machines > 1
    note = f"parallel.dp_replicate: {config.num_machines}, one replica for each node" if is_hybrid else ""
    return sets({sharding.RESHARD_AFTER_FORWARD.profile_key: strategy.reshards}, note)


def _convert_wrap_policy(policy: str, config: AccelerateConfig) -> Answer:
    key, setting = sharding.AUTO_WRAP_POLICY.profile_key, sharding.WRAP_POLICIES[policy.lower()]
    if setting is None:
        return sets({key: "none"})
    default: Any = sharding.DEFAULT_MIN_NUM_PARAMS if setting is sharding.MIN_NUM_PARAMS else []
    wrap = parse_or(setting.values, config.fsdp.get(setting.key), default) or "auto"
    return sets({key: wrap}, "_no_split_modules of the model" if wrap == "auto" else "")


def _wrap_with(setting: Setting) -> KeyRule:
    """Return the rule of a key that Accelerate uses with one policy of wrapping only."""
    (policy,) = (policy for policy, used in sharding.WRAP_POLICIES.items() if used is setting)

    def convert(value: Any, config: AccelerateConfig) -> Answer:
        if normalize(config.fsdp.get(sharding.AUTO_WRAP_POLICY.key)) == policy:
            return sets({setting.profile_key: value})
        return dropped(f"Accelerate uses it with {policy.upper()} only")

    return KeyRule(convert, off=EMPTY)


def _convert_ignored_modules(value: Any, _: AccelerateConfig) -> Answer:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidValueError("expected names of modules, or a regular expression")
    key = sharding.IGNORED_MODULES.profile_key
    if not all(re.fullmatch(r"[\w.]+", name) for name in names):
        return dropped(f"regular expressions are not supported: list names or patterns in {key}")
    return sets({key: names})


# Other sections.


def _mesh_size(setting: Setting) -> KeyRule:
    def convert(size: int, config: AccelerateConfig) -> Answer:
        reason = config.explain_single_process()
        if config.engine and config.keeps_engine:
            reason = f"{config.engine.title} shards models itself; use fully_shard for other dimensions"
        return dropped(reason) if reason else Answer(f"{setting.profile_key}: {size}")

    return KeyRule(convert, off=setting.off)


# `torch.compile`.


def _convert_backend(_: str, config: AccelerateConfig) -> Answer:
    return sets({launch.DYNAMO_SETTINGS[0].profile_key: config.compiler})


def _compile_with(setting: Setting) -> KeyRule:
    """Return the rule of an option of the compiler."""

    def convert(value: Any, config: AccelerateConfig) -> Answer:
        if config.compiler == "no":
            return Answer("not used: nothing is compiled without a backend")
        return sets({setting.profile_key: value})

    return KeyRule(convert, off=(*EMPTY, *setting.off))


# The rules of all keys.

ENGINE_RULES: Registry[EngineRules] = Registry(
    {
        "deepspeed": "accel_cli.extensions.deepspeed.accelerate_rules:RULES",
    }
)
"""The rules of each engine's section in a config file."""
_ENGINES = tuple(ENGINE_RULES[name] for name in ENGINE_RULES.names)
ENGINE_KEYS: Mapping[str, frozenset[str]] = {name: ENGINE_RULES[name].keys for name in ENGINE_RULES.names}
"""Keys at the top of the file of each engine."""
JOB_RULES: Registry[JobRules] = Registry(
    {
        "sagemaker": "accel_cli.extensions.sagemaker.accelerate_rules:RULES",
    }
)
"""The rules of each launcher's `compute_environment`."""
_JOBS = tuple(JOB_RULES[name] for name in JOB_RULES.names)
_SIZES = (*sharding.MESH_SIZES, sharding.TP_CONFIG_SIZE)
_CONVERTED: Mapping[Setting, KeyRule] = {
    # `no` is a value of the profile too.
    launch.MIXED_PRECISION: replace(take(launch.MIXED_PRECISION.profile_key, keep), off=()),
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
    sharding.SHARDING_STRATEGY: KeyRule(_convert_strategy),
    sharding.RESHARD_AFTER_FORWARD: KeyRule(_convert_strategy),
    sharding.AUTO_WRAP_POLICY: KeyRule(_convert_wrap_policy),
    **{setting: _wrap_with(setting) for setting in (sharding.TRANSFORMER_CLS, sharding.MIN_NUM_PARAMS)},
    sharding.IGNORED_MODULES: KeyRule(_convert_ignored_modules, off=EMPTY),
    **{setting: rule for engine in _ENGINES for setting, rule in engine.converted.items()},
    **{setting: rule for job in _JOBS for setting, rule in job.converted.items()},
    **{setting: _mesh_size(setting) for setting in _SIZES},
    launch.DYNAMO_SETTINGS[0]: KeyRule(_convert_backend, off=(*EMPTY, "no")),
    **{setting: _compile_with(setting) for setting in launch.DYNAMO_SETTINGS[1:]},
}
"""The rules of keys whose result depends on other keys, or on more than their value; the setting has the parser."""


def _build_rules(settings: Iterable[Setting]) -> dict[str, KeyRule]:
    return {setting.key: build_rule(setting, _CONVERTED) for setting in settings if setting.key}


def _build_section(section: ConfigSection) -> dict[str, KeyRule]:
    others = {"*": drop(section.reason, *section.off)} if section.reason else {}
    return {**_build_rules(section.settings), **others}


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
    **{engine.section: engine.file for engine in _ENGINES},
    **{job.section: job.arguments for job in _JOBS},
}
"""The rules of each section; `*` is any other key."""
_PREFIXES = {section.key: section.prefix for section in launch.SECTIONS}
"""Accelerate adds the prefix to keys without it."""


def find_job_rules(environment: Any) -> JobRules | None:
    """Return the rules of a `compute_environment`, not parsed, whose scripts are jobs; None for others."""
    return next((job for job in _JOBS if normalize(job.environment) == normalize(environment)), None)


def find_rule(section: str, names: tuple[str, ...]) -> KeyRule:
    """Return the rule of a key in a section, by the names that lead to it."""
    rules, key = SECTIONS[section], names[0]
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
