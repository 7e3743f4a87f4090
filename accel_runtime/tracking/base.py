"""The interface of trackers, and conversions of logged values."""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar, cast

from typing_extensions import override

from accel_runtime.foundation.logged_values import MAX_ELEMENTS, to_plain
from accel_runtime.monitoring.logging import MultiProcessAdapter, find_topology

__all__ = [
    "BlankTracker",
    "BuiltInTracker",
    "GeneralTracker",
    "RunTracker",
    "on_main_process",
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
        self.leave_out(large, f"it has more than {MAX_ELEMENTS} elements")
        return plain


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
