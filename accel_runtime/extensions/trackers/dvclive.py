"""DVCLive tracker, which writes files for DVC."""

from __future__ import annotations

from typing import Any

import dvclive
from dvclive.plots import Metric
from typing_extensions import override

from accel_runtime.foundation.logged_values import flatten_values
from accel_runtime.tracking.base import BuiltInTracker, on_main_process

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(BuiltInTracker):
    """Log to `dvclive.Live`, whose step advances after every `log`.

    Args:
        run_name: The name of the project, which DVCLive does not use; pass `dir` and `exp_name` instead.
        live: An existing `Live` of the script.
        **kwargs: Arguments of `dvclive.Live`.
    """

    name = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    @override
    @on_main_process
    def start(self) -> None:
        self.live = dvclive.Live(**self.init_kwargs) if self.live is None else self.live

    @property
    def tracker(self) -> Any:
        """Return the `Live`."""
        return self.live

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        parameters = self.convert_configuration(values)
        missing = {key: value for key, value in parameters.items() if value is None}
        self.leave_out(missing)
        self.live.log_params({key: value for key, value in parameters.items() if key not in missing})

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `log_metric`."""
        if step is not None:
            self.live.step = step
        for key, value in flatten_values(values).items():
            if Metric.could_log(value):
                self.live.log_metric(key, value, **kwargs)
            else:
                self.leave_out({key: value})
        self.live.next_step()

    @override
    @on_main_process
    def finish(self) -> None:
        self.live.end()
