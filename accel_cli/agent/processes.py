"""The processes of one attempt on this machine: how they are started, watched and ended."""

from __future__ import annotations

import os
import signal

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from typing_extensions import override

__all__ = ["Processes"]


class Processes(SubprocessContext):
    """One process a local rank, each a command of its own (`start_method: exec`)."""

    def __init__(self, spec: WorkerSpec, envs: dict[int, dict[str, str]], *, shutdown_timeout: int) -> None:
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
        self._shutdown_timeout = shutdown_timeout
        self.stopped: set[int] = set()
        """The local ranks that still ran when they were told to end: what they end with is no failure."""

    @property
    def failed(self) -> dict[int, ProcessFailure]:
        """The failures so far, by local rank."""
        return dict(self._failures)

    @override
    def close(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        handlers = self.subprocess_handlers.items()
        self.stopped |= {rank for rank, handler in handlers if handler.proc.poll() is None}
        super().close(death_sig, self._shutdown_timeout if timeout is None else timeout)
