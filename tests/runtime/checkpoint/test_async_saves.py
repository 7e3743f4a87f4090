"""Saving while the script trains on: what is saved, what it costs, and how what goes wrong comes up."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import FileSystem
from accel_runtime.checkpoint.manager import StagingBuffers


class Held(FileSystem):
    """Writes nothing before it is let go."""

    def __init__(self):
        self.go = threading.Event()

    def write(self, file, data):
        assert self.go.wait(120)
        super().write(file, data)


class Full(FileSystem):
    """Has no room for data."""

    def write(self, _file, _data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoint")


def trained(disk=None, **project):
    accelerator = Accelerator(project_config=ProjectConfiguration(**project))
    accelerator._file_system = disk or FileSystem()
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(4, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def plain(accelerator, model):
    return {name: tensor.clone() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}


def test_what_the_script_changes_while_it_is_written_is_not_in_it(tmp_path):
    accelerator, model, optimizer = trained(Held())
    before = plain(accelerator, model)
    accelerator.save_state(tmp_path / "a", async_save=True)
    assert not (tmp_path / "a").exists()
    step(accelerator, model, optimizer)
    accelerator._file_system.go.set()
    accelerator.wait_for_checkpoint()
    assert not torch.equal(before["weight"], plain(accelerator, model)["weight"])
    accelerator.load_state(tmp_path / "a")
    assert all(torch.equal(before[name], tensor) for name, tensor in plain(accelerator, model).items())


def test_one_save_waits_for_the_one_before(tmp_path):
    accelerator, *_ = trained(Held())
    accelerator.save_state(tmp_path / "a", async_save=True)
    threading.Timer(0.3, accelerator._file_system.go.set).start()
    accelerator.save_state(tmp_path / "b", async_save=True)
    assert (tmp_path / "a" / "checkpoint.json").exists()
    accelerator.wait_for_checkpoint()
    assert accelerator.checkpoints.verify(tmp_path / "b").manifest.step == 1


def test_a_load_waits_for_it_too(tmp_path):
    accelerator, *_ = trained(Held())
    accelerator.save_state(tmp_path / "a", async_save=True)
    threading.Timer(0.3, accelerator._file_system.go.set).start()
    assert accelerator.load_state(tmp_path / "a").manifest.step == 1


def test_what_goes_wrong_comes_up_at_the_next_step(tmp_path):
    accelerator, model, optimizer = trained(Full())
    accelerator.save_state(tmp_path / "a", async_save=True)
    accelerator._background_writer._thread.join()
    accelerator.backward(model(torch.ones(4, 3)).mean())
    with pytest.raises(CheckpointError, match=r"a was not saved: .*No space left on device"):
        optimizer.step()
    assert list(tmp_path.iterdir()) == []
    optimizer.step()  # said once


def test_what_goes_wrong_comes_up_at_the_next_save_and_when_it_is_waited_for(tmp_path):
    accelerator, *_ = trained(Full())
    accelerator.save_state(tmp_path / "a", async_save=True)
    with pytest.raises(CheckpointError, match="a was not saved"):
        accelerator.save_state(tmp_path / "b")
    accelerator.save_state(tmp_path / "a", async_save=True)
    with pytest.raises(CheckpointError, match="a was not saved"):
        accelerator.wait_for_checkpoint()
    accelerator._file_system = FileSystem()
    accelerator.save_state(tmp_path / "a")
    assert accelerator.checkpoints.verify(tmp_path / "a")


def test_the_project_may_say_that_all_saves_are_so_and_memory_is_there_before_the_first(tmp_path):
    accelerator, model, optimizer = trained(
        project_dir=tmp_path, async_save=True, automatic_checkpoint_naming=True
    )
    accelerator._staging._wait()
    taken = accelerator._staging.bytes
    state = sum(t.nbytes for t in plain(accelerator, model).values()) * 3
    assert state <= taken <= 1.2 * state + (1 << 22)
    where = accelerator._staging._memory.data_ptr()
    for _ in range(3):
        accelerator.save_state()
        step(accelerator, model, optimizer)
    accelerator.save_state(async_save=False)
    assert (accelerator._staging.bytes, accelerator._staging._memory.data_ptr()) == (taken, where)
    assert [found.number for found in accelerator.checkpoints.list()] == [0, 1, 2, 3]
    assert [found.manifest.step for found in accelerator.checkpoints.list()] == [1, 2, 3, 4]


def test_copies_are_in_memory_that_is_used_again():
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


def _in_the_background(folder):
    accelerator = Accelerator()
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(accelerator.process_index + 1.0)  # DDP gives all the first rank's
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for number in range(3):
        accelerator.backward(model(torch.full((4, 3), accelerator.process_index + 1.0)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(Path(folder) / str(number), async_save=True)
        accelerator.gather(torch.ones(2))  # the script goes on to speak to the others
    accelerator.wait_for_checkpoint()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = accelerator.load_state(Path(folder) / "2")
    same = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    accelerator.load_state(Path(folder) / "0")
    return (
        same,
        found.manifest.step,
        not torch.equal(before["weight"], model.state_dict()["weight"]),
    )


def test_several_processes_write_together_while_they_train(several, tmp_path):
    assert several.run(_in_the_background, str(tmp_path)) == [(True, 3, True)] * several.size


SCRIPT = """
import errno, os, sys, time
import torch
from torch import nn
from accel_runtime import Accelerator
from accel_runtime.checkpoint.filesystem import FileSystem

class Slow(FileSystem):
    def write(self, file, data):
        time.sleep(1.5)
        if "full" in sys.argv:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoint")
        super().write(file, data)

accelerator = Accelerator(cpu=True)
accelerator._file_system = Slow()
model = accelerator.prepare(nn.Linear(3, 2))
accelerator.save_state("a", async_save=True)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "code"), [("", 0), ("full", 1)])
def test_the_end_of_a_script_waits_and_says_so_and_a_save_that_failed_fails_the_script(
    tmp_path, argument, code
):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, argument],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert (done.returncode, done.stdout) == (code, "done\n"), done.stderr
    if code:
        assert "a was not saved: checkpoint: No space left on device" in done.stderr
        assert list(tmp_path.iterdir()) == []
    else:
        assert "accel: waiting for " in done.stderr
        assert "a is written" in done.stderr
        assert (tmp_path / "a" / "checkpoint.json").exists()
