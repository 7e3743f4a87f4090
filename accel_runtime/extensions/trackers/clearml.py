"""ClearML tracker."""

from __future__ import annotations

import math
import os
from typing import Any

from clearml import Task
from typing_extensions import override

from accel_runtime.foundation.logged_values import split_numbers
from accel_runtime.tracking.base import BuiltInTracker, on_main_process

__all__ = ["ClearMLTracker"]


class ClearMLTracker(BuiltInTracker):
    """Report scalars to a ClearML task; the prefix `train_`, `eval_` or `test_` of a name becomes the series.

    Args:
        run_name: The name of the project and the task, unless `CLEARML_PROJECT` and `CLEARML_TASK` are set.
        **kwargs: Arguments of `clearml.Task.init`. An existing task is used, and stays open at the end.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._task_exists = False

    @override
    @on_main_process
    def start(self) -> None:
        task = Task.current_task()
        self._task_exists = bool(task)
        names = {
            "project_name": os.environ.get("CLEARML_PROJECT", self.run_name),
            "task_name": os.environ.get("CLEARML_TASK", self.run_name),
        }
        self.task = task or Task.init(**{**names, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """Return the task."""
        return self.task

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        return self.task.connect_configuration(self.convert_configuration(values))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars of a step; without a step as single values."""
        numbers, others = split_numbers(values)
        self.leave_out(others)
        rest = {key: value for key, value in numbers.items() if not math.isfinite(value)}
        self.leave_out(rest, "ClearML would store nan and infinite numbers as 0")
        logger = self.task.get_logger()
        for key, value in numbers.items():
            if key in rest:
                continue
            if step is None:
                logger.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = _split_name(key)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images: arrays `[H, W, C]` or PIL images."""
        for key, image in values.items():
            title, series = _split_name(key)
            self.task.get_logger().report_image(
                title=title, series=series, iteration=step, image=image, **kwargs
            )

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
        """Record a table: rows of `data`, the first with the column names unless `columns` are passed; or a `dataframe`.

        Raises:
            ValueError: If neither `data` nor `dataframe` is passed.
        """
        if dataframe is None and data is None:
            raise ValueError("log_table needs rows: pass `data` or a `dataframe`.")
        table = dataframe if dataframe is not None else [columns, *(data or [])] if columns else data
        title, series = _split_name(table_name)
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=table, iteration=step, **kwargs
        )

    @override
    @on_main_process
    def finish(self) -> None:
        if not self._task_exists:
            self.task.close()


def _split_name(name: str) -> tuple[str, str]:
    """Return the title of the chart and the series of a name."""
    series, _, title = name.partition("_")
    return (title, series) if series in {"train", "eval", "test"} and title else (name, "train")
