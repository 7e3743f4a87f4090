"""Objects of the kernel that test_faults.py cannot imitate: mounts, quotas, users, links, and directories that disappear."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from support.processes.children import fork, wait_for_exit
from support.runs.file_system import Fault, FaultyFileSystem, Run

from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.tensor_file import TensorPart, write_safetensors


def mount(kind, options, folder, source="none"):
    command = ["mount", "-t", kind, "-o", options, source, str(folder)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        pytest.skip(f"{' '.join(command)} cannot be done here: {completed.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    """Return the path of a tmpfs of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount("tmpfs", "size=1m", folder)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.service("root")
def test_a_full_disk_keeps_the_previous_checkpoint(small_disk):
    run = Run(small_disk, width=80)  # about 80 kB per checkpoint
    assert run.save(1) is None
    (small_disk / "filler").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - 40_000))
    directory = re.escape(str(small_disk / "checkpoints"))
    assert re.fullmatch(
        rf"Not enough space in {directory}: the checkpoint needs \d+\.\d kB, and \d\d\.\d kB are free\. Free space, .*",
        run.save(2),
    )
    # As if another process wrote in the meantime.
    message = run.save(2, disk=FaultyFileSystem(Fault(free_bytes=1 << 60)))
    assert re.search(r"\.safetensors: No space left on device\. Free space, ", message)
    assert not list(small_disk.rglob(".*"))
    (small_disk / "more").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    assert run.load() == 1
    (small_disk / "filler").unlink()
    assert run.save(3) is None
    assert run.load() == 3


@pytest.mark.service("root")
def test_a_save_names_a_read_only_file_system(small_disk):
    run = Run(small_disk)
    assert run.save(1) is None
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    message = run.save(2)
    assert "Read-only file system" in message
    assert str(small_disk / "checkpoints") in message
    assert run.load() == 1
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert run.save(3) is None
    assert run.load() == 3


@pytest.mark.service("root")
def test_a_mount_point_is_rejected_as_a_target_with_a_suggestion(small_disk):
    run = Run(small_disk, automatic=False)
    message = run.save(1, small_disk)
    assert f"Use a subdirectory such as {small_disk / 'checkpoint'}" in message
    assert not list(small_disk.parent.glob(".*"))
    assert run.save(1, small_disk / "checkpoint") is None
    assert run.load(small_disk / "checkpoint") == 1


@pytest.mark.service("root")
def test_a_bind_mount_is_rejected_as_a_target_with_a_suggestion(tmp_path):
    target = tmp_path / "there"
    target.mkdir()
    (target / "notes").write_text("of the user")
    mount("none", "bind", target, str(target))
    try:
        run = Run(tmp_path, automatic=False)
        assert f"Use a subdirectory such as {target / 'checkpoint'}" in run.save(2, target)
        assert [path.name for path in tmp_path.iterdir()] == ["there"]
        assert (target / "notes").read_text() == "of the user"
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


@pytest.mark.service("root")
def test_an_exceeded_quota_keeps_the_previous_checkpoint(tmp_path):
    folder = tmp_path / "limited"
    folder.mkdir()
    mount("tmpfs", "size=8m,mode=777,usrquota,usrquota_block_hardlimit=160k", folder)
    try:
        for path in (*tmp_path.parents[:3], tmp_path):
            path.chmod(path.stat().st_mode | 0o711)
        # quotas do not limit root: run as another user
        assert run_as_user(65534, lambda: exceed_quota(folder)) == 0
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def exceed_quota(folder):
    run = Run(folder, width=60)
    assert run.save(1) is None
    assert "Disk quota exceeded" in run.save(2)
    assert run.load() == 1


def run_as_user(user, function):
    """Return the exit code of a forked process of this user."""

    def run():
        os.setuid(user)
        function()

    return wait_for_exit(fork(run))


@pytest.mark.service("root")
def test_a_directory_without_write_permission_is_named(memory):
    def save():
        run = Run(memory / "theirs")
        message = run.save(1)
        assert f"{memory / 'theirs' / 'checkpoints'}: Permission denied" in message, message

    memory.chmod(0o755)
    (memory / "theirs").mkdir(mode=0o755)
    assert run_as_user(65534, save) == 0


def test_a_directory_that_is_removed_during_a_save_is_named(memory):
    class VanishingFileSystem(FileSystem):
        def create(self, path):
            if path.name == "model.safetensors":
                # An atomic rename, since another thread writes other files into the directory.
                path.parent.rename(memory / "gone")
            return super().create(path)

    run = Run(memory, disk=VanishingFileSystem())
    message = run.save(1)
    assert "No such file or directory" in message
    assert "checkpoint_0" in message
    assert run.save(1, disk=FileSystem()) is None
    assert run.load() == 1


def test_a_file_in_place_of_a_directory_is_named(memory):
    run = Run(memory, automatic=False)
    (memory / "file").write_text("of the user")
    assert f"{memory / 'file'} is a file: a checkpoint is a directory" in run.save(2, memory / "file")
    assert f"{memory / 'file'}" in run.save(2, memory / "file" / "below")
    assert (memory / "file").read_text() == "of the user"


def test_the_current_directory_is_rejected_as_a_target(memory, monkeypatch):
    monkeypatch.chdir(memory)
    run = Run(memory, automatic=False)
    assert f"Use a subdirectory such as {memory / 'checkpoint'}" in run.save(1, ".")
    assert run.save(1, "checkpoint") is None
    assert run.load("checkpoint") == 1
    (memory / "checkpoint" / "inner").mkdir()
    monkeypatch.chdir(memory / "checkpoint" / "inner")
    assert run.save(2, "..") is None
    assert Path.cwd() == memory / "checkpoint" / "inner"
    assert run.load("..") == 2


def test_a_save_to_a_symlink_replaces_the_target_of_the_link(memory):
    run = Run(memory, automatic=False)
    (memory / "real").mkdir()
    (memory / "latest").symlink_to("real")
    for step in (1, 2):
        run.set_step(step)
        assert run.acc.save_state(memory / "latest") == str(memory / "real")
    assert (memory / "latest").is_symlink()
    assert run.load(memory / "latest") == 2


def test_a_write_continues_after_a_short_one(memory, monkeypatch):
    was = os.write
    monkeypatch.setattr(os, "write", lambda file, data: was(file, data[:1000]))
    run = Run(memory, width=20)
    assert run.save(1) is None
    monkeypatch.undo()
    assert run.load() == 1


def test_writeback_of_a_large_file_starts_while_it_is_written(tmp_path):
    class WritebackRecorder(FileSystem):
        def __init__(self):
            self.written, self.ranges = 0, []

        def write(self, file, data):
            super().write(file, data)
            self.written += len(data)

        def start_writeback(self, file, offset, length):
            super().start_writeback(file, offset, length)
            self.ranges.append((offset, offset + length, self.written))

    disk, tensor = WritebackRecorder(), torch.arange(5_000_000, dtype=torch.int32)
    write_safetensors(
        partial(disk.put, tmp_path / "large"), [TensorPart.from_tensor(n, tensor) for n in "ab"], {}
    )
    assert [start for start, _, _ in disk.ranges] == [0, *(end for _, end, _ in disk.ranges[:-1])]
    assert all(end == written for _, end, written in disk.ranges)
    assert disk.written - disk.ranges[-1][1] < 1 << 23
