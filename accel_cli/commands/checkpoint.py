"""`accel checkpoint`: list, verify, show, export, import, copy and prune checkpoints."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from accel_cli import console
from accel_cli.commands.command import LazyGroup
from accel_cli.errors import UsageError
from accel_runtime.environment.registry import Registry

if TYPE_CHECKING:
    from accel_cli.commands.checkpoint_operations import ExportFormat

__all__ = ["COMMANDS", "EXPORTS", "app"]

COMMANDS: Registry[typer.Typer] = Registry(
    {
        "list": "accel_cli.commands.checkpoint:commands",
        "verify": "accel_cli.commands.checkpoint:commands",
        "show": "accel_cli.commands.checkpoint:commands",
        "export": "accel_cli.commands.checkpoint:commands",
        "prune": "accel_cli.commands.checkpoint:commands",
        "import": "accel_cli.extensions.foreign_checkpoints.command:app",
        "copy": "accel_cli.commands.checkpoint:commands",
    },
    error=UsageError,
)
"""The commands of `accel checkpoint` by name."""
EXPORTS: Registry[ExportFormat] = Registry(
    {
        "safetensors": "accel_cli.commands.checkpoint_operations:SAFETENSORS",
        "dcp": "accel_cli.extensions.foreign_checkpoints.dcp:DCP",
        "hf": "accel_cli.commands.checkpoint_operations:PRETRAINED",
    },
    error=UsageError,
)
"""The formats of `accel checkpoint export` by name."""

_MAX_FILES = 2
"""The most files of an item that are shown by name; of more, the first and the last are shown."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_Directory = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="Read this project directory, directory of checkpoints, or checkpoint, or the URL of one.",
    ),
]
_CONTENT = "Content"
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class _Checkpoint(LazyGroup):
    table = COMMANDS


app = typer.Typer(
    cls=_Checkpoint, rich_help_panel="Manage", no_args_is_help=True, epilog="Example: accel checkpoint list"
)
commands = typer.Typer()


@app.callback()
def checkpoint() -> None:
    """List, verify, show, export, import, copy and prune checkpoints."""


@commands.command("list", epilog="Example: accel checkpoint list runs/7")
def list_(directory: _Directory = ".", as_json: _Json = False) -> None:
    """List the checkpoints of a directory, oldest first, and whether they are complete.

    Only manifests and file sizes are read; accel checkpoint verify reads every byte.
    """
    from accel_cli.commands.checkpoint_operations import list_checkpoints
    from accel_runtime.storage.scan import explain_leftover

    result = list_checkpoints(directory)
    if as_json:
        console.print_json(result)
        return
    if not result["checkpoints"]:
        console.note(f"no checkpoints found in {result['directory']}")
    else:
        columns = ("CHECKPOINT", "STEP", "SAVED", "PROCESSES", "SIZE", "STATE")
        console.table(columns, map(_format_entry, result["checkpoints"]))
    for path in result["leftovers"]:
        console.note(f"{path} {explain_leftover(path)}")


@commands.command("verify", epilog="Example: accel checkpoint verify runs/7/checkpoints/checkpoint_3")
def verify(directory: _Directory = ".", as_json: _Json = False) -> None:
    """Read every byte of a checkpoint, or of the newest in a directory, and compare all checksums.

    If it is damaged, print what is damaged and the newest undamaged checkpoint before it, and exit with code 1.
    """
    from accel_cli.commands.checkpoint_operations import verify_checkpoint

    with console.read_progress() as progress:
        result = verify_checkpoint(directory, progress)
    if as_json:
        console.print_json(result)
        raise typer.Exit(0 if result["complete"] else 1)
    for name in result["untracked"]:
        console.note(f"{name} is not part of {result['path']}")
    if result["complete"]:
        size = console.format_size(result["bytes"])
        state = f"complete {_format_part(result)}".rstrip()
        console.plain(f"{result['path']} is {state}: step {result['step']}, {size}")
        return
    for problem in result["problems"]:
        console.error(problem)
    if earlier := result["earlier"]:
        console.note(
            f"the newest undamaged checkpoint before it is {earlier['path']}, of step {earlier['step']}"
        )
    else:
        console.note("no earlier checkpoint is undamaged")
    raise typer.Exit(1)


