"""The table of progress sinks, and those of the core: a line of the log, a file of lines, one with the newest progress, and Prometheus.

A new sink is a class, and a line here or an entry point of its distribution.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from typing_extensions import override

from accel_cli.console import format_duration
from accel_cli.errors import UsageError
from accel_cli.planning.plan import PROGRESS_INTERVAL_S, AgentSettings
from accel_cli.runs.progress import ProgressSink, RunProgress
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.run_files import read_bytes
from accel_runtime.environment.installation import format_install
from accel_runtime.environment.registry import Registry
from accel_runtime.environment.text import encode_text

__all__ = ["PROGRESS_LINE", "PROGRESS_SINKS", "LogLine", "ProgressLines", "PrometheusMetrics", "StatusFile"]

PROGRESS_SINKS: Registry[type[ProgressSink]] = Registry(
    {
        "line": "accel_cli.runs.sinks:LogLine",
        "lines": "accel_cli.runs.sinks:ProgressLines",
        "status": "accel_cli.runs.sinks:StatusFile",
        "prometheus": "accel_cli.runs.sinks:PrometheusMetrics",
        "train_job": "accel_cli.extensions.kubernetes.train_job_status:TrainJobStatus",
        "opentelemetry": "accel_cli.extensions.opentelemetry.sink:OpenTelemetry",
    },
    group="accel.progress_sinks",
)
"""The class of each sink, by its name in messages."""
_STATUS_SUFFIX = ".json"
"""The suffix of a progress file that has the newest progress only."""


PROGRESS_LINE = re.compile(
    r"accel: step (?P<step>\d+)(?: of (?P<total>\d+))?"
    r"(?:, loss (?P<loss>[^,]+))?"
    r"(?:, (?P<rate>[\d.e+-]+) steps/s)?"
    r"(?:, ETA (?P<eta>[^,]+))?"
    r"(?:, restarts (?P<restarts>\d+))?"
    r"(?:, (?P<state>starting|stalled|succeeded|failed|stopped))?$"
)
"""The form of a progress line, which programs search for in logs: new parts stand between the known ones and the state."""
_LOSS = re.compile(r"(.*[/._ -])?loss")


class LogLine(ProgressSink):
    """Prints a line that names the step: `--progress-line 60`. For people, and for programs that watch the log."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s

    @classmethod
    @override
    def create(cls, settings: AgentSettings, environ: Mapping[str, str]) -> Self | None:
        return None if settings.progress_line is None else cls(settings.progress_line)

    @override
    def open(self, run: RunFolder) -> None:
        pass

    @override
    def write(self, progress: RunProgress) -> str:
        return _format_progress_line(progress)

    @override
    def close(self, outcome: RunProgress) -> str:
        return _format_progress_line(outcome)


def _format_progress_line(progress: RunProgress) -> str:
    """Return the progress in the form of `PROGRESS_LINE`, without its head."""
    total = "" if progress.total_steps is None else f" of {progress.total_steps}"
    names = sorted(progress.metrics, key=lambda name: (len(name), name))
    loss = next((progress.metrics[name] for name in names if _LOSS.fullmatch(name)), None)
    is_running = progress.state in {"running", "stalled"}
    parts = [
        f"step {progress.steps}{total}",
        "" if loss is None else f"loss {loss:.4g}",
        "" if not is_running or progress.steps_per_s is None else f"{progress.steps_per_s:.3g} steps/s",
        "" if not is_running or progress.eta_s is None else f"ETA {format_duration(progress.eta_s)}",
        f"restarts {progress.health.restarts}" if progress.health.restarts else "",
        "" if progress.state == "running" else progress.state,
    ]
    return ", ".join(part for part in parts if part)


