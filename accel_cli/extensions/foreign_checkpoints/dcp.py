"""Export checkpoints in torch's format, and import those in it; torch is imported when it is needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict
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
    from accel_runtime.extensions.foreign_checkpoints.dcp_export import Layout
    from accel_runtime.extensions.foreign_checkpoints.folders import DcpSelection

__all__ = ["DCP", "export_dcp", "import_dcp"]


def export_dcp(
    directory: str, output: str, request: MergeRequest, progress: Progress, layout: Layout = "nested"
) -> dict[str, Any]:
    """Write the models and optimizers into a folder of torch.distributed.checkpoint."""
    require_path(output, "write")
    if importlib.util.find_spec("torch") is None:
        raise AccelError(
            "Cannot write torch's format: torch is not installed in this environment. Install torch, or use --format safetensors."
        )

    def write(snapshot: Snapshot, counter: Callable[[int], None]) -> dict[str, Any]:
        require_new_folder(Path(output))  # before the seconds of the import
        from accel_runtime.extensions.foreign_checkpoints.dcp_export import (  # noqa: PLC0415 - imports torch
            DcpRequest,
            write_dcp_folder,
        )

        result = write_dcp_folder(snapshot, Path(output), DcpRequest(layout, request.rank), counter)
        return {"files": [output], "ties": {}, **asdict(result)}

    return write_export(directory, write, progress)


DCP = ExportFormat(export_dcp, frozenset({"--layout"}), lacks="torch's format does not have them")


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
