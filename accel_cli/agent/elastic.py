"""torch's elastic agent, starting processes of ours and keeping what they leave in the run's folder."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from typing_extensions import override

from accel_cli.agent.ending import Guard
from accel_cli.agent.processes import Processes
from accel_cli.agent.signals import Signals
from accel_cli.runs import RunFolder
from accel_cli.stalls import Watch
from accel_runtime import env

__all__ = ["Agent"]


class Agent(LocalElasticAgent):
    """The agent of one machine: it meets the others, starts the processes, watches them, starts them again.

    Args:
        spec: What it starts, and where the machines meet.
        folder: Of the run.
        signals: The handlers of the launcher; they are told who runs.
        guard: Told too.
        shutdown_timeout: Seconds the processes have when they are asked to end.
        stall_timeout: Seconds without progress until it is said where they are; None does not watch.
    """

    def __init__(  # noqa: PLR0913 - the room's one place where everything meets
        self,
        spec: WorkerSpec,
        folder: RunFolder,
        signals: Signals,
        guard: Guard,
        *,
        shutdown_timeout: int,
        stall_timeout: int | None,
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(os.devnull), shutdown_timeout=shutdown_timeout)
        self._folder = folder
        self._signals = signals
        self._guard = guard
        self._stall_timeout = stall_timeout
        self._watch: Watch | None = None
        self._attempt = -1

    @property
    def world_size(self) -> int:
        """The number of processes on all machines, in the attempt that runs or ran last."""
        return int(self._worker_group.workers[0].world_size)

    def leave(self) -> None:
        """Close the meeting for good, once this machine is done."""
        self._worker_group.spec.rdzv_handler.shutdown()

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # torch's own count of restarts differs between machines, and leaves out changes of membership.
        self._attempt += 1
        envs = {worker.local_rank: self._env(worker) for worker in worker_group.workers}
        with self._signals.held():
            self._pcontext = Processes(worker_group.spec, envs, shutdown_timeout=self._shutdown_timeout)
            self._pcontext.start()
            self._note(worker_group.workers, self._pcontext)
        return self._pcontext.pids()

    def _note(self, workers: list[Worker], processes: Processes) -> None:
        """Tell who may have to find the processes."""
        self._signals.workers = processes.started
        self._guard.watch(processes.pids().values())
        for worker in workers:
            pid = processes.pids()[worker.local_rank]
            self._folder.rank(self._attempt, worker.global_rank).pid.write_text(str(pid))
        if self._stall_timeout:
            self._watch = Watch(self._folder.ranks(self._attempt), self._stall_timeout)

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if self._watch and result.state is WorkerState.HEALTHY:
            self._watch.look()
        return result

    def _env(self, worker: Worker) -> dict[str, str]:
        """What torch.distributed expects a process to find, as `torchrun` sets it, and the rank's folder."""
        group, spec = self._worker_group, self._worker_group.spec
        folder = self._folder.rank(self._attempt, worker.global_rank)
        folder.path.mkdir(parents=True)
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

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        self._signals.announce()
        # torch's own default would overrule the profile where a failure, and no signal, ends the others.
        if self._pcontext:
            self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
