"""The fields of the `launcher:` section of a profile for clusters that SkyPilot starts."""

from __future__ import annotations

import shutil
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from accel_cli.launchers import job_launcher, torchrun
from accel_cli.launchers.sections import Answers, CountOrAuto, Question, match

__all__ = ["SkyPilotSection"]

DOWN_AFTER = 10
_AMOUNT = r"\d+(\.\d+)?\+?"


class SkyPilotSection(job_launcher.JobLauncher):
    """The keys of a job on a cluster of SkyPilot."""

    kind: Literal["skypilot"] = Field(
        "skypilot",
        description="A job on a cloud or a cluster that SkyPilot reaches: `accel launch` runs the command `sky`.",
    )
    infra: Annotated[
        str | None,
        match(
            r"[a-z0-9]+(/[\w.*@:-]+){0,2}", "an infrastructure such as aws, gcp/us-central1 or k8s/my-context"
        ),
        Question(
            "Which infrastructure?",
            hint="as in sky launch --infra: aws, gcp/us-central1; Enter for the cheapest",
        ),
    ] = Field(
        None,
        description="Cloud, region and zone, or a cluster, as in `sky launch --infra`; unset is the cheapest one that is enabled.",
    )
    nnodes: job_launcher.Nodes = 1
    accelerators: Annotated[
        str | None,
        match(r"[A-Za-z][\w.-]*(:[1-9]\d*)?", "a type with a number or without, such as H100:8"),
        Question("Which GPUs on each node?", hint="such as H100:8; Enter for none"),
    ] = Field(
        None, description="Type and number of the accelerators of each node, such as `H100:8`; unset is none."
    )
    nproc_per_node: Annotated[
        CountOrAuto,
        Question(
            "How many processes on each node?",
            suggest=lambda *_: 1,
            when=lambda answers: not answers.get("accelerators"),
            hint="a number",
        ),
    ] = Field(
        "auto",
        description="Number of processes on each node; `auto` is one for each of `accelerators`, or 1.",
    )
    cpus: Annotated[int | str | None, match(_AMOUNT, "a number such as 8 or 8+")] = Field(
        None, description="CPUs of each node: `8`, or `8+` for at least 8."
    )
    memory: Annotated[int | str | None, match(_AMOUNT, "gigabytes such as 64 or 64+")] = Field(
        None, description="Memory of each node in GB: `64`, or `64+` for at least 64."
    )
    disk_size: int | None = Field(
        None, ge=1, description="Disk of each node in GB; unset is SkyPilot's default."
    )
    managed: bool = Field(
        False,
        description="Submit a managed job (`sky jobs launch`): SkyPilot starts it again on another cluster after a preemption or a lost node, "
        "and ends the clusters itself. Scripts continue with `accelerator.resume()`.",
    )
    spot: bool = Field(
        False,
        description="Use spot instances, which are cheaper. SkyPilot starts an interrupted job again only if it is `managed`.",
    )
    image: Annotated[
        str | None, match(r"\S+", "an image without spaces, such as docker:registry/accel:cuda")
    ] = Field(
        None,
        description="Image of the nodes: `docker:IMAGE`, or that of a cloud; unset is SkyPilot's.",
    )
    setup: list[str] = Field(
        default_factory=list,
        description="Lines of shell that install torch, accel and what the script needs on each node, once.",
    )
    secrets: list[Annotated[str, match(r"[A-Za-z_]\w*", "the name of an environment variable")]] = Field(
        default_factory=list,
        description="Names of environment variables of this machine that are passed as secrets of the task: `[WANDB_API_KEY]`.",
    )
    task: dict[str, Any] = Field(
        default_factory=dict,
        description="More members of the task, merged into those that accel generates: `{file_mounts: {/data: s3://bucket}}`. What accel "
        "sets itself is refused.",
    )
    python: Annotated[str, match(r"[^\s'\"`$;&|<>()\\]+", "a path without spaces and quotes")] = Field(
        "python", description="Python on the nodes that has accel."
    )
    down_after: int = Field(
        DOWN_AFTER,
        ge=0,
        description="Minutes after the job for which the cluster stays, with its log; SkyPilot then ends it. It is billed until then.",
    )
    source_dir: job_launcher.SourceDir = "."
    include: job_launcher.Include = Field(default_factory=list)
    exclude: job_launcher.Exclude = Field(default_factory=list)
    job_name: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="Start of the cluster's name, before random characters; unset is the script's name."
    )
    max_restarts: torchrun.MaxRestarts = Field(
        0, description="Maximum number of restarts of all processes after a failure, on the same nodes."
    )
    rdzv_timeout: torchrun.RdzvTimeout = 600
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
    def _check_managed(self) -> Self:
        if self.managed and self.down_after != DOWN_AFTER:
            raise ValueError(
                "down_after: SkyPilot ends the clusters of a managed job itself; remove it, or managed"
            )
        return self

    @property
    def num_gpus(self) -> int:
        """The number of accelerators of each node."""
        return _count_accelerators(self.accelerators)

    @classmethod
    @override
    def may_start_several(cls, answers: Answers) -> bool:
        each = answers.get("nproc_per_node", max(1, _count_accelerators(answers.get("accelerators"))))
        return (answers.get("nnodes", 1), each) != (1, 1)

    @classmethod
    @override
    def get_missing_requirement(cls) -> str:
        return "" if shutil.which("sky") else "sky"


def _count_accelerators(accelerators: str | None) -> int:
    """Return the number in a value such as `H100:8`; 1 without a number."""
    return int(accelerators.partition(":")[2] or 1) if accelerators else 0
