"""`accel checkpoint import`."""

from __future__ import annotations

from typing import Annotated

import typer

from accel_cli import console

__all__ = ["app"]

app = typer.Typer()


@app.command(
    "import",
    epilog="Example: accel checkpoint import outputs/checkpoint/step-1000 -o runs/7/checkpoints/checkpoint_0",
)
def import_(
    folder: Annotated[
        str,
        typer.Argument(metavar="FOLDER", help="Read this folder that torch.distributed.checkpoint wrote."),
    ],
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="DIR", help="Write this checkpoint, which must not exist."),
    ],
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="KEY",
            help="Import the model at this key of the state dict, such as app.model; '' is the top level. Several: "
            "repeat it.",
        ),
    ] = None,
    optimizers: Annotated[
        list[str] | None,
        typer.Option(
            "--optimizer",
            metavar="KEY",
            help="Import the optimizer at this key of the state dict. Several: repeat it.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Import a checkpoint of torch.distributed.checkpoint: dcp.save, torchtitan, or FSDP with Accelerate.

    Weights and optimizers are imported, of any number of processes; no code in the folder is run.
    """
    from accel_cli.extensions.foreign_checkpoints.dcp import import_dcp
    from accel_runtime.extensions.foreign_checkpoints.folders import DcpSelection

    with console.read_progress() as progress:
        result = import_dcp(
            folder, output, DcpSelection(tuple(models or ()), tuple(optimizers or ())), progress
        )
    if as_json:
        console.print_json(result)
        return
    if result["others"]:
        console.note(
            f"not imported, because it is neither model nor optimizer: {', '.join(result['others'])}"
        )
    console.plain(
        f"{result['tensors']} tensors of step {result['step']}, {console.format_size(result['bytes'])}: "
        f"{', '.join(result['items'])} from {result['from']} in {result['path']}"
    )
