"""Base of the objects with which scripts configure an `Accelerator`: ordinary dataclasses, checked on assignment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast
from weakref import WeakMethod

from accel_runtime.env import nearest

__all__ = ["Configuration"]

_OPEN_SWITCHES = ("bool | None", bool | None)
_SWITCHES = ("bool", bool, *_OPEN_SWITCHES)
"""Types of fields that are True or False, as text in modules whose annotations are not evaluated."""


class Configuration:
    """Base of dataclasses that check a field when it is assigned, as the constructor does.

    A refused assignment leaves the old value in place. Subclasses override `_check`; the `Accelerator` that uses an object
    observes it. See docs/design/configuration.md.
    """

    # A slot: `vars()` of an object holds its fields only, which scripts print, copy and send.
    __slots__ = ("_observers",)

    def __post_init__(self) -> None:
        self._check_switches()
        self._check()

    def _check_switches(self) -> None:
        """Raise ValueError if a field that is True or False has another value: a text such as 'False' would count as True."""
        for field in fields(cast("Any", self)):
            value = getattr(self, field.name)
            if field.type not in _SWITCHES or (value is None and field.type in _OPEN_SWITCHES):
                continue
            if isinstance(value, str) or value not in (True, False):
                choices = "True, False or None" if field.type in _OPEN_SWITCHES else "True or False"
                raise ValueError(f"{type(self).__name__}.{field.name} must be {choices}; it is {value!r}")

    def _check(self) -> None:
        """Raise ValueError if the fields contradict each other, or one has a value without a meaning."""

    def __setattr__(self, name: str, value: Any) -> None:
        known: list[str] = list(getattr(self, "__dataclass_fields__", ()))
        if name not in known and not name.startswith("_"):
            raise AttributeError(self._unknown(name, known))
        if name not in vars(self) or name.startswith("_"):  # the constructor is at work
            object.__setattr__(self, name, value)
            return
        before = vars(self)[name]
        object.__setattr__(self, name, value)
        try:
            self._check_switches()
            self._check()
            if getattr(self, name) != before:
                self._notify(name)
        except Exception:
            object.__setattr__(self, name, before)
            raise

    def _unknown(self, name: str, known: list[str]) -> str:
        meant = nearest(name, known)
        cure = f"Did you mean {meant}?" if meant else f"Its fields are {', '.join(known)}."
        return f"Cannot set {type(self).__name__}.{name}: it has no such field. {cure}"

    def _notify(self, name: str) -> None:
        for reference in getattr(self, "_observers", ()):
            if (changed := reference()) is not None:
                changed(self, name)

    def observe(self, changed: Callable[[Any, str], None]) -> None:
        """Call a bound method, of an object that is not kept alive, with this object and the name of each field that changes.

        If it raises, the field keeps its old value.
        """
        known = getattr(self, "_observers", ())
        others = [other for other in known if other() is not None and other() != changed]
        object.__setattr__(self, "_observers", (*others, WeakMethod(changed)))

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, copied."""
        return copy.deepcopy(vars(self))
