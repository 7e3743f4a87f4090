"""Export checkpoints in torch's format, and import those in it; torch is not imported."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_cli.commands.checkpoint_operations import (
    ExportFormat,
    Progress,
    command_errors,
    copy_snapshot,
    require_path,
    write_export,
)
from accel_cli.errors import AccelError
from accel_runtime.storage.errors import RequestError
from accel_runtime.storage.file_system import require_new_folder
from accel_runtime.storage.store import Snapshot
from accel_runtime.storage.tensor_file import MergeRequest

if TYPE_CHECKING:
    from accel_runtime.extensions.foreign_checkpoints.dcp_manifest import DcpSelection

__all__ = ["DCP", "export_dcp", "import_dcp"]

_STOP_S = 30
"""Seconds that the process of an export has to remove what it has written."""


def export_dcp(
    directory: str, output: str, request: MergeRequest, progress: Progress, layout: str = "nested"
) -> dict[str, Any]:
    """Write the models and optimizers into a folder of torch.distributed.checkpoint, in a process that imports torch."""
    require_path(output, "write")
    if importlib.util.find_spec("torch") is None:
        raise AccelError(
            "Cannot write torch's format: torch is not installed in this environment. Install torch, or use --format safetensors."
        )

    def write(snapshot: Snapshot, counter: Callable[[int], None]) -> dict[str, Any]:
        require_new_folder(Path(output))  # before the seconds of the import
        form = {"key": snapshot.checkpoint.key, "output": output, "layout": layout, "rank": request.rank}
        return {"files": [output], "ties": {}, **_run_export(form, counter)}

    return write_export(directory, write, progress)


DCP = ExportFormat(export_dcp, frozenset({"--layout"}), lacks="torch's format does not have them")


def _run_export(request: dict[str, Any], counter: Callable[[int], None]) -> dict[str, Any]:
    """Return the result of the process that writes the folder.

    Raises:
        RequestError: The request is refused.
        AccelError: The export failed, or the process ended without a result.
    """
    # stderr shows warnings of torch. In a session of its own, Ctrl-C ends it through this process, which waits for its cleanup.
    command = [
        sys.executable,
        "-m",
        "accel_runtime.extensions.foreign_checkpoints.dcp_export",
        json.dumps(request),
    ]
    answer: dict[str, Any] = {}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        try:
            for line in map(json.loads, child.stdout):
                if "read" in line:
                    counter(line["read"])
                else:
                    answer = line
        except BaseException:
            _stop(child)
            raise
    if "refused" in answer:
        raise RequestError(answer["refused"])
    if "error" in answer:
        raise AccelError(answer["error"])
    if "result" not in answer:
        ended = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        raise AccelError(f"Cannot export {request['key']}: the child process ended with {ended}.")
    result: dict[str, Any] = answer["result"]
    return result


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the process, and wait until it has removed what it has written."""
    child.terminate()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()


@command_errors()
def import_dcp(folder: str, output: str, selection: DcpSelection, progress: Progress) -> dict[str, Any]:
    """Write the models and optimizers of a folder of torch.distributed.checkpoint as a checkpoint of accel."""
    require_path(folder, "read")
    source = Path(folder)
    if not source.is_dir():
        raise RequestError(
            f"{'Not a directory' if source.exists() else 'Directory not found'}: {folder}. Give the folder that dcp.save wrote."
        )
    from accel_runtime.extensions.foreign_checkpoints.dcp_manifest import (  # noqa: PLC0415 - imports torch
        open_dcp_checkpoint,
    )

    snapshot, others = open_dcp_checkpoint(source, selection)
    with snapshot:
        manifest = copy_snapshot(snapshot, output, progress)
    return {
        "path": output,
        "from": folder,
        "step": manifest.step,
        "items": [item for item in manifest.items if item != "step_counts"],
        "tensors": len(manifest.tensors),
        "bytes": manifest.bytes,
        "others": others,
    }
