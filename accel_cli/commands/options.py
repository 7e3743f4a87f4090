"""Options of torchrun and Accelerate that accel calls otherwise: what they are called here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

__all__ = [
    "FLAGS",
    "RENAMED",
    "ForeignCommand",
    "ForeignGroup",
    "complete_assignments",
    "complete_checkpoints",
    "complete_keys",
    "complete_profile_names",
    "normalize_option",
]


_MEET = "Use --rdzv-endpoint HOST:PORT, with the address of one machine and a port that is free there"
_MEET_OR_LEAVE = f"{_MEET}; on one machine, leave it out"
_PROFILE = (
    "Use --profile NAME, for the profile that accel config import FILE --profile NAME has made of the file"
)
_PER_NODE = "Use --nproc-per-node N, the number of processes on each machine"
_SHOW = "Use --ranks RANKS for what is on the screen; accel logs prints what every rank wrote"
_COMPILE = "Write Accelerator(dynamo_backend=...) in the script"
_DIVIDE = (
    "Use --set parallel.dp_shard=auto; accel config import FILE translates the other keys of a config file"
)
_FULLY_SHARD = (
    "Use the keys of fully_shard: in the profile; accel config import FILE translates those of a config file"
)
_PARALLEL = "Use --set parallel.dp_replicate=N, parallel.dp_shard, parallel.tp or parallel.cp"
_OFFLOAD = "Use --set fully_shard.cpu_offload=true"
_POD = "Use --tpu-pod NAME, which starts the same on every worker of a pod"
_AWS = "Leave credentials where AWS's tools keep them; launcher.aws_profile names a profile of theirs"
_NUMBERS = "Use --mixed-precision bf16 or fp16; 8-bit numbers are not in this version"

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "n": _PER_NODE,
        "np": _PER_NODE,
        "num-processes": f"{_PER_NODE}, where num_processes counts those of all machines",
        "num-machines": "Use --nnodes N",
        "machine-rank": "Leave it out, since machines number themselves, or use --node-rank N",
        "num-nodes": "Use --nnodes N",
        "world-size": "Use --nproc-per-node N and --nnodes N, whose product it is",
        "main-process-ip": _MEET_OR_LEAVE,
        "main-process-port": _MEET_OR_LEAVE,
        "master-addr": _MEET_OR_LEAVE,
        "master-port": _MEET_OR_LEAVE,
        "backend": "Use --set process_group_backend=gloo or nccl",
        "multi-gpu": "Use --nproc-per-node auto, a process for each GPU",
        "use-cpu": "Use --cpu",
        "config-file": _PROFILE,
        "config": _PROFILE,
        "tpu": "Use --set launcher.kind=xla",
        "num-cpu-threads-per-process": "Use --set launcher.omp_num_threads=N",
        "enable-cpu-affinity": "Leave it out: accel does not bind processes to processor cores",
        "numa-binding": "Leave it out: accel does not bind processes to processor cores",
        "dynamo-": _COMPILE,
        "use-fsdp": _DIVIDE,
        "use-deepspeed": _DIVIDE,
        "use-parallelism-config": _PARALLEL,
        "parallelism-config-": _PARALLEL,
        "use-megatron-lm": "Leave it out: Megatron-LM is not in this version",
        "megatron-lm-": "Leave it out: Megatron-LM is not in this version",
        "fsdp-": _FULLY_SHARD,
        "deepspeed-": _DIVIDE,
        "zero-stage": _DIVIDE,
        "zero3-": _DIVIDE,
        "offload-": _OFFLOAD,
        "gradient-accumulation-steps": "Write Accelerator(gradient_accumulation_steps=N) in the script",
        "gradient-clipping": "Call accelerator.clip_grad_norm_ in the script",
        "same-network": "Leave it out: machines meet at --rdzv-endpoint, on one network or not",
        "tee": _SHOW,
        "t": _SHOW,
        "redirects": _SHOW,
        "r": _SHOW,
        "local-ranks-filter": _SHOW,
        "duplicate-": _SHOW,
        "role": "Leave it out: all processes of a launch have one role",
        "rdzv-backend": "Leave it out: machines always meet by c10d",
        "rdzv-conf": "Use --set launcher.rdzv_timeout=SECONDS or launcher.last_call_timeout=SECONDS",
        "standalone": "Leave it out: on one machine processes meet at a free port of their own",
        "monitor-interval": "Use --set launcher.monitor_interval=SECONDS",
        "start-method": "Use --set launcher.start_method=forkserver or exec",
        "run-path": "Leave it out: the script runs as it is",
        "local-addr": "Leave it out: the address is the one on the route to --rdzv-endpoint",
        "logs-specs": "Use --log-dir DIR",
        "event-log-handler": "Leave it out: accel logs prints what happened",
        "virtual-local-rank": "Leave it out: every process sees all GPUs and uses the one of its local rank",
        "signals-to-handle": "Leave it out: signals that end or stop a run reach every process",
        "main-training-function": "Use --set launcher.main_training_function=NAME, with launcher.kind: xla",
        "downcast-bf16": "Use --mixed-precision bf16",
        "tpu-cluster": _POD,
        "no-tpu-cluster": "Leave it out: without --tpu-pod, the script runs on this machine",
        "tpu-use-sudo": "Use --pod-setup LINE for a line of shell with sudo",
        "vm": _POD,
        "env": "Use --set env.NAME=VALUE",
        "fp8-": _NUMBERS,
        "aws-": _AWS,
        "debug": "Leave it out: ranks whose collectives do not match are named in every run",
        "mpirun-hostfile": "Start accel launch by mpirun, whose variables it reads",
    }
)  # fmt: skip
"""What to use instead, by the option's name with `-` for `_`; a name that ends with `-` is the beginning of several."""
FLAGS = frozenset({
    "multi-gpu", "use-cpu", "tpu", "enable-cpu-affinity", "use-fsdp", "use-deepspeed", "use-parallelism-config",
    "use-megatron-lm", "dynamo-use-fullgraph", "dynamo-use-dynamic", "dynamo-use-regional-compilation", "same-network",
    "standalone", "run-path", "virtual-local-rank", "downcast-bf16", "tpu-cluster", "no-tpu-cluster", "tpu-use-sudo",
    "debug",
})  # fmt: skip
"""Options in the table that take no value."""


