"""Engines: libraries that shard models and step their optimizers themselves. Standard library only.

An engine is an extension, and the class of its section of the settings is its line in the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol

from accel_runtime.environment.registry import Registry

__all__ = [
    "ENGINES",
    "Engine",
    "EngineConfig",
    "EngineConflict",
    "find_engine",
    "list_engines",
]


class EngineConflict(NamedTuple):
    """A setting that an engine excludes."""

    key: str
    """Its dotted key."""
    value: Any
    reason: str


class EngineConfig(Protocol):
    """The configuration of an engine: its section, a file of its own, and what other options state."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Return the nested keys of the file of the engine."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Return where each value comes from, by its name."""

    @property
    def summary(self) -> str:
        """Return what is sharded, in words."""

    @property
    def mixed_precision(self) -> Any:
        """Return the number format that it states, `bf16` or `fp16`; None without one."""

    @property
    def accumulation_steps(self) -> int | None:
        """Return the number of micro-batches of an optimizer step that it states; None without one."""


class Engine(ABC):
    """Options of an engine; a subclass is a frozen dataclass, by whose defaults the engine is not used."""

    name: ClassVar[str]
    """The name of the section in a profile, and of its variables."""
    title: ClassVar[str]
    """Its name in messages."""
    switch: ClassVar[str]
    """The field that selects the engine."""
    file: ClassVar[str]
    """The field with the path of a file of the engine."""
    package: ClassVar[str]
    """The package that it needs, which is an extra of accel too."""

    @property
    @abstractmethod
    def is_used(self) -> bool:
        """Return whether models are trained by this engine."""

    @property
    def key(self) -> str:
        """Return the dotted key of the field that selects the engine."""
        return f"{self.name}.{self.switch}"

    @property
    def choice(self) -> Any:
        """Return the value of that field."""
        return getattr(self, self.switch)

    @property
    def path(self) -> str:
        """Return the path of the engine's file; empty without one."""
        path: str = getattr(self, self.file)
        return path

    def move(self, path: str) -> Engine:
        """Return these options with another path of the engine's file."""
        moved: Engine = replace(self, **{self.file: path})  # type: ignore[type-var]
        return moved

    @abstractmethod
    def find_conflict(self, settings: Any) -> EngineConflict | None:
        """Return the first of the `Settings` that cannot be used with this engine."""

    @abstractmethod
    def read_config(self) -> EngineConfig:
        """Return the configuration of the section and of the file that it names; raise SettingsError if it is invalid."""


ENGINES: Registry[type[Engine]] = Registry(
    {
        "deepspeed": "accel_runtime.extensions.deepspeed.settings:DeepSpeed",
    }
)
"""The section of each engine, by its name."""


def list_engines() -> tuple[Engine, ...]:
    """Return the options of all engines, of which none is used."""
    return tuple(ENGINES[name]() for name in ENGINES.names)


def find_engine(plugins: Any) -> Engine:
    """Return the options of the engine that a plugin of a script, or several by name, belong to, with their defaults.

    Raises:
        TypeError: They belong to no engine.
    """
    plugin = next(iter(plugins.values()), None) if isinstance(plugins, Mapping) else plugins
    engines = list_engines()
    name = getattr(plugin, "engine", None)
    found = next((engine for engine in engines if engine.name == name), next(iter(engines), None))
    if found is None:
        raise TypeError(
            f"Cannot use {plugin!r}: its engine is not part of this installation of accel. Leave it out."
        )
    return found
