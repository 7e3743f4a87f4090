"""What the words of Accelerate's sections on sharding become: keys of a profile, and a sentence on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_cli.import_accelerate.fates import NOT_SET, OFF, Fate, left
from accel_cli.import_accelerate.values import Refused, plain, shown
from accel_cli.profile.validation_errors import did_you_mean
from accel_runtime.env import find_nearest

__all__ = ["Around", "Became", "Vocabulary", "Word", "dropped", "kept", "off", "off_or", "said"]


@dataclass(frozen=True)
class Around:
    """What a word means it with: the words beside it, and what else the file says."""

    beside: Mapping[str, Any] = field(default_factory=dict)
    """The section's other values, each without its prefix."""
    machines: int = 1
    idle: str = ""
    """Why it has no say; empty where it has."""
    precision: str = "no"
    """The number format that holds."""
    read: bool = False
    """Whether the file that the section names was found and read."""


@dataclass(frozen=True)
class Became:
    """What a value became."""

    fate: Fate
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the section `fully_shard:`."""


Word = Callable[[Any, Around], Became | Refused]
"""Makes a value what it becomes."""


def kept(text: str) -> Became:
    """It is what accel does anyway."""
    return Became(Fate(text))


def dropped(text: str) -> Became:
    """It has no place in accel, and why."""
    return Became(left(text))


def said(text: str = "", *, taken: bool = True, **keys: Any) -> Became:
    """It is said by keys of `fully_shard:`."""
    lines = ", ".join(f"fully_shard.{key}: {shown(key, value)}" for key, value in keys.items())
    return Became(Fate(f"{lines}{f': {text}' if text else ''}", taken=taken), keys)


def off() -> Became:
    """It asks for nothing."""
    return Became(OFF)


def off_or(found: Became, *values: Any) -> Word:
    """A word that asks for nothing where it is off, or has one of these values."""

    def word(value: Any, _: Around) -> Became:
        return off() if plain(value) in ("", False, *values) else found

    return word


@dataclass(frozen=True)
class Vocabulary:
    """The words of one section."""

    words: Mapping[str, Word]
    """By key, without its prefix."""
    prefix: str = ""
    bare: bool = True
    """Whether Accelerate adds the prefix where it is missing."""

    def word(self, key: str) -> Word | None:
        """What makes a key what it becomes; None for one that Accelerate does not use."""
        return (
            self.words.get(key.removeprefix(self.prefix))
            if self.bare or key.startswith(self.prefix)
            else None
        )

    def own(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a section that are set and used, each without its prefix."""
        used = {key: value for key, value in section.items() if value is not None and self.word(key)}
        return {key.removeprefix(self.prefix): value for key, value in used.items()}

    def fate(self, key: str, value: Any, around: Around) -> Fate:
        """What becomes of a value of a section that was understood, or has no say."""
        word = self.word(key)
        if value is None:
            return NOT_SET
        if word is None:
            return left(f"Accelerate does not use this key either {self._meant(key)}".strip())
        became = word(value, around)
        if isinstance(became, Refused) or (became.keys and around.idle):
            return left(around.idle)
        return became.fate

    def _meant(self, key: str) -> str:
        names = [*(self.prefix + name for name in self.words), *(self.words if self.bare else ())]
        meant = did_you_mean(self.prefix + key if key in self.words else find_nearest(key, names))
        return f"({meant})" if meant else ""
