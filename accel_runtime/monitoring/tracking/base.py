"""The interface of trackers, and conversions of logged values."""

from __future__ import annotations

import functools
import logging
import math
import re
import sys
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from typing_extensions import Self, override

from accel_runtime.monitoring.logging import MultiProcessAdapter, find_topology

__all__ = [
    "BlankTracker",
    "BuiltInTracker",
    "GeneralTracker",
    "RunTracker",
    "add_suffix",
    "finite_or_text",
    "flatten_values",
    "mask_login",
    "mask_secrets",
    "on_main_process",
    "split_curves",
    "split_numbers",
    "to_number",
    "to_numbers",
    "to_plain",
    "with_text_names",
]

Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(function: Method) -> Method:
    """Run a method on the main process only, if the tracker is `main_process_only`."""

    @functools.wraps(function)
    def guarded(tracker: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(tracker, "main_process_only", False) and find_topology().rank != 0:
            return None
        return function(tracker, *args, **kwargs)

    return cast("Method", guarded)


class GeneralTracker:
    """Base of all trackers; pass your own subclass to `Accelerator(log_with=...)`.

    A subclass must define `name`, `requires_logging_directory`, and a property `tracker` that returns the wrapped object.
    All methods are optional.

    Raises:
        NotImplementedError: If the subclass lacks one of the three.
    """

    name: str
    """The name in `get_tracker`, `init_kwargs` and `log_kwargs`."""
    requires_logging_directory: bool
    """If True, the second argument of the constructor is the logging directory."""
    main_process_only: bool = True
    """If True, it records on the main process only; otherwise on every process."""

    def __init__(self, _blank: bool = False) -> None:
        # `tracker` is usually a property that works only once the tracker has started, so it is not read.
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [] if _blank else [f"`{name}`" for name in needed if name not in dir(self)]
        if missing:
            raise NotImplementedError(
                f"Tracker {type(self).__name__} lacks {', '.join(missing)}. Define them."
            )

    def start(self) -> None:
        """Start a run; `Accelerator.init_trackers` calls it once."""

    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """Record the configuration of the run.

        Args:
            values: Settings by name: booleans, numbers, text or None, also nested.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> Any:
        """Record values of a step.

        Args:
            values: Numbers or text by name.
            step: The step, counted by the script.
            **kwargs: Arguments of this tracker in `log_kwargs`.
        """

    def finish(self) -> None:
        """Finish the run; `Accelerator.end_training` calls it once."""


class BlankTracker(GeneralTracker):
    """Tracker for processes that do not record: every method and attribute does nothing, at any depth."""

    def __init__(self) -> None:
        super().__init__(_blank=True)

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):  # Python uses these to detect protocols
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Self:
        """Do nothing."""
        return self


class BuiltInTracker(GeneralTracker):
    """Base of the trackers of this package; warn once about values that a tracker does not support.

    Args:
        run_name: The name of the project, or of the run.
        **kwargs: Arguments of the package's constructor of a run.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._logger = MultiProcessAdapter(logging.getLogger(__name__))

    def leave_out(self, values: Mapping[str, Any], reason: str | None = None) -> None:
        """Warn once per name that its values are not recorded, without showing the values."""
        for key, value in values.items():
            self._logger.warning_once(
                "tracker %r does not record %r: %s",
                self.name,
                key,
                reason or f"it does not support {type(value).__name__}",
                main_process_only=False,
            )

    def convert_configuration(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        """Return `to_plain` of a configuration; warn once about each array that is too large for it."""
        large: dict[str, Any] = {}
        plain = to_plain(values, large)
        self.leave_out(large, f"it has more than {_MAX_ELEMENTS} elements")
        return plain


# `token` alone would hide `max_tokens` and `pad_token_id`, which are not secret.
_SECRET = re.compile(
    r"secret|password|passwd|credential|private_?key|api_?key|access_?key|cookie|(^|[_.-])(auth|pat)$|(^|[_.-])token$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


def to_number(value: Any) -> Any:
    """Convert a tensor, array or NumPy scalar of one element to a Python number; return other values unchanged."""
    if isinstance(value, (bool, int, float, str)) or not callable(getattr(value, "item", None)):
        # A NumPy float64 is a Python float too, and text formats would print its type.
        return float(value) if isinstance(value, float) else value
    if count_elements(value) != 1 or _is_dtensor(value):
        # The value of a DTensor would need a collective, which only this rank would call.
        return value
    try:
        return value.item()
    except Exception:  # noqa: BLE001 - a tensor may have no value, such as one on the meta device
        return value


def _is_dtensor(value: Any) -> bool:
    # torch is not imported for a tracker alone.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def count_elements(array: Any) -> Any:
    """Return the number of elements of a tensor or array."""
    return getattr(array, "numel", lambda: getattr(array, "size", None))()


_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def finite_or_text(number: float) -> float | str:
    """Return a number, or the text `NaN`, `Infinity` or `-Infinity`, since JSON supports finite numbers only."""
    return number if math.isfinite(number) else _NON_FINITE[str(number)]


_MAX_ELEMENTS = 1024
"""The most elements of an array in a configuration."""
_MAX_DEPTH = 32
"""The most levels of a configuration; deeper ones, such as those of an object that contains itself, become text."""


_BITS = 64
"""Integers with fewer bits, without the sign, are numbers in every format."""
_LISTS = (list, tuple, set, frozenset, range)


def to_plain(values: Mapping[Any, Any], large: dict[str, Any]) -> dict[str, Any]:
    """Convert a configuration to one that every format of settings supports.

    Names become text. Values become booleans, finite numbers, text, None, lists and mappings: those of a dataclass or a
    namespace are its fields, and other objects are their text. Arrays with too many elements are moved to `large`, by name.
    """
    converted = _convert(values, "", large, 0)
    assert isinstance(converted, dict)
    return converted


def _convert(value: Any, name: str, large: dict[str, Any], depth: int) -> Any:
    """Convert a value of a configuration, or the configuration itself, whose name is empty."""
    value = _to_scalar(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > _MAX_DEPTH:
        return str(value)
    entries = dict(enumerate(value)) if isinstance(value, _LISTS) else _read_fields(value)
    if entries is None:
        return str(value)
    names = {key: f"{name}/{key}" if name else str(key) for key in entries}
    for key, item in entries.items():
        if callable(getattr(item, "tolist", None)) and count_elements(item) > _MAX_ELEMENTS:
            large[names.pop(key)] = item
    converted = {key: _convert(entries[key], path, large, depth + 1) for key, path in names.items()}
    return list(converted.values()) if isinstance(value, _LISTS) else with_text_names(converted)


def _to_scalar(value: Any) -> Any:
    """Return a value as a plain number, text or list, if it is one; return others unchanged."""
    value = to_number(value.value if isinstance(value, Enum) else value)
    if isinstance(value, float):
        return finite_or_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value) if value.bit_length() < _BITS else str(int(value))
    if isinstance(value, str):
        return str.__str__(value)
    if callable(getattr(value, "tolist", None)) and not _is_dtensor(value):
        with suppress(Exception):  # a tensor on the meta device has no elements
            return value.tolist()
    return value


def _read_fields(value: Any) -> Mapping[Any, Any] | None:
    """Return the items of a mapping, dataclass or namespace, or None if it is something else."""
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return vars(value) if isinstance(value, (Namespace, SimpleNamespace)) else None


def with_text_names(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping whose names are text: `1` is `"1"`, or `"1_2"` if there is another `"1"`."""
    named = {name: value for name, value in values.items() if type(name) is str}
    if len(named) == len(values):
        return named
    named = {}
    taken = {name for name in values if type(name) is str}
    for key, value in values.items():
        name = key
        if type(key) is not str:
            name = add_suffix(_name_of(key), taken)
            taken.add(name)
        named[name] = value
    return named


def _name_of(key: Any) -> str:
    return str(key.value if isinstance(key, Enum) else key)


def add_suffix(name: str, taken: Container[str]) -> str:
    """Return the name, with `_2`, `_3`, ... if it is taken."""
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    return unique


def to_numbers(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping with text as names and `to_number` of every value, at any depth."""
    return {
        key: to_numbers(value) if isinstance(value, Mapping) else to_number(value)
        for key, value in with_text_names(values).items()
    }


def flatten_values(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Flatten nested mappings, with names joined by `/` and `to_number` of every value.

    A name that occurs twice, such as `a/b` and `b` in `a`, gets a suffix. An empty mapping is a value.
    """
    flat: dict[str, Any] = {}
    for name, value in _list_leaves(values, ""):
        flat[add_suffix(name, flat)] = value
    return flat


def _list_leaves(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in with_text_names(values).items():
        if isinstance(value, Mapping) and value:
            yield from _list_leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", to_number(value)


def split_numbers(values: Mapping[Any, Any]) -> tuple[dict[str, int | float], dict[str, Any]]:
    """Split flattened values into numbers and others."""
    flat = flatten_values(values)
    numbers = {key: value for key, value in flat.items() if isinstance(value, (bool, int, float))}
    return numbers, {key: value for key, value in flat.items() if key not in numbers}


def split_curves(values: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split flattened values into points of curves and media, and others: None and arrays."""
    flat = flatten_values(values)
    others = {k: v for k, v in flat.items() if v is None or callable(getattr(v, "tolist", None))}
    return {key: value for key, value in flat.items() if key not in others}, others


def mask_secrets(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Mask values whose name looks like a secret, and logins in URLs, by `***`."""
    return {key: _mask_value(str(key), value) for key, value in values.items()}


def _mask_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return mask_secrets(value)
    if type(value) in {list, tuple}:
        return type(value)(_mask_value(name, item) for item in value)
    if isinstance(value, (str, int, float)) and not isinstance(value, bool) and _SECRET.search(name):
        return _HIDDEN if value else value
    return mask_login(value) if isinstance(value, str) else value


def mask_login(text: str) -> str:
    """Mask logins in the URLs of a text."""
    return _IN_URL.sub(_HIDDEN, text)


class RunTracker(BuiltInTracker):
    """Base of trackers that wrap a run object.

    Args:
        run_name: The name of the project; `name` is that of the run.
        **kwargs: Arguments of the package's `init`.
    """

    @abstractmethod
    def make_run(self, **options: Any) -> Any:
        """Start a run of the package and return it."""

    @override
    @on_main_process
    def start(self) -> None:
        self.run = self.make_run(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """Return the run."""
        return self.run

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(self.convert_configuration(values))

    @override
    @on_main_process
    def finish(self) -> None:
        self.run.finish()
