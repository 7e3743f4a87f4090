"""Spans of a run, from what the launcher and the ranks have recorded in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from accel_cli.runs.goodput import read_checkpoints
from accel_cli.runs.heartbeats import Beat, Totals
from accel_cli.runs.progress import RunProgress
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.run_files import read_last_objects

__all__ = ["SPANS", "RunSpans"]

SPANS: Mapping[str, str] = MappingProxyType({
    "launch": "the whole launch, with its state, exit code, steps, restarts and goodput",
    "rendezvous": "until the ranks of all nodes are known",
    "attempt": "from the start of the processes to their end; failures are events with rank, host and cause",
    "first batch": "from the start of the processes to the first batch",
    "first step": "from the start of the processes to the end of the first step",
    "steps": "the steps between two exports, with the mean parts of a step",
    "save": "a checkpoint that is saved, with its path",
    "load": "a checkpoint that is loaded, with its path",
    "stall": "from the last progress until the next; with `stall_timeout`",
    "restart": "from a failure until the first step after it",
})  # fmt: skip
"""The spans by name, with the time of each."""


class RunSpans:
    """Spans of a run: those of `SPANS`, within `launch` and, but for `rendezvous` and `restart`, within `attempt`.

    Args:
        run: The folder of the run.
        tracer: The tracer of the SDK.
        parent: The span of the program that has started the launch, in the form of the header `traceparent`; may be empty.
    """

    def __init__(self, run: RunFolder, tracer: Any, parent: str) -> None:
        from opentelemetry import trace  # noqa: PLC0415 - an extra of its own
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._run, self._tracer, self._trace = run, tracer, trace
        started = run.record.get("started")
        self._started = float(started) if isinstance(started, (int, float)) else 0.0
        context = TraceContextTextMapPropagator().extract({"traceparent": parent})
        self._launch = tracer.start_span("launch", context, start_time=_to_ns(self._started))
        self._open: dict[str, Any] = {}
        """The spans that have not ended, by name."""
        self._seen: set[str] = set()
        """The records that are in spans."""
        self._attempt = -1
        self._attempt_started = self._started
        self._last: Totals | None = None
        """The totals at the end of the last `steps`."""
        self._begin("rendezvous", self._started)

    def update(self, progress: RunProgress) -> None:
        """Create the spans of what was recorded since the last call."""
        for event in read_last_objects(self._run.path / "events.jsonl"):
            if self._is_new("event", event) and isinstance(event.get("time"), float):
                self._add_event(str(event.get("event")), event["time"], event)
        self._add_records()
        self._launch.set_attributes(
            _drop_unknown({"accel.world_size": progress.world_size, "accel.nodes": progress.nodes})
        )

    def end(self, outcome: RunProgress) -> None:
        """End all spans."""
        self.update(outcome)
        for name in [*self._open]:
            self._end(name, outcome.time)
        goodput = outcome.goodput.share if outcome.goodput else None
        self._launch.set_attributes(
            _drop_unknown(
                {
                    "accel.state": outcome.state,
                    "accel.exit_code": outcome.exit_code,
                    "accel.steps": outcome.steps,
                    "accel.restarts": outcome.health.restarts,
                    "accel.goodput": goodput,
                }
            )
        )
        if outcome.state in {"failed", "stopped"}:
            self._fail(self._launch, f"{outcome.state}, exit code {outcome.exit_code}")
        self._launch.end(_to_ns(outcome.time))

    # Events of the launcher

    def _add_event(self, name: str, time: float, event: Mapping[str, Any]) -> None:
        seconds = event.get("seconds")
        begin = time - seconds if isinstance(seconds, (int, float)) else time
        if name == "start":
            self._attempt, self._attempt_started = int(event.get("attempt", 0)), time
            self._last = None
            self._end("rendezvous", time)
            self._begin(
                "attempt", time, {"accel.attempt": self._attempt, "accel.world_size": event.get("world_size")}
            )
        elif name == "restart":
            self._add_records()
            self._end("stall", time)
            self._end("attempt", time, str(event.get("reason", "")))
            self._begin("restart", time, {"accel.reason": str(event.get("reason", ""))})
            self._begin("rendezvous", time, parent="restart")
        elif name == "stall":
            self._begin("stall", begin, parent="attempt")
        elif name == "progress":
            self._end("stall", time)
        elif name == "failure" and (attempt := self._open.get("attempt")):
            facts = {f"accel.{key}": event.get(key) for key in ("rank", "host", "cause")}
            attempt.add_event("failure", _drop_unknown(facts), _to_ns(time))
            self._fail(attempt, str(event.get("cause", "")))

    # What the ranks have recorded

    def _add_records(self) -> None:
        """Create the spans of what the ranks of the newest attempt have recorded since the last call."""
        if self._attempt >= 0:
            self._add_checkpoints()
            self._add_steps()

    def _add_checkpoints(self) -> None:
        for record in read_checkpoints(self._run, [self._attempt]):
            if self._is_new("checkpoint", record):
                kind = "load" if record.get("kind") == "load" else "save"
                time, path = float(record["time"]), str(record.get("path", ""))
                self._add(kind, time - float(record["seconds"]), time, {"accel.path": path})

    def _add_steps(self) -> None:
        beat = self._read_beat()
        if beat is None:
            return
        if beat.first_batch and self._is_new("first batch", self._attempt):
            self._add("first batch", self._attempt_started, beat.to_epoch(beat.first_batch))
        if not beat.history:
            return
        if self._is_new("first step", self._attempt):
            first = beat.to_epoch(beat.history[0].time)
            self._add("first step", self._attempt_started, first)
            self._end("restart", first)
            self._last = beat.history[0]
        before, last = self._last, beat.totals
        if before is None or last.steps <= before.steps:
            return
        means, self._last = last.average_since(before), last
        parts = {
            f"accel.{name}_s": getattr(means, name)
            for name in ("data", "forward", "backward", "update", "rest", "wait")
        }
        numbers = {"accel.first_step": int(before.steps) + 1, "accel.last_step": int(last.steps)}
        self._add("steps", beat.to_epoch(before.time), beat.to_epoch(last.time), {**numbers, **parts})

    def _read_beat(self) -> Beat | None:
        """Return the heartbeat of the lowest rank of this node that has one."""
        folders = self._run.list_ranks(self._attempt).values()
        return next((beat for folder in folders if (beat := Beat.read(folder.beat))), None)

    # Spans

    def _begin(
        self, name: str, time: float, attributes: Mapping[str, Any] | None = None, parent: str = ""
    ) -> None:
        context = self._trace.set_span_in_context(self._open.get(parent, self._launch))
        self._open[name] = self._tracer.start_span(
            name, context, attributes=_drop_unknown(attributes or {}), start_time=_to_ns(time)
        )

    def _end(self, name: str, time: float, failure: str = "") -> None:
        span = self._open.pop(name, None)
        if span is not None:
            if failure:
                self._fail(span, failure)
            span.end(_to_ns(time))

    def _add(self, name: str, begin: float, end: float, attributes: Mapping[str, Any] | None = None) -> None:
        """Add a span within the attempt that has ended already."""
        context = self._trace.set_span_in_context(self._open.get("attempt", self._launch))
        span = self._tracer.start_span(
            name, context, attributes=_drop_unknown(attributes or {}), start_time=_to_ns(begin)
        )
        span.end(_to_ns(max(begin, end)))

    def _fail(self, span: Any, text: str) -> None:
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, text))

    def _is_new(self, kind: str, record: object) -> bool:
        """Return True at the first call with a record."""
        text = f"{kind} {json.dumps(record, sort_keys=True, default=str)}"
        is_new = text not in self._seen
        self._seen.add(text)
        return is_new


def _to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _drop_unknown(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
