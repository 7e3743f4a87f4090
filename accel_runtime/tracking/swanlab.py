"""SwanLab."""

from __future__ import annotations

from typing import Any

import swanlab
from typing_extensions import override

from accel_runtime.tracking.base import Provided, on_main_process
from accel_runtime.tracking.values import flat

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
        swanlab.config.update(values)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `Run.log`."""
        every = flat(values)
        left = {key: value for key, value in every.items() if value is None}
        self.leave_out(left)
        self.run.log({k: _taken(v) for k, v in every.items() if k not in left}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images: arrays `[H, W, C]`, tensors `[C, H, W]`, or PIL images."""
        for key, images in values.items():
            self.run.log({key: [swanlab.Image(image) for image in images]}, step=step, **kwargs)

    @override
    @on_main_process
    def finish(self) -> None:
        self.run.finish()


def _taken(value: Any) -> Any:
    return swanlab.Text(value) if isinstance(value, str) else value
