"""The text of a batch script: a pure function of the profile and what was typed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from accel_cli.launchers.base import Job
from accel_cli.launchers.slurm.step import FIRST_PORT, PORTS

__all__ = ["OWN", "Body", "batch_script", "quoted"]

OWN = frozenset({
    "--job-name", "-J", "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--output", "-o", "--error", "-e",
    "--requeue", "--no-requeue", "--open-mode", "--export", "--signal", "--array", "-a", "--wait", "-W", "--parsable",
    "--partition", "-p", "--account", "-A", "--qos", "-q", "--time", "-t", "--mem", "--cpus-per-task", "-c",
    "--gpus-per-node", "--chdir", "-D", "--wrap",
})  # fmt: skip
"""Options that a key of the profile says, or that would break what is built on the job."""

_HEAD = f"""\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"""

_ONE = """\
# srun answers with the highest exit code of the nodes: one that was only ended because another failed says 1.
# Slurm signals every process of a node; a warning is for the scripts that listen, and ends none of the others.
one='trap : HUP INT TERM; trap "" USR1 USR2; "$@"; code=$?; exit $((code == 143 ? 1 : code))'"""

_AGAIN = """\
again() {{
  warned=1
  echo "accel: the time limit is near: SIG{name} to the scripts, then job $SLURM_JOB_ID is run again" >&2
  scancel --signal={name} "$SLURM_JOB_ID"
  (sleep {patience}; scontrol requeue "$SLURM_JOB_ID") &
}}
trap again {name}"""

_WAIT = """\
step=$!
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done
[ -z "$warned" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code\""""


@dataclass(frozen=True)
class Body:
    """What a batch script does, beside the options of sbatch."""

    job: Job
    nnodes: int
    nproc_per_node: int
    max_restarts: int
    ranks: str
    """Whose output is in the log."""
    cpus_per_task: int | None
    """Repeated to srun, which does not take it from the job since Slurm 22.05."""
    setup: tuple[str, ...]
    warning: tuple[str, int] | None
    """The signal that comes before the time limit, and how many seconds before; then the job is run again."""


def batch_script(options: list[str], body: Body) -> str:
    """A script for `sbatch`.

    Args:
        options: Options of sbatch, as they stand behind `#SBATCH`.
        body: What is run.
    """
    parts = [
        "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]),
        "\n".join(body.setup),
        _HEAD if body.nnodes > 1 else "",
        'echo "accel: Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}" >&2',
        _AGAIN.format(name=body.warning[0], patience=max(1, body.warning[1] - _MARGIN_S))
        if body.warning
        else "",
        _ONE,
        " \\\n  ".join(_srun(body)) + (" &" if body.warning else ""),
        _WAIT if body.warning else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_MARGIN_S = 15
"""How long before the time limit a job is run again even though its scripts have not ended."""


def _srun(body: Body) -> list[str]:
    """The command that starts `accel` on every node, a line each."""
    # Without --cpu-bind=none the one task of a node, and all its processes, could be bound to one core.
    tasks = [f"srun --nodes={body.nnodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none"]
    tasks += [f"--cpus-per-task={body.cpus_per_task}"] if body.cpus_per_task else []
    job = body.job
    start = {"script": [], "module": ["-m"], "program": ["--no-python"]}[job.kind]
    return [
        " ".join(tasks),
        'bash -c "$one" accel',
        f"{quoted(job.python)} -m accel_cli launch --quiet --no-profile",
        *(f"--set launcher.{name}={value}" for name, value in _values(body).items()),
        " ".join([*start, "--", *map(quoted, (job.target, *job.args))]),
    ]


def _values(body: Body) -> dict[str, str]:
    """The `launcher:` section of a node, as words of the shell."""
    meeting = (
        {"rdzv_endpoint": '"$head:$port"', "rdzv_id": '"slurm-$SLURM_JOB_ID"'} if body.nnodes > 1 else {}
    )
    return {
        "kind": "torchrun",
        "nnodes": str(body.nnodes),
        "nproc_per_node": str(body.nproc_per_node),
        **meeting,
        "max_restarts": str(body.max_restarts),
        **({} if body.ranks == "0" else {"ranks": quoted(body.ranks)}),
    }


def quoted(word: str) -> str:
    """A word of bash that means exactly this text, on one line and in ASCII letters where it is not printable."""
    if word.isprintable():
        return shlex.quote(word)
    # sbatch refuses a script with a carriage return, and bytes that are no text have to come through.
    return "$'" + "".join(map(_letter, word)) + "'"


def _letter(letter: str) -> str:
    if letter in {"'", "\\"}:
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    return "".join(f"\\{byte:03o}" for byte in letter.encode(errors="surrogateescape"))
