"""`accel checkpoint`: which checkpoints there are, whether they are whole, what they hold; weights out of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from accel_cli.commands.options import complete_checkpoints

__all__ = ["app"]

app = typer.Typer(
    help="List, verify, look into, export and prune checkpoints.",
    no_args_is_help=True,
    epilog="Example: accel checkpoint list",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)

_SHOWN = 2
"""So many files of an item are named."""
_Dir = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A project's directory, one that holds checkpoints, or a checkpoint.",
        autocompletion=complete_checkpoints,
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]


@app.command("list", epilog="Example: accel checkpoint list runs/7")
def list_(directory: _Dir = ".", as_json: _Json = False) -> None:
    """List the checkpoints of a directory, the oldest first, and whether each is whole.

    That is as far as manifests and sizes of files tell; accel checkpoint verify reads every byte.
    """
    from accel_cli import console
    from accel_cli.checkpoints import list_checkpoints

    found = list_checkpoints(directory)
    if as_json:
        _print(found)
        return
    if not found["checkpoints"]:
        console.note(f"{found['directory']} holds no checkpoint")
    else:
        columns = ("CHECKPOINT", "STEP", "SAVED", "PROCESSES", "SIZE", "STATE")
        console.table(columns, map(_row, found["checkpoints"]))
    for path in found["leftovers"]:
        console.note(
            f"{path} is a save under way, or what a crash has left; prune and the next save remove it"
        )


@app.command("verify", epilog="Example: accel checkpoint verify runs/7/checkpoints/checkpoint_3")
def verify(directory: _Dir = ".", as_json: _Json = False) -> None:
    """Read every byte of a checkpoint, of several the newest, and compare all checksums.

    Exit code 1 if it is damaged: then files and tensors are named, and the checkpoint before it that is whole.
    """
    from accel_cli import console
    from accel_cli.checkpoints import verify_checkpoint

    with console.reading() as progress:
        found = verify_checkpoint(directory, progress)
    if as_json:
        _print(found)
        raise typer.Exit(0 if found["whole"] else 1)
    for name in found["strangers"]:
        console.note(f"{name} is no part of {found['path']}")
    if found["whole"]:
        console.plain(f"{found['path']} is whole: step {found['step']}, {_size(found['bytes'])}")
        return
    for problem in found["problems"]:
        console.error(problem)
    before = found["before"]
    told = f"{before['path']}, of step {before['step']}, is whole" if before else "none before it is whole"
    console.note(told)
    raise typer.Exit(1)


@app.command("show", epilog="Example: accel checkpoint show --tensors")
def show(
    directory: _Dir = ".",
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor, and where its parts lie.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show what a checkpoint holds, of several the newest that is whole."""
    from accel_cli import console
    from accel_cli.checkpoints import show_checkpoint

    found = show_checkpoint(directory, tensors=tensors)
    _tell_passed_over(found)
    if as_json:
        _print(found)
        return
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    facts = {
        "checkpoint": found["path"],
        "step": found["step"],
        "saved": found["saved_at"],
        "processes": found["world_size"],
        "size": _size(found["bytes"]),
        "written by": versions,
    }
    console.table(("", ""), [(name, str(value)) for name, value in facts.items()])
    console.plain("")
    console.table(("ITEM", "CLASS", "TENSORS", "DTYPES", "SIZE", "FILES"), map(_item, found["items"]))
    for name in found["strangers"]:
        console.note(f"{name} is no part of it")
    if tensors:
        console.plain("")
        rows = [_tensor(name, tensor) for name, tensor in found["tensors"].items()]
        console.table(("TENSOR", "SHAPE", "DTYPE", "SIZE", "PARTS"), rows)


@app.command("export", epilog="Example: accel checkpoint export runs/7 -o model.safetensors")
def export(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: _Dir = ".",
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The file to write.")] = ...,  # type: ignore[assignment]
    item: Annotated[
        str, typer.Option(metavar="NAME", help="What to export: model_1, optimizer, ...")
    ] = "model",
    dtype: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Convert floating-point numbers: bf16, fp16 or fp32.")
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Write several files of at most this size, such as 5GB, and an index."
        ),
    ] = None,
    rank: Annotated[
        int, typer.Option(metavar="N", min=0, help="Whose tensors, where the processes had different ones.")
    ] = 0,
    as_json: _Json = False,
) -> None:
    """Merge the weights of a checkpoint into one safetensors file, without a GPU and in little memory.

    Of several checkpoints it is the newest that is whole. Every byte is verified on the way.
    """
    from accel_cli import console
    from accel_cli.checkpoints import export_checkpoint
    from accel_runtime.checkpoint.merge import MergeRequest

    request = MergeRequest(item, rank, _dtype(dtype), _bytes(max_shard_size))
    with console.reading() as progress:
        found = export_checkpoint(directory, output, request, progress)
    _tell_passed_over(found)
    if as_json:
        _print(found)
        return
    if found["others"]:
        console.note(f"no tensors, and left out: {', '.join(found['others'])}")
    for name, kept in found["ties"].items():
        console.note(f"{name} is tied to {kept}, and written once")
    console.plain(
        f"{found['tensors']} tensors of step {found['step']}, {_size(found['bytes'])}, from {found['path']} in "
        f"{', '.join(found['files'])}"
    )


