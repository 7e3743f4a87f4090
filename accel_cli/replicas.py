"""What the elastic agent starts on each machine with `launcher.kind: xla`: the user's script on every replica.

Run by path: `replicas.py all|1|spmd FUNCTION script|module TARGET [ARGS]...`; FUNCTION is empty, or the function of the
script that is called. The one file of the command line that loads torch_xla, which starts the replicas: as processes, as
threads of one process (its CPU device, TPU v2 and v3), or both.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # This file's own folder.
    del sys.path[0]

from accel_cli import worker
from accel_cli.replica.folder import ReplicaFolder
from accel_cli.replica.handlers import Handlers
from accel_cli.replica.pool import Pool
from accel_cli.replica.threads import Threads
from accel_runtime.env import RANK_FOLDER

__all__ = ["main"]

_OF_THE_HOST = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
"""What the agent says of its processes, which are machines here: torch_xla and scripts would take it for replicas."""


def main(arguments: list[str]) -> None:
    """Run a script or a module on the devices of this machine.

    Args:
        arguments: Which devices, the function to call, `script` or `module`, its path or name, its own arguments.
    """
    devices, function, kind, *sys.argv = arguments
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    machine, machines = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in _OF_THE_HOST:
        os.environ.pop(name, None)
    worker.connect(str(file.parent))
    worker.prepare(kind)
    work = _Work(kind, sys.argv[0], function, file)
    if devices == "spmd":
        # Nothing may touch a device before the runtime has said that they are one.
        work.alone(machine, machines)
        return
    try:
        _launch(work, one=devices == "1")
    except Exception as error:  # noqa: BLE001 - before any replica ran: no device, or one that another process has
        worker.record(error, file)
        sys.exit(1)


def _launch(work: _Work, *, one: bool) -> None:
    import torch_xla  # noqa: PLC0415 - it costs seconds, and is not there for everybody

    if one:
        torch_xla.launch(lambda _: work.alone(0, 1), debug_single_process=True)
        return
    pool = Pool(work.file)
    pool.watch()
    try:
        torch_xla.launch(_Sent(work), start_method="spawn")
    except BrokenProcessPool:
        pool.settle()
        raise RuntimeError("a replica ended its process by itself, as with os._exit(0)") from None


@dataclass(frozen=True)
class _Work:
    """What every replica does."""

    kind: str
    target: str
    function: str
    file: Path
    """Where the launcher looks for the failure of this machine."""

    def alone(self, rank: int, size: int) -> None:
        """Be the one replica of this process, in its main thread."""
        folder = ReplicaFolder(self.file, rank, size)
        folder.announce(None)
        _take(folder)
        try:
            worker.run(self.executed, folder.error, **folder.about)
        finally:
            folder.blame()

    def executed(self) -> None:
        """As `python` itself would, in a process of its own."""
        if self.function:
            self._called()
        else:
            worker.execute(self.kind, self.target)

    def beside(self, threads: Threads) -> None:
        """The same, in a thread that may have others beside it."""
        if self.function:
            self._called()
            return
        code, module = worker.code_of(self.kind, self.target)
        if self.kind == "module":
            sys.argv[0] = str(module.__file__)
        threads.be_main(module)
        exec(code, vars(module))  # noqa: S102 - it is the user's script

    def _called(self) -> None:
        name = self.target if self.kind == "module" else Path(self.target).stem
        found = getattr(importlib.import_module(name), self.function, None)
        if not callable(found):
            raise SystemExit(
                f"launcher.main_training_function: {self.target} has no function {self.function!r}"
            )
        found()


@dataclass(frozen=True)
class _Sent:
    """What torch_xla sends to the processes it starts: unpickled, it is what each replica there is."""

    work: _Work

    def __reduce__(self) -> tuple[Callable[[_Work], _Replicas], tuple[_Work]]:
        return _arrived, (self.work,)

    def __call__(self, index: int) -> None:
        raise NotImplementedError("it is called where it arrives")


def _arrived(work: _Work) -> _Replicas:
    """Prepare a process for the replicas in it; this is its main thread, and the last time that it has a say."""
    worker.prepare(work.kind, here=True)
    return _Replicas(work)


class _Replicas:
    """The replicas of this process: called once for each, in a thread of its own."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._threads = Threads()
        self._folders: dict[int, ReplicaFolder] = {}
        self._connected = threading.Event()
        self._ending = threading.Lock()
        self._hook = worker.quiet()
        Handlers(self._threads, self._stop).install()

    def __call__(self, index: int) -> None:
        import torch_xla.runtime as xr  # noqa: PLC0415 - as above

        several = xr.addressable_device_count()
        number = xr.local_ordinal() % several
        self._threads.enter(number, several=several > 1)
        folder = self._folders[number] = ReplicaFolder(self._work.file, index, xr.world_size())
        folder.announce(threading.get_ident())
        self._connect(number, folder)
        try:
            self._work.beside(self._threads)
        except BaseException as error:  # noqa: BLE001 - whatever the script raises is its failure
            if not _fine(error):
                self._stop(number, error)
        self._threads.flush()

    def _connect(self, number: int, folder: ReplicaFolder) -> None:
        """Print where the launcher said: the first replica with all of the process, others by themselves."""
        if number == 0:
            _take(folder)
            self._connected.set()
        else:
            self._connected.wait()
            self._threads.print_to(str(folder.path))
            # Stacks of all threads are written into one file.
            (folder.path / worker.STACKS).symlink_to(self._folders[0].path / worker.STACKS)

    def _stop(self, number: int, error: BaseException) -> NoReturn:
        """End the process, and so the run; where replicas are threads, the first failure is the one that is told."""
        with self._ending:
            code = 0 if _fine(error) else self._folders[number].failed(error)
            if not isinstance(error, SystemExit):
                self._hook.ending = True
                worker.said(error)
            self._threads.flush()
            os._exit(code)


def _fine(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in {None, 0}


def _take(folder: ReplicaFolder) -> None:
    """Make a replica's folder that of this process."""
    worker.connect(str(folder.path))
    worker.answer_for_stacks(str(folder.path))
    os.environ[RANK_FOLDER] = str(folder.path)


if __name__ == "__main__":
    main(sys.argv[1:])
