"""Errors of a profile: pydantic's errors with their location, the expected value and the nearest name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from accel_cli.errors import MAX_PROBLEMS, Problem
from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.sections import ItemError, Section
from accel_cli.profile.schema import SECTIONS, SETTINGS_SECTIONS, Profile, known_keys
from accel_runtime.environment.accelerate import launch
from accel_runtime.environment.accelerate.sharding import explain_fsdp1_option
from accel_runtime.environment.engines import list_engines
from accel_runtime.environment.settings import find_nearest

__all__ = ["describe", "did_you_mean", "drop_repeated_lists", "explain", "one_of", "unknown_key"]

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "greater_than_equal": "at least {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length} character",
    "string_pattern_mismatch": "text that matches {pattern}",
}
_MAX_SHOWN = 60
_MIN_PREFIX, _MAX_REST = 4, 3
"""The least length of a shared prefix for a suggestion, and the most letters that may follow it."""
_MIN_NAME = 3
"""The least length of a name for suggesting another that begins with it."""
_LIST = "keys of"
"""The beginning of the hint that lists keys."""
_EXAMPLES = {
    "launcher": "launcher.kind",
    "parallel": "parallel.dp_shard",
    "fully_shard": "fully_shard.wrap",
    **{engine.name: engine.key for engine in list_engines()},
    "compile": "compile.backend",
    "env": "env.NAME, a variable",
}
_RENAMED = {
    **launch.list_equivalents(),
    "node_rank": launch.MACHINE_RANK.equivalent,
    "master_addr": launch.MAIN_PROCESS_IP.equivalent,
    "master_port": launch.MAIN_PROCESS_PORT.equivalent,
}
"""Equivalents in a profile of the keys of Accelerate and torchrun."""


def explain(error: ValidationError, where: Mapping[str, str]) -> list[Problem]:
    """Convert pydantic's errors to problems, one for each key.

    `where` is the location of each dotted key, a line of a file or an option; the empty key is the whole profile.
    """
    errors: dict[str, list[Any]] = {}
    for item in error.errors(include_url=False):
        errors.setdefault(_find_key(item), []).append(item)
    problems: list[Problem] = []
    for key, items in errors.items():
        location = _find_location(key, where)
        if len(problems) < MAX_PROBLEMS:
            problems.append(_build_problem(items, key, location))
        else:  # suggestions take time, and only the first problems are shown
            problems.append(Problem(location, key, str(items[0]["msg"])))
        if items[0]["type"] == "union_tag_invalid":
            problems += _validate_as_nearest_kind(items[0], where)
    return drop_repeated_lists(problems)


def drop_repeated_lists(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems without the lists of keys that an earlier problem has."""
    seen: set[str] = set()
    result = []
    for problem in problems:
        is_repeated = problem.hint.startswith(_LIST) and problem.hint in seen
        seen.add(problem.hint)
        result.append(replace(problem, hint="") if is_repeated else problem)
    return result


def describe(error: ValidationError) -> str:
    """Return the text `expected a whole number, got 'x'` for the first value that pydantic rejects."""
    item: Any = error.errors(include_url=False)[0]
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    return f"{one_of(_list_expected(item))}, got {_format_value(item['input'])}"


def unknown_key(key: str, where: str, kind: object = None) -> Problem:
    """Return the problem of an unknown key, with the most similar key as a hint; keys of the `kind` come first."""
    if key in SECTIONS:
        return Problem(where, key, f"this is a section. Name a key of it, such as {_EXAMPLES[key]}")
    if kinds := _list_kinds(key):
        return Problem(where, key, f"this key belongs to launcher.kind: {' or '.join(kinds)}")
    if instead := explain_fsdp1_option(key.rpartition(".")[2]):
        return Problem(where, key, f"this is an option of FSDP1; under fully_shard, {instead}")
    return Problem(where, key, "unknown key", hint=_hint_key(key, kind))


def did_you_mean(nearest: str | None) -> str:
    """Return the hint that names the most similar name, or an empty text."""
    return f"did you mean {nearest}?" if nearest else ""


