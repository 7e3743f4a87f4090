"""The declaration of an option of a launch, a launch request, and the options of torchrun and Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from accel_runtime.environment.registry import Registry

__all__ = [
    "ConfigFile",
    "ForeignOption",
    "Kind",
    "LaunchOption",
    "PlanCheck",
    "Request",
    "find_foreign_option",
    "list_foreign_options",
    "normalize_option",
]

Kind = Literal["script", "module", "program"]


@dataclass(frozen=True)
class LaunchOption:
    """An option of `accel launch`: a value of the profile for one run, or a part of the request.

    Launchers declare theirs as such rows; those that every launcher may get are in `accel_cli.profile.options`.
    """

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
    only_prints: bool = False
    """The launcher prints `Launcher.preview`, and runs nothing."""
    selects_launcher: bool = False
    """The option selects the launcher that declares it, whatever launcher the profile has."""

    @property
    def name(self) -> str:
        """The name in a request: `nproc_per_node` for `--nproc-per-node`."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class ConfigFile:
    """A config file of Accelerate, as values of the profile for one launch."""

    name: str
    """Its path, as typed."""
    values: Mapping[str, Any]
    """The values by dotted key; those of `env.` are variables for scripts that import `accelerate`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """All variables that Accelerate's launcher sets for it."""
    replaced_by: Mapping[str, str] = field(default_factory=dict)
    """Keys of `values` that are left out if a stronger source sets another key, by that key."""
    fixed_reason: str = ""
    """Why no stronger source may set keys of `parallel:` and `fully_shard:`; empty if it may."""
    unused: tuple[tuple[str, str], ...] = ()
    """The keys of the file that have no effect, with their values, and the reasons."""


class PlanCheck(Protocol):
    """A check of the plan against options of other launchers."""

    def check(self, environ: Mapping[str, str], num_nodes: int, num_processes: int, layout: str) -> None:
        """Raise UsageError if the plan is not what the options mean."""


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
    config_file: ConfigFile | None = None
    """The config file of Accelerate for this launch."""
    translation: PlanCheck | None = None
    """The translation of options of torchrun and Accelerate; None if all options are those of accel."""
    same_as: str = ""
    """The command in the options of accel; empty without a translation, or with --quiet."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about the command line."""
    for_pod: bool = False
    """Plan for the workers of a TPU pod, to which the user's own profile does not apply."""


_ADVICE = {
    "Use --nproc-per-node N, the number of processes on each node": "n= np= num-gpus=",
    "Use --nproc-per-node N for the number of GPUs, or --gpu-ids IDS to choose them": "gpus=",
    "Leave it out: accel does not bind processes to processor cores": "numa-binding= bind-cores-to-rank bind-core-list=",
    "Leave it out: processes get their local rank in the variable LOCAL_RANK": "no-local-rank",
    "Leave it out: on one node, the rendezvous uses a free port": "standalone",
    "Leave it out: accel runs the script itself, unchanged": "run-path",
    "Leave it out: every process sees all GPUs and uses the one of its local rank": "virtual-local-rank",
    "Use --nproc-per-node N and --nnodes N; the world size is their product": "world-size=",
    "Use --set process_group_backend=gloo or nccl": "backend=",
    "Use --ranks RANKS to choose the output on the terminal; accel logs prints the output of every rank": "tee= t= redirects= r= local-ranks-filter= duplicate-*=",
    "Leave it out: all processes of a launch have the same role": "role=",
    "Use --set launcher.rdzv_timeout=SECONDS or launcher.last_call_timeout=SECONDS": "rdzv-conf=",
    "Use --set launcher.monitor_interval=SECONDS": "monitor-interval=",
    "Use --set launcher.start_method=forkserver or exec": "start-method=",
    "Leave it out: accel uses the address on the route to --rdzv-endpoint": "local-addr=",
    "Use --log-dir DIR": "logs-specs=",
    "Leave it out: accel logs prints the output of a run": "event-log-handler=",
    "Leave it out: signals that end or stop a run are passed to every process": "signals-to-handle=",
}
"""Options of torchrun and other launchers by the advice for them: `n=` takes a value, `duplicate-*=` is all of a prefix."""
FOREIGN_OPTIONS: Registry[Mapping[str, str]] = Registry(
    {
        "deepspeed": "accel_cli.extensions.deepspeed.own_launcher:OPTIONS",
        "xla": "accel_cli.extensions.xla.tpu:OPTIONS",
    }
)
"""Those of launchers of the libraries of extensions."""


class ForeignOption(NamedTuple):
    """An option of torchrun, Accelerate or another launcher that `accel launch` does not have."""

    advice: str
    takes_value: bool


@cache
def list_foreign_options() -> Mapping[str, ForeignOption]:
    """Return the options of other launchers, by name with `-` for `_`; a name that ends with `-` is a prefix."""
    # Not for `accel --help`, which imports nothing of the runtime.
    from accel_runtime.environment.accelerate import launch  # noqa: PLC0415

    advice = {
        **_ADVICE,
        **{text: names for name in FOREIGN_OPTIONS.names for text, names in FOREIGN_OPTIONS[name].items()},
        launch.NUM_MACHINES.advice: "num-nodes=",
        launch.MAIN_PROCESS_IP.advice: "master-addr= master-port=",
    }
    options = {
        name.rstrip("*="): ForeignOption(text, "=" in name)
        for text, names in advice.items()
        for name in names.split()
    }
    for name, setting in launch.list_options():
        options[normalize_option(name)] = ForeignOption(setting.advice, not setting.is_switch)
    for prefix, text in launch.OTHER_OPTIONS.items():
        options[normalize_option(prefix)] = ForeignOption(text, takes_value=True)
    return MappingProxyType(options)


def find_foreign_option(name: str) -> ForeignOption | None:
    """Return the option of another launcher with a name, with `-` for `_`, or with one of its prefixes."""
    options = list_foreign_options()
    prefixes = (key for key in options if key.endswith("-") and name.startswith(key))
    return options.get(name) or options.get(next(prefixes, ""))


def normalize_option(name: str) -> str:
    """Return an option's name as accel spells it: with `-` for `_`."""
    return name.replace("_", "-")
