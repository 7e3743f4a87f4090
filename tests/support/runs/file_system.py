"""A run whose tensors all contain the number of their step, a file system with faults, and damage to files."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import NAME, hash_bytes

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
            self.acc._checkpoints._store = FileStore(disk)
        model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        optimizer = torch.optim.AdamW(model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.scheduler = self.acc.prepare(model, optimizer, self.scheduler)
        self.log = RegisteredState()
        self.acc.register_for_checkpointing(self.log)

    @property
    def rank(self):
        return self.acc.process_index

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

    def save(self, step, path=None, *, disk=None, in_background=False):
        """Save this step, with another file system from now on if one is given; return the error or None."""
        self.set_step(step)
        if disk is not None:
            self.acc._checkpoints._store = FileStore(disk)
        try:
            self.acc.save_state(path, async_save=in_background)
            if in_background:
                self.set_step(50)  # it must not be part of the checkpoint
            self.acc.wait_for_checkpoint()
        except CheckpointError as error:
            return str(error)
        return None

    def load(self, path=None):
        """Load a checkpoint; return its step, or 0 if there is none."""
        self.set_step(99)
        try:
            checkpoint = self.acc.load_state(path)
        except CheckpointError as error:
            assert "o complete checkpoint" in str(error) or "is not a checkpoint" in str(error), error
            assert self.step() == 99
            return 0
        assert self.step() == checkpoint.manifest.step
        return self.step()

    def fail_to_load(self, path=None):
        """Load a damaged checkpoint; return the error, and require that no state changes."""
        before = self.copy_state()
        try:
            self.acc.load_state(path)
        except CheckpointError as error:
            assert is_same_state(self.copy_state(), before)
            return str(error)
        raise AssertionError(f"{path} was loaded")

    def gather(self, value):
        """Return the values of all ranks."""
        return self.acc.gather_for_metrics([value], use_gather_object=True)

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


@dataclass(frozen=True)
class Fault:
    """A fault of a store: calls that fail, the end of the process, or a wrong number of free bytes.

    Of a file system calls are those of `RecordingFileSystem`, of an object store those of its client (`support.object_stores.folder_client`).
    """

    call: int = 0
    """The number of the first call, counted from 1; 0 is none. A write to a file has written half of its data."""
    error: int | None = None
    """The `errno` of the call; None kills the process before the call."""
    count: float = 1
    """The number of calls that fail."""
    is_late: bool = False
    """Whether a call has its effect before it fails: the answer is lost. Files have no such call."""
    free_bytes: int | None = None
    """The free space that the file system reports; None is the real one."""

    def hits(self, number):
        """Return whether a call has the fault."""
        return 0 < self.call <= number < self.call + self.count

    def strike(self, path=None):
        """End the process, or raise the error with the path."""
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # another thread may be faster than the signal
        raise OSError(self.error, os.strerror(self.error), path and str(path))


FOREVER = math.inf
"""Number of calls of a fault that lasts."""


class FaultyFileSystem(RecordingFileSystem):
    """A file system with a fault.

    Args:
        fault: The `Fault`.
        exchanges: Whether the file system can exchange two directories.
    """

    def __init__(self, fault, *, exchanges=True):
        super().__init__(exchanges=exchanges)
        self._fault = fault

    def before_call(self, number, path):
        if self._fault.hits(number):
            self._fault.strike(path)

    def free_space(self, folder):
        free = super().free_space(folder)
        return free if self._fault.free_bytes is None else self._fault.free_bytes


def assert_has_form(message):
    """Require that an error has the form `<what failed>: <why>. <what to do>.`"""
    assert re.fullmatch(r"\S.*: \S.*\. [A-Z].*\w.*\.", message, re.DOTALL), message


def flip_bit(path, bit):
    """Invert a bit of a file; a negative number counts from the end."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def rewrite_manifest(path, change):
    """Change the manifest of a checkpoint and update its checksum, as an attacker would."""
    body = json.loads((path / NAME).read_text())["checkpoint"]
    change(body)
    write_manifest(path, json.dumps(body, separators=(",", ":")))


def write_manifest(path, text):
    """Write the manifest of a checkpoint, with its checksum."""
    (path / NAME).write_text(f'{{"checksum":"{hash_bytes(text.encode())}",\n"checkpoint":{text}}}\n')


READ_CALLS = ("open_folder", "open_file", "read_status", "identify", "list_names", "try_lock_shared")


@contextmanager
def act_before_reads(actions):
    """Run an action before the read call of a number, counted from 1; yield the list of calls so far.

    Args:
        actions: Functions by number; the calls of a function itself are not counted.
    """
    calls, originals, busy = [], {name: getattr(FileSystem, name) for name in READ_CALLS}, threading.Lock()

    def wrap(name):
        def call(self, *args):
            if not busy.locked():
                calls.append(name)
                if action := actions.get(len(calls)):
                    with busy:
                        action()
            return originals[name](self, *args)

        return call

    for name in READ_CALLS:
        setattr(FileSystem, name, wrap(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(FileSystem, name, original)
