"""View of a submitted job: its state as the service reports it, and the end of its log."""

from __future__ import annotations

import codecs
import re
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.text import Text

from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.job_service import Jobs, Log, UnreachableError
from accel_cli.runs.live_view import crop_lines
from accel_cli.runs.screen import View

__all__ = ["JobView"]

_MAX_LINES, _MAX_LINE = 200, 1 << 16
"""The lines of the log that are kept, and the characters of a line."""
_PRINTED_LINES = 10
"""Lines of the log that are printed once, without a screen to fill."""
_READ_S = 5.0
"""The longest time to read a log before the state is shown."""
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class JobView:
    """Reads the state and log of one job, at the intervals of its service."""

    def __init__(self, jobs: Jobs, job_id: str) -> None:
        self._jobs = jobs
        self.job = jobs.status(job_id)
        self._status_at = self._log_at = time.monotonic()
        self._interval = jobs.intervals.status_s[0]
        self._log: Log | None = None
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._partial = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._problem = ""
        self._read_log()

    def draw(self, width: int, height: int | None) -> View:
        """Return the view, after reading what is due."""
        now = time.monotonic()
        job = self.job
        if not job.finished and now - self._status_at >= self._interval:
            self._read_status()
        # The end of a job completes its log.
        if now - self._log_at >= self._jobs.intervals.log_s or self.job is not job:
            self._read_log()
        lines = self._build_header(width)
        room = _PRINTED_LINES if height is None else max(0, height - len(lines) - 1)
        log = [line.expandtabs() for line in self._list_log()]
        lines += [Text(), *map(Text, log[len(log) - min(room, len(log)) :])] if log else []
        return View(Group(*crop_lines(lines, width, height)), is_final=self.job.finished)

    def to_json(self) -> dict[str, Any]:
        """Return the state and the end of the log as JSON data."""
        return {"job": asdict(self.job), "log": self._list_log()}

    def _list_log(self) -> list[str]:
        """Return the last lines of the log, also one that is not complete."""
        last = _clean_line(self._partial)
        return [*self._lines, *([last] if last else [])]

    def _build_header(self, width: int) -> list[Text]:
        job = self.job
        style = "green" if not job.exit_code else "red"
        state = Text(job.state, style=style)
        facts = [
            f"for {job.elapsed}" if job.elapsed else "",
            f"exit code {job.exit_code}" if job.finished and job.exit_code is not None else "",
            f"nodes {job.nodes}" if job.nodes else "",
            f"{job.restarts} restarts" if job.restarts else "",
            job.cost,
        ]
        lines = [
            Text(f"job {job.id}  {job.name}" if job.name != job.id else f"job {job.id}", style="bold"),
            state,
        ]
        for fact in filter(None, facts):
            if lines[-1].cell_len + len(fact) + 2 > width:
                lines.append(Text(fact))
            else:
                lines[-1].append(f", {fact}", style="default")
        lines += [Text(text) for text in (job.reason, f"log: {job.log}" if job.log else "") if text]
        return [*lines, Text(self._problem, style="yellow")] if self._problem else lines

    def _read_status(self) -> None:
        first, longest = self._jobs.intervals.status_s
        try:
            new = self._jobs.status(self.job.id)
        except UnreachableError as error:
            self._problem = _format_problem(error)
        else:
            self._problem = ""
            is_changed = (new.state, new.reason, new.restarts) != (
                self.job.state,
                self.job.reason,
                self.job.restarts,
            )
            self._interval = first if is_changed else min(self._interval * 1.2, longest)
            self.job = new
        self._status_at = time.monotonic()

    def _read_log(self) -> None:
        """Read the new output, up to its end unless that takes long."""
        start = time.monotonic()
        try:
            self._log = self._log or self._jobs.open_log(self.job)
            while (output := self._log.read()) and self._add(output) and time.monotonic() - start < _READ_S:
                pass
        except UnreachableError as error:
            self._problem = _format_problem(error)
        except UsageError as error:  # for example before the job has started
            self._problem = str(error)
        self._log_at = time.monotonic()

    def _add(self, output: bytes) -> bool:
        """Split output into lines."""
        *lines, partial = (self._partial + self._decoder.decode(output)).split("\n")
        self._lines.extend(map(_clean_line, lines))
        # A progress bar may write for hours without a newline.
        end = partial[len(partial.rstrip("\r")) :][:1]
        self._partial = f"{_get_last_state(partial)}{end}"
        return True


def _get_last_state(line: str) -> str:
    """Return the last state of a progress bar, or the whole line, up to a limit."""
    return line.rstrip("\r").rpartition("\r")[2][-_MAX_LINE:]


def _clean_line(line: str) -> str:
    """Return the last state of a line, without escape sequences and control characters."""
    return _CONTROL.sub("", _get_last_state(line))


def _format_problem(error: AccelError) -> str:
    return f"{str(error).rstrip('.')}. Trying again."
