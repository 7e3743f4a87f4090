"""The page of `accel report`: plots by plotly and tables by jinja2, in one HTML file that needs no network.

Names of metrics, scripts and paths are untrusted: jinja2 escapes what it inserts, plotly gets escaped text, and the
content security policy of the page allows its own two scripts only, and no connection.
"""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from accel_cli.runs.report_data import Curve, Event, RunData, format_seconds, format_time
from accel_cli.runs.snapshot import MIN_STEPS, find_slowest
from accel_runtime.environment import settings as env
from accel_runtime.environment.text import encode_text

__all__ = ["render_report", "thin_curve"]

_FOLDER = Path(__file__).parent
_COLORS = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#9d755d", "#d4a72c", "#ff7aa2", "#8a8f98", "#e45756",
)  # fmt: skip
_DASHES = ("solid", "dash", "dot", "dashdot")
_MARK_COLORS = {"restart": "#d62728", "stall": "#d4a72c", "save": "#8a8f98", "load": "#8a8f98"}
_MARKS = {
    "restart": "dashed lines are restarts",
    "stall": "shaded areas are stalls",
    "save": "upward triangles are saved checkpoints",
    "load": "downward triangles are loaded checkpoints",
}
_KINDS = {"save": "checkpoint saved", "load": "checkpoint loaded", "progress": "stall over"}
_UNITS = ((7200, 3600, "h"), (180, 60, "min"), (0, 1, "s"))
"""From which duration in seconds a unit is used, its seconds, and its name."""
_MAX_POINTS = 400_000
"""Points of all curves of metrics, which keeps a report below about 10 MB beyond plotly's own 5 MB."""
_MAX_CURVE_POINTS = 4000
_MIN_CURVE_POINTS = 200
_MAX_RANKS = 16
"""The number of ranks of a run that are drawn."""
_MAX_EVENTS = 400
_MAX_MARKS = 200
_MAX_HOVER = 120
"""Characters of the text of a mark."""
_RARE = 4
"""The largest value ends an axis unless it exceeds the 98th percentile by this factor."""
_FEW_POINTS = 40
"""A line with fewer points shows each of them."""

_Point: TypeAlias = "tuple[float | None, float | None, str]"
"""x, y, and the text that is shown on hovering."""


@dataclass(frozen=True)
class RunView:
    """A run with its name and colour in the report."""

    index: int
    label: str
    color: str
    data: RunData

    @property
    def notes(self) -> list[str]:
        """Remarks about the data of the run."""
        return self.data.notes

    @property
    def description(self) -> str:
        """The text of `Accelerator.describe()`."""
        return self.data.description


@dataclass(frozen=True)
class Plot:
    """A plot of the page."""

    number: int
    title: str
    json: str
    caption: str


@dataclass(frozen=True)
class TableRow:
    """A row that compares runs."""

    name: str
    cells: list[str]

    @property
    def differs(self) -> bool:
        """Return whether the runs have different values."""
        return len(set(self.cells)) > 1


def render_report(runs: Sequence[RunData]) -> str:
    """Return the page that shows some runs."""
    views = _create_views(runs)
    numbers = count()
    script = (_FOLDER / "report.js").read_text(encoding="utf-8")
    plotly_script = get_plotlyjs()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((_FOLDER / "report.html").read_text(encoding="utf-8"))
    return template.render(
        title=_build_title(views),
        version=env.__version__,
        written=format_time(time.time()),
        policy=_build_policy(plotly_script, script),
        plotly=plotly_script,
        script=script,
        runs=views,
        facts=_compare([view.data.facts for view in views]),
        settings=_compare([view.data.settings for view in views]),
        failures=[
            {"run": view.label, "text": failure.text, "details": failure.details}
            for view in views
            if (failure := view.data.failure)
        ],
        metrics=_draw_metrics(views, numbers),
        values=_list_values(views),
        findings=[finding for view in views if (finding := _describe_balance(view, len(views) > 1))],
        times=_draw_times(views, numbers),
        memory=_draw_memory(views, numbers),
        events=_list_events(views),
    )


