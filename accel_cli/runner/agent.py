"""Runs a torchrun plan: torch's elastic agent, inside this process. The one room that imports torch."""

from __future__ import annotations

import logging
import os
import resource
import socket
from typing import Any

from accel_cli.runner import torch_log_level as _quiet  # noqa: F401 - before torch is imported

# isort: split
import signal
import time
from collections.abc import Mapping

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from typing_extensions import override

from accel_cli import console
from accel_cli.errors import AccelError, ElsewhereError, UsageError
from accel_cli.planning import network
from accel_cli.planning.plan import Plan
from accel_cli.runner import failures, rendezvous, run_dir
from accel_cli.runner.bootstrap import BootstrapStore
from accel_cli.runner.failures import format_in_line
from accel_cli.runner.forkserver_process import ForkServer
from accel_cli.runner.output import LogWarning
from accel_cli.runner.processes import NodeAgent, RunContext
from accel_cli.runner.rendezvous import (
    SILENT,
    NodeRendezvous,
    RestartBudget,
    RestartReason,
    SingleNodeRendezvous,
)
from accel_cli.runner.shutdown import GuardProcess, Orphans, SignalHandlers

__all__ = ["ElasticAgent", "format_lost_store", "run"]


_FILES, _FILES_PER_PROCESS = 32, 8
"""Files that the launcher has open at most: its own, and those of each process."""


def run(plan: Plan, server: ForkServer | None = None) -> int:
    """Start the plan's processes on this machine, wait for them, and say what their exit code comes to.

    Args:
        plan: What is to run.
        server: What forks the processes; without one each is a command of its own.

    Returns:
        0, the code of the first process that failed, or 128 + n where signal n ended it or the launcher.

    Raises:
        AccelError: The machines did not find each other.
        UsageError: The limit on open files is too low.
    """
    _check_open_files(plan.nproc_per_node)
    # What the agent logs about a failure or a signal is said by us, once. Some of its loggers have a level.
    for name in ("torch.distributed.elastic", api.__name__):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.update(plan.env)
    with SignalHandlers(shutdown_timeout=plan.agent["shutdown_timeout"]) as signals:
        try:
            return _run_and_record(plan, signals, server)
        except SignalException as error:
            # The rendezvous stays open, so that the other machines can go on without this one.
            return 128 + int(error.sigval)
        except ElsewhereError:
            raise
        except AccelError as error:
            run_dir.write_reason(plan.agent, str(error))
            raise


def _check_open_files(processes: int) -> None:
    """Refuse a limit at which the launcher would fail, or wait for ever, in the middle of a run."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_PER_PROCESS * processes
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"the limit on open files is {limit}, and a launcher of {processes} process(es) needs {needed}. Raise it: "
            f"ulimit -n {max(1024, needed)}"
        )


def _run_and_record(plan: Plan, signals: SignalHandlers, server: ForkServer | None) -> int:
    """Run it, and leave in the run's folder how it ended."""
    folder = _create_run_folder(plan)
    warning = LogWarning(folder)
    code = 1
    try:
        with GuardProcess(folder.path) as guard:
            code = _run_agent(plan, _build_run_context(plan, warning, signals, guard, server))
    except SignalException as error:
        code = 128 + int(error.sigval)
    finally:
        signals.finish()
        try:
            folder.record({"exit_code": code})
        except OSError as error:
            warning.give(str(error))
    return code


def _build_run_context(
    plan: Plan, warning: LogWarning, signals: SignalHandlers, guard: GuardProcess, server: ForkServer | None
) -> RunContext:
    said = plan.agent
    room = RunContext(
        warning.folder,
        warning,
        signals,
        guard,
        Orphans(),
        server,
        shown=said["ranks"],
        shutdown_timeout=said["shutdown_timeout"],
        stall_timeout=said["stall_timeout"],
        host=said.get(run_dir.HOST_KEY) or socket.gethostname(),
        agent=said,
        replicas=bool(said.get("replicas")),
    )
    signals.orphans = room.orphans
    return room


