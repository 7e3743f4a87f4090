"""Uses of torch.distributed that are not converted: collectives, and parallelism of the script's own."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import Script, descendants, to_code

__all__ = ["check_parallelism", "find_collectives"]

_PACKAGE = "torch.distributed"
_CONVERTED = {"init_process_group", "destroy_process_group", "barrier", "get_rank", "get_world_size"}
_WITH_COLLECTIVES = {_PACKAGE, f"{_PACKAGE}.nn", f"{_PACKAGE}.nn.functional"}
_ADVICE = {
    "all_gather": "Write accelerator.gather(tensor).",
    "all_gather_into_tensor": "Write accelerator.gather(tensor).",
    "all_gather_object": "Write gather_object([obj]) of accel_runtime.",
    "broadcast": "Write tensor = broadcast(tensor) of accel_runtime.",
    "broadcast_object_list": "Write broadcast_object_list(objects) of accel_runtime.",
}
_GUARD = "Guard it with if accelerator.num_processes > 1:"
_SEVERAL = re.compile(r"world_size|num_processes|distributed|is_initialized|ddp|rank\W+-1", re.IGNORECASE)
"""Names in conditions that hold on several processes only."""
_SHARDS = "Remove it, and set parallel: {dp_shard: auto} in the profile."
_DIVIDES = "Remove it, and set parallel: {tp: N} in the profile."
_NONE = "accel has no counterpart; accel launch starts the script as it is."
_PARALLEL = {
    "_composable": _SHARDS,
    "fsdp": _SHARDS,
    "_tensor": _DIVIDES,
    "tensor": _DIVIDES,
    "optim.ZeroRedundancyOptimizer": "Create its optimizer_class instead, and set parallel: {dp_shard: auto} in the profile.",
    "pipelining": _NONE,
    "rpc": _NONE,
}
"""Packages and classes of torch.distributed by which a script divides its model or optimizer itself, with what to write."""


def find_collectives(conversion: Conversion) -> None:
    """Report the calls of collectives that stay, with what to write on one process."""
    script = conversion.script
    changed = conversion.edits.changes.keys() | conversion.edits.removed
    for call in script.calls:
        package, _, name = script.qualified_name(call.func).rpartition(".")
        if (
            package in _WITH_COLLECTIVES
            and name not in _CONVERTED
            and name[0].islower()
            and not name.startswith("is_")
            and script.parents[call] not in changed
            and not _is_of_several(script, call, set())
        ):
            conversion.finding(
                call,
                f"{package}.{name} works as before on several processes, and fails on one. {_ADVICE.get(name, _GUARD)}",
            )


def _is_of_several(script: Script, node: cst.CSTNode, seen: set[Any]) -> bool:
    """Return whether a condition restricts a place to several processes, also at the calls of its function."""
    function = script.function_of(node)
    around = set(script.ancestors(node))
    for one in script.nodes:
        if not isinstance(one, (cst.If, cst.IfExp)) or not _SEVERAL.search(to_code(one.test)):
            continue
        leaves = script.function_of(one) is function and script.start(one) < script.start(node)
        if one in around or (leaves and any(isinstance(end, cst.Return) for end in descendants(one.body))):
            return True
    calls = script.calls_of(function) if function is not None and function not in seen else []
    return bool(calls) and all(_is_of_several(script, call, {*seen, function}) for call in calls)


def check_parallelism(conversion: Conversion) -> None:
    """Raise an error if the script divides its model or optimizer over the processes itself."""
    for call in conversion.script.calls:
        name = conversion.script.qualified_name(call.func)
        last = name.removeprefix(f"{_PACKAGE}.")
        advice = _PARALLEL.get(last) or _PARALLEL.get(last.partition(".")[0])
        if last != name and advice:
            raise conversion.unsafe(
                call, f"The script divides its model over the processes itself, by {name}. {advice}"
            )
