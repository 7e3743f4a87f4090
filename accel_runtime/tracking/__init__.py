"""The one table of trackers: a new one is a file beside this and a line here.

The file, and with it the tracker's package, is imported when the tracker is chosen.
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
    "Known",
    "LoggerType",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]


@dataclass(frozen=True)
class Known:
    """Where a tracker is, and what it needs; known without importing it."""

    module: str
    class_name: str
    package: str | None = None
    """The package it hands over to, by the name that is imported and installed; None needs nothing."""
    directory: bool = False
    """Whether it writes into the logging directory."""

    @property
    def installed(self) -> bool:
        """Whether its package is there."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def load(self) -> type[GeneralTracker]:
        """The class; imports its package."""
        loaded: type[GeneralTracker] = getattr(
            importlib.import_module(f"accel_runtime.tracking.{self.module}"), self.class_name
        )
        return loaded


TRACKERS: Mapping[str, Known] = MappingProxyType(
    {
        "aim": Known("aim", "AimTracker", "aim", directory=True),
        "clearml": Known("clearml", "ClearMLTracker", "clearml"),
        "comet_ml": Known("comet_ml", "CometMLTracker", "comet_ml"),
        "dvclive": Known("dvclive", "DVCLiveTracker", "dvclive"),
        "jsonl": Known("jsonl", "JSONLTracker", directory=True),
        "mlflow": Known("mlflow", "MLflowTracker", "mlflow"),
        "swanlab": Known("swanlab", "SwanLabTracker", "swanlab"),
        "tensorboard": Known("tensorboard", "TensorBoardTracker", "tensorboard", directory=True),
        "trackio": Known("trackio", "TrackioTracker", "trackio"),
        "wandb": Known("wandb", "WandBTracker", "wandb"),
    }
)
"""Every tracker of accel, by the name that `log_with` takes."""


class LoggerType(str, Enum):
    """The names that `log_with` takes; plain text does as well."""

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
    """The trackers whose package is installed: what `log_with="all"` chooses."""
    return [name for name, known in TRACKERS.items() if known.installed]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Check that `log_with` can find this class by its `name`; that it exists is all it takes.

    Raises:
        TypeError: It is no subclass of `GeneralTracker`.
        ValueError: It lacks an attribute, or has a name that is taken.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise TypeError(f"a tracker class is a subclass of GeneralTracker; this is {tracker_class!r}")
    for needed in ("name", "requires_logging_directory"):
        if not hasattr(tracker_class, needed):
            raise ValueError(f"the class {tracker_class.__name__} has to define {needed!r}")
    if tracker_class.name in {*TRACKERS, "all"}:
        raise ValueError(f"{tracker_class.name!r} is the name of another tracker; choose a name of its own")


@functools.cache
def _without_package(tracker: str, known: Known) -> type[GeneralTracker]:
    """Return a class that can be imported and subclassed, and raises ImportError when it is constructed."""

    def init(self: GeneralTracker, *_: Any, **__: Any) -> None:
        raise ImportError(
            f"{type(self).__name__} cannot be made: the package {known.package} is not installed. "
            f"Install it: pip install {known.package}."
        )

    attributes = {
        "__init__": init,
        "__module__": f"{__name__}.{known.module}",
        "name": tracker,
        "requires_logging_directory": known.directory,
    }
    return type(known.class_name, (GeneralTracker,), attributes)


def __getattr__(name: str) -> Any:
    """The class of a tracker, under its name in Accelerate."""
    for tracker, known in TRACKERS.items():
        if known.class_name == name:
            return known.load() if known.installed else _without_package(tracker, known)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
