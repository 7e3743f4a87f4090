"""The page of `accel diff --html`: one file with plots over steps and layers, without scripts and without a connection.

Names of runs, parameters and modules are untrusted: all text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from accel_cli.extensions.numerics.comparison import STAGES, Comparison, SettingDifference, format_place
from accel_runtime.environment.settings import __version__

__all__ = ["render_page"]

_COLORS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#b279a2",
    "#72b7b2",
    "#9d755d",
    "#d4a72c",
    "#ff7aa2",
    "#8a8f98",
    "#e45756",
)
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 240, 64, 28
_MAX_LAYERS = 60
_SMALLEST = 1e-17
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{text-align:left;padding:.25rem .75rem;border-bottom:1px solid #ddd;"
    "vertical-align:top;overflow-wrap:anywhere}svg{max-width:100%;height:auto}text{font-size:11px;fill:#555}"
    "figure{margin:1.5rem 0}figcaption span{margin-right:1rem}"
)
_VERDICTS = {
    "equal": "The runs are equal bit by bit in all that is recorded.",
    "rounding": "The runs are equal up to the order of sums.",
    "different": "The runs differ.",
}


def render_page(found: Comparison) -> str:
    """Return the page of a comparison."""
    names = [run.name for run in found.runs]
    title = f"{names[0]} and {names[1]}"
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="generator" content="accel diff">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f"<p><strong>{_VERDICTS[found.verdict]}</strong> {len(found.steps)} steps are recorded in both.</p>",
        _render_table(("", "what", "values", "relative size", "order of sums"), _list_differences(found)),
        f"<p>Order of sums: {escape(found.explanation)}</p>" if found.explanation else "",
        _render_table(
            ("setting", *names),
            [(one.name, one.first, one.second) for one in found.settings],
            "Settings that differ",
        ),
        _draw_losses(found, names),
        _draw_sizes(found),
        _draw_layers(found),
        "".join(f"<p>{escape(text)}.</p>" for text in found.notes),
        f"<p>accel {escape(__version__)}</p></body></html>\n",
    ]
    return "".join(parts)


def _list_differences(found: Comparison) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    named = (
        ("first difference", found.cause),
        ("first number", found.effect),
        ("first in bits", found.first),
        ("beyond the order of sums", found.beyond),
    )
    shown: list[object] = []
    for title, one in named:
        if one is None or any(one is other for other in shown):
            continue
        shown.append(one)
        if isinstance(one, SettingDifference):
            rows.append(("may explain it", one.name, f"{one.first} and {one.second}", "", ""))
            continue
        size = "" if one.size is None else f"{one.size:.1e}"
        rows.append(
            (
                "may explain it" if one.stage == "random" else title,
                format_place(one),
                one.detail,
                size,
                "" if one.bound is None else f"{one.bound:.1e}",
            )
        )
    return rows


def _render_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    if not rows:
        return ""
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return f"{heading}<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>{cells}</table>"


# Plots


def _draw_losses(found: Comparison, names: Sequence[str]) -> str:
    lines = [
        (name, [(point.step, value) for point in found.points if (value := point.losses[index]) is not None])
        for index, name in enumerate(names)
    ]
    return _draw_lines("Loss", "The average over the ranks, at each recorded step.", lines, is_log=False)


def _draw_sizes(found: Comparison) -> str:
    lines = [
        (
            STAGES[stage],
            [(point.step, point.sizes[stage]) for point in found.points if point.sizes.get(stage)],
        )
        for stage in STAGES
    ]
    bounds = [(point.step, point.bound) for point in found.points]
    shown = [line for line in lines if line[1]]
    if not shown:
        return ""
    text = "The largest relative difference of each stage of a step; 1 for what is no matter of size."
    return _draw_lines("Differences", text, [*shown, ("order of sums", bounds)], is_log=True)


def _draw_lines(
    title: str, text: str, lines: Iterable[tuple[str, list[tuple[int, float]]]], *, is_log: bool
) -> str:
    finite = [
        (name, [(x, _scale(y, is_log=is_log)) for x, y in points if math.isfinite(y)])
        for name, points in lines
    ]
    every = [point for _, points in finite for point in points]
    if not every:
        return ""
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    if low == high:
        low, high = low - 1, high + 1
    drawn, legend = [], []
    for index, (name, points) in enumerate(finite):
        color = _COLORS[index % len(_COLORS)]
        places = [
            (
                _LEFT + (_WIDTH - _LEFT - 10) * ((x - left) / (right - left) if right > left else 0.5),
                8 + (_HEIGHT - _BOTTOM - 8) * (high - y) / (high - low),
            )
            for x, y in points
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>')
        if len(places) <= _MAX_LAYERS:
            drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' for x, y in places]
        legend.append(f'<span style="color:{color}">{escape(name)}</span>')
    ticks = [
        f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{_format_tick(value, is_log=is_log)}</text>'
        for value, y in ((high, 14), (low, _HEIGHT - _BOTTOM))
    ]
    ticks += [
        f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="{anchor}">step {value}</text>'
        for value, x, anchor in ((left, _LEFT, "start"), (right, _WIDTH - 10, "end"))
    ]
    return (
        f'<h2>{escape(title)}</h2><figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(ticks)}{"".join(drawn)}</svg>'
        f"<figcaption>{escape(text)}<br>{''.join(legend)}</figcaption></figure>"
    )


def _draw_layers(found: Comparison) -> str:
    """Draw the differences of tensors at the first step that has any, in causal order."""
    figures = []
    for stage in STAGES:
        layers = found.layers.get(stage, [])[:_MAX_LAYERS]
        if len(layers) < 2:  # noqa: PLR2004 - a table has one
            continue
        row = 16
        height = row * len(layers) + 8
        bars = []
        for index, (name, size) in enumerate(layers):
            share = (_scale(size, is_log=True) + 17) / 17
            y = 4 + row * index
            bars.append(
                f'<text x="0" y="{y + 11}">{escape(name[-44:])}</text><rect x="270" y="{y}" width="{max(360 * share, 1):.1f}" '
                f'height="{row - 4}" fill="{_COLORS[0]}"/><text x="{280 + max(360 * share, 1):.1f}" y="{y + 11}">{size:.1e}</text>'
            )
        figures.append(
            f'<h3>{escape(STAGES[stage])}</h3><svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(bars)}</svg>'
        )
    return f"<h2>Tensors of the first step that differs</h2>{''.join(figures)}" if figures else ""


def _scale(value: float, *, is_log: bool) -> float:
    return math.log10(min(max(value, _SMALLEST), 1.0)) if is_log else value


def _format_tick(value: float, *, is_log: bool) -> str:
    return f"{10**value:.0e}" if is_log else f"{value:.4g}"