def _run_agent(plan: Plan, room: RunContext) -> int:
    said = dict(plan.agent)
    meeting = _open_bootstrap_store(said, plan)
    handler = (
        SingleNodeRendezvous(meeting, said["run_id"]) if meeting.alone else NodeRendezvous.of(meeting, said)
    )
    agent = ElasticAgent(_build_worker_spec(plan, handler), room)
    try:
        result = agent.run()
    except RendezvousTimeoutError:
        raise AccelError(_format_missing_nodes(handler)) from None
    except RendezvousClosedError:
        why = agent.ended()
        raise ElsewhereError(
            f"the run ended on another machine: {why}"
            if why
            else f"the run {said['run_id']!r} at {meeting.endpoint} has finished already"
        ) from None
    except (RendezvousError, DistError):
        lost = format_lost_store(meeting)
        if agent.spare:
            console.note(f"the run ended without this machine, or {lost}")
            return 0
        if agent.met:
            raise ElsewhereError(lost) from None
        raise AccelError(f"{lost}; {_format_missing_nodes(handler)}") from None
    room.signals.finish()
    if result is None:
        console.note("the run ended without this machine: it had all the machines it asked for")
        return 0
    code = agent.report(result.failures) if result.failures else 0
    agent.leave()
    return code


def _create_run_folder(plan: Plan) -> run_dir.RunFolder:
    base = run_dir.get_log_home(os.environ, plan.agent["log_dir"])
    try:
        return run_dir.RunFolder.create(base, plan.target, {"argv": plan.argv})
    except OSError as error:
        raise UsageError(
            f"logs cannot be written to {base}: {error.strerror}; --log-dir names another folder"
        ) from None


def _open_bootstrap_store(said: dict[str, Any], plan: Plan) -> BootstrapStore:
    """The meeting place, and what processes need to know of addresses to meet as well."""
    meeting = BootstrapStore(said, plan.nproc_per_node, derived=bool(plan.derived))
    if not meeting.alone:
        _set_gloo_interface(meeting)
    return meeting


def _set_gloo_interface(meeting: BootstrapStore) -> None:
    """Tell gloo the interface, where it would tell the others an address that only this machine reaches."""
    if "GLOO_SOCKET_IFNAME" in os.environ or not network.named_wrongly():
        return
    if name := network.interface(meeting.address):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _format_missing_nodes(handler: SingleNodeRendezvous | NodeRendezvous) -> str:
    low, _ = handler.meeting.wanted
    # Whoever gives up first has left by now.
    came = [card.name for card in handler.seen] or [handler.meeting.card.name]
    missing = handler.missing()
    return (
        f"{len(came)} of {low} machines came ({', '.join(came)}) within rdzv_timeout; {low - len(came)} missing"
        f"{': ' + ', '.join(missing) if missing else ''}. Start the same command there, with the same --rdzv-endpoint "
        f"{handler.meeting.endpoint} and --rdzv-id."
    )


def _build_worker_spec(plan: Plan, handler: SingleNodeRendezvous | NodeRendezvous) -> WorkerSpec:
    """What torch's agent is told: the command of a process, how many, and where the machines meet."""
    program, *args = plan.argv
    return WorkerSpec(
        role="default_role",
        local_world_size=plan.nproc_per_node,
        entrypoint=program,
        args=tuple(args),
        rdzv_handler=handler,
        max_restarts=plan.agent["max_restarts"],
        monitor_interval=plan.agent["monitor_interval"],
        local_addr=handler.meeting.address,
    )


def format_lost_store(meeting: BootstrapStore) -> str:
    """Return the words for a store that does not answer any more."""
    return (
        f"{meeting.card.name} has lost the meeting place {meeting.endpoint}: the launcher there ended, that machine "
        "is down, or the link is cut"
    )


