"""Real file systems that are full, read-only, gone, mounted or limited: a clear message, and the checkpoint before."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from failing_disk import Run

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import FileSystem
from accel_runtime.checkpoint.safetensors_file import TensorPart, write_safetensors

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")


def mounted(kind, options, folder, source="none"):
    command = ["mount", "-t", kind, "-o", options, source, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip(f"{' '.join(command)} cannot be done here: {ran.stderr.strip()}")


@pytest.fixture
def small(tmp_path):
    """A file system in memory of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted("tmpfs", "size=1m", folder)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def failed(run, path=None):
    with pytest.raises(CheckpointError) as raised:
        run.acc.save_state(path)
    return str(raised.value)


@root_only
def test_a_file_system_that_becomes_full_leaves_the_checkpoint_before(small):
    class NoForesight(FileSystem):
        """Says that there is room, as where others write at the same time."""

        def free_space(self, folder):  # noqa: ARG002 - it says the same of all
            return 1 << 60

    run = Run(small, width=80, disk=NoForesight())  # 80 KB or so a checkpoint
    run.put(1)
    run.acc.save_state()
    (small / "filler").write_bytes(bytes(os.statvfs(small).f_bavail * 4096 - 40_000))
    run.put(2)
    said = failed(run)
    assert "No space left on device" in said
    assert ".safetensors" in said
    run.acc.load_state()
    assert run.step() == 1
    assert not list(small.rglob(".*"))
    (small / "filler").unlink()
    run.put(3)
    run.acc.save_state()
    run.acc.load_state()
    assert run.step() == 3


@root_only
def test_where_there_is_no_room_it_is_said_before_anything_is_written(small):
    run = Run(small, width=80)
    run.put(1)
    run.acc.save_state()
    (small / "filler").write_bytes(bytes(os.statvfs(small).f_bavail * 4096 - 40_000))
    said = failed(run)
    place = re.escape(str(small / "checkpoints"))
    assert re.search(
        rf"Not enough space in {place}: the checkpoint needs \d+\.\d kB, and \d\d\.\d kB are free", said
    )
    run.acc.load_state()
    assert run.step() == 1


@root_only
def test_a_file_system_that_is_full_to_the_last_byte_loads(small):
    run = Run(small)
    run.put(1)
    run.acc.save_state()
    (small / "filler").write_bytes(bytes(os.statvfs(small).f_bavail * 4096))
    run.put(2)
    failed(run)
    run.acc.load_state()
    assert run.step() == 1


@root_only
def test_a_read_only_file_system_is_named(small):
    run = Run(small)
    run.put(1)
    run.acc.save_state()
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    run.put(2)
    assert "Read-only file system" in (said := failed(run))
    assert str(small / "checkpoints") in said
    run.acc.load_state()
    assert run.step() == 1
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    run.put(3)
    run.acc.save_state()
    run.acc.load_state()
    assert run.step() == 3


@root_only
def test_a_directory_that_is_bound_read_only_is_named(tmp_path):
    (tmp_path / "bound").mkdir()
    mounted("none", "bind", tmp_path / "bound", str(tmp_path / "bound"))
    try:
        run = Run(tmp_path, automatic=False)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(tmp_path / "bound")], check=True)
        said = failed(run, tmp_path / "bound" / "mine")
        assert "Read-only file system" in said
        assert str(tmp_path / "bound") in said
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "bound")], check=True)


@root_only
def test_a_directory_where_a_file_system_is_mounted_is_refused_with_what_to_do(small):
    run = Run(small, automatic=False)
    run.put(1)
    said = failed(run, small)
    assert f"Use a subdirectory such as {small / 'checkpoint'}" in said
    assert not list(small.parent.glob(".*"))
    run.acc.save_state(small / "checkpoint")
    run.acc.load_state(small / "checkpoint")
    assert run.step() == 1


@root_only
def test_a_directory_that_is_bound_to_another_is_refused_with_what_to_do(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "notes").write_text("of the user")
    mounted("none", "bind", there, str(there))
    try:
        run = Run(tmp_path, automatic=False)
        run.put(1)
        assert f"Use a subdirectory such as {there / 'checkpoint'}" in failed(run, there)
        assert [path.name for path in tmp_path.iterdir()] == ["there"]
        assert (there / "notes").read_text() == "of the user"
    finally:
        subprocess.run(["umount", "-l", str(there)], check=True)


