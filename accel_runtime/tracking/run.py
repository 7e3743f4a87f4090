"""What trackers share that make a run of their package and hand everything to it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from typing_extensions import override

from accel_runtime.tracking.base import Provided, on_main_process
from accel_runtime.tracking.values import deep

__all__ = ["RunTracker"]


class RunTracker(Provided):
    """Hands over to a run.

    Args:
        run_name: The project's name; `name` is that of the run.
        **kwargs: For the package's `init`.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @abstractmethod
    def make_run(self, **options: Any) -> Any:
        """The run of the package."""

    @override
    @on_main_process
    def start(self) -> None:
        self.run = self.make_run(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(deep(values))

    @override
    @on_main_process
    def finish(self) -> None:
        self.run.finish()
