"""The eighteen injuries that other libraries' checkpoints did not survive, each in a test of its own: C1 to C18."""

from __future__ import annotations

import errno
import os
import pickle
import time
from pathlib import Path

import pytest
import torch
from failing_disk import Failing, Log, Probe, Run, same

from accel_runtime import Accelerator
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import FileSystem


class Dying(FileSystem):
    """The process ends, without a chance to clear up, at the first call of a kind about a file of a name."""

    def __init__(self, method, name):
        self._method, self._name = method, name

    def create(self, path):
        opened = super().create(path)
        if self._method == "create" and path.name.startswith(self._name):
            os.write(opened, b"half")
            os._exit(9)
        return opened

    def exchange(self, one, other):
        super().exchange(one, other)
        if self._method == "exchange":
            os._exit(9)

    def remove_tree(self, folder):
        if self._method == "remove_tree" and Path(folder).exists():
            os._exit(9)
        super().remove_tree(folder)


def saved_by_a_process_that_dies(folder, target, disk, step, **project):
    """Save in a fork, in which this disk ends the process."""
    pid = os.fork()
    if not pid:
        try:
            run = Run(folder, disk=disk, **project)
            run.put(step)
            run.acc.save_state(target)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def of_one_step(run, target=None):
    run.put(99)
    run.acc.load_state(target)
    return run.step()


@pytest.mark.parametrize(
    "moment",
    [("create", "optimizer"), ("create", "model"), ("create", "random"), ("create", "checkpoint.json")],
    ids=str,
)
def test_c1_c2_c3_a_save_over_the_same_directory_that_is_killed_leaves_all_of_the_old_one(memory, moment):
    run = Run(memory, automatic=False)
    run.put(1)
    run.acc.save_state(memory / "mine")
    saved_by_a_process_that_dies(memory, memory / "mine", Dying(*moment), 2, automatic=False)
    assert of_one_step(run, memory / "mine") == 1
    run.put(3)
    run.acc.save_state(memory / "mine")
    assert of_one_step(run, memory / "mine") == 3
    assert [path.name for path in memory.iterdir()] == ["mine"]


@pytest.mark.parametrize("method", ["exchange", "remove_tree"])
def test_c1_killed_after_the_exchange_all_of_the_new_one_is_there(memory, method):
    run = Run(memory, automatic=False)
    run.put(1)
    run.acc.save_state(memory / "mine")
    saved_by_a_process_that_dies(memory, memory / "mine", Dying(method, ""), 2, automatic=False)
    assert of_one_step(run, memory / "mine") == 2


@pytest.mark.parametrize(
    "moment", [("create", "model"), ("create", "checkpoint.json"), ("remove_tree", "")], ids=str
)
def test_c4_with_total_limit_1_a_checkpoint_is_there_at_every_moment(memory, moment):
    run = Run(memory, total_limit=1)
    run.put(1)
    run.acc.save_state()
    saved_by_a_process_that_dies(memory, None, Dying(*moment), 2, total_limit=1)
    assert of_one_step(run) in {1, 2}
    run.put(3)
    run.acc.save_state()
    assert of_one_step(run) == 3
    assert len(run.acc.checkpoints.list()) == 1