@root_only
def test_a_quota_that_is_used_up_leaves_the_checkpoint_before(tmp_path):
    folder = tmp_path / "limited"
    folder.mkdir()
    mounted("tmpfs", "size=8m,mode=777,usrquota,usrquota_block_hardlimit=160k", folder)
    try:
        for path in (*tmp_path.parents[:3], tmp_path):
            path.chmod(path.stat().st_mode | 0o711)
        # root is not limited: the run is that of another user
        assert in_a_process_of(65534, lambda: quota_used_up(folder)) == 0
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def quota_used_up(folder):
    run = Run(folder, width=60)
    run.put(1)
    run.acc.save_state()
    run.put(2)
    assert "Disk quota exceeded" in failed(run)
    run.acc.load_state()
    assert run.step() == 1


def in_a_process_of(user, act):
    """How a forked process of this user ends."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setuid(user)
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@root_only
def test_a_directory_without_the_right_to_write_is_named(memory):
    def act():
        run = Run(memory / "theirs")
        said = failed(run)
        assert f"{memory / 'theirs' / 'checkpoints'}: Permission denied" in said, said

    memory.chmod(0o755)
    (memory / "theirs").mkdir(mode=0o755)
    assert in_a_process_of(65534, act) == 0


def test_a_directory_that_vanishes_in_the_midst_is_named(memory):
    class Vanishing(FileSystem):
        def create(self, path):
            if path.name == "model.safetensors":
                # In one step: another thread is writing other files into it, and may do so until it is gone.
                path.parent.rename(memory / "gone")
            return super().create(path)

    run = Run(memory, disk=Vanishing())
    run.put(1)
    said = failed(run)
    assert "No such file or directory" in said
    assert "checkpoint_0" in said
    run.acc._file_system = FileSystem()
    run.acc.save_state()
    run.acc.load_state()
    assert run.step() == 1


def test_a_file_in_the_place_of_a_directory_is_named(memory):
    run = Run(memory, automatic=False)
    (memory / "file").write_text("of the user")
    assert f"{memory / 'file'} is a file: a checkpoint is a directory" in failed(run, memory / "file")
    assert f"{memory / 'file'}" in failed(run, memory / "file" / "below")
    assert (memory / "file").read_text() == "of the user"


def test_the_directory_a_process_works_in_is_not_taken_away(memory, monkeypatch):
    monkeypatch.chdir(memory)
    run = Run(memory, automatic=False)
    run.put(1)
    assert f"Use a subdirectory such as {memory / 'checkpoint'}" in failed(run, ".")
    run.acc.save_state("checkpoint")
    run.acc.load_state("checkpoint")
    assert run.step() == 1
    (memory / "checkpoint" / "inner").mkdir()
    monkeypatch.chdir(memory / "checkpoint" / "inner")
    run.put(2)
    run.acc.save_state("..")
    assert Path.cwd() == memory / "checkpoint" / "inner"
    run.acc.load_state("..")
    assert run.step() == 2


def test_a_link_stays_and_what_it_leads_to_is_replaced(memory):
    run = Run(memory, automatic=False)
    (memory / "real").mkdir()
    (memory / "latest").symlink_to("real")
    for step in (1, 2):
        run.put(step)
        assert run.acc.save_state(memory / "latest") == str(memory / "real")
    assert (memory / "latest").is_symlink()
    run.acc.load_state(memory / "latest")
    assert run.step() == 2


def test_hooks_that_make_links_are_told_to_write_files(memory):
    run = Run(memory)
    run.put(1)
    run.acc.register_save_state_pre_hook(lambda *args: (Path(args[2]) / "big").symlink_to("/dev/null"))
    assert "it is a link that a hook has made" in failed(run)
    assert not list(memory.rglob(".*"))


def test_a_large_file_is_sent_to_the_disk_while_it_is_written(tmp_path):
    class Recorder(FileSystem):
        def __init__(self):
            self.written, self.ranges = 0, []

        def write(self, file, data):
            super().write(file, data)
            self.written += len(data)

        def start_writeback(self, file, offset, length):
            super().start_writeback(file, offset, length)
            self.ranges.append((offset, offset + length, self.written))

    disk, tensor = Recorder(), torch.arange(5_000_000, dtype=torch.int32)
    write_safetensors(tmp_path / "large", [TensorPart.from_tensor(n, tensor) for n in "ab"], {}, disk)
    assert [start for start, _, _ in disk.ranges] == [0, *(end for _, end, _ in disk.ranges[:-1])]
    assert all(end == written for _, end, written in disk.ranges)
    assert disk.written - disk.ranges[-1][1] < 1 << 23
