"""Facts about this machine and the GPU of a rank: versions, folders, memory, limits, and errors that the driver has counted."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel_runtime.environment.cgroup import count_cpus, read_available_memory
from accel_runtime.environment.settings import __version__
from accel_runtime.extensions.node_check.facts import FolderFacts, NodeFacts, PeerFacts
from accel_runtime.observe.kernel_log import read_kernel_log
from accel_runtime.observe.nvml import load_nvml

__all__ = ["GpuErrors", "measure_folder", "measure_node", "read_gpu_errors"]

_SAMPLE_BYTES = 1 << 16
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_XID = re.compile(rb"NVRM: Xid \([^)]*\): (\d+)")


def measure_node(
    node: int, log_folder: str | None, work_folder: str, peers: Sequence[PeerFacts], *, has_gpu: bool
) -> NodeFacts:
    """Return the facts about this node."""
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 - the file system itself
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        node,
        python=platform.python_version(),
        torch=torch.__version__,
        accel=__version__,
        nccl=_read_nccl_version(),
        driver=_read_driver_version() if has_gpu else None,
        xid_errors=_read_xid_errors() if has_gpu else None,
        log_folder=measure_folder(log_folder) if log_folder else None,
        work_folder=measure_folder(work_folder),
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        memory_bytes=read_available_memory(),
        open_files=None if limit == resource.RLIM_INFINITY else limit,
        cpus=count_cpus(),
        peers=tuple(peers),
    )


def measure_folder(path: str) -> FolderFacts:
    """Return the space in a folder, and try to write a small file there."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        return FolderFacts(path, error=error.strerror or str(error))
    free = status.f_bavail * status.f_frsize
    inodes = status.f_favail if status.f_files else None
    try:
        # Without a name where the file system allows it, so that nothing stays if this process is killed.
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(_SAMPLE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # On NFS, and where all blocks are reserved, only the write finds out.
        return FolderFacts(path, free, inodes, error.strerror or str(error), error.errno in _FULL)
    return FolderFacts(path, free, inodes)


def _read_nccl_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    with suppress(Exception):  # a build without NCCL
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return None


def _read_driver_version() -> str | None:
    nvml = load_nvml()
    if nvml is None:
        return None
    with suppress(nvml.NVMLError):
        version = nvml.nvmlSystemGetDriverVersion()
        return version.decode("ascii", errors="replace") if isinstance(version, bytes) else str(version)
    return None


class GpuErrors(NamedTuple):
    """The errors that the driver has counted for a GPU; None if they were not checked."""

    uncorrected: int | None
    """The number of uncorrected memory errors."""
    row_problem: str | None
    """The problem with the rows of its memory; empty without one."""


def read_gpu_errors(uuid: str) -> GpuErrors:
    """Read the errors that the driver has counted for the GPU with a UUID."""
    nvml = load_nvml()
    if nvml is None:
        return GpuErrors(None, None)
    try:
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid.encode("ascii"))
    except nvml.NVMLError:  # an instance of a GPU (MIG)
        return GpuErrors(None, None)
    count = None
    with suppress(nvml.NVMLError):  # a GPU without ECC, or with ECC off
        count = int(
            nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )
    return GpuErrors(count, _read_row_problem(nvml, gpu))


def _read_row_problem(nvml: Any, gpu: Any) -> str | None:
    """Return that rows (since the A100) or pages (before) are to be replaced; empty if not, None if it is not known."""
    with suppress(nvml.NVMLError):
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(gpu)
        if has_failed:
            return "remapping a row of its memory has failed; replace it"
        return "a row of its memory will be remapped at the next reset; reset it" if is_pending else ""
    with suppress(nvml.NVMLError):
        is_pending = nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu)
        return (
            "a page of its memory will be retired at the next reboot; reboot the node" if is_pending else ""
        )
    return None


def _read_xid_errors() -> tuple[int, ...] | None:
    """Return the errors in the log of the kernel: NVML reports only those that occur while a program waits for them."""
    try:
        lines = list(read_kernel_log())
    except OSError:
        return None
    return tuple(sorted({int(number) for line in lines for number in _XID.findall(line)}))
