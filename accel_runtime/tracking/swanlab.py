"""SwanLab."""

from __future__ import annotations

from typing import Any

import swanlab
from typing_extensions import override

from accel_runtime.tracking.base import on_main_process
from accel_runtime.tracking.run import RunTracker
from accel_runtime.tracking.values import curves

__all__ = ["SwanLabTracker"]


class SwanLabTracker(RunTracker):
    """Hands over to `swanlab`: numbers and its own media; nested names are joined by `/`.

    Args:
        run_name: The project's name; `name` is that of the run.
        **kwargs: For `swanlab.init`.
    """

    name = "swanlab"

    @override
    def make_run(self, **options: Any) -> Any:
        return swanlab.init(**options)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `Run.log`."""
        kept, left = curves(values)
        self.leave_out(left)
        taken = {k: swanlab.Text(v) if isinstance(v, str) else v for k, v in kept.items()}
        self.run.log(taken, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images: arrays `[H, W, C]`, tensors `[C, H, W]`, or PIL images."""
        for key, images in values.items():
            self.run.log({key: [swanlab.Image(image) for image in images]}, step=step, **kwargs)
