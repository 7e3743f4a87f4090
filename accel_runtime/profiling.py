"""Profiles of a piece of training: `torch.profiler` on this process's device."""

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
from accel_runtime.configuration import Configuration
from accel_runtime.logging import MultiProcessAdapter
from accel_runtime.options import KwargsHandler

__all__ = ["ProfileKwargs", "profiled"]

_NEEDED = ("wait", "warmup", "active")
_KNOWN = (*_NEEDED, "repeat", "skip_first", "skip_first_wait")


@dataclass
class ProfileKwargs(Configuration, KwargsHandler):
    """Arguments of `torch.profiler.profile`, and where the traces go.

    Raises:
        ValueError: An activity or a key of the schedule that does not exist, or a schedule that lacks one.
    """

    activities: Sequence[str] | None = None
    """What to record: `cpu`, `cuda`, `xpu`, `mtia`, `hpu`; None is the CPU and the device in hand."""
    schedule_option: dict[str, int] | None = None
    """Steps to `wait`, to `warmup` and to record (`active`); also `repeat`, `skip_first`, `skip_first_wait`."""
    on_trace_ready: Callable[[profile], Any] | None = None
    """Called with the profiler whenever a recording is complete."""
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    """A folder for Chrome traces: `profile_<rank>.json`, and of a schedule that repeats `profile_<rank>.<n>.json`."""

    @override
    def _check(self) -> None:
        self._activities(None)
        asked = self.schedule_option
        if asked is not None and not set(_NEEDED) <= set(asked) <= set(_KNOWN):
            raise ValueError(
                f"schedule_option needs {', '.join(_NEEDED)}, and may have {', '.join(_KNOWN[3:])}; "
                f"it has {', '.join(asked) or 'nothing'}"
            )

    def build(
        self,
        device: torch.device | None = None,
        on_trace_ready: Callable[[profile], Any] | None = None,
    ) -> profile:
        """The profiler these arguments describe.

        Args:
            device: What is profiled beside the CPU, where `activities` does not say; None is all torch finds.
            on_trace_ready: In place of the handler's own.
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
                raise ValueError(f"activities may hold {', '.join(sorted(possible))} here; it holds {name!r}")
        return [possible[name] for name in self.activities]


@contextmanager
def profiled(handler: ProfileKwargs, backend: Backend) -> Iterator[profile]:
    """Profile what is inside, and write the traces; afterwards every process has written its own."""
    traces = _Traces(handler, backend.topology.rank)
    with handler.build(backend.device, traces.ready) as profiler:
        yield profiler
    if handler.output_trace_dir is not None:
        traces.tell_if_none()
        backend.barrier()


class _Traces:
    """Writes every recording that is complete, after the script's own handler had it."""

    def __init__(self, handler: ProfileKwargs, rank: int) -> None:
        self._handler = handler
        self._rank = rank
        self._ready = 0
        self._logger = MultiProcessAdapter(logging.getLogger(__name__))

    def ready(self, profiler: profile) -> None:
        if self._handler.on_trace_ready is not None:
            self._handler.on_trace_ready(profiler)
        if self._handler.output_trace_dir is not None:
            folder = Path(self._handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            number = f".{self._ready}" if self._ready else ""
            self._write(profiler, folder / f"profile_{self._rank}{number}.json")
        self._ready += 1

    def _write(self, profiler: profile, path: Path) -> None:
        try:
            profiler.export_chrome_trace(str(path))
        except RuntimeError as error:
            if "already saved" not in str(error):
                raise
            said = "%s is not written: on_trace_ready has written this trace, and torch writes it once"
            self._logger.warning_once(said, path, main_process_only=False)

    def tell_if_none(self) -> None:
        if not self._ready:
            said = "no trace is written: the schedule %s never came to its active steps; is step() called?"
            self._logger.warning(said, self._handler.schedule_option, main_process_only=False)
