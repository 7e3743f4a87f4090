"""Convert an Accelerate config file to a profile, with an answer for each of its keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from accel_cli.accelerate.config_rules import (
    CLUSTER_KEYS,
    ENGINE_KEYS,
    SAGEMAKER_KEYS,
    SECTIONS,
    Answer,
    KeyRule,
    dropped,
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
from accel_runtime.environment.accelerate import launch, sagemaker, sharding
from accel_runtime.environment.settings import find_nearest

__all__ = [
    "Imported",
    "ShardingSection",
    "convert",
    "find_deepspeed_file",
    "name_keys_of_deepspeed_file",
    "read_deepspeed_file",
    "uses_deepspeed",
    "wrap_deepspeed_file",
]

_DEFAULTS = (launch.NUM_PROCESSES.key, launch.NUM_MACHINES.key)
"""Keys that set values of the profile even if the file leaves them out."""
ShardingSection = Literal["fully_shard", "deepspeed"]
"""The section of the profile that DeepSpeed's settings become."""
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


def find_deepspeed_file(data: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the path of the JSON file that an Accelerate config names for DeepSpeed; None if there is no such file.

    Args:
        data: The config, parsed.
        folder: The folder of the config, searched after the current one, where Accelerate itself looks.
    """
    section = data.get(sharding.DEEPSPEED.key)
    name = section.get(sharding.DEEPSPEED_FILE.key) if isinstance(section, Mapping) else None
    if not isinstance(name, str) or not name:
        return None
    return next((file.absolute() for file in (Path(name), folder / name) if file.is_file()), None)


def read_deepspeed_file(data: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """Return the content of the file of `find_deepspeed_file`; None without one.

    Raises:
        ProfileError: The file exists and is not a JSON object.
    """
    path = find_deepspeed_file(data, folder)
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError([Problem(str(path), "", f"this is not JSON: {error}")]) from None
    if not isinstance(content, dict):
        raise ProfileError([Problem(str(path), "", "expected keys and values")])
    return content


def wrap_deepspeed_file(path: Path) -> dict[str, Any] | None:
    """Return the Accelerate config that names a JSON file of DeepSpeed; None if it is another file."""
    if path.suffix != ".json":
        return None
    data: dict[str, Any] = {
        launch.COMPUTE_ENVIRONMENT.key: launch.LOCAL,
        launch.DISTRIBUTED_TYPE.key: sharding.DEEPSPEED.distributed_type,
        sharding.DEEPSPEED.key: {sharding.DEEPSPEED_FILE.key: str(path)},
    }
    content = read_deepspeed_file(data, Path()) or {}
    return data if content.keys() & ENGINE_KEYS else None


def name_keys_of_deepspeed_file(lines: Iterable[tuple[str, str]], file: Path) -> tuple[tuple[str, str], ...]:
    """Return the results of `wrap_deepspeed_file`, with the keys of the JSON file itself."""
    prefix, kind = f"{sharding.DEEPSPEED_FILE.key}.", launch.DISTRIBUTED_TYPE.key
    return tuple(
        (line.removeprefix(prefix) if line.startswith(prefix) else str(file), text)
        for line, text in lines
        if line.startswith((prefix, f"{kind}:"))
    )


def uses_deepspeed(data: Mapping[str, Any]) -> bool:
    """Return True if an Accelerate config uses DeepSpeed."""
    kind = str(data.get(launch.DISTRIBUTED_TYPE.key, "")).strip().upper()
    return kind == sharding.DEEPSPEED.distributed_type


def convert(
    data: Mapping[str, Any],
    where: str,
    deepspeed_file: Mapping[str, Any] | None = None,
    *,
    deepspeed_path: Path | None = None,
    section: ShardingSection = "fully_shard",
) -> Imported:
    """Return the profile of an Accelerate config file.

    Args:
        data: The file, parsed.
        where: The name of the file in errors.
        deepspeed_file: The JSON file that it names for DeepSpeed, parsed.
        deepspeed_path: The path of that file.
        section: The section of the profile that DeepSpeed's settings become.

    Raises:
        ProfileError: All keys that are not known and values that are not accepted.
    """
    is_sagemaker = normalize(data.get(launch.COMPUTE_ENVIRONMENT.key)) == normalize(launch.SAGEMAKER)
    keys = SAGEMAKER_KEYS if is_sagemaker else CLUSTER_KEYS
    config = replace(
        _parse_config(data, keys, deepspeed_file), deepspeed_path=str(deepspeed_path or ""), sharding=section
    )
    entries = dict(_list_entries(data, keys, deepspeed_file))
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
    if config.keeps_deepspeed:
        _check_deepspeed(profile, where)
    return Imported(
        data=profile,
        mapped=tuple((line, answer.text) for line, answer in lines if answer.is_applied),
        left=tuple((line, answer.text) for line, answer in lines if not answer.is_applied),
    )


def _check_deepspeed(profile: Mapping[str, Any], where: str) -> None:
    """Raise ProfileError if DeepSpeed's JSON file is invalid, or contradicts the other keys."""
    try:
        layers.resolve([Layer(where, {**layers.flatten(profile)}, {"": where})]).complete_engine()
    except ProfileError:
        raise
    except UsageError as error:
        raise ProfileError([Problem(where, sharding.DEEPSPEED.key, str(error))]) from None


def _parse_config(
    data: Mapping[str, Any], keys: Mapping[str, KeyRule], deepspeed_file: Mapping[str, Any] | None
) -> AccelerateConfig:
    """Return the keys that decide how others are converted; those with invalid values have their default."""
    settings = {}
    for name in (each.name for each in fields(AccelerateConfig)):
        if name in keys and data.get(name) is not None:
            with suppress(InvalidValueError):
                settings[name] = keys[name].parse(data[name])
    return AccelerateConfig(**settings, deepspeed_file=deepspeed_file)


def _list_entries(
    data: Mapping[str, Any], keys: Mapping[str, KeyRule], deepspeed_file: Mapping[str, Any] | None
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
    yield from _list_leaves(deepspeed_file or {}, (sharding.DEEPSPEED_FILE.key,))


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
    if section == sharding.DEEPSPEED_FILE.key and config.keeps_deepspeed:
        return Answer(f"in {sharding.DEEPSPEED_FILE.profile_key}")
    if section == sharding.DEEPSPEED_FILE.key and normalize(value) == "auto":
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
    if key in CLUSTER_KEYS or key in SAGEMAKER_KEYS:
        owner = launch.LOCAL if key in CLUSTER_KEYS else launch.SAGEMAKER
        hint = f"it belongs to {launch.COMPUTE_ENVIRONMENT.key}: {owner}"
    return Problem(where, key, "Accelerate does not know this key", hint=hint)


def _list_argument_values(config: AccelerateConfig) -> Iterator[str]:
    """Yield the keys of the profile that the arguments of SageMaker's estimator set."""
    for name, value in config.additional_args.items():
        with suppress(InvalidValueError):
            yield from find_rule(sagemaker.ADDITIONAL_ARGUMENTS, (str(name),)).apply(value, config).values


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
