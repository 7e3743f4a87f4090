"""SwanLab tracker."""

from __future__ import annotations

from typing import Any

import swanlab
from typing_extensions import override

from accel_runtime.foundation.logged_values import split_curves
from accel_runtime.tracking.base import RunTracker, on_main_process

__all__ = ["SwanLabTracker"]


class SwanLabTracker(RunTracker):
    """Log numbers and media to `swanlab`; nested names are joined by `/`.

    Args:
        run_name: The name of the project; `name` is that of the run.
        **kwargs: Arguments of `swanlab.init`.
    """

    name = "swanlab"

    @override
    def make_run(self, **options: Any) -> Any:
        return swanlab.init(**options)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `Run.log`."""
        points, others = split_curves(values)
        self.leave_out(others)
        points = {k: swanlab.Text(v) if isinstance(v, str) else v for k, v in points.items()}
        self.run.log(points, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images: arrays `[H, W, C]`, tensors `[C, H, W]`, or PIL images."""
        for key, images in values.items():
            self.run.log({key: [swanlab.Image(image) for image in images]}, step=step, **kwargs)
