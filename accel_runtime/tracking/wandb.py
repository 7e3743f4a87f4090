"""Weights & Biases tracker."""

from __future__ import annotations

from typing import Any

import wandb
from typing_extensions import override

from accel_runtime.foundation.logged_values import to_numbers
from accel_runtime.tracking.base import RunTracker, on_main_process

__all__ = ["WandBTracker"]


class WandBTracker(RunTracker):
    """Log numbers, text, nested mappings and media to `wandb`.

    Args:
        run_name: The name of the project; `name` is that of the run.
        **kwargs: Arguments of `wandb.init`.
    """

    name = "wandb"

    @override
    def make_run(self, **options: Any) -> Any:
        return wandb.init(**options)

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(self.convert_configuration(values), allow_val_change=True)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `Run.log`."""
        plain = to_numbers(values)
        try:
            self.run.log(plain, step=step, **kwargs)
        except (TypeError, ValueError):
            # wandb rejects all values because of one.
            for key, value in plain.items():
                try:
                    self.run.log({key: value}, step=step, **{**kwargs, "commit": False})
                except (TypeError, ValueError):
                    self.leave_out({key: value})
            self.run.log({}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images: arrays `[H, W, C]`, tensors `[C, H, W]`, or PIL images."""
        for key, images in values.items():
            self.run.log({key: [wandb.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table: `columns` and rows of `data`, or a `dataframe`."""
        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)
