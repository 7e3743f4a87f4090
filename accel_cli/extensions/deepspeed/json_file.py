"""The JSON file of DeepSpeed in a profile: its values, their sources, and what contradicts them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.profile import layers
from accel_cli.profile.layers import CONFIG_FILE, Layer, Resolved
from accel_runtime.environment.engines import EngineConfig
from accel_runtime.environment.settings import Settings, SettingsError
from accel_runtime.extensions.deepspeed.settings import (
    PATHS,
    DeepSpeed,
    DeepSpeedConfig,
    find_value,
    read_deepspeed_file,
    resolve_deepspeed,
    state_accumulation,
    state_precision,
)

__all__ = ["apply_deepspeed_file", "list_deepspeed_values", "list_file_values"]

_PRECISION, _STEPS = "mixed_precision", "gradient_accumulation_steps"


def apply_deepspeed_file(resolved: Resolved) -> Resolved:
    """Return a profile with the number format and the accumulation of its JSON file, and DeepSpeed's configuration.

    Raises:
        UsageError: The file cannot be read, is invalid, or contradicts the profile.
    """
    section = DeepSpeed.of(resolved.profile.settings)
    stated: dict[str, tuple[Any, str]] = {}
    try:
        file = read_deepspeed_file(section.config_file) if section.config_file else {}
        if _states(resolved, _PRECISION):
            stated |= state_precision(file, resolved.profile.mixed_precision, _name(resolved, _PRECISION))
        if _states(resolved, _STEPS):
            stated |= state_accumulation(
                resolved.profile.gradient_accumulation_steps, _name(resolved, _STEPS)
            )
        config = resolve_deepspeed(section, file, stated)
    except SettingsError as error:
        raise UsageError(str(error)) from None
    values = _list_decided(resolved, config, section.config_file)
    if not values:
        return replace(resolved, engine=config)
    layer = Layer(
        _shorten(section.config_file),
        {key: value for key, (_, value) in values.items()},
        {key: path for key, (path, _) in values.items()},
    )
    return replace(layers.resolve([*resolved.layers, layer]), engine=config)


def _states(resolved: Resolved, key: str) -> bool:
    """Return True if a key is set to something; a file that sets the default, as the wizard does, leaves it open."""
    if getattr(resolved.profile, key) != getattr(Settings(), key):
        return True
    owner = next((layer for layer in reversed(resolved.layers) if key in layer.values), None)
    if owner is None or owner.name == CONFIG_FILE:
        return False
    return owner.name == "environment" or owner.name.startswith("--")


def _name(resolved: Resolved, key: str) -> str:
    value = getattr(resolved.profile, key)
    return f"{key}: {value} ({console.abbreviate_home(resolved.get_source(key))})"


def _list_decided(resolved: Resolved, config: DeepSpeedConfig, file: str) -> dict[str, tuple[str, Any]]:
    """Return the values of keys outside of the section that the file alone decides, with their paths in it."""
    decided: dict[str, tuple[str, Any]] = {}
    if (precision := config.mixed_precision) and config.sources.get(path := f"{precision}.enabled") == file:
        decided[_PRECISION] = (path, precision)
    if config.sources.get(_STEPS) == file and (steps := config.get(_STEPS)) is not None:
        if type(steps) is not int or steps < 1:
            raise UsageError(
                f"Invalid {file}: {_STEPS} is {steps!r}, expected a whole number above 0, or auto."
            )
        decided[_STEPS] = (_STEPS, steps)
    return {key: each for key, each in decided.items() if getattr(resolved.profile, key) != each[1]}


def list_file_values(resolved: Resolved) -> dict[str, tuple[Any, str]]:
    """Return the values of the keys of `deepspeed` that the JSON file sets, with their sources."""
    values: dict[str, tuple[Any, str]] = {}
    if resolved.engine is None:
        return values
    file = DeepSpeed.of(resolved.profile.settings).config_file
    for name, path in PATHS.items():
        value, key = find_value(resolved.engine.values, path), f"deepspeed.{name}"
        if value is not None and resolved.engine.sources.get(path) == file:
            value = "no" if value == "none" else value
            values[key] = (value, f"{_shorten(file)}: {path}")
    return values


def list_deepspeed_values(config: EngineConfig) -> Mapping[str, tuple[Any, str]]:
    """Return the values of a configuration of DeepSpeed by path, with their sources."""
    return {
        path: (
            find_value(config.values, path),
            source if source.startswith("deepspeed.") else _shorten(source),
        )
        for path, source in sorted(config.sources.items())
    }


def _shorten(source: str) -> str:
    """Return a path as seen from the current folder if it is in it."""
    if not Path(source).is_absolute():
        return source
    here = os.path.relpath(source)
    return here if not here.startswith("..") else console.abbreviate_home(source)
