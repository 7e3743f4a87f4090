"""The processes of one attempt on this machine: how they are started, watched and ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from typing_extensions import override

from accel_cli import console
from accel_cli.agent.ending import Started, end

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

    @property
    def started(self) -> Sequence[Started]:
        """The processes, by local rank."""
        return [handler.proc for _, handler in sorted(self.subprocess_handlers.items())]

    @override
    def close(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        super().close(death_sig, self._shutdown_timeout if timeout is None else timeout)

    @override
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        # torch's own signals the whole group: data-loader workers die, and take the rank down while it saves.
        if late := end(self.started, death_sig, timeout):
            pids = ", ".join(map(str, late))
            console.note(f"process {pids} did not end within {timeout} s, and was killed")
