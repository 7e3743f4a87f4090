"""Concurrent processes in one directory: two saves, loading during pruning, several runs in one project."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from support.processes import fork, wait_for_exit
from support.runs.file_system import Run
from support.waits import limit

from accel_runtime.checkpoint import load
from accel_runtime.storage import directory
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import UNFINISHED
from accel_runtime.storage.store import KeyExistsError


def test_two_concurrent_saves_to_one_directory_leave_a_complete_checkpoint(memory, tmp_path):
    messages = call_in_two_processes(lambda number: save_repeatedly(memory, number), tmp_path)
    # Before it is locked, a scratch directory of the other process looks like a leftover of a crash.
    race_errors = "No such file or directory", "This node does not see"
    errors = [
        line for line in messages.splitlines() if line and not any(words in line for words in race_errors)
    ]
    assert all("is being written by another process" in error for error in errors), errors
    run = Run(memory, automatic=False)
    run.set_step(99)
    assert run.acc.load_state(memory / "mine").manifest.step == run.step()
    assert [path.name for path in memory.iterdir()] == ["mine"]


def call_in_two_processes(function, folder):
    """Call a function with 0 and 1 in two processes; return both results, joined."""

    def write_result(number):
        (folder / str(number)).write_text(function(number))

    pids = [fork(write_result, number) for number in range(2)]
    assert [wait_for_exit(pid) for pid in pids] == [0, 0]
    return "".join((folder / str(number)).read_text() for number in range(2))


def save_repeatedly(memory, number):
    run = Run(memory, automatic=False)
    errors = [run.save(100 * (1 + number) + iteration, memory / "mine") for iteration in range(12)]
    return "".join(f"{error}\n" for error in errors if error)


def test_a_save_skips_a_number_that_another_run_takes_concurrently(memory):
    project = memory / "checkpoints"

    class RacingFileSystem(FileSystem):
        """A file system in which another run starts a save after the number is chosen."""

        other = None

        def make(self, folder):
            if folder.name.startswith(".checkpoint_0.") and self.other is None:
                self.other = directory.create_scratch(project / "checkpoint_0", "abc", FileSystem())[0]
            super().make(folder)

    disk = RacingFileSystem()
    run = Run(memory, disk=disk)
    run.set_step(1)
    assert Path(run.acc.save_state()).name == "checkpoint_1"
    assert sorted(path.name for path in project.iterdir()) == [disk.other.name, "checkpoint_1"]
    with pytest.raises(KeyExistsError):
        directory.create_scratch(project / "checkpoint_1", "def", FileSystem(), new=True)


def test_a_scratch_directory_is_created_again_if_another_run_removes_it_before_the_lock(memory):
    class CleaningFileSystem(FileSystem):
        """A file system in which another run removes leftovers before the first lock."""

        swept = False

        def lock(self, folder, **options):
            if not self.swept:
                self.swept = True
                directory.remove_leftovers(folder.parent, 9, FileSystem())
                assert not folder.exists()
            return super().lock(folder, **options)

    disk = CleaningFileSystem()
    scratch, _ = directory.create_scratch(memory / "checkpoint_0", "abc", disk, new=True)
    assert (scratch / UNFINISHED).exists()


def test_concurrent_runs_lose_no_save_and_prune_without_warnings(memory, caplog, tmp_path):
    def save(number):
        run, messages = Run(memory, total_limit=3), ""
        for iteration in range(8):
            run.set_step(100 * (1 + number) + iteration)
            try:
                messages += f"{run.acc.save_state()}\n"
            except CheckpointError as error:
                messages += f"{error}\n"
        return messages + caplog.text

    lines = call_in_two_processes(save, tmp_path).splitlines()
    assert all(re.fullmatch(r"\S*checkpoint_\d+", line) for line in lines), lines
    assert len(set(lines)) == len(lines) == 16  # each save has its own number
    assert (
        Run(memory).acc.checkpoints.list()[-1].number >= 15
    )  # a number that both runs tried may remain unused


def test_several_runs_in_one_directory_share_the_numbering(memory):
    first, second = Run(memory), Run(memory)
    for step, run in enumerate([first, second, second, first], 1):
        run.set_step(step)
        run.acc.save_state()
    assert [checkpoint.manifest.step for checkpoint in first.acc.checkpoints.list()] == [1, 2, 3, 4]
    assert [checkpoint.number for checkpoint in first.acc.checkpoints.list()] == [0, 1, 2, 3]


def test_pruning_keeps_a_checkpoint_while_it_is_loaded(memory):
    reader, writer = Run(memory), Run(memory, total_limit=1)
    writer.set_step(1)
    writer.acc.save_state()
    writer.set_step(2)
    inside, written = threading.Event(), threading.Event()

    def hook(models, path):
        inside.set()
        assert written.wait(limit(120))

    reader.acc.register_load_state_pre_hook(hook)
    loading = threading.Thread(target=reader.acc.load_state)
    loading.start()
    assert inside.wait(limit(120))
    writer.acc.save_state()
    assert len(writer.acc.checkpoints.list()) == 2
    written.set()
    loading.join()
    assert reader.log.state["step"] == 1
    writer.acc.save_state()
    assert len(writer.acc.checkpoints.list()) == 1


def test_removal_of_the_only_checkpoint_during_a_load_raises_a_clear_error(memory, monkeypatch):
    run = Run(memory)
    run.set_step(1)
    path = Path(run.acc.save_state())
    run.set_step(5)

    def remove_then_verify(snapshot, chunks, was=load.find_damage):
        shutil.rmtree(path)
        return was(snapshot, chunks)

    monkeypatch.setattr(load, "find_damage", remove_then_verify)
    with pytest.raises(CheckpointError, match="No complete checkpoint in"):
        run.acc.load_state()
    assert run.step() == 5


def test_a_read_error_after_verification_reports_an_inconsistent_state(memory, monkeypatch):
    run = Run(memory)
    run.set_step(1)
    path = Path(run.acc.save_state())
    run.set_step(5)

    def verify_then_truncate(snapshot, chunks, was=load.find_damage):
        damage = was(snapshot, chunks)
        os.truncate(path / "optimizer.safetensors", 100)
        return damage

    monkeypatch.setattr(load, "find_damage", verify_then_truncate)
    with pytest.raises(CheckpointError, match="training state is now inconsistent") as raised:
        run.acc.load_state()
    assert "optimizer.safetensors" in str(raised.value)
