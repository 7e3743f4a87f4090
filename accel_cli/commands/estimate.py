"""`accel estimate`: what training a model takes on each device, in which layouts it fits, and the smallest of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from accel_cli.commands.completion import profile_names

__all__ = ["EXAMPLE", "estimate"]

EXAMPLE = "Example: accel estimate model.py:make --devices 8 --memory 80GB --mixed-precision bf16"
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
            metavar="NAME", help="Write the layout into this profile.", autocompletion=profile_names
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
    from accel_cli import console
    from accel_cli.errors import AccelError, UsageError
    from accel_cli.estimates import ask, none_fits, said

    if write_profile and output:
        raise UsageError("--write-profile and --output mean different files; give one")
    found = ask(
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
        _print(found)
    else:
        _show(found, show_all=show_all)
    if found["best"] is None:
        raise AccelError(none_fits(found, console.size))
    best = found["layouts"][found["best"]]
    if not as_json and memory:
        _tell_smallest(found, best)
    if write_profile or output:
        _write(found, best, write_profile, output)
        console.note(f"the profile says how {devices} device(s) divide the model: {said(best)}")


def _show(found: dict[str, Any], *, show_all: bool) -> None:
    from accel_cli import console
    from accel_cli.estimates import left_out

    console.note(_described(found))
    console.note(
        "parameters, gradients and optimizer state are exact; activations and working memory are estimates"
        if found["inputs"]
        else "activations are not counted: there are no inputs to measure them with"
    )
    for reason in left_out(found):
        console.note(reason)
    devices = found["devices"]
    rows = (
        [one for one in found["layouts"] if one["devices"] == devices]
        if show_all
        else [found["layouts"][place] for place in found["shown"]]
    )
    judged = found["memory"] is not None
    head = (
        "REPLICATE",
        "SHARD",
        "TP",
        "PARAMETERS",
        "GRADIENTS",
        "OPTIMIZER",
        "ACTIVATIONS",
        "WORKING",
        "TOTAL",
    )
    console.table((*head, *(("FITS",) if judged else ()), "HOW"), (_row(one, judged=judged) for one in rows))


def _row(layout: dict[str, Any], *, judged: bool) -> tuple[str, ...]:
    from accel_cli import console
    from accel_cli.estimates import how

    sizes = layout["bytes"]
    parts = [str(layout[name]) for name in ("dp_replicate", "dp_shard", "tp")]
    bytes_ = [
        "-" if sizes[name] is None else console.size(sizes[name])
        for name in ("parameters", "gradients", "optimizer", "activations", "working", "total")
    ]
    fits = ("yes" if layout["fits"] else "no",) if judged else ()
    return (*parts, *bytes_, *fits, how(layout) or "-")


def _described(found: dict[str, Any]) -> str:
    frozen = found["parameters"] - found["trained"]
    parts = [
        f"{found['model']} with {found['parameters']:,} parameters{f', {frozen:,} of them frozen' if frozen else ''}"
    ]
    parts += [found["optimizer"], f"mixed precision {found['mixed_precision']}"]
    if found["inputs"]:
        parts.append(f"a batch of {', '.join(found['inputs'])} on each device")
    buffers = found["layouts"][0]["bytes"]["buffers"]
    if buffers:
        from accel_cli import console

        parts.append(f"buffers of {console.size(buffers)} on each device (in the total)")
    return ", ".join(parts)


def _tell_smallest(found: dict[str, Any], best: dict[str, Any]) -> None:
    from accel_cli import console
    from accel_cli.estimates import said

    console.note(f"on {found['devices']} device(s) the least divided that fits: {said(best)}")
    fewest = found["layouts"][found["fewest"]]
    if fewest["devices"] < found["devices"]:
        console.note(f"it fits on {fewest['devices']} device(s) already: {said(fewest)}")


def _write(found: dict[str, Any], best: dict[str, Any], name: str | None, output: Path | None) -> None:
    import os

    from accel_cli import console
    from accel_cli.estimates import sections
    from accel_cli.profile.store import Store
    from accel_cli.profile.updating import update

    where = Store.from_env(os.environ, Path.cwd())
    target = output or where.path(str(name))
    profile, _ = update(where, target, sections(best, found["wrap"]), "accel estimate")
    console.note(f"{target} is written")
    if profile.mixed_precision != found["mixed_precision"]:
        console.note(
            f"the estimate is for mixed_precision: {found['mixed_precision']}, and {target} says {profile.mixed_precision}: "
            f"it was left"
        )


def _print(found: dict[str, Any]) -> None:
    import json

    from accel_cli import console

    console.plain(json.dumps(found, indent=2))
