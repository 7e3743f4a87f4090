"""Runs a torchrun plan: torch's elastic agent, inside this process. The one room that imports torch."""

from __future__ import annotations

import logging
import os
from typing import Any

from accel_cli.agent import quiet as _quiet  # noqa: F401 - before torch is imported

# isort: split
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from accel_cli import network, runs
from accel_cli.agent.elastic import Agent
from accel_cli.agent.meeting import Meeting
from accel_cli.agent.rendezvous import Handler
from accel_cli.agent.report import first_failure
from accel_cli.errors import AccelError
from accel_cli.launchers.base import Plan

__all__ = ["run"]


def run(plan: Plan) -> int:
    """Start the plan's processes on this machine, wait for them, and say what their exit code comes to.

    Returns:
        0, the code of the first process that failed, or 128 + n where signal n ended it or the launcher.

    Raises:
        AccelError: The machines did not find each other.
    """
    # What the agent logs about a failure is said by us, once, at the end.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.update(plan.env)
    folder = runs.RunFolder.create(runs.home(os.environ), plan.target, {"argv": plan.argv})
    code = 1
    try:
        code = _run(plan, folder)
    finally:
        folder.record({"exit_code": code})
    return code


def _run(plan: Plan, folder: runs.RunFolder) -> int:
    said = dict(plan.agent)
    meeting = _meet(said, plan)
    handler = Handler.of(meeting, said)
    agent = Agent(_spec(plan, handler), folder)
    try:
        result = agent.run()
    except SignalException as error:
        # The rendezvous stays open, so that the other machines can go on without this one.
        return 128 + int(error.sigval)
    except RendezvousTimeoutError:
        raise AccelError(_too_few(handler)) from None
    except RendezvousClosedError:
        why = agent.ended()
        raise AccelError(
            f"the run ended on another machine: {why}"
            if why
            else f"the run {said['run_id']!r} at {meeting.endpoint} has finished already"
        ) from None
    except (RendezvousError, DistError):
        raise AccelError(
            f"{meeting.card.name} has lost the meeting place {meeting.endpoint}: the launcher there ended, that machine "
            "is down, or the link is cut"
        ) from None
    agent.leave()
    return first_failure(result.failures, processes=agent.world_size) if result.failures else 0


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


def _too_few(handler: Handler) -> str:
    low, _ = handler.meeting.wanted
    # Whoever gives up first has left by now.
    came = [card.name for card in handler.seen] or [handler.meeting.card.name]
    missing = handler.missing()
    return (
        f"{len(came)} of {low} machines came ({', '.join(came)}) within rdzv_timeout; {low - len(came)} missing"
        f"{': ' + ', '.join(missing) if missing else ''}. Start the same command there, with the same --rdzv-endpoint "
        f"{handler.meeting.endpoint} and --rdzv-id."
    )


def _spec(plan: Plan, handler: Handler) -> WorkerSpec:
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
