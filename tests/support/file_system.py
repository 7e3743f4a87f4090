"""A run whose tensors all contain the number of their step, and file systems whose calls can fail."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import torch
from torch import nn

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.checkpoint.filesystem import FileSystem

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


class RegisteredState:
    """A registered object of the script with a tensor that is equal on all ranks and one that is not."""

    def __init__(self):
        self.state = {}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Run:
    """The prepared objects of a script; `set_step` sets their whole state to a step, and `step` returns that step."""

    def __init__(self, folder, *, total_limit=None, automatic=True, disk=None, width=8):
        project = ProjectConfiguration(
            project_dir=folder, automatic_checkpoint_naming=automatic, total_limit=total_limit
        )
        self.acc = Accelerator(cpu=True, project_config=project)
        if disk is not None:
            self.acc._file_system = disk
        model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        optimizer = torch.optim.AdamW(model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.scheduler = self.acc.prepare(model, optimizer, self.scheduler)
        self.log = RegisteredState()
        self.acc.register_for_checkpointing(self.log)

    @property
    def rank(self):
        return self.acc.process_index

    def change_project(self, folder, *, total_limit=None, automatic=True):
        """Save into another directory from now on, as a run without checkpoints."""
        project = self.acc.project_configuration
        project.project_dir, project.iteration = folder, 0
        project.total_limit, project.automatic_checkpoint_naming = total_limit, automatic

    def set_step(self, step):
        """Set all tensors and the random state to values of this step."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(step)
        for parameter in self.parameters():
            self.optimizer.optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, step),
                "exp_avg_sq": torch.full_like(parameter, step),
            }
        self.optimizer.steps = step
        own = torch.tensor([step, self.rank])
        self.log.state = {"step": step, "shared": torch.full((3,), step), "own": own}
        torch.manual_seed(1000 * step + self.rank)

    def step(self):
        """Return the step of the state; fail if two tensors are of different steps."""
        steps = {float(value) for tensor in self.tensors() for value in tensor.flatten().tolist()}
        for parameter in self.parameters():
            for value in self.optimizer.optimizer.state[parameter].values():
                steps |= set(value.flatten().tolist())
        steps |= {self.optimizer.steps, self.log.state["step"], self.log.state["own"][0].item()}
        steps |= set(self.log.state["shared"].tolist())
        assert self.log.state["own"][1] == self.rank
        assert len(steps) == 1, f"a mixture of steps: {sorted(steps)}"
        step = int(steps.pop())
        here, saved = (
            torch.get_rng_state(),
            torch.Generator().manual_seed(1000 * step + self.rank).get_state(),
        )
        assert torch.equal(here, saved), "the random state is of another step"
        return step

    def copy_state(self):
        """Return copies of all state that loading changes."""
        state = [tensor.clone() for tensor in self.tensors()]
        for parameter in self.parameters():
            state += [v.clone() for v in self.optimizer.optimizer.state.get(parameter, {}).values()]
        return [*state, torch.get_rng_state(), torch.tensor(self.optimizer.steps), repr(self.log.state)]

    def gather_from_rank(self, value, rank):
        """Return the value of one rank on all ranks."""
        return self.acc.gather_for_metrics([value], use_gather_object=True)[rank]

    def tensors(self):
        return list(self.acc.unwrap_model(self.model).state_dict().values())

    def parameters(self):
        return list(self.acc.unwrap_model(self.model).parameters())


def is_same_state(state, expected):
    """Return whether two results of `Run.copy_state` are bitwise equal."""
    return len(state) == len(expected) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(state, expected, strict=True)
    )


class RecordingFileSystem(FileSystem):
    """A file system that records every call before it runs; removing a tree is one call for each name in it.

    Args:
        exchanges: Whether the file system can exchange two directories.
    """

    def __init__(self, *, exchanges=True):
        self.calls = []
        self._exchanges = exchanges
        self._lock = threading.Lock()

    def before_call(self, number, path):
        """Run before each call, counted from 1; the call raises the exceptions of this method."""

    def _record_call(self, call, path=None):
        with self._lock:
            self.calls.append(call)
            number = len(self.calls)
        self.before_call(number, path)

    def make(self, folder):
        self._record_call("make", folder)
        super().make(folder)

    def create(self, path):
        self._record_call("create", path)
        return super().create(path)

    def write(self, file, data):
        half = len(data) // 2
        super().write(file, data[:half])
        self._record_call("write")  # half of the data is written
        super().write(file, data[half:])

    def sync(self, file):
        self._record_call("sync")
        super().sync(file)

    def close(self, file):
        super().close(file)  # the file is closed even if the call fails
        self._record_call("close")

    def sync_directory(self, folder):
        self._record_call("sync_directory", folder)
        super().sync_directory(folder)

    def rename(self, old, new):
        self._record_call("rename", old)
        super().rename(old, new)

    def exchange(self, old, new):
        self._record_call("exchange", old)
        if not self._exchanges:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().exchange(old, new)

    def remove(self, path):
        self._record_call("remove", path)
        super().remove(path)

    def remove_tree(self, folder):
        for top, folders, files in os.walk(folder, topdown=False):
            for name in sorted(files):
                self._record_call("unlink", top)
                (Path(top) / name).unlink()
            for name in folders:
                self._record_call("rmdir", top)
                (Path(top) / name).rmdir()
        if Path(folder).exists():
            self._record_call("rmdir", folder)
            Path(folder).rmdir()

    def free_space(self, folder):
        self._record_call("free_space", folder)
        return super().free_space(folder)

    def lock(self, folder, *, shared=False):
        self._record_call("lock", folder)
        return super().lock(folder, shared=shared)

    def unlock(self, lock):
        super().unlock(lock)
        self._record_call("unlock")


class FailingFileSystem(RecordingFileSystem):
    """A file system on which one call fails, or that call and all later ones.

    Args:
        at: The number of the call, counted from 1.
        error: The `errno` of the failure.
        forever: Whether all later calls fail too.
    """

    def __init__(self, at, error, *, forever=False, exchanges=True):
        super().__init__(exchanges=exchanges)
        self._at, self._error, self._forever = at, error, forever

    def before_call(self, number, path):
        if number == self._at or (self._forever and number > self._at):
            raise OSError(self._error, os.strerror(self._error), path and str(path))