def one_of(values: Iterable[str]) -> str:
    """Return the text `expected a, b or c`."""
    *others, last = values
    return f"expected {', '.join(others)} or {last}" if others else f"expected {last}"


def _list_kinds(key: str) -> list[str]:
    """Return the kinds of launchers that have a key; empty for keys of other sections."""
    section, _, name = key.rpartition(".")
    return [kind for kind, each in LAUNCHERS.items() if section == "launcher" and name in each.model_fields]


def _hint_key(key: str, kind: object) -> str:
    """Return the hint for an unknown key: its equivalent in a profile, or the most similar key."""
    section, _, name = key.rpartition(".")
    if section in {"", "launcher"} and name in _RENAMED:
        return f"use {_RENAMED[name]}"
    if name.isdigit():
        return "quote a value that has commas: '0,1'"
    nearest = _guess_key(key, kind)
    kinds = _list_kinds(nearest or "")
    if kind in LAUNCHERS and kinds and kind not in kinds:
        return f"did you mean {nearest}, a key of launcher.kind: {' or '.join(kinds)}?"
    return did_you_mean(nearest) or _list_keys(section, kind)


def _list_keys(section: str, kind: object) -> str:
    """Return the hint with all keys of a section, or all of the profile itself if there is no such section."""
    if section == "launcher":
        launcher = LAUNCHERS.get(kind) if isinstance(kind, str) else None
        names = (
            list(launcher.model_fields)
            if launcher
            else [f"kind ({', '.join(LAUNCHERS)}), which adds its keys"]
        )
        title = f"launcher of kind {kind}" if launcher else "launcher"
    elif section in SETTINGS_SECTIONS:
        names, title = list(SETTINGS_SECTIONS[section].model_fields), section
    else:
        names = [
            *(name for name in Profile.model_fields if name not in SECTIONS and name != "schema_version"),
            *(f"{name}.KEY" for name in SECTIONS),
        ]
        title = "a profile"
    return f"{_LIST} {title}: {', '.join(names)}"


def _guess_key(key: str, kind: object) -> str | None:
    """Return the most similar key: of the same section first, which for `launcher` is the active launcher's."""
    section, _, name = key.rpartition(".")
    known = list(known_keys())
    active = LAUNCHERS.get(kind) if isinstance(kind, str) else None
    near = [f"launcher.{field}" for field in active.model_fields] if active else []
    if section != "launcher":
        near = [*(full for full in known if full.rpartition(".")[0] == section), *near]
    groups = [{full.rpartition(".")[2]: full for full in group} for group in (near, known)]
    for group in groups:
        if name in group:
            return group[name]
    for group in groups:
        if nearest := _find_similar(name, list(group)):
            return group[nearest]
    # After a known section, any short name looks like any other.
    return find_nearest(key, known) if section and section.partition(".")[0] not in SECTIONS else None


def _find_similar(name: str, known: list[str]) -> str | None:
    """Return the known name that begins with a name, shares most of its beginning, or has nearly its letters."""
    shortest = min(len(name), max(_MIN_PREFIX, len(name) - _MAX_REST))
    for length in range(len(name), shortest - 1, -1) if len(name) >= _MIN_NAME else ():
        for other in known:
            if other.startswith(name[:length]):
                return other
    # A short name is similar only if its first letter is right.
    return find_nearest(name, [other for other in known if len(name) > _MIN_PREFIX or other[0] == name[:1]])


def _get_section(item: Mapping[str, Any]) -> type[Section]:
    """Return the section in which an error is."""
    first, *rest = (str(part) for part in item["loc"])
    return LAUNCHERS[rest[0]] if first == "launcher" and rest else SETTINGS_SECTIONS.get(first, Profile)


def _find_key(item: Mapping[str, Any]) -> str:
    """Return the dotted key of an error; a validator of a section names its field in front of the message."""
    if item["type"].startswith("union_tag"):
        return "launcher.kind"
    place = [str(part) for part in item["loc"]]
    if place[0] == "launcher":
        del place[1:2]  # pydantic adds the kind
    key = ".".join(place[: 2 if place[0] in SECTIONS else 1])
    name, colon, _ = str(item.get("ctx", {}).get("error", "")).partition(": ")
    is_named = (
        isinstance(item["input"], (dict, BaseModel)) and colon and name in _get_section(item).model_fields
    )
    return f"{key}.{name}" if is_named else key


