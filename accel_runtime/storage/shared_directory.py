"""The check before the first step that the nodes of a run share the directory of its checkpoints. Imports no torch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from accel_runtime.environment.settings import variable_name
from accel_runtime.storage.errors import AllGatherObjects, describe_error, format_names
from accel_runtime.storage.file_system import FileSystem

__all__ = ["explain_separate_nodes"]

_WAIT_S = 1.0
"""Seconds for a new directory to appear on the other nodes: their caches may have the absence of its parent."""
_POLL_S = 0.05


def explain_separate_nodes(
    directory: Path | None, all_gather: AllGatherObjects, node: str | None, disk: FileSystem, *, sharded: bool
) -> str:
    """Return why not all nodes can save into the directory of rank 0, with the cure; empty if they can.

    Every rank calls it and gets the same text. Nothing stays in the directory.

    Args:
        directory: The directory of checkpoints on rank 0; None on the other ranks, and if it is not known.
        all_gather: The collective call.
        node: The name of this node on one rank of each, which looks; None on its other ranks.
        disk: The file system of this node.
        sharded: Whether models are sharded, so that the first node alone cannot save them.
    """
    created: list[Path] = []
    probe = problem = None
    try:
        if directory is not None:
            probe = directory.absolute() / f".probe-{uuid.uuid4().hex}"
            created = [path for path in (probe, *probe.parents) if not path.exists()]
            try:
                disk.make(probe)
            except OSError as error:
                problem = describe_error(error)
        probe, problem = all_gather((probe, problem))[0]
        if probe is None:
            return ""
        found = all_gather((node, node is None or bool(problem) or _is_seen(probe, disk)))
    finally:
        for path in created:
            with suppress(OSError):  # another process has put something into it
                path.rmdir()
    what, first = f"Checkpoints cannot be saved in {probe.parent}", f"{found[0][0]} (rank 0)"
    if problem:
        return f"{what}: node {first}: {problem}"
    blind = [f"{name} (rank {rank})" for rank, (name, seen) in enumerate(found) if not seen]
    return (
        f"{what}: {_format_nodes(blind)} not see what node {first} creates there. {_get_cure(sharded=sharded)}"
        if blind
        else ""
    )


def _is_seen(probe: Path, disk: FileSystem) -> bool:
    """Return whether this node sees the probe, after a while at the latest."""
    deadline = time.monotonic() + _WAIT_S
    while not (seen := disk.sees(probe)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return seen


def _format_nodes(names: Sequence[str]) -> str:
    return f"node {names[0]} does" if len(names) == 1 else f"nodes {format_names(names)} do"


def _get_cure(*, sharded: bool) -> str:
    if sharded:
        return "Use a directory that all nodes share: sharded models need one."
    variable = variable_name("shared_files")
    return f"Use a directory that all nodes share, or set shared_files: false ({variable}=0): the first node then saves."
