"""Table of a run on a terminal: one row a rank, the last metrics with sparklines, and the loop that refreshes it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

from accel_cli import console
from accel_cli.runs.screen import NO_CONTROLS, Controls
from accel_cli.runs.snapshot import MetricSeries, RankSnapshot, RunSnapshot
from accel_cli.runs.speed import describe_part, format_number, format_step_time
from accel_runtime.environment.text import CONTROLS

__all__ = [
    "MEANINGS",
    "build_help",
    "build_view",
    "crop_lines",
    "format_sparkline",
    "render_lines",
    "shorten_location",
    "supports_blocks",
]

_MAX_RANKS = 8
"""More ranks than these are folded to the fastest, the median and the slowest."""
_MIN_LOCATION, _MIN_NARROW_LOCATION, _NARROW = 12, 10, 60
"""The least columns of the location, and of that on a screen narrower than the last number."""
_GAP = 2
_MAX_NOTE_LINES = 3
_MIN_MEANING = 30
"""The least columns for the meaning of a column beside its name."""
_MAX_METRICS = 8
_MAX_NAME, _MIN_SPARKLINE, _MAX_SPARKLINE = 24, 8, 40
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_ELLIPSIS, _ASCII_ELLIPSIS = "…", "..."
_KILO, _MINUTE_S, _HOUR_S, _DAY_S = 1000, 60, 3600, 86400


@dataclass(frozen=True)
class _Row:
    """Row of the table: a rank with its label."""

    rank: RankSnapshot
    label: str


@dataclass(frozen=True)
class _Column:
    """Column of the table."""

    heading: str
    format: Callable[[_Row], str]
    is_wide: bool = False
    """True if it is shown only if the location fits as it is."""
    least: int = 0
    """The least width, so that the columns do not move with every refresh."""

    def measure(self, rows: Sequence[_Row]) -> int:
        """Return its width with the gap before the next column."""
        return max(self.least, *map(cell_len, [self.heading, *map(self.format, rows)])) + _GAP


def build_view(
    run: RunSnapshot,
    width: int,
    height: int | None = None,
    *,
    controls: Controls = NO_CONTROLS,
    is_ascii: bool = False,
) -> Group:
    """Return the header, the table of ranks and the last metrics, cut to these columns and lines.

    Args:
        run: The snapshot.
        width: The columns of the screen.
        height: The lines of the screen; None for any number.
        controls: What the keys have changed.
        is_ascii: If true, the screen shows ASCII only.
    """
    has_keys, shows_all = controls.has_keys, controls.shows_all
    if has_keys and height is not None:
        height -= 1
    lines = _build_header(run, width)
    room = None if height is None else height - len(lines) - 2
    rows, folded = (
        _scroll_rows(run, room, controls.first, has_keys=has_keys)
        if shows_all
        else _choose_rows(run, room, has_keys=has_keys)
    )
    columns = _choose_columns(rows, width)
    if rows and not any(column.heading == "batches" for column in columns) and (text := _format_epoch(run)):
        lines.append(Text(text))
    lines += (
        [Text(), *_build_table(rows, columns, width, slowest=run.slowest, is_ascii=is_ascii)] if rows else []
    )
    notes = [Text(folded, style="dim")] if folded else []
    notes += [Text(note, style="yellow") for note in _list_notes(run)]
    for note in notes:
        lines += list(note.wrap(Console(width=width), width))[:_MAX_NOTE_LINES]
    room = _MAX_METRICS if height is None else min(_MAX_METRICS, height - len(lines) - 1)
    if run.metrics and room > 0:
        lines += [Text(), *_build_metrics(run.metrics, room, width, is_ascii=is_ascii)]
    lines = crop_lines(lines, width, height)
    if has_keys and height is not None:
        keys = f"q quit  ? help  a {'fold' if shows_all else 'all'}  {_name_arrows(is_ascii)} scroll"
        lines += [*(Text() for _ in range(height - len(lines))), *crop_lines([Text(keys, "dim")], width, 1)]
    return Group(*lines)


def _name_arrows(is_ascii: bool) -> str:
    return "up/down" if is_ascii else "↑↓"


_KEYS = (
    ("q", "quit"),
    ("?", "show or hide this help"),
    ("a", "show each rank, or fold many"),
    ("up, down, j, k", "scroll by a line"),
    ("page up, page down", "scroll by a screen"),
    ("home, end", "scroll to the first or last line"),
)
MEANINGS: Mapping[str, str] = MappingProxyType({
    "rank": "the rank; * marks the slowest one",
    "steps": "optimizer steps since the start of this attempt",
    "batches": "batches of this epoch, of those that its loader has",
    "ETA": "time until the end of the epoch; in the second line, until the end of the run, if its arguments or configuration "
    "name the number of epochs or steps",
    "steps/s, mean": "steps per second over the last 64 steps, and over the whole attempt",
    "own time": "time of a step in which the rank does not wait for others",
    "data, forward, backward, update, wait": "parts of a step: waiting for data, forward pass, backward pass, from there to the "
    "end of the optimizer step, waiting for other ranks",
    "last": "time since the last step",
    "memory": "resident memory of the process of the rank, without its data-loader workers",
    "GPU mem, GPU": "GPU memory of the process, and utilization of its GPU",
    "epoch, collectives": "number of the epoch; collectives of accel",
    "location": "in a collective now, or after the newest one, with its line; without collectives, the part of the step",
    "last lines": "the last logged values, with a sparkline of those before",
})  # fmt: skip
"""The columns of the table, and what they mean."""


def build_help(width: int, height: int, *, first: int = 0) -> Group:
    """Return the keys and the meaning of the columns, from a line on."""
    lines = [Text("Keys", style="bold")]
    for title, entries in (("", _KEYS), ("Columns", tuple(MEANINGS.items()))):
        if title:
            lines += [Text(), Text(title, style="bold")]
        size = max(len(name) for name, _ in entries)
        is_wide = width >= size + _GAP + _MIN_MEANING
        for name, meaning in entries:
            indent = size + _GAP if is_wide else _GAP
            if not is_wide:
                lines.append(Text(name))
            wrapped = list(Text(meaning, style="dim").wrap(Console(width=width), max(1, width - indent)))
            for number, line in enumerate(wrapped):
                head = name.ljust(indent) if is_wide and number == 0 else " " * indent
                lines.append(Text.assemble(head, line))
    count = max(1, height - 1)
    shown = lines[max(0, min(first, len(lines) - count)) :][:count]
    shown += [Text() for _ in range(count - len(shown))]
    return Group(*crop_lines([*shown, Text("? back   q quit", style="dim")], width, height))


def crop_lines(lines: Sequence[Text], width: int, height: int | None) -> list[Text]:
    """Return the lines that fit, cropped, and with `?` for control characters, which could change the terminal."""
    shown = list(lines if height is None else lines[:height])
    for line in shown:
        line.plain = CONTROLS.sub("?", line.plain)
        line.no_wrap = True
        line.overflow = "crop"
        line.truncate(width)
    return shown


def supports_blocks(encoding: str | None) -> bool:
    """Return True if an encoding has the characters of sparklines."""
    try:
        f"{_BLOCKS}{_ELLIPSIS}".encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def render_lines(body: Group, width: int, *, is_coloured: bool) -> list[str]:
    """Return the lines of a view as text, with escape sequences if it is coloured."""
    screen = Console(
        width=width,
        force_terminal=is_coloured,
        no_color=not is_coloured,
        color_system="standard" if is_coloured else None,
    )
    with screen.capture() as capture:
        screen.print(body, highlight=False)
    return [line.rstrip() for line in capture.get().splitlines()]


# Header


def _build_header(run: RunSnapshot, width: int) -> list[Text]:
    state, style = run.state, _choose_style(run)
    seconds = run.elapsed
    parts = [
        state
        if seconds is None
        else f"{state} {'for' if run.is_running or run.is_elsewhere else 'after'} {console.format_duration(seconds)}"
    ]
    if run.attempt:
        parts.append(f"{run.attempt} restart{'s' if run.attempt > 1 else ''}")
    if run.world_size:
        count = len(run.ranks)
        parts.append(
            f"world size {run.world_size}"
            if count == run.world_size
            else f"{count} of {run.world_size} ranks here"
        )
    if (eta := run.eta) is not None and run.goal:
        parts.append(f"ETA of the run {_format_clock(eta)} ({run.goal.source})")
    first = Text(run.run, style="bold")
    if cell_len(run.run) + _GAP + cell_len(run.script) <= width:
        first.append(f"  {run.script}", style="not bold")
    lines, current = [first], Text(parts[0], style=style)
    for part in parts[1:]:
        if current.cell_len + _GAP + cell_len(part) > width:
            lines.append(current)
            current = Text(part)
        else:
            current.append(f", {part}", style="default")
    lines.append(current)
    if throughput := run.throughput.format():
        lines += Text(throughput).wrap(Console(width=width), width)
    return lines


def _choose_style(run: RunSnapshot) -> str:
    """Return the colour of the state; without a launcher, how a script ended may be unknown."""
    if run.is_running or run.exit_code == 0 or run.state == "ended":
        return "green"
    return "yellow" if run.is_elsewhere or run.state == "unknown" else "red"


def _format_epoch(run: RunSnapshot) -> str:
    """Return the progress of the rank that is behind the others."""
    ranks = [rank for rank in run.ranks if rank.beat and rank.beat.batches]
    if not ranks:
        return ""
    last = min(ranks, key=lambda rank: rank.beat.batches if rank.beat else 0)
    eta = f", ETA {_format_clock(last.eta)}" if last.eta is not None else ""
    return f"epoch {last.beat.epoch if last.beat else 0}: {_format_batches(last)}{eta}"


def _list_notes(run: RunSnapshot) -> list[str]:
    notes = []
    if (slowest := run.slowest) is not None:
        times = sorted(run.own_times.values())
        own, median = _format_time(run.own_times[slowest]), _format_time(times[(len(times) - 1) // 2])
        means = {rank.rank: rank.means for rank in run.ranks if rank.means}
        part = describe_part([means[slowest]], list(means.values()))
        notes.append(f"* slowest rank: {slowest}, with {own} of own time per step; median {median}{part}")
    if run.idle_time is not None:
        notes.append(f"no progress for {console.format_duration(run.idle_time)}: accel stacks shows where")
    if run.restart_reason and run.is_running:
        # `accel logs --attempt` finds the log, whose path would take a line or two.
        reason = run.restart_reason.partition("\n")[0].partition(" (its log: ")[0]
        notes.append(f"restarted: {reason}")
    if run.failure and run.exit_code != 0:
        notes.append(run.failure.partition("\n")[0])
    return notes


# Ranks


def _label_rows(run: RunSnapshot) -> list[_Row]:
    return [_Row(rank, f"{rank.rank}{'*' if rank.rank == run.slowest else ''}") for rank in run.ranks]


def _scroll_rows(run: RunSnapshot, room: int | None, first: int, *, has_keys: bool) -> tuple[list[_Row], str]:
    """Return the rows of ranks from the first one on that fit, and a line about the others."""
    rows = _label_rows(run)
    if room is None or len(rows) <= room:
        return rows, ""
    count = max(1, room - 1)
    first = max(0, min(first, len(rows) - count))
    shown = rows[first : first + count]
    if not has_keys:
        return shown, f"{len(rows) - count} more ranks do not fit on the screen"
    return shown, f"rows {first + 1} to {first + len(shown)} of {len(rows)} ranks"


def _choose_rows(run: RunSnapshot, room: int | None, *, has_keys: bool) -> tuple[list[_Row], str]:
    """Return the rows that are shown, and a line about the others."""
    ranks, slowest = run.ranks, run.slowest
    rows = _label_rows(run)
    if len(ranks) <= _MAX_RANKS and (room is None or len(ranks) <= max(room, 1)):
        return rows, ""
    most = max((rank.beat.steps for rank in ranks if rank.beat), default=0)

    def get_slowness(rank: RankSnapshot) -> tuple[int, float]:
        # Ranks that average gradients are one step apart at times.
        behind = most - rank.beat.steps if rank.beat else 0
        return behind if behind > 1 else 0, rank.own_time or 0.0

    ordered = sorted((rank for rank in ranks if rank.state == "running"), key=get_slowness)
    rows = []
    if ordered:
        chosen = [ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]]
        labels = ["fastest ", "median ", "slowest "]
        if get_slowness(ordered[0]) == get_slowness(ordered[-1]):  # unknown in the first steps
            chosen = list({rank.rank: rank for rank in chosen}.values())
            labels = [""] * len(chosen)
        rows = [
            _Row(rank, f"{label}{rank.rank}{'*' if rank.rank == slowest else ''}")
            for label, rank in zip(labels, chosen, strict=True)
        ]
    states = Counter(rank.state for rank in ranks)
    for state in sorted(states.keys() - {"running"}):
        first = next(rank for rank in ranks if rank.state == state)
        rows.append(_Row(first, str(first.rank)))
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    total = f"{len(ranks)} ranks" if len(states) == 1 else f"{len(ranks)} ranks ({counts})"
    return rows, f"{total}; {'press a to show each' if has_keys else 'accel top --all shows each'}"


def _choose_columns(rows: Sequence[_Row], width: int) -> list[_Column]:
    """Return the columns that fit, in the order of the table."""
    columns = _list_columns(rows)
    wanted = max((cell_len(row.rank.location) for row in rows), default=0)
    least = _MIN_LOCATION if width >= _NARROW else _MIN_NARROW_LOCATION
    remaining = width - least
    chosen = []
    # The most important ones first.
    for name, column in columns.items():
        size = column.measure(rows)
        # Without room for the batches, a line above the table has the progress of the epoch.
        is_useful = name != "eta" or "batches" in chosen
        if is_useful and size <= remaining - (max(0, wanted - least) if column.is_wide else 0):
            chosen.append(name)
            remaining -= size
    return [columns[name] for name in _ORDER if name in chosen]


_ORDER = (
    "rank", "steps", "epoch", "batches", "eta", "rate", "mean", "own", "data", "forward", "backward", "update", "wait", "age",
    "collectives", "memory", "gpu_memory", "gpu",
)  # fmt: skip
"""The columns from left to right; the location is the last one."""


def _list_columns(rows: Sequence[_Row]) -> dict[str, _Column]:
    """Return the columns by name, the most important first; without those that no rank has a value for."""
    has_gpu = any(row.rank.gpu_memory is not None for row in rows)
    columns = {
        "rank": _Column("rank", lambda row: row.label),
        "steps": _Column("steps", lambda row: _format_count(row.rank.beat.steps) if row.rank.beat else "-"),
        "rate": _Column("steps/s", lambda row: _format_number(row.rank.rate)),
        "age": _Column("last", lambda row: _format_age(row.rank.step_age), least=5),
        "batches": _Column("batches", lambda row: _format_batches(row.rank)),
        "eta": _Column("ETA", lambda row: _format_clock(row.rank.eta)),
        "memory": _Column("memory", lambda row: _format_memory(row.rank.memory), least=7),
        "gpu_memory": _Column("GPU mem", lambda row: _format_memory(row.rank.gpu_memory)),
        "mean": _Column(
            "mean", lambda row: _format_number(row.rank.beat.rate_mean if row.rank.beat else None)
        ),
        "gpu": _Column(
            "GPU", lambda row: "-" if row.rank.gpu_percent is None else f"{row.rank.gpu_percent}%"
        ),
        "own": _Column("own time", lambda row: _format_time(row.rank.own_time), is_wide=True),
        **{name: _build_part_column(name) for name in ("data", "forward", "backward", "wait", "update")},
        "epoch": _Column(
            "epoch", lambda row: str(row.rank.beat.epoch) if row.rank.beat else "-", is_wide=True
        ),
        "collectives": _Column(
            "collectives",
            lambda row: _format_count(row.rank.beat.collectives) if row.rank.beat else "-",
            is_wide=True,
        ),
    }
    return {name: column for name, column in columns.items() if has_gpu or not name.startswith("gpu")}


def _build_part_column(name: str) -> _Column:
    """Return the column of a part of a step: its time per step."""
    return _Column(
        name,
        lambda row: _format_time(getattr(row.rank.parts, name) if row.rank.parts else None),
        is_wide=True,
    )


def _build_table(
    rows: Sequence[_Row], columns: Sequence[_Column], width: int, *, slowest: int | None, is_ascii: bool
) -> list[Text]:
    sizes = [column.measure(rows) - _GAP for column in columns]
    gap, room = " " * _GAP, max(1, width - sum(sizes) - _GAP * len(sizes))

    def join(cells: Sequence[str], last: str, style: str) -> Text:
        padded = [cell.rjust(size) for cell, size in zip(cells, sizes, strict=True)]
        return Text(gap.join([*padded, last]), style=style)

    lines = [join([column.heading for column in columns], "location", "bold")]
    for row in rows:
        style = (
            "yellow" if row.rank.rank == slowest else "red" if row.rank.state in {"failed", "killed"} else ""
        )
        location = shorten_location(row.rank.location, room, is_ascii=is_ascii)
        lines.append(join([column.format(row) for column in columns], location, style))
    return lines


def shorten_location(text: str, width: int, *, is_ascii: bool = False) -> str:
    """Shorten `in gather at train.py:14 (main)` to a number of columns; the file and the line remain longest."""
    state, _, place = text.partition(" at ")
    place = place.partition(" (")[0]
    relation, _, operation = state.partition(" ")
    candidates = [text, text.removesuffix(" yet")]
    if place:
        candidates += [f"{state} at {place}", f"{relation} {operation} {place}", f"{relation} {place}"]
        # Only a rank in a collective is at this line.
        candidates.append(place if relation == "in" else f"{relation} :{place.rpartition(':')[2]}")
    fitting = next((candidate for candidate in candidates if cell_len(candidate) <= width), None)
    if fitting is not None:
        return fitting
    if candidates[-1] != place:
        return _cut(candidates[-1], width, is_ascii=is_ascii)
    mark = _ASCII_ELLIPSIS if is_ascii else _ELLIPSIS
    return f"{mark}{place[len(mark) - width :]}" if width > len(mark) else place[-width:]


def _cut(text: str, width: int, *, is_ascii: bool = False) -> str:
    """Truncate a text to a width in columns."""
    mark = _ASCII_ELLIPSIS if is_ascii else _ELLIPSIS
    return text if cell_len(text) <= width else f"{text[: max(0, width - len(mark))]}{mark}"[:width]


def _format_count(count: int) -> str:
    for unit, size in (("G", _KILO**3), ("M", _KILO**2)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)


def _format_number(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def _format_age(seconds: float | None) -> str:
    """Return an age, such as `0.2 s`, `45 s`, `12 min` or `3 h`."""
    if seconds is None:
        return "-"
    if seconds < 10:  # noqa: PLR2004 - one digit before the point
        return f"{seconds:.1f} s"
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE_S:.0f} min" if seconds < 2 * _HOUR_S else f"{seconds / _HOUR_S:.0f} h"


def _format_clock(seconds: float | None) -> str:
    """Return a remaining time, such as `0:07`, `1:02:03` or `2 d 3 h`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), _MINUTE_S)
    if seconds >= _DAY_S:
        return console.format_duration(seconds)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _format_time(seconds: float | None) -> str:
    return "-" if seconds is None else format_step_time(seconds)