def normalize_option(name: str) -> str:
    """Return an option's name as accel spells it: with `-` for `_`."""
    return name.replace("_", "-")


class ForeignCommand(TyperCommand):
    """A command that says what options of torchrun and Accelerate are called here."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse(self, ctx, args)
        return super().parse_args(ctx, args)


class ForeignGroup(TyperGroup):
    """A group of commands that says what options of torchrun and Accelerate are called here."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse(self, ctx, args)
        return super().parse_args(ctx, args)


def _refuse(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Refuse all options that are called otherwise here, one line each, up to the first that is not known at all.

    Raises:
        UsageError: There is one.
    """
    if ctx.resilient_parsing:  # a shell asks how to complete the line
        return
    params = command.get_params(ctx)
    options = {name: option for option in params for name in (*option.opts, *option.secondary_opts)}
    if found := dict(_find_foreign(options, args)):
        from accel_cli.errors import UsageError

        lines = (f"{ctx.command_path} has no option {typed}. {cure}." for typed, cure in found.items())
        raise UsageError("\n".join(lines))


def _find_foreign(options: Mapping[str, Any], args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Find the options in front of the script that are not known by their name here, each with what to use."""
    rest = list(args)
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "--"}:
        typed, equals, _ = rest.pop(0).partition("=")
        name = normalize_option(typed.lstrip("-"))
        own = options.get(typed if len(typed) == 2 else f"--{name}")  # noqa: PLR2004 - `-m`
        cure = None if own else _find_cure(name)
        if cure:
            yield typed, cure
        elif not own and typed.startswith("--"):
            # Behind it, nobody knows what is its value.
            yield typed, _guess_option(name, options)
            return
        takes_value = not own.is_flag if own else name not in FLAGS
        if takes_value and not equals:
            del rest[:1]


def _find_cure(name: str) -> str | None:
    """Return what to use instead of an option of another launcher."""
    begins = (cure for begin, cure in RENAMED.items() if begin.endswith("-") and name.startswith(begin))
    return RENAMED.get(name) or next(begins, None)


def _guess_option(name: str, options: Mapping[str, Any]) -> str:
    """Return the option that was probably meant, in a sentence, or where all of them are listed."""
    from accel_runtime.env import find_nearest

    known = [option[2:] for option in options if option.startswith("--")]
    meant = next((option for option in known if option.startswith(name)), None) or find_nearest(name, known)
    return f"Did you mean --{meant}? See --help for all options" if meant else "See --help for all options"


def complete_profile_names(incomplete: str) -> list[str]:
    """The names of the profiles there are."""
    import os
    from pathlib import Path

    from accel_cli.profile.store import Store

    return [n for n in Store.from_env(os.environ, Path.cwd()).names() if n.startswith(incomplete)]


def complete_assignments(incomplete: str) -> list[tuple[str, str]]:
    """The keys of a profile, ready for a value."""
    from accel_cli.profile.schema import known_keys

    return [(f"{key}=", text) for key, text in known_keys().items() if key.startswith(incomplete)]


def complete_keys(incomplete: str) -> list[tuple[str, str]]:
    """The keys of a profile."""
    from accel_cli.profile.schema import known_keys

    return [(key, text) for key, text in known_keys().items() if key.startswith(incomplete)]


def complete_checkpoints(incomplete: str) -> list[str]:
    """Directories: checkpoints, and those on the way to them."""
    from pathlib import Path

    # What is typed so far stays as it is, `./` in front too.
    head, _, rest = incomplete.rpartition("/")
    above = f"{head}/" if "/" in incomplete else ""
    try:
        found = sorted(path.name for path in Path(above or ".").iterdir() if path.is_dir())
    except OSError:
        return []
    return [f"{above}{name}" for name in found if name.startswith(rest) and not name.startswith(".")]
