"""Trackio tracker."""

from __future__ import annotations

from typing import Any

import trackio
from typing_extensions import override

from accel_runtime.foundation.logged_values import to_numbers
from accel_runtime.tracking.base import RunTracker, on_main_process

__all__ = ["TrackioTracker"]


class TrackioTracker(RunTracker):
    """Log to `trackio`.

    Args:
        run_name: The name of the project; `name` is that of the run.
        **kwargs: Arguments of `trackio.init`.
    """

    name = "trackio"

    @override
    def make_run(self, **options: Any) -> Any:
        return trackio.init(**options)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `Run.log`."""
        points = to_numbers(values)
        arrays = {key: value for key, value in points.items() if callable(getattr(value, "tolist", None))}
        self.leave_out(arrays)
        self.run.log({k: v for k, v in points.items() if k not in arrays}, step=step, **kwargs)
