"""Merge layers to one profile: user < project < named < --config-file < environment < options; every value keeps its source.

`planner` adds the launcher that suits the machine below them, if none of them names one, and above the environment
what a scheduler says about the nodes of this launch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from accel_cli.errors import Problem, ProfileError, UsageError
from accel_cli.profile import store, yaml_io
from accel_cli.profile.schema import SCHEMA_VERSION, SECTIONS, SETTINGS_SECTIONS, Profile, known_keys
from accel_cli.profile.store import DEFAULT, ProfileStore
from accel_cli.profile.validation_errors import drop_repeated_lists, explain, unknown_key
from accel_runtime.environment import settings as env
from accel_runtime.environment.accelerate.export import read_user_variables
from accel_runtime.environment.engines import ENGINES, EngineConfig
from accel_runtime.environment.settings import (
    Settings,
    SettingsError,
    find_engine_conflict,
    variable_name,
)

__all__ = [
    "CONFIG_FILE",
    "FILE_KEYS",
    "Layer",
    "Resolved",
    "complete_path",
    "find_value",
    "flatten",
    "list_unused_files",
    "list_values",
    "nest",
    "parse_assignments",
    "read_environment",
    "read_file",
    "read_layers",
    "relate_files",
    "relate_path",
    "resolve",
    "to_data",
]


CONFIG_FILE = "--config-file"
"""The name of the layer of a config file of Accelerate."""
FILE_KEYS = tuple(f"{name}.{ENGINES[name].file}" for name in ENGINES.names)
"""The keys that are paths relative to the file with them."""


@dataclass(frozen=True)
class Layer:
    """Values from one source, by dotted key."""

    name: str
    """The name of the layer for users."""
    values: Mapping[str, Any]
    where: Mapping[str, str] = field(default_factory=dict)
    """File and line, variable or option, by dotted key; the empty key is the whole layer."""
    problems: tuple[Problem, ...] = ()
    """Problems of reading it, which are reported with those of its values."""


@dataclass(frozen=True)
class Resolved:
    """A checked profile with the source of each value."""

    profile: Profile
    layers: tuple[Layer, ...]
    """The layers that set values, the weakest first."""
    sources: Mapping[str, str]
    """The layer and location of each dotted key that a layer sets."""
    engine: EngineConfig | None = None
    """The configuration of the engine, with its file; None if no engine is used, or the file has not been read."""

    @property
    def values(self) -> dict[str, Any]:
        """The value of every key, by dotted key."""
        return flatten(self.profile.model_dump())

    @property
    def effective_values(self) -> dict[str, tuple[Any, str]]:
        """The effective value of every key with its source; keys of an engine have those of its file."""
        values = {key: (value, self.get_source(key)) for key, value in self.values.items()}
        return values | dict(self.profile.engine.list_file_values(self)) if self.profile.engine else values

    def complete_engine(self) -> Resolved:
        """Return a profile with the configuration of its engine, and the values that the file of the engine decides.

        Raises:
            UsageError: The file cannot be read, is invalid, or contradicts the profile.
        """
        return self.profile.engine.complete(self) if self.profile.engine else self

    def get_source(self, key: str) -> str:
        """Return the source of a key's value."""
        return self.sources.get(key, "default")


def read_layers(
    profiles: ProfileStore,
    environ: Mapping[str, str],
    name: str | None,
    options: Iterable[Layer] = (),
    config: Iterable[Layer] = (),
) -> list[Layer]:
    """Return the effective layers, the weakest first; `name` overrides `ACCEL_PROFILE`.

    `config` are files for one launch, which override the profile's files.

    Raises:
        UsageError: A file cannot be read, a named profile does not exist, or a variable is invalid.
    """
    layers = []
    user, project = profiles.get_path(DEFAULT), profiles.find_project_file()
    for path in filter(None, (user, project)):
        if path.exists() and not (path.is_file() or path.is_dir()):
            # Reading a named pipe would block.
            raise UsageError(f"Cannot read {path}: it is not a regular file. Remove it, or use --no-profile.")
    if store.has_file(user):
        layers.append(read_file(user, "user"))
    if project and not store.find_distrust(project, environ):
        layers.append(read_file(project, "project"))
    source = env.PROFILE if name is None else "--profile"
    name = (environ.get(env.PROFILE) or None) if name is None else name
    if name is not None:
        path = profiles.get_path(name)
        if not path.is_file():
            names = ", ".join(profiles.list_names()) or "none"
            is_file = Path(name).is_file()
            cure = f" To use the file {name}: accel config import {name} --profile NAME." if is_file else ""
            raise UsageError(
                f"Profile {name!r} (from {source}) not found: {path} does not exist. Existing profiles: {names}.{cure}"
            )
        layers.append(read_file(path, f"profile {name}"))
    layers += [*config, read_environment(environ), *options]
    return [layer for layer in layers if layer.values or layer.problems]


