"""The form of the vocabulary: a setting of Accelerate, the values of its key, and a section of the config file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

__all__ = ["Choices", "ConfigSection", "IntegerRange", "Setting", "Values"]


@dataclass(frozen=True)
class Choices:
    """Values that are words, in any case."""

    words: tuple[str, ...]
    """The words, as the config file spells them."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other values of a word, in lower case."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The reasons why accel does not have a value of Accelerate, by value in lower case."""


@dataclass(frozen=True)
class IntegerRange:
    """Values that are integers in a range, with both ends."""

    minimum: int
    maximum: int | None = None
    auto: int | None = None
    """One more number: the value is then chosen."""


Values = (
    Choices
    | IntegerRange
    | Literal[
        "any",
        "boolean",
        "text",
        "texts",
        "class names",
        "host",
        "GPU ids",
        "instance type",
        "keys and values",
        "module names",
    ]
)
"""The values that a key accepts."""


@dataclass(frozen=True, eq=False)
class Setting:
    """A setting of Accelerate: its names, the values it accepts, and its meaning in accel.

    A key of the config file becomes the variable, which means `profile_key`; or it is left out for a `reason`, unless
    its value asks for what accel does anyway. For a key of the launcher, the importer has a function.
    """

    key: str = ""
    """Its key in the config file; empty if it has none."""
    _: KW_ONLY
    options: tuple[str, ...] = ()
    """Its options of `accelerate launch` without `--`, if they are not named as the key."""
    is_switch: bool = False
    """True if its option takes no value."""
    variable: str = ""
    argument: str = ""
    """Its argument of the plugin, or of `Accelerator`."""
    aliases: tuple[str, ...] = ()
    """Other names, of FSDP1 itself."""

    values: Values = "any"
    """The values of its key, and of its variable if these are words."""
    off: tuple[str, ...] = ()
    """Values of its key, in lower case, with which it has no effect; an empty value and `false` are among them anyway."""
    same: tuple[Any, ...] | None = None
    """Values that ask for what accel does anyway."""
    takes_any_value: bool = False
    """True if every value of its key asks for what accel does anyway."""

    profile_key: str = ""
    """The dotted key of the profile that it means."""
    reason: str = ""
    """The reason why a profile does not have it: what accel does anyway with values that are the `same`, or what to do instead."""
    advice: str = ""
    """What to do instead of its option; empty if `accel launch` has the option, or Accelerate has none."""
    equivalent: str = ""
    """What a profile has instead, for a hint about its key in a profile."""
    instead: str = ""
    """What to say in `fully_shard:` or in the plugin instead."""
    hint: str = ""
    """What to set instead of an invalid value of its variable; a sentence with a space before it."""
    refusal: str = ""
    """The reason why its variable is rejected, with what to set instead."""
    launch_default: str | None = None
    """The value of its variable that Accelerate's launcher sets if the file has no such key; None if it then sets none."""

    @property
    def option(self) -> str:
        """The first of its options, as accel spells it: with `-` for `_`."""
        return (self.options or (self.key,))[0].replace("_", "-")

    @property
    def field(self) -> str:
        """The field of `Settings` that it means, in its flat form: `fully_shard_wrap`."""
        return self.profile_key.replace(".", "_")

    @property
    def words(self) -> tuple[str, ...]:
        """The values in lower case; empty if they are not words."""
        return tuple(map(str.lower, self.values.words)) if isinstance(self.values, Choices) else ()

    @property
    def same_texts(self) -> frozenset[str]:
        """The texts of `same`, in lower case; a boolean is a word or a number."""
        texts = {True: ("true", "1"), False: ("false", "0")}
        return frozenset(
            text
            for value in self.same or ()
            for text in (texts[value] if isinstance(value, bool) else (str(value).lower(),))
        )


@dataclass(frozen=True)
class ConfigSection:
    """A section of the config file."""

    key: str
    settings: tuple[Setting, ...] = ()
    prefix: str = ""
    """The prefix that Accelerate adds to keys without it."""
    reason: str = ""
    """The reason why all other keys are left out; empty if it has no other keys."""
    off: tuple[str, ...] = ()
    """Values of other keys with which they have no effect."""
    distributed_type: str = ""
    """The `distributed_type` that uses it; empty if all do."""
    variable_prefix: str = ""
    """The prefix of the variables of all other keys; empty if they have none."""
    equivalent: str = ""
    """What a profile has instead, for a hint about its key in a profile."""
