"""Figures of a report by plotly: lines of curves, and marks above them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import plotly.graph_objects as go

from accel_cli.extensions.report.data import Curve, RunData

__all__ = [
    "COLORS",
    "DASHES",
    "FEW_POINTS",
    "MAX_CURVE_POINTS",
    "MAX_MARKS",
    "Plot",
    "Point",
    "RunView",
    "add_line",
    "add_to_mark_axis",
    "create_figure",
    "round_value",
    "thin_curve",
    "write_json",
]

COLORS = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#9d755d", "#d4a72c", "#ff7aa2", "#8a8f98", "#e45756",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot")
MAX_CURVE_POINTS = 1000
MAX_MARKS = 200
FEW_POINTS = 40
"""A line with fewer points shows each of them."""

Point: TypeAlias = "tuple[float | None, float | None, str]"
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


def create_figure(x_title: str, y_title: str, height: int, hovermode: str) -> go.Figure:
    """Return a figure without lines, in the style of the page."""
    return go.Figure(
        layout={
            "template": "none",  # the page sets the colours, and the default template has 7 KB a plot
            "height": height,
            "margin": {"l": 48, "r": 12, "t": 8, "b": 44},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 12},
            "hovermode": hovermode,
            "hoverlabel": {"namelength": -1},
            "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
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


def add_line(
    figure: go.Figure, curve: Curve, view: RunView, color: str, dash: str = "solid", **options: Any
) -> None:
    """Add a line to a figure, with its points if they are few."""
    figure.add_trace(
        go.Scatter(
            x=[round_value(x) for x in curve.x],
            y=[round_value(y) if math.isfinite(y) else None for y in curve.y],
            mode="lines+markers" if len(curve) < FEW_POINTS else "lines",
            line={"color": color, "width": 1.5, "dash": dash},
            marker={"size": 4},
            meta=view.index,
            **options,
        )
    )


def round_value(value: float) -> float:
    """Round to seven digits, as many as float32 has; steps are exact."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.7g}")


def write_json(figure: go.Figure) -> str:
    """Return a figure as JSON."""
    return str(figure.to_json())


def add_to_mark_axis(
    figure: go.Figure, view: RunView, points: Sequence[Point], extra: str, style: Mapping[str, Any]
) -> None:
    """Add points on the axis of the marks, from 0 at the bottom of the plot to 1 at its top; None ends a line."""
    figure.add_trace(
        go.Scatter(
            x=[None if x is None else round_value(x) for x, _, _ in points],
            y=[y for _, y, _ in points],
            text=[text for _, _, text in points],
            hovertemplate=f"%{{text}}{extra}",
            yaxis="y2",
            meta=view.index,
            showlegend=False,
            **style,
        )
    )
