"""This machine's processes: what they are told, where their output goes, how they end, and what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from typing_extensions import override

from accel_cli import console
from accel_cli.runner import failures, rank_filter, run_dir, torch_log_level
from accel_cli.runner.failures import Failure, ProcessExit, format_for_file, print_report
from accel_cli.runner.forkserver_process import ForkServer, ForkServerError
from accel_cli.runner.out_of_memory import OomKillCounter
from accel_cli.runner.output import LogWarning, RankOutputs
from accel_cli.runner.replica_folder import COUNT
from accel_cli.runner.run_dir import RankFolder, RunFolder
from accel_cli.runner.shutdown import GuardProcess, Orphans, SessionLeader, SignalHandlers, end_processes
from accel_cli.runner.stalls import StallWatch
from accel_runtime import env

__all__ = ["ForkedProcesses", "NodeAgent", "ReplicaWatch", "RunContext", "WorkerProcesses"]


# torch asks the name servers for this machine's full name with each event it records, and keeps no record:
# where none answers, every step of the agent would wait for them.
api._get_fq_hostname = socket.gethostname  # noqa: SLF001


@dataclass(frozen=True)
class RunContext:
    """What the processes of a run have around them."""

    folder: RunFolder
    """Of the run."""
    log_warning: LogWarning
    """Given once, by whatever finds that the logs cannot be written."""
    signals: SignalHandlers
    """The handlers of the launcher; they are told who runs."""
    guard: GuardProcess
    """Told too."""
    orphans: Orphans
    """What processes have started in sessions of their own."""
    server: ForkServer | None
    """What forks the processes; without one each is a command of its own."""
    shown: int | str
    """Whose output is on the screen."""
    shutdown_timeout: int
    """Seconds the processes have when they are asked to end."""
    stall_timeout: int | None
    """Seconds without progress until it is said where they are; None does not watch."""
    host: str
    """What this machine is called."""
    agent: Mapping[str, Any]
    """What the plan tells the agent, beside this."""
    replicas: bool = False
    """Whether a process starts the ranks of its machine itself: there is one on each machine then."""


class NodeAgent(LocalElasticAgent):
    """The processes of this machine, attempt by attempt."""

    def __init__(self, spec: WorkerSpec, room: RunContext) -> None:
        super().__init__(spec, DefaultLogsSpecs(os.devnull))
        # Not an argument: the torch that torch_xla needs knows none.
        self._shutdown_timeout = room.shutdown_timeout
        self._room = room
        self._kills = OomKillCounter()
        self._output: RankOutputs | None = None
        self._told: failures.FailureExchange | None = None
        self._culprit: Failure | None = None
        self._watch: StallWatch | None = None
        self._arrivals: ReplicaWatch | None = None
        # torch's own count of restarts differs between machines, and leaves out changes of membership.
        self._attempt = -1
        self._launch = uuid.uuid4().hex[:12]

    @property
    def world_size(self) -> int:
        """The number of processes on all machines, in the attempt that runs or ran last."""
        return int(self._worker_group.workers[0].world_size)

    def leave(self) -> None:
        """Close the meeting for good, once this machine is done."""
        if self._told:
            self._told.linger()
        self._worker_group.spec.rdzv_handler.shutdown()

    def report(self, failed: Mapping[int, ProcessFailure]) -> int:
        """Say what failed first, on whichever machine, and return the exit code that belongs to it."""
        here = self._failures(failed)
        group = self._worker_group
        machine, machines = int(group.group_rank or 0), int(group.group_world_size or 1)
        mine = failures.find_first(here)
        self._told = failures.FailureExchange(group.store, mine, machine=machine, machines=machines)
        # At once: where the others hear of it, this machine may be ended before they have answered.
        if mine.cause is failures.Cause.OWN:
            run_dir.write_reason(self._room.agent, format_for_file(mine))
        culprit = self._culprit = self._told.first()
        if culprit is mine:
            run_dir.write_reason(self._room.agent, format_for_file(mine))
        self._say_on_a_new_line()
        processes = self.world_size if culprit.processes is None else culprit.processes
        shown = culprit.rank in rank_filter.select_ranks(self._room.shown, processes)
        print_report(culprit, here, processes=processes, shown=shown)
        return culprit.code

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        self._output = RankOutputs(
            self._room.log_warning, prefixed=len(self._on_screen) > 1, coloured=console.coloured()
        )
        if self._room.replicas:
            self._arrivals = ReplicaWatch(
                self._room.folder.attempt(self._attempt), self._output, self._room.shown
            )
        envs = {worker.local_rank: self._env(worker) for worker in worker_group.workers}
        with self._room.signals.held():
            processes = self._pcontext = self._processes(worker_group.spec, envs)
            self._output.start()
            signal.signal(signal.SIGWINCH, self._resize)
            processes.start()
            self._note(worker_group.workers, processes)
        self._say_who_is_hidden([worker.global_rank for worker in worker_group.workers])
        return processes.pids()

    def _processes(self, spec: WorkerSpec, envs: dict[int, dict[str, str]]) -> WorkerProcesses:
        if self._room.server:
            return ForkedProcesses(
                spec,
                envs,
                self._room.orphans,
                server=self._room.server,
                shutdown_timeout=self._shutdown_timeout,
            )
        return WorkerProcesses(spec, envs, self._room.orphans, shutdown_timeout=self._shutdown_timeout)

    def _note(self, workers: list[Worker], processes: WorkerProcesses) -> None:
        """Tell who may have to find the processes."""
        folder = self._room.folder
        self._room.signals.workers = processes.started
        self._room.guard.watch(processes.pids().values())
        for worker in workers:
            pid = processes.pids()[worker.local_rank]
            with self._logging():
                self._folder(worker).pid.write_text(str(pid))
        if self._room.stall_timeout:
            self._watch = StallWatch(folder.ranks(self._attempt), self._room.stall_timeout)

    def _say_who_is_hidden(self, here: Collection[int]) -> None:
        """On a machine whose screen would stay empty."""
        if self._room.replicas:
            return
        if self._attempt == 0 and self._on_screen and self._on_screen.isdisjoint(here):
            where = f"in {console.short(str(self._room.folder.path))}, and on the screen with --ranks all"
            console.note(f"the output of {rank_filter.format_ranks(here)} on {self._room.host} is {where}")

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._arrivals and self._arrivals.look() and self._room.stall_timeout:
            self._watch = StallWatch(self._arrivals.known, self._room.stall_timeout)
        self._room.guard.check()
        assert isinstance(self._pcontext, WorkerProcesses)
        self._room.guard.watch(self._room.orphans.update(self._pcontext.started))
        result: RunResult = super()._monitor_workers(worker_group)
        if self._watch and result.state is WorkerState.HEALTHY:
            self._watch.look()
        return result

    def _env(self, worker: Worker) -> dict[str, str]:
        """What torch.distributed expects a process to find, as `torchrun` sets it, and the rank's folder."""
        group, spec = self._worker_group, self._worker_group.spec
        folder = self._folder(worker)
        assert self._output is not None
        shown = worker.global_rank in self._on_screen and not self._room.replicas
        with self._logging():  # a process without a folder keeps the launcher's own screen
            folder.path.mkdir(parents=True)
            self._output.route(folder, worker.global_rank, shown=shown)
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
            torch_log_level.LOG_LEVEL: torch_log_level.WORKER_LOG_LEVEL,
            env.RANK_FOLDER: str(folder.path),
            env.LAUNCH: self._launch,
        }

    def _folder(self, worker: Worker) -> RankFolder:
        """Of one process; what starts the ranks of its machine is none of them."""
        if self._room.replicas:
            return self._room.folder.host(self._attempt)
        return self._room.folder.rank(self._attempt, worker.global_rank)

    @property
    def _on_screen(self) -> frozenset[int]:
        """The ranks that are shown, on whichever machine."""
        return rank_filter.select_ranks(self._room.shown, self.world_size)

    def _failures(self, failed: Mapping[int, ProcessFailure]) -> list[Failure]:
        """What is known of the failures of this machine."""
        workers = {worker.local_rank: worker for worker in self._worker_group.workers}
        seen = time.time()
        return [self._failure(workers[failure.local_rank], failure, seen) for failure in failed.values()]

    def _failure(self, worker: Worker, failure: ProcessFailure, seen: float) -> Failure:
        assert isinstance(self._pcontext, WorkerProcesses)
        folder, known = self._folder(worker), ProcessExit(worker.global_rank, failure.pid, failure.exitcode)
        if self._room.replicas:
            known = failures.resolve_replica(folder, known)
            folder = self._room.folder.rank(self._attempt, known.rank) if known.processes else folder
        stopped = failure.local_rank in self._pcontext.stopped
        found = failures.read_failure(folder, seen, **known._asdict(), host=self._room.host, stopped=stopped)
        killed = known.pid if known.exitcode == -signal.SIGKILL else found.killed_worker
        return replace(found, memory=killed is not None and self._kills.of(killed))

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
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        self._room.signals.announce()
        # torch's own default would overrule the profile where a failure, and no signal, ends the others.
        if self._pcontext:
            self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
        if self._output:
            for folder in self._output.drain():
                with self._logging():
                    failures.complete_log(folder)

    @contextmanager
    def _logging(self) -> Iterator[None]:
        """Warn once, and continue, if the folder of the run cannot be written."""
        try:
            yield
        except OSError as error:
            self._room.log_warning.give(str(error))


