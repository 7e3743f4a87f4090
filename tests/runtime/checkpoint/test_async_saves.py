"""Asynchronous saves: the saved state, staging memory, and the reporting of errors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.processes.children import fork, wait_for_exit
from support.processes.waits import limit
from torch import nn

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.checkpoint import background
from accel_runtime.checkpoint.background import StagingBuffers
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.file_system import FileSystem


class BlockedFileSystem(FileSystem):
    """A file system that blocks writes until `go` is set."""

    def __init__(self):
        self.go = threading.Event()

    def write(self, file, data):
        assert self.go.wait(limit(120))
        super().write(file, data)


class FullFileSystem(FileSystem):
    """A file system without free space."""

    def write(self, _file, _data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoint")


def build_trained_run(disk=None, **project):
    accelerator = Accelerator(project_config=ProjectConfiguration(**project))
    accelerator._checkpoints._store = FileStore(disk or FileSystem())
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    train_step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def train_step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(4, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def copy_weights(accelerator, model):
    return {name: tensor.clone() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}


def test_changes_during_an_asynchronous_save_are_not_saved(tmp_path):
    disk = BlockedFileSystem()
    accelerator, model, optimizer = build_trained_run(disk)
    before = copy_weights(accelerator, model)
    accelerator.save_state(tmp_path / "a", async_save=True)
    assert not (tmp_path / "a").exists()
    train_step(accelerator, model, optimizer)
    disk.go.set()
    accelerator.wait_for_checkpoint()
    assert not torch.equal(before["weight"], copy_weights(accelerator, model)["weight"])
    accelerator.load_state(tmp_path / "a")
    assert all(torch.equal(before[name], tensor) for name, tensor in copy_weights(accelerator, model).items())


def test_a_save_waits_for_the_previous_asynchronous_save(tmp_path):
    disk = BlockedFileSystem()
    accelerator, *_ = build_trained_run(disk)
    accelerator.save_state(tmp_path / "a", async_save=True)
    threading.Timer(0.3, disk.go.set).start()
    accelerator.save_state(tmp_path / "b", async_save=True)
    assert (tmp_path / "a" / "checkpoint.json").exists()
    accelerator.wait_for_checkpoint()
    assert accelerator.checkpoints.verify(tmp_path / "b").manifest.step == 1


def test_load_state_waits_for_an_asynchronous_save(tmp_path):
    disk = BlockedFileSystem()
    accelerator, *_ = build_trained_run(disk)
    accelerator.save_state(tmp_path / "a", async_save=True)
    threading.Timer(0.3, disk.go.set).start()
    assert accelerator.load_state(tmp_path / "a").manifest.step == 1


def test_the_next_optimizer_step_raises_the_error_of_an_asynchronous_save(tmp_path):
    accelerator, model, optimizer = build_trained_run(FullFileSystem())
    accelerator.save_state(tmp_path / "a", async_save=True)
    accelerator._checkpoints._background_writer._thread.join()
    accelerator.backward(model(torch.ones(4, 3)).mean())
    with pytest.raises(CheckpointError, match=r"a was not saved: .*No space left on device"):
        optimizer.step()
    assert list(tmp_path.iterdir()) == []
    optimizer.step()  # the error is raised once


def test_the_next_save_and_wait_for_checkpoint_raise_the_error_of_an_asynchronous_save(tmp_path):
    accelerator, *_ = build_trained_run(FullFileSystem())
    accelerator.save_state(tmp_path / "a", async_save=True)
    with pytest.raises(CheckpointError, match="a was not saved"):
        accelerator.save_state(tmp_path / "b")
    accelerator.save_state(tmp_path / "a", async_save=True)
    with pytest.raises(CheckpointError, match="a was not saved"):
        accelerator.wait_for_checkpoint()
    accelerator._checkpoints._store = FileStore()
    accelerator.save_state(tmp_path / "a")
    assert accelerator.checkpoints.verify(tmp_path / "a")


def test_a_project_with_async_save_allocates_staging_memory_once_before_the_first_save(tmp_path):
    accelerator, model, optimizer = build_trained_run(
        project_dir=tmp_path, async_save=True, automatic_checkpoint_naming=True
    )
    accelerator._checkpoints._staging._wait()
    allocated = accelerator._checkpoints._staging.bytes
    state = sum(t.nbytes for t in copy_weights(accelerator, model).values()) * 3
    assert state <= allocated <= 1.2 * state + (1 << 22)
    address = accelerator._checkpoints._staging._memory.data_ptr()
    for _ in range(3):
        accelerator.save_state()
        train_step(accelerator, model, optimizer)
    accelerator.save_state(async_save=False)
    assert (
        accelerator._checkpoints._staging.bytes,
        accelerator._checkpoints._staging._memory.data_ptr(),
    ) == (allocated, address)
    assert [checkpoint.number for checkpoint in accelerator.checkpoints.list()] == [0, 1, 2, 3]
    assert [checkpoint.manifest.step for checkpoint in accelerator.checkpoints.list()] == [1, 2, 3, 4]


def test_staging_buffers_reuse_their_memory():
    staging = StagingBuffers(pinned=False)
    tensors = {
        "a": torch.randn(5, 3).t(),
        "b": torch.tensor(2.0),
        "c": torch.empty(0),
        "d": torch.ones(3, dtype=torch.bool),
    }
    first = staging.copy_tensors(tensors)
    assert all(
        torch.equal(first[name], tensor) and first[name].is_contiguous() for name, tensor in tensors.items()
    )
    assert staging.copy_tensors(tensors)["a"].data_ptr() == first["a"].data_ptr()
    assert staging.copy_tensors({"e": torch.ones(1000)})["e"].sum() == 1000


def test_a_copy_that_is_needed_early_ends_the_reservation(monkeypatch):
    started, go, allocated = threading.Event(), threading.Event(), []

    def allocate(piece):
        started.set()
        assert go.wait(limit(60))
        allocated.append(piece.nbytes)

    monkeypatch.setattr(background, "_allocate_pages", allocate)
    staging = StagingBuffers(pinned=False)
    staging.reserve(8 * background._PIECE_BYTES)
    assert started.wait(limit(60))
    threading.Timer(0.1, go.set).start()
    assert staging.copy_tensors({"a": torch.ones(3)})["a"].sum() == 3
    assert len(allocated) < 8
    assert staging.bytes == 8 * background._PIECE_BYTES


def test_pages_of_a_reservation_are_allocated_before_the_copy():
    staging, before = StagingBuffers(pinned=False), read_resident_bytes()
    staging.reserve(1 << 26)
    staging._reservation.join()
    assert read_resident_bytes() - before > 0.9 * (1 << 26)


def read_resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_forked_process_neither_shares_nor_copies_staging_memory():
    staging = StagingBuffers(pinned=False)
    copies = staging.copy_tensors({"a": torch.ones(1 << 12)})

    def write_in_child():
        copies["a"].fill_(2)

    assert wait_for_exit(fork(write_in_child)) == 0
    assert copies["a"].sum() == 1 << 12
    child_sum = torch.zeros(1).share_memory_()
    assert wait_for_exit(fork(lambda: child_sum.fill_(copies["a"].sum()))) == 0
    assert child_sum.item() == 0


def save_asynchronously(folder):
    accelerator = Accelerator()
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(accelerator.process_index + 1.0)  # DDP broadcasts the weights of the first rank
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for number in range(3):
        accelerator.backward(model(torch.full((4, 3), accelerator.process_index + 1.0)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(Path(folder) / str(number), async_save=True)
        accelerator.gather(torch.ones(2))  # collectives of the script continue during the save
    accelerator.wait_for_checkpoint()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint = accelerator.load_state(Path(folder) / "2")
    is_equal = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    accelerator.load_state(Path(folder) / "0")
    return (
        is_equal,
        checkpoint.manifest.step,
        not torch.equal(before["weight"], model.state_dict()["weight"]),
    )


def test_several_ranks_save_asynchronously_while_they_train(several, tmp_path):
    assert several.run(save_asynchronously, str(tmp_path)) == [(True, 3, True)] * several.size


SCRIPT = """
import errno, os, sys, time
import torch
from torch import nn
from accel_runtime import Accelerator
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.file_system import FileSystem

class Slow(FileSystem):
    def write(self, file, data):
        time.sleep(1.5)
        if "full" in sys.argv:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoint")
        super().write(file, data)

accelerator = Accelerator(cpu=True)
accelerator._checkpoints._store = FileStore(Slow())
model = accelerator.prepare(nn.Linear(3, 2))
accelerator.save_state("a", async_save=True)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "code"), [pytest.param("", 0, marks=pytest.mark.full), ("full", 1)])
def test_a_script_waits_for_its_last_asynchronous_save_and_fails_if_the_save_fails(tmp_path, argument, code):
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, argument],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit(240),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert (process.returncode, process.stdout) == (code, "done\n"), process.stderr
    if code:
        assert "a was not saved: checkpoint: No space left on device" in process.stderr
        assert list(tmp_path.iterdir()) == []
    else:
        assert "accel: waiting for " in process.stderr
        assert "a is written" in process.stderr
        assert (tmp_path / "a" / "checkpoint.json").exists()
