"""DeepSpeed's own launcher: as the target of `accel launch`, and the advice for its options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel_cli.planning.nested_launchers import OtherLauncher, Words

__all__ = ["LAUNCHER", "OPTIONS"]

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "Use --gpu-ids IDS for GPUs of this machine, or --hosts HOSTS to run on others over ssh": "include= exclude=",
        "Use --hosts HOSTS or --hostfile FILE to start the nodes over ssh, or launcher.kind: slurm": "launcher= force-multi no-ssh",
    }
)
"""Its options by the advice for them."""


def _parse_deepspeed(args: Words) -> Words | None:
    """Return the script of DeepSpeed's launcher, without its own options."""
    place = next((number for number, word in enumerate(args) if word.endswith(".py")), None)
    if "--module" in args:
        place = args.index("--module") + 1
        return ("-m", *args[place:]) if args[place:] and not args[place].startswith("-") else None
    return None if place is None else args[place:]


LAUNCHER = OtherLauncher(
    _parse_deepspeed, frozenset({"deepspeed.launcher.launch", "deepspeed.launcher.runner"})
)
