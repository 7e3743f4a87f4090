"""What every launcher is: a section of the profile that turns a job into a plan."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from accel_cli.errors import UsageError
from accel_cli.planning import plan
from accel_cli.planning.machine import Machine
from accel_cli.planning.nodes import Facts
from accel_cli.planning.plan import Plan
from accel_cli.profile.fields import Answers, Section
from accel_runtime.env import FullyShard, MixedPrecision, ProcessGroupBackend, Settings

__all__ = ["Job", "Launcher", "Plan"]


@dataclass(frozen=True)
class Job:
    """What is to run, and what is known about where."""

    target: str
    """The script, module or program, as it was typed."""
    args: tuple[str, ...]
    """Its arguments, untouched."""
    kind: Literal["script", "module", "program"]
    settings: Settings
    """What the processes are told."""
    env: Mapping[str, str]
    """The profile's own variables for the processes."""
    environ: Mapping[str, str]
    """The environment the processes inherit; what it sets is never overridden by `env`."""
    machine: Machine
    python: str
    """The interpreter that runs scripts and modules."""
    as_a_whole: bool = False
    """Whether the target runs as a whole, also where the profile names a function of the user's script."""
    nodes: Facts = field(default_factory=Facts)
    """What is known of the machines, and of this one among them."""


class Launcher(Section):
    """A way to start processes, and at the same time the `launcher:` section of the profile."""

    title: ClassVar[str]
    """What the wizard calls it."""
    runs: ClassVar[Literal["here", "pod", "job"]] = "here"
    """Where its processes run: on this machine; on the hosts of a TPU, of which this is one; where a service puts them."""
    alone: ClassVar[bool] = False
    """Whether it is one process, with no launcher beside it."""
    found_by: ClassVar[tuple[str, ...]] = ()
    """Its keys that say where its jobs are, where a service runs them."""
    words: ClassVar[Mapping[str, str]] = {}
    """Its own word for a key that an option of `accel launch` names by another's."""
    formats: ClassVar[frozenset[str]] = frozenset(get_args(MixedPrecision))
    """The number formats of the forward pass that its processes know."""
    carriers: ClassVar[frozenset[ProcessGroupBackend]] = frozenset({"auto", "gloo", "nccl"})
    """What may carry collectives between its processes."""
    divides: ClassVar[bool] = True
    """Whether its processes can divide a model among them as `parallel:` says."""
    further: ClassVar[str] = ""
    """What its further questions are about; empty where it has none."""

    @classmethod
    def lacks(cls) -> str:
        """What has to be installed before it can be used here, as pip calls it; empty if nothing has."""
        return ""

    @classmethod
    def offered(cls, machine: Machine) -> bool:  # noqa: ARG003 - most are offered everywhere
        """Whether the wizard offers it on this machine."""
        return True

    @classmethod
    def several(cls, answers: Answers) -> bool:  # noqa: ARG003 - most start one process, or none of their own
        """Whether answers of the wizard may mean several processes, over which models can be divided."""
        return False

    @classmethod
    def suits_bf16(cls, machine: Machine) -> bool:
        """Whether bfloat16 is what to compute in on this machine."""
        return machine.bf16

    def check_carrier(self, settings: Settings) -> None:
        """Refuse what cannot carry collectives where this launcher starts processes.

        Raises:
            UsageError: It is not one of `carriers`.
        """
        if settings.process_group_backend not in self.carriers:
            raise UsageError(
                f"process_group_backend: {settings.process_group_backend} is a library of SageMaker's own images, and only "
                f"launcher.kind: sagemaker has it; {self.title} takes auto"
            )

    def check_layout(self, settings: Settings) -> None:
        """Refuse models that are divided where this launcher's processes cannot do it.

        Raises:
            UsageError: They are to be divided.
        """
        if not (self.divides or (settings.parallel.plain and settings.fully_shard == FullyShard())):
            raise UsageError(
                f"parallel: and fully_shard: are torch's own ways to divide a model, and {self.title} has another: "
                "launcher.spmd: true, for which the script places the parts. Take both sections out, or choose another launcher"
            )

    def worlds(self, job: Job, plan: Plan) -> Sequence[int]:  # noqa: ARG002 - some know more of the job
        """The numbers of processes that there may be, as far as they are known before anything starts.

        Args:
            job: What is to run.
            plan: What will happen if this launcher runs it.
        """
        fewest = plan.agent.get("min_nodes", plan.nnodes)
        return [machines * plan.nproc_per_node for machines in range(fewest, plan.nnodes + 1)]

    @abstractmethod
    def plan(self, job: Job) -> Plan:
        """What will happen if this launcher runs the job.

        Raises:
            UsageError: The job cannot run this way on this machine.
        """


def environment(job: Job, defaults: Mapping[str, str]) -> dict[str, str]:
    """What to add to the inherited environment: a variable the user set is left alone."""
    return plan.build_environment(job.environ, defaults, job.env, job.settings)


def device_of(job: Job, processes: int) -> str:
    """The hardware in words, once it is known to be enough for so many processes.

    Raises:
        UsageError: The device is not there, or there are fewer than processes.
    """
    wanted, machine = job.settings.device, job.machine
    if machine.problem:
        raise UsageError(machine.problem)
    if wanted == "cpu" or (wanted == "auto" and not machine.devices):
        if job.settings.process_group_backend == "nccl":
            raise UsageError(
                "process_group_backend: nccl needs GPUs, and this run is on the CPU; use gloo or auto"
            )
        return "cpu"
    if wanted not in {"auto", machine.accelerator}:
        raise UsageError(
            f"device: {wanted} was asked for, but this machine has {machine.summary}. Use --cpu, or set device: auto."
        )
    # Two ranks of NCCL cannot use one GPU; over gloo they can.
    if processes > len(machine.devices) and job.settings.process_group_backend != "gloo":
        raise UsageError(
            f"{processes} processes were asked for, but this machine has {len(machine.devices)} "
            f"{machine.accelerator} device(s) ({machine.summary}). Ask for at most that many, share "
            "devices with process_group_backend: gloo, or use --cpu."
        )
    return str(machine.accelerator)
