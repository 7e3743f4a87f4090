"""The page of `accel report`: plots by plotly and tables by jinja2, in one HTML file that needs no network.

Names of metrics, scripts and paths are untrusted: jinja2 escapes what it inserts, plotly gets escaped text, and the
content security policy of the page allows its own two scripts only, and no connection.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, count
from pathlib import Path

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from accel_cli.extensions.report.data import EVENT_NAMES, Curve, Event, RunData, format_seconds, format_time
from accel_cli.extensions.report.figures import (
    COLORS,
    MAX_CURVE_POINTS,
    MAX_MARKS,
    Plot,
    RunView,
    add_line,
    add_to_mark_axis,
    create_figure,
    round_value,
    thin_curve,
    write_json,
)
from accel_cli.extensions.report.ranks import describe_balance, draw_memory, draw_times, draw_use, list_parts
from accel_cli.planning.machine import check_has_files
from accel_runtime.environment import settings as env
from accel_runtime.environment.text import encode_text

__all__ = ["pack", "render_report", "unpack"]

_FOLDER = Path(__file__).parent
_MAX_POINTS = 12_000
"""Points of all curves of metrics, which keeps a report below 2 MB: 1.8 MB are plotly."""
_MIN_CURVE_POINTS = 40
_MAX_EVENTS = 400
_REPLACED, _REPLACEMENTS = "<&`", ",'\""
"""Characters of the alphabet that may end or begin markup, and others in their place."""


@dataclass(frozen=True)
class TableRow:
    """A row that compares runs."""

    name: str
    cells: list[str]

    @property
    def differs(self) -> bool:
        """Return whether the runs have different values."""
        return len(set(self.cells)) > 1


def render_report(runs: Sequence[RunData], *, refresh_s: float | None = None) -> str:
    """Return the page of some runs; with `refresh_s`, it reloads itself at this interval in seconds."""
    check_has_files("write a report")
    views = _create_views(runs)
    numbers = count()
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    plotly_script = get_plotlyjs()
    metrics, times = _draw_metrics(views, numbers), draw_times(views, numbers)
    memory, use = draw_memory(views, numbers), draw_use(views, numbers)
    plots = sorted([*metrics, *times, *memory, *use], key=lambda plot: plot.number)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((_FOLDER / "page.html").read_text(encoding="utf-8"))
    return template.render(
        title=_build_title(views),
        version=env.__version__,
        written=format_time(time.time()),
        policy=_build_policy(plotly_script, script),
        plotly=pack(plotly_script),
        script=script,
        runs=views,
        refresh=None if refresh_s is None else round(refresh_s),
        facts=_compare([view.data.facts for view in views]),
        settings=_compare([view.data.settings for view in views]),
        failures=[
            {"run": view.label, "text": failure.text, "details": failure.details}
            for view in views
            if (failure := view.data.failure)
        ],
        metrics=metrics,
        single=_list_single(views),
        values=_list_values(views),
        findings=[finding for view in views if (finding := describe_balance(view, len(views) > 1))],
        times=times,
        parts=list_parts(views),
        memory=memory,
        use=use,
        # Together, since most of their layouts are equal.
        figures=pack(f"[{','.join(plot.json for plot in plots)}]"),
        events=_list_events(views),
    )


def _create_views(runs: Sequence[RunData]) -> list[RunView]:
    names = [run.name for run in runs]
    return [
        RunView(
            index,
            run.name if names.count(run.name) == 1 else f"{run.name} ({names[: index + 1].count(run.name)})",
            COLORS[index % len(COLORS)],
            run,
        )
        for index, run in enumerate(runs)
    ]


def _build_title(views: Sequence[RunView]) -> str:
    scripts = list(dict.fromkeys(view.data.facts.get("script", view.data.name) for view in views))
    name = Path(scripts[0]).name if len(scripts) == 1 else f"{len(scripts)} scripts"
    if len(views) > 1:
        return f"{name}: {len(views)} runs"
    started = views[0].data.facts.get("started")
    return f"{name}, {started}" if started else name


def _build_policy(*scripts: str) -> str:
    """Return a content security policy that allows these scripts, and no connection."""
    digests = (
        base64.b64encode(hashlib.sha256(encode_text(text)).digest()).decode("ascii") for text in scripts
    )
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _compare(values: Sequence[Mapping[str, str]]) -> list[TableRow]:
    """Return a row for each name that a run has."""
    names = dict.fromkeys(chain.from_iterable(values))
    # The names of several runs are the heads of the columns.
    shown = [name for name in names if name != "run" or len(values) == 1]
    return [TableRow(name, [one.get(name, "") for one in values]) for name in shown]


# Metrics -----------------------------------------------------------------------------------


def _draw_metrics(views: Sequence[RunView], numbers: Iterator[int]) -> list[Plot]:
    """Draw each metric with a line for each run."""
    curves = [(view, view.data.metrics.curves) for view in views]
    names = [
        name
        for name in dict.fromkeys(chain.from_iterable(named for _, named in curves))
        if any(len(named.get(name, ())) > 1 for _, named in curves)
    ]
    num_curves = sum(len(named) for _, named in curves)
    limit = max(_MIN_CURVE_POINTS, min(MAX_CURVE_POINTS, _MAX_POINTS // max(num_curves, 1)))
    return [
        _draw_metric(
            name, [(view, named[name]) for view, named in curves if name in named], limit, next(numbers)
        )
        for name in names
    ]


def _list_single(views: Sequence[RunView]) -> list[TableRow]:
    """Return the metrics that each run has logged once at most: facts, not curves."""
    logs = [view.data.metrics.curves for view in views]
    names = dict.fromkeys(chain.from_iterable(logs))
    return [
        TableRow(name, [f"{curve.y[-1]:.6g}" if (curve := log.get(name)) else "" for log in logs])
        for name in names
        if all(len(log.get(name, ())) <= 1 for log in logs)
    ]


def _draw_metric(name: str, curves: Sequence[tuple[RunView, Curve]], limit: int, number: int) -> Plot:
    figure = create_figure("step", "", 260, hovermode="x unified")
    num_values = num_points = num_non_finite = 0
    for view, curve in curves:
        thinned = thin_curve(curve, limit)
        num_values += len(curve)
        num_points += len(thinned)
        extra = f"<extra>{escape(view.label)}</extra>" if len(curves) > 1 else "<extra></extra>"
        add_line(
            figure, thinned, view, color=view.color, hovertemplate=f"%{{y:.6g}}{extra}", showlegend=False
        )
        num_non_finite += _add_crosses(figure, curve, view, extra)
    values = (y for _, curve in curves for y in curve.y if math.isfinite(y))
    level = next(values, 0.0)
    if level and all(y == level for y in values):
        # plotly's own range around a constant is 2 wide, so that a small one would look like 0.
        figure.update_yaxes(range=sorted([0.0, 2 * level]), selector=0)
    captions = []
    if num_points < num_values:
        captions.append(
            f"{num_points:,} of {num_values:,} values are drawn, with the extremes of each interval."
        )
    if num_non_finite:
        captions.append(f"Crosses mark values that are NaN or infinite ({num_non_finite:,}).")
    return Plot(number, name, write_json(figure), " ".join(captions))


def _add_crosses(figure: go.Figure, curve: Curve, view: RunView, extra: str) -> int:
    """Mark the values that are NaN or infinite; return their number."""
    points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if not math.isfinite(y)]
    if points:
        shown = points[:MAX_MARKS]
        style = {"mode": "markers", "marker": {"symbol": "x", "color": view.color, "size": 8}}
        add_to_mark_axis(figure, view, [(x, 0.04, str(y)) for x, y in shown], extra, style)
    return len(points)


def _list_values(views: Sequence[RunView]) -> list[dict[str, str]]:
    """Return the last value and extremes of each metric, and the last text."""
    rows = []
    for view in views:
        for name, curve in view.data.metrics.curves.items():
            finite = [y for y in curve.y if math.isfinite(y)]
            low, high = (f"{min(finite):.6g}", f"{max(finite):.6g}") if finite else ("", "")
            row = {
                "step": str(round_value(curve.x[-1])),
                "last": f"{curve.y[-1]:.6g}",
                "minimum": low,
                "maximum": high,
            }
            rows.append({"metric": name, "run": view.label, **row})
        for name, text in view.data.metrics.texts.items():
            row = {"step": "", "last": text, "minimum": "", "maximum": ""}
            rows.append({"metric": name, "run": view.label, **row})
    return sorted(rows, key=lambda row: row["metric"])


# Events ------------------------------------------------------------------------------------


def _list_events(views: Sequence[RunView]) -> list[dict[str, str]]:
    """Return the rows of the table of events, the oldest first; of very many, the first and the last."""
    events = sorted(
        ((view, event) for view in views for event in view.data.events), key=lambda entry: entry[1].time
    )
    if len(events) <= _MAX_EVENTS:
        return [_describe_event(view, event) for view, event in events]
    omitted = len(events) - _MAX_EVENTS
    gap = {"time": "", "run": "", "kind": "", "text": f"{omitted} events are left out.", "details": ""}
    first, last = events[: _MAX_EVENTS // 2], events[-_MAX_EVENTS // 2 :]
    return [*(_describe_event(*entry) for entry in first), gap, *(_describe_event(*entry) for entry in last)]


def _describe_event(view: RunView, event: Event) -> dict[str, str]:
    return {
        "time": f"{format_time(event.time)} (+{format_seconds(max(event.time - view.data.started, 0.0))})",
        "run": view.label,
        "kind": EVENT_NAMES.get(event.kind, event.kind),
        "text": event.text,
        "details": event.details,
    }


def pack(text: str) -> str:
    """Return a text as `unpack`, or the script of the page, reads it."""
    data = base64.b85encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode("ascii")
    return data.translate(str.maketrans(_REPLACED, _REPLACEMENTS))


def unpack(text: str) -> str:
    """Return the text that was packed."""
    data = base64.b85decode(text.strip().translate(str.maketrans(_REPLACEMENTS, _REPLACED)))
    return gzip.decompress(data).decode("utf-8")
