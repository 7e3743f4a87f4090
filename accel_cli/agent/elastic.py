"""torch's elastic agent, starting processes of ours and keeping what they leave in the run's folder."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from typing_extensions import override

from accel_cli import console, waiting
from accel_cli.agent import quiet
from accel_cli.agent.processes import Processes
from accel_cli.agent.rendezvous import Handler
from accel_cli.agent.restarts import Budget, Reason, of_failures
from accel_cli.errors import AccelError
from accel_cli.runs import RunFolder
from accel_runtime import env

__all__ = ["Agent"]


class Agent(LocalElasticAgent):
    """The agent of one machine: it meets the others, starts the processes, watches them, starts them again."""

    def __init__(self, spec: WorkerSpec, folder: RunFolder, *, shutdown_timeout: int = 30) -> None:
        super().__init__(spec, DefaultLogsSpecs(os.devnull), shutdown_timeout=shutdown_timeout)
        self._folder = folder
        self._attempt = -1
        assert isinstance(spec.rdzv_handler, Handler)
        self._handler = spec.rdzv_handler
        self._budget = Budget(self._handler.meeting, spec.max_restarts)
        self._reason: Reason | None = None
        self._round: int | None = None

    @property
    def world_size(self) -> int:
        """The number of processes on all machines, in the attempt that runs or ran last."""
        return int(self._worker_group.workers[0].world_size)

    def ended(self) -> str | None:
        """Why the run is over, if a machine said so."""
        return self._budget.ended()

    def leave(self) -> None:
        """Close the meeting for good, once this machine is done."""
        if self._reason:
            self._budget.end(self._reason.text)
        self._worker_group.spec.rdzv_handler.shutdown()

    @override
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Between two attempts all machines are there, but for one that is lost.
        with waiting.Waiting(self._awaited, quiet=2 if self._round is None else 8):
            super()._rendezvous(worker_group)
        self._settle()

    def _awaited(self) -> str:
        """What is said while machines are missing."""
        meeting, arrived = self._handler.meeting, self._handler.arrived()
        refused = meeting.refused()
        why = f"{self._reason.text}; " if self._reason else f"refused: {refused}; " if refused else ""
        return why + waiting.line(arrived, meeting.wanted, meeting.left, self._handler.missing())

    def _settle(self) -> None:
        """Say once who met or why the processes start again; torch's count becomes the one all machines share."""
        meeting, cards = self._handler.meeting, self._handler.cards
        why = None if self._round is None else self._budget.reason(self._round)
        if why:
            console.note(f"restart {self._budget.spent} of {self._budget.most}: {why.text}")
        elif not meeting.alone:
            machines = ", ".join(f"{card.name} with {card.nproc}" for card in cards)
            what = "met" if self._round is None else "changed, and all processes start again"
            console.note(f"{len(cards)} machines {what} at {meeting.endpoint}: {machines}")
        self._round, self._reason = self._handler.round, None
        self._remaining_restarts = self._budget.left

    @override
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._reason and self._round is not None:
            self._budget.spend(self._round, self._reason)
        self._handler.meeting.again()
        super()._restart_workers(worker_group)

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.failures:
            self._reason = of_failures(result.failures)
        elif result.state is WorkerState.HEALTHY and not self._handler.meeting.alone:
            return self._with_the_others(result)
        return result

    def _with_the_others(self, result: RunResult) -> RunResult:
        """What becomes of healthy processes when another machine is lost, or ended the run."""
        if self._handler.is_closed() and (why := self._budget.ended()):
            raise AccelError(f"the run ended on another machine: {why}")
        lost = self._handler.lost()
        if not lost:
            return result
        names = " and ".join(card.name for card in lost)
        text = f"{names} has not been heard of: its launcher ended, the machine is down, or the link is cut"
        if not self._remaining_restarts:
            self._budget.end(text)
            raise AccelError(text)
        self._reason = Reason(False, time.time(), text)
        return RunResult(state=WorkerState.UNHEALTHY)

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # torch's own count of restarts differs between machines, and leaves out changes of membership.
        self._attempt += 1
        envs = {worker.local_rank: self._env(worker) for worker in worker_group.workers}
        self._pcontext = Processes(worker_group.spec, envs, shutdown_timeout=self._shutdown_timeout)
        self._pcontext.start()
        return self._pcontext.pids()

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
            quiet.LOG_LEVEL: quiet.THEIRS,
            env.RANK_FOLDER: str(folder.path),
        }

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        # torch's own default would overrule the profile where a failure, and no signal, ends the others.
        if self._pcontext:
            self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
