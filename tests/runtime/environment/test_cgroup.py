"""Limits of control groups, from the files of both versions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_runtime.environment.cgroup import (
    count_cpus,
    read_available_memory,
    read_cpu_quota,
    read_process_limit,
)

TREES = {
    "version 2, in a container": ("0::/\n", {"cpu.max": "150000 100000", "pids.max": "7"}, 1.5, 7),
    "version 2, above the own group": ("0::/job/step\n", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000",
                                                          "job/pids.max": "9", "job/step/pids.max": "max"}, 4.0, 9),
    "the least of several": ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"}, 2.0, None),
    "version 1": ("4:cpu,cpuacct:/job\n3:pids:/job\n", {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "50000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000", "pids/job/pids.max": "4"}, 0.5, 4),
    "version 1, in a container": ("4:cpu:/docker/123\n", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5, None),
    "version 1 without a limit": ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, float("inf"), None),
    "both": ("4:cpu:/\n0::/x\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "unified/x/cpu.max": "100000 100000"}, 1.0, None),
    "no files": ("0::/gone\n", {}, float("inf"), None),
}  # fmt: skip


@pytest.mark.parametrize(("membership", "files", "quota", "processes"), TREES.values(), ids=TREES)
def test_the_limits_are_the_least_of_the_own_group_and_those_above(
    tmp_path, membership, files, quota, processes
):
    own, mount = tmp_path / "own", tmp_path / "mount"
    own.write_text(membership)
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(f"{text}\n")
    assert read_cpu_quota(own, mount) == quota
    assert read_process_limit(own, mount) == processes


@pytest.mark.parametrize(
    ("membership", "files", "available"),
    [
        ("0::/\n", {"memory.max": "max", "memory.current": "5"}, 8192),
        ("0::/a\n", {"a/memory.max": "5000", "a/memory.current": "4000", "a/memory.stat": "anon 1\ninactive_file 30"}, 1030),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "300"}, 0),
        ("0::/gone\n", {}, 8192),
    ],
)  # fmt: skip
def test_available_memory_is_the_least_of_the_machine_and_the_groups(tmp_path, membership, files, available):
    own, mount, meminfo = tmp_path / "own", tmp_path / "mount", tmp_path / "meminfo"
    own.write_text(membership)
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       8 kB\n")
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(f"{text}\n")
    assert read_available_memory(own, mount, meminfo) == available
    assert read_available_memory(own, tmp_path / "none", tmp_path / "none") is None


def test_at_least_one_cpu_is_counted(monkeypatch):
    monkeypatch.setattr("accel_runtime.environment.cgroup.read_cpu_quota", lambda: 0.5)
    assert count_cpus() == 1
    monkeypatch.setattr("accel_runtime.environment.cgroup.read_cpu_quota", lambda: float("inf"))
    assert count_cpus() == len(os.sched_getaffinity(0))


@pytest.fixture
def cpu_group(tmp_path):
    """A control group of version 1 with a quota; skips the test where this process cannot make one."""
    folder = Path(f"/sys/fs/cgroup/cpu/accel-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text("100000")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    yield folder
    folder.rmdir()


def test_the_quota_of_a_real_group_is_read(cpu_group):
    code = "from accel_runtime.environment.cgroup import read_cpu_quota; print(read_cpu_quota())"
    enter = f'echo $$ > {cpu_group}/cgroup.procs; exec "$@"'
    command = ["sh", "-c", enter, "sh", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1.0\n"
