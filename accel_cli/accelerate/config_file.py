"""A config file of Accelerate as the settings of one launch.

The file is converted as `accel config import` converts it. What a profile cannot express is passed on in the variables
that Accelerate's own launcher sets, for scripts that import `accelerate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_cli.accelerate.config_conversion import (
    convert,
    find_engine,
    find_engine_file,
    find_job_rules,
    read_engine_file,
)
from accel_cli.accelerate.variables import build_variables, is_fp8, read_section
from accel_cli.errors import UsageError
from accel_cli.planning.launch_options import ConfigFile
from accel_cli.profile import store, yaml_io
from accel_cli.profile.layers import flatten
from accel_runtime.environment.accelerate import launch, megatron, sharding
from accel_runtime.environment.accelerate.setting import ConfigSection, Setting

__all__ = ["build_config", "get_kind", "read_config", "read_data"]

_EXPRESSED = frozenset(
    setting.variable
    for setting in launch.list_settings()
    if setting.profile_key
    or setting
    in {
        sharding.USE_PARALLELISM_CONFIG,
        sharding.SHARDING_STRATEGY,
        sharding.VERSION,
        *sharding.PARALLELISM.settings,
    }
) | {engine.fields.variable for engine in sharding.ENGINES}
"""Variables whose meaning a profile has."""
_ENGINE_FILES = frozenset(engine.file.key for engine in sharding.ENGINES)
_SHARDING = ("parallel.", "fully_shard.")
_WITHOUT_MESH = {size.profile_key: 1 for size in sharding.MESH_SIZES}


def _list_variables(settings: Iterable[Setting]) -> frozenset[str]:
    return frozenset(setting.variable for setting in settings if setting.variable)


_DYNAMO = _list_variables(launch.DYNAMO_SETTINGS)
_FSDP = _list_variables(sharding.FSDP.settings)
_PARALLELISM = _list_variables(sharding.PARALLELISM.settings)
_FP8 = _list_variables(launch.FP8.settings) | {*launch.FP8_OVERRIDES}
_PROFILE_KEYS = {
    **{
        each.variable: each.profile_key
        for each in launch.list_settings()
        if each.variable and each.profile_key
    },
    **dict.fromkeys(_FP8, launch.MIXED_PRECISION.profile_key),
}
"""The key of the profile that replaces a variable if a stronger source sets it."""
_VARIABLES = {
    **{("", setting.key): setting.variable for setting in launch.CLUSTER if setting.variable},
    **{
        (section.key, key): setting.variable
        for section in launch.SECTIONS
        for setting in section.settings
        for key in (setting.key, setting.key.removeprefix(section.prefix))
        if setting.variable
    },
    **{
        (launch.FP8.key, key): launch.FP8_OVERRIDES[0]
        for key in (launch.FP8_OVERRIDE.key, launch.FP8_OVERRIDE.key.removeprefix(launch.FP8.prefix))
    },
}
"""The variable of each key, by its section and name."""
_MULTINODE_LAUNCHERS = frozenset(engine.multinode_launcher.key for engine in sharding.ENGINES)
"""Every node runs the same command, as with their value `standard`."""


def read_config(path: Path, data: Mapping[str, Any] | None = None) -> ConfigFile:
    """Return the settings of a config file of Accelerate, from its content if that has been read already.

    Raises:
        UsageError: It cannot be read, is not a config file of Accelerate, or has invalid keys or values.
    """
    return build_config(read_data(path) if data is None else data, str(path), path.parent)


def read_data(path: Path) -> dict[str, Any]:
    """Return the content of a config file of Accelerate.

    Raises:
        UsageError: It cannot be read, or is not a config file of Accelerate.
    """
    data = yaml_io.parse(store.read_text(path), str(path)).data
    if not store.is_accelerate_config(data):
        raise UsageError(
            f"Cannot use --config-file {path}: it is not a config file of Accelerate (it has no "
            f"{launch.DISTRIBUTED_TYPE.key}). Use --profile NAME for a profile, after accel config import FILE --profile NAME."
        )
    return data


def get_kind(data: Mapping[str, Any]) -> str:
    """Return the `distributed_type` of a config file, in capital letters."""
    return str(data.get(launch.DISTRIBUTED_TYPE.key, "")).strip().upper()


def build_config(data: Mapping[str, Any], name: str, folder: Path) -> ConfigFile:
    """Return the settings of a config file.

    Args:
        data: The file, parsed.
        name: The name of the file in errors and sources.
        folder: The folder of the file.

    Raises:
        ProfileError: All keys that are not known and values that are not accepted.
    """
    kind = get_kind(data)
    engine, used = _find_passed_engine(data), find_engine(data)
    imported = convert(
        _select_convertible(data, engine),
        name,
        read_engine_file(data, folder),
        engine_path=find_engine_file(data, folder),
        # An engine is passed on as it is, and the keys of the other section are left out.
        section="fully_shard" if engine or not used else used.name,
    )
    values = flatten(imported.data)
    del values["schema_version"]
    variables = {} if _is_job(data) else _list_used(build_variables(_resolve_engine_file(data, folder)))
    passed = _select_passed(variables, engine, imported.left, is_8bit=is_fp8(data))
    reason = ""
    if engine:
        reason = f"{launch.DISTRIBUTED_TYPE.key}: {kind}"
        values = {
            key: value for key, value in values.items() if not key.startswith(_SHARDING)
        } | _WITHOUT_MESH
    elif used:
        reason = f"{launch.DISTRIBUTED_TYPE.key}: {kind}"
        values |= _WITHOUT_MESH
    elif variables.get(sharding.VERSION.variable) == "1":
        reason = f"{sharding.VERSION.key}: 1"
    return ConfigFile(
        name=name,
        values=values | {f"env.{variable}": text for variable, text in passed.items()},
        variables=variables,
        replaced_by={f"env.{name}": key for name, key in _PROFILE_KEYS.items() if name in passed},
        fixed_reason=reason,
        unused=tuple(_list_unused(imported.left, passed, engine)),
    )


def _find_passed_engine(data: Mapping[str, Any]) -> ConfigSection | None:
    """Return the section of an engine that a profile does not have, and that replaces `parallel:` and `fully_shard:`."""
    if get_kind(data) == megatron.MEGATRON_LM.distributed_type:
        return megatron.MEGATRON_LM
    # With another dimension, as for the sequence parallelism of an engine, no section of a profile has the file's meaning.
    mesh = read_section(data, sharding.PARALLELISM)
    sizes = (sharding.SP_SIZE, *sharding.MESH_SIZES)
    has_mesh = any(str(mesh.get(size.key, 1)) != "1" for size in sizes)
    used = find_engine(data)
    return used.section if used and has_mesh else None


def _is_job(data: Mapping[str, Any]) -> bool:
    return find_job_rules(data.get(launch.COMPUTE_ENVIRONMENT.key)) is not None


def _select_convertible(data: Mapping[str, Any], engine: ConfigSection | None) -> dict[str, Any]:
    """Return the keys that are converted to a profile; the others are passed on."""
    left_out = {sharding.PARALLELISM.key} if engine else set()
    if is_fp8(data):
        left_out |= {launch.MIXED_PRECISION.key}
    return {key: value for key, value in data.items() if key not in left_out}


def _resolve_engine_file(data: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return the config with the path of an engine's file as seen from the current folder."""
    for engine in sharding.ENGINES:
        section = read_section(data, engine.section)
        name = str(section.get(engine.file.key, ""))
        if name and not Path(name).exists() and (folder / name).is_file():
            data = {**data, engine.section.key: {**section, engine.file.key: str(folder / name)}}
    return data