def list_unused_files(profiles: ProfileStore, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each file that looks like a profile, but is not read as a layer."""
    project = profiles.find_project_file()
    notes = [
        f"{file} is not used: the suffix of a profile is .yaml. Rename it: {file.with_suffix('.yaml').name}"
        for file in profiles.find_misnamed_files()
    ]
    if project and (distrust := store.find_distrust(project, environ)):
        notes.append(
            f"{project} is not used: {distrust}. Set {env.TRUSTED_PROJECTS}={project.parent} to use it."
        )
    return tuple(notes)


def read_file(path: Path, name: str) -> Layer:
    """Return the layer of a profile file."""
    document = store.read(path)
    values = flatten(document.data)
    values.pop("schema_version", None)
    for key in FILE_KEYS:
        if isinstance(file := values.get(key), str):
            values[key] = complete_path(file, path.parent)
    where = {key: f"{path}:{line}" for key, line in document.lines.items()}
    return Layer(name, values, where | {"": str(path)}, document.problems)


def complete_path(name: str, folder: Path) -> str:
    """Return a path in a file as seen from everywhere; one that begins with `~` or a variable is expanded later."""
    return str(folder.resolve() / name) if name and name[0] not in "~$" else name


def relate_path(path: str, target: Path) -> str:
    """Return a path that is written into a file: relative to its folder if it is in it, else absolute."""
    if not path or path[0] in "~$":
        return path
    full, folder = Path(os.path.abspath(path)), target.parent.resolve()  # noqa: PTH100 - links stay
    return str(full.relative_to(folder)) if full.is_relative_to(folder) else str(full)


def relate_files(values: Mapping[str, Any], target: Path) -> dict[str, Any]:
    """Return values that are written into a file, with the paths of engines' files as seen from it."""
    paths = {key: values[key] for key in FILE_KEYS if isinstance(values.get(key), str)}
    return {**values, **{key: relate_path(path, target) for key, path in paths.items()}}


def read_environment(environ: Mapping[str, str]) -> Layer:
    """Return the layer of the variables that are set.

    Raises:
        UsageError: A variable is invalid.
    """
    user = read_user_variables(environ)
    texts = user.settings.to_env()
    translated = {name: texts[name] for name in map(variable_name, user.names) if name not in environ}
    try:
        settings = Settings.from_env({**translated, **environ}, accelerate=False)
    except SettingsError as error:
        raise UsageError(str(error)) from None
    if settings.spmd:
        raise UsageError(
            f"Invalid {variable_name('spmd')}: accel launch sets it for the processes it starts. Set launcher.spmd: true "
            "instead (--set launcher.spmd=true)."
        )
    values, where = {}, {}
    for key, value in list_values(settings):
        variable = variable_name(key.replace(".", "_"))
        # A launch inside a launch also has the variable of spmd, switched off.
        if key != "spmd" and (variable in environ or variable in translated):
            values[key] = value
            where[key] = variable if variable in environ else user.names[key.replace(".", "_")]
    return Layer("environment", values, where)


def list_values(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting that the processes receive, as a profile has them."""
    for section in ("", *SETTINGS_SECTIONS):
        part = settings.get_section(section) if section else settings
        for each in fields(part):
            if not section and each.name in {*SETTINGS_SECTIONS, "engines"}:
                continue
            value = getattr(part, each.name)
            if isinstance(value, tuple):  # of a list or of a mapping's pairs
                to_plain: Any = get_origin(SETTINGS_SECTIONS[section].model_fields[each.name].annotation)
                value = to_plain(value)
            yield f"{section}.{each.name}" if section else each.name, value


def parse_assignments(assignments: Iterable[str], option: str = "--set", *, kind: object = None) -> Layer:
    """Return the layer of `KEY=VALUE` texts, whose values are YAML.

    Keys of the launcher of this `kind`, unless one of the texts sets another, are suggested first for an unknown key.

    Raises:
        UsageError: A text is not an assignment, or its key is unknown.
    """
    texts: dict[str, str] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not (key and equals):
            raise UsageError(
                f"{option}: invalid assignment {assignment!r}: expected KEY=VALUE, for example mixed_precision=bf16."
            )
        texts[key] = text
    if not texts:  # the keys of all launchers are loaded for assignments only
        return Layer(option, {}, {"": option})
    known, kind = known_keys(), texts.get("launcher.kind", kind)
    if unknown := [key for key in texts if key not in known and not key.startswith("env.")]:
        raise ProfileError(drop_repeated_lists(unknown_key(key, option, kind) for key in unknown))
    values = {
        key: text if key.startswith("env.") else yaml_io.scalar(text, f"{option} {key}", key)
        for key, text in texts.items()
    }
    return Layer(option, values, dict.fromkeys((*values, ""), option))


def find_value(layers: Sequence[Layer], key: str) -> Any:
    """Return the value of a key in the strongest layer that sets it; None if none does."""
    return next((layer.values[key] for layer in reversed(layers) if key in layer.values), None)


def resolve(layers: Iterable[Layer]) -> Resolved:
    """Merge layers to one profile: later layers override single keys, and a new `launcher.kind` resets its section.

    Raises:
        ProfileError: All problems of the layers and of the result.
    """
    layers = tuple(layers)
    values: dict[str, Any] = {}
    where: dict[str, str] = {"": "profile"}
    sources: dict[str, str] = {}
    for layer in layers:
        kind = values.get("launcher.kind")
        if layer.values.get("launcher.kind", kind) != kind:
            values = {key: value for key, value in values.items() if not key.startswith("launcher.")}
        values |= layer.values
        default = layer.where.get("", "")
        for key in layer.values:
            location = layer.where.get(key, default)
            sources[key] = layer.name if location in {"", layer.name} else f"{layer.name}: {location}"
            where[key] = location or layer.name
            section, dot, _ = key.partition(".")
            if dot:  # a problem of the whole section is reported where the last layer sets a key of it
                where[section] = layer.where.get(section) or default or layer.name
        if layer.values and default:
            where[""] = default
    problems = [problem for layer in layers for problem in layer.problems]
    try:
        profile = Profile.model_validate(nest(values))
    except ValidationError as error:
        raise ProfileError(problems + explain(error, where)) from None
    if problems or (problems := _find_engine_problems(profile, where)):
        raise ProfileError(problems)
    return Resolved(profile, layers, {key: sources[key] for key in values})


def _find_engine_problems(profile: Profile, where: Mapping[str, str]) -> list[Problem]:
    """Return the problem of a key that the engine excludes."""
    settings = profile.settings
    engine, conflict = settings.engine, find_engine_conflict(settings)
    if engine is None or conflict is None:
        return []
    key = conflict.key
    shown = yaml_io.inline(list(conflict.value) if isinstance(conflict.value, tuple) else conflict.value)
    by = where.get(engine.key, "the profile")
    reason = (
        f"cannot be {shown} with {engine.key}: {engine.choice} ({by}): {conflict.reason}. Remove one of them"
    )
    return [Problem(where.get(key, where[""]), key, reason)]


def flatten(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested data by dotted key, two levels deep for the sections of a profile."""
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in SECTIONS and isinstance(value, dict):
            values |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            values[key] = value
    return values


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested data of values by dotted key; the reverse of `flatten`."""
    data: dict[str, Any] = {}
    for key, value in values.items():
        section, dot, name = key.partition(".")
        if dot and section in SECTIONS and isinstance(data.setdefault(section, {}), dict):
            data[section][name] = value
        else:
            data[key] = value
    return data


def to_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a file with values by dotted key, beginning with its version."""
    return {"schema_version": SCHEMA_VERSION, **nest(values)}