_LOOK_S = 0.02
"""Seconds between two looks at a process that is to end."""


class WorkerProcesses(SubprocessContext):
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
    def started(self) -> Sequence[SessionLeader]:
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
        if late := end_processes(self.started, death_sig, timeout, self._orphans):
            pids = ", ".join(map(str, late))
            console.note(f"process {pids} did not end within {timeout} s, and was killed")


class ForkedProcesses(WorkerProcesses):
    """One process a local rank, forked from a server that has torch loaded (`start_method: forkserver`)."""

    def __init__(
        self,
        spec: WorkerSpec,
        envs: dict[int, dict[str, str]],
        orphans: Orphans,
        *,
        server: ForkServer,
        shutdown_timeout: int,
    ) -> None:
        super().__init__(spec, envs, orphans, shutdown_timeout=shutdown_timeout)
        self._server = server

    @override
    def _start(self) -> None:
        environs = [{**os.environ, **self.envs[rank]} for rank in range(self.nprocs)]
        try:
            pids = self._server.fork((str(self.entrypoint), *self.args[0]), environs)
        except ForkServerError as error:
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


class ReplicaWatch:
    """The replicas of one attempt, as they come.

    Args:
        attempt: The folder of the attempt.
        output: What passes on what they write.
        shown: Whose output is on the screen.
    """

    def __init__(self, attempt: Path, output: RankOutputs, shown: int | str) -> None:
        self._attempt, self._output, self._shown = attempt, output, shown
        self.known: dict[int, RankFolder] = {}
        """Those that are there, by rank."""
        self.count = 0
        """How many there are on all machines; 0 before the first has come."""

    def look(self) -> bool:
        """Say to those that are new where they print; whether there are any."""
        fresh = self._fresh()
        for rank, folder in fresh.items():
            self.count = int((folder.path / COUNT).read_text())
            shown = rank_filter.select_ranks(self._shown, self.count)
            self._output.prefixed = len(shown) > 1
            self._output.route(folder, rank, shown=rank in shown)
        self.known = dict(sorted((self.known | fresh).items()))
        return bool(fresh)

    def _fresh(self) -> dict[int, RankFolder]:
        found = {
            int(file.parent.name.partition("_")[2]): file.parent
            for file in self._attempt.glob(f"rank_*/{COUNT}")
        }
        return {rank: RankFolder(path) for rank, path in sorted(found.items()) if rank not in self.known}
