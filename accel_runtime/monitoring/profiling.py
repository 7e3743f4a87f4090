"""Profiles of training steps with `torch.profiler`, and their traces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.foundation.options import Configuration, KwargsHandler
from accel_runtime.monitoring.logging import MultiProcessAdapter

__all__ = ["ProfileKwargs", "profiled"]

_REQUIRED_KEYS = ("wait", "warmup", "active")
_SCHEDULE_KEYS = (*_REQUIRED_KEYS, "repeat", "skip_first", "skip_first_wait")


@dataclass
class ProfileKwargs(Configuration, KwargsHandler):
    """Arguments of `torch.profiler.profile`, and the directory of the traces.

    Raises:
        ValueError: An unknown activity or key of the schedule, or a schedule with a missing key.
    """

    activities: Sequence[str] | None = None
    """Activities to record: `cpu`, `cuda`, `xpu`, `mtia`, `hpu`; None is the CPU and the current device."""
    schedule_option: dict[str, int] | None = None
    """Number of steps to `wait`, to `warmup` and to record (`active`); also `repeat`, `skip_first`, `skip_first_wait`."""
    on_trace_ready: Callable[[profile], Any] | None = None
    """Function that is called with the profiler when a recording is complete."""
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    """Directory of Chrome traces: `profile_<rank>.json`, and `profile_<rank>.<n>.json` with a repeated schedule."""

    @override
    def _check(self) -> None:
        self._activities(None)
        schedule_option = self.schedule_option
        if schedule_option is not None and not set(_REQUIRED_KEYS) <= set(schedule_option) <= set(
            _SCHEDULE_KEYS
        ):
            raise ValueError(
                f"Invalid schedule_option {schedule_option!r}: expected the keys {', '.join(_REQUIRED_KEYS)}, and if needed "
                f"{', '.join(_SCHEDULE_KEYS[3:])}."
            )

    def build(
        self,
        device: torch.device | None = None,
        on_trace_ready: Callable[[profile], Any] | None = None,
    ) -> profile:
        """Return the profiler with these arguments.

        Args:
            device: The device to profile in addition to the CPU if `activities` is not set; None profiles all that
                torch finds.
            on_trace_ready: Replaces the handler's own function.
        """
        return profile(
            activities=self._activities(device),
            schedule=None if self.schedule_option is None else schedule(**self.schedule_option),
            on_trace_ready=on_trace_ready or self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _activities(self, device: torch.device | None) -> list[ProfilerActivity] | None:
        possible = {activity.name.lower(): activity for activity in supported_activities()}  # type: ignore[no-untyped-call]
        if self.activities is None:
            names = {"cpu", device.type} if device else set(possible)
            return [activity for name, activity in possible.items() if name in names]
        for name in self.activities:
            if name not in possible:
                raise ValueError(
                    f"Invalid activities entry {name!r}: expected one of {', '.join(sorted(possible))} here."
                )
        return [possible[name] for name in self.activities]


@contextmanager
def profiled(handler: ProfileKwargs, backend: Backend) -> Iterator[profile]:
    """Profile a block and write the traces; afterwards every process has written its own."""
    logger = MultiProcessAdapter(logging.getLogger(__name__))
    num_traces = 0

    def write_trace(profiler: profile) -> None:
        nonlocal num_traces
        if handler.on_trace_ready is not None:
            handler.on_trace_ready(profiler)
        if handler.output_trace_dir is not None:
            number = f".{num_traces}" if num_traces else ""
            path = Path(handler.output_trace_dir) / f"profile_{backend.topology.rank}{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                profiler.export_chrome_trace(str(path))
            except RuntimeError as error:
                if "already saved" not in str(error):
                    raise
                message = "%s is not written: on_trace_ready has written this trace already, and torch can write it only once."
                logger.warning_once(message, path, main_process_only=False)
        num_traces += 1

    with handler.build(backend.device, write_trace) as profiler:
        yield profiler
    if handler.output_trace_dir is not None:
        if not num_traces:
            message = "No trace is written: the schedule %s did not reach its active steps. Call step() on the profiler after each step."
            logger.warning(message, handler.schedule_option, main_process_only=False)
        backend.barrier()
