"""Several processes at one place: two saves, a reader and a pruner, several runs in one project."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from failing_disk import Run

from accel_runtime.checkpoint import directory, load
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import FileSystem
from accel_runtime.checkpoint.manifest import UNFINISHED


def test_two_saves_to_one_directory_at_once_leave_one_that_is_whole(memory):
    errors = saves_at_once(memory, FileSystem)
    assert all("is being written by another process" in error for error in errors), errors
    run = Run(memory, automatic=False)
    run.put(99)
    assert run.acc.load_state(memory / "mine").manifest.step == run.step()
    assert [path.name for path in memory.iterdir()] == ["mine"]


def saves_at_once(memory, disk):
    """Two processes save into one directory again and again; what went wrong, but for what loses a race."""
    told = at_once(lambda number: saving_again_and_again(memory, disk(), number))
    # One takes the other's for what a crash has left, in the moment before it is locked.
    lost = "No such file or directory", "This node does not see"
    return [line for line in told.splitlines() if line and not any(words in line for words in lost)]


def at_once(function):
    """Call a function with 0 and 1 in two processes; return the text that both return."""
    pids, ends = [], []
    for number in range(2):
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            said = ""
            try:
                said = function(number)
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
    return told


def saving_again_and_again(memory, disk, number):
    run, said = Run(memory, automatic=False, disk=disk), ""
    for turn in range(25):
        run.put(100 * (1 + number) + turn)
        try:
            run.acc.save_state(memory / "mine")
        except CheckpointError as error:
            said += f"{error}\n"
    return said


def test_a_number_that_another_run_takes_in_the_same_moment_is_passed_over(memory):
    project = memory / "checkpoints"

    class Raced(FileSystem):
        """Another run begins a save between the choice of a number and the first directory."""

        other = None

        def make(self, folder):
            if folder.name.startswith(".checkpoint_0.") and self.other is None:
                self.other = directory.create_scratch(project / "checkpoint_0", "abc", FileSystem())[0]
            super().make(folder)

    disk = Raced()
    run = Run(memory, disk=disk)
    run.put(1)
    assert Path(run.acc.save_state()).name == "checkpoint_1"
    assert sorted(path.name for path in project.iterdir()) == [disk.other.name, "checkpoint_1"]
    with pytest.raises(directory.TargetExistsError):
        directory.create_scratch(project / "checkpoint_1", "def", FileSystem(), new=True)


def test_a_directory_that_another_run_removes_before_it_is_locked_is_made_again(memory):
    class Watched(FileSystem):
        """Before the first lock of a save, another run puts everything in order."""

        swept = False

        def lock(self, folder, **how):
            if not self.swept:
                self.swept = True
                directory.remove_leftovers(folder.parent, 9, FileSystem())
                assert not folder.exists()
            return super().lock(folder, **how)

    disk = Watched()
    scratch, _ = directory.create_scratch(memory / "checkpoint_0", "abc", disk, new=True)
    assert (scratch / UNFINISHED).exists()


def test_runs_that_save_at_once_lose_no_save_and_prune_in_silence(memory, caplog):
    def save(number):
        run, told = Run(memory, total_limit=3), ""
        for turn in range(15):
            run.put(100 * (1 + number) + turn)
            try:
                told += f"{run.acc.save_state()}\n"
            except CheckpointError as error:
                told += f"{error}\n"
        return told + caplog.text

    said = at_once(save).splitlines()
    assert all(re.fullmatch(r"\S*checkpoint_\d+", line) for line in said), said
    assert len(set(said)) == len(said) == 30  # each save had a number of its own
    assert Run(memory).acc.checkpoints.list()[-1].number >= 29  # a number that both tried may stay free


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
        assert written.wait(120)

    reader.acc.register_load_state_pre_hook(hook)
    loading = threading.Thread(target=reader.acc.load_state)
    loading.start()
    assert inside.wait(120)
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

    def gone(found, chunks, was=load.find_damage):
        shutil.rmtree(path)
        return was(found, chunks)

    monkeypatch.setattr(load, "find_damage", gone)
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        run.acc.load_state()
    assert run.step() == 5


def test_a_file_that_fails_after_all_was_verified_says_what_the_state_is_now(memory, monkeypatch):
    run = Run(memory)
    run.put(1)
    path = Path(run.acc.save_state())
    run.put(5)

    def gone(found, chunks, was=load.find_damage):
        wrong = was(found, chunks)
        (path / "optimizer.safetensors").unlink()
        return wrong

    monkeypatch.setattr(load, "find_damage", gone)
    with pytest.raises(CheckpointError, match="training state is now inconsistent") as raised:
        run.acc.load_state()
    assert "optimizer.safetensors" in str(raised.value)