def test_c5_a_full_disk_leaves_no_partial_checkpoint_and_the_run_can_save_again(memory):
    run = Run(memory, total_limit=3)
    run.put(1)
    run.acc.save_state()
    run.acc._file_system = Failing(15, errno.ENOSPC, forever=True)
    run.put(2)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.acc.save_state()
    assert of_one_step(run) == 1
    run.acc._file_system = FileSystem()
    run.put(3)
    run.acc.save_state()
    assert of_one_step(run) == 3
    assert not [path for path in (memory / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("item", ["model", "optimizer", "scheduler", "random", "registered"])
@pytest.mark.parametrize("way", ["cut", "gone"])
def test_c6_c7_a_part_that_is_cut_or_gone_is_named_and_nothing_changes(memory, item, way):
    run = Run(memory)
    run.put(1)
    path = Path(run.acc.save_state())
    file = path / f"{item}.safetensors"
    if not file.exists():
        file = path / "checkpoint.json"  # what has no tensors is in there
    if way == "cut":
        file.write_bytes(file.read_bytes()[:-2])
    else:
        file.unlink()
    run.put(5)
    before = run.live()
    with pytest.raises(CheckpointError, match=file.name):
        run.acc.load_state(path)
    assert same(run.live(), before)


def two_save(folder):
    run = Run(folder)
    run.put(5)
    run.acc.save_state()


def every_rank_has_the_step(folder):
    run = Run(folder)
    run.put(9)
    before = torch.get_rng_state()
    found = run.acc.load_state()
    weights = {float(value) for tensor in run.tensors() for value in tensor.flatten()}
    changed = not torch.equal(torch.get_rng_state(), before)
    return found.manifest.step, run.optimizer.steps, weights, changed, torch.get_rng_state().sum().item()


def test_c8_what_two_ranks_saved_three_load_with_the_same_step_on_every_rank(clusters, memory):
    clusters[2].run(two_save, memory)
    told = clusters[3].run(every_rank_has_the_step, memory)
    assert [answer[:4] for answer in told] == [(5, 5, {5.0}, True)] * 3
    assert len({random for *_, random in told}) == 3


@pytest.mark.parametrize("item", ["model", "optimizer", "random", "registered"])
def test_c9_one_flipped_bit_is_an_error(memory, item):
    run = Run(memory)
    run.put(1)
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


def test_c10_a_pickle_does_not_run(memory, caplog):
    run = Run(memory)
    run.put(1)
    path = Path(run.acc.save_state())
    (path / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(Payload(str(memory / "executed"))))
    assert of_one_step(run) == 1
    assert not (memory / "executed").exists()
    assert "custom_checkpoint_0.pkl" in caplog.text


def test_c11_c12_a_save_writes_beside_its_target_and_never_through_another_file_system(memory, monkeypatch):
    elsewhere = memory / "tmp"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    run = Run(memory, automatic=False)
    run.put(1)
    run.acc.save_state(memory / "mine")
    saved_by_a_process_that_dies(memory, memory / "mine", Dying("exchange", ""), 2, automatic=False)
    assert not list(elsewhere.iterdir())
    assert of_one_step(run, memory / "mine") == 2


def test_c13_killed_half_way_over_the_same_name_the_old_one_loads(memory):
    run = Run(memory, automatic=False)
    run.put(7)
    run.acc.save_state(memory / "step")
    saved_by_a_process_that_dies(memory, memory / "step", Dying("create", "model"), 8, automatic=False)
    assert of_one_step(run, memory / "step") == 7


def one_rank_does_not_write(folder):
    run = Run(folder, automatic=False)
    run.put(7)
    run.acc.save_state(folder / "step")
    before = (folder / "step" / "checkpoint.json").read_text()
    run.acc.wait_for_everyone()
    run.put(8)
    if run.rank == 1:
        run.acc._file_system = Failing(1, errno.EIO, forever=True)
    try:
        run.acc.save_state(folder / "step")
    except CheckpointError as error:
        said = str(error)
    run.put(99)
    run.acc.load_state(folder / "step")
    return said, run.step(), (folder / "step" / "checkpoint.json").read_text() == before


def test_c14_when_one_of_two_ranks_writes_nothing_no_tensor_is_of_two_steps(pair, memory):
    for said, step, unchanged in pair.run(one_rank_does_not_write, memory):
        assert "Input/output error" in said
        assert step == 7
        assert unchanged


def test_c15_one_flipped_bit_in_a_part_of_a_divided_checkpoint_is_an_error(pair, memory):
    pair.run(two_save, memory)
    (path,) = (memory / "checkpoints").iterdir()
    for file in path.glob("*-of-00002.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    run = Run(memory)
    with pytest.raises(CheckpointError, match="is damaged"):
        run.acc.load_state()


def test_c16_what_two_ranks_saved_one_and_two_load(pair, alone, memory):
    pair.run(two_save, memory)
    for cluster in (pair, alone):
        for step, steps, weights, *_ in cluster.run(every_rank_has_the_step, memory):
            assert (step, steps, weights) == (5, 5, {5.0})


class Slow(Probe):
    """A disk on which writing takes a moment."""

    def before(self, number, path):  # noqa: ARG002 - whatever the call
        time.sleep(0.005)


def test_c17_what_changes_after_an_asynchronous_save_has_returned_is_not_in_it(memory):
    run = Run(memory, disk=Slow())
    run.put(1)
    run.acc.save_state(async_save=True)
    run.put(2)
    run.acc.wait_for_checkpoint()
    assert of_one_step(run) == 1


def test_c18_what_goes_wrong_in_the_background_comes_up_at_the_next_step(memory):
    run = Run(memory, disk=Failing(20, errno.ENOSPC, forever=True))
    run.put(1)
    run.acc.save_state(async_save=True)

    def steps():
        for _ in range(2000):
            run.optimizer.step()
            time.sleep(0.005)

    with pytest.raises(CheckpointError, match="No space left on device"):
        steps()
    run.acc._file_system = FileSystem()
    run.put(2)
    run.acc.save_state()
    assert of_one_step(run) == 2


def test_b5_the_random_state_of_every_rank_comes_back(pair, memory):
    def again(folder):
        run = Run(folder)
        run.put(4)
        torch.rand(run.rank + 3)
        run.acc.save_state()
        wanted = torch.rand(4).tolist()
        torch.manual_seed(1)
        run.acc.load_state()
        return wanted, torch.rand(4).tolist()

    (one, one_again), (two, two_again) = pair.run(again, memory)
    assert one == one_again != two == two_again


def test_an_object_that_cannot_be_saved_is_named_before_anything_is_written(memory):
    acc = Accelerator(cpu=True, project_dir=memory)
    log = Log()
    log.state = {"callback": print}
    acc.register_for_checkpointing(log)
    with pytest.raises(CheckpointError, match="registered/callback cannot be saved"):
        acc.save_state(memory / "mine")
    assert not list(memory.iterdir())
