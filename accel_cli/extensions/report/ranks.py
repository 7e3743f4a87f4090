"""Plots of the ranks over time: step times, own times, throughput and memory, with marks of events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import plotly.graph_objects as go

from accel_cli.extensions.report.data import EVENT_NAMES, Curve, RunData
from accel_cli.extensions.report.figures import (
    COLORS,
    DASHES,
    FEW_POINTS,
    MAX_CURVE_POINTS,
    MAX_MARKS,
    Plot,
    Point,
    RunView,
    add_line,
    add_to_mark_axis,
    create_figure,
    thin_curve,
    write_json,
)
from accel_cli.runs.heartbeats import Totals
from accel_cli.runs.speed import MIN_SAMPLES, MIN_STEPS, PARTS, describe_part, find_slowest, format_step_time

__all__ = ["describe_balance", "draw_memory", "draw_times", "list_parts"]

_MARK_COLORS = {"restart": "#d62728", "stall": "#d4a72c", "save": "#8a8f98", "load": "#8a8f98"}
_MARKS = {
    "restart": "dashed lines are restarts",
    "stall": "shaded areas are stalls",
    "save": "upward triangles are saved checkpoints",
    "load": "downward triangles are loaded checkpoints",
}
_UNITS = ((7200, 3600, "h"), (180, 60, "min"), (0, 1, "s"))
"""From which duration in seconds a unit is used, its seconds, and its name."""
_MAX_HOVER = 120
"""Characters of the text of a mark."""
_MAX_RANKS = 16
"""The number of ranks of a run that are drawn."""
_RARE = 4
"""The largest value ends an axis unless it exceeds the 98th percentile by this factor."""


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


def draw_times(views: Sequence[RunView], numbers: Iterator[int]) -> list[Plot]:
    """Draw step times and own times."""
    means = [
        round(times.num_steps / len(times.step))
        for view in views
        for times in view.data.times.values()
        if len(times.step)
    ]
    averaged = f" Each point is the mean of about {max(means)} steps." if max(means, default=0) > 1 else ""
    plots = (
        _RankCurves(
            "Step time by rank",
            "Seconds from one optimizer step to the next. Ranks of DDP wait for each other, so their step times are equal."
            f"{averaged}",
            [(view, {rank: times.step for rank, times in view.data.times.items()}) for view in views],
        ),
        _RankCurves(
            "Own time by rank",
            "Seconds of a step in which a rank waits for no other: the rank with the longest own time delays the others. On a GPU it "
            "is the time of the host. With sharded models, it includes waits for other ranks in the forward and backward pass.",
            [(view, {rank: times.own for rank, times in view.data.times.items()}) for view in views],
        ),
        *_list_throughputs(views),
    )
    return [_draw_ranks(plot, next(numbers)) for plot in plots if plot.peak]


def _list_throughputs(views: Sequence[RunView]) -> list[_RankCurves]:
    """Return the throughput of all ranks, by the first rank of each run: all have counted the samples of all."""
    first = [(view, min(view.data.times.items(), default=None, key=lambda item: item[0])) for view in views]
    return [
        _RankCurves(
            f"{name} per second",
            f"{name} of all ranks that were trained on per second, from one optimizer step to the next.",
            [(view, {entry[0]: getattr(entry[1], name.lower())} if entry else {}) for view, entry in first],
            unit=f"{name.lower()}/s",
        )
        for name in ("Samples", "Tokens")
    ]


def list_parts(views: Sequence[RunView]) -> list[dict[str, str]]:
    """Return the parts of a step of each rank, as rows of a table; of many ranks those that are drawn."""
    rows = []
    for view in views:
        ranks = _choose_ranks({rank: times.own for rank, times in view.data.times.items()})
        measured = _list_means(view)
        for rank in ranks:
            if means := measured.get(rank):
                times = {name: getattr(means, name) for name in (*PARTS, "wait", "own")}
                cells = {name: format_step_time(time) for name, time in {"step": means.time, **times}.items()}
                rows.append({"run": view.label, "rank": str(rank), **cells})
    return rows


def _list_means(view: RunView) -> dict[int, Totals]:
    """Return the means per step of ranks that have made enough steps, over the last attempt."""
    return {
        rank: times.speed.means
        for rank, times in view.data.times.items()
        if times.speed and times.speed.steps >= MIN_STEPS and len(times.step) >= MIN_SAMPLES
    }


def draw_memory(views: Sequence[RunView], numbers: Iterator[int]) -> list[Plot]:
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


def draw_use(views: Sequence[RunView], numbers: Iterator[int]) -> list[Plot]:
    """Draw the use of CPUs and GPUs."""
    plots = (
        _RankCurves(
            "CPU use by rank",
            "CPUs that each process uses, threads and ended children included; 1 is one CPU.",
            [(view, view.data.cpu_use) for view in views],
            unit="CPUs",
        ),
        _RankCurves(
            "GPU use by rank",
            "Utilization of the GPU of each process, as the driver reports it.",
            [(view, view.data.gpu_use) for view in views],
            unit="%",
        ),
    )
    return [_draw_ranks(plot, next(numbers)) for plot in plots if plot.peak is not None]


def _draw_ranks(plot: _RankCurves, number: int) -> Plot:
    """Draw a line for each rank of each run over the time since the start of the run, and the marks of its events."""
    seconds, time_unit = _choose_unit(view for view, _ in plot.curves)
    figure = create_figure(f"time since the start ({time_unit})", plot.unit, 340, hovermode="closest")
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
                thin_curve(by_rank[rank], MAX_CURVE_POINTS), view.data.started, seconds, plot.scale
            )
            values += [y for y in curve.y if math.isfinite(y)]
            name = f"rank {rank}" if is_single else f"{escape(view.label)}, rank {rank}"
            add_line(
                figure,
                curve,
                view,
                color=COLORS[position % len(COLORS)] if is_single else view.color,
                dash=DASHES[position // len(COLORS) % len(DASHES)] if is_single else "solid",
                name=name,
                showlegend=is_single and len(ranks) > 1,
                hovertemplate=f"%{{y:.4g}} {plot.unit} at %{{x:.4g}} {time_unit}<extra>{name}</extra>",
            )
        kinds |= _add_marks(figure, view, seconds, _MARK_COLORS if is_single else {})
    if marks := [text for kind, text in _MARKS.items() if kind in kinds]:
        captions.append(f"{', '.join(marks)}.".capitalize())
    captions.append(_limit_axis(figure, values, plot.unit))
    return Plot(number, plot.title, write_json(figure), " ".join(filter(None, captions)))


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
    usual = statistics.quantiles(values, n=50)[-1] if len(values) >= FEW_POINTS else largest
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
        spans = spans[:: len(spans) // MAX_MARKS + 1]
        points: list[Point] = []
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
            add_to_mark_axis(figure, view, points, f"<extra>{EVENT_NAMES.get(kind, kind)}</extra>", style)
    return kinds


def _style_mark(kind: str, color: str) -> dict[str, Any]:
    """Return the style of a mark: a triangle, an area, or a dashed line."""
    if kind in {"save", "load"}:
        symbol = "triangle-up" if kind == "save" else "triangle-down"
        return {"mode": "markers", "marker": {"symbol": symbol, "color": color, "size": 9}}
    if kind == "stall":
        return {"mode": "lines", "line": {"color": color, "width": 0}, "fill": "toself", "opacity": 0.25}
    return {"mode": "lines", "line": {"color": color, "dash": "dash", "width": 1.5}}


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


def describe_balance(view: RunView, is_named: bool) -> str:
    """Return a sentence that names the rank with the largest own time; an empty text for one rank, or few steps."""
    means = _list_means(view)
    own_times = {rank: each.own for rank, each in means.items() if each.own}
    if len(own_times) < 2:  # noqa: PLR2004 - one rank delays no other
        return ""
    longest, median = max(own_times, key=own_times.__getitem__), statistics.median_low(own_times.values())
    prefix = f"{view.label}: r" if is_named else "R"
    sentence = f"{prefix}ank {longest} has the longest own time, {own_times[longest]:.3g} s a step on average"
    if find_slowest(own_times, min(each.time for each in means.values())) is None:
        return f"{sentence}; the ranks are balanced (median {median:.3g} s)."
    part = describe_part([means[longest]], list(means.values()))
    return f"{sentence}: {own_times[longest] / median:.1f} times the median of {median:.3g} s{part}. It delays the other ranks."
