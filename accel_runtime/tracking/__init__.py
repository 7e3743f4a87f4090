"""The table of trackers, and the trackers of a run; a failure of one never ends the training.

A new tracker needs a module in this package and an entry in `TRACKERS`. The module, and with it the package of the tracker,
is imported when `log_with` names the tracker.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from accel_runtime.environment.installation import format_install
from accel_runtime.environment.settings import find_nearest
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.logged_values import mask_login, mask_secrets
from accel_runtime.monitoring.logging import MultiProcessAdapter
from accel_runtime.tracking.base import (
    BlankTracker,
    BuiltInTracker,
    GeneralTracker,
    on_main_process,
)

__all__ = [
    "TRACKERS",
    "GeneralTracker",
    "LoggerType",
    "TrackerEntry",
    "Trackers",
    "choose_trackers",
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
            importlib.import_module(f"accel_runtime.{self.module}"), self.class_name
        )
        return loaded


TRACKERS: Mapping[str, TrackerEntry] = MappingProxyType(
    {
        "aim": TrackerEntry("extensions.trackers.aim", "AimTracker", "aim", directory=True),
        "clearml": TrackerEntry("extensions.trackers.clearml", "ClearMLTracker", "clearml"),
        "comet_ml": TrackerEntry("extensions.trackers.comet_ml", "CometMLTracker", "comet_ml"),
        "dvclive": TrackerEntry("extensions.trackers.dvclive", "DVCLiveTracker", "dvclive"),
        "jsonl": TrackerEntry("tracking.jsonl", "JSONLTracker", directory=True),
        "mlflow": TrackerEntry("extensions.trackers.mlflow", "MLflowTracker", "mlflow"),
        "swanlab": TrackerEntry("extensions.trackers.swanlab", "SwanLabTracker", "swanlab"),
        "tensorboard": TrackerEntry(
            "tracking.tensorboard", "TensorBoardTracker", "tensorboard", directory=True
        ),
        "trackio": TrackerEntry("extensions.trackers.trackio", "TrackioTracker", "trackio"),
        "wandb": TrackerEntry("tracking.wandb", "WandBTracker", "wandb"),
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


class Trackers:
    """Trackers of an `Accelerator`.

    Args:
        log_with: The trackers; see `choose_trackers`.
        logging_dir: The directory of tracker files.
        topology: The topology of this process. Trackers are created on the main process only, unless their
            `main_process_only` is False.

    Raises:
        ValueError: If a tracker is unknown, or needs a directory and has none.
        ImportError: If the package of a tracker is not installed.
        TypeError: If an object is not a tracker.
    """

    def __init__(self, log_with: Any, logging_dir: Path | None, topology: Topology) -> None:
        self.chosen = choose_trackers(log_with, logging_dir)
        """The requested trackers, equal on all processes."""
        self._local = [c for c in self.chosen if topology.rank == 0 or not c.main_process_only]
        self._running: list[_GuardedTracker] = []
        self._started = self._ended = False
        self._logger = MultiProcessAdapter(logging.getLogger("accel_runtime.tracking"))

    @property
    def active(self) -> list[GeneralTracker]:
        """Return the trackers that record on this process."""
        return [running.tracker for running in self._running]

    def begin(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Create and start the trackers; warn about trackers that fail to start, and ignore them afterwards.

        Raises:
            RuntimeError: If the trackers are running already.
            ValueError: If there are arguments for a tracker that `log_with` does not contain, or that the script created.
        """
        if self._started and not self._ended:
            raise RuntimeError(
                "init_trackers failed: the trackers are running already. Call it once, and again only after end_training()."
            )
        options = self._check_names("init_kwargs", init_kwargs)
        for choice in self.chosen:
            if choice.instance is not None and options.get(choice.name):
                raise ValueError(
                    f"init_kwargs has arguments for {choice.name!r}, which the script created already. Pass them to its "
                    "constructor."
                )
        self._started, self._ended = True, False
        self._running = []
        for choice in self._local:
            try:
                tracker = choice.create(project_name, **options.get(choice.name, {}))
                tracker.start()
            except Exception as error:  # noqa: BLE001 - training must not depend on the service of a tracker
                _warn(self._logger, choice.name, "failed to start, and records nothing in this run", error)
            else:
                self._running.append(_GuardedTracker(choice.name, tracker, self._logger))
        if config is not None:
            for running in self._running:
                running.call("store_init_configuration", _store_configuration, running.tracker, config)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Pass values to every tracker that records on this process.

        Raises:
            TypeError: If `values` is not a mapping, or `step` not an integer.
            ValueError: If there are arguments for a tracker that `log_with` does not contain.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"log() cannot record {type(values).__name__}: pass values by name, such as {{'loss': 0.5}}."
            )
        options = self._check_names("log_kwargs", log_kwargs)
        number = None if step is None else operator.index(step)
        if not self._is_recording("log"):
            return
        for running in self._running:
            # A copy for every tracker: some of them modify the mapping.
            running.call(
                "log", running.tracker.log, dict(values), step=number, **options.get(running.name, {})
            )

    def find(self, name: str, *, unwrap: bool = False) -> Any:
        """Return the tracker of a name, or the object it wraps; a blank one on processes that do not record.

        Raises:
            ValueError: If `log_with` contains other trackers, but not this one.
        """
        names = [choice.name for choice in self.chosen]
        if names and name not in names:
            raise ValueError(f"No tracker {name!r} in this run: log_with contains {', '.join(names)}.")
        if self._is_recording("get_tracker"):
            for running in self._running:
                if running.name == name:
                    tracker: Any = running.tracker
                    return tracker.tracker if unwrap else tracker
        return BlankTracker()

    def end(self) -> None:
        """Finish the trackers; a second call does nothing."""
        for running in self._running:
            running.finish()
        self._running = []
        self._ended = True

    def _is_recording(self, method: str) -> bool:
        """Return whether the trackers are running; warn once if a script calls a method when they are not."""
        if self._local and (self._ended or not self._started):
            when = "after end_training" if self._ended else "before init_trackers"
            self._logger.warning_once("%s %s: nothing is recorded", method, when, main_process_only=False)
        return self._started and not self._ended

    def _check_names(
        self, argument: str, kwargs: Mapping[str, Mapping[str, Any]] | None
    ) -> dict[str, Mapping[str, Any]]:
        """Return arguments by tracker, or raise ValueError if `log_with` does not contain one."""
        names = [choice.name for choice in self.chosen]
        by_name = {str(name): options for name, options in (kwargs or {}).items()}
        for name in by_name:
            if names and name not in names:
                suggestion = find_nearest(name, names)
                hint = (
                    f"Did you mean {suggestion!r}?"
                    if suggestion
                    else f"log_with contains {', '.join(names)}."
                )
                raise ValueError(f"{argument} has arguments for {name!r}, not a tracker of this run. {hint}")
        return by_name


