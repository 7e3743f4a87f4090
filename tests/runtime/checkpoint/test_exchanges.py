"""The exchanges of a save between ranks: their number and size, and an error of any rank at any of them."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch
from support.training.exchanges import record_exchanges
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.checkpoint.background import StagingBuffers
from accel_runtime.collectives.handshake import PAYLOAD
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.utils import set_seed


class RegisteredState:
    """A registered object of the script."""

    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def build_run(disk=None):
    """Return a run whose state is equal on all ranks."""
    accelerator = Accelerator()
    if disk is not None:
        accelerator._checkpoints._store = FileStore(disk)
    set_seed(1)
    model = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    registered = RegisteredState()
    accelerator.register_for_checkpointing(registered)
    accelerator.backward(model(torch.ones(4, 300)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, registered


# What makes a state differ between ranks, or adds an exchange. -----------------------------------


def add_hook(accelerator, _model, _registered):
    accelerator.register_save_state_pre_hook(lambda _models, _weights, folder: write_note(folder))


def write_note(folder):
    (Path(folder) / f"note-{os.environ['RANK']}.txt").write_text("kept")


def add_hook_on_one_rank(accelerator, *run):
    if accelerator.process_index == 1:
        add_hook(accelerator, *run)


def set_tensors(accelerator, model, _registered):
    torch.manual_seed(accelerator.process_index)
    accelerator.unwrap_model(model)[1].running_mean.fill_(accelerator.process_index)


def set_values(accelerator, _model, registered):
    registered.value = accelerator.process_index


CHANGES = {
    "nothing": (),
    "hooks": (add_hook,),
    "hook on one rank": (add_hook_on_one_rank,),
    "tensors": (set_tensors,),
    "values": (set_values,),
    "all": (add_hook, set_tensors, set_values),
}


def save(accelerator, folder, in_background):
    accelerator.save_state(folder, async_save=in_background)
    accelerator.wait_for_checkpoint()


def save_and_count(folder, changes, in_background):
    accelerator, model, registered = build_run()
    for change in CHANGES[changes]:
        change(accelerator, model, registered)

    if in_background:
        accelerator._backend.open_object_channel()  # connects the ranks once
    sizes = record_exchanges(lambda: save(accelerator, folder, in_background))
    before = copy_state(accelerator, model, registered)
    set_seed(9)
    registered.value = None
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    accelerator.load_state(folder)
    assert copy_state(accelerator, model, registered) == before
    names = {path.name for path in Path(folder).glob("note-*")}
    return sizes, names, accelerator.checkpoints.verify(folder).manifest.values_by_rank.keys()


def copy_state(accelerator, model, registered):
    tensors = [tensor.tolist() for tensor in accelerator.unwrap_model(model).state_dict().values()]
    return tensors, registered.value, torch.get_rng_state().tolist(), random.getstate()


@pytest.mark.parametrize(
    ("changes", "in_background", "count"),
    [
        ("nothing", False, 3),
        ("values", False, 3),
        ("hooks", False, 4),
        ("hook on one rank", False, 4),
        ("tensors", False, 4),
        ("nothing", True, 4),
        ("all", True, 6),
    ],
)
def test_a_save_takes_three_exchanges_and_one_for_each_of_hooks_differences_and_a_copy(
    pair, tmp_path, changes, in_background, count
):
    folder = tmp_path / "saved"
    for rank, (sizes, names, differing) in enumerate(
        pair.run(save_and_count, str(folder), changes, in_background)
    ):
        assert len(sizes) == count
        assert all(size <= PAYLOAD for size, sends_to_all in sizes if sends_to_all), sizes
        # The outcome needs no data.
        assert sizes[-1] == (0, True)
        assert names == {"hooks": {"note-0.txt", "note-1.txt"}, "hook on one rank": {"note-1.txt"}}.get(
            changes, names if changes == "all" else set()
        ), rank
        assert set(differing) == ({"registered"} if changes in {"values", "all"} else set())


def test_a_save_on_one_process_exchanges_nothing(alone, tmp_path):
    def save_alone():
        accelerator, *_ = build_run()
        return record_exchanges(lambda: accelerator.save_state(tmp_path / "saved"))

    assert alone.run(save_alone) == [[]]


# Errors ------------------------------------------------------------------------------------------


class FaultyDisk(FileSystem):
    """A file system whose call of a name fails."""

    def __init__(self, name, result=None):
        self._name, self._result = name, result
        self.is_armed = False

    def __getattribute__(self, name):
        if name.startswith("_") or name == "is_armed" or name != self._name or not self.is_armed:
            return super().__getattribute__(name)
        return self._fail

    def _fail(self, *_args, **_options):
        if self._result is not None:
            return self._result
        raise OSError(errno.EIO, os.strerror(errno.EIO), "disk")


def raise_in_hook(*_):
    raise ValueError("the hook failed")


def fail_to_copy(*_):
    raise MemoryError("no memory for the copy")


FAULTS = {
    "hook": "the hook failed",
    "state": "registered/value cannot be saved",
    "begin": "Input/output error",
    "space": "Not enough space in",
    "join": "This node does not see",
    "copy": "no memory for the copy",
    "write": "Input/output error",
    "commit": "Input/output error",
}
RANKS = {"begin": (0,), "space": (0,), "commit": (0,), "join": (1,)}
"""The ranks that do what fails, if not all do."""
NEEDS_DISK = {
    "begin": ("make", None),
    "space": ("free_space", 100),
    "join": ("sees", False),
    "write": ("write", None),
    "commit": ("exchange", None),
}


def save_with_fault(folder, fault, rank, in_background):
    """Save twice under one name, the second time with a fault on a rank; return the error of this rank."""
    disk = FaultyDisk(*NEEDS_DISK.get(fault, ("none", None)))
    accelerator, model, registered = build_run(disk)
    accelerator.save_state(folder)
    saved = copy_state(accelerator, model, registered)
    is_faulty, copy_tensors, handle = accelerator.process_index == rank, StagingBuffers.copy_tensors, None
    registered.value = 1
    if is_faulty:
        disk.is_armed = True
        if fault == "hook":
            handle = accelerator.register_save_state_pre_hook(raise_in_hook)
        elif fault == "state":
            registered.value = object()
        elif fault == "copy":
            StagingBuffers.copy_tensors = fail_to_copy
    try:
        with pytest.raises(CheckpointError) as raised:
            save(accelerator, folder, in_background)
    finally:
        StagingBuffers.copy_tensors, disk.is_armed = copy_tensors, False
    accelerator.wait_for_everyone()
    left = sorted(path.name for path in Path(folder).parent.iterdir())
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    is_unchanged = copy_state(accelerator, model, registered) == saved
    if handle is not None:
        handle.remove()
    registered.value = 2
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    return str(raised.value), left, is_unchanged, registered.value


@pytest.mark.parametrize(
    ("fault", "rank"), [(fault, rank) for fault in FAULTS for rank in RANKS.get(fault, (0, 1))]
)
def test_an_error_of_one_rank_is_raised_on_all_and_leaves_the_earlier_checkpoint(pair, tmp_path, fault, rank):
    folder = tmp_path / "saved"
    results = pair.run(save_with_fault, str(folder), fault, rank, fault == "copy")
    assert results[0] == results[1]
    message, left, is_unchanged, value = results[0]
    assert FAULTS[fault] in message
    assert left == ["saved"]
    assert is_unchanged
    assert value == 2


def save_with_errors_of_all(folder):
    accelerator, _, registered = build_run()
    registered.value = object()
    with pytest.raises(CheckpointError) as raised:
        accelerator.save_state(folder)
    return str(raised.value)


def test_an_error_that_all_ranks_have_is_raised_once(pair, tmp_path):
    messages = pair.run(save_with_errors_of_all, str(tmp_path / "saved"))
    assert messages[0] == messages[1]
    assert messages[0].startswith("registered/value cannot be saved")
    assert list(tmp_path.iterdir()) == []