def _create_views(runs: Sequence[RunData]) -> list[RunView]:
    names = [run.name for run in runs]
    return [
        RunView(
            index,
            run.name if names.count(run.name) == 1 else f"{run.name} ({names[: index + 1].count(run.name)})",
            _COLORS[index % len(_COLORS)],
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
    names = dict.fromkeys(chain.from_iterable(named for _, named in curves))
    num_curves = sum(len(named) for _, named in curves)
    limit = max(_MIN_CURVE_POINTS, min(_MAX_CURVE_POINTS, _MAX_POINTS // max(num_curves, 1)))
    return [
        _draw_metric(
            name, [(view, named[name]) for view, named in curves if name in named], limit, next(numbers)
        )
        for name in names
    ]


def _draw_metric(name: str, curves: Sequence[tuple[RunView, Curve]], limit: int, number: int) -> Plot:
    figure = _create_figure("step", "", 260, hovermode="x unified")
    num_values = num_points = num_non_finite = 0
    for view, curve in curves:
        thinned = thin_curve(curve, limit)
        num_values += len(curve)
        num_points += len(thinned)
        extra = f"<extra>{escape(view.label)}</extra>" if len(curves) > 1 else "<extra></extra>"
        _add_line(
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
    return Plot(number, name, _to_json(figure), " ".join(captions))


def _add_crosses(figure: go.Figure, curve: Curve, view: RunView, extra: str) -> int:
    """Mark the values that are NaN or infinite; return their number."""
    points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if not math.isfinite(y)]
    if points:
        shown = points[:_MAX_MARKS]
        style = {"mode": "markers", "marker": {"symbol": "x", "color": view.color, "size": 8}}
        _add_to_mark_axis(figure, view, [(x, 0.04, str(y)) for x, y in shown], extra, style)
    return len(points)


def thin_curve(curve: Curve, limit: int) -> Curve:
    """Return a curve with about `limit` points: first and last, and the extremes and gaps of equal intervals."""
    if len(curve) <= limit:
        return curve
    num_intervals = max(limit // 2, 1)
    kept = {0, len(curve) - 1}
    for begin, end in pairwise(len(curve) * number // num_intervals for number in range(num_intervals + 1)):
        finite = [index for index in range(begin, end) if math.isfinite(curve.y[index])]
        if finite:
            kept |= {min(finite, key=curve.y.__getitem__), max(finite, key=curve.y.__getitem__)}
        if len(finite) < end - begin:
            kept.add(next(index for index in range(begin, end) if not math.isfinite(curve.y[index])))
    thinned = Curve()
    for index in sorted(kept):
        thinned.add(curve.x[index], curve.y[index])
    return thinned


def _list_values(views: Sequence[RunView]) -> list[dict[str, str]]:
    """Return the last value and extremes of each metric, and the last text."""
    rows = []
    for view in views:
        for name, curve in view.data.metrics.curves.items():
            finite = [y for y in curve.y if math.isfinite(y)]
            low, high = (f"{min(finite):.6g}", f"{max(finite):.6g}") if finite else ("", "")
            row = {
                "step": str(_round(curve.x[-1])),
                "last": f"{curve.y[-1]:.6g}",
                "minimum": low,
                "maximum": high,
            }
            rows.append({"metric": name, "run": view.label, **row})
        for name, text in view.data.metrics.texts.items():
            row = {"step": "", "last": text, "minimum": "", "maximum": ""}
            rows.append({"metric": name, "run": view.label, **row})
    return sorted(rows, key=lambda row: row["metric"])


# Ranks over time ---------------------------------------------------------------------------


def _choose_unit(views: Iterable[RunView]) -> tuple[int, str]:
    """Return the unit of the time axes, and its seconds."""
    ends = [end - view.data.started for view in views if (end := _find_end(view.data)) is not None]
    longest = max(ends, default=0.0)
    return next((seconds, unit) for least, seconds, unit in _UNITS if longest >= least or least == 0)


def _find_end(data: RunData) -> float | None:
    curves = [*data.rss.values(), *data.gpu.values(), *(times.step for times in data.times.values())]
    return max(
        [*(curve.x[-1] for curve in curves if len(curve)), *(event.time for event in data.events)],
        default=None,
    )


@dataclass(frozen=True)
class _RankCurves:
    """Curves of the ranks of each run, and how they are drawn."""

    title: str
    caption: str
    curves: Sequence[tuple[RunView, Mapping[int, Curve]]]
    unit: str = "s"
    scale: float = 1.0
    """Values of the curves in a unit of the axis."""

    @property
    def peak(self) -> float | None:
        """The largest value."""
        values = (y for _, by_rank in self.curves for curve in by_rank.values() for y in curve.y)
        return max((y for y in values if math.isfinite(y)), default=None)


def _draw_times(views: Sequence[RunView], numbers: Iterator[int]) -> list[Plot]:
    """Draw step times and own times."""
    strides = sorted(
        {times.stride for view in views for times in view.data.times.values() if len(times.step)}
    )
    averaged = (
        f" Each point is the mean of {' or '.join(map(str, strides))} steps." if strides[-1:] > [1] else ""
    )
    plots = (
        _RankCurves(
            "Step time by rank",
            "Seconds from one optimizer step to the next. Ranks of DDP wait for each other, so their step times are equal."
            f"{averaged}",
            [(view, {rank: times.step for rank, times in view.data.times.items()}) for view in views],
        ),
        _RankCurves(
            "Own time by rank",
            "Seconds of a step that a rank spends outside of the backward passes and collectives in which ranks wait for each "
            "other: the rank with the longest own time delays the others. On a GPU it is the time of the host. With sharded "
            "models, it includes waits for other ranks in the forward pass.",
            [(view, {rank: times.busy for rank, times in view.data.times.items()}) for view in views],
        ),
    )
    return [_draw_ranks(plot, next(numbers)) for plot in plots if plot.peak]


def _draw_memory(views: Sequence[RunView], numbers: Iterator[int]) -> list[Plot]:
    """Draw the memory of processes and GPUs."""
    plots = (
        _RankCurves(
            "Resident memory by rank",
            "Main memory of each process.",
            [(view, view.data.rss) for view in views],
        ),
        _RankCurves(
            "GPU memory by rank",
            "GPU memory of each process, as the driver reports it.",
            [(view, view.data.gpu) for view in views],
        ),
    )
    drawn = []
    for plot in plots:
        if plot.peak is not None:
            scale, unit = (2.0**30, "GiB") if plot.peak >= 2**30 else (2.0**20, "MiB")
            drawn.append(_draw_ranks(replace(plot, unit=unit, scale=scale), next(numbers)))
    return drawn


def _draw_ranks(plot: _RankCurves, number: int) -> Plot:
    """Draw a line for each rank of each run over the time since the start of the run, and the marks of its events."""
    seconds, time_unit = _choose_unit(view for view, _ in plot.curves)
    figure = _create_figure(f"time since the start ({time_unit})", plot.unit, 340, hovermode="closest")
    captions, values, kinds = [plot.caption], [], set()
    is_single = len(plot.curves) == 1
    for view, by_rank in plot.curves:
        ranks = _choose_ranks(by_rank)
        if len(ranks) < sum(map(bool, by_rank.values())):
            captions.append(
                f"Of the {len(by_rank)} ranks of {view.label}, the {len(ranks) - 2} with the largest mean are drawn, the "
                "median and the smallest."
            )
        for position, rank in enumerate(ranks):
            curve = _rescale(
                thin_curve(by_rank[rank], _MAX_CURVE_POINTS), view.data.started, seconds, plot.scale
            )
            values += [y for y in curve.y if math.isfinite(y)]
            name = f"rank {rank}" if is_single else f"{escape(view.label)}, rank {rank}"
            _add_line(
                figure,
                curve,
                view,
                color=_COLORS[position % len(_COLORS)] if is_single else view.color,
                dash=_DASHES[position // len(_COLORS) % len(_DASHES)] if is_single else "solid",
                name=name,
                showlegend=is_single and len(ranks) > 1,
                hovertemplate=f"%{{y:.4g}} {plot.unit} at %{{x:.4g}} {time_unit}<extra>{name}</extra>",
            )
        kinds |= _add_marks(figure, view, seconds, _MARK_COLORS if is_single else {})
    if marks := [text for kind, text in _MARKS.items() if kind in kinds]:
        captions.append(f"{', '.join(marks)}.".capitalize())
    captions.append(_limit_axis(figure, values, plot.unit))
    return Plot(number, plot.title, _to_json(figure), " ".join(filter(None, captions)))


def _choose_ranks(curves: Mapping[int, Curve]) -> list[int]:
    """Return the ranks that are drawn: all, or the largest by their mean, the median and the smallest."""
    ranks = [rank for rank, curve in curves.items() if len(curve)]
    if len(ranks) <= _MAX_RANKS:
        return sorted(ranks)
    ordered = sorted(ranks, key=lambda rank: _compute_mean(curves[rank]) or 0.0, reverse=True)
    return sorted({*ordered[: _MAX_RANKS - 2], ordered[len(ordered) // 2], ordered[-1]})


def _compute_mean(curve: Curve) -> float | None:
    finite = [y for y in curve.y if math.isfinite(y)]
    return statistics.fmean(finite) if finite else None


def _rescale(curve: Curve, start: float, unit: float, scale: float) -> Curve:
    rescaled = Curve()
    for x, y in zip(curve.x, curve.y, strict=True):
        rescaled.add((x - start) / unit, y / scale)
    return rescaled


def _limit_axis(figure: go.Figure, values: Sequence[float], unit: str) -> str:
    """End the y axis below rare large values, such as those of a first step that compiles; return a sentence about it."""
    largest = max(values, default=0.0)
    usual = statistics.quantiles(values, n=50)[-1] if len(values) >= _FEW_POINTS else largest
    is_limited = largest > _RARE * usual > 0
    top = 1.5 * usual if is_limited else 1.08 * largest
    if top > 0:
        figure.update_yaxes(range=[0, top], selector=0)
    if not is_limited:
        return ""
    num_above = sum(value > top for value in values)
    return f"Values up to {largest:.4g} {unit} ({num_above} of {len(values)}) are above the axis; a double click shows them."


def _add_marks(figure: go.Figure, view: RunView, seconds: int, colors: Mapping[str, str]) -> set[str]:
    """Add marks of restarts, stalls and checkpoints in these colours, or that of the run; return their kinds."""
    kinds = set()
    for kind in _MARKS:
        spans = [
            (
                (begin - view.data.started) / seconds,
                (end - view.data.started) / seconds,
                escape(text[:_MAX_HOVER]),
            )
            for begin, end, text in _find_spans(view.data, kind)
        ]
        spans = spans[:: len(spans) // _MAX_MARKS + 1]
        points: list[_Point] = []
        for begin, end, text in spans:
            if kind in {"save", "load"}:
                points.append((begin, 0.03, text))
            else:
                points += [(begin, 0, text), (begin, 1, text)]
                # A line that returns over itself would fill the gaps between its dashes.
                points += [(end, 1, text), (end, 0, text)] if kind == "stall" else []
                points.append((None, None, text))
        if points:
            kinds.add(kind)
            style = _style_mark(kind, colors.get(kind, view.color))
            _add_to_mark_axis(figure, view, points, f"<extra>{_KINDS.get(kind, kind)}</extra>", style)
    return kinds


def _style_mark(kind: str, color: str) -> dict[str, Any]:
    """Return the style of a mark: a triangle, an area, or a dashed line."""
    if kind in {"save", "load"}:
        symbol = "triangle-up" if kind == "save" else "triangle-down"
        return {"mode": "markers", "marker": {"symbol": symbol, "color": color, "size": 9}}
    if kind == "stall":
        return {"mode": "lines", "line": {"color": color, "width": 0}, "fill": "toself", "opacity": 0.25}
    return {"mode": "lines", "line": {"color": color, "dash": "dash", "width": 1.5}}


def _add_to_mark_axis(
    figure: go.Figure, view: RunView, points: Sequence[_Point], extra: str, style: Mapping[str, Any]
) -> None:
    """Add points on the axis of the marks, from 0 at the bottom of the plot to 1 at its top; None ends a line."""
    figure.add_trace(
        go.Scatter(
            x=[None if x is None else _round(x) for x, _, _ in points],
            y=[y for _, y, _ in points],
            text=[text for _, _, text in points],
            hovertemplate=f"%{{text}}{extra}",
            yaxis="y2",
            meta=view.index,
            showlegend=False,
            **style,
        )
    )


def _find_spans(data: RunData, kind: str) -> list[tuple[float, float, str]]:
    """Return begin, end and text of the events of a kind; a stall ends with the next event of the launcher."""
    spans = []
    events = [event for event in data.events if event.kind == kind or event.kind not in {"save", "load"}]
    for number, event in enumerate(events):
        if event.kind == kind:
            following = next((later.time for later in events[number + 1 :]), event.time)
            end = following if kind == "stall" else event.time
            spans.append((event.time - event.seconds, end, event.text))
    return spans


def _describe_balance(view: RunView, is_named: bool) -> str:
    """Return a sentence that names the rank with the largest own time; an empty text for one rank, or few steps."""
    measured = {rank: times for rank, times in view.data.times.items() if times.num_steps >= MIN_STEPS}
    means = {rank: mean for rank, times in measured.items() if (mean := _compute_mean(times.busy))}
    if len(means) < 2:  # noqa: PLR2004 - one rank delays no other
        return ""
    longest, median = max(means, key=means.__getitem__), statistics.median_low(means.values())
    prefix = f"{view.label}: r" if is_named else "R"
    sentence = f"{prefix}ank {longest} has the longest own time, {means[longest]:.3g} s a step on average"
    step_time = min(mean for rank in means if (mean := _compute_mean(measured[rank].step)))
    if find_slowest(means, step_time) is None:
        return f"{sentence}; the ranks are balanced (median {median:.3g} s)."
    return f"{sentence}: {means[longest] / median:.1f} times the median of {median:.3g} s. It delays the other ranks."


# Figures -----------------------------------------------------------------------------------


def _create_figure(x_title: str, y_title: str, height: int, hovermode: str) -> go.Figure:
    return go.Figure(
        layout={
            "template": "none",  # the page sets the colours, and the default template has 7 KB a plot
            "height": height,
            "margin": {"l": 48, "r": 12, "t": 8, "b": 40},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 12},
            "hovermode": hovermode,
            "hoverlabel": {"namelength": -1},
            "legend": {"orientation": "h", "y": -0.2, "yanchor": "top"},
            "xaxis": {
                "title": {"text": x_title},
                "automargin": True,
                "rangemode": "tozero" if y_title else "normal",
                "exponentformat": "SI",
                "minexponent": 6,
            },
            "yaxis": {
                "title": {"text": y_title},
                "automargin": True,
                "rangemode": "tozero" if y_title else "normal",
                "exponentformat": "SI",
                "minexponent": 6,
            },
            "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        }
    )


def _add_line(
    figure: go.Figure, curve: Curve, view: RunView, color: str, dash: str = "solid", **options: Any
) -> None:
    figure.add_trace(
        go.Scatter(
            x=[_round(x) for x in curve.x],
            y=[_round(y) if math.isfinite(y) else None for y in curve.y],
            mode="lines+markers" if len(curve) < _FEW_POINTS else "lines",
            line={"color": color, "width": 1.5, "dash": dash},
            marker={"size": 4},
            meta=view.index,
            **options,
        )
    )


def _round(value: float) -> float:
    """Round to seven digits, as many as float32 has; steps are exact."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.7g}")


def _to_json(figure: go.Figure) -> str:
    """Return a figure as JSON that cannot end the script element around it."""
    return str(figure.to_json()).replace("<", "\\u003c")


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
        "kind": _KINDS.get(event.kind, event.kind),
        "text": event.text,
        "details": event.details,
    }
