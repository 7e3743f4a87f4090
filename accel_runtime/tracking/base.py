"""The interface of trackers, and conversions of logged values."""

from __future__ import annotations

import functools
import logging
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from typing_extensions import Self, override

from accel_runtime.logging import MultiProcessAdapter, find_topology

__all__ = [
    "BlankTracker",
    "BuiltInTracker",
    "GeneralTracker",
    "RunTracker",
    "finite_or_text",
    "flatten_values",
    "mask_login",
    "mask_secrets",
    "on_main_process",
    "split_curves",
    "split_numbers",
    "to_number",
    "to_numbers",
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

    def leave_out(self, values: Mapping[str, Any]) -> None:
        """Warn once per name that its values are not recorded, without showing the values."""
        message = "tracker %r does not record %r: it does not support %s"
        for key, value in values.items():
            self._logger.warning_once(message, self.name, key, type(value).__name__, main_process_only=False)


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
    size = getattr(value, "numel", lambda: getattr(value, "size", None))()
    return value.item() if size == 1 else value


_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def finite_or_text(number: float) -> float | str:
    """Return a number, or the text `NaN`, `Infinity` or `-Infinity`, since JSON supports finite numbers only."""
    return number if math.isfinite(number) else _NON_FINITE[str(number)]


def to_numbers(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a mapping with `to_number` of every value, at any depth."""
    return {
        key: to_numbers(value) if isinstance(value, Mapping) else to_number(value)
        for key, value in values.items()
    }


def flatten_values(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, with names joined by `/` and `to_number` of every value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten_values(value, f"{name}/") if isinstance(value, Mapping) else {name: to_number(value)}
    return flat


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
        self.run.config.update(to_numbers(values))

    @override
    @on_main_process
    def finish(self) -> None:
        self.run.finish()
