"""The elastic agent of one node: it starts, watches, restarts and ends the processes of a run."""

# ruff: noqa: E402 - torch must be imported by `import_torch`
from __future__ import annotations

from accel_cli.runner.forkserver import import_torch

import_torch(quiet=True)

# isort: split
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from typing_extensions import override

from accel_cli import console
from accel_cli.errors import AccelError, RunEndedError, StalledError, UsageError
from accel_cli.planning.plan import select_ranks
from accel_cli.runner import failures, rendezvous, stalls
from accel_cli.runner.bootstrap import RendezvousProgress
from accel_cli.runner.context import RunContext
from accel_cli.runner.failures import Cause, Failure, FailureExchange
from accel_cli.runner.guard import send_signal
from accel_cli.runner.hang_report import HangExchange, HangRecord
from accel_cli.runner.output import RankOutputs
from accel_cli.runner.preparations import find_node_check
from accel_cli.runner.processes import OomKillCounter, ReplicaWatch, WorkerProcesses
from accel_cli.runner.rendezvous import NodeRendezvous, RestartBudget, RestartReason, SingleNodeRendezvous
from accel_cli.runner.stalls import (
    EarlyExit,
    ExitWatch,
    RankObserver,
    Stall,
    StallWatch,
    format_exits,
    read_exit,
)
from accel_cli.runs.goodput import measure_goodput
from accel_cli.runs.heartbeats import Beat
from accel_cli.runs.run_dir import RankFolder, format_ranks, write_reason
from accel_cli.runs.run_files import read_text
from accel_cli.runs.speed import RankSpeed, describe_global_batch, describe_slow_rank, describe_throughput
from accel_cli.worker import NOTE_FILE
from accel_runtime.environment import settings as env

__all__ = ["ElasticAgent"]


_EXIT_S = 10.0
"""Seconds that a process has to exit after its failure, before the failure is printed while it still runs."""

# torch asks the name servers for the host's full name with each event it records: if none answers, every step waits (torch 2.9 to 2.13).
api._get_fq_hostname = socket.gethostname  # noqa: SLF001


def _is_hidden(ranks: set[int], shown: frozenset[int], *, starts_replicas: bool) -> bool:
    """Return True if no output of these ranks is shown, since no rank or only ranks of other nodes were selected."""
    # The ranks of processes that start replicas are not those of the replicas.
    return not shown or (not (shown & ranks) and not starts_replicas)


