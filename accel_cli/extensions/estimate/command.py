"""`accel estimate`: memory that training a model needs on each device, and the layouts that fit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from accel_cli import console
from accel_cli.commands.runs import complete_runs
from accel_cli.errors import AccelError, UsageError
from accel_cli.profile.options import complete_profile_names

if TYPE_CHECKING:
    from accel_cli.profile.store import ProfileStore
    from accel_cli.runs.run_dir import RunFolder

__all__ = ["app"]

app = typer.Typer()

_SIZES = ("dp_replicate", "dp_shard", "tp")
_BYTES = ("parameters", "gradients", "optimizer", "activations", "working", "total")
_MAX_DEVICES_OF_NODE = 8
"""More devices are on several machines in most cases."""
_OF_ZERO = ("parameters", "gradients", "optimizer", "cpu")


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """The model, the devices, and the settings of the training, as the child process reads them."""

    target: str
    devices: int = 1
    memory: str | None = None
    headroom: int = 10
    batch_size: int | None = None
    seq_length: int | None = None
    optimizer: str | None = None
    mixed_precision: str = "no"
    dtype: str | None = None
    wrap: str = "auto"
    activations: bool = True


_DEVICES, _TRAINING, _RESULT = "Devices", "Model and training", "Result"


@app.command(
    "estimate",
    rich_help_panel="Set up",
    epilog="Example: accel estimate model.py:make --devices 8 --memory 80GB --mixed-precision bf16",
)
def estimate(  # noqa: PLR0913 - options of the command
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Estimate MODULE:FACTORY, path/to/file.py:FACTORY, a folder with the config.json of a transformers "
            "model, or the id of a model of the Hub.",
        ),
    ],
    *,
    devices: Annotated[
        int,
        typer.Option(
            "--devices", metavar="N", min=1, help="Set the number of devices.", rich_help_panel=_DEVICES
        ),
    ] = 1,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Set the memory of each device, such as 80GB or 24GiB.",
            rich_help_panel=_DEVICES,
        ),
    ] = None,
    headroom: Annotated[
        int,
        typer.Option(
            "--headroom",
            metavar="PERCENT",
            min=0,
            max=90,
            help="Leave this part of the memory to torch, fragmentation and communication.",
            rich_help_panel=_DEVICES,
        ),
    ] = 10,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            min=1,
            help="Set the samples per batch on each device.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(
            "--seq-length", metavar="N", min=1, help="Set the tokens per sample.", rich_help_panel=_TRAINING
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            metavar="NAME",
            help="Use adamw, adam, sgd, sgd-momentum, adagrad or rmsprop; by default the factory's optimizer, or adamw.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    mixed_precision: Annotated[
        Literal["no", "bf16", "fp16"],
        typer.Option(
            "--mixed-precision", help="Set the number format of the forward pass.", rich_help_panel=_TRAINING
        ),
    ] = "no",
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(
            "--dtype",
            help="Set the number format of parameters; by default the model's own.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    wrap: Annotated[
        str,
        typer.Option(
            "--wrap",
            metavar="MODULES",
            help="Gather these modules as units, as fully_shard.wrap does.",
            rich_help_panel=_TRAINING,
        ),
    ] = "auto",
    activations: Annotated[
        bool,
        typer.Option(
            "--activations/--no-activations", help="Measure activations.", rich_help_panel=_TRAINING
        ),
    ] = True,
    show_all: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Show every layout, with and without resharding and checkpointing.",
            rich_help_panel=_RESULT,
        ),
    ] = False,
    show_zero: Annotated[
        bool,
        typer.Option(
            "--deepspeed",
            help="Show the stages of DeepSpeed's ZeRO too, with and without offload.",
            rich_help_panel=_RESULT,
        ),
    ] = False,
    write_profile: Annotated[
        str | None,
        typer.Option(
            "--write-profile",
            metavar="NAME",
            help="Write the layout to this profile.",
            autocompletion=complete_profile_names,
            rich_help_panel=_RESULT,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the layout to this profile file.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    run_name: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Compare with the memory of this run of accel launch: an id, or the name of a script.",
            autocompletion=complete_runs,
            rich_help_panel=_RESULT,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_RESULT)] = False,
) -> None:
    """Estimate the memory that training a model needs on each device, for every layout of the devices.

    Nothing is allocated: the factory is called on the meta device. Exit code 1 if no layout fits.
    """
    if write_profile and output:
        raise UsageError("Pass either --write-profile or --output, not both.")
    request = EstimateRequest(
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
    run = None if run_name is None else _find_run(run_name, devices)
    result = _compute_layouts(request)
    if run is not None:
        result["run"] = _compare(run, result)
    if as_json:
        console.print_json(result)
    else:
        _print_table(result, show_all=show_all)
        if show_zero:
            rows = (
                (str(row["stage"]), row["offload"], *(console.format_size(row[name]) for name in _OF_ZERO))
                for row in result["zero"]
            )
            console.table(("ZERO", "OFFLOAD", *(name.upper() for name in _OF_ZERO)), rows)
        if run is not None:
            _print_comparison(result["run"])
    if result["best"] is None:
        raise AccelError(_format_no_fit(result))
    if write_profile or output:
        _write_profile(result, write_profile, output)


def _find_run(name: str, devices: int) -> RunFolder:
    """Return a run with as many processes as there are devices.

    Raises:
        UsageError: No such run, or one with another number of processes.
    """
    from accel_cli.commands.runs import find_log_home
    from accel_cli.runs.run_dir import find_run

    run = find_run(find_log_home(None), name)
    world_size = run.read_status().record.get("world_size")
    if world_size != devices:
        raise UsageError(
            f"Cannot compare with {run.path.name}: it has {world_size or 'no'} process(es), and the estimate is for {devices} "
            f"device(s). Pass --devices {world_size or 1}, or another run."
        )
    return run


def _compare(run: RunFolder, result: dict[str, Any]) -> dict[str, Any]:
    """Return the estimate for the layout of a run, and the peaks of its ranks.

    Raises:
        UsageError: The run has no samples, or a layout that is not estimated.
    """
    from accel_cli.runs.usage import read_peak_memory

    peaks = read_peak_memory(run)
    if not peaks:
        raise UsageError(
            f"Cannot compare with {run.path.name}: it has no samples of its memory. The launchers torchrun and xla sample it every "
            "5 seconds; use a longer run."
        )
    profile = run.read_status().record.get("profile") or {}
    tp, shard = int(profile.get("parallel.tp", 1)), profile.get("parallel.dp_shard", 1)
    shard = result["devices"] // tp if shard == "auto" else int(shard)
    has_checkpointing = bool(profile.get("fully_shard.activation_checkpointing"))
    keeps = not profile.get("fully_shard.reshard_after_forward", True)
    wanted = {"dp_shard": shard, "tp": tp, "activation_checkpointing": has_checkpointing and shard > 1}
    layouts = [
        layout
        for layout in result["layouts"]
        if layout["devices"] == result["devices"]
        and all(layout[name] == value for name, value in wanted.items())
    ]
    layout = next((each for each in layouts if shard == 1 or each["reshard_after_forward"] != keeps), None)
    if layout is None:
        raise UsageError(
            f"Cannot compare with {run.path.name}: its layout (dp_shard {shard}, tp {tp}) is not estimated for this model."
        )
    return {
        "name": run.path.name,
        "layout": layout,
        "ranks": {rank: {"resident": peak.resident, "gpu": peak.gpu} for rank, peak in peaks.items()},
    }


def _print_comparison(comparison: dict[str, Any]) -> None:
    """Print the estimate for a layout beside what each rank has used."""
    estimated = comparison["layout"]["bytes"]["total"]
    has_gpu = any(peak["gpu"] for peak in comparison["ranks"].values())
    console.note(
        f"{comparison['name']}, {_describe_layout(comparison['layout'])}: estimate and peak of each rank"
    )
    measured = ("GPU MEMORY", "RESIDENT") if has_gpu else ("RESIDENT",)
    rows = [
        (
            str(rank),
            console.format_size(estimated),
            *((console.format_size(peak["gpu"] or 0),) if has_gpu else ()),
            console.format_size(peak["resident"]),
        )
        for rank, peak in comparison["ranks"].items()
    ]
    console.table(("RANK", "ESTIMATE", *measured), rows)
    console.note(
        "GPU memory includes what CUDA and torch's allocator hold"
        if has_gpu
        else "resident memory includes Python and torch themselves"
    )


def _compute_layouts(request: EstimateRequest) -> dict[str, Any]:
    """Return all layouts, which of them fit, and the recommended ones, from a child process that imports torch.

    Raises:
        UsageError: The model cannot be estimated.
        AccelError: The child process ended without a result.
    """
    import json

    # stderr shows output of the factory. In a session of its own, Ctrl-C ends the child without a traceback.
    child = subprocess.run(
        [sys.executable, "-m", "accel_runtime.extensions.estimate", json.dumps(asdict(request))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=False,
    )
    if not child.stdout:
        ended = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        raise AccelError(f"Cannot estimate {request.target}: the child process ended with {ended}.")
    answer: dict[str, Any] = json.loads(child.stdout)
    if "error" in answer:
        raise UsageError(answer["error"])
    result: dict[str, Any] = answer["result"]
    return result


def _print_table(result: dict[str, Any], *, show_all: bool) -> None:
    frozen = result["parameters"] - result["trained"]
    subject = [
        f"{result['model']} with {result['parameters']:,} parameters{f', {frozen:,} of them frozen' if frozen else ''}",
        result["optimizer"],
        f"mixed precision {result['mixed_precision']}",
    ]
    if result["inputs"]:
        subject.append(f"a batch of {', '.join(result['inputs'])} on each device")
    if buffers := result["layouts"][0]["bytes"]["buffers"]:
        subject.append(f"buffers of {console.format_size(buffers)} on each device (included in the total)")
    console.note(", ".join(subject))
    console.note(
        "parameters, gradients and optimizer state are exact; activations and working memory are estimates"
        if result["inputs"]
        else "activations are not included: there are no inputs to measure them with"
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
    if fits and result["best"] is not None:
        best, fewest = layouts[result["best"]], layouts[result["fewest"]]
        console.note(
            f"least sharded layout that fits on {result['devices']} device(s): {_describe_layout(best)}"
        )
        if fewest["devices"] < result["devices"]:
            console.note(f"{fewest['devices']} device(s) are enough: {_describe_layout(fewest)}")


def _format_row(layout: dict[str, Any], *, fits: bool) -> tuple[str, ...]:
    sizes = [layout["bytes"][name] for name in _BYTES]
    return (
        *(str(layout[name]) for name in _SIZES),
        *("-" if size is None else console.format_size(size) for size in sizes),
        *(("yes" if layout["fits"] else "no",) if fits else ()),
        _describe_savings(layout) or "-",
    )


def _describe_layout(layout: dict[str, Any]) -> str:
    """Return a layout in keys of a profile."""
    sizes = [f"{name} {layout[name]}" for name in _SIZES if layout[name] > 1]
    if layout["sharded"] and layout["devices"] == 1:
        sizes = ["dp_shard auto"]
    savings = _describe_savings(layout)
    return " x ".join(sizes or ["full model"]) + (f", {savings}" if savings else "")


def _describe_savings(layout: dict[str, Any]) -> str:
    """Return the options of a layout that save memory."""
    checkpointing = ["checkpointing"] if layout["activation_checkpointing"] else []
    reshard = ["reshard" if layout["reshard_after_forward"] else "no reshard"] if layout["wrapped"] else []
    return ", ".join([*checkpointing, *reshard])


def _format_no_fit(result: dict[str, Any]) -> str:
    """Return the error that no layout fits, with the smallest one and the cure."""
    leanest = result["layouts"][result["leanest"]]
    sizes = leanest["bytes"]
    largest = max(_BYTES[:-1], key=lambda name: sizes[name] or 0)
    if largest == "working" and leanest["sharded"] and not result["wrapped"]:
        cure = "The model has no list of layers, so it is gathered as one unit. Use --wrap CLASS to gather its modules"
    elif largest in {"activations", "working"}:
        cure = "Use a smaller --batch-size or --seq-length, or --mixed-precision bf16"
    else:
        cure = "Use more devices, or an optimizer with less state"
    needed, usable, memory = map(console.format_size, (sizes["total"], result["usable"], result["memory"]))
    return (
        f"No layout fits on {result['devices']} device(s): the smallest ({_describe_layout(leanest)}) needs {needed} on each, "
        f"and {usable} of {memory} may be used. Most of it is {largest}. {cure}."
    )


def _write_profile(result: dict[str, Any], name: str | None, output: Path | None) -> None:
    from accel_cli.profile.edit import update_profile
    from accel_cli.profile.store import ProfileStore

    store = ProfileStore.from_env(os.environ, Path.cwd())
    target = output or store.get_path(str(name))
    best, devices = result["layouts"][result["best"]], result["devices"]
    updates = _build_profile_keys(best, result["wrap"]) | _build_launch_keys(result, store, target)
    profile, _ = update_profile(store, target, updates, "accel estimate")
    console.note(f"wrote {target} for {devices} device(s): {_describe_layout(best)}")
    if profile.mixed_precision != result["mixed_precision"]:
        console.note(
            f"the estimate is for mixed_precision {result['mixed_precision']}, but {target} sets {profile.mixed_precision}"
        )
    if "launcher.nproc_per_node" not in updates:
        console.note(f"accel launch must start {devices} process(es) with it, one for each device")


def _build_launch_keys(result: dict[str, Any], store: ProfileStore, target: Path) -> dict[str, Any]:
    """Return the number format of the estimate, and the processes of a layout that fits on one machine.

    Keys that a profile has already stay as they are.
    """
    from accel_cli.profile.edit import read_layers_below
    from accel_cli.profile.layers import read_file

    layers = [*read_layers_below(store, target), *([read_file(target, "file")] if target.is_file() else [])]
    present = {key for layer in layers for key in layer.values}
    updates: dict[str, Any] = {}
    if result["mixed_precision"] != "no" and "mixed_precision" not in present:
        updates["mixed_precision"] = result["mixed_precision"]
    if result["devices"] <= _MAX_DEVICES_OF_NODE and not any(key.startswith("launcher.") for key in present):
        updates |= {"launcher.kind": "torchrun", "launcher.nproc_per_node": result["devices"]}
    return updates


def _build_profile_keys(layout: dict[str, Any], wrap: str) -> dict[str, Any]:
    """Return the keys of a profile for a layout, by dotted key; None removes a key."""
    from dataclasses import fields

    from accel_runtime.environment.settings import FullyShard

    # An option without effect is refused.
    updates: dict[str, Any] = (
        {} if layout["wrapped"] else {f"fully_shard.{f.name}": None for f in fields(FullyShard)}
    )
    updates |= {f"parallel.{name}": layout[name] for name in _SIZES} | {
        "parallel.cp": None,
        "parallel.sp": None,
    }
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
