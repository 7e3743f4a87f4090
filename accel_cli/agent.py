"""Runs a torchrun plan: torch's elastic agent, inside this process. The one place that imports torch."""

from __future__ import annotations

import logging
import os
import signal
import socket

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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
    if plan.agent["max_restarts"]:
        # Without it a restart meets the stale keys of the attempt before (torch 2.13; pytorch#167288).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    program, *args = plan.argv
    config = LaunchConfig(
        min_nodes=plan.nnodes,
        max_nodes=plan.nnodes,
        nproc_per_node=plan.nproc_per_node,
        logs_specs=DefaultLogsSpecs(),
        **plan.agent,
    )
    try:
        elastic_launch(config, program)(*map(_literal, args))
    except ChildFailedError as error:
        return _report(*error.get_first_failure(), processes=plan.nnodes * plan.nproc_per_node)
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousError as error:
        raise AccelError(f"the machines did not meet at {plan.agent['rdzv_endpoint']}: {error}") from None
    return 0


def _literal(arg: str) -> str:
    """An argument that comes through the agent unchanged: it replaces `${local_rank}` and `$$`."""
    return arg.replace("$", "$$")


def _report(rank: int, failure: ProcessFailure, processes: int) -> int:
    """Say what failed first, as the last thing on the screen."""
    from accel_cli import console  # noqa: PLC0415 - only a failure needs it

    code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    console.error(
        f"rank {rank} of {processes} on {socket.gethostname()} (pid {failure.pid}): {_how(failure)}"
    )
    return code


def _how(failure: ProcessFailure) -> str:
    """How a process ended: its exception if it left one, else the signal or code."""
    if failure.exitcode < 0:
        return f"was ended by {signal.Signals(-failure.exitcode).name}"
    recorded = failure.error_file_data.get("message") if failure.error_file_data else None
    if isinstance(recorded, dict):
        return str(recorded["message"])
    return f"exited with code {failure.exitcode}"
