"""The base class of launchers, a section of the profile that builds the plan of a launch, and the choice of devices."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from accel_cli.errors import UsageError
from accel_cli.launchers.sections import Answers, Section
from accel_cli.planning.launch_options import LaunchOption
from accel_cli.planning.machine import Machine, check_has_files
from accel_cli.planning.nodes import NodeLayout, NodeOptions, find_nodes
from accel_cli.planning.plan import Plan
from accel_runtime.environment.group_libraries import GROUP_LIBRARIES
from accel_runtime.environment.settings import FullyShard, MixedPrecision, ProcessGroupBackend, Settings

if TYPE_CHECKING:
    from accel_cli.launchers.job_service import Jobs

__all__ = [
    "DETACH",
    "GPU_VARIABLES",
    "JOB_NAME",
    "GpuIds",
    "KeepDays",
    "KeepRuns",
    "LaunchSpec",
    "Launcher",
    "Plan",
    "build_environment",
    "build_rank_command",
    "choose_gpus",
    "resolve_device",
]

KeepRuns = Annotated[
    int,
    Field(
        ge=1,
        description="Number of run folders to keep; a new run removes the oldest ones whose runs have ended.",
    ),
]
KeepDays = Annotated[
    int,
    Field(ge=1, description="Days to keep the folder of a run after its end; a new run removes older ones."),
]
DETACH = LaunchOption("--detach", "Submit the job and print its id without following it.")
JOB_NAME = LaunchOption("--job-name", "Set the name of the job.", "NAME", "launcher.job_name")


@dataclass(frozen=True)
class LaunchSpec:
    """The target of a launch, with the settings, environment and machine it runs on."""

    target: str
    """The script, module or program, as it was typed."""
    args: tuple[str, ...]
    """Its arguments, unchanged."""
    kind: Literal["script", "module", "program"]
    settings: Settings
    """The settings that the processes receive."""
    env: Mapping[str, str]
    """The environment variables of the profile."""
    environ: Mapping[str, str]
    """The environment that the processes inherit; `env` never overrides its variables."""
    machine: Machine
    python: str
    """The interpreter that runs scripts and modules."""
    is_builtin: bool = False
    """True if the target is a module of accel, for which the profile's function of the user's script is ignored."""
    nodes: NodeLayout = field(default_factory=NodeLayout)
    """The nodes of the run, and the rank of this one."""
    option_values: Mapping[str, Any] = field(default_factory=dict)
    """The values of the launcher's own options, as typed, by name."""
    jobs_options: str = ""
    """The options with which `accel jobs` finds a submitted job, each with a space before it."""

    @property
    def target_options(self) -> tuple[str, ...]:
        """The options of `accel launch` for the kind of the target."""
        options = {"script": (), "module": ("-m",), "program": ("--no-python",)}
        return options[self.kind]

    def build_arguments(self, target: str = "") -> tuple[str, ...]:
        """Return the target, or its path on a node, and its arguments, as `accel launch` takes them."""
        return (*self.target_options, "--", target or self.target, *self.args)


