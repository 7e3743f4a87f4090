"""ClearML."""

from __future__ import annotations

import os
from typing import Any

from clearml import Task
from typing_extensions import override

from accel_runtime.tracking.base import Provided, on_main_process
from accel_runtime.tracking.values import deep, numbers

__all__ = ["ClearMLTracker"]


class ClearMLTracker(Provided):
    """Reports scalars to a ClearML task: `train_`, `eval_` or `test_` before a name makes the series.

    Args:
        run_name: The project's and the task's name, where `CLEARML_PROJECT` and `CLEARML_TASK` do not say.
        **kwargs: For `clearml.Task.init`. A task that is there already is used, and left open at the end.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._theirs = False

    @override
    @on_main_process
    def start(self) -> None:
        found = Task.current_task()
        self._theirs = bool(found)
        names = {
            "project_name": os.environ.get("CLEARML_PROJECT", self.run_name),
            "task_name": os.environ.get("CLEARML_TASK", self.run_name),
        }
        self.task = found or Task.init(**{**names, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """The task."""
        return self.task

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        return self.task.connect_configuration(deep(values))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers: as scalars of a step, or as single values without one."""
        counted, others = numbers(values)
        self.leave_out(others)
        logger = self.task.get_logger()
        for key, value in counted.items():
            if step is None:
                logger.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = _title(key)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images: arrays `[H, W, C]` or PIL images."""
        for key, image in values.items():
            title, series = _title(key)
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
        """Record a table: rows of `data`, whose first one names the columns unless `columns` do; or a `dataframe`.

        Raises:
            ValueError: Neither `data` nor `dataframe`.
        """
        if dataframe is None and data is None:
            raise ValueError("log_table needs `data` or a `dataframe`")
        table = dataframe if dataframe is not None else [columns, *(data or [])] if columns else data
        title, series = _title(table_name)
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=table, iteration=step, **kwargs
        )

    @override
    @on_main_process
    def finish(self) -> None:
        if not self._theirs:
            self.task.close()


def _title(name: str) -> tuple[str, str]:
    """The chart and its curve."""
    series, _, title = name.partition("_")
    return (title, series) if series in {"train", "eval", "test"} and title else (name, "train")
