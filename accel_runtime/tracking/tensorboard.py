"""TensorBoard tracker, which writes event files into the logging directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter
from typing_extensions import override

from accel_runtime.foundation.logged_values import flatten_values, split_numbers, to_number, with_text_names
from accel_runtime.tracking.base import BuiltInTracker, on_main_process

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(BuiltInTracker):
    """Log numbers as scalars, text as text, and a mapping of numbers as several curves of one chart.

    Args:
        run_name: The name of the project; a directory in `logging_dir`.
        logging_dir: The parent directory of the event files.
        **kwargs: Arguments of `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = Path(logging_dir) / run_name

    @override
    @on_main_process
    def start(self) -> None:
        self.writer = SummaryWriter(str(self.logging_dir), **self.init_kwargs)

    @property
    def tracker(self) -> SummaryWriter:
        """Return the writer."""
        return self.writer

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the configuration as hyperparameters and in a file `hparams.yml`."""
        simple = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in flatten_values(self.convert_configuration(values)).items()
        }
        run = str(time.time())
        self.writer.add_hparams(simple, {}, run_name=run)
        self.writer.flush()
        (self.logging_dir / run / "hparams.yml").write_text(yaml.safe_dump(simple), encoding="utf-8")

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to the writer's `add_scalar`, `add_text` or `add_scalars`."""
        for key, raw in with_text_names(values).items():
            value = to_number(raw)
            if isinstance(value, (bool, int, float)):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                numbers, others = split_numbers(value)
                self.writer.add_scalars(key, numbers, global_step=step, **kwargs)
                self.leave_out({f"{key}/{name}": other for name, other in others.items()})
            else:
                self.leave_out({key: value})
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record batches of images, `[N, C, H, W]` unless `dataformats` is passed."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)

    @override
    @on_main_process
    def finish(self) -> None:
        self.writer.close()
