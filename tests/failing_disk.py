"""A run whose state says in every tensor which step it is of, and a disk on which any call can fail or be the last."""

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


class Log:
    """An object of the script that is saved too: one tensor is equal on all ranks, one is not."""

    def __init__(self):
        self.state = {}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Run:
    """What a script prepares; `put(step)` makes all of its state that of a step, `step()` says which it is of."""

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
        self.log = Log()
        self.acc.register_for_checkpointing(self.log)

    @property
    def rank(self):
        return self.acc.process_index

    def move(self, folder, *, total_limit=None, automatic=True):
        """Go on in another directory, as if nothing had been saved."""
        project = self.acc.project_configuration
        project.project_dir, project.iteration = folder, 0
        project.total_limit, project.automatic_checkpoint_naming = total_limit, automatic

    def put(self, step):
        """Let everything be of this step."""
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
        """The step everything is of; fails where two tensors are of different ones."""
        found = {float(value) for tensor in self.tensors() for value in tensor.flatten().tolist()}
        for parameter in self.parameters():
            for value in self.optimizer.optimizer.state[parameter].values():
                found |= set(value.flatten().tolist())
        found |= {self.optimizer.steps, self.log.state["step"], self.log.state["own"][0].item()}
        found |= set(self.log.state["shared"].tolist())
        assert self.log.state["own"][1] == self.rank
        assert len(found) == 1, f"a mixture of steps: {sorted(found)}"
        step = int(found.pop())
        here, saved = (
            torch.get_rng_state(),
            torch.Generator().manual_seed(1000 * step + self.rank).get_state(),
        )
        assert torch.equal(here, saved), "the random state is of another step"
        return step

    def live(self):
        """Copies of everything that loading changes."""
        state = [tensor.clone() for tensor in self.tensors()]
        for parameter in self.parameters():
            state += [v.clone() for v in self.optimizer.optimizer.state.get(parameter, {}).values()]
        return [*state, torch.get_rng_state(), torch.tensor(self.optimizer.steps), repr(self.log.state)]

    def share(self, value, rank):
        """What a rank has."""
        return self.acc.gather_for_metrics([value], use_gather_object=True)[rank]

    def tensors(self):
        return list(self.acc.unwrap_model(self.model).state_dict().values())

    def parameters(self):
        return list(self.acc.unwrap_model(self.model).parameters())


def same(one, other):
    """Whether two of `Run.live` are equal, bit for bit."""
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


class Probe(FileSystem):
    """A disk that asks before every call; removing a tree is a call for every name in it.

    Args:
        exchanges: Whether it knows how to exchange two directories.
    """

    def __init__(self, *, exchanges=True):
        self.calls = []
        self._exchanges = exchanges
        self._lock = threading.Lock()

    def before(self, number, path):
        """What happens before a call, counted from 1; an exception is what the call raises."""

    def _ask(self, call, path=None):
        with self._lock:
            self.calls.append(call)
            number = len(self.calls)
        self.before(number, path)

    def make(self, folder):
        self._ask("make", folder)
        super().make(folder)

    def create(self, path):
        self._ask("create", path)
        return super().create(path)

    def write(self, file, data):
        half = len(data) // 2
        super().write(file, data[:half])
        self._ask("write")  # with half of it written
        super().write(file, data[half:])

    def sync(self, file):
        self._ask("sync")
        super().sync(file)

    def close(self, file):
        super().close(file)  # the file is closed, whatever the system says
        self._ask("close")

    def sync_directory(self, folder):
        self._ask("sync_directory", folder)
        super().sync_directory(folder)

    def rename(self, old, new):
        self._ask("rename", old)
        super().rename(old, new)

    def exchange(self, one, other):
        self._ask("exchange", one)
        if not self._exchanges:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().exchange(one, other)

    def remove(self, path):
        self._ask("remove", path)
        super().remove(path)

    def remove_tree(self, folder):
        for top, folders, files in os.walk(folder, topdown=False):
            for name in sorted(files):
                self._ask("unlink", top)
                (Path(top) / name).unlink()
            for name in folders:
                self._ask("rmdir", top)
                (Path(top) / name).rmdir()
        if Path(folder).exists():
            self._ask("rmdir", folder)
            Path(folder).rmdir()

    def free_space(self, folder):
        self._ask("free_space", folder)
        return super().free_space(folder)

    def lock(self, folder, *, shared=False):
        self._ask("lock", folder)
        return super().lock(folder, shared=shared)

    def unlock(self, opened):
        super().unlock(opened)
        self._ask("unlock")


class Failing(Probe):
    """A disk on which one call fails, or all from one on.

    Args:
        at: Which, counted from 1.
        error: With what.
        forever: Whether those that follow fail too.
    """

    def __init__(self, at, error, *, forever=False, exchanges=True):
        super().__init__(exchanges=exchanges)
        self._at, self._error, self._forever = at, error, forever

    def before(self, number, path):
        if number == self._at or (self._forever and number > self._at):
            raise OSError(self._error, os.strerror(self._error), path and str(path))