class _GuardedTracker:
    """Running tracker; the first failure of each method is logged, and the others are counted."""

    def __init__(self, name: str, tracker: GeneralTracker, logger: MultiProcessAdapter) -> None:
        self.name = name
        self.tracker = tracker
        self._logger = logger
        self._calls: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a method, and log its first failure."""
        self._calls[name] += 1
        try:
            method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - no error of a tracker may end the training
            self._failures[name] += 1
            if self._failures[name] == 1:
                _warn(self._logger, self.name, f"failed in {name}; the training continues", error)

    def finish(self) -> None:
        """Finish the run, and log the number of failures."""
        self.call("finish", self.tracker.finish)
        if self._failures["log"] > 1:
            counts = (self._failures["log"], self._calls["log"])
            self._logger.warning(
                "tracker %r failed in %d of %d calls of log", self.name, *counts, main_process_only=False
            )


def _store_configuration(tracker: GeneralTracker, config: Mapping[str, Any]) -> None:
    # Fields of objects are masked by name too, except for a script's tracker, which gets the objects.
    if isinstance(tracker, BuiltInTracker):
        config = tracker.convert_configuration(config)
    tracker.store_init_configuration(mask_secrets(config))


def _warn(logger: MultiProcessAdapter, name: str, failure: str, error: Exception) -> None:
    text = mask_login(str(error))
    logger.warning(
        "tracker %r %s: %s: %s", name, failure, type(error).__name__, text, main_process_only=False
    )


@dataclass(frozen=True)
class TrackerChoice:
    """Tracker of a run before its creation."""

    name: str
    main_process_only: bool
    create: Callable[..., GeneralTracker]
    """Function of the project name and the arguments of the tracker."""
    instance: GeneralTracker | None = None
    """The tracker, if the script created it."""


def choose_trackers(log_with: Any, logging_dir: Path | None) -> tuple[TrackerChoice, ...]:
    """Return the requested trackers without duplicates.

    Args:
        log_with: Names, members of `LoggerType`, subclasses or instances of `GeneralTracker`; one, or several in
            a list or tuple. `all` means every tracker whose package is installed.
        logging_dir: The directory of tracker files.

    Raises:
        ValueError: If a name is unknown, or a tracker needs a directory and has none.
        ImportError: If the package of a tracker is not installed.
        TypeError: If an object is not a tracker.
    """
    items: list[Any] = []
    for entry in log_with if isinstance(log_with, (list, tuple)) else [log_with]:
        if entry is None:
            continue
        for item in get_available_trackers() if entry == "all" else [entry]:
            name = str(item) if isinstance(item, str) else item
            if not any(name is other or (isinstance(name, str) and name == other) for other in items):
                items.append(name)
    return tuple(_choose(item, logging_dir) for item in items)


def _choose(item: Any, logging_dir: Path | None) -> TrackerChoice:
    if isinstance(item, str) and item in TRACKERS:
        entry = TRACKERS[item]
        if not entry.installed:
            raise ImportError(
                f"log_with={item!r} needs the package {entry.package}. Install it: {format_install(str(entry.package))}"
            )
        directory = _directory_argument(item, entry.directory, logging_dir)
        return TrackerChoice(
            item,
            main_process_only=True,
            create=lambda project, **options: entry.load()(project, *directory, **options),
        )
    if isinstance(item, GeneralTracker):
        if not hasattr(item, "name"):
            raise TypeError(f"Tracker {type(item).__name__} lacks `name`. Define it.")
        # The project name is not used; arguments were refused.
        return TrackerChoice(item.name, item.main_process_only, lambda _: item, item)
    tracker_class: Any = _find_subclass(item) if isinstance(item, str) else item
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise TypeError(
            f"Invalid log_with entry {item!r}: expected a name, a subclass or an instance of GeneralTracker."
        )
    register_tracker_class(tracker_class)
    name = tracker_class.name
    directory = _directory_argument(name, tracker_class.requires_logging_directory, logging_dir)
    create: Any = tracker_class  # a subclass defines its own arguments
    return TrackerChoice(
        name,
        tracker_class.main_process_only,
        lambda project, **options: create(project, *directory, **options),
    )


def _find_subclass(name: str) -> type[GeneralTracker]:
    # The last definition wins: a notebook cell defines its class each time it runs.
    classes = {
        item.name: item for item in _subclasses(GeneralTracker) if isinstance(vars(item).get("name"), str)
    }
    if name in classes:
        return classes[name]
    names = ["all", *TRACKERS, *classes]
    suggestion = find_nearest(name, names)
    hint = f"Did you mean {suggestion!r}? " if suggestion else ""
    raise ValueError(f"Unknown tracker log_with={name!r}. {hint}Available: {', '.join(names)}.")


def _subclasses(parent: type[GeneralTracker]) -> Iterator[type[GeneralTracker]]:
    for child in parent.__subclasses__():
        if not child.__module__.startswith("accel_runtime."):
            yield child
        yield from _subclasses(child)


def _directory_argument(name: str, required: bool, logging_dir: Path | None) -> tuple[str, ...]:
    if not required:
        return ()
    if logging_dir is None:
        raise ValueError(
            f"Tracker {name!r} needs a directory for its files. Pass a local Accelerator(project_dir=...) or "
            "ProjectConfiguration(logging_dir=...)."
        )
    return (str(logging_dir),)


@functools.cache
def _build_placeholder(tracker: str, entry: TrackerEntry) -> type[GeneralTracker]:
    """Return a class that can be imported and subclassed, and raises ImportError when it is constructed."""

    def init(self: GeneralTracker, *_: Any, **__: Any) -> None:
        raise ImportError(
            f"Cannot create {type(self).__name__}: the package {entry.package} is not installed. "
            f"Install it: {format_install(str(entry.package))}"
        )

    attributes = {
        "__init__": init,
        "__module__": f"accel_runtime.{entry.module}",
        "name": tracker,
        "requires_logging_directory": entry.directory,
    }
    return type(entry.class_name, (GeneralTracker,), attributes)


def __getattr__(name: str) -> Any:
    """Return the class of a tracker by its name in Accelerate."""
    for tracker, entry in TRACKERS.items():
        if entry.class_name == name:
            return entry.load() if entry.installed else _build_placeholder(tracker, entry)
    raise AttributeError(f"module 'accel_runtime.tracking' has no attribute {name!r}")
