"""Memory of processes, and memory and utilisation of their GPUs, through nvidia-ml-py if it and the driver are installed."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.run_files import LineReader, read_text
from accel_runtime.observe.nvml import load_nvml

__all__ = ["PeakMemory", "read_cpu_time", "read_gpu_usage", "read_peak_memory", "read_rss"]


_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def read_rss(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended, or without /proc."""
    fields = read_text(Path("/proc", str(pid), "statm")).split()
    return int(fields[1]) * _PAGE_SIZE if len(fields) > 1 else 0


def read_cpu_time(pid: int) -> float:
    """Return the CPU time of a process in seconds, that of its threads and of children that have ended included; 0 if it is unknown."""
    fields = read_text(Path("/proc", str(pid), "stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS if len(fields) > 14 else 0.0  # noqa: PLR2004 - fields of proc(5)


def read_gpu_usage(pids: Collection[int]) -> dict[int, tuple[int, int]]:
    """Return the GPU memory in bytes of each process, and the utilisation of its GPUs in percent.

    Processes without a context on a GPU are left out, and all of them if there is no driver. The utilisation is that of
    the whole GPU, also if several processes share it; of several GPUs, the highest.
    """
    nvml = load_nvml()
    if nvml is None:
        return {}
    usage: dict[int, tuple[int, int]] = {}
    with suppress(nvml.NVMLError):
        for index in range(nvml.nvmlDeviceGetCount()):
            # One GPU may be lost.
            with suppress(nvml.NVMLError):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                _add_usage(nvml, device, pids, usage)
    return usage


def _add_usage(nvml: Any, device: Any, pids: Collection[int], usage: dict[int, tuple[int, int]]) -> None:
    """Add the memory and utilisation of one GPU to those of its processes."""
    processes = [entry for entry in nvml.nvmlDeviceGetComputeRunningProcesses(device) if entry.pid in pids]
    utilization = 0
    # A GPU that is divided into instances (MIG) has no utilisation.
    with suppress(nvml.NVMLError):
        utilization = int(nvml.nvmlDeviceGetUtilizationRates(device).gpu) if processes else 0
    for entry in processes:
        size, percent = usage.get(entry.pid, (0, 0))
        # The driver does not know the memory of every process, for example in some virtual machines.
        usage[entry.pid] = size + (entry.usedGpuMemory or 0), max(percent, utilization)


class PeakMemory(NamedTuple):
    """The most memory of a process in the samples of a run, in bytes."""

    resident: int
    gpu: int | None
    """None without a GPU."""


def read_peak_memory(run: RunFolder) -> dict[int, PeakMemory]:
    """Return the peaks of the ranks on this node over all attempts; empty for a run without samples."""
    peaks: dict[int, PeakMemory] = {}
    file = run.path / "memory.jsonl"
    for sample in LineReader(file) if file.is_file() else ():
        rss, gpu = (sizes if isinstance(sizes := sample.get(kind), dict) else {} for kind in ("rss", "gpu"))
        for text, size in rss.items():
            rank, before = int(text), peaks.get(int(text), PeakMemory(0, None))
            gpu_size = max(gpu.get(text) or 0, before.gpu or 0) or None
            peaks[rank] = PeakMemory(max(size, before.resident), gpu_size)
    return dict(sorted(peaks.items()))
