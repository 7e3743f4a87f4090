"""One process: `accel launch` becomes the script's process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.launchers.base import Job, Launcher, Plan, device_of, environment
from accel_cli.launchers.gpus import GpuIds, choose_gpus

__all__ = ["Single", "become"]

_PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGWINCH,
)


class Single(Launcher):
    """One process on this machine, in the place of `accel launch` itself."""

    title: ClassVar[str] = "One process on this machine"
    alone: ClassVar[bool] = True

    kind: Literal["single"] = Field("single", description="One process on this machine.")
    gpu_ids: GpuIds = None

    @override
    def plan(self, job: Job) -> Plan:
        if job.nodes.node_rank:
            raise UsageError(
                f"--node-rank {job.nodes.node_rank} needs several machines: say --nnodes and --rdzv-endpoint"
            )
        job, visible = choose_gpus(job, self.gpu_ids)
        device = device_of(job, 1)
        start = {"script": (job.python,), "module": (job.python, "-m"), "program": ()}[job.kind]
        return Plan(
            launcher=self.kind,
            runner="accel_cli.launchers.single:become",
            argv=(*start, job.target, *job.args),
            env={
                **environment(job, _threads(job)),
                **visible,
                **({} if job.nodes.inherited else job.nodes.ranks),
            },
            device=device,
            target=job.target,
            derived=job.nodes.line if job.nodes.ranks else "",
        )

    @override
    def worlds(self, job: Job, plan: Plan) -> Sequence[int]:
        return (int(job.nodes.ranks.get("WORLD_SIZE", 1)),)


def _threads(job: Job) -> dict[str, str]:
    """The cores of the machine divided among the ranks something else started here, unless it has done so."""
    beside = int(job.nodes.ranks.get("LOCAL_WORLD_SIZE", 1))
    bound = job.machine.cpus < (os.cpu_count() or 1)
    if job.nodes.inherited or beside == 1 or bound:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, job.machine.cpus // beside))}


def become(plan: Plan) -> int:
    """Replace this process by the script's, so that signals and exit code are its own.

    Process 1 of a container stays: the kernel gives it every process whose parent has ended, and signals that it has
    no handler for do nothing. The script then is a child of it.

    Returns:
        The exit code of the script, where this is process 1; it does not return elsewhere.

    Raises:
        UsageError: The program cannot be executed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpid() == 1 and (child := os.fork()):
        return _wait_as_process_1(child)
    try:
        os.execvpe(plan.argv[0], plan.argv, {**os.environ, **plan.env})
    except OSError as error:
        raise UsageError(f"{plan.argv[0]} cannot be executed: {error.strerror}") from error


def _wait_as_process_1(child: int) -> int:
    """Pass signals on to a child, and reap every process that has ended, until the child has.

    Returns:
        Its exit code, 128 + n where signal n ended it.
    """
    # A process group of its own: a terminal would send Ctrl-C to both, and it would be passed on too.
    with suppress(OSError):
        os.setpgid(child, child)
        os.tcsetpgrp(0, child)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