def _format_memory(size: int | None) -> str:
    """Return a number of bytes with at most three digits."""
    if size is None:
        return "-"
    for unit, base in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if size >= base:
            return f"{_format_number(size / base)} {unit}"
    return f"{size // _KILO} kB"


def _format_batches(rank: RankSnapshot) -> str:
    """Return the progress of the epoch, as in `12/100 12%`, or the number of batches if the loader has no length."""
    beat = rank.beat
    if beat is None or not beat.batches:
        return "-"
    if not beat.epoch_length:
        return _format_count(beat.epoch_batches)
    percent = 100 * beat.epoch_batches // beat.epoch_length
    return f"{_format_count(beat.epoch_batches)}/{_format_count(beat.epoch_length)} {min(percent, 100)}%"


# Metrics


def _build_metrics(metrics: Sequence[MetricSeries], room: int, width: int, *, is_ascii: bool) -> list[Text]:
    shown = list(metrics[:room])
    more = len(metrics) - len(shown)
    if more:
        shown = shown[:-1]
        more += 1
    names = [_cut(series.name, min(_MAX_NAME, width // 3), is_ascii=is_ascii) for series in shown]
    values = [_cut(_format_value(series.value), width // 3, is_ascii=is_ascii) for series in shown]
    steps = ["" if series.step is None else f"step {_format_count(series.step)}" for series in shown]
    widths = [max(map(cell_len, texts), default=0) for texts in (names, values, steps)]
    sparkline = min(_MAX_SPARKLINE, width - sum(widths) - 3 * _GAP)
    lines = []
    for name, value, step, series in zip(names, values, steps, shown, strict=True):
        text = f"{name:<{widths[0]}}  {value:>{widths[1]}}  {step:<{widths[2]}}"
        line = Text(text)
        if sparkline >= _MIN_SPARKLINE:
            line.append(f"  {format_sparkline(series.recent, sparkline, is_ascii=is_ascii)}", style="cyan")
        line.rstrip()
        lines.append(line)
    return [*lines, Text(f"and {more} more metrics", style="dim")] if more else lines


def _format_value(value: float | str) -> str:
    if isinstance(value, str):
        return value.replace("\n", " ")
    return f"{value:.0f}" if value.is_integer() and abs(value) < _KILO**3 else f"{value:.5g}"


def format_sparkline(values: Sequence[float], width: int, *, is_ascii: bool = False) -> str:
    """Return the last values as blocks of different heights; a value that is not finite is a `!`."""
    shown, blocks = values[-width:], _ASCII_BLOCKS if is_ascii else _BLOCKS
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return "!" * len(shown)
    low, high = min(finite), max(finite)
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return "".join(blocks[0] if math.isfinite(value) else "!" for value in shown)
    scale = (len(blocks) - 1) / span
    return "".join(blocks[round((value - low) * scale)] if math.isfinite(value) else "!" for value in shown)
