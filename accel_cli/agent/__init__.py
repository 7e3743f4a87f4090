"""Runs a torchrun plan: torch's elastic agent, inside this process. The one room that imports torch."""

from __future__ import annotations

import logging
import os

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accel_cli import runs
from accel_cli.agent.elastic import Agent
from accel_cli.agent.ending import Guard
from accel_cli.agent.report import first_failure
from accel_cli.agent.signals import Signals
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
    # What the agent logs about a failure or a signal is said by us, once. Some of its loggers have a level.
    for name in ("torch.distributed.elastic", server.__name__):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.update(plan.env)
    if plan.agent["max_restarts"]:
        # Without it a restart meets the stale keys of the attempt before (torch 2.13; pytorch#167288).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with Signals(shutdown_timeout=plan.agent["shutdown_timeout"]) as signals:
        try:
            return _recorded(plan, signals)
        except SignalException as error:
            # The rendezvous stays open, so that the other machines can go on without this one.
            return 128 + int(error.sigval)


def _recorded(plan: Plan, signals: Signals) -> int:
    folder = runs.RunFolder.create(runs.home(os.environ), plan.target, {"argv": plan.argv})
    code = 1
    try:
        with Guard(folder.path) as guard:
            code = _run(plan, folder, signals, guard)
    except SignalException as error:
        code = 128 + int(error.sigval)
    finally:
        signals.finish()
        folder.record({"exit_code": code})
    return code


def _run(plan: Plan, folder: runs.RunFolder, signals: Signals, guard: Guard) -> int:
    patience = {name: plan.agent[name] for name in ("shutdown_timeout", "stall_timeout")}
    agent = Agent(_spec(plan), folder, signals, guard, **patience)
    try:
        result = agent.run()
    except RendezvousError as error:
        raise AccelError(f"the machines did not meet at {plan.agent['rdzv_endpoint']}: {error}") from None
    signals.finish()
    agent.leave()
    return first_failure(result.failures, processes=agent.world_size) if result.failures else 0


def _spec(plan: Plan) -> WorkerSpec:
    """What torch's agent is told: the command of a process, how many, and where the machines meet."""
    said = plan.agent
    meeting = RendezvousParameters(
        backend=said["rdzv_backend"],
        endpoint=said["rdzv_endpoint"],
        run_id=said["run_id"],
        min_nodes=plan.nnodes,
        max_nodes=plan.nnodes,
        local_addr=said["local_addr"],
        timeout=900,
    )
    program, *args = plan.argv
    return WorkerSpec(
        role="default_role",
        local_world_size=plan.nproc_per_node,
        entrypoint=program,
        args=tuple(args),
        rdzv_handler=get_rendezvous_handler(meeting),
        max_restarts=said["max_restarts"],
        monitor_interval=said["monitor_interval"],
        local_addr=said["local_addr"],
    )
