"""The `launcher:` section of a profile that runs scripts as jobs of a Slurm cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self, override

from accel_cli.errors import UsageError
from accel_cli.fields import Answers, Question
from accel_cli.launchers.base import Job, Launcher, Plan, environment
from accel_cli.launchers.slurm import render
from accel_cli.launchers.slurm.step import here
from accel_cli.launchers.torchrun import Torchrun
from accel_cli.runner.rank_filter import check_ranks

__all__ = ["Slurm"]

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
            if name in render.OWN:
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
            runner="accel_cli.launchers.slurm.submit:submit",
            argv=("sbatch", "--parsable", "--export=ALL"),
            env=environment(job, {}),
            device=job.settings.device if job.settings.device != "auto" else "GPU" if self.gpus else "cpu",
            nnodes=self.nnodes,
            nproc_per_node=count,
            script=render.batch_script(self._options(job), self._body(job, count)),
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
        return [*map(render.quoted, [*ours, *again]), *self.sbatch_args]

    def _body(self, job: Job, count: int) -> render.Body:
        warning = self.signal.removeprefix("SIG").split("@") if self.signal and self.requeue else None
        return render.Body(
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
