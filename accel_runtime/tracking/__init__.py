"""The table of trackers; a new tracker needs a module in this package and an entry in `TRACKERS`.

The module, and with it the package of the tracker, is imported when `log_with` names the tracker.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from accel_runtime.tracking.base import GeneralTracker, on_main_process

__all__ = [
    "TRACKERS",
    "GeneralTracker",
    "LoggerType",
    "TrackerEntry",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]


@dataclass(frozen=True)
class TrackerEntry:
    """Module and requirements of a tracker, available without importing it."""

    module: str
    class_name: str
    package: str | None = None
    """The package it needs, by the name of its import and installation; None if it needs none."""
    directory: bool = False
    """If True, it writes into the logging directory."""

    @property
    def installed(self) -> bool:
        """Return whether its package is installed."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def load(self) -> type[GeneralTracker]:
        """Import the package and return the class."""
        loaded: type[GeneralTracker] = getattr(
            importlib.import_module(f"accel_runtime.tracking.{self.module}"), self.class_name
        )
        return loaded


TRACKERS: Mapping[str, TrackerEntry] = MappingProxyType(
    {
        "aim": TrackerEntry("aim", "AimTracker", "aim", directory=True),
        "clearml": TrackerEntry("clearml", "ClearMLTracker", "clearml"),
        "comet_ml": TrackerEntry("comet_ml", "CometMLTracker", "comet_ml"),
        "dvclive": TrackerEntry("dvclive", "DVCLiveTracker", "dvclive"),
        "jsonl": TrackerEntry("jsonl", "JSONLTracker", directory=True),
        "mlflow": TrackerEntry("mlflow", "MLflowTracker", "mlflow"),
        "swanlab": TrackerEntry("swanlab", "SwanLabTracker", "swanlab"),
        "tensorboard": TrackerEntry("tensorboard", "TensorBoardTracker", "tensorboard", directory=True),
        "trackio": TrackerEntry("trackio", "TrackioTracker", "trackio"),
        "wandb": TrackerEntry("wandb", "WandBTracker", "wandb"),
    }
)
"""The trackers of accel by their names in `log_with`."""


class LoggerType(str, Enum):
    """Names for `log_with`, which accepts plain text, too."""

    ALL = "all"
    AIM = "aim"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    DVCLIVE = "dvclive"
    JSONL = "jsonl"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"

    @override
    def __str__(self) -> str:
        return self.value


def get_available_trackers() -> list[str]:
    """Return the trackers whose package is installed, as `log_with="all"` selects them."""
    return [name for name, entry in TRACKERS.items() if entry.installed]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Check that `log_with` can find a class by its `name`; no registration is needed.

    Raises:
        TypeError: If it is not a subclass of `GeneralTracker`.
        ValueError: If it lacks an attribute, or another tracker has its name.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise TypeError(f"Invalid tracker class {tracker_class!r}: expected a subclass of GeneralTracker.")
    for needed in ("name", "requires_logging_directory"):
        if not hasattr(tracker_class, needed):
            raise ValueError(f"Tracker class {tracker_class.__name__} lacks {needed!r}. Define it.")
    if tracker_class.name in {*TRACKERS, "all"}:
        raise ValueError(
            f"Tracker name {tracker_class.name!r} is used by a tracker of accel. Choose another name."
        )


@functools.cache
def _build_placeholder(tracker: str, entry: TrackerEntry) -> type[GeneralTracker]:
    """Return a class that can be imported and subclassed, and raises ImportError when it is constructed."""

    def init(self: GeneralTracker, *_: Any, **__: Any) -> None:
        raise ImportError(
            f"Cannot create {type(self).__name__}: the package {entry.package} is not installed. "
            f"Install it: pip install {entry.package}."
        )

    attributes = {
        "__init__": init,
        "__module__": f"{__name__}.{entry.module}",
        "name": tracker,
        "requires_logging_directory": entry.directory,
    }
    return type(entry.class_name, (GeneralTracker,), attributes)


def __getattr__(name: str) -> Any:
    """Return the class of a tracker by its name in Accelerate."""
    for tracker, entry in TRACKERS.items():
        if entry.class_name == name:
            return entry.load() if entry.installed else _build_placeholder(tracker, entry)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
