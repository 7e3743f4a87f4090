"""Where a process stands that was started inside a Slurm allocation, from the variables of its step."""

from __future__ import annotations

from collections.abc import Mapping

from accel_cli.errors import UsageError
from accel_cli.nodes import first_host

__all__ = ["FIRST_PORT", "PORTS", "here"]

FIRST_PORT, PORTS = 10000, 20000
"""Jobs meet at ports from 10000 to 29999: below those that Linux hands out by itself."""


def here(environ: Mapping[str, str], nnodes: int) -> tuple[str, str]:
    """Where the nodes of this step meet, as `host:port`, and the name under which they do.

    Args:
        environ: The environment, which has a `SLURM_JOB_ID`.
        nnodes: The nodes the profile asks for.

    Raises:
        UsageError: This is no step, or not one with one task on each of so many nodes.
    """
    job = environ["SLURM_JOB_ID"]
    step = environ.get("SLURM_STEP_ID")
    srun = f"srun --nodes={nnodes} --ntasks-per-node=1 accel launch ..."
    if step is None or "SLURM_STEP_NODELIST" not in environ:
        raise UsageError(
            f"this shell is inside the Slurm job {job} already, and launcher.kind: slurm would submit another. "
            f"To run in this job: {srun}; on this node only: --set launcher.kind=torchrun"
        )
    nodes, tasks = environ.get("SLURM_STEP_NUM_NODES", "1"), environ.get("SLURM_STEP_NUM_TASKS", "1")
    if nodes != str(nnodes) or tasks != nodes:
        raise UsageError(
            f"this step of the Slurm job {job} has {tasks} task(s) on {nodes} node(s), and the profile wants one on "
            f"each of {nnodes}: {srun}"
        )
    for name, text in (("SLURM_JOB_ID", job), ("SLURM_STEP_ID", step)):
        if not (text.isascii() and text.isdigit()):
            raise UsageError(f"{name} must be a whole number; it is {text!r}")
    # Two steps of a job may run at the same time.
    port = FIRST_PORT + (int(job) + int(step)) % PORTS
    return f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}", f"slurm-{job}.{step}"
