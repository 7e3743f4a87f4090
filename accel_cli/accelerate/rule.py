"""A rule of a key in a config file of Accelerate, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accel_cli.accelerate.config import AccelerateConfig, Parser, format_value, keep, normalize
from accel_runtime.environment.accelerate.setting import Setting

__all__ = ["EMPTY", "OFF", "Answer", "EngineRules", "Rule", "drop", "dropped", "same", "sets", "take"]


@dataclass(frozen=True)
class Answer:
    """The result of converting a key."""

    text: str
    """The keys of the profile that it becomes, or the reason why it becomes none."""
    is_applied: bool = True
    """False if accel does not do what the key asks for."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values that it sets, by dotted key of the profile."""


@dataclass(frozen=True)
class Rule:
    """A row of a table: how a key is converted."""

    convert: Callable[[Any, AccelerateConfig], Answer]
    """Returns the answer for a parsed value."""
    parse: Parser = keep
    off: tuple[str, ...] = ()
    """The normalized values that ask for nothing."""
    target: str = ""
    """The dotted key of the profile, if the key is only renamed."""

    def apply(self, value: Any, config: AccelerateConfig) -> Answer:
        """Return the answer for a value of the file.

        Raises:
            InvalidValueError: The key does not accept the value.
        """
        if value is None:
            return Answer("not set")
        if normalize(value) in self.off:
            return OFF
        parsed = self.parse(value)
        return OFF if normalize(parsed) in self.off else self.convert(parsed, config)


OFF = Answer("off in accel as well")
EMPTY = ("", "false", "[]", "{}")


def take(target: str, parse: Parser, *off: str) -> Rule:
    """Return the rule of a key that the profile has under another name."""
    return Rule(lambda value, _: sets({target: value}), parse, (*EMPTY, *off), target)


def same(text: str, *values: Any, parse: Parser = keep) -> Rule:
    """Return the rule of a key that asks for what accel does anyway; with values, only if it has one of them."""
    return Rule(
        lambda value, _: Answer(text, is_applied=not values or value in values),
        parse,
        () if values else EMPTY,
    )


def drop(reason: str, *off: str, parse: Parser = keep) -> Rule:
    """Return the rule of a key that no profile has."""
    return Rule(lambda *_: dropped(reason), parse, (*EMPTY, *off))


def dropped(reason: str) -> Answer:
    """Return the answer for a key that is left out."""
    return Answer(reason, is_applied=False)


def sets(values: Mapping[str, Any], note: str = "") -> Answer:
    """Return the answer for a key that sets values of the profile."""
    text = ", ".join(f"{key}: {format_value(key, value)}" for key, value in values.items())
    return Answer(f"{text} ({note})" if note else text, values=values)


class EngineRules(NamedTuple):
    """The rules of an engine."""

    converted: Mapping[Setting, Rule]
    """Those of settings whose result depends on other keys."""
    section: str
    """The key of Accelerate that names the file of the engine."""
    file: Mapping[str, Rule]
    """Those of the keys of that file; a key with no row has that of its section."""
    keys: frozenset[str]
    """Keys at the top of such a file."""