def _list_used(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a file, without the options of `torch.compile` if nothing is compiled."""
    backend = launch.DYNAMO_SETTINGS[0]
    compiles = variables.get(backend.variable, backend.launch_default) != backend.launch_default
    return {name: text for name, text in variables.items() if compiles or name not in _DYNAMO}


def _select_passed(
    variables: Mapping[str, str],
    engine: ConfigSection | None,
    left: Iterable[tuple[str, str]],
    *,
    is_8bit: bool,
) -> dict[str, str]:
    """Return the variables to pass on: all if the engine or version of FSDP has none in a profile, else the others."""
    kept = dict(variables)
    if engine:
        return kept
    # Values that the profile does not have, as a regular expression.
    whole = {_find_variable(line) for line, _ in left} & (_FSDP | _PARALLELISM)
    if is_8bit:
        whole |= {launch.MIXED_PRECISION.variable}
    if kept.get(sharding.SP_SIZE.variable, "1") != "1":
        whole |= {sharding.USE_PARALLELISM_CONFIG.variable, *_PARALLELISM}
    if kept.get(sharding.VERSION.variable) == "1":
        whole |= {sharding.USE_FSDP.variable, sharding.USE_PARALLELISM_CONFIG.variable, *_FSDP, *_PARALLELISM}
        # Replicas of FSDP1 are not dimensions of a mesh.
        kept.setdefault(sharding.USE_PARALLELISM_CONFIG.variable, "false")
    return {name: text for name, text in kept.items() if name in whole or name not in _EXPRESSED}


def _find_variable(line: str) -> str:
    """Return the variable of a key that is left out; the name of a key without one."""
    section, _, name = line.partition(":")[0].rpartition(".")
    return _VARIABLES.get((section, name), name)


def _list_unused(
    left: Iterable[tuple[str, str]], passed: Mapping[str, str], engine: ConfigSection | None
) -> Iterator[tuple[str, str]]:
    """Yield the keys with their values that have no effect, with reasons: neither in a profile nor passed on."""
    for line, reason in left:
        section, _, name = line.partition(":")[0].rpartition(".")
        is_passed = _find_variable(line) in passed
        is_of_engine = engine is not None and (
            section.partition(".")[0] in _ENGINE_FILES
            or (section == engine.key and (engine.variable_prefix or name in _MULTINODE_LAUNCHERS))
        )
        if not (is_passed or is_of_engine):
            yield line, reason
