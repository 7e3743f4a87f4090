"""Runs a torchrun plan: torch's elastic agent, inside this process. The one room that imports torch."""

from __future__ import annotations

import logging
import os
import resource
import socket
from typing import Any

from accel_cli import quiet as _quiet  # noqa: F401 - before torch is imported

# isort: split
from torch.distributed import DistError
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from accel_cli import console, network, reason, runs
from accel_cli.agent.alone import Alone
from accel_cli.agent.elastic import Agent, lost_meeting_place
from accel_cli.agent.ending import Guard, Orphans
from accel_cli.agent.local import Room
from accel_cli.agent.meeting import Meeting
from accel_cli.agent.output import LogWarning
from accel_cli.agent.rendezvous import Handler
from accel_cli.agent.signals import Signals
from accel_cli.errors import AccelError, ElsewhereError, UsageError
from accel_cli.forkserver.server import Server
from accel_cli.plan import Plan

__all__ = ["run"]

_FILES, _FILES_PER_PROCESS = 32, 8
"""Files that the launcher has open at most: its own, and those of each process."""


def run(plan: Plan, server: Server | None = None) -> int:
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
    with Signals(shutdown_timeout=plan.agent["shutdown_timeout"]) as signals:
        try:
            return _recorded(plan, signals, server)
        except SignalException as error:
            # The rendezvous stays open, so that the other machines can go on without this one.
            return 128 + int(error.sigval)
        except ElsewhereError:
            raise
        except AccelError as error:
            reason.leave(plan.agent, str(error))
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


def _recorded(plan: Plan, signals: Signals, server: Server | None) -> int:
    """Run it, and leave in the run's folder how it ended."""
    folder = _folder(plan)
    warning = LogWarning(folder)
    code = 1
    try:
        with Guard(folder.path) as guard:
            code = _run(plan, _room(plan, warning, signals, guard, server))
    except SignalException as error:
        code = 128 + int(error.sigval)
    finally:
        signals.finish()
        try:
            folder.record({"exit_code": code})
        except OSError as error:
            warning.give(str(error))
    return code


def _room(plan: Plan, warning: LogWarning, signals: Signals, guard: Guard, server: Server | None) -> Room:
    said = plan.agent
    room = Room(
        warning.folder,
        warning,
        signals,
        guard,
        Orphans(),
        server,
        shown=said["ranks"],
        shutdown_timeout=said["shutdown_timeout"],
        stall_timeout=said["stall_timeout"],
        host=said.get(reason.HOST) or socket.gethostname(),
        agent=said,
        replicas=bool(said.get("replicas")),
    )
    signals.orphans = room.orphans
    return room


def _run(plan: Plan, room: Room) -> int:
    said = dict(plan.agent)
    meeting = _meet(said, plan)
    handler = Alone(meeting, said["run_id"]) if meeting.alone else Handler.of(meeting, said)
    agent = Agent(_spec(plan, handler), room)
    try:
        result = agent.run()
    except RendezvousTimeoutError:
        raise AccelError(_too_few(handler)) from None
    except RendezvousClosedError:
        why = agent.ended()
        raise ElsewhereError(
            f"the run ended on another machine: {why}"
            if why
            else f"the run {said['run_id']!r} at {meeting.endpoint} has finished already"
        ) from None
    except (RendezvousError, DistError):
        lost = lost_meeting_place(meeting)
        if agent.spare:
            console.note(f"the run ended without this machine, or {lost}")
            return 0
        if agent.met:
            raise ElsewhereError(lost) from None
        raise AccelError(f"{lost}; {_too_few(handler)}") from None
    room.signals.finish()
    if result is None:
        console.note("the run ended without this machine: it had all the machines it asked for")
        return 0
    code = agent.report(result.failures) if result.failures else 0
    agent.leave()
    return code


def _folder(plan: Plan) -> runs.RunFolder:
    base = runs.home(os.environ, plan.agent["log_dir"])
    try:
        return runs.RunFolder.create(base, plan.target, {"argv": plan.argv})
    except OSError as error:
        raise UsageError(
            f"logs cannot be written to {base}: {error.strerror}; --log-dir names another folder"
        ) from None


def _meet(said: dict[str, Any], plan: Plan) -> Meeting:
    """The meeting place, and what processes need to know of addresses to meet as well."""
    meeting = Meeting(said, plan.nproc_per_node, derived=bool(plan.derived))
    if not meeting.alone:
        _name_interface(meeting)
    return meeting


def _name_interface(meeting: Meeting) -> None:
    """Tell gloo the interface, where it would tell the others an address that only this machine reaches."""
    if "GLOO_SOCKET_IFNAME" in os.environ or not network.named_wrongly():
        return
    if name := network.interface(meeting.address):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _too_few(handler: Alone | Handler) -> str:
    low, _ = handler.meeting.wanted
    # Whoever gives up first has left by now.
    came = [card.name for card in handler.seen] or [handler.meeting.card.name]
    missing = handler.missing()
    return (
        f"{len(came)} of {low} machines came ({', '.join(came)}) within rdzv_timeout; {low - len(came)} missing"
        f"{': ' + ', '.join(missing) if missing else ''}. Start the same command there, with the same --rdzv-endpoint "
        f"{handler.meeting.endpoint} and --rdzv-id."
    )


def _spec(plan: Plan, handler: Alone | Handler) -> WorkerSpec:
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