class ElasticAgent(LocalElasticAgent):
    """The agent of one node: rendezvous, start of the processes, monitoring, restarts, and the report of a failure.

    torch's loop calls the methods that are overridden here: `_rendezvous` and `_start_workers` for each attempt,
    `_monitor_workers` every `monitor_interval` seconds, `_restart_workers` after a failure or a change of membership, and
    `_shutdown` before a restart and at the end.
    """

    def __init__(
        self, spec: WorkerSpec, handler: SingleNodeRendezvous | NodeRendezvous, context: RunContext
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(os.devnull))
        # Not passed to the constructor: the torch that torch_xla needs has no such parameter.
        self._shutdown_timeout = context.settings.shutdown_timeout
        self._run_context = context
        self._handler = handler
        self._nodes = handler if isinstance(handler, NodeRendezvous) else None
        self._bootstrap = handler.bootstrap
        node_check = context.settings.node_check
        self._node_check = (
            find_node_check(node_check)(context, self._bootstrap, self._nodes) if node_check else None
        )
        self._budget = RestartBudget(self._bootstrap, spec.max_restarts)
        self._is_silent = False
        """True if no rank of this node is shown: none at all by choice, or those of other nodes."""
        self._restart_reason: RestartReason | None = None
        self._server = context.server
        self._round: int | None = None
        self._oom_kills = OomKillCounter()
        self._outputs: RankOutputs | None = None
        self._exchange: FailureExchange | None = None
        self._stall_watch: StallWatch | None = None
        self._hangs = HangExchange(self._bootstrap, 0, (), self._read_hang, self._describe_activity)
        self._has_finished = False
        """True once all ranks of this node have ended with exit code 0, while those of other nodes run."""
        self._exits: dict[int, EarlyExit] = {}
        """The ranks of this node that have exited with code 0 in this attempt."""
        self._exit_watch: ExitWatch | None = None
        self._follows_stall = False
        """True if the processes were started again because of a stall."""
        self._speeds: dict[int, RankSpeed] = {}
        """The speeds of the ranks of all nodes, once all have succeeded; empty on a single node."""
        self._replica_watch: ReplicaWatch | None = None
        self._awaits_description = not context.is_quiet
        # Unlike torch's number of restarts, it is the same on all nodes and counts changes of membership.
        self._attempt, self._started = -1, time.monotonic()
        self._noted_attempt = -1
        # The first node's value becomes that of all nodes.
        launch_id = uuid.uuid4().hex[:12]
        key = self._bootstrap.get_key("launch")
        self._launch_id = self._bootstrap.store.compare_set(key, "", launch_id).decode("ascii")

    def run_to_end(self) -> int:
        """Run until the run ends, and return the exit code."""
        nodes = self._nodes
        try:
            result = self.run()
        except RendezvousTimeoutError:
            assert nodes
            raise AccelError(nodes.format_missing_nodes()) from None
        except RendezvousClosedError:
            if reason := self._bootstrap.get_value("ended"):
                raise RunEndedError(f"the run ended on another machine: {reason}") from None
            run_id, endpoint = self._handler.get_run_id(), self._bootstrap.endpoint
            raise RunEndedError(f"run {run_id!r} at {endpoint} has already finished") from None
        except (RendezvousError, DistError):
            lost = self._bootstrap.format_lost_store()
            if self._round is not None:
                raise RunEndedError(lost) from None
            if nodes and nodes.is_spare:
                console.note(f"this machine was a spare and was not needed: the run has ended, or {lost}")
                return 0
            assert nodes
            raise AccelError(f"{lost}; {nodes.format_missing_nodes()}") from None
        self._run_context.signals.stop_raising()
        if result is None:
            console.note("the run has ended; this machine was a spare and was not needed")
            return 0
        code = self._report(result.failures) if result.failures else 0
        with suppress(RendezvousError, DistError):  # the store is lost, which was reported
            if self._restart_reason:
                self._bootstrap.set_value("ended", self._restart_reason.text)
            if self._exchange:
                self._exchange.wait_until_read()
            self._handler.shutdown()
        return code

    def print_end(self, code: int) -> None:
        """Print the line that closes the launch, unless no process was started."""
        if self._attempt < 0:
            return
        count = self._worker_group.spec.local_world_size
        noun = "process" if count == 1 else "processes"
        watch = self._replica_watch
        if watch and len(watch.folders) > 1:
            count, noun = len(watch.folders), "replicas"
        processes = f"{count} {noun}{' on this machine' if self._nodes else ''}"
        self._end_line()
        context = self._run_context
        speeds = self._speeds or self._measure_speeds()
        if slow := describe_slow_rank(speeds):
            console.note(slow)
        world_size = watch.world_size if watch else self._worker_group.workers[0].world_size
        throughput = describe_throughput(speeds, world_size)
        parts = [
            context.recorder.format_end(processes, code),
            throughput,
            self._describe_goodput(code),
            f"logs: {console.abbreviate_home(str(context.folder.path))}",
        ]
        console.note("; ".join(part for part in parts if part))

    def _describe_goodput(self, code: int) -> str:
        """Return the goodput of the run, if this node knows its checkpoints; empty for a short one."""
        context = self._run_context
        if not context.progress_sinks.is_leading:
            return ""
        started = context.folder.record.get("started")
        goodput = measure_goodput(context.folder, started, time.time(), is_kept=code == 0)
        return goodput.format_end() if goodput else ""

    def note(self, text: str) -> None:
        """Print a line about the run, below the output of the ranks so far."""
        self._end_line()
        console.note(text)

    def _measure_speeds(self) -> dict[int, RankSpeed]:
        """Return the speed of the ranks of this node over the last attempt."""
        folders = self._run_context.folder.list_ranks(self._attempt)
        beats = {rank: Beat.read(folder.beat) for rank, folder in folders.items()}
        host = self._bootstrap.node.host
        speeds = {rank: RankSpeed.measure(beat, 0, host=host) for rank, beat in beats.items() if beat}
        return {rank: speed for rank, speed in speeds.items() if speed}

    # Rendezvous

    @override
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meet(worker_group)
        while self._node_check and self._node_check.is_needed():
            if self._node_check.check(worker_group, self._handler.round, self._build_environment):
                return
            self._bootstrap.reset_deadline()
            self._meet(worker_group)

    def _meet(self, worker_group: WorkerGroup) -> None:
        """Wait for the other nodes, and assign the ranks."""
        # Before a restart all nodes are present, so that only a lost one is worth a line.
        progress = RendezvousProgress(self._format_progress, quiet=2 if self._round is None else 8)
        nodes_before = self._nodes.nodes if self._nodes else ()
        with progress if self._nodes else nullcontext():
            super()._rendezvous(worker_group)
        left = self._nodes.describe_left(nodes_before) if self._nodes else ""
        self._report_round(left, is_first_node=worker_group.group_rank == 0)
        if self._round is None:
            self._bootstrap.mark_started()
        elif reason := self._budget.get_reason(self._round):
            self._follows_stall = reason.is_stall
        self._round, self._restart_reason = self._handler.round, None
        nodes = self._nodes.nodes if self._nodes else ()
        self._hangs = HangExchange(
            self._bootstrap, self._round, nodes, self._read_hang, self._describe_activity
        )
        self._remaining_restarts = self._budget.remaining

    def _format_progress(self) -> str:
        assert self._nodes is not None
        if self._nodes.is_spare:
            return f"waiting as a spare: the run has all its machines ({self._nodes.format_participants()})"
        bootstrap = self._bootstrap
        reason = ""
        if self._restart_reason:
            reason = f"{self._restart_reason.text}; "
        elif refusal := bootstrap.get_value("refused"):
            reason = f"refused: {refusal}; "
        return reason + rendezvous.format_arrivals(
            self._nodes.list_arrived(),
            bootstrap.min_nodes,
            bootstrap.max_nodes,
            bootstrap.remaining_s,
            self._nodes.list_missing(),
        )

    def _report_round(self, left: str, *, is_first_node: bool) -> None:
        """Record why the processes restart, and print it, or which nodes have joined.

        Args:
            left: The nodes that have left since the last round, with the reason.
            is_first_node: True on one of the nodes.
        """
        reason = None if self._round is None else self._budget.get_reason(self._round)
        text = reason.text if reason else left or "machines joined or left"
        # The processes that lost a connection fail before a machine counts as lost.
        text += f"; {left}" if reason and left and left not in text else ""
        self._end_line()
        if reason:
            console.note(f"restart {self._budget.used} of {self._budget.max_restarts}: {text}")
        elif self._nodes and (is_first_node or not self._run_context.is_quiet):
            nodes = self._nodes.nodes
            names = ", ".join(f"{node.name} with {node.nproc}" for node in nodes)
            change = "" if self._attempt < 0 else f"restarting all processes, since {text}: "
            count = rendezvous.count_machines(len(nodes))
            console.note(f"{change}{count} joined at {self._bootstrap.endpoint}: {names}")
        if self._attempt >= 0:
            self._run_context.recorder.record("restart", attempt=self._attempt + 1, reason=text)

    # Start

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        context, workers = self._run_context, worker_group.workers
        self._open_progress_sinks(is_first_node=worker_group.group_rank == 0)
        self._attempt, self._started, self._has_finished = self._attempt + 1, time.monotonic(), False
        shown = select_ranks(context.settings.ranks, workers[0].world_size)
        self._outputs = RankOutputs(
            context.log_warning,
            prefixed=len(shown) > 1,
            coloured=console.use_color(),
        )
        if context.settings.starts_replicas:
            attempt = context.folder.get_attempt(self._attempt)
            self._replica_watch = ReplicaWatch(attempt, self._outputs, context.settings.ranks)
        envs = {worker.local_rank: self._prepare_rank(worker, shown) for worker in workers}
        with context.signals.defer():
            processes = self._pcontext = WorkerProcesses(
                worker_group.spec,
                envs,
                server=self._server,
                orphans=context.orphans,
                settings=context.settings,
                on_failure=self._explain_timeout,
            )
            self._outputs.start()
            signal.signal(signal.SIGWINCH, self._resize)
            processes.start()
            context.signals.workers = processes.leaders
            context.guard.watch(processes.pids().values())
        for worker in workers:
            with self._run_context.log_warning.catch_errors():
                self._get_folder(worker).pid.write_text(str(processes.pids()[worker.local_rank]))
        ranks = {worker.global_rank for worker in workers}
        if not context.settings.starts_replicas:
            self._record_start(workers[0].world_size, ranks)
        folders = context.folder.list_ranks(self._attempt)
        self._watch_stalls(folders)
        self._exits, self._exit_watch = {}, ExitWatch(folders, self._find_exits)
        self._is_silent = _is_hidden(ranks, shown, starts_replicas=context.settings.starts_replicas)
        if self._attempt == 0 and self._is_silent and shown:
            folder = console.abbreviate_home(str(context.folder.path))
            console.note(
                f"the output of {format_ranks(ranks)} on {self._bootstrap.node.host} is in {folder}; show it with --ranks all"
            )
        return processes.pids()

    def _open_progress_sinks(self, *, is_first_node: bool) -> None:
        """Open the progress sinks of the run on its first node; raise UsageError, which ends the run on all nodes, if one refuses."""
        try:
            self._run_context.progress_sinks.lead(is_leading=is_first_node)
        except UsageError as error:
            self._bootstrap.set_value("ended", str(error))
            raise

    def _record_start(self, world_size: int, ranks: Iterable[int]) -> None:
        """Record the start of ranks on this node; replicas may start one after the other."""
        context = self._run_context
        context.recorder.record("start", attempt=self._attempt, world_size=world_size, ranks=sorted(ranks))
        with context.log_warning.catch_errors():
            nodes = self._worker_group.group_world_size
            context.folder.update({"world_size": world_size, "nodes": nodes})

    def _prepare_rank(self, worker: Worker, shown: frozenset[int]) -> dict[str, str]:
        """Create the folder of a rank, and return its environment."""
        folder = self._get_folder(worker)
        assert self._outputs is not None
        is_shown = worker.global_rank in shown and not self._run_context.settings.starts_replicas
        # Without a folder, a process writes to the launcher's streams.
        with self._run_context.log_warning.catch_errors():
            folder.path.mkdir(parents=True)
            self._outputs.route(folder, worker.global_rank, shown=is_shown)
        return self._build_environment(worker, folder)

    def _build_environment(self, worker: Worker, folder: RankFolder) -> dict[str, str]:
        """Return torchrun's variables and accel's for a rank."""
        group, spec = self._worker_group, self._worker_group.spec
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
            env.LAUNCH: self._launch_id,
        }

    def _get_folder(self, worker: Worker) -> RankFolder:
        """Return the folder of a process: of a rank, or of the process that starts the replicas of this node."""
        folder = self._run_context.folder
        if self._run_context.settings.starts_replicas:
            return folder.get_host(self._attempt)
        return folder.get_rank(self._attempt, worker.global_rank)

    def _resize(self, *_: object) -> None:
        """Pass a new size of the screen on to the terminals of the ranks."""
        if self._outputs and self._pcontext:
            self._outputs.resize()
            send_signal(self._pcontext.pids().values(), signal.SIGWINCH)

    # Monitoring and restarts

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = self._run_context
        if self._replica_watch and self._replica_watch.check():
            self._record_start(self._replica_watch.world_size, self._replica_watch.folders)
            self._watch_stalls(self._replica_watch.folders)
        self._report_global_batch()
        context.guard.check()
        context.guard.watch(context.orphans.update(context.signals.workers))
        result: RunResult = super()._monitor_workers(worker_group)
        self._update_exits()
        self._print_notes()
        if result.failures:
            self._restart_reason = self._build_restart_reason(result)
        elif result.state is WorkerState.SUCCEEDED:
            self._has_finished = True
            return self._await_nodes(self._nodes, result) if self._nodes else result
        elif result.state is WorkerState.HEALTHY:
            self._report_lingering(_EXIT_S)
            if self._stall_watch and (stall := self._stall_watch.check()):
                result = self._handle_stall(stall, result)
            if self._exit_watch:
                self._exit_watch.check()
            context.recorder.sample_memory(self._attempt)
            if context.silence_hint and self._outputs and not self._is_silent:
                context.silence_hint.check((context.recorder.last_event, self._outputs.last_output))
            if self._nodes and result.state is WorkerState.HEALTHY:
                if self._hangs.answer() and self._stall_watch:
                    self._stall_watch.skip_time()
                return self._check_nodes(self._nodes, result)
        return result

    def _report_global_batch(self) -> None:
        """Print once the global batch, if it is not that of the script, when the main process has described the run."""
        if not self._awaits_description:
            return
        description = self._run_context.folder.get_rank(self._attempt, 0).description
        if description.exists():
            self._awaits_description = False
            if batch := describe_global_batch(description):
                self._end_line()
                console.note(batch)

    def _watch_stalls(self, folders: Mapping[int, RankFolder]) -> None:
        settings = self._run_context.settings
        if settings.stall_timeout:
            has_other_nodes = bool(self._nodes and len(self._nodes.nodes) > 1)
            self._stall_watch = StallWatch(
                RankObserver(folders, self._hangs.collect, has_other_nodes=has_other_nodes),
                settings.stall_timeout,
                settings.startup_timeout,
                self._run_context.recorder.record,
            )

    def _update_exits(self) -> None:
        """Add the ranks of this node that have exited with code 0, for all nodes."""
        if self._run_context.settings.starts_replicas or not isinstance(self._pcontext, WorkerProcesses):
            return
        new = {local: self._worker_group.workers[local] for local in self._pcontext.list_exited()}
        new = {local: worker for local, worker in new.items() if worker.global_rank not in self._exits}
        for local, worker in new.items():
            pid = self._pcontext.pids()[local]
            exit_ = read_exit(self._get_folder(worker), worker.global_rank, self._bootstrap.node.host, pid)
            self._exits[exit_.rank] = replace(exit_, time=exit_.time - self._started)
        if new and self._nodes:
            with suppress(RendezvousError, DistError):
                text = json.dumps([asdict(each) for each in self._exits.values()])
                self._bootstrap.set_value(f"round/{self._round}/exits/{self._bootstrap.node.id}", text)

    def _find_exits(self) -> list[EarlyExit]:
        """Return the ranks of all nodes that have exited with code 0."""
        exits = [*self._exits.values()]
        with suppress(RendezvousError, DistError):  # the store is lost
            for node in self._nodes.nodes if self._nodes else ():
                if node.id != self._bootstrap.node.id:
                    text = self._bootstrap.get_value(f"round/{self._round}/exits/{node.id}")
                    exits += [EarlyExit(**fields) for fields in json.loads(text or "[]")]
        return exits

    def _read_hang(self) -> HangRecord:
        return stalls.read_hang_record(self._run_context.folder.list_ranks(self._attempt))

    def _describe_activity(self) -> str:
        """Describe for other nodes what the ranks of this one do that may be work."""
        if self._has_finished:
            return "all ranks finished with exit code 0"
        return self._stall_watch.describe_activity() if self._stall_watch else ""

    def _handle_stall(self, stall: Stall, healthy: RunResult) -> RunResult:
        """Return an unhealthy result, which restarts the processes of all nodes, if that is the action and may help.

        Each node decides by its own processes. A collective that hangs stalls those of all nodes, and the first node to restart
        uses one restart for all; one that fails ends the run on all, also if another has decided to restart.

        Raises:
            StalledError: The run ends.
        """
        action = self._run_context.settings.stall_action
        if action == "report":
            return healthy
        if not stall.is_seen and "program" in self._worker_group.spec.args[:2]:
            # It may train all the same: steps are seen in Python only.
            console.note(
                f"launcher.stall_action {action} has no effect: steps of a program (--no-python) are not seen"
            )
            return healthy
        text = f"no progress for {stall.seconds:.0f} s on {self._bootstrap.node.host}"
        restarts = self._remaining_restarts, self._budget.max_restarts
        why = stalls.explain_no_restart(action, stall, restarts, follows_stall=self._follows_stall)
        if not why:
            self._restart_reason = RestartReason(False, time.monotonic() - self._started, text, is_stall=True)
            return RunResult(state=WorkerState.UNHEALTHY)
        self._bootstrap.set_value("ended", text)
        raise StalledError(
            f"The run has stalled: {text}. It is not restarted: {why}. The stacks are shown above."
        )

    def _explain_timeout(self, codes: Mapping[int, int]) -> None:
        """Describe the collective in which a rank has timed out, while the ranks outside of it still run.

        Args:
            codes: The exit codes of the processes that have failed, by local rank.
        """
        assert self._pcontext
        workers = {worker.local_rank: worker for worker in self._worker_group.workers}
        pids = self._pcontext.pids()
        first = failures.find_root_failure(
            self._read_failure(workers[local_rank], pids[local_rank], code)
            for local_rank, code in codes.items()
        )
        if failures.is_unexplained_timeout(first):
            folders = self._run_context.folder.list_ranks(self._attempt)
            if hang := stalls.describe_collectives(folders, first.rank, self._hangs.collect):
                self._end_line()
                console.note(f"rank {first.rank} has timed out:\n{hang}")

    def _build_restart_reason(self, result: RunResult) -> RestartReason:
        first = failures.find_root_failure(self._read_failures(result.failures))
        if self._remaining_restarts:  # the last failure is recorded with its report
            self._record_failure(first)
            if self._server and failures.names_fork(first):
                self._server = None
                console.note(
                    f"processes are started by exec: rank {first.rank} cannot use its device in a fork"
                )
        is_consequence = first.cause is not Cause.PRIMARY and not first.early_exits
        departed = self._describe_departed({}) if is_consequence else ""
        text = departed or failures.format_one_line(first)
        return RestartReason(is_consequence and not departed, first.time, text)

    def _await_nodes(self, nodes: NodeRendezvous, succeeded: RunResult) -> RunResult:
        """Return a healthy result while processes of other nodes run: if one of them fails, all processes restart.

        torch waits in a barrier instead, for 300 seconds, in which a node whose processes have ended joins no restart.
        """
        assert self._round is not None
        speeds = {rank: speed.to_json() for rank, speed in self._measure_speeds().items()}
        if nodes.publish_success(self._round, json.dumps(speeds)):
            with suppress(RendezvousError, DistError):  # the first node may have ended, with the store
                parts = [json.loads(text or "{}") for text in nodes.read_speeds(self._round)]
                self._speeds = {
                    int(rank): RankSpeed.from_json(data) for part in parts for rank, data in part.items()
                }
            return succeeded
        self._hangs.answer()
        # Not only once the rendezvous is closed: the node that serves the store ends at once after that.
        self._raise_if_ended()
        return self._check_nodes(nodes, RunResult(state=WorkerState.HEALTHY))

    def _check_nodes(self, nodes: NodeRendezvous, healthy: RunResult) -> RunResult:
        """Return an unhealthy result, which restarts the processes, if another node is lost and restarts remain."""
        if nodes.is_closed():
            self._raise_if_ended()
        lost = nodes.describe_lost()
        if not lost:
            return healthy
        if not self._remaining_restarts:
            self._bootstrap.set_value("ended", lost)
            raise AccelError(lost)
        self._restart_reason = RestartReason(False, time.monotonic() - self._started, lost)
        return RunResult(state=WorkerState.UNHEALTHY)

    def _raise_if_ended(self) -> None:
        if reason := self._bootstrap.get_value("ended"):
            raise RunEndedError(f"the run ended on another machine: {reason}")

    @override
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._restart_reason and self._round is not None:
            self._budget.use(self._round, self._restart_reason)
        self._bootstrap.reset_deadline()
        super()._restart_workers(worker_group)

    # Shutdown

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        """End the processes of this attempt, and complete their logs; see `shutdown.py` for the order of events."""
        signals = self._run_context.signals
        with signals.end_processes():
            if self._nodes and self._round is not None and signals.received:
                # First, so that nodes that lose these processes know why.
                name = signals.received.name
                self._bootstrap.publish_departure(f"its launcher received {name} and ended its processes")
            signals.announce()
            if signals.received:
                self._report_lingering(0)
            if self._pcontext:
                # Not torch's default timeout, which older versions pass if a failure ends the other ranks.
                self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
            if self._outputs:
                self._outputs.drain()
            for folder in self._run_context.folder.list_ranks(max(self._attempt, 0)).values():
                # A reader of all files would wait for these.
                for pipe in (folder.stack_request, folder.trace_request):
                    with suppress(OSError):
                        pipe.unlink(missing_ok=True)

    # Report

    def _report_lingering(self, seconds: float) -> None:
        """Print failures of processes that still run after `seconds`, such as those with other threads."""
        if not (isinstance(self._pcontext, WorkerProcesses) and self._outputs):
            return
        workers = {worker.local_rank: worker for worker in self._worker_group.workers}
        for local_rank in self._pcontext.find_lingering(seconds):
            worker = workers[local_rank]
            failure = self._read_failure(worker, self._pcontext.pids()[local_rank], exitcode=1)
            self._outputs.complete_log(self._get_folder(worker))
            self._end_line()
            failures.print_lingering(failure, world_size=failure.count_ranks(worker.world_size))

    def _report(self, failed: Mapping[int, ProcessFailure]) -> int:
        """Print the first failure on all nodes, and return its exit code."""
        context, group = self._run_context, self._worker_group
        local = self._read_failures(failed)
        local_first = failures.find_root_failure(local)
        is_consequence = local_first.cause is not Cause.PRIMARY
        heartbeats: dict[str, object] = {}
        if self._nodes and is_consequence:
            with suppress(RendezvousError, DistError):
                heartbeats = self._nodes.read_heartbeats()
        self._exchange = FailureExchange(
            group.store,
            local_first,
            node_rank=int(group.group_rank or 0),
            num_nodes=int(group.group_world_size or 1),
        )
        if not is_consequence:
            # Before the exchange: other nodes may end this one meanwhile.
            write_reason(context.settings.failure_file, failures.format_reason(local_first))
        first = self._exchange.find_root_failure()
        if first is local_first:
            write_reason(context.settings.failure_file, failures.format_reason(first))
        self._record_failure(first)
        self._end_line()
        world_size = first.count_ranks(group.workers[0].world_size)
        shown = first.rank in select_ranks(context.settings.ranks, world_size)
        failures.print_report(first, local, world_size=world_size, shown=shown)
        # If every process lost another one, a node has left the run, and the store has the reason.
        has_lost_node = is_consequence and first.cause is not Cause.PRIMARY
        if has_lost_node and (departed := self._describe_departed(heartbeats)):
            console.error(departed)
        return first.code

    def _record_failure(self, failure: Failure) -> None:
        self._run_context.recorder.record(
            "failure",
            attempt=self._attempt,
            rank=failure.rank,
            host=failure.host,
            cause=failures.describe_end(failure),
            frames=failures.format_stack(failure),
        )

    def _read_failures(self, failed: Mapping[int, ProcessFailure]) -> list[Failure]:
        """Read the records of the failed processes of this node."""
        assert isinstance(self._pcontext, WorkerProcesses)
        workers = {worker.local_rank: worker for worker in self._worker_group.workers}
        results = []
        for process in failed.values():
            failure = self._read_failure(workers[process.local_rank], process.pid, process.exitcode)
            failure = replace(failure, stopped=process.local_rank in self._pcontext.stopped)
            is_killed = self._oom_kills.has_killed({failure.pid, *failure.lost_workers})
            exits = format_exits(self._find_exits()) if failure.is_consequence else ""
            results.append(replace(failure, out_of_memory=is_killed, early_exits=exits))
        return results

    def _read_failure(self, worker: Worker, pid: int, exitcode: int) -> Failure:
        """Read the record of one process."""
        return failures.read_failure(
            self._get_folder(worker),
            Failure(worker.global_rank, self._bootstrap.node.host, pid, exitcode, time.monotonic()),
            started=self._started,
            is_replica_host=self._run_context.settings.starts_replicas,
        )

    def _describe_departed(self, heartbeats: Mapping[str, object]) -> str:
        """Return the nodes that have left the run, with the reason; empty if no node has left."""
        try:
            return self._nodes.describe_departed(heartbeats) if self._nodes else ""
        except (RendezvousError, DistError):
            return self._bootstrap.format_lost_store()

    def _print_notes(self) -> None:
        """Print once the note that a rank of this attempt has left, and the lines of progress sinks."""
        if self._attempt > self._noted_attempt and (
            text := read_text(self._run_context.folder.get_attempt(self._attempt) / NOTE_FILE)
        ):
            self._noted_attempt = self._attempt
            self.note(text)
        for line in self._run_context.progress_sinks.take_lines():
            self.note(line)

    def _end_line(self) -> None:
        if self._outputs:
            self._outputs.end_line()
