"""The Slurm launcher: its section of a profile, its plan, and the batch script."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.extensions.slurm.service import SlurmJobPlan, SlurmJobs, submit_job
from accel_cli.launchers import torchrun
from accel_cli.launchers.job_launcher import JobLauncher, Nodes, ProcessesPerNode, count_gpus, count_processes
from accel_cli.launchers.launcher import LaunchSpec, Plan, build_environment
from accel_cli.launchers.node_launch import build_command
from accel_cli.launchers.sections import ExpandedPath, ItemError, Question, match
from accel_cli.planning.launch_options import LaunchOption
from accel_cli.planning.nodes import get_slurm_rendezvous
from accel_cli.planning.plan import join_for_bash, quote_for_bash

__all__ = ["Slurm"]

_REQUEUE_MARGIN_S = 15
"""Seconds before the time limit at which a job is requeued, even if its scripts are still running."""
_RESERVED_OPTIONS = frozenset({
    "--job-name", "-J", "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--ntasks-per-gpu", "--ntasks-per-socket",
    "--ntasks-per-core", "--output", "-o", "--error", "-e",
    "--requeue", "--no-requeue", "--open-mode", "--export", "--signal", "--array", "-a", "--wait", "-W", "--parsable",
    "--partition", "-p", "--account", "-A", "--qos", "-q", "--time", "-t", "--mem", "--cpus-per-task", "-c",
    "--gpus-per-node", "--chdir", "-D", "--wrap",
})  # fmt: skip
"""Options of sbatch that have a key of the profile, or that the batch script depends on."""
_GPU_OPTIONS = ("--gres", "--gpus", "-G", "--gpus-per-task")
"""Options of sbatch whose GPUs are counted."""
_UNCLEAR_GPU_OPTIONS = re.compile(r"--gpus-per-(?!task$)\w+|--tres-per-\w+")
"""Matches options of sbatch, also abbreviated, whose GPUs cannot be counted, if their value names GPUs at all."""
_GRES = re.compile(r"(?:gres[:/])?(gpu|mps|shard)(?::[A-Za-z][\w.-]*)?(?:[:=](\d+))?(?:\(.*\))?")
_OVERRIDING_VARIABLES = (
    "SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK", "SBATCH_GRES", "SBATCH_ARRAY_INX", "SBATCH_OUTPUT",
    "SBATCH_ERROR", "SBATCH_WAIT",
)  # fmt: skip
"""Variables that sbatch prefers to the lines of a batch script."""


def _check_line(value: str | None) -> str | None:
    """Raise ValueError if a text cannot be on one line of a batch script."""
    if value is not None and (not value.strip() or not value.isprintable()):
        raise ValueError("expected text on one line")
    return value


_Line = Annotated[str | None, AfterValidator(_check_line)]


def _check_options(values: list[str]) -> list[str]:
    for value in values:
        if not value.startswith("-") or not value.isprintable():
            raise ItemError("expected options of sbatch such as --constraint=a100", repr(value))
        for name, _ in _parse_options(value):
            is_long = name.startswith("--") and name not in _GPU_OPTIONS
            # sbatch takes `--node=2` for --nodes.
            options = (each for each in sorted(_RESERVED_OPTIONS) if is_long and each.startswith(name))
            if reserved := name if name in _RESERVED_OPTIONS else next(options, None):
                raise ValueError(f"cannot contain {reserved}, which accel sets; use the key of the profile")
    return values


def _parse_options(line: str) -> Iterator[tuple[str, str]]:
    """Yield the options of a line for sbatch with their values, `-N4` as `-N`."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ItemError(
            "expected options of sbatch such as --constraint=a100", f"{line!r} ({error})"
        ) from None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        value = "" if following.startswith("-") else following
        if word.startswith("--"):
            name, equals, text = word.partition("=")
            yield name, text if equals else value
        elif word.startswith("-"):
            yield word[:2], word[2:].removeprefix("=") or value


def _count_requested_gpus(lines: list[str], nnodes: int) -> int:
    """Return the number of GPUs of each node that lines for sbatch request.

    Raises:
        ValueError: They cannot be counted, or several options request GPUs.
    """
    counts: dict[str, int] = {}
    for name, value in (option for line in lines for option in _parse_options(line)):
        if _UNCLEAR_GPU_OPTIONS.fullmatch(name) and (name.startswith("--gpus") or "gpu" in value):
            raise ValueError(f"sbatch_args: the GPUs of {name} cannot be counted; use gpus_per_node")
        if name not in _GPU_OPTIONS:
            continue
        if count := _count_gres(value) if name == "--gres" else _count_typed(value):
            counts[name] = count  # sbatch uses the last one
        elif count is None:
            raise ValueError(f"sbatch_args: the GPUs of {name} {value} cannot be counted; use gpus_per_node")
        if name in {"--gpus", "-G"} and nnodes > 1:
            raise ValueError(
                f"sbatch_args: {name} is for all nodes together, which Slurm may divide unevenly; use gpus_per_node"
            )
    if len(counts) > 1:
        raise ValueError(f"sbatch_args: {' and '.join(counts)} both request GPUs; use gpus_per_node")
    return sum(counts.values())


