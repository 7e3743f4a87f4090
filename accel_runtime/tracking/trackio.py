"""Trackio."""

from __future__ import annotations

from typing import Any

import trackio
from typing_extensions import override

from accel_runtime.tracking.base import Provided, on_main_process
from accel_runtime.tracking.values import deep

__all__ = ["TrackioTracker"]


class TrackioTracker(Provided):
    """Hands over to `trackio`.

    Args:
        run_name: The project's name; `name` is that of the run.
        **kwargs: For `trackio.init`.
    """

    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @override
    @on_main_process
    def start(self) -> None:
        self.run = trackio.init(**{"project": self.run_name, **self.init_kwargs})

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
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `Run.log`."""
        kept = deep(values)
        left = {key: value for key, value in kept.items() if callable(getattr(value, "tolist", None))}
        self.leave_out(left)
        self.run.log({k: v for k, v in kept.items() if k not in left}, step=step, **kwargs)

    @override
    @on_main_process
    def finish(self) -> None:
        self.run.finish()
