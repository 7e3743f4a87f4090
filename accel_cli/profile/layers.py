"""One profile out of layers: user < project < named < environment < options, and which layer said what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ValidationError

from accel_cli import console
from accel_cli.errors import Problem, ProfileError, UsageError
from accel_cli.profile import store, yaml_io
from accel_cli.profile.schema import SCHEMA_VERSION, SECTIONS, Profile, known_keys
from accel_cli.profile.store import DEFAULT, Store
from accel_cli.profile.validation_errors import explain, unknown_key
from accel_runtime import env
from accel_runtime.env import Settings, SettingsError, variable_name

__all__ = ["Layer", "Resolved", "assigned", "environment", "file", "flat", "resolve", "stack", "to_data"]


@dataclass(frozen=True)
class Layer:
    """Values from one place, by dotted key."""

    name: str
    """What a person calls this layer."""
    values: Mapping[str, Any]
    where: Mapping[str, str] = field(default_factory=dict)
    """File and line, variable or option, by dotted key; the empty key is the whole."""
    problems: tuple[Problem, ...] = ()
    """Mistakes that were found while it was read; they are reported with those of its values."""


@dataclass(frozen=True)
class Resolved:
    """A checked profile that knows where its values came from."""

    profile: Profile
    layers: tuple[Layer, ...]
    """The layers that spoke, the weakest first."""
    sources: Mapping[str, str]
    """For every dotted key that a layer set, the layer and place."""

    def source(self, key: str) -> str:
        """Where the value of a key came from."""
        return self.sources.get(key, "default")


def stack(
    where: Store, environ: Mapping[str, str], name: str | None, options: Iterable[Layer] = ()
) -> list[Layer]:
    """The layers that hold, the weakest first.

    Args:
        where: The folders to look in.
        environ: The environment.
        name: The profile asked for; None takes what `ACCEL_PROFILE` names, if it names one.
        options: Layers of the command line.

    Raises:
        UsageError: A file cannot be read, a named profile does not exist, or a variable cannot be used.
    """
    layers = []
    user, project = where.path(DEFAULT), where.project()
    if user.is_file():
        layers.append(file(user, "user"))
    if project and (distrust := store.find_distrust(project, environ)):
        console.note(
            f"{project} is not used: {distrust}. Set {env.TRUSTED_PROJECTS}={project.parent} to use it."
        )
    elif project:
        layers.append(file(project, "project"))
    if wanted := name or environ.get(env.PROFILE):
        layers.append(_named(where, wanted, by="--profile" if name else env.PROFILE))
    return [layer for layer in (*layers, environment(environ), *options) if layer.values or layer.problems]


def file(path: Path, name: str) -> Layer:
    """The layer of a profile file."""
    found = store.read(path)
    values = flat(found.data)
    values.pop("schema_version", None)
    where = {".".join(map(str, place)): f"{path}:{line}" for place, line in found.lines.items()}
    return Layer(name, values, where | {"": str(path)}, found.problems)


def environment(environ: Mapping[str, str]) -> Layer:
    """The layer of the variables that are set.

    Raises:
        UsageError: A variable says something we cannot use.
    """
    try:
        settings = Settings.from_env(environ, accelerate=False)
    except SettingsError as error:
        raise UsageError(str(error)) from None
    if settings.spmd:
        raise UsageError(
            f"{variable_name('spmd')} is what accel launch tells the processes it starts; set launcher.spmd: true (--set "
            "launcher.spmd=true)"
        )
    values = {key: (name, value) for key, name, value in _keys(settings) if name in environ}
    # A launch inside a launch finds it too, and switched off.
    values.pop("spmd", None)
    return Layer(
        "environment",
        {key: value for key, (_, value) in values.items()},
        {key: name for key, (name, _) in values.items()},
    )


def _keys(settings: object, section: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every key of a profile that settings say, with its variable, and its value as a profile has it."""
    hints = get_type_hints(type(settings))
    for f in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, f.name)
        key = f"{section}.{f.name}" if section else f.name
        if is_dataclass(value):
            yield from _keys(value, f.name)
        else:
            yield key, variable_name(key.replace(".", "_")), _plain(value, hints[f.name])


