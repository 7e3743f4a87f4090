"""Regression tests of 18 defects that damage checkpoints of other libraries: C1 to C18."""

from __future__ import annotations

import errno
import os
import pickle
import time
from pathlib import Path

import pytest
import torch
from support.file_system import FailingFileSystem, RecordingFileSystem, RegisteredState, Run, is_same_state
from support.processes import fork, wait_for_exit

from accel_runtime import Accelerator
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import FileSystem


class ExitingFileSystem(FileSystem):
    """A file system that exits the process without cleanup at the first call of a method for a given file."""

    def __init__(self, method, name):
        self._method, self._name = method, name

    def create(self, path):
        opened = super().create(path)
        if self._method == "create" and path.name.startswith(self._name):
            os.write(opened, b"half")
            os._exit(9)
        return opened

    def exchange(self, old, new):
        super().exchange(old, new)
        if self._method == "exchange":
            os._exit(9)

    def remove_tree(self, folder):
        if self._method == "remove_tree" and Path(folder).exists():
            os._exit(9)
        super().remove_tree(folder)


def save_in_process_that_exits(folder, target, disk, step, **project):
    """Save in a forked process that the file system ends."""

    def save():
        run = Run(folder, disk=disk, **project)
        run.set_step(step)
        run.acc.save_state(target)

    assert wait_for_exit(fork(save)) == 9


def load_step(run, target=None):
    run.set_step(99)
    run.acc.load_state(target)
    return run.step()


@pytest.mark.parametrize(
    "moment",
    [("create", "optimizer"), ("create", "model"), ("create", "random"), ("create", "checkpoint.json")],
    ids=str,
)
def test_c1_c2_c3_a_save_killed_during_an_overwrite_keeps_the_complete_old_checkpoint(memory, moment):
    run = Run(memory, automatic=False)
    run.set_step(1)
    run.acc.save_state(memory / "mine")
    save_in_process_that_exits(memory, memory / "mine", ExitingFileSystem(*moment), 2, automatic=False)
    assert load_step(run, memory / "mine") == 1
    run.set_step(3)
    run.acc.save_state(memory / "mine")
    assert load_step(run, memory / "mine") == 3
    assert [path.name for path in memory.iterdir()] == ["mine"]


@pytest.mark.parametrize("method", ["exchange", "remove_tree"])
def test_c1_a_save_killed_after_the_exchange_leaves_the_complete_new_checkpoint(memory, method):
    run = Run(memory, automatic=False)
    run.set_step(1)
    run.acc.save_state(memory / "mine")
    save_in_process_that_exits(memory, memory / "mine", ExitingFileSystem(method, ""), 2, automatic=False)
    assert load_step(run, memory / "mine") == 2


@pytest.mark.parametrize(
    "moment", [("create", "model"), ("create", "checkpoint.json"), ("remove_tree", "")], ids=str
)
def test_c4_total_limit_1_always_leaves_a_complete_checkpoint(memory, moment):
    run = Run(memory, total_limit=1)
    run.set_step(1)
    run.acc.save_state()
    save_in_process_that_exits(memory, None, ExitingFileSystem(*moment), 2, total_limit=1)
    assert load_step(run) in {1, 2}
    run.set_step(3)
    run.acc.save_state()
    assert load_step(run) == 3
    assert len(run.acc.checkpoints.list()) == 1


