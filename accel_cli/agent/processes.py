"""The processes of one attempt on this machine: how they are started, watched and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from typing_extensions import override

from accel_cli import console
from accel_cli.agent.ending import Orphans, Started, end
from accel_cli.forkserver.server import Server, ServerError

__all__ = ["Forked", "Processes"]

_LOOK_S = 0.02
"""Seconds between two looks at a process that is to end."""


class Processes(SubprocessContext):
    """One process a local rank, each a command of its own (`start_method: exec`)."""

    def __init__(
        self, spec: WorkerSpec, envs: dict[int, dict[str, str]], orphans: Orphans, *, shutdown_timeout: int
    ) -> None:
        errors = {rank: env["TORCHELASTIC_ERROR_FILE"] for rank, env in envs.items()}
        super().__init__(
            name=spec.role,
            entrypoint=str(spec.entrypoint),
            args=dict.fromkeys(envs, tuple(spec.args)),
            envs=envs,
            logs_specs=DefaultLogsSpecs(os.devnull),
        )
        # torch's specification of logs knows no files of ours and has emptied these.
        self.error_files = errors
        for rank, path in errors.items():
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = path
        self._orphans = orphans
        self._shutdown_timeout = shutdown_timeout
        self.stopped: set[int] = set()
        """The local ranks that still ran when they were told to end: what they end with is no failure."""

    @override
    def start(self) -> None:
        # torch's own puts handlers of its own in the place of the launcher's first: a signal that comes while
        # processes are being started would leave it half done.
        self._start()  # type: ignore[no-untyped-call]

    @property
    def started(self) -> Sequence[Started]:
        """The processes, by local rank."""
        return [handler.proc for _, handler in sorted(self.subprocess_handlers.items())]

    @property
    def failed(self) -> dict[int, ProcessFailure]:
        """The failures so far, by local rank."""
        return dict(self._failures)

    @override
    def close(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        handlers = self.subprocess_handlers.items()
        running = {rank for rank, handler in handlers if handler.proc.poll() is None}
        # One that has recorded its failure is only not done with ending, and the others may have lost it before that.
        self.stopped |= {rank for rank in running if not Path(self.error_files[rank]).exists()}
        super().close(death_sig, self._shutdown_timeout if timeout is None else timeout)

    @override
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        # torch's own signals the whole group: data-loader workers die, and take the rank down while it saves.
        if late := end(self.started, death_sig, timeout, self._orphans):
            pids = ", ".join(map(str, late))
            console.note(f"process {pids} did not end within {timeout} s, and was killed")


class Forked(Processes):
    """One process a local rank, forked from a server that has torch loaded (`start_method: forkserver`)."""

    def __init__(
        self,
        spec: WorkerSpec,
        envs: dict[int, dict[str, str]],
        orphans: Orphans,
        *,
        server: Server,
        shutdown_timeout: int,
    ) -> None:
        super().__init__(spec, envs, orphans, shutdown_timeout=shutdown_timeout)
        self._server = server

    @override
    def _start(self) -> None:
        environs = [{**os.environ, **self.envs[rank]} for rank in range(self.nprocs)]
        try:
            pids = self._server.fork((str(self.entrypoint), *self.args[0]), environs)
        except ServerError as error:
            console.note(f"processes are started by exec: {error}")
            super()._start()  # type: ignore[no-untyped-call]
        else:
            self.subprocess_handlers = dict(enumerate(map(_Handler, pids)))


class _Handler(SubprocessHandler):
    """What torch's context asks of a process it has started, for one that it has not."""

    def __init__(self, pid: int) -> None:  # no command, and no files of torch's
        self.proc = cast("subprocess.Popen[bytes]", _Child(pid))

    @override
    def close(self, death_sig: signal.Signals | None = None) -> None:
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


class _Child:
    """A child that somebody else started: waited for as `subprocess.Popen` would."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_LOOK_S)
        return code