def _count_gres(value: str) -> int | None:
    """Return the number of GPUs in a value of --gres; None if it is unclear. Shares of a GPU are on one GPU."""
    names = [name for name in value.split(",") if re.match(r"(gres[:/])?(gpu|mps|shard)\b", name)]
    matches = [_GRES.fullmatch(name) for name in names]
    if not all(matches):
        return None
    counts = [int(match[2] or 1) if match[1] == "gpu" else 1 for match in matches if match]
    return sum(counts) if all(match and match[1] == "gpu" for match in matches) else max(counts)


def _count_typed(value: str) -> int | None:
    """Return the number in a value such as `4` or `a100:2,v100:1`; None if it is unclear."""
    matches = [re.fullmatch(r"(?:[A-Za-z][\w.-]*:)?(\d+)", part) for part in value.split(",")]
    return sum(int(match[1]) for match in matches if match) if all(matches) else None


class Slurm(JobLauncher):
    """A job of a Slurm cluster, with an elastic agent on each node."""

    title: ClassVar[str] = "A job on a Slurm cluster"
    proven_on: ClassVar[str] = "real service: Slurm 22.05 with two nodes on one machine, CPUs only"
    variables: ClassVar[tuple[str, ...]] = ("SLURM_",)
    launch_options: ClassVar[tuple[LaunchOption, ...]] = (
        *JobLauncher.launch_options,
        LaunchOption(
            "--array", "Submit a job for each index of a list such as 0-9.", "INDEXES", "launcher.array"
        ),
    )

    @classmethod
    @override
    def get_missing_service(cls) -> str:
        return "" if shutil.which("sbatch") else "no sbatch here"

    kind: Literal["slurm"] = Field(
        "slurm", description="A Slurm job: `accel launch` on a login node submits it and follows its log."
    )
    nnodes: Nodes = 1
    gpus_per_node: Annotated[
        int | str | None,
        match(r"([\w.-]+:)?\d+", "a number, or a type and a number such as a100:4"),
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
    nproc_per_node: ProcessesPerNode = "auto"
    partition: Annotated[
        _Line,
        Field(description="Partition; unset is the cluster's default one."),
        Question("Which partition?", hint="Enter for the cluster's default"),
    ] = None
    account: Annotated[
        _Line,
        Field(description="Account that is charged; unset is your default one."),
        Question("Which account?", hint="Enter for your default"),
    ] = None
    time: Annotated[
        int | str | None,
        match(
            r"(?i)(?!0$)\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|infinite|unlimited",
            "minutes, or text such as 30:00, 4:00:00 or 2-12:00:00 (days-hours)",
        ),
        Field(
            description="Time limit: minutes, or text like `4:00:00` or `2-12:00:00` (days-hours); "
            "unset is the partition's."
        ),
        Question("Which time limit?", hint="like 4:00:00; Enter for the partition's"),
    ] = None
    qos: Annotated[_Line, Field(description="Quality of service.")] = None
    cpus_per_task: Annotated[
        int | None,
        Field(
            ge=1, description="Processor cores on each node; unset is what the partition gives, often one."
        ),
    ] = None
    mem: Annotated[
        int | str | None,
        match(r"(?i)\d+[KMGT]?", "a size such as 64G, or a number of megabytes; 0 is all memory of a node"),
        Field(description="Memory on each node, like `64G`; `0` is all, unset is what the partition gives."),
    ] = None
    array: Annotated[
        str | None,
        match(r"\d+([-,:]\d+)*(%[1-9]\d*)?", "indexes such as 0-9, 1,3,5, 0-30:10 or 0-99%4"),
        Field(
            description="Indexes of a job array: one job for each, which finds its index in SLURM_ARRAY_TASK_ID. `0-99%4` runs four at "
            "a time."
        ),
    ] = None
    job_name: Annotated[_Line, Field(description="Name of the job; unset is the script's.")] = None
    output_dir: Annotated[
        str,
        AfterValidator(_check_line),
        ExpandedPath,
        match(r"[^%]+", "a folder without %; the file in it is slurm-JOBID.out"),
        Field(description="Folder of the log `slurm-JOBID.out`, made if it is not there."),
    ] = "."
    requeue: Annotated[
        bool,
        Field(description="Whether Slurm requeues the job after a preemption or a lost node."),
    ] = False
    signal: Annotated[
        str | None,
        # Not SIGTERM, which a job also receives when it is cancelled.
        match(r"(?i)(SIG)?USR[12]@[1-9]\d*", "USR1@SECONDS or USR2@SECONDS, such as USR1@120"),
        Field(
            description="`USR1@SECONDS` or `USR2@SECONDS`: the signal the scripts get so long before the time limit; "
            "with `requeue` the job is then run again."
        ),
    ] = None
    max_restarts: torchrun.MaxRestarts = Field(
        0, description="Maximum number of restarts of all processes after a failure, inside the job."
    )
    ranks: torchrun.Ranks = Field(
        0, description="Ranks whose output is in the job's log: `all`, `none`, or a list as in `0,2`."
    )
    progress_line: torchrun.ProgressLine = None
    stall_timeout: torchrun.StallTimeout = None
    stall_action: torchrun.StallActionKey = "report"
    startup_timeout: torchrun.StartupTimeout = None
    preflight: torchrun.Preflight = False
    start_method: torchrun.StartMethod = "auto"
    _check_stalls = model_validator(mode="after")(torchrun.check_stall_keys)
    sbatch_args: Annotated[
        list[str],
        AfterValidator(_check_options),
        Field(description="More lines for sbatch, without the `#SBATCH`: `--constraint=a100`."),
    ] = Field(default_factory=list)
    setup: Annotated[
        list[str],
        Field(description="Lines of shell at the start of the batch script: `module load cuda`."),
    ] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if _count_requested_gpus(self.sbatch_args, self.nnodes) and count_gpus(self.gpus_per_node):
            raise ValueError("sbatch_args: GPUs are requested by gpus_per_node too; remove one of them")
        return self

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        if "SLURM_JOB_ID" in spec.environ:
            return self._plan_step(spec)
        if variables := [name for name in _OVERRIDING_VARIABLES if spec.environ.get(name)]:
            raise UsageError(
                f"Cannot submit a job: {variables[0]}={spec.environ[variables[0]]} overrides the batch script. Unset it, and "
                "use keys of the profile such as launcher.gpus_per_node."
            )
        source = "gpus_per_node" if count_gpus(self.gpus_per_node) else "sbatch_args"
        count = count_processes(spec, self.nproc_per_node, self.gpus, source)
        job = SlurmJobPlan(
            script=self._format_batch_script(spec, count),
            array=self.array or "",
            output_dir=self.output_dir,
        )
        return self.build_plan(
            spec,
            job,
            argv=("sbatch", "--parsable", "--export=ALL"),
            env=build_environment(spec, {}),
            nproc_per_node=count,
            device="GPU" if self.gpus else "cpu",
        )

    @override
    def run(self, plan: Plan) -> int:
        if plan.job is None:
            return torchrun.Torchrun().run(plan)
        return submit_job(plan)

    @classmethod
    @override
    def open_jobs(cls, values: Mapping[str, Any]) -> SlurmJobs:
        return SlurmJobs()

    @property
    def gpus(self) -> int:
        """The number of GPUs per node."""
        return count_gpus(self.gpus_per_node) or _count_requested_gpus(self.sbatch_args, self.nnodes)

    def _plan_step(self, spec: LaunchSpec) -> Plan:
        """Return the plan of the agent of one node, in a step of a running job."""
        endpoint, run_id = _find_rendezvous(spec.environ, self.nnodes)
        if "detach" in spec.option_values:
            raise UsageError(
                f"Cannot use --detach here: this step of the Slurm job {spec.environ['SLURM_JOB_ID']} runs the script itself. "
                "Leave it out."
            )
        return torchrun.Torchrun(
            nnodes=self.nnodes,
            nproc_per_node=self.nproc_per_node,
            rdzv_endpoint=endpoint,
            rdzv_id=run_id,
            max_restarts=self.max_restarts,
            ranks=self.ranks,
            stall_timeout=self.stall_timeout,
            stall_action=self.stall_action,
            startup_timeout=self.startup_timeout,
            preflight=self.preflight,
            start_method=self.start_method,
        ).plan(spec)

    def _format_batch_script(self, spec: LaunchSpec, nproc_per_node: int) -> str:
        """Return the batch script; the nodes of a step derive their rendezvous themselves (`planning/nodes.py`)."""
        run = f"""\
# srun exits with the highest exit code of the nodes: that of a node ended by the failure of another becomes 1.
# Slurm signals every process of a node: the warning must not end those that do not handle it.
node_command='trap : HUP INT TERM; trap "" USR1 USR2; "$@"; code=$?; exit $((code == 143 ? 1 : code))'

{self._format_srun_command(spec, nproc_per_node)}"""
        if self.requeue and self.signal:
            name, _, seconds = self.signal.removeprefix("SIG").partition("@")
            run = f"""\
requeue_pid=
requeue_before_limit() {{
  echo "accel: the time limit is near: sending SIG{name} to the scripts, then requeueing job $SLURM_JOB_ID" >&2
  scancel --signal={name} "$SLURM_JOB_ID"
  (sleep {max(1, int(seconds) - _REQUEUE_MARGIN_S)}; scontrol requeue "$SLURM_JOB_ID") &
  requeue_pid=$!
}}
trap requeue_before_limit {name}

{run} &

step=$!
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done
# Slurm may not kill the background process, which would requeue the next attempt.
[ -z "$requeue_pid" ] || {{ kill "$requeue_pid"; scontrol requeue "$SLURM_JOB_ID"; }}
exit "$code\""""
        parts = [
            "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in self._list_options(spec))]),
            "\n".join(self.setup),
            'echo "accel: Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}" >&2',
            run,
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _list_options(self, spec: LaunchSpec) -> list[str]:
        """Return the options of sbatch, as on lines of a batch script."""
        name = "".join(letter if letter.isprintable() else "_" for letter in Path(spec.target).name).strip()
        values: dict[str, Any] = {
            "--job-name": self.job_name or name or "accel",
            "--nodes": self.nnodes,
            "--ntasks-per-node": 1,
            "--gpus-per-node": self.gpus_per_node or None,
            "--cpus-per-task": self.cpus_per_task,
            "--mem": self.mem,
            "--partition": self.partition,
            "--account": self.account,
            "--qos": self.qos,
            "--time": self.time,
            "--array": self.array,
            "--output": str(Path(self.output_dir) / ("slurm-%A_%a.out" if self.array else "slurm-%j.out")),
            # With B: only the batch script receives the signal.
            "--signal": self.signal and ("B:" if self.requeue else "") + self.signal.removeprefix("SIG"),
        }
        options = [f"{option}={value}" for option, value in values.items() if value is not None]
        options += ["--requeue", "--open-mode=append"] if self.requeue else ["--no-requeue"]
        return [*map(quote_for_bash, options), *self.sbatch_args]

    def _format_srun_command(self, spec: LaunchSpec, nproc_per_node: int) -> str:
        """Return the command that runs `accel launch` on every node."""
        # Without --cpu-bind=none the one task of a node, and all its processes, could be bound to one core.
        srun = f"srun --nodes={self.nnodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none"
        # Since Slurm 22.05 srun does not take it from the job.
        srun += f" --cpus-per-task={self.cpus_per_task}" if self.cpus_per_task else ""
        values: dict[str, Any] = {"kind": "torchrun", "nnodes": self.nnodes, "nproc_per_node": nproc_per_node}
        values["max_restarts"] = self.max_restarts
        if self.ranks not in {0, "0"}:
            values["ranks"] = quote_for_bash(str(self.ranks))
        values |= self.model_dump(include={*torchrun.PASSED_KEYS}, exclude_defaults=True)
        lines = [
            srun,
            'bash -c "$node_command" accel',
            join_for_bash(build_command(spec.python)),
            *(f"--set launcher.{name}={value}" for name, value in values.items()),
            join_for_bash(spec.build_arguments()),
        ]
        return " \\\n  ".join(lines)


def _find_rendezvous(environ: Mapping[str, str], nnodes: int) -> tuple[str, str]:
    """Return the rendezvous endpoint of this step and its run id; the step must have one task on each of `nnodes` nodes."""
    job, step = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID")
    srun = f"srun --nodes={nnodes} --ntasks-per-node=1 accel launch ..."
    if step is None or "SLURM_STEP_NODELIST" not in environ:
        raise UsageError(
            f"Cannot submit a job: this shell is already inside the Slurm job {job}. Use {srun} to run in this job, or "
            "--set launcher.kind=torchrun to run on this node only."
        )
    nodes, tasks = environ.get("SLURM_STEP_NUM_NODES", "1"), environ.get("SLURM_STEP_NUM_TASKS", "1")
    if nodes != str(nnodes) or tasks != nodes:
        raise UsageError(
            f"This step of the Slurm job {job} has {tasks} task(s) on {nodes} node(s): the profile needs one on each of "
            f"{nnodes}. Use {srun}."
        )
    host, port, name = get_slurm_rendezvous(environ)
    return f"{host}:{port}", f"slurm-{name}"
