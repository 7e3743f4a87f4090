"""Trackio."""

from __future__ import annotations

from typing import Any

import trackio
from typing_extensions import override

from accel_runtime.tracking.base import on_main_process
from accel_runtime.tracking.run import RunTracker
from accel_runtime.tracking.values import deep

__all__ = ["TrackioTracker"]


class TrackioTracker(RunTracker):
    """Hands over to `trackio`.

    Args:
        run_name: The project's name; `name` is that of the run.
        **kwargs: For `trackio.init`.
    """

    name = "trackio"

    @override
    def make_run(self, **options: Any) -> Any:
        return trackio.init(**options)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `Run.log`."""
        kept = deep(values)
        left = {key: value for key, value in kept.items() if callable(getattr(value, "tolist", None))}
        self.leave_out(left)
        self.run.log({k: v for k, v in kept.items() if k not in left}, step=step, **kwargs)