class ProgressLines(ProgressSink):
    """Appends a line of JSON each time: `--progress-file run.jsonl`."""

    def __init__(self, path: Path, interval_s: float) -> None:
        self._path, self.interval_s = path, interval_s

    @classmethod
    @override
    def create(cls, settings: AgentSettings, environ: Mapping[str, str]) -> Self | None:
        path = _find_progress_file(settings)
        is_chosen = path is not None and path.suffix != _STATUS_SUFFIX
        return cls(path, settings.progress_interval or PROGRESS_INTERVAL_S) if path and is_chosen else None

    @override
    def open(self, run: RunFolder) -> None:
        _create_file(self._path, self._path)

    @override
    def write(self, progress: RunProgress) -> None:
        line = encode_text(f"{json.dumps(progress.to_dict())}\n")
        # Opened each time, since a program that rotates logs may move the file.
        with self._path.open("ab") as file:
            file.write(b"\n" + line if _is_last_line_cut(self._path) else line)

    @override
    def close(self, outcome: RunProgress) -> None:
        self.write(outcome)


class StatusFile(ProgressSink):
    """Replaces a file by the newest progress each time: `--progress-file status.json`."""

    def __init__(self, path: Path, interval_s: float) -> None:
        # The target of a link is replaced, and not the link.
        self._path, self.interval_s = path.resolve(), interval_s
        self._new = self._path.with_name(f"{self._path.name}.new")

    @classmethod
    @override
    def create(cls, settings: AgentSettings, environ: Mapping[str, str]) -> Self | None:
        path = _find_progress_file(settings)
        is_chosen = path is not None and path.suffix == _STATUS_SUFFIX
        return cls(path, settings.progress_interval or PROGRESS_INTERVAL_S) if path and is_chosen else None

    @override
    def open(self, run: RunFolder) -> None:
        _create_file(self._path, self._new)

    @override
    def write(self, progress: RunProgress) -> None:
        # Never in place: a reader must not see a part of it, nor lose the last state to a full disk.
        self._new.write_text(f"{json.dumps(progress.to_dict())}\n", encoding="utf-8")
        self._new.replace(self._path)

    @override
    def close(self, outcome: RunProgress) -> None:
        self.write(outcome)


class PrometheusMetrics(ProgressSink):
    """Serves the metrics of the ranks of this node: `--metrics-port 9400`. They are read at each request."""

    interval_s = None
    is_per_node = True

    def __init__(self, address: str) -> None:
        self._address, self._server = address, ExitStack()

    @classmethod
    @override
    def create(cls, settings: AgentSettings, environ: Mapping[str, str]) -> Self | None:
        return None if settings.metrics_port is None else cls(settings.metrics_port)

    @override
    def open(self, run: RunFolder) -> None:
        try:
            from accel_cli.runs.prometheus import serve_metrics  # noqa: PLC0415 - an extra of its own
        except ImportError as error:
            raise UsageError(
                f"Cannot serve metrics: {error}. Install it: {format_install('prometheus-client', extra='metrics')}"
            ) from None
        self._server.enter_context(serve_metrics(run, self._address))

    @override
    def write(self, progress: RunProgress) -> None:
        pass

    @override
    def close(self, outcome: RunProgress) -> None:
        self._server.close()


def _find_progress_file(settings: AgentSettings) -> Path | None:
    """Return the path of the progress file, absolute."""
    return Path(settings.progress_file).absolute() if settings.progress_file else None


def _create_file(path: Path, new: Path) -> None:
    """Create the file that is written for a progress file, unless it exists.

    Args:
        path: The progress file, as the user named it.
        new: The file that is written: the same, or one that replaces it.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        reason = ""
        # Before it is opened, which would wait for the reader of a named pipe.
        if path.exists() and not path.is_file():
            reason = "it is a directory" if path.is_dir() else "it is not a regular file"
        else:
            new.open("ab").close()
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
    if reason:
        raise UsageError(
            f"Cannot write the progress to {path}: {reason}. Set launcher.progress_file (--progress-file) to another file."
        )


def _is_last_line_cut(path: Path) -> bool:
    """Return True if the last line of a file was cut, as by a full disk or a crash."""
    with suppress(OSError):
        return read_bytes(path, max_size=1, at_end=True) not in {b"", b"\n"}
    return False
