"""SwanLab."""

from __future__ import annotations

from typing import Any

import swanlab
from typing_extensions import override

from accel_runtime.tracking.base import Provided, on_main_process
from accel_runtime.tracking.values import curves, deep

__all__ = ["SwanLabTracker"]


class SwanLabTracker(Provided):
    """Hands over to `swanlab`: numbers and its own media; nested names are joined by `/`.

    Args:
        run_name: The project's name; `name` is that of the run.
        **kwargs: For `swanlab.init`.
    """

    name = "swanlab"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @override
    @on_main_process
    def start(self) -> None:
        self.run = swanlab.init(**{"project": self.run_name, **self.init_kwargs})

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
        kept, left = curves(values)
        self.leave_out(left)
        taken = {k: swanlab.Text(v) if isinstance(v, str) else v for k, v in kept.items()}
        self.run.log(taken, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images: arrays `[H, W, C]`, tensors `[C, H, W]`, or PIL images."""
        for key, images in values.items():
            self.run.log({key: [swanlab.Image(image) for image in images]}, step=step, **kwargs)

    @override
    @on_main_process
    def finish(self) -> None:
        self.run.finish()