class ElasticAgent(NodeAgent):
    """The agent of one machine: it meets the others, starts the processes, watches them, starts them again."""

    def __init__(self, spec: WorkerSpec, room: RunContext) -> None:
        super().__init__(spec, room)
        assert isinstance(spec.rdzv_handler, SingleNodeRendezvous | NodeRendezvous)
        self._handler = spec.rdzv_handler
        self._budget = RestartBudget(self._handler.meeting, spec.max_restarts)
        self._reason: RestartReason | None = None
        self._round: int | None = None
        # What the first machine says is the name of the run on all of them.
        meeting = self._handler.meeting
        self._launch = meeting.store.compare_set(meeting.key("launch"), "", self._launch).decode()

    @property
    def met(self) -> bool:
        """Whether all machines were there once."""
        return self._round is not None

    def ended(self) -> str | None:
        """Why the run is over, if a machine said so."""
        return self._budget.ended()

    @property
    def spare(self) -> bool:
        """Whether the run has never needed this machine."""
        return not self.met and self._handler.spare

    @override
    def report(self, failed: Mapping[int, ProcessFailure]) -> int:
        follows = failures.find_first(self._failures(failed)).cause is not failures.Cause.OWN
        before = self._beats() if follows else {}
        code = super().report(failed)
        # Processes that only lost another name that one; why it is gone is known to the machines.
        culprit_follows = self._culprit and self._culprit.cause is not failures.Cause.OWN
        if follows and culprit_follows and (why := self._departed(before)):
            console.error(why)
        return code

    def _beats(self) -> dict[str, object]:
        try:
            return self._handler.beats()
        except (RendezvousError, DistError):
            return {}

    def _departed(self, before: dict[str, object]) -> str:
        """The machines that are gone, and why; empty if none is known to be."""
        try:
            return self._handler.departed(before)
        except (RendezvousError, DistError):
            return format_lost_store(self._handler.meeting)

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        # Before the processes end, so that the machines that lose them know why.
        if not self._handler.meeting.alone and self.met and (came := self._room.signals.first):
            self._handler.meeting.depart(f"its launcher got {came.name}, and ended its processes")
        super()._shutdown(death_sig, timeout)

    @override
    def leave(self) -> None:
        if self._reason:
            self._budget.end(self._reason.text)
        super().leave()

    @override
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Between two attempts all machines are there, but for one that is lost.
        with rendezvous.RendezvousProgress(self._awaited, quiet=2 if self._round is None else 8):
            super()._rendezvous(worker_group)
        self._settle()

    def _awaited(self) -> str:
        """What is said while machines are missing."""
        if self._handler.spare:
            return f"waiting: the run has all its machines ({self._handler.full()}); this one is a spare until it ends"
        meeting, arrived = self._handler.meeting, self._handler.arrived()
        refused = meeting.refused()
        why = f"{self._reason.text}; " if self._reason else f"refused: {refused}; " if refused else ""
        return why + rendezvous.format_arrivals(
            arrived, meeting.wanted, meeting.left, self._handler.missing()
        )

    def _settle(self) -> None:
        """Say once who met or why the processes start again; torch's count becomes the one all machines share."""
        meeting, cards = self._handler.meeting, self._handler.cards
        why = None if self._round is None else self._budget.reason(self._round)
        self._say_on_a_new_line()
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
        result = super()._monitor_workers(worker_group)
        if result.failures:
            first = failures.find_first(self._failures(result.failures))
            follows = first.cause is not failures.Cause.OWN
            departed = self._departed({}) if follows else ""
            self._reason = RestartReason(
                follows and not departed, first.time, departed or format_in_line(first)
            )
        elif result.state is WorkerState.HEALTHY and not self._handler.meeting.alone:
            return self._with_the_others(result)
        return result

    def _with_the_others(self, result: RunResult) -> RunResult:
        """What becomes of healthy processes when another machine is lost, or ended the run."""
        if self._handler.is_closed() and (why := self._budget.ended()):
            raise ElsewhereError(f"the run ended on another machine: {why}")
        lost = self._handler.lost()
        if not lost:
            return result
        names = " and ".join(card.name for card in lost)
        told = [f"{card.name}: {why}" for card in lost if (why := self._handler.meeting.departure(card))]
        text = "; ".join(told) or f"{names} {SILENT}"
        if not self._remaining_restarts:
            self._budget.end(text)
            raise AccelError(text)
        self._reason = RestartReason(False, time.time(), text)
        return RunResult(state=WorkerState.UNHEALTHY)
