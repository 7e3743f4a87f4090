"""The `launcher:` section of a profile for jobs of a Ray cluster, and its plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import override

from accel_cli.console import is_secret, mask_secrets
from accel_cli.errors import UsageError
from accel_cli.extensions.ray.plan import RayJobPlan, RayRun
from accel_cli.launchers import job_launcher, torchrun
from accel_cli.launchers.launcher import LaunchSpec, Plan
from accel_cli.launchers.sections import Choice, ExpandedPath, ItemError, Question, match
from accel_cli.planning.plan import name_target

if TYPE_CHECKING:
    from accel_cli.extensions.ray.service import RayJobs

__all__ = ["Ray"]

_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables of Ray that take precedence over the address, the first one first."""
_RESERVED = {"CPU": "launcher.cpus_per_process", "GPU": "launcher.gpus_per_node"}
"""Resources of Ray that other keys set."""
_OTHER_ACCELERATORS = frozenset({"HPU", "NPU", "RBLN", "neuron_cores"})
"""Resources of Ray of which each may be a device, or a part of one."""


def _check_resources(value: dict[str, float]) -> dict[str, float]:
    for name, amount in value.items():
        if name in _RESERVED:
            raise ValueError(f"cannot contain {name}: set {_RESERVED[name]}")
        if amount <= 0:
            raise ItemError("expected amounts above 0", f"{name}: {amount:g}")
    return value


_Word = Annotated[str, match(r"[^\s'\"`$;&|<>()\\]+", "text without spaces and quotes")]