def _plain(value: Any, hint: Any) -> Any:
    """Pairs as keys and values, texts as a list."""
    if hint == tuple[str, ...]:
        return list(value)
    return dict(value) if hint == tuple[tuple[str, str], ...] else value


def assigned(assignments: Iterable[str], option: str = "--set", *, kind: object = None) -> Layer:
    """The layer of `KEY=VALUE` texts; a value is read as YAML would read it.

    Args:
        assignments: The texts.
        option: The option that they stand behind, for messages.
        kind: The `launcher.kind` in force unless one of them sets it, for guesses of what an unknown key means.

    Raises:
        UsageError: A text is no assignment, or its key is not known.
    """
    said: dict[str, str] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{option} takes KEY=VALUE, for example mixed_precision=bf16; it got {text!r}")
        said[key] = value
    known, kind = known_keys(), said.get("launcher.kind", kind)
    if unknown := [key for key in said if key not in known and not key.startswith("env.")]:
        raise ProfileError([unknown_key(key, option, kind) for key in unknown])
    values = {
        key: value if key.startswith("env.") else yaml_io.scalar(value, f"{option} {key}")
        for key, value in said.items()
    }
    return Layer(option, values, dict.fromkeys((*values, ""), option))


def resolve(layers: Iterable[Layer]) -> Resolved:
    """One profile; a stronger layer wins key by key, and one that changes `launcher.kind` starts that section anew.

    Raises:
        ProfileError: Everything that is wrong with the result.
    """
    layers = tuple(layers)
    values: dict[str, Any] = {}
    origin: dict[str, tuple[str, str]] = {}
    for layer in layers:
        if layer.values.get("launcher.kind", values.get("launcher.kind")) != values.get("launcher.kind"):
            values = {key: value for key, value in values.items() if not key.startswith("launcher.")}
        values |= layer.values
        origin |= {key: (layer.name, layer.where.get(key, layer.where.get("", ""))) for key in layer.values}
    places = {key: place or name for key, (name, place) in origin.items()}
    places |= _locate_sections(layers)
    spoke = [layer for layer in layers if layer.values and layer.where.get("")]
    places[""] = spoke[-1].where[""] if spoke else "profile"
    problems = [problem for layer in layers for problem in layer.problems]
    try:
        profile = Profile.model_validate(nested(values))
    except ValidationError as error:
        raise ProfileError(problems + explain(error, places)) from None
    if problems:
        raise ProfileError(problems)
    return Resolved(profile, layers, {key: _described(*origin[key]) for key in values})


def _locate_sections(layers: Iterable[Layer]) -> dict[str, str]:
    """Return the place of each section, for mistakes that are not of one key: in the last layer that has a key of it."""
    return {
        section: layer.where.get(section) or layer.where.get("") or layer.name
        for layer in layers
        for section in SECTIONS
        if any(key.startswith(f"{section}.") for key in layer.values)
    }


def flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """Nested data by dotted key, two levels deep where a profile has sections."""
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in SECTIONS and isinstance(value, dict):
            values |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            values[key] = value
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `flat`."""
    data: dict[str, Any] = {}
    for key, value in values.items():
        section, dot, name = key.partition(".")
        if dot and section in SECTIONS and isinstance(data.setdefault(section, {}), dict):
            data[section][name] = value
        else:
            data[key] = value
    return data


def to_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a file has that says values by dotted key: its version first."""
    return {"schema_version": SCHEMA_VERSION, **nested(values)}


def _named(where: Store, name: str, by: str) -> Layer:
    path = where.path(name)
    if not path.is_file():
        there = ", ".join(where.names()) or "none yet"
        raise UsageError(
            f"{by} asks for the profile {name!r}, which does not exist at {path}. There are: {there}."
        )
    return file(path, f"profile {name}")


def _described(layer: str, place: str) -> str:
    return layer if place in {"", layer} else f"{layer}: {place}"