class Launcher(Section):
    """A way to start processes, and the `launcher:` section of a profile that selects it."""

    kind: str
    """Its name in the table of launchers; subclasses declare it as a `Literal`."""

    title: ClassVar[str]
    """Its name in the wizard."""
    proven_on: ClassVar[str] = ""
    """The evidence that it works: `real service`, `emulator` or `CPU only`, a colon, and the details; docs/policies.md lists it."""
    location: ClassVar[Literal["local", "pod", "hosts", "job"]] = "local"
    """The place of its processes: this machine, the hosts of a TPU of which this is one, hosts on which it starts them itself,
    or a job of a service."""
    replaces_process: ClassVar[bool] = False
    """True if the script replaces the launcher's process."""
    job_keys: ClassVar[tuple[str, ...]] = ()
    """The keys that `accel jobs` needs to find its jobs."""
    launch_options: ClassVar[tuple[LaunchOption, ...]] = ()
    """Its options of `accel launch`, in addition to those of all launchers."""
    key_aliases: ClassVar[Mapping[str, str]] = {}
    """Its name of a key that an option of `accel launch` sets under another name."""
    listed_packages: ClassVar[tuple[str, ...]] = ()
    """The packages that `accel env` lists for it, also if they are not installed."""
    variables: ClassVar[tuple[str, ...]] = ()
    """The prefixes of the variables of its service or library, which `accel env` lists."""
    formats: ClassVar[frozenset[str]] = frozenset(get_args(MixedPrecision))
    """The formats of mixed precision that its processes support."""
    process_group_backends: ClassVar[frozenset[ProcessGroupBackend]] = frozenset({"auto", "gloo", "nccl"})
    """The process group backends that its processes support."""
    supports_sharding: ClassVar[bool] = True
    """True if its processes can shard a model as `parallel:` says."""
    advanced_title: ClassVar[str] = ""
    """The subject of its advanced questions; empty if it has none."""

    @property
    def may_share_files(self) -> bool:
        """False if its nodes surely have separate files, so that the first one writes all of a checkpoint.

        Nodes that see the folder of a checkpoint write their part in any case.
        """
        return True

    @property
    def sent_folder(self) -> str | None:
        """The folder whose files its nodes get; None if they get none."""
        return None

    @property
    def has_own_folder(self) -> bool:
        """True if its nodes may have the files of the current folder at another path."""
        return False

    @classmethod
    def get_missing_requirement(cls) -> str:
        """Return the packages that are not installed, with commas between; empty if nothing is missing."""
        return ""

    @classmethod
    def get_missing_service(cls) -> str:
        """Return what shows that this machine cannot reach the service; empty if nothing does."""
        return ""

    @classmethod
    def is_available(cls, machine: Machine) -> bool:  # noqa: ARG003 - most are offered everywhere
        """Return True if the wizard offers it on this machine."""
        return True

    @classmethod
    def may_start_several(cls, answers: Answers) -> bool:  # noqa: ARG003 - most start one process, or none of their own
        """Return True if answers of the wizard may lead to several processes, over which models can be sharded."""
        return False

    @classmethod
    def prefers_bf16(cls, machine: Machine) -> bool:
        """Return True if bfloat16 is the recommended format on this machine."""
        return machine.bf16

    @classmethod
    def find_nodes(cls, options: NodeOptions, environ: Mapping[str, str], machine: Machine) -> NodeLayout:  # noqa: ARG003 - some need it
        """Return the nodes of a launch, from options and the variables of schedulers."""
        return find_nodes(options, environ, parent=os.getppid())

    @classmethod
    def describe_environment(
        cls,
        machine: Machine,  # noqa: ARG003 - most have no devices of their own
        environ: Mapping[str, str],  # noqa: ARG003
    ) -> Mapping[str, Mapping[str, str] | str]:
        """Return the sections of `accel env` about its devices or its service, by title."""
        return {}

    def supports_process_group_backend(self, name: str) -> bool:
        """Return True if the processes of this launcher have a process group backend, or its library is installed here."""
        # In the container of a job the launcher is an ordinary one.
        return name in self.process_group_backends or (
            name in GROUP_LIBRARIES.names and find_spec(GROUP_LIBRARIES[name].package) is not None
        )

    def check_layout(self, settings: Settings) -> None:
        """Raise if models are to be sharded and this launcher's processes cannot do it.

        Raises:
            UsageError: The settings shard models.
        """
        if (engine := settings.engine) and not self.supports_sharding:
            raise UsageError(
                f"Cannot use {engine.key}: {engine.choice} with launcher.kind: {self.kind}: {engine.title} does not support its "
                f"device. Remove the section {engine.name}, or choose another launcher."
            )
        if not (self.supports_sharding or (settings.parallel.plain and settings.fully_shard == FullyShard())):
            raise UsageError(
                f"Cannot use parallel: and fully_shard: with {self.title}: it shards models by launcher.spmd: true and the "
                "shardings in the script. Remove both sections, or choose another launcher."
            )

    def get_world_sizes(self, spec: LaunchSpec, plan: Plan) -> Sequence[int]:  # noqa: ARG002 - some need it
        """Return the possible world sizes of a plan, as far as they are known before the start."""
        min_nodes = plan.agent.min_nodes if plan.agent else plan.nnodes
        return [nnodes * plan.nproc_per_node for nnodes in range(min_nodes, plan.nnodes + 1)]

    def preview(self, plan: Plan, options: Mapping[str, Any]) -> str:  # noqa: ARG002 - some depend on options
        """Return what would be sent to a service, for `--dry-run` and options that only print; empty if nothing is.

        Args:
            plan: The plan; nothing of it is run.
            options: The values of the launcher's own options, as typed, by name.
        """
        return plan.job.preview() if plan.job else ""

    @abstractmethod
    def plan(self, spec: LaunchSpec) -> Plan:
        """Return the plan of a launch.

        Raises:
            UsageError: This launcher cannot run it on this machine.
        """

    @abstractmethod
    def run(self, plan: Plan) -> int:
        """Run a plan, and return the exit code of `accel launch`."""

    @classmethod
    def open_jobs(cls, values: Mapping[str, Any]) -> Jobs:
        """Return the jobs of the service to which the launcher submits; for launchers of jobs only.

        Args:
            values: The values of the profile by dotted key; empty if it is of another launcher.

        Raises:
            UsageError: The service is not available.
        """
        raise NotImplementedError