def test_c5_a_full_disk_leaves_no_partial_checkpoint_and_the_run_can_save_again(memory):
    run = Run(memory, total_limit=3)
    run.set_step(1)
    run.acc.save_state()
    run.acc._file_system = FailingFileSystem(15, errno.ENOSPC, forever=True)
    run.set_step(2)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.acc.save_state()
    assert load_step(run) == 1
    run.acc._file_system = FileSystem()
    run.set_step(3)
    run.acc.save_state()
    assert load_step(run) == 3
    assert not [path for path in (memory / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("item", ["model", "optimizer", "scheduler", "random", "registered"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_c6_c7_a_truncated_or_missing_file_is_named_and_nothing_changes(memory, item, damage):
    run = Run(memory)
    run.set_step(1)
    path = Path(run.acc.save_state())
    file = path / f"{item}.safetensors"
    if not file.exists():
        file = path / "checkpoint.json"  # items without tensors are stored in the manifest
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-2])
    else:
        file.unlink()
    run.set_step(5)
    before = run.copy_state()
    with pytest.raises(CheckpointError, match=file.name):
        run.acc.load_state(path)
    assert is_same_state(run.copy_state(), before)


def save_step_five(folder):
    run = Run(folder)
    run.set_step(5)
    run.acc.save_state()


def load_and_report(folder):
    run = Run(folder)
    run.set_step(9)
    before = torch.get_rng_state()
    checkpoint = run.acc.load_state()
    weights = {float(value) for tensor in run.tensors() for value in tensor.flatten()}
    changed = not torch.equal(torch.get_rng_state(), before)
    return checkpoint.manifest.step, run.optimizer.steps, weights, changed, torch.get_rng_state().sum().item()


def test_c8_a_checkpoint_of_two_ranks_loads_on_three_with_the_same_step(clusters, memory):
    clusters[2].run(save_step_five, memory)
    results = clusters[3].run(load_and_report, memory)
    assert [answer[:4] for answer in results] == [(5, 5, {5.0}, True)] * 3
    assert len({random for *_, random in results}) == 3


@pytest.mark.parametrize("item", ["model", "optimizer", "random", "registered"])
def test_c9_a_flipped_bit_is_an_error(memory, item):
    run = Run(memory)
    run.set_step(1)
    path = Path(run.acc.save_state())
    file = path / f"{item}.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{item}.safetensors is damaged: {item}/"):
        run.acc.load_state(path)


class Payload:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def test_c10_a_pickle_in_a_checkpoint_is_not_executed(memory, caplog):
    run = Run(memory)
    run.set_step(1)
    path = Path(run.acc.save_state())
    (path / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(Payload(str(memory / "executed"))))
    assert load_step(run) == 1
    assert not (memory / "executed").exists()
    assert "custom_checkpoint_0.pkl" in caplog.text


def test_c11_c12_a_save_writes_next_to_its_target_and_not_to_tmpdir(memory, monkeypatch):
    elsewhere = memory / "tmp"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    run = Run(memory, automatic=False)
    run.set_step(1)
    run.acc.save_state(memory / "mine")
    save_in_process_that_exits(memory, memory / "mine", ExitingFileSystem("exchange", ""), 2, automatic=False)
    assert not list(elsewhere.iterdir())
    assert load_step(run, memory / "mine") == 2


def test_c13_the_old_checkpoint_loads_after_a_save_killed_during_an_overwrite(memory):
    run = Run(memory, automatic=False)
    run.set_step(7)
    run.acc.save_state(memory / "step")
    save_in_process_that_exits(
        memory, memory / "step", ExitingFileSystem("create", "model"), 8, automatic=False
    )
    assert load_step(run, memory / "step") == 7


def save_with_failing_rank(folder):
    run = Run(folder, automatic=False)
    run.set_step(7)
    run.acc.save_state(folder / "step")
    before = (folder / "step" / "checkpoint.json").read_text()
    run.acc.wait_for_everyone()
    run.set_step(8)
    if run.rank == 1:
        run.acc._file_system = FailingFileSystem(1, errno.EIO, forever=True)
    try:
        run.acc.save_state(folder / "step")
    except CheckpointError as error:
        message = str(error)
    run.set_step(99)
    run.acc.load_state(folder / "step")
    return message, run.step(), (folder / "step" / "checkpoint.json").read_text() == before


def test_c14_a_write_error_on_one_of_two_ranks_keeps_all_tensors_of_one_step(pair, memory):
    for message, step, unchanged in pair.run(save_with_failing_rank, memory):
        assert "Input/output error" in message
        assert step == 7
        assert unchanged


def test_c15_a_flipped_bit_in_a_shard_is_an_error(pair, memory):
    pair.run(save_step_five, memory)
    (path,) = (memory / "checkpoints").iterdir()
    for file in path.glob("*-of-00002.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    run = Run(memory)
    with pytest.raises(CheckpointError, match="is damaged"):
        run.acc.load_state()


def test_c16_a_checkpoint_of_two_ranks_loads_on_one_and_on_two(pair, alone, memory):
    pair.run(save_step_five, memory)
    for cluster in (pair, alone):
        for step, steps, weights, *_ in cluster.run(load_and_report, memory):
            assert (step, steps, weights) == (5, 5, {5.0})


class SlowFileSystem(RecordingFileSystem):
    """A file system with slow calls."""

    def before_call(self, number, path):  # noqa: ARG002 - whatever the call
        time.sleep(0.005)


def test_c17_changes_after_an_asynchronous_save_has_returned_are_not_saved(memory):
    run = Run(memory, disk=SlowFileSystem())
    run.set_step(1)
    run.acc.save_state(async_save=True)
    run.set_step(2)
    run.acc.wait_for_checkpoint()
    assert load_step(run) == 1


def test_c18_a_later_optimizer_step_raises_the_error_of_an_asynchronous_save(memory):
    run = Run(memory, disk=FailingFileSystem(20, errno.ENOSPC, forever=True))
    run.set_step(1)
    run.acc.save_state(async_save=True)

    def steps():
        for _ in range(2000):
            run.optimizer.step()
            time.sleep(0.005)

    with pytest.raises(CheckpointError, match="No space left on device"):
        steps()
    run.acc._file_system = FileSystem()
    run.set_step(2)
    run.acc.save_state()
    assert load_step(run) == 2


def test_b5_the_random_state_of_every_rank_is_restored(pair, memory):
    def draw_after_load(folder):
        run = Run(folder)
        run.set_step(4)
        torch.rand(run.rank + 3)
        run.acc.save_state()
        expected = torch.rand(4).tolist()
        torch.manual_seed(1)
        run.acc.load_state()
        return expected, torch.rand(4).tolist()

    (first, first_restored), (second, second_restored) = pair.run(draw_after_load, memory)
    assert first == first_restored != second == second_restored


def test_an_object_that_cannot_be_saved_is_named_before_anything_is_written(memory):
    acc = Accelerator(cpu=True, project_dir=memory)
    log = RegisteredState()
    log.state = {"callback": print}
    acc.register_for_checkpointing(log)
    with pytest.raises(CheckpointError, match="registered/callback cannot be saved"):
        acc.save_state(memory / "mine")
    assert not list(memory.iterdir())
