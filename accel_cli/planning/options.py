"""Options of `accel launch`, each declared once, a launch request, and the options of torchrun and Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

__all__ = [
    "FOREIGN_FLAGS",
    "FOREIGN_OPTIONS",
    "OPTIONS",
    "SELECTION",
    "Kind",
    "LaunchOption",
    "Request",
    "normalize_option",
]

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
_ADVICE = {
    "Use --nproc-per-node auto, one process for each GPU": "multi-gpu",
    "Use --cpu": "use-cpu",
    "Use --set launcher.kind=xla": "tpu",
    "Leave it out: accel does not bind processes to processor cores": "enable-cpu-affinity numa-binding=",
    "Use --set parallel.dp_shard=auto; accel config import FILE converts the other keys of a config file": "use-fsdp use-deepspeed deepspeed-*= zero-stage= zero3-*=",
    "Use --set parallel.dp_replicate=N, parallel.dp_shard, parallel.tp or parallel.cp": "use-parallelism-config parallelism-config-*=",
    "Leave it out: Megatron-LM is not supported": "use-megatron-lm megatron-lm-*=",
    "Leave it out: nodes connect to --rdzv-endpoint on any network": "same-network",
    "Leave it out: on one node, the rendezvous uses a free port": "standalone",
    "Leave it out: accel runs the script itself, unchanged": "run-path",
    "Leave it out: every process sees all GPUs and uses the one of its local rank": "virtual-local-rank",
    "Use --mixed-precision bf16": "downcast-bf16",
    "Use accel tpu-pod NAME, which starts accel launch on every worker of a pod": "tpu-cluster tpu-pod= vm=",
    "Leave it out: accel launch runs the script on this machine": "no-tpu-cluster",
    "Use accel tpu-pod NAME --setup COMMAND, with sudo in the command": "tpu-use-sudo",
    "Use accel tpu-pod NAME --run": "run-pod",
    "Leave it out: every run reports the ranks whose collectives do not match": "debug",
    "Use Accelerator(dynamo_backend=...) in the script": "dynamo-use-fullgraph dynamo-use-dynamic dynamo-use-regional-compilation dynamo-*=",
    "Use --nproc-per-node N, the number of processes on each node": "n= np=",
    "Use --nproc-per-node N, the number of processes on each node; num_processes is the number on all nodes": "num-processes=",
    "Use --nnodes N": "num-machines= num-nodes=",
    "Leave it out, since nodes are numbered automatically, or use --node-rank N": "machine-rank=",
    "Use --nproc-per-node N and --nnodes N; the world size is their product": "world-size=",
    "Use --rdzv-endpoint HOST:PORT, the address of one node and a free port on it; on one node, leave it out": "main-process-ip= main-process-port= master-addr= master-port=",
    "Use --set process_group_backend=gloo or nccl": "backend=",
    "Use --profile NAME, with a profile that accel config import FILE --profile NAME has created from the file": "config-file= config=",
    "Use --set launcher.omp_num_threads=N": "num-cpu-threads-per-process=",
    "Use the keys of fully_shard: in the profile; accel config import FILE converts those of a config file": "fsdp-*=",
    "Use --set fully_shard.cpu_offload=true": "offload-*=",
    "Use Accelerator(gradient_accumulation_steps=N) in the script": "gradient-accumulation-steps=",
    "Call accelerator.clip_grad_norm_ in the script": "gradient-clipping=",
    "Use --ranks RANKS to choose the output on the terminal; accel logs prints the output of every rank": "tee= t= redirects= r= local-ranks-filter= duplicate-*=",
    "Leave it out: all processes of a launch have the same role": "role=",
    "Leave it out: the rendezvous always uses c10d": "rdzv-backend=",
    "Use --set launcher.rdzv_timeout=SECONDS or launcher.last_call_timeout=SECONDS": "rdzv-conf=",
    "Use --set launcher.monitor_interval=SECONDS": "monitor-interval=",
    "Use --set launcher.start_method=forkserver or exec": "start-method=",
    "Leave it out: accel uses the address on the route to --rdzv-endpoint": "local-addr=",
    "Use --log-dir DIR": "logs-specs=",
    "Leave it out: accel logs prints the output of a run": "event-log-handler=",
    "Leave it out: signals that end or stop a run are passed to every process": "signals-to-handle=",
    "Use --set launcher.main_training_function=NAME, with launcher.kind: xla": "main-training-function=",
    "Use accel tpu-pod NAME --zone ZONE": "zone=",
    "Use accel tpu-pod NAME --project ID": "project=",
    "Use accel tpu-pod NAME --folder DIR": "pod-folder=",
    "Use accel tpu-pod NAME --setup COMMAND": "pod-setup=",
    "Use --set env.NAME=VALUE": "env=",
    "Use --mixed-precision bf16 or fp16; 8-bit formats are not supported": "fp8-*=",
    "Leave credentials in the files of the AWS CLI, and choose an AWS profile with launcher.aws_profile": "aws-*=",
    "Run accel launch with mpirun, whose variables it reads": "mpirun-hostfile=",
}
"""Options of torchrun and Accelerate by the advice for them: `n=` takes a value, `fsdp-*=` is all of a prefix."""
FOREIGN_OPTIONS: Mapping[str, str] = MappingProxyType(
    {name.rstrip("*="): advice for advice, names in _ADVICE.items() for name in names.split()}
)
"""The advice for an option, by name with `-` for `_`; a name that ends with `-` is a prefix."""
FOREIGN_FLAGS = frozenset(name for names in _ADVICE.values() for name in names.split() if "=" not in name)
"""The options that take no value."""


def normalize_option(name: str) -> str:
    """Return an option's name as accel spells it: with `-` for `_`."""
    return name.replace("_", "-")
