"""Comet tracker."""

from __future__ import annotations

from typing import Any

import comet_ml
from typing_extensions import override

from accel_runtime.foundation.logged_values import flatten_values
from accel_runtime.tracking.base import BuiltInTracker, on_main_process

__all__ = ["CometMLTracker"]


class CometMLTracker(BuiltInTracker):
    """Log numbers as metrics and text as "other" values; nested names are joined by `/`.

    Args:
        run_name: The name of the project.
        **kwargs: Arguments of `comet_ml.start`, which needs comet_ml 3.41.0 or newer.
    """

    name = "comet_ml"

    @override
    @on_main_process
    def start(self) -> None:
        self.writer = comet_ml.start(**{"project_name": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """Return the experiment."""
        return self.writer

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(flatten_values(self.convert_configuration(values)))

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `log_metric` or `log_other`."""
        if step is not None:
            self.writer.set_step(step)
        for key, value in flatten_values(values).items():
            if isinstance(value, (bool, int, float)):
                value = int(value) if isinstance(value, bool) else value  # noqa: PLW2901 - Comet would store text
                self.writer.log_metric(key, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(key, value, **kwargs)
            else:
                self.leave_out({key: value})

    @override
    @on_main_process
    def finish(self) -> None:
        self.writer.end()
