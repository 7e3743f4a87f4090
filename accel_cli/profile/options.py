"""The options of `accel launch` that every launcher may get: how each is typed, and the key of the profile that it sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer

from accel_cli.planning.launch_options import LaunchOption

__all__ = [
    "OPTIONS",
    "CheckReplay",
    "ConfigPath",
    "Cpu",
    "DryRun",
    "Explain",
    "GlobalBatchSize",
    "GpuIds",
    "LogDir",
    "MaxRestarts",
    "MetricsPort",
    "MixedPrecision",
    "Module",
    "Nnodes",
    "NoProfile",
    "NoPython",
    "NodeRank",
    "NprocPerNode",
    "Preflight",
    "ProfileName",
    "ProgressFile",
    "ProgressLine",
    "Quiet",
    "Ranks",
    "RdzvEndpoint",
    "RdzvId",
    "RecordNumerics",
    "Resume",
    "SetKeys",
    "ShutdownTimeout",
    "StallAction",
    "StallTimeout",
    "complete_assignments",
    "complete_keys",
    "complete_profile_names",
]


def complete_profile_names() -> list[str]:
    """Return the names of all profiles."""
    from accel_cli.profile.store import ProfileStore  # noqa: PLC0415 - for the completion of the shell only

    return ProfileStore.from_env(os.environ, Path.cwd()).list_names()


def complete_keys() -> list[tuple[str, str]]:
    """Return the keys of a profile, and their descriptions."""
    from accel_cli.profile.schema import known_keys  # noqa: PLC0415 - as above

    return list(known_keys().items())


def complete_assignments(incomplete: str) -> list[str]:
    """Return the keys of a profile, each with `=`; after a key and `=`, its assignments."""
    from accel_cli.profile.schema import known_keys, list_values  # noqa: PLC0415 - as above

    key, assigned, _ = incomplete.partition("=")
    return (
        [f"{key}={value}" for value in list_values(key)] if assigned else [f"{key}=" for key in known_keys()]
    )


class _Sets(NamedTuple):
    """The dotted key of the profile that an option sets, and how its value is read; see `LaunchOption`."""

    key: str
    type: Literal["text", "scalar"] = "text"
    const: Any = None


_PROFILE = "Profile"
_PROCESSES = "Processes and nodes"
_TRAINING = "Training"
_FAILURES = "Failures"
_OUTPUT = "Output"

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and run nothing.")]
Explain = Annotated[
    bool, typer.Option("--explain", help="Print the plan with the source of each value, and run nothing.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Leave out the lines that describe the launch and its end.")
]
Module = Annotated[bool, typer.Option("--module", "-m", help="Run SCRIPT as a module, as in python -m.")]
NoPython = Annotated[bool, typer.Option("--no-python", help="Run SCRIPT as a program, without Python.")]

ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="Use a named profile.",
        autocompletion=complete_profile_names,
        rich_help_panel=_PROFILE,
    ),
]
NoProfile = Annotated[
    bool,
    typer.Option(
        "--no-profile", help="Read no profile; use only variables and options.", rich_help_panel=_PROFILE
    ),
]
ConfigPath = Annotated[
    str | None,
    typer.Option(
        "--config-file",
        metavar="FILE",
        help="Use a config file of Accelerate for this launch, above the profile.",
        rich_help_panel=_PROFILE,
    ),
]
SetKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set one key of the profile; can be repeated.",
        autocompletion=complete_assignments,
        rich_help_panel=_PROFILE,
    ),
]

NprocPerNode = Annotated[
    str | None,
    typer.Option(
        "--nproc-per-node",
        metavar="N",
        help="Set the number of processes per node: a number, or auto.",
        rich_help_panel=_PROCESSES,
    ),
    _Sets("launcher.nproc_per_node", "scalar"),
]
GpuIds = Annotated[
    str | None,
    typer.Option(
        "--gpu-ids",
        metavar="IDS",
        help="Use these GPUs, with one process for each: all, or ids as in 0,2.",
        rich_help_panel=_PROCESSES,
    ),
    _Sets("launcher.gpu_ids"),
]
Cpu = Annotated[
    bool,
    typer.Option(
        "--cpu", help="Compute on the CPU even if there is another device.", rich_help_panel=_PROCESSES
    ),
    _Sets("device", const="cpu"),
]
Nnodes = Annotated[
    str | None,
    typer.Option(
        "--nnodes",
        metavar="N",
        help="Set the number of nodes, or a range MIN:MAX.",
        rich_help_panel=_PROCESSES,
    ),
    _Sets("launcher.nnodes", "scalar"),
]
RdzvEndpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="Set the rendezvous address on one of the nodes; must be reachable from all.",
        rich_help_panel=_PROCESSES,
    ),
    _Sets("launcher.rdzv_endpoint"),
]
RdzvId = Annotated[
    str | None,
    typer.Option(
        "--rdzv-id", metavar="NAME", help="Set the job's name at the rendezvous.", rich_help_panel=_PROCESSES
    ),
    _Sets("launcher.rdzv_id"),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        "--node-rank",
        metavar="N",
        min=0,
        help="Set the rank of this node; only needed to fix the order of nodes.",
        rich_help_panel=_PROCESSES,
    ),
]

MixedPrecision = Annotated[
    str | None,
    typer.Option(
        "--mixed-precision", metavar="FORMAT", help="Compute in no, bf16 or fp16.", rich_help_panel=_TRAINING
    ),
    _Sets("mixed_precision"),
]
GlobalBatchSize = Annotated[
    str | None,
    typer.Option(
        "--global-batch-size",
        metavar="N",
        help="Train on N samples an optimizer step, whatever the number of processes.",
        rich_help_panel=_TRAINING,
    ),
    _Sets("global_batch_size", "scalar"),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Resume from the newest checkpoint when the script calls accelerator.resume().",
        rich_help_panel=_TRAINING,
    ),
    _Sets("resume", const=True),
]

Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="RANKS",
        help="Show the output of these ranks: all, none, or ranks as in 0,2.",
        rich_help_panel=_OUTPUT,
    ),
    _Sets("launcher.ranks"),
]
LogDir = Annotated[
    str | None,
    typer.Option(
        "--log-dir", metavar="DIR", help="Write the logs of runs to this folder.", rich_help_panel=_OUTPUT
    ),
    _Sets("launcher.log_dir"),
]
MetricsPort = Annotated[
    str | None,
    typer.Option(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="Serve metrics for Prometheus at this port of the loopback interface.",
        rich_help_panel=_OUTPUT,
    ),
    _Sets("launcher.metrics_port"),
]
OPTIONAL_VALUES = {"--check-replay": "100", "--progress-line": "60", "--record-numerics": "all"}
"""The values of options of a launch that may stand without one."""
RecordNumerics = Annotated[
    str | None,
    typer.Option(
        "--record-numerics",
        metavar="STEPS",
        help="Record what steps compute, to compare runs: all (without a value), every:N or steps:A-B, and modules or tensors, as in "
        "steps:1-20,modules.",
        rich_help_panel=_OUTPUT,
    ),
    _Sets("env.ACCEL_RECORD_NUMERICS"),
]
CheckReplay = Annotated[
    str | None,
    typer.Option(
        "--check-replay",
        metavar="N",
        help="Run one in N passes of each model that an Accelerator prepares again, and warn if the results differ: 100 without a value.",
        rich_help_panel=_OUTPUT,
    ),
    _Sets("check_replay", "scalar"),
]
ProgressLine = Annotated[
    str | None,
    typer.Option(
        "--progress-line",
        metavar="SECONDS",
        help="Print a line with the step, the loss and the speed each SECONDS: 60 without a value.",
        rich_help_panel=_OUTPUT,
    ),
    _Sets("launcher.progress_line", "scalar"),
]
ProgressFile = Annotated[
    str | None,
    typer.Option(
        "--progress-file",
        metavar="FILE",
        help="Write the progress of the run to this file as lines of JSON, or its last state if it ends in .json.",
        rich_help_panel=_OUTPUT,
    ),
    _Sets("launcher.progress_file"),
]

MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        metavar="N",
        help="Restart all processes at most N times after a failure.",
        rich_help_panel=_FAILURES,
    ),
    _Sets("launcher.max_restarts"),
]
ShutdownTimeout = Annotated[
    int | None,
    typer.Option(
        "--shutdown-timeout",
        metavar="SECONDS",
        help="Give processes this long to save and exit after a signal.",
        rich_help_panel=_FAILURES,
    ),
    _Sets("launcher.shutdown_timeout"),
]
StallTimeout = Annotated[
    int | None,
    typer.Option(
        "--stall-timeout",
        metavar="SECONDS",
        help="Show the stack of every process if none makes progress for this long.",
        rich_help_panel=_FAILURES,
    ),
    _Sets("launcher.stall_timeout"),
]
StallAction = Annotated[
    str | None,
    typer.Option(
        "--stall-action",
        metavar="ACTION",
        help="After that: report, restart (all processes) or fail.",
        rich_help_panel=_FAILURES,
    ),
    _Sets("launcher.stall_action"),
]
Preflight = Annotated[
    bool,
    typer.Option(
        "--preflight",
        help="Check the nodes before the script starts, and leave out or name a bad one.",
        rich_help_panel=_FAILURES,
    ),
    _Sets("launcher.preflight", const=True),
]


def _read_option(annotation: Any) -> LaunchOption:
    """Return what an annotated parameter declares."""
    _, typed, *sets = get_args(annotation)
    key, kind, const = sets[0] if sets else _Sets("")
    short = next(iter(typed.param_decls), "")
    return LaunchOption(typed.default, typed.help, typed.metavar or "", key, kind, const, short)


OPTIONS: Mapping[str, LaunchOption] = MappingProxyType(
    {
        option.name: option
        for option in (_read_option(each) for each in [*globals().values()] if get_origin(each) is Annotated)
    }
)
"""The options above by name, as data; `Launcher.launch_options` has those of one launcher."""
