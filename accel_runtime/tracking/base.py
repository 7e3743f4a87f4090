"""What a tracker is: the interface that trackers of accel and those of a script share."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from typing_extensions import Self

from accel_runtime.logging import MultiProcessAdapter
from accel_runtime.topology import Topology

__all__ = ["BlankTracker", "GeneralTracker", "Provided", "on_main_process"]

Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(function: Method) -> Method:
    """Make a tracker's method do nothing on other processes, where the tracker is `main_process_only`."""

    @functools.wraps(function)
    def guarded(tracker: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(tracker, "main_process_only", False) and Topology.standing().rank != 0:
            return None
        return function(tracker, *args, **kwargs)

    return cast("Method", guarded)


class GeneralTracker:
    """Base of all trackers; a script's own subclass goes to `Accelerator(log_with=...)`.

    A subclass has a `name`, says whether it `requires_logging_directory`, and has a property `tracker` that
    gives what it wraps. Everything else is optional.

    Raises:
        NotImplementedError: The subclass lacks one of the three.
    """

    name: str
    """What `get_tracker`, `init_kwargs` and `log_kwargs` call it."""
    requires_logging_directory: bool
    """Whether it is made with the logging directory as its second argument."""
    main_process_only: bool = True
    """Whether it records on the first process only; False records on every process."""

    def __init__(self, _blank: bool = False) -> None:
        # `tracker` is usually a property that works only once the tracker has started, so it is not read.
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [] if _blank else [f"`{name}`" for name in needed if name not in dir(self)]
        if missing:
            raise NotImplementedError(f"the tracker {type(self).__name__} has to define {', '.join(missing)}")

    def start(self) -> None:
        """Begin a run; called once, by `Accelerator.init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """Record the run's configuration.

        Args:
            values: Settings by name: truths, numbers, text or None, also nested.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> Any:
        """Record values of the loop.

        Args:
            values: Numbers or text by name.
            step: The step they belong to, counted by the script.
            **kwargs: For this tracker only, from `log_kwargs`.
        """

    def finish(self) -> None:
        """End the run; called once, by `Accelerator.end_training`."""


class BlankTracker(GeneralTracker):
    """What `get_tracker` gives where nothing is recorded: every method does nothing, at any depth."""

    def __init__(self) -> None:
        super().__init__(_blank=True)

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):  # Python asks for these to learn what an object can do
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Self:
        """Do nothing."""
        return self


class Provided(GeneralTracker):
    """What the trackers of this package share: they tell once what their package cannot record."""

    def __init__(self) -> None:
        super().__init__()
        self._logger = MultiProcessAdapter(logging.getLogger(__name__))

    def leave_out(self, values: Mapping[str, Any]) -> None:
        """Say once for every name that its values are not recorded; the values themselves stay private."""
        said = "tracker %r does not record %r: it cannot take %s"
        for key, value in values.items():
            self._logger.warning_once(said, self.name, key, type(value).__name__, main_process_only=False)
