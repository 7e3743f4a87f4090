"""`accel diff`: the first step, rank and number in which two runs differ."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel_cli import console
from accel_cli.commands.command import ScriptCommand, get_parsed
from accel_cli.commands.runs import LogDir, find_log_home
from accel_cli.errors import UsageError
from accel_cli.profile import options as typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_cli.extensions.numerics.comparison import Comparison, Difference, Run, SettingDifference

__all__ = ["app", "to_json"]

app = typer.Typer()

_STEPS = "steps:1-50,modules"
_VERDICTS = {
    "equal": "equal bit by bit",
    "rounding": "equal up to the order of sums",
    "different": "different",
}


@app.command(
    "diff",
    cls=ScriptCommand,
    rich_help_panel="Watch",
    epilog="Example: accel diff train.py --vary nproc=1,2",
)
def diff(  # noqa: PLR0913 - the signature declares the options
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B]",
            help="Compare these: two runs of accel runs that were recorded, or two scripts, which are run; with --vary one script. "
            "Arguments after -- are passed to the scripts.",
        ),
    ],
    *,
    vary: Annotated[
        str | None,
        typer.Option(
            "--vary",
            metavar="NAME=A,B",
            help="Run the script with two values: nproc=1,2, precision=no,bf16, compile=no,inductor, strategy=ddp,fully_shard, or a key "
            "of the profile.",
        ),
    ] = None,
    steps: Annotated[
        str,
        typer.Option(
            "--record-numerics", metavar="STEPS", help="Record these steps of scripts, as accel launch does."
        ),
    ] = _STEPS,
    nproc_per_node: typed.NprocPerNode = None,
    cpu: typed.Cpu = False,
    set: typed.SetKeys = None,  # noqa: A002 - as in accel launch
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with plots over steps and layers."),
    ] = None,
    log_dir: LogDir = None,
) -> None:
    """Find the first step, rank and number in which two runs differ.

    The exit code is 1 if they differ by more than the order of sums explains, and 2 if they cannot be compared or a script fails.
    """
    from accel_cli.extensions.numerics.comparison import compare
    from accel_runtime.observe.step_records.record import Selection

    # Before the scripts run, which may take long.
    try:
        Selection.parse(steps)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if html and not html.parent.is_dir():
        raise UsageError(f"Cannot write {str(html)!r}: {str(html.parent)!r} is no folder. Name another file.")
    words = get_parsed(context).words
    arguments = words[words.index("--") + 1 :] if "--" in words else ()
    names = runs[: len(runs) - len(arguments)]
    options = ["--record-numerics", steps]
    options += [] if nproc_per_node is None else ["--nproc-per-node", nproc_per_node]
    options += ["--cpu"] if cpu else []
    # A single process without torchrun has no folder of its own choice.
    options += ["--log-dir", log_dir, "--set", "launcher.kind=torchrun"] if log_dir else []
    options += [word for value in set or () for word in ("--set", value)]
    first, second = _read_runs(names, vary, options, arguments, find_log_home(log_dir))
    try:
        found = compare(first, second)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if html:
        from accel_cli.extensions.numerics.page import render_page

        try:
            html.write_text(render_page(found), encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"Cannot write {str(html)!r}: {error.strerror}. Name another file.") from None
    if json:
        console.print_json(to_json(found))
    else:
        _show(found)
    raise typer.Exit(int(found.verdict == "different"))


def _read_runs(
    names: Sequence[str], vary: str | None, options: Sequence[str], arguments: Sequence[str], home: Path
) -> tuple[Run, Run]:
    from accel_cli.extensions.numerics.runs import (
        Variant,
        check_script,
        is_script,
        list_variants,
        read_run,
        record_script,
    )

    if len(names) != (1 if vary else 2):
        raise UsageError(
            f"Cannot compare {len(names)} {'script' if vary else 'run'}{'' if len(names) == 1 else 's'}: pass "
            f"{'one script with --vary' if vary else 'two runs or two scripts, or one script with --vary'}."
        )
    for name in names:
        if vary or is_script(name):
            check_script(name)
    if vary:
        variants = list_variants(names[0], vary)
        return tuple(record_script(one, options, arguments, home) for one in variants)  # type: ignore[return-value]
    # Runs first: an error in one of them needs no launch.
    read = {name: read_run(home, name) for name in names if not is_script(name)}
    found = [
        record_script(Variant(name, name, ()), options, arguments, home) if is_script(name) else read[name]
        for name in names
    ]
    return found[0], found[1]


def _show(found: Comparison) -> None:
    from accel_cli.extensions.numerics.comparison import STAGES

    first, second = found.runs
    extent = ", in what is compared" if found.is_partial and found.effect is None else ""
    console.plain(f"{first.name} and {second.name}: {_VERDICTS[found.verdict]}{extent}")
    console.plain(
        f"{len(found.steps)} steps are recorded in both ({found.steps[0]} to {found.steps[-1]}); ranks: {first.world_size} and "
        f"{second.world_size}"
    )
    if found.effect is not None:
        console.plain("")
        _show_differences(found, found.effect)
    others = [one for one in found.settings if one is not found.cause]
    if others:
        console.plain("")
        console.table(
            ["settings that differ", first.name, second.name],
            [[one.name, one.first, one.second] for one in others],
        )
    if found.verdict == "different":
        later: dict[str, tuple[int, float]] = {}
        for point in found.points:
            for stage, size in point.sizes.items():
                later.setdefault(stage, (point.step, size))
        console.plain("")
        console.table(
            ["first differs at", "step", "relative size"],
            [
                [STAGES[stage], str(later[stage][0]), f"{later[stage][1]:.1e}"]
                for stage in STAGES
                if stage in later
            ],
        )
    console.print_notes(found.notes)


def _show_differences(found: Comparison, effect: Difference) -> None:
    from accel_cli.extensions.numerics.comparison import SettingDifference

    cause = found.cause
    rows = []
    if isinstance(cause, SettingDifference):
        rows.append(["may explain it", cause.name, f"{cause.first} and {cause.second}", "", ""])
    elif cause is not None and cause is not effect:
        rows.append(["may explain it", *_describe(cause)])
    rows.append(["first number" if rows else "first difference", *_describe(effect)])
    for title, one in (("first in bits", found.first), ("beyond the order of sums", found.beyond)):
        if one is not None and one is not effect:
            rows.append([title, *_describe(one)])
    console.table(["", "what", "values", "relative size", "order of sums"], rows)
    if any(one is not None and one.size is not None for one in (effect, found.beyond)):
        console.plain(f"order of sums: {found.explanation}")


def _describe(one: Difference) -> list[str]:
    from accel_cli.extensions.numerics.comparison import format_place

    return [
        format_place(one),
        one.detail,
        "" if one.size is None else f"{one.size:.1e}",
        "" if one.bound is None else f"{one.bound:.1e}",
    ]


def to_json(found: Comparison) -> dict[str, Any]:
    """Return the result as data."""

    def convert(one: Difference | SettingDifference | None) -> dict[str, Any] | None:
        from accel_cli.extensions.numerics.comparison import SettingDifference

        if one is None:
            return None
        values = asdict(one)
        return {"stage": "settings", **values} if isinstance(one, SettingDifference) else values

    return {
        "verdict": found.verdict,
        "runs": [run.name for run in found.runs],
        "world_sizes": [run.world_size for run in found.runs],
        "steps": found.steps,
        "cause": convert(found.cause),
        "effect": convert(found.effect),
        "is_certain": found.cause is found.effect,
        "first_in_bits": convert(found.first),
        "first_beyond_order_of_sums": convert(found.beyond),
        "random": [convert(one) for one in found.random],
        "order_of_sums": found.explanation,
        "settings": [asdict(one) for one in found.settings],
        "notes": found.notes,
        "points": [asdict(one) for one in found.points],
    }