def _build_problem(items: list[Any], key: str, where: str) -> Problem:
    """Return the problem of a key; a field of several types has an error for each."""
    kind, value = items[0]["type"], items[0]["input"]
    if kind == "extra_forbidden":
        launcher = _get_section(items[0]).model_fields.get("kind")
        return unknown_key(key, where, launcher and launcher.default)
    if kind == "union_tag_invalid":
        value = items[0]["ctx"]["tag"]
        return Problem(
            where, key, one_of(LAUNCHERS), repr(value), did_you_mean(find_nearest(value, list(LAUNCHERS)))
        )
    if kind == "union_tag_not_found":
        kinds = [
            name for name, launcher in LAUNCHERS.items() if value and set(value) <= set(launcher.model_fields)
        ]
        hint = f"set launcher.kind too: {' or '.join(kinds)}" if kinds else ""
        return Problem(where, key, one_of(LAUNCHERS), "nothing", hint)
    if key == "launcher" and isinstance(value, str):
        return _explain_launcher_name(value, where)
    if kind == "value_error":
        return _explain_validator(items[0], key, where)
    expected = [text for item in items if item["input"] is value for text in _list_expected(item)]
    nearest = find_nearest(value, expected) if isinstance(value, str) else None
    return Problem(where, key, one_of(dict.fromkeys(expected)), _format_value(value), did_you_mean(nearest))


def _explain_launcher_name(value: str, where: str) -> Problem:
    """Return the problem of a launcher that is given by its name alone."""
    known = value if value in LAUNCHERS else find_nearest(value, list(LAUNCHERS))
    hint = f"name the launcher by its kind: launcher: {{kind: {known or 'torchrun'}}}"
    return Problem(where, "launcher", "expected keys and values", repr(value), hint)


def _explain_validator(item: Mapping[str, Any], key: str, where: str) -> Problem:
    """Return the problem that the validator of a field or a section raised."""
    error, value = item["ctx"]["error"], item["input"]
    if isinstance(error, ItemError):
        return Problem(where, key, error.expected, error.actual)
    if isinstance(value, (dict, BaseModel)):
        return Problem(where, key, str(error).removeprefix(f"{key.rpartition('.')[2]}: "))
    return Problem(where, key, str(error), _format_value(value))


def _list_expected(item: Mapping[str, Any]) -> list[str]:
    """Return the values that a field of one type accepts."""
    context = item.get("ctx", {})
    if item["type"] == "literal_error":
        return re.split(r", | or ", context["expected"].replace("'", ""))
    if item["type"] == "bool_type":
        return ["true", "false"]
    if item["type"] == "string_type" and not isinstance(item["input"], (dict, list)):
        return ["text in quotes"]
    expected = _EXPECTED.get(item["type"])
    return [expected.format(**context) if expected else str(item["msg"]).removeprefix("Input should be ")]


def _validate_as_nearest_kind(item: Mapping[str, Any], where: Mapping[str, str]) -> list[Problem]:
    """Return the problems of a launcher section of an unknown kind, validated as the most similar kind."""
    kind = find_nearest(item["ctx"]["tag"], list(LAUNCHERS))
    if kind is None:
        unknown = [key for key in (f"launcher.{name}" for name in item["input"]) if key not in known_keys()]
        return [unknown_key(key, _find_location(key, where)) for key in unknown[:MAX_PROBLEMS]]
    try:
        Profile.model_validate({"launcher": {**item["input"], "kind": kind}})
    except ValidationError as error:
        return explain(error, where)
    return []


def _format_value(value: object) -> str:
    text = "keys and values" if isinstance(value, dict) else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _find_location(key: str, where: Mapping[str, str]) -> str:
    """Return the location of a key, or else of its section or the profile."""
    while key and key not in where:
        key = key.rpartition(".")[0]
    return where.get(key, where.get("", "profile"))
