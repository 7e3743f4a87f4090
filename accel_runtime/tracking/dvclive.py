"""DVCLive: plain files for DVC."""

from __future__ import annotations

from typing import Any

import dvclive
from dvclive.plots import Metric
from typing_extensions import override

from accel_runtime.tracking.base import Provided, on_main_process
from accel_runtime.tracking.values import deep, flat

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(Provided):
    """Hands over to `dvclive.Live`, whose step moves on after every `log`.

    Args:
        run_name: The project's name, which DVCLive has no place for: `dir` and `exp_name` say where.
        live: One that the script has made.
        **kwargs: For `dvclive.Live`.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.live = live
        self.init_kwargs = kwargs

    @override
    @on_main_process
    def start(self) -> None:
        self.live = dvclive.Live(**self.init_kwargs) if self.live is None else self.live

    @property
    def tracker(self) -> Any:
        """The `Live`."""
        return self.live

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        every = deep(values)
        left = {key: value for key, value in every.items() if value is None}
        self.leave_out(left)
        self.live.log_params({key: value for key, value in every.items() if key not in left})

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `log_metric`."""
        if step is not None:
            self.live.step = step
        for key, value in flat(values).items():
            if Metric.could_log(value):
                self.live.log_metric(key, value, **kwargs)
            else:
                self.leave_out({key: value})
        self.live.next_step()

    @override
    @on_main_process
    def finish(self) -> None:
        self.live.end()
