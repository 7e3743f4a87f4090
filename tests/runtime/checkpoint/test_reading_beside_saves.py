"""Reading a checkpoint beside a save, replacement or removal of it, which happens before each call of the file system."""

from __future__ import annotations

import shutil

import pytest
from support.runs.file_system import Run, act_before_reads

from accel_cli.commands import checkpoint_operations
from accel_runtime.storage import file_store
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.tensor_file import MergeRequest

MAX_CALLS = 400


def ignore_progress(*_):
    pass


class FixedName:
    """A checkpoint of a fixed name that saves replace."""

    def __init__(self, folder):
        self.writer, self.path = Run(folder, automatic=False), folder / "best"
        self.root, self.argument, self.step = self.path, self.path, 0
        self.save()

    def save(self):
        self.step += 1
        assert self.writer.save(self.step, self.path) is None


class Numbered:
    """Numbered checkpoints, of which the newest is kept."""

    def __init__(self, folder):
        self.writer, self.root, self.argument, self.step = Run(folder, total_limit=1), folder, None, 0
        self.save()

    def save(self):
        self.step += 1
        assert self.writer.save(self.step) is None


def load(project, reader, folder):
    reader.set_step(99)
    reader.acc.load_state(project.argument)
    return reader.step()


def resume(project, reader, folder):
    reader.set_step(99)
    policy = reader.acc._checkpoints._resume_policy
    reader.acc._checkpoints._resume_policy = type(policy)(True, policy.origin)
    assert reader.acc.resume().manifest.step == reader.step()
    return reader.step()


def verify(project, reader, folder):
    result = checkpoint_operations.verify_checkpoint(str(project.root), ignore_progress)
    assert result["complete"], result
    return result["step"]


def list_(project, reader, folder):
    entries = checkpoint_operations.list_checkpoints(str(project.root))["checkpoints"]
    assert not any(entry["problem"] for entry in entries), entries
    return entries[-1]["step"]


def show(project, reader, folder):
    result = checkpoint_operations.show_checkpoint(str(project.root), tensors=True)
    assert result["untracked"] == result["skipped"] == []
    return result["step"]


def export(project, reader, folder):
    target = folder / "model.safetensors"
    result = checkpoint_operations.export_checkpoint(
        str(project.root), str(target), MergeRequest(), ignore_progress
    )
    assert result["skipped"] == []
    return result["step"]


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        *((Numbered, read) for read in (load, resume, verify, list_, show, export)),
        (FixedName, load),
        *(pytest.param(FixedName, read, marks=pytest.mark.full) for read in (verify, list_, show, export)),
    ],
)
def test_a_read_beside_a_save_returns_one_complete_checkpoint(kind, read, memory, monkeypatch):
    """How a save replaces the one before it is in the contract of stores."""
    monkeypatch.setenv("ACCEL_LAUNCH", "a")
    project, reader, steps = (
        kind(memory / "project"),
        Run(memory / "project", automatic=kind is Numbered),
        set(),
    )
    for number in range(1, MAX_CALLS):
        old = project.step
        with act_before_reads({number: project.save}) as calls:
            step = read(project, reader, memory)
        assert step in {old, old + 1}, number
        steps.add(step - old)
        if len(calls) < number:
            break
    assert steps == {0, 1}
    assert number > 4


@pytest.mark.parametrize("gap", [1, 2, 3])
def test_a_read_between_the_two_renames_of_a_replacement_finds_the_checkpoint(gap, memory):
    project, target = FixedName(memory), memory / "best"
    project.save()
    copies = [shutil.copytree(target, memory / f"copy_{number}") for number in range(2)]
    save = FileStore().find(str(target)).manifest.save
    for number in range(1, MAX_CALLS):
        shutil.rmtree(target)
        shutil.copytree(copies[0], target)
        shutil.copytree(copies[1], memory / f".best.saving-{save}")
        replaced = memory / f".best.replaced-{save}"

        def replace(replaced=replaced):
            (memory / f".best.saving-{save}").rename(target)
            shutil.rmtree(replaced.rename(memory / ".best.removing"))

        actions = {number: lambda replaced=replaced: target.rename(replaced), number + gap: replace}
        with act_before_reads(actions) as calls, FileStore().open(str(target)) as snapshot:
            assert snapshot.checkpoint.manifest.step == project.step
        if len(calls) < number + gap:
            break
    assert number > 2


def test_a_read_waits_until_the_checkpoint_is_unlocked(memory):
    project = FixedName(memory)
    lock = FileSystem().lock(project.path)
    unlock_after_first_attempt = {6: lambda: FileSystem().unlock(lock)}
    with (
        act_before_reads(unlock_after_first_attempt) as calls,
        FileStore().open(str(project.path)) as snapshot,
    ):
        assert snapshot.checkpoint.manifest.step == 1
        assert not FileStore().delete(str(project.path))
    assert calls.count("try_lock_shared") > 1


def test_a_checkpoint_that_stays_locked_is_an_error_with_a_cure_and_not_read_without_a_lock(
    memory, monkeypatch
):
    project = FixedName(memory)
    monkeypatch.setattr(file_store, "_LOCK_S", 0.1)
    lock = FileSystem().lock(project.path)
    try:
        with pytest.raises(CheckpointError, match=r"another process has locked it .* Wait for that process"):
            FileStore().open(str(project.path))
    finally:
        FileSystem().unlock(lock)


def test_a_save_beside_the_removal_of_a_replaced_checkpoint_succeeds(memory):
    project = FixedName(memory)
    shutil.copytree(project.path, memory / ".best.removing")
    lock = FileSystem().lock(memory / ".best.removing")
    try:
        project.save()
    finally:
        FileSystem().unlock(lock)
    assert FileStore().find(str(project.path)).manifest.step == 2


def test_a_replaced_checkpoint_that_another_save_removes_first_is_no_warning(memory, caplog):
    class Racing(FileSystem):
        """A file system in which another save removes the replaced checkpoint first."""

        def exchange(self, first, second):
            super().exchange(first, second)
            shutil.rmtree(first)

    writer = Run(memory, automatic=False, disk=Racing())
    for step in (1, 2):
        assert writer.save(step, memory / "best") is None
    assert FileStore().find(str(memory / "best")).manifest.step == 2
    assert not caplog.messages


@pytest.mark.slow
def test_all_ranks_read_the_same_save_if_it_is_replaced_between_their_calls(pair, memory):
    def read(folder):
        run = Run(folder, automatic=False)
        for step in (1, 2):
            assert run.save(step, folder / "best") is None
            if step == 1:
                run.acc.wait_for_everyone()
                if run.rank == 0:
                    shutil.copytree(folder / "best", folder / "other")
                run.acc.wait_for_everyone()
        steps = []
        for number in range(1, 40, 3):
            run.set_step(99)
            exchange = {number: lambda: FileSystem().exchange(folder / "best", folder / "other")}
            with act_before_reads(exchange if run.rank == number % 2 else {}):
                run.acc.load_state(folder / "best")
            steps.append(run.step())
        return steps

    first, second = pair.run(read, memory)
    assert first == second
    assert set(first) == {1, 2}
