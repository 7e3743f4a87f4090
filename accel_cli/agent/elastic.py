"""torch's elastic agent, starting processes of ours and keeping what they leave in the run's folder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Collection, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from typing_extensions import override

from accel_cli import console, failures, ranks
from accel_cli.agent import exchange
from accel_cli.agent.memory import Kills
from accel_cli.agent.output import Output
from accel_cli.agent.processes import Processes
from accel_cli.agent.report import in_a_line, report
from accel_cli.failures import Failure
from accel_cli.runs import RunFolder
from accel_runtime import env

__all__ = ["Agent"]


class Agent(LocalElasticAgent):
    """The agent of one machine: it meets the others, starts the processes, watches them, starts them again."""

    def __init__(
        self, spec: WorkerSpec, folder: RunFolder, *, shown: int | str = 0, shutdown_timeout: int = 30
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(os.devnull), shutdown_timeout=shutdown_timeout)
        self._folder = folder
        self._shown = shown
        self._kills = Kills()
        self._output: Output | None = None
        self._told: exchange.Told | None = None
        self._attempt = -1

    @property
    def world_size(self) -> int:
        """The number of processes on all machines, in the attempt that runs or ran last."""
        return int(self._worker_group.workers[0].world_size)

    def leave(self) -> None:
        """Close the meeting for good, once this machine is done."""
        if self._told:
            self._told.linger()
        self._worker_group.spec.rdzv_handler.shutdown()

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # torch's own count of restarts differs between machines, and leaves out changes of membership.
        self._attempt += 1
        self._output = Output(prefixed=len(self._on_screen) > 1, coloured=console.coloured())
        envs = {worker.local_rank: self._env(worker) for worker in worker_group.workers}
        self._pcontext = Processes(worker_group.spec, envs, shutdown_timeout=self._shutdown_timeout)
        self._output.start()
        signal.signal(signal.SIGWINCH, self._resize)
        self._pcontext.start()
        self._say_who_is_hidden([worker.global_rank for worker in worker_group.workers])
        return self._pcontext.pids()

    def _say_who_is_hidden(self, here: Collection[int]) -> None:
        """On a machine whose screen would stay empty."""
        if self._attempt == 0 and self._on_screen and self._on_screen.isdisjoint(here):
            where = f"in {console.short(str(self._folder.path))}, and on the screen with --ranks all"
            console.note(f"what {ranks.in_words(here)} on {socket.gethostname()} write is {where}")

    def _env(self, worker: Worker) -> dict[str, str]:
        """What torch.distributed expects a process to find, as `torchrun` sets it, and the rank's folder."""
        group, spec = self._worker_group, self._worker_group.spec
        folder = self._folder.rank(self._attempt, worker.global_rank)
        folder.path.mkdir(parents=True)
        assert self._output is not None
        self._output.route(folder, worker.global_rank, shown=worker.global_rank in self._on_screen)
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCHELASTIC_ERROR_FILE": str(folder.error),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            env.RANK_FOLDER: str(folder.path),
        }

    def report(self, failed: Mapping[int, ProcessFailure]) -> int:
        """Say what failed first, on whichever machine, and return the exit code that belongs to it."""
        here = self._failures(failed)
        group = self._worker_group
        machine, machines = int(group.group_rank or 0), int(group.group_world_size or 1)
        self._told = exchange.Told(group.store, failures.first(here), machine=machine, machines=machines)
        culprit = self._told.first()
        self._say_on_a_new_line()
        report(culprit, here, processes=self.world_size, shown=culprit.rank in self._on_screen)
        return culprit.code

    @property
    def _on_screen(self) -> frozenset[int]:
        """The ranks that are shown, on whichever machine."""
        return ranks.shown(self._shown, self.world_size)

    def _failures(self, failed: Mapping[int, ProcessFailure]) -> list[Failure]:
        """What is known of the failures of this machine."""
        ranks_of = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        assert isinstance(self._pcontext, Processes)
        seen = time.time()
        return [
            failures.read(
                self._folder.rank(self._attempt, ranks_of[failure.local_rank]),
                seen,
                rank=ranks_of[failure.local_rank],
                host=socket.gethostname(),
                pid=failure.pid,
                exitcode=failure.exitcode,
                stopped=failure.local_rank in self._pcontext.stopped,
                memory=failure.exitcode == -signal.SIGKILL and self._kills.of(failure.pid),
            )
            for failure in failed.values()
        ]

    def _say_on_a_new_line(self) -> None:
        if self._output:
            self._output.end_line()

    def _resize(self, *_: object) -> None:
        """The screen has another size now."""
        if self._output and self._pcontext:
            self._output.resize()
            for pid in self._pcontext.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGWINCH)

    @override
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        if isinstance(self._pcontext, Processes) and (failed := self._pcontext.failed):
            first = failures.first(self._failures(failed))
            self._say_on_a_new_line()
            left = f"at most {self._remaining_restarts} more times after this"
            console.note(f"{in_a_line(first)}; all start again, {left}")
        super()._restart_workers(worker_group)

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        # torch's own default would overrule the profile where a failure, and no signal, ends the others.
        if self._pcontext:
            self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
        if self._output:
            for folder in self._output.drain():
                failures.complete(folder)
