"""The variables that `accelerate launch` sets for a config file, built from the vocabulary; nothing of it is executed.

They are those of Accelerate 1.15, without the variables of torchrun. A script that imports `accelerate` reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accel_cli.accelerate.config_values import AccelerateConfig, add_prefix, build_parser, normalize, parse_or
from accel_runtime.environment.accelerate import launch, megatron, sharding
from accel_runtime.environment.accelerate.setting import ConfigSection, IntegerRange, Setting
from accel_runtime.environment.accelerate.sharding import EngineWords

__all__ = ["FP8", "build_job_variables", "build_variables", "is_fp8", "read_section"]

FP8 = "fp8"
"""The value of `mixed_precision` that a profile does not have."""
_LOWER_CASE = (sharding.FSDP, *(engine.section for engine in sharding.ENGINES))
"""Sections whose booleans Accelerate writes in lower case."""
_ONE_PROCESS = frozenset({"NO", "MPS", "MULTI_CPU"})
"""Each `distributed_type` that Accelerate starts as a single process."""


def build_variables(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that Accelerate's launcher sets for a config file of `compute_environment: LOCAL_MACHINE`.

    Args:
        data: The file, parsed; its values are valid.
    """
    kind = build_parser(launch.DISTRIBUTED_TYPE.values)(data.get(launch.DISTRIBUTED_TYPE.key))
    if AccelerateConfig({launch.DISTRIBUTED_TYPE.key: kind}).is_tpu:
        return {}
    variables = {launch.MIXED_PRECISION.variable: _read_precision(data)}
    if is_fp8(data):
        variables |= _build_section(launch.FP8, data) | _build_fp8_overrides(data)
    # Accelerate's launcher reads `enable_cpu_affinity` from its command line only.
    if _is_on(data.get(launch.DEBUG.key)):
        variables[launch.DEBUG.variable] = "true"
    if kind in _ONE_PROCESS:
        variables[launch.USE_CPU.variable] = str(_is_on(data.get(launch.USE_CPU.key)))
    elif data.get(sharding.PARALLELISM.key):
        variables |= _build_parallelism(data)
    for engine in sharding.ENGINES:
        if kind == engine.section.distributed_type:
            return variables | _build_engine(engine, data)
    variables |= _build_dynamo(data)
    if kind == sharding.FSDP.distributed_type:
        variables |= {sharding.USE_FSDP.variable: "true", **_build_section(sharding.FSDP, data)}
    if kind == megatron.MEGATRON_LM.distributed_type:
        variables |= {megatron.USE_MEGATRON_LM.variable: "true"} | _build_section(megatron.MEGATRON_LM, data)
    return variables


def build_job_variables(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that Accelerate's launcher sets for a job of another `compute_environment`."""
    return {launch.MIXED_PRECISION.variable: _read_precision(data), **_build_dynamo(data)}


def is_fp8(data: Mapping[str, Any]) -> bool:
    """Return True if a config file computes in 8-bit floating point."""
    return normalize(data.get(launch.MIXED_PRECISION.key)) == FP8


def read_section(data: Mapping[str, Any], section: ConfigSection) -> dict[str, Any]:
    """Return the values of a section that are set, by full key."""
    values = data.get(section.key)
    return add_prefix(values, section) if isinstance(values, Mapping) else {}


def _read_precision(data: Mapping[str, Any]) -> str:
    value = data.get(launch.MIXED_PRECISION.key)
    if value is None:
        return "fp16" if _is_on(data.get(launch.FP16.key)) else "no"
    text = normalize(value)
    return "no" if text == "false" else text  # YAML 1.1 reads `no` as false


def _is_on(value: Any) -> bool:
    return normalize(value) in {"true", "1"}


def _build_section(section: ConfigSection, data: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a section's keys, with the defaults of Accelerate's launcher."""
    values = read_section(data, section)
    variables = {}
    for setting in section.settings:
        value = values.pop(setting.key, None) if setting.key else None
        if value is None:
            value = setting.launch_default
        if setting.variable and value is not None:
            variables[setting.variable] = _format(value, setting, section)
    if prefix := section.variable_prefix:
        others = {str(key).upper().removeprefix(prefix): value for key, value in values.items()}
        variables |= {f"{prefix}{key}": _format(value, Setting(), section) for key, value in others.items()}
    return variables


def _format(value: Any, setting: Setting, section: ConfigSection) -> str:
    if isinstance(value, (list, tuple)):
        # A list of modules is a regular expression in Accelerate.
        separator = "|" if setting is sharding.IGNORED_MODULES else ","
        return separator.join(map(str, value))
    if isinstance(setting.values, IntegerRange):
        return str(parse_or(setting.values, value, value))
    text = str(value)
    is_boolean = isinstance(value, bool) or setting.launch_default in {"true", "false"}
    return text.lower() if is_boolean and section in _LOWER_CASE else text


def _build_fp8_overrides(data: Mapping[str, Any]) -> dict[str, str]:
    value = read_section(data, launch.FP8).get(launch.FP8_OVERRIDE.key, "")
    values: Iterable[Any] = (
        value if isinstance(value, (list, tuple)) else str(value).strip("()[] ").split(",")
    )
    switches = [str(_is_on(each)) for each in values]
    return dict(zip(launch.FP8_OVERRIDES, [*switches, "False", "False", "False"], strict=False))


def _build_parallelism(data: Mapping[str, Any]) -> dict[str, str]:
    variables = _build_section(sharding.PARALLELISM, data)
    optional = [(sharding.CP_SIZE, (sharding.CP_COMM_STRATEGY,)), (sharding.SP_SIZE, sharding.SP_OPTIONS)]
    for size, settings in optional:
        if variables[size.variable] == "1":
            for setting in settings:
                del variables[setting.variable]
    return {sharding.USE_PARALLELISM_CONFIG.variable: "true", **variables}


def _build_engine(engine: EngineWords, data: Mapping[str, Any]) -> dict[str, str]:
    fields = [str(key) for key in data.get(engine.section.key) or {}]
    if data.get(launch.MIXED_PRECISION.key) is not None:
        fields.append(launch.MIXED_PRECISION.key)
    return {
        engine.switch.variable: "true",
        engine.fields.variable: ",".join(fields).lower(),
        **_build_section(engine.section, data),
    }


def _build_dynamo(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of torch.compile; early files have the backend outside of the section."""
    backend = launch.DYNAMO_SETTINGS[0]
    section = launch.DYNAMO
    early = {backend.key: data[backend.key]} if data.get(backend.key) is not None else {}
    values = {section.key: {**early, **read_section(data, section)}}
    variables = _build_section(section, values)
    variables[backend.variable] = variables[backend.variable].upper()
    return variables