def build_rank_command(spec: LaunchSpec, file: str = "worker.py", *options: str) -> tuple[str, ...]:
    """Return the command of a process: a file of accel that runs the target, and records progress and failures."""
    check_has_files("start processes")
    # By path: `-m` would put the current folder before the standard library while the file loads.
    path = Path(__file__).parent.parent / file
    return (spec.python, str(path), *options, spec.kind, spec.target, *spec.args)


def build_environment(spec: LaunchSpec, defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the profile and of its settings, which are added to the inherited environment.

    Args:
        spec: The launch.
        defaults: Variables that neither the profile nor the inherited environment need to set.
    """
    variables = {name: value for name, value in {**defaults, **spec.env}.items() if name not in spec.environ}
    return {**variables, **spec.settings.to_env()}


def resolve_device(spec: LaunchSpec, processes: int) -> str:
    """Return the type of device of a launch, after a check that there are enough for its processes.

    Raises:
        UsageError: The device is missing, or there are fewer devices than processes.
    """
    device, machine = spec.settings.device, spec.machine
    if machine.problem:
        raise UsageError(machine.problem)
    if device == "cpu" or (device == "auto" and not machine.devices):
        if spec.settings.process_group_backend == "nccl":
            raise UsageError(
                "Invalid process_group_backend 'nccl': it needs GPUs, and this run is on the CPU. Use gloo or auto."
            )
        return "cpu"
    if device not in {"auto", machine.accelerator}:
        raise UsageError(
            f"Device {device} not found: this machine has {machine.summary}. Use --cpu, or set device: auto."
        )
    # Two ranks of NCCL cannot use one GPU; over gloo they can.
    if processes > len(machine.devices) and spec.settings.process_group_backend != "gloo":
        raise UsageError(
            f"Cannot start {processes} processes: this machine has {len(machine.devices)} "
            f"{machine.accelerator} device(s) ({machine.summary}). Start at most that many, share "
            "devices with process_group_backend: gloo, or use --cpu."
        )
    return str(machine.accelerator)


GPU_VARIABLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cuda": ("CUDA_VISIBLE_DEVICES",),
        "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        "xpu": ("ZE_AFFINITY_MASK",),
        "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
        "mlu": ("MLU_VISIBLE_DEVICES",),
        "musa": ("MUSA_VISIBLE_DEVICES",),
        "sdaa": ("SDAA_VISIBLE_DEVICES",),
        "hpu": ("HABANA_VISIBLE_MODULES",),
    }
)
"""The variables that limit a process to some GPUs, by torch's name of the accelerator; the first that is set is used."""
_ALL = "all"
_IDS = re.compile(r"[\w.:/-]+(,[\w.:/-]+)*", re.ASCII)


def _check_ids(value: int | str | None) -> int | str | None:
    if value is None:
        return None
    ids = str(value).replace(" ", "")
    if not _IDS.fullmatch(ids) or ids.startswith("-") or isinstance(value, bool):
        raise ValueError("expected all, or ids as in 0,2")
    if len(set(ids.split(","))) < len(ids.split(",")):
        raise ValueError("expected each id once")
    return value if isinstance(value, int) else ids


def _join_ids(value: Any) -> Any:
    """Return a list of ids as text."""
    if not isinstance(value, list):
        return value
    if not value or not all(type(name) in {int, str} for name in value):
        raise ValueError("expected all, or ids as in 0,2 or [0, 2]")
    return ",".join(map(str, value))


GpuIds = Annotated[
    int | str | None,
    BeforeValidator(_join_ids),
    AfterValidator(_check_ids),
    Field(
        json_schema_extra={
            "anyOf": [
                {"type": ["integer", "string", "null"]},
                {"type": "array", "items": {"type": ["integer", "string"]}, "minItems": 1},
            ]
        }
    ),
    Field(
        description="GPUs to use, by the ids that the vendor's variable takes (`CUDA_VISIBLE_DEVICES`, ...), as in `0,2` or `[0, 2]`; unset "
        "or `all` uses every one. If that variable is set already, they must be among those that it names. On the CPU it "
        "has no effect."
    ),
]


def choose_gpus(spec: LaunchSpec, gpu_ids: int | str | None) -> tuple[LaunchSpec, dict[str, str]]:
    """Return a launch on the machine with the chosen GPUs only, and the variable that shows its processes these."""
    machine = spec.machine
    if spec.settings.device == "cpu" or machine.problem:
        return spec, {}
    names = GPU_VARIABLES.get("rocm" if machine.rocm else machine.accelerator or "", ())
    variable = next((name for name in names if name in spec.environ), next(iter(names), ""))
    visible = _list_visible(spec, variable)
    if variable in spec.env and variable not in spec.environ:
        return _follow_profile(spec, gpu_ids, variable, visible), {}
    if gpu_ids in {None, _ALL}:
        return spec, {}
    if not visible:
        raise UsageError(
            f"Cannot use launcher.gpu_ids: {gpu_ids}: this machine has no GPUs ({machine.summary}). "
            "Leave out --gpu-ids, or the key launcher.gpu_ids."
        )
    ids = str(gpu_ids).split(",")
    if unseen := [name for name in ids if name not in visible]:
        why = f"{variable}={spec.environ[variable]} shows" if variable in spec.environ else "this machine has"
        raise UsageError(
            f"Cannot use launcher.gpu_ids: {gpu_ids}: {why} no GPU {' and no GPU '.join(unseen)}. Choose among "
            f"{', '.join(visible)}."
        )
    return _select_devices(spec, visible, ids), {variable: ",".join(ids)}


def _follow_profile(
    spec: LaunchSpec, gpu_ids: int | str | None, variable: str, visible: list[str]
) -> LaunchSpec:
    """Return a launch on the GPUs that a variable in the profile's `env:` names."""
    value = spec.env[variable]
    if gpu_ids not in {None, _ALL}:
        raise UsageError(
            f"launcher.gpu_ids: {gpu_ids} and env.{variable}: {value} both choose GPUs. Remove one of them."
        )
    # Ids that are not numbers, such as UUIDs, are left to the vendor's library.
    return _select_devices(spec, visible, _split(value)) if set(_split(value)) <= set(visible) else spec


def _list_visible(spec: LaunchSpec, variable: str) -> list[str]:
    """Return the ids of the GPUs that torch has found, in its order: by number unless the variable names them."""
    count = len(spec.machine.devices) if variable else 0
    named = _split(spec.environ[variable]) if variable in spec.environ else []
    return (named or [str(number) for number in range(count)])[:count]


def _split(ids: str) -> list[str]:
    return [name.strip() for name in ids.split(",") if name.strip()]


def _select_devices(spec: LaunchSpec, visible: list[str], chosen: list[str]) -> LaunchSpec:
    devices = tuple(spec.machine.devices[visible.index(name)] for name in chosen)
    return replace(spec, machine=replace(spec.machine, devices=devices))
