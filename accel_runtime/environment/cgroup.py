"""Limits of the control groups of this process (Linux), as a container or a scheduler sets them; standard library only.

The files of version 2 are described at https://docs.kernel.org/admin-guide/cgroup-v2.html, those of version 1 at
https://docs.kernel.org/scheduler/sched-bwc.html, https://docs.kernel.org/admin-guide/cgroup-v1/pids.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

__all__ = [
    "count_cpus",
    "explain_process_limit",
    "read_available_memory",
    "read_cpu_quota",
    "read_process_limit",
]

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def count_cpus() -> int:
    """Return the number of logical processors that this process may use: by its affinity, and by the quota of its group."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    # Rounded down: threads beyond the quota would be throttled while the others wait for them.
    return max(1, int(min(len(os.sched_getaffinity(0)), read_cpu_quota())))


def read_cpu_quota(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> float:
    """Return the processors that the groups of this process may use, in CPU seconds a second; infinity without a limit."""
    limits = [_read(folder / "cpu.max").split() for folder in _list_folders("", membership, mount)]
    limits += [
        [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        for folder in _list_folders("cpu", membership, mount)
    ]
    quotas = [list(map(int, limit)) for limit in limits if len(limit) > 1 and all(map(str.isdecimal, limit))]
    return min((quota / period for quota, period in quotas if period), default=math.inf)


def read_process_limit(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int | None:
    """Return the number of processes and threads that the groups of this process may have; None without a limit."""
    folders = _list_folders("", membership, mount) + _list_folders("pids", membership, mount)
    texts = [_read(folder / "pids.max") for folder in folders]
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def explain_process_limit() -> str:
    """Return that the limit on processes is reached, with the smallest limit of this process, and the cure."""
    import resource  # noqa: PLC0415 - not on all systems

    soft, group = resource.getrlimit(resource.RLIMIT_NPROC)[0], read_process_limit()
    limits = {"ulimit -u": soft, "pids.max of the control group": group}
    known = [(limit, name) for name, limit in limits.items() if limit is not None and limit >= 0]
    found = " ({1} is {0})".format(*min(known)) if known else ""
    return f"the limit on processes is reached{found}. Raise the limit, or end other processes."


def read_available_memory(
    membership: Path = _MEMBERSHIP, mount: Path = _MOUNT, meminfo: Path = Path("/proc/meminfo")
) -> int | None:
    """Return the bytes that processes can still allocate, on this machine and in the groups of this process; None if unknown."""
    available = [
        int(line.split()[1]) * 1024
        for line in _read(meminfo).splitlines()
        if line.startswith("MemAvailable:")
    ]
    for controller, limit_file, usage_file, cache_key in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _list_folders(controller, membership, mount):
            limit, usage = _read(folder / limit_file), _read(folder / usage_file)
            if limit.isdecimal() and usage.isdecimal():
                # The kernel drops this part of the page cache before it refuses memory.
                lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
                cache = next((int(line[1]) for line in lines if line[0] == cache_key), 0)
                available.append(max(0, int(limit) - int(usage) + cache))
    return min(available, default=None)


def _list_folders(controller: str, membership: Path, mount: Path) -> list[Path]:
    """List the folders of the groups of this process and of those above, for a controller of version 1, or for version 2."""
    folders = []
    for line in _read(membership).splitlines():
        _, controllers, group = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        names = PurePosixPath(group.strip("/"))
        # In a container, the files of its own group are at the top, whatever name the group has outside.
        for name in dict.fromkeys((names, *names.parents, PurePosixPath())):
            folders += [
                mount / root / name for root in ((controllers, controller) if controller else ("", "unified"))
            ]
    return folders


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