@commands.command("show", epilog="Example: accel checkpoint show --tensors")
def show(
    directory: _Directory = ".",
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor and the location of its parts.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show the contents of a checkpoint, or of the newest complete one in a directory."""
    from accel_cli.commands.checkpoint_operations import show_checkpoint

    result = show_checkpoint(directory, tensors=tensors)
    _print_skipped(result)
    if as_json:
        console.print_json(result)
        return
    facts = {
        "checkpoint": result["path"],
        "step": result["step"],
        "saved": result["saved_at"],
        "processes": f"{result['world_size']} {_format_part(result)}".rstrip(),
        "size": console.format_size(result["bytes"]),
        "written by": ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    }
    console.table(("", ""), [(name, str(value)) for name, value in facts.items()])
    console.plain("")
    console.table(("ITEM", "CLASS", "TENSORS", "DTYPES", "SIZE", "FILES"), map(_format_item, result["items"]))
    for name in result["untracked"]:
        console.note(f"{name} is not part of the checkpoint")
    if tensors:
        console.plain("")
        rows = [_format_tensor(name, tensor) for name, tensor in result["tensors"].items()]
        console.table(("TENSOR", "SHAPE", "DTYPE", "SIZE", "PARTS"), rows)


@commands.command("export", epilog="Example: accel checkpoint export runs/7 -o model.safetensors")
def export(  # noqa: PLR0913, PLR0917 - one parameter an option
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write this file, or this folder in a format of several files.",
        ),
    ],
    directory: _Directory = ".",
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar=f"<{'|'.join(EXPORTS.names)}>",
            help="Write a safetensors file, models and optimizers for torch.distributed.checkpoint, or a folder as "
            "save_pretrained does.",
            autocompletion=lambda: EXPORTS.names,
        ),
    ] = "safetensors",
    item: Annotated[
        str | None,
        typer.Option(
            "--item",
            metavar="NAME",
            help="Export this item, such as model_1 or optimizer (default: model).",
            rich_help_panel=_CONTENT,
        ),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option("--dtype", help="Convert floating-point numbers.", rich_help_panel=_CONTENT),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Write several files of at most this size, such as 5GB, and an index.",
            rich_help_panel=_CONTENT,
        ),
    ] = None,
    rank: Annotated[
        int,
        typer.Option(
            "--rank",
            metavar="N",
            min=0,
            help="Export the tensors of this rank, if ranks have different ones.",
            rich_help_panel=_CONTENT,
        ),
    ] = 0,
    layout: Annotated[
        Literal["nested", "flattened", "torchtitan"] | None,
        typer.Option(
            "--layout",
            help="Write optimizers nested or flattened, or as torchtitan reads them (default: nested), in a format "
            "that takes it.",
            rich_help_panel=_CONTENT,
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Merge the weights of a checkpoint, or of the newest complete one, into one safetensors file.

    With --format hf, the weights are written as save_pretrained does; with --format dcp, models and optimizers for dcp.load.

    No GPU is needed, memory use does not grow with the model, and every byte is verified.

    Checkpoints of DeepSpeed are exported too, with float32 weights, but they have no checksums to verify.
    """
    from accel_runtime.storage.file_system import parse_size
    from accel_runtime.storage.tensor_file import MergeRequest

    if format_ not in EXPORTS:
        names = ", ".join(map(repr, EXPORTS.names))
        raise typer.BadParameter(f"{format_!r} is not one of {names}", param_hint="'--format'")
    chosen = EXPORTS[format_]
    _refuse_options(
        format_, {"--item": item, "--dtype": dtype, "--max-shard-size": max_shard_size, "--layout": layout}
    )
    try:
        max_bytes = parse_size(max_shard_size, "--max-shard-size") if max_shard_size is not None else None
    except ValueError as error:
        raise UsageError(str(error)) from None
    request = MergeRequest(item or "model", rank, _DTYPES[dtype] if dtype else None, max_bytes)
    with console.read_progress() as progress:
        result = chosen.write(directory, output, request, progress, **({"layout": layout} if layout else {}))
    _print_skipped(result)
    if as_json:
        console.print_json(result)
        return
    if result["others"]:
        console.note(f"not exported, because {chosen.lacks}: {', '.join(result['others'])}")
    for name, target in result["ties"].items():
        console.note(f"{name} is tied to {target}, and written once")
    console.plain(
        f"{result['tensors']} tensors of step {result['step']}, {console.format_size(result['bytes'])}, from {result['path']} "
        f"in {', '.join(result['files'])}"
    )


@commands.command("prune", epilog="Example: accel checkpoint prune runs/7 --keep 3")
def prune(
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=1, help="Keep the N newest complete checkpoints.")
    ],
    directory: _Directory = ".",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
) -> None:
    """Remove old checkpoints and leftovers of crashes.

    Nothing is removed until every byte of one checkpoint to keep has been verified.
    """
    from accel_cli.commands.checkpoint_operations import prune_checkpoints
    from accel_runtime.storage.scan import explain_leftover

    planned = prune_checkpoints(directory, keep)
    for problem in planned["damaged"]:
        console.note(f"kept, although it is incomplete: {problem}")
    if not planned["removed"] and not planned["leftovers"]:
        console.note(f"nothing to remove: {_count(planned['kept'])}")
        return
    rows = [
        (entry["path"], str(entry["step"]), console.format_size(entry["bytes"]), "")
        for entry in planned["removed"]
    ]
    rows += [(path, "", "", explain_leftover(path)) for path in planned["leftovers"]]
    console.table(("TO REMOVE", "STEP", "SIZE", "STATE"), rows)
    if not yes and not sys.stdin.isatty():
        raise UsageError("Cannot ask before removing checkpoints: no terminal. Use --yes to remove them.")
    if not yes and not console.confirm(f"Remove these, and keep {_count(planned['kept'])}?"):
        raise typer.Exit(1)
    with console.read_progress() as progress:
        result = prune_checkpoints(directory, keep, progress)
    console.note(f"removed {_count(result['removed'])}, kept {len(result['kept'])}")
    for path in result["leftovers"]:
        console.note(f"{path} was kept: it {explain_leftover(path)}")


