"""`accel estimate`: what training a model takes on each device, in which layouts it fits, and the smallest of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from accel_cli.commands.options import complete_profile_names

__all__ = ["EXAMPLE", "estimate"]

EXAMPLE = "Example: accel estimate model.py:make --devices 8 --memory 80GB --mixed-precision bf16"
_SIZES = ("dp_replicate", "dp_shard", "tp")
_BYTES = ("parameters", "gradients", "optimizer", "activations", "working", "total")
_Number = Literal["fp32", "bf16", "fp16"]
_Precision = Literal["no", "bf16", "fp16"]


def estimate(  # noqa: PLR0913, PLR0917 - one parameter an option
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="MODULE:FACTORY, path/to/file.py:FACTORY, or a folder with the config.json of a transformers model.",
        ),
    ],
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="How many devices there are.")] = 1,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The memory of each device, such as 80GB or 24GiB.")
    ] = None,
    headroom: Annotated[
        int,
        typer.Option(
            metavar="PERCENT", min=0, max=90, help="Part of the memory that is left to torch, fragmentation and networks."
        ),
    ] = 10,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Samples in a batch, on each device.")
    ] = None,
    seq_length: Annotated[int | None, typer.Option(metavar="N", min=1, help="Tokens in a sample.")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="adamw, adam, sgd, sgd-momentum, adagrad or rmsprop; without it the factory's, else adamw.",
        ),
    ] = None,
    mixed_precision: Annotated[_Precision, typer.Option(help="Number format of the forward pass.")] = "no",
    dtype: Annotated[
        _Number | None, typer.Option(help="Number format of parameters; without it the model's own.")
    ] = None,
    wrap: Annotated[
        str, typer.Option(metavar="WHAT", help="What is gathered as a whole, as fully_shard.wrap has it.")
    ] = "auto",
    activations: Annotated[
        bool, typer.Option("--activations/--no-activations", help="Whether activations are measured.")
    ] = True,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every layout, with and without resharding and checkpointing.")
    ] = False,
    write_profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Write the layout into this profile.", autocompletion=complete_profile_names
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the layout into this profile file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
) -> None:  # fmt: skip
    """Estimate the memory of training a model on each device, for every layout of so many devices.

    Nothing is allocated: the factory is called on the meta device. Exit code 1 if no layout fits.
    """
    import json

    from accel_cli import console
    from accel_cli.errors import AccelError, UsageError

    if write_profile and output:
        raise UsageError("--write-profile and --output mean different files; give one")
    result = _request_estimate(
        target=target,
        devices=devices,
        memory=memory,
        headroom=headroom,
        batch_size=batch_size,
        seq_length=seq_length,
        optimizer=optimizer,
        mixed_precision=mixed_precision,
        dtype=dtype,
        wrap=wrap,
        activations=activations,
    )
    if as_json:
        console.plain(json.dumps(result, indent=2))
    else:
        _print_table(result, show_all=show_all)
    if result["best"] is None:
        raise AccelError(_format_no_fit(result))
    best = result["layouts"][result["best"]]
    if not as_json and memory:
        console.note(f"on {devices} device(s) the least divided that fits: {_describe_layout(best)}")
        fewest = result["layouts"][result["fewest"]]
        if fewest["devices"] < devices:
            console.note(f"it fits on {fewest['devices']} device(s) already: {_describe_layout(fewest)}")
    if write_profile or output:
        _write_profile(result, best, write_profile, output)
        console.note(f"the profile says how {devices} device(s) divide the model: {_describe_layout(best)}")


def _request_estimate(**options: Any) -> dict[str, Any]:
    """Return all layouts, which of them fit, and the recommended ones; neither the runtime nor torch is imported here.

    Args:
        **options: Those of `accel estimate`, and its `target`.

    Raises:
        UsageError: Nothing can be estimated; the message tells why.
        AccelError: The child process ended without an answer.
    """
    import json
    import subprocess
    import sys

    from accel_cli.errors import AccelError, UsageError

    # Output of a factory is shown. In a session of its own, Ctrl-C ends the child without a traceback.
    child = subprocess.run(
        [sys.executable, "-m", "accel_runtime.estimate", json.dumps(options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=False,
    )
    if not child.stdout:
        ended = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        raise AccelError(
            f"{options['target']} could not be estimated: the process that did it ended with {ended}"
        )
    answer: dict[str, Any] = json.loads(child.stdout)
    if "error" in answer:
        raise UsageError(answer["error"])
    result: dict[str, Any] = answer["result"]
    return result


def _print_table(result: dict[str, Any], *, show_all: bool) -> None:
    from accel_cli import console

    frozen = result["parameters"] - result["trained"]
    subject = [
        f"{result['model']} with {result['parameters']:,} parameters{f', {frozen:,} of them frozen' if frozen else ''}",
        result["optimizer"],
        f"mixed precision {result['mixed_precision']}",
    ]
    if result["inputs"]:
        subject.append(f"a batch of {', '.join(result['inputs'])} on each device")
    if buffers := result["layouts"][0]["bytes"]["buffers"]:
        subject.append(f"buffers of {console.size(buffers)} on each device (in the total)")
    console.note(", ".join(subject))
    console.note(
        "parameters, gradients and optimizer state are exact; activations and working memory are estimates"
        if result["inputs"]
        else "activations are not counted: there are no inputs to measure them with"
    )
    reasons: dict[str, list[str]] = {}
    for each in result["left_out"]:
        reason = each["why"].replace(f"parallel.tp={each['tp']} ", "this ")
        reasons.setdefault(reason, []).append(str(each["tp"]))
    for reason, sizes in reasons.items():
        console.note(f"no layout with tp {', '.join(sizes)}: {reason}")
    layouts = result["layouts"]
    if show_all:
        shown = [layout for layout in layouts if layout["devices"] == result["devices"]]
    else:
        shown = [layouts[index] for index in result["shown"]]
    fits = ("FITS",) if result["memory"] is not None else ()
    head = ("REPLICATE", "SHARD", "TP", *(name.upper() for name in _BYTES), *fits, "HOW")
    console.table(head, (_format_row(layout, fits=bool(fits)) for layout in shown))


def _format_row(layout: dict[str, Any], *, fits: bool) -> tuple[str, ...]:
    from accel_cli import console

    sizes = [layout["bytes"][name] for name in _BYTES]
    return (
        *(str(layout[name]) for name in _SIZES),
        *("-" if size is None else console.size(size) for size in sizes),
        *(("yes" if layout["fits"] else "no",) if fits else ()),
        _describe_savings(layout) or "-",
    )


def _describe_layout(layout: dict[str, Any]) -> str:
    """Return a layout in the words of a profile."""
    sizes = [f"{name} {layout[name]}" for name in _SIZES if layout[name] > 1]
    if layout["sharded"] and layout["devices"] == 1:
        sizes = ["dp_shard auto"]
    savings = _describe_savings(layout)
    return " x ".join(sizes or ["one whole model"]) + (f", {savings}" if savings else "")


def _describe_savings(layout: dict[str, Any]) -> str:
    """Return the options of a layout that save memory."""
    checkpointing = ["checkpointing"] if layout["activation_checkpointing"] else []
    reshard = ["reshard" if layout["reshard_after_forward"] else "no reshard"] if layout["wrapped"] else []
    return ", ".join([*checkpointing, *reshard])


def _format_no_fit(result: dict[str, Any]) -> str:
    """Return the message that no layout fits, with the leanest one and the cure."""
    from accel_cli import console

    leanest = result["layouts"][result["leanest"]]
    sizes = leanest["bytes"]
    largest = max(_BYTES[:-1], key=lambda name: sizes[name] or 0)
    if largest == "working" and leanest["sharded"] and not result["wrapped"]:
        cure = "the model has no list of layers, so all of it is gathered at once; --wrap CLASS says what is"
    elif largest in {"activations", "working"}:
        cure = "a smaller --batch-size or --seq-length, or --mixed-precision bf16, takes less"
    else:
        cure = "more devices, or an optimizer with less state, take less"
    return (
        f"no layout on {result['devices']} device(s) fits: the leanest ({_describe_layout(leanest)}) takes "
        f"{console.size(sizes['total'])} on each, and {console.size(result['usable'])} of {console.size(result['memory'])} "
        f"may be used. Most of it is {largest}: {cure}"
    )


def _write_profile(
    result: dict[str, Any], best: dict[str, Any], name: str | None, output: Path | None
) -> None:
    import os

    from accel_cli import console
    from accel_cli.profile.edit import update_profile
    from accel_cli.profile.store import Store

    store = Store.from_env(os.environ, Path.cwd())
    target = output or store.path(str(name))
    profile, _ = update_profile(store, target, _build_profile_keys(best, result["wrap"]), "accel estimate")
    console.note(f"{target} is written")
    if profile.mixed_precision != result["mixed_precision"]:
        console.note(
            f"the estimate is for mixed_precision: {result['mixed_precision']}, and {target} says {profile.mixed_precision}: "
            f"it was left"
        )


def _build_profile_keys(layout: dict[str, Any], wrap: str) -> dict[str, Any]:
    """Return the keys of a profile for a layout, by dotted key; None removes a key."""
    from dataclasses import fields

    from accel_runtime.env import FullyShard

    # An option without effect is refused.
    updates: dict[str, Any] = (
        {} if layout["wrapped"] else {f"fully_shard.{f.name}": None for f in fields(FullyShard)}
    )
    updates |= {f"parallel.{name}": layout[name] for name in _SIZES} | {"parallel.cp": None}
    if layout["sharded"] and layout["devices"] == 1:
        updates["parallel.dp_shard"] = "auto"
    if layout["tp"] == 1:
        updates["parallel.tp_plan"] = None
    if layout["wrapped"] or layout["activation_checkpointing"]:
        updates["fully_shard.wrap"] = int(wrap) if wrap.isdecimal() else wrap
        updates["fully_shard.activation_checkpointing"] = layout["activation_checkpointing"]
    if layout["wrapped"]:
        updates["fully_shard.reshard_after_forward"] = layout["reshard_after_forward"]
    return updates