class Ray(job_launcher.JobLauncher):
    """A job of a Ray cluster, with one `accel launch` on each node of a placement group."""

    title: ClassVar[str] = "A job on a Ray cluster"
    proven_on: ClassVar[str] = "real service: a Ray cluster of several nodes on one machine, CPUs only"
    packages = ("ray",)
    job_keys: ClassVar[tuple[str, ...]] = ("address",)

    kind: Literal["ray"] = Field(
        "ray",
        description="A job of Ray: `accel launch` submits it to a running cluster through Ray's job API.",
    )
    address: Annotated[
        _Word,
        Field(
            description="Cluster: its dashboard, `http://HEAD:8265`, or `auto` for the one that runs on this machine. "
            "RAY_API_SERVER_ADDRESS and RAY_ADDRESS take precedence."
        ),
        Question(
            "Which cluster?",
            suggest=lambda *_: "auto",
            hint="its dashboard, as http://head:8265; auto for the one on this machine",
        ),
    ] = "auto"
    nnodes: job_launcher.Nodes = Field(1, description="Number of nodes; each is another node of the cluster.")
    gpus_per_node: job_launcher.GpusPerNode = Field(
        0, description="GPUs to reserve on each node; 0 reserves none."
    )
    nproc_per_node: job_launcher.ProcessesPerNode = "auto"
    cpus_per_process: int = Field(
        1, ge=0, description="CPUs to reserve for each process, and its OMP_NUM_THREADS."
    )
    resources: Annotated[dict[str, float], AfterValidator(_check_resources)] = Field(
        default_factory=dict,
        description="Other resources to reserve on each node, `memory` in bytes: `{memory: 64e9, team: 1}`.",
    )
    source: Annotated[
        Literal["folder", "shared"],
        Field(
            description="`folder` sends the files of `source_dir` with the job; `shared` sends none, since all nodes have "
            "`working_dir` on a shared file system."
        ),
        Question(
            "Do the nodes share a file system with this machine?",
            suggest=lambda *_: "folder",
            choices=(
                Choice("folder", "no: send the working folder with each job"),
                Choice("shared", "yes: the working folder has the same path there"),
            ),
        ),
    ] = "folder"
    source_dir: job_launcher.SourceDir = "."
    include: job_launcher.Include = Field(default_factory=list)
    exclude: job_launcher.Exclude = Field(default_factory=list)
    working_dir: job_launcher.WorkingDir = Field(
        None,
        pattern="^/",
        description="Working folder on the nodes with `source: shared`; unset is the path of the current folder.",
    )
    requirements: Annotated[str | None, Field(min_length=1), ExpandedPath] = Field(
        None,
        description="Requirements file that Ray installs with pip, in an environment of the job on every node.",
    )
    runtime_env: dict[str, Any] = Field(
        default_factory=dict,
        description="More members of Ray's runtime environment of the job: `{image_uri: rayproject/ray:2.50.0}`. What accel sets "
        "itself is refused.",
    )
    job: dict[str, Any] = Field(
        default_factory=dict,
        description="More arguments of `JobSubmissionClient.submit_job`, for the driver: `{entrypoint_resources: {head: 1}}`.",
    )
    python: _Word = Field("python", description="Python on the head node that has Ray and accel.")
    job_name: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="Start of the job's id, before random characters; unset is the script's name."
    )
    max_restarts: torchrun.MaxRestarts = Field(
        0, description="Maximum number of restarts of all processes after a failure, on the same nodes."
    )
    max_retries: int = Field(
        0,
        ge=0,
        description="Number of times that Ray starts the run again after a node was lost, in a new placement group; scripts "
        "continue with `accelerator.resume()`.",
    )
    start_timeout: int = Field(
        1800, ge=1, description="Seconds to wait until the cluster has the resources for all nodes."
    )
    ranks: torchrun.Ranks = 0
    shutdown_timeout: torchrun.ShutdownTimeout = 30
    progress_line: torchrun.ProgressLine = None
    stall_timeout: torchrun.StallTimeout = None
    stall_action: torchrun.StallActionKey = "report"
    startup_timeout: torchrun.StartupTimeout = None
    preflight: torchrun.Preflight = False
    start_method: torchrun.StartMethod = "auto"
    _check_stalls = model_validator(mode="after")(torchrun.check_stall_keys)

    @model_validator(mode="after")
    def _check_bundle(self) -> Self:
        if not (self.cpus_per_process or self.gpus_per_node or self.resources):
            raise ValueError(
                "cpus_per_process, gpus_per_node or resources must reserve something on each node"
            )
        uncounted = sorted(_OTHER_ACCELERATORS & self.resources.keys())
        if uncounted and self.nproc_per_node == "auto":
            raise ValueError(f"resources: cannot count processes from {uncounted[0]}; set nproc_per_node")
        return self

    @property
    @override
    def may_share_files(self) -> bool:
        # Nodes that unpack the source themselves have no common folder.
        return self.nnodes == 1 or self.source == "shared"

    @property
    @override
    def sent_folder(self) -> str | None:
        return self.source_dir if self.source == "folder" else None

    @property
    @override
    def has_own_folder(self) -> bool:
        return self.working_dir is not None

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        _check_env(spec.env, "env")
        _check_env(self.runtime_env.get("env_vars") or {}, "launcher.runtime_env.env_vars")
        count = job_launcher.count_processes(spec, self.nproc_per_node, self.gpus_per_node)
        target, sent = self.locate(spec, "use launcher.source: shared if all nodes have it at the same path")
        shared = None if spec.is_builtin else self.working_dir or str(Path.cwd())
        settings = spec.settings
        if not self.gpus_per_node and not self.resources:
            if settings.device not in {"auto", "cpu"}:
                raise UsageError(
                    f"Cannot use device {settings.device} with launcher.kind: ray: the job reserves no GPU. Set "
                    "launcher.gpus_per_node, or the resource of the device in launcher.resources."
                )
            # A node may have GPUs that Ray gives to other jobs.
            settings = replace(settings, device="cpu")
        # Ray gives its variables precedence over the address.
        variable = next((name for name in _ADDRESS_VARIABLES if spec.environ.get(name)), "")
        threads = {"OMP_NUM_THREADS": str(max(1, self.cpus_per_process))}
        run = RayRun(
            nnodes=self.nnodes,
            bundle=self._build_bundle(count, on_cpu=spec.settings.device == "cpu"),
            options=self.build_options(count),
            target=spec.build_arguments(target),
            env={**threads, **spec.env, **settings.to_env()},
            sends_source=sent is not None,
            folder=sent.cwd if sent else shared,
            script=target if spec.kind == "script" else None,
            fixed_ranks=self.max_restarts == 0,
            max_retries=self.max_retries,
            start_timeout=self.start_timeout,
            shutdown_timeout=self.shutdown_timeout,
        )
        job = RayJobPlan(
            address=spec.environ[variable] if variable else self.address,
            address_source=variable,
            name=_clean_name(self.job_name or name_target(spec.target)),
            python=self.python,
            requirements=self._read_requirements(),
            runtime_env=self.runtime_env,
            submission=self.job,
            sent=sent,
            run=run,
        )
        return self.build_plan(
            spec,
            job,
            argv=job.entrypoint.split(),
            env=run.env,
            nproc_per_node=count,
            device="GPU" if self.gpus_per_node else "auto" if self.resources else "cpu",
        )

    @override
    def run(self, plan: Plan) -> int:
        from accel_cli.extensions.ray.service import submit  # noqa: PLC0415 - not for a dry run

        return submit(plan)

    @classmethod
    @override
    def open_jobs(cls, values: Mapping[str, Any]) -> RayJobs:
        from accel_cli.extensions.ray.service import RayCluster, RayJobs  # noqa: PLC0415 - only for jobs

        return RayJobs(RayCluster(values.get("launcher.address") or "auto"))

    def _build_bundle(self, nproc_per_node: int, *, on_cpu: bool) -> dict[str, float]:
        """Return the resources that each node reserves."""
        gpus = 0 if on_cpu else self.gpus_per_node
        bundle = {"CPU": nproc_per_node * self.cpus_per_process, "GPU": gpus, **self.resources}
        return {name: amount for name, amount in bundle.items() if amount}

    def _read_requirements(self) -> tuple[str, ...]:
        """Return the lines of the requirements file."""
        if self.requirements is None:
            return ()
        try:
            lines = Path(self.requirements).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UsageError(
                f"Cannot read launcher.requirements {self.requirements}: {reason}. Correct the path, or remove the key."
            ) from None
        for line in lines:
            if mask_secrets("", line) != line:
                raise UsageError(
                    f"Cannot use launcher.requirements {self.requirements}: it has a password in a URL, which the state of the job "
                    "would show. Set PIP_INDEX_URL on the nodes instead."
                )
        return tuple(line for line in map(str.strip, lines) if line and not line.startswith("#"))


def _check_env(env: Mapping[str, str], key: str) -> None:
    """Raise if a variable of a key looks like a secret."""
    for name in filter(is_secret, env):
        raise UsageError(
            f"{key}.{name} looks like a secret, and Ray stores the variables of a job in a file that all users of its nodes can "
            "read. Set it where the nodes are started, before ray start, or have the script read it from a file."
        )


def _clean_name(text: str) -> str:
    """Return text that can be part of the id of a job, and of an URL."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:48] or "job"