@commands.command(
    "copy", epilog="Example: accel checkpoint copy runs/7/checkpoints/checkpoint_3 checkpoint_3"
)
def copy(
    directory: _Directory,
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="Write this checkpoint, a path or URL where there is nothing."),
    ],
    as_json: _Json = False,
) -> None:
    """Copy a checkpoint, or the newest complete one, from disk or object store to disk or object store.

    Every byte is verified, and the copy is complete or absent.
    """
    from accel_cli.commands.checkpoint_operations import copy_to_location

    with console.read_progress() as progress:
        result = copy_to_location(directory, target, progress)
    _print_skipped(result)
    if as_json:
        console.print_json(result)
        return
    console.plain(
        f"{console.format_size(result['bytes'])} of step {result['step']}, from {result['from']} in {result['path']}"
    )


def _refuse_options(format_: str, values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is not None and name not in EXPORTS[format_].options:
            formats = " or ".join(each for each, export in EXPORTS.items() if name in export.options)
            other = f", or use --format {formats}" if formats else ""
            raise UsageError(f"{name} has no effect with --format {format_}. Leave it out{other}.")


def _format_entry(entry: dict[str, Any]) -> tuple[str, ...]:
    if entry["written_by"] != "accel":
        from accel_runtime.storage.formats import FORMATS

        return entry["path"], "", "", "", "", f"written by {FORMATS[entry['written_by']].title}"
    if entry["problem"]:
        return entry["path"], "", "", "", "", entry["problem"]
    state = f"complete {_format_part(entry)}".rstrip()
    state += f", in {entry['location']}" if "location" in entry else ""
    saved = entry["saved_at"].replace("T", " ").replace("Z", "")
    size = console.format_size(entry["bytes"])
    return entry["path"], str(entry["step"]), saved, str(entry["world_size"]), size, state


def _format_part(entry: dict[str, Any]) -> str:
    """Return which ranks a node's part of a checkpoint has; empty for a full checkpoint."""
    ranks = ", ".join(map(str, entry["part_of_ranks"]))
    return f"(the part of one node: ranks {ranks} of {entry['world_size']})" if ranks else ""


def _format_item(item: dict[str, Any]) -> tuple[str, ...]:
    name = f"{item['name']} (different on each rank)" if item["differs_between_ranks"] else item["name"]
    dtypes, size, files = ", ".join(item["dtypes"]), console.format_size(item["bytes"]), item["files"]
    shown = ", ".join(files) if len(files) <= _MAX_FILES else f"{files[0]} to {files[-1]}"
    return name, item["class"], str(item["tensors"]), dtypes, size, shown


def _format_tensor(name: str, tensor: dict[str, Any]) -> tuple[str, ...]:
    parts = [f"{chunk['file']} at {chunk['start']}" for chunk in tensor["chunks"]]
    if len(parts) > 1:
        parts = [
            f"{part}: {list(chunk['sizes'])} from {list(chunk['offsets'])}"
            for part, chunk in zip(parts, tensor["chunks"], strict=True)
        ]
    size = console.format_size(tensor["bytes"])
    return name, str(list(tensor["shape"])), tensor["dtype"], size, "; ".join(parts)


def _print_skipped(result: dict[str, Any]) -> None:
    for problem in result.pop("skipped"):
        console.note(f"skipped: {problem}")


def _count(entries: list[Any]) -> str:
    return f"{len(entries)} checkpoint{'' if len(entries) == 1 else 's'}"