@app.command("prune", epilog="Example: accel checkpoint prune runs/7 --keep 3")
def prune(
    directory: _Dir = ".",
    keep: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many to keep, the newest that are whole.")
    ] = ...,  # type: ignore[assignment]
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Remove without asking.")] = False,
) -> None:
    """Remove old checkpoints and what crashes have left; one that is whole to the last byte always stays."""
    import sys

    from accel_cli import console
    from accel_cli.checkpoints import prune_checkpoints
    from accel_cli.errors import UsageError

    found = prune_checkpoints(directory, keep)
    for problem in found["damaged"]:
        console.note(f"stays, though it is not whole: {problem}")
    if not found["removes"] and not found["leftovers"]:
        console.note(f"nothing to remove: {_count(len(found['keeps']))}")
        return
    for entry in found["removes"]:
        console.plain(f"{entry['path']}\tstep {entry['step']}\t{_size(entry['bytes'])}")
    for path in found["leftovers"]:
        console.plain(f"{path}\tleft by a crash, unless a save is under way")
    if not yes and not sys.stdin.isatty():
        raise UsageError("nothing was removed: prune asks on a terminal; elsewhere say --yes")
    if not yes:
        console.drop_typed()
    if not yes and not typer.confirm(f"Remove these, and keep {len(found['keeps'])}?", err=True):
        raise typer.Exit(1)
    with console.reading() as progress:
        done = prune_checkpoints(directory, keep, progress)
    console.note(f"{_count(len(done['removes']))} removed, {len(done['keeps'])} kept")


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    if entry["written_by"] == "accelerate":
        return entry["path"], "", "", "", "", "written by Accelerate"
    if entry["problem"]:
        return entry["path"], "", "", "", "", entry["problem"]
    state = f"whole, in {entry['lies_in']}" if "lies_in" in entry else "whole"
    saved = entry["saved_at"].replace("T", " ").replace("Z", "")
    return entry["path"], str(entry["step"]), saved, str(entry["world_size"]), _size(entry["bytes"]), state


def _item(item: dict[str, Any]) -> tuple[str, ...]:
    files = item["files"]
    where = ", ".join(files) if len(files) <= _SHOWN else f"{files[0]} to {files[-1]}"
    name = f"{item['name']} (each process its own)" if item["differs_between_ranks"] else item["name"]
    return name, item["class"], str(item["tensors"]), ", ".join(item["dtypes"]), _size(item["bytes"]), where


def _tensor(name: str, tensor: dict[str, Any]) -> tuple[str, ...]:
    parts = [f"{chunk['file']} at {chunk['start']}" for chunk in tensor["chunks"]]
    if len(parts) > 1:
        parts = [
            f"{where}: {chunk['sizes']} from {chunk['offsets']}"
            for where, chunk in zip(parts, tensor["chunks"], strict=True)
        ]
    return name, str(tensor["shape"]), tensor["dtype"], _size(tensor["bytes"]), "; ".join(parts)


def _tell_passed_over(found: dict[str, Any]) -> None:
    from accel_cli import console

    for problem in found.pop("passed_over"):
        console.note(f"passed over: {problem}")


def _count(number: int) -> str:
    return f"{number} checkpoint{'' if number == 1 else 's'}"


def _size(size: int) -> str:
    from accel_cli import console

    return console.size(size)


def _bytes(text: str | None) -> int | None:
    """A size as Hugging Face's libraries take it: `5GB` is 5e9 bytes, `5GiB` 5 * 2**30."""
    import re

    from accel_cli.errors import UsageError

    if text is None:
        return None
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    size = int(float(matched[1]) * units[matched[2] or ""]) if matched else 0
    if size < 1:
        raise UsageError(f"--max-shard-size takes a size such as 5GB, 500MB or 2GiB; it got {text!r}")
    return size


def _dtype(text: str | None) -> str | None:
    from accel_cli.errors import UsageError

    known = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if text is not None and text not in known:
        raise UsageError(f"--dtype takes bf16, fp16 or fp32; it got {text!r}")
    return known[text] if text else None


def _print(found: dict[str, Any]) -> None:
    import json

    from accel_cli import console

    console.plain(json.dumps(found, indent=2))
