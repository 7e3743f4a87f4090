"""`accel checkpoint import`."""

from __future__ import annotations

import click

from accel_cli import console
from accel_cli.commands.command import Command
from accel_cli.commands.completion import complete_files
from accel_cli.commands.options import argument, option

__all__ = ["import_"]


@click.command(
    "import",
    cls=Command,
    epilog="Example: accel checkpoint import outputs/checkpoint/step-1000 -o runs/7/checkpoints/checkpoint_0",
)
@argument("folder", metavar="FOLDER", help="Read this folder that torch.distributed.checkpoint wrote.")
@option(
    "-o",
    "--output",
    metavar="DIR",
    required=True,
    help="Write this checkpoint, which must not exist.",
    shell_complete=complete_files,
)
@option(
    "--model",
    "models",
    metavar="KEY",
    multiple=True,
    help="Import the model at this key of the state dict, such as app.model; '' is the top level. Several: repeat it.",
)
@option(
    "--optimizer",
    "optimizers",
    metavar="KEY",
    multiple=True,
    help="Import the optimizer at this key of the state dict. Several: repeat it.",
)
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def import_(
    folder: str, output: str, models: tuple[str, ...], optimizers: tuple[str, ...], as_json: bool
) -> None:
    """Import a checkpoint of torch.distributed.checkpoint: dcp.save, torchtitan, or FSDP with Accelerate.

    Weights and optimizers are imported, of any number of processes; no code in the folder is run.
    """
    from accel_cli.extensions.foreign_checkpoints.dcp import import_dcp
    from accel_runtime.extensions.foreign_checkpoints.dcp_manifest import DcpSelection

    with console.read_progress() as progress:
        result = import_dcp(folder, output, DcpSelection(models, optimizers), progress)
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
