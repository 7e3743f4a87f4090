"""Uses of torch.distributed that are not converted: collectives, and parallelism of the script's own."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accel_cli.migrate.findings import Finding

__all__ = ["CONNECTS", "SPAWN", "find_collectives", "find_own_parallelism", "starts_processes"]

_PACKAGE = "torch.distributed"
_CONVERTED = {
    "init_process_group", "destroy_process_group", "barrier", "get_rank", "get_world_size", "is_initialized", "all_reduce", "reduce",
}  # fmt: skip
"""Functions that are converted, or have a finding where they cannot be."""
SPAWN = "torch.multiprocessing.spawn"
CONNECTS = {"torch.distributed.init_process_group", "torch.distributed.destroy_process_group"}
_ANYWHERE = {
    "get_default_backend_for_device", "is_available", "is_backend_available", "is_gloo_available", "is_mpi_available",
    "is_nccl_available", "is_torchelastic_launched",
}  # fmt: skip
"""Functions that need no process group."""
_WITH_COLLECTIVES = ("algorithms.", "distributed_c10d.", "nn.")
"""Packages whose functions exchange values; others read and write checkpoints, and record errors."""
_ADVICE = {
    "all_gather": "Write accelerator.gather(tensor)",
    "all_gather_into_tensor": "Write accelerator.gather(tensor)",
    "all_gather_object": "Write gather_object([obj]) of accel_runtime",
    "broadcast": "Write broadcast(tensor) of accel_runtime",
    "broadcast_object_list": "Write broadcast_object_list(objects) of accel_runtime",
    "new_group": "Remove it, or set parallel in the profile",
}
_OTHER = "It works after Accelerator() on several processes; guard it with if accelerator.num_processes > 1:"
_PARALLEL = {
    "_composable": "Remove it, and set parallel: {dp_shard: auto} in the profile: accelerator.prepare(model) shards the model.",
    "fsdp": "Remove it, and set parallel: {dp_shard: auto} in the profile: accelerator.prepare(model) shards the model.",
    "_tensor": "Remove it, and set parallel: {tp: N} in the profile.",
    "device_mesh": "Remove it, and set parallel in the profile.",
    "tensor": "Remove it, and set parallel: {tp: N} in the profile.",
    "autograd": "A training over RPC has no counterpart in accel; accel launch starts it as it is.",
    "optim.DistributedOptimizer": "A training over RPC has no counterpart in accel; accel launch starts it as it is.",
    "optim.ZeroRedundancyOptimizer": "Create its optimizer_class instead, and set parallel: {dp_shard: auto} in the profile.",
    "pipelining": "A pipeline has no counterpart in accel; accel launch starts it as it is.",
    "rpc": "A training over RPC has no counterpart in accel; accel launch starts it as it is.",
}
"""Packages and classes of torch.distributed by which a script divides its model or optimizer itself, with what to write."""


def find_collectives(tree: ast.Module) -> tuple[Finding, ...]:
    """Return the calls of collectives that are not converted, with what to write."""
    return tuple(
        Finding(
            call.lineno, f"This use of process groups is not converted: {name}. {_ADVICE.get(last, _OTHER)}."
        )
        for call, name in _list_calls(tree, _PACKAGE)
        if (last := name.removeprefix(f"{_PACKAGE}.")) not in _CONVERTED | _ANYWHERE
        and ("." not in last or last.startswith(_WITH_COLLECTIVES))
    )


def find_own_parallelism(tree: ast.Module) -> Finding | None:
    """Return the place where a script divides its model over the processes itself; None if it does not."""
    for call, name in _list_calls(tree, _PACKAGE):
        last = name.removeprefix(f"{_PACKAGE}.")
        if advice := _PARALLEL.get(last) or _PARALLEL.get(last.partition(".")[0]):
            return Finding(
                call.lineno, f"The script divides its model over the processes itself, by {name}. {advice}"
            )
    return None


def starts_processes(tree: ast.Module) -> bool:
    """Return whether a script starts processes by `mp.spawn`, or connects them to a process group."""
    return any(name in {SPAWN, *CONNECTS} for _, name in _list_calls(tree, "torch"))


def _list_calls(tree: ast.Module, package: str) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of functions of a package in the order of the text, with their dotted names."""
    names = _list_imports(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda one: (one.lineno, one.col_offset)):
        parts: list[str] = []
        node = call.func
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in names:
            name = ".".join([names[node.id], *reversed(parts)])
            if name.startswith(f"{package}."):
                yield call, name


def _list_imports(tree: ast.Module) -> dict[str, str]:
    """Return the dotted names of what a script imports from torch, by the names that it gives them."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full for name, full in found.items() if full.partition(".")[0] == "torch"}
