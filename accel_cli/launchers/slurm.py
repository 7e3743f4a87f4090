"""The `launcher:` section of a profile that runs scripts as jobs of a Slurm cluster."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self, override

from accel_cli.errors import UsageError
from accel_cli.launchers.base import Job, Launcher, Plan, environment
from accel_cli.launchers.torchrun import Torchrun
from accel_cli.planning.nodes import first_host
from accel_cli.profile.fields import Answers, Question
from accel_cli.runner.rank_filter import check_ranks

__all__ = ["FIRST_PORT", "OWN", "PORTS", "Body", "Slurm", "batch_script", "here", "quoted"]


_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|infinite|unlimited", re.IGNORECASE)
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_GPUS = re.compile(r"(?:[\w.-]+:)?(\d+)")
# SIGTERM is what a job gets that is cancelled: it may not mean that the job is run again.
_SIGNAL = re.compile(r"(?:SIG)?(USR1|USR2)@([1-9]\d*)")


def _line(value: Any) -> Any:
    """Text that stands on one line of a batch script."""
    if isinstance(value, str) and (not value.strip() or not value.isprintable()):
        raise ValueError("expected text on one line")
    return value


def _time(value: int | str | None) -> int | str | None:
    if (isinstance(value, int) and value < 1) or (isinstance(value, str) and not _TIME.fullmatch(value)):
        raise ValueError("expected minutes, or text like 30:00, 4:00:00 or 2-12:00:00 (days-hours)")
    return value


def _memory(value: int | str | None) -> int | str | None:
    if value is not None and not _MEMORY.fullmatch(str(value)):
        raise ValueError("expected a size like 64G, or a number of megabytes; 0 is all of a node's")
    return value


def _gpus(value: int | str | None) -> int | str | None:
    if value is not None and not _GPUS.fullmatch(str(value)):
        raise ValueError("expected a number, or a type and a number like a100:4")
    return value


def _processes(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError("expected a whole number of at least 1, or auto")
    return value


def _signal(value: str | None) -> str | None:
    if value is not None and not _SIGNAL.fullmatch(value):
        raise ValueError("expected USR1@SECONDS or USR2@SECONDS, like USR1@120")
    return value


def _folder(value: str) -> str:
    if "%" in value or value.startswith("~"):
        raise ValueError("expected a folder, without ~ or %; the file in it is slurm-JOBID.out")
    return value


def _extra(values: list[str]) -> list[str]:
    for value in values:
        if not value.startswith("-") or not value.isprintable():
            raise ValueError(f"expected options of sbatch like --constraint=a100, not {value!r}")
    return values


def _gpus_of(asked: int | str | None) -> int:
    matched = _GPUS.fullmatch(str(asked or 0))
    assert matched  # what a profile says was checked
    return int(matched[1])


def _without_gpus(answers: Answers) -> bool:
    return not answers.get("gpus_per_node")


class Slurm(Launcher):
    """A job of a Slurm cluster: the elastic agent on every node of it, one for each."""

    title: ClassVar[str] = "A job on a Slurm cluster"
    runs = "job"

    kind: Literal["slurm"] = Field(
        "slurm", description="A Slurm job: `accel launch` on a login node submits it and follows its log."
    )
    nnodes: Annotated[
        int,
        Field(ge=1, description="Number of nodes."),
        Question("How many nodes?", suggest=lambda *_: 1),
    ] = 1
    gpus_per_node: Annotated[
        int | str | None,
        AfterValidator(_gpus),
        Field(
            description="GPUs to ask for on each node: a number, or a type and a number like `a100:4`; "
            "unset asks for none."
        ),
        Question(
            "How many GPUs on each node?",
            suggest=lambda *_: 0,
            hint="0 for none, or with a type like a100:4",
        ),
    ] = None
    nproc_per_node: Annotated[
        int | Literal["auto"],
        Field(
            union_mode="left_to_right",
            description="Number of processes on each node; `auto` is one for each of `gpus_per_node`, or 1.",
        ),
        Field(json_schema_extra={"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
        AfterValidator(_processes),
        Question(
            "How many processes on each node?",
            suggest=lambda *_: 1,
            when=_without_gpus,
            hint="a number",
        ),
    ] = "auto"
    partition: Annotated[
        str | None,
        AfterValidator(_line),
        Field(description="Partition; unset is the cluster's default one."),
        Question("Which partition?", suggest=lambda *_: None, hint="Enter for the cluster's default"),
    ] = None
    account: Annotated[
        str | None,
        AfterValidator(_line),
        Field(description="Account that is charged; unset is your default one."),
        Question("Which account?", suggest=lambda *_: None, hint="Enter for your default"),
    ] = None
    time: Annotated[
        int | str | None,
        AfterValidator(_time),
        Field(
            description="Time limit: minutes, or text like `4:00:00` or `2-12:00:00` (days-hours); "
            "unset is the partition's."
        ),
        Question(
            "Which time limit?", suggest=lambda *_: None, hint="like 4:00:00; Enter for the partition's"
        ),
    ] = None
    qos: Annotated[str | None, AfterValidator(_line), Field(description="Quality of service.")] = None
    cpus_per_task: Annotated[
        int | None,
        Field(
            ge=1, description="Processor cores on each node; unset is what the partition gives, often one."
        ),
    ] = None
    mem: Annotated[
        int | str | None,
        AfterValidator(_memory),
        Field(description="Memory on each node, like `64G`; `0` is all, unset is what the partition gives."),
    ] = None
    job_name: Annotated[
        str | None, AfterValidator(_line), Field(description="Name of the job; unset is the script's.")
    ] = None
    output_dir: Annotated[
        str,
        AfterValidator(_line),
        AfterValidator(_folder),
        Field(description="Folder of the log `slurm-JOBID.out`, made if it is not there."),
    ] = "."
    requeue: Annotated[
        bool,
        Field(description="Whether Slurm runs the job again after a preemption or a lost node."),
    ] = False
    signal: Annotated[
        str | None,
        AfterValidator(_signal),
        Field(
            description="`USR1@SECONDS` or `USR2@SECONDS`: the signal the scripts get so long before the time limit; "
            "with `requeue` the job is then run again."
        ),
    ] = None
    max_restarts: Annotated[
        int,
        Field(
            ge=0, description="How often, inside the job, all processes are started again after one failed."
        ),
    ] = 0
    ranks: Annotated[
        int | str,
        AfterValidator(check_ranks),
        Field(description="Whose output is in the job's log: `all`, `none`, or ranks as in `0,2`."),
    ] = 0
    sbatch_args: Annotated[
        list[str],
        AfterValidator(_extra),
        Field(description="More lines for sbatch, without the `#SBATCH`: `--constraint=a100`."),
    ] = Field(default_factory=list)
    setup: Annotated[
        list[str],
        Field(description="Lines of shell at the start of the batch script: `module load cuda`."),
    ] = Field(default_factory=list)

    @model_validator(mode="after")
    def _options_have_one_place(self) -> Self:
        for option in self.sbatch_args:
            name = re.split(r"[= ]", option)[0]
            if name in OWN:
                raise ValueError(
                    f"sbatch_args may not have {name}: accel says it, from the key of the profile"
                )
        return self

    @classmethod
    @override
    def several(cls, answers: Answers) -> bool:
        each = answers.get("nproc_per_node", max(1, _gpus_of(answers.get("gpus_per_node"))))
        return (answers.get("nnodes", 1), each) != (1, 1)

    @override
    def plan(self, job: Job) -> Plan:
        if "SLURM_JOB_ID" in job.environ:
            return self._inside(job)
        count = self._count(job)
        return Plan(
            launcher=self.kind,
            runner="accel_cli.jobs.slurm:submit_job",
            argv=("sbatch", "--parsable", "--export=ALL"),
            env=environment(job, {}),
            device=job.settings.device if job.settings.device != "auto" else "GPU" if self.gpus else "cpu",
            nnodes=self.nnodes,
            nproc_per_node=count,
            script=batch_script(self._options(job), self._body(job, count)),
            output_dir=self.output_dir,
        )

    @property
    def gpus(self) -> int:
        """GPUs of a node, as a number."""
        return _gpus_of(self.gpus_per_node)

    def _count(self, job: Job) -> int:
        if isinstance(self.nproc_per_node, int):
            count = self.nproc_per_node
        else:
            count = 1 if job.settings.device == "cpu" else max(1, self.gpus)
        if 0 < self.gpus < count and job.settings.device != "cpu":
            raise UsageError(
                f"launcher.nproc_per_node is {count}, but launcher.gpus_per_node asks for {self.gpus} GPU(s) on each "
                "node. Ask for as many GPUs as processes, or use --cpu."
            )
        return count

    def _inside(self, job: Job) -> Plan:
        """The plan of a node's agent, in a step of an allocation that is there already."""
        endpoint, name = here(job.environ, self.nnodes)
        return Torchrun(
            nnodes=self.nnodes,
            nproc_per_node=self.nproc_per_node,
            rdzv_endpoint=endpoint,
            rdzv_id=name,
            max_restarts=self.max_restarts,
            ranks=self.ranks,
        ).plan(job)

    def _options(self, job: Job) -> list[str]:
        """The options of sbatch, as they stand behind `#SBATCH`."""
        said: dict[str, Any] = {
            "--job-name": self.job_name or _name(job),
            "--nodes": self.nnodes,
            "--ntasks-per-node": 1,
            "--gpus-per-node": self.gpus_per_node or None,
            "--cpus-per-task": self.cpus_per_task,
            "--mem": self.mem,
            "--partition": self.partition,
            "--account": self.account,
            "--qos": self.qos,
            "--time": self.time,
            "--output": str(Path(self.output_dir) / "slurm-%j.out"),
            "--signal": self.signal and ("B:" if self.requeue else "") + self.signal.removeprefix("SIG"),
        }
        again = ["--requeue", "--open-mode=append"] if self.requeue else ["--no-requeue"]
        ours = [f"{option}={value}" for option, value in said.items() if value is not None]
        return [*map(quoted, [*ours, *again]), *self.sbatch_args]

    def _body(self, job: Job, count: int) -> Body:
        warning = self.signal.removeprefix("SIG").split("@") if self.signal and self.requeue else None
        return Body(
            job=job,
            nnodes=self.nnodes,
            nproc_per_node=count,
            max_restarts=self.max_restarts,
            ranks=str(self.ranks),
            cpus_per_task=self.cpus_per_task,
            setup=tuple(self.setup),
            warning=(warning[0], int(warning[1])) if warning else None,
        )


def _name(job: Job) -> str:
    """The script's name, as a job's: no more than one printable line."""
    name = "".join(letter if letter.isprintable() else "_" for letter in Path(job.target).name)
    return name.strip() or "accel"


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
