"""Real file systems that are full, read-only, gone, mounted or limited: a clear message, and the checkpoint before."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from faults import Run

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.files import Disk

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
    class NoForesight(Disk):
        """Says that there is room, as where others write at the same time."""

        def room(self, folder):
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
    assert f"{small / 'checkpoints'} has room for 0.04 MB, and this checkpoint takes 0." in said
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
    assert f"save into one in it, as {small / 'checkpoint'}" in said
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
        assert f"save into one in it, as {there / 'checkpoint'}" in failed(run, there)
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
        for path in (*tmp_path.parents[:2], tmp_path):
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
    class Vanishing(Disk):
        def create(self, path):
            if path.name == "model.safetensors":
                shutil.rmtree(path.parent)
            return super().create(path)

    run = Run(memory, disk=Vanishing())
    run.put(1)
    said = failed(run)
    assert "No such file or directory" in said
    assert "checkpoint_0" in said
    run.acc._disk = Disk()
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
    assert f"save into one in it, as {memory / 'checkpoint'}" in failed(run, ".")
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
    run.acc.register_save_state_pre_hook(
        lambda models, weights, out: (Path(out) / "big").symlink_to("/dev/null")
    )
    assert "is a link that a hook has made" in failed(run)
    assert not list(memory.rglob(".*"))


def test_two_saves_to_one_directory_at_once_leave_one_that_is_whole(memory):
    errors = saves_at_once(memory, Disk)
    assert all("is being written by another process" in error for error in errors), errors
    run = Run(memory, automatic=False)
    run.put(99)
    assert run.acc.load_state(memory / "mine").manifest.step == run.step()
    assert [path.name for path in memory.iterdir()] == ["mine"]


def saves_at_once(memory, disk):
    """Two processes save into one directory again and again; what went wrong, but for what loses a race."""
    pids, ends = [], []
    for number in range(2):
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            said = ""
            try:
                said = saving_again_and_again(memory, disk(), number)
            finally:
                os.write(theirs, said.encode() + b"\nend")
                os._exit(0)
        os.close(theirs)
        pids.append(pid)
        ends.append(ours)
    told = ""
    for pid, end in zip(pids, ends, strict=True):
        with os.fdopen(end) as answers:
            text = answers.read()
        os.waitpid(pid, 0)
        assert text.endswith("\nend"), text
        told += text.removesuffix("\nend")
    return [line for line in told.splitlines() if line and "No such file or directory" not in line]


def saving_again_and_again(memory, disk, number):
    run, said = Run(memory, automatic=False, disk=disk), ""
    for turn in range(25):
        run.put(100 * (1 + number) + turn)
        try:
            run.acc.save_state(memory / "mine")
        except CheckpointError as error:
            said += f"{error}\n"
        except BaseException as error:
            return f"{said}{error!r}"
    return said


def test_several_runs_in_one_directory_number_on(memory):
    one, other = Run(memory), Run(memory)
    for step, run in enumerate([one, other, other, one], 1):
        run.put(step)
        run.acc.save_state()
    assert [found.manifest.step for found in one.acc.checkpoints.list()] == [1, 2, 3, 4]
    assert [found.number for found in one.acc.checkpoints.list()] == [0, 1, 2, 3]


def test_a_checkpoint_that_is_being_loaded_is_not_pruned_before_the_next_save(memory):
    reader, writer = Run(memory), Run(memory, total_limit=1)
    writer.put(1)
    writer.acc.save_state()
    writer.put(2)
    inside, written = threading.Event(), threading.Event()

    def hook(models, path):
        inside.set()
        assert written.wait(20)

    reader.acc.register_load_state_pre_hook(hook)
    loading = threading.Thread(target=reader.acc.load_state)
    loading.start()
    assert inside.wait(20)
    writer.acc.save_state()
    assert len(writer.acc.checkpoints.list()) == 2
    written.set()
    loading.join()
    assert reader.log.state["step"] == 1
    writer.acc.save_state()
    assert len(writer.acc.checkpoints.list()) == 1


def test_a_checkpoint_that_is_removed_while_it_is_loaded_is_a_clear_error(memory, monkeypatch):
    run = Run(memory)
    run.put(1)
    path = Path(run.acc.save_state())
    run.put(5)
    from accel_runtime.checkpoint import loading

    def gone(found, chunks, was=loading.damage):
        shutil.rmtree(path)
        return was(found, chunks)

    monkeypatch.setattr(loading, "damage", gone)
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        run.acc.load_state()
    assert run.step() == 5


def test_a_file_that_fails_after_all_was_verified_says_what_the_state_is_now(memory, monkeypatch):
    run = Run(memory)
    run.put(1)
    path = Path(run.acc.save_state())
    run.put(5)
    from accel_runtime.checkpoint import loading

    def gone(found, chunks, was=loading.damage):
        wrong = was(found, chunks)
        (path / "optimizer.safetensors").unlink()
        return wrong

    monkeypatch.setattr(loading, "damage", gone)
    with pytest.raises(CheckpointError, match="neither what it had nor all of") as raised:
        run.acc.load_state()
    assert "optimizer.safetensors" in str(raised.value)
