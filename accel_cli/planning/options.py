"""The options of `accel launch`, each declared once, and a launch request with the options as typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["OPTIONS", "SELECTION", "Kind", "LaunchOption", "Request"]

Kind = Literal["script", "module", "program"]


@dataclass(frozen=True)
class LaunchOption:
    """An option of `accel launch`: a value of the profile for one run, or a part of the request."""

    flag: str
    """The option as typed, as in `--nproc-per-node`."""
    help: str
    metavar: str = ""
    """The value in the help; empty for an option without a value."""
    key: str = ""
    """The dotted key of the profile that the option sets; empty if it sets none."""
    type: Literal["text", "integer", "scalar"] = "text"
    """`scalar` is read as a value in YAML is: a number, or a word such as auto."""
    const: Any = None
    """The value that an option without a value gives its key."""
    short: str = ""
    heading: str = ""
    """The heading in the help; launchers leave it to the table of launchers."""
    repeated: bool = False
    only_prints: bool = False
    """The launcher prints `Launcher.preview`, and runs nothing."""
    selects_launcher: bool = False
    """The option selects the launcher that declares it, whatever launcher the profile has."""
    minimum: int | None = None

    @property
    def name(self) -> str:
        """The name in a request: `nproc_per_node` for `--nproc-per-node`."""
        return self.flag.removeprefix("--").replace("-", "_")

    def parse_value(self, value: Any) -> Any:
        """Return the value of the profile key for a value as typed."""
        if self.const is not None:
            return self.const
        if self.type != "scalar" or value == "":
            # Empty is what an unset shell variable leaves: not a number, and not the same as no option.
            return value
        from accel_cli.profile import yaml_io  # noqa: PLC0415 - the help needs no YAML

        return yaml_io.scalar(value, self.flag)


@dataclass(frozen=True)
class Request:
    """A launch as requested: the script, and the options as typed."""

    target: str
    args: tuple[str, ...] = ()
    kind: Kind = "script"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that were typed, by name, with their values as typed."""
    is_builtin: bool = False
    """True if the target is a module of accel, not a script of the user."""
    for_pod: bool = False
    """Plan for the workers of a TPU pod, to which the user's own profile does not apply."""


_DECLARED: Mapping[str, tuple[LaunchOption, ...]] = {
    "": (
        LaunchOption("--dry-run", "Print the plan and run nothing."),
        LaunchOption("--explain", "Print the plan with the source of each value, and run nothing."),
        LaunchOption("--quiet", "Leave out the lines that describe the launch and its end.", short="-q"),
    ),
    "Target": (
        LaunchOption("--module", "Run SCRIPT as a module, as in python -m.", short="-m"),
        LaunchOption("--no-python", "Run SCRIPT as a program, without Python."),
    ),
    "Override the profile": (
        LaunchOption("--profile", "Use a named profile.", "NAME"),
        LaunchOption("--no-profile", "Read no profile; use only variables and options."),
        LaunchOption("--set", "Set one key of the profile; can be repeated.", "KEY=VALUE", repeated=True),
        LaunchOption(
            "--nproc-per-node", "Set the number of processes per node: a number, or auto.",
            "N", "launcher.nproc_per_node", "scalar"
        ),
        LaunchOption(
            "--gpu-ids", "Use these GPUs, with one process for each: all, or ids as in 0,2.", "IDS", "launcher.gpu_ids"
        ),
        LaunchOption("--nnodes", "Set the number of nodes, or a range MIN:MAX.", "N", "launcher.nnodes", "scalar"),
        LaunchOption(
            "--rdzv-endpoint", "Set the rendezvous address on one of the nodes; must be reachable from all.",
            "HOST:PORT", "launcher.rdzv_endpoint"
        ),
        LaunchOption("--rdzv-id", "Set the job's name at the rendezvous.", "NAME", "launcher.rdzv_id"),
        LaunchOption(
            "--node-rank", "Set the rank of this node; only needed to fix the order of nodes.",
            "N", type="integer", minimum=0
        ),
        LaunchOption(
            "--max-restarts", "Restart all processes at most N times after a failure.",
            "N", "launcher.max_restarts", "integer"
        ),
        LaunchOption(
            "--shutdown-timeout", "Give processes this long to save and exit after a signal.",
            "SECONDS", "launcher.shutdown_timeout", "integer"
        ),
        LaunchOption(
            "--stall-timeout", "Show the stack of every process if none makes progress for this long.",
            "SECONDS", "launcher.stall_timeout", "integer"
        ),
        LaunchOption("--mixed-precision", "Compute in no, bf16 or fp16.", "FORMAT", "mixed_precision"),
        LaunchOption(
            "--ranks", "Show the output of these ranks: all, none, or ranks as in 0,2.", "RANKS", "launcher.ranks"
        ),
        LaunchOption("--log-dir", "Write the logs of runs to this folder.", "DIR", "launcher.log_dir"),
        LaunchOption("--cpu", "Compute on the CPU even if there is a GPU or TPU.", key="device", const="cpu"),
        LaunchOption(
            "--resume", "Resume from the newest checkpoint when the script calls accelerator.resume().",
            key="resume", const=True
        ),
    ),
}  # fmt: skip
"""By heading in the help."""
OPTIONS: Mapping[str, LaunchOption] = MappingProxyType(
    {
        option.name: replace(option, heading=heading)
        for heading, options in _DECLARED.items()
        for option in options
    }
)
"""The options that every launcher may get, by name; `Launcher.launch_options` has those of one launcher."""
SELECTION = ("profile", "nproc_per_node", "gpu_ids", "nnodes", "rdzv_endpoint", "cpu")
"""The options of `accel test`."""
