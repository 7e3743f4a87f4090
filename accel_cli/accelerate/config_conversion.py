"""Convert an Accelerate config file to a profile, with an answer for each of its keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from accel_cli.accelerate.config_rules import (
    CLUSTER_KEYS,
    ENGINE_KEYS,
    JOB_KEYS,
    JOB_RULES,
    SECTIONS,
    Answer,
    KeyRule,
    dropped,
    find_job_rules,
    find_rule,
)
from accel_cli.accelerate.config_values import (
    SHARDING_TYPES,
    AccelerateConfig,
    InvalidValueError,
    format_value,
    normalize,
)
from accel_cli.errors import Problem, ProfileError, UsageError
from accel_cli.profile import layers
from accel_cli.profile.layers import Layer, nest
from accel_cli.profile.schema import Profile
from accel_cli.profile.validation_errors import did_you_mean, explain
from accel_runtime.environment.accelerate import launch, sharding
from accel_runtime.environment.accelerate.sharding import EngineWords
from accel_runtime.environment.settings import find_nearest

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

_DEFAULTS = (launch.NUM_PROCESSES.key, launch.NUM_MACHINES.key)
"""Keys that set values of the profile even if the file leaves them out."""
KeyPath = tuple[str, ...]
"""The keys that lead to a value: `fsdp_config`, `fsdp_version`."""


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
    keys = JOB_KEYS[job.environment] if job else CLUSTER_KEYS
    config = replace(
        _parse_config(data, keys, engine_file),
        engine_path=str(engine_path or ""),
        sharding=section,
        job_launcher=job.launcher if job else "",
    )
    entries = dict(_list_entries(data, keys, engine_file))
    entries.setdefault((launch.DISTRIBUTED_TYPE.key,), None)
    answers: dict[KeyPath, Answer] = {}
    problems: dict[str, Problem] = {}
    for path, value in entries.items():
        key = ".".join(path)
        if len(path) == 1 and key not in keys:
            problems[key] = _build_unknown_key(key, keys, where)
            continue
        try:
            answers[path] = _answer(path, value, keys, config)
        except InvalidValueError as error:
            shown = format_value(key, value)
            shown = repr(shown) if isinstance(value, str) else shown
            problems[key] = Problem(where, key, error.expected, shown, error.hint)
    for key, expected, shown in config.find_conflicts():
        if not any(known.startswith(key) for known in problems):
            problems[key] = Problem(where, key, expected, shown)
    if problems:
        raise ProfileError(list(problems.values()))
    defaults = [_answer((key,), getattr(config, key), keys, config) for key in _DEFAULTS if key in keys]
    lines = [
        (f"{(key := '.'.join(path))}: {format_value(key, entries[path])}", answer)
        for path, answer in answers.items()
    ]
    profile = _build_profile(defaults, answers, where)
    if config.engine and config.keeps_engine:
        _check_engine(profile, where, config.engine)
    return Imported(
        data=profile,
        mapped=tuple((line, answer.text) for line, answer in lines if answer.is_applied),
        left=tuple((line, answer.text) for line, answer in lines if not answer.is_applied),
    )


def _check_engine(profile: Mapping[str, Any], where: str, engine: EngineWords) -> None:
    """Raise ProfileError if the engine's JSON file is invalid, or contradicts the other keys."""
    try:
        layers.resolve([Layer(where, {**layers.flatten(profile)}, {"": where})]).complete_engine()
    except ProfileError:
        raise
    except UsageError as error:
        raise ProfileError([Problem(where, engine.section.key, str(error))]) from None


def _parse_config(
    data: Mapping[str, Any], keys: Mapping[str, KeyRule], engine_file: Mapping[str, Any] | None
) -> AccelerateConfig:
    """Return the keys that decide how others are converted; those with invalid values have their default."""
    settings = {}
    for name in (each.name for each in fields(AccelerateConfig)):
        if name in keys and data.get(name) is not None:
            with suppress(InvalidValueError):
                settings[name] = keys[name].parse(data[name])
    sections = {engine.section.key: data.get(engine.section.key) for engine in sharding.ENGINES}
    return AccelerateConfig(
        **settings,
        engine_sections={
            key: value for key, value in sections.items() if key in keys and isinstance(value, Mapping)
        },
        engine_file=engine_file,
    )


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
        answer = find_rule(section, tuple(names)).apply(value, config)
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
    for section in (JOB_RULES[name].section for name in JOB_RULES.names):
        for name, value in config.additional_args.items():
            with suppress(InvalidValueError):
                yield from find_rule(section, (str(name),)).apply(value, config).values


def _build_profile(
    defaults: Iterable[Answer], answers: Mapping[KeyPath, Answer], where: str
) -> dict[str, Any]:
    """Return the checked data of the profile, without defaults that the file does not ask for."""
    values: dict[str, Any] = {}
    origins = {"": where}
    for answer in defaults:
        values |= answer.values
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
