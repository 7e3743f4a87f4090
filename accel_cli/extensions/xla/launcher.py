"""Replicas of torch_xla: the unmodified script on every TPU core, on one machine or on the hosts of a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.extensions.xla.tpu import get_devices
from accel_cli.launchers import torchrun
from accel_cli.launchers.launcher import LaunchSpec, Plan, build_environment, build_rank_command
from accel_cli.launchers.sections import Choice, Question
from accel_cli.planning.machine import Machine
from accel_cli.planning.nodes import NodeLayout, NodeOptions, list_nodes
from accel_runtime.environment.settings import RECORD
from accel_runtime.extensions.xla import ROUNDING

__all__ = ["Xla"]

_OFF = frozenset({"", "0", "false", "no", "off"})


def _parse_replicas(value: Any) -> Any:
    if value == "auto":
        return "all"  # the value of --nproc-per-node with other launchers
    if not isinstance(value, int | str) or isinstance(value, bool) or value not in {"all", 1}:
        raise ValueError(
            "expected all or 1: torch_xla starts a replica on every device of the machine, or on a single one"
        )
    return value


class Xla(torchrun.ElasticLauncher):
    """The script on every device that torch_xla finds, each a replica of the model."""

    title: ClassVar[str] = "TPU (torch_xla)"
    proven_on: ClassVar[str] = "CPU only: the CPU device of torch_xla; no TPU"
    location = "pod"
    listed_packages: ClassVar[tuple[str, ...]] = ("torch_xla", "libtpu")
    variables: ClassVar[tuple[str, ...]] = (
        "CPU_NUM_DEVICES", "LIBTPU_", "MEGASCALE_", "PJRT_", "TPU_", "XLA_",
    )  # fmt: skip
    key_aliases: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"launcher.nproc_per_node": "launcher.replicas"}
    )

    formats: ClassVar[frozenset[str]] = frozenset({"no", "bf16"})
    supports_sharding = False

    kind: Literal["xla"] = Field(
        "xla",
        description="A replica on every TPU core, started by torch_xla; or on its CPU device, to try it.",
    )
    replicas: Annotated[
        Literal["all", 1],
        BeforeValidator(_parse_replicas),
        Field(description="Number of devices of a machine to use: `all`, or 1 (on one machine)."),
        Question(
            "On how many TPU cores?",
            suggest=lambda *_: "all",
            choices=(
                Choice("all", "all: every core of the TPU, on every host of a pod"),
                Choice(1, "1: a single core, to try something"),
            ),
        ),
    ] = "all"
    spmd: Annotated[
        bool,
        Field(
            description="Compute in one process on all devices of the machine, as a mesh over which the model is sharded."
        ),
        Question(
            "How do the cores share the work?",
            suggest=lambda *_: False,
            choices=(
                Choice(False, "each has a replica of the model, and a part of every batch"),
                Choice(True, "SPMD: one process computes on all of them, with the model sharded"),
            ),
            when=lambda answers: answers.get("replicas") != 1,
        ),
    ] = False
    main_training_function: str | None = Field(
        None,
        min_length=1,
        description="A function of the script that is called without arguments on every replica, after the script was "
        "imported; unset runs the script itself.",
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        low, high = self.range
        if low != high:
            raise ValueError(
                f"nnodes: expected a number, since the hosts of a TPU do not change, got {self.nnodes}"
            )
        if self.replicas == 1 and (self.spmd or high > 1):
            other = "spmd uses all devices" if self.spmd else "several nodes use all devices of each"
            raise ValueError(f"replicas: 1 is one device of one machine, but {other}; use replicas: all")
        return self

    @classmethod
    @override
    def is_available(cls, machine: Machine) -> bool:
        devices = get_devices(machine)
        return devices.exists or devices.packages.torch_xla is not None

    @classmethod
    @override
    def prefers_bf16(cls, machine: Machine) -> bool:
        return True

    @classmethod
    @override
    def find_nodes(cls, options: NodeOptions, environ: Mapping[str, str], machine: Machine) -> NodeLayout:
        """Return the hosts of a TPU slice, on each of which the same command runs."""
        if environ.get("MEGASCALE_NUM_SLICES", "1") not in {"", "1"}:
            raise UsageError(
                f"Cannot use several TPU slices in one run: MEGASCALE_NUM_SLICES={environ['MEGASCALE_NUM_SLICES']}. Train on "
                "one slice."
            )
        tpu = get_devices(machine).tpu
        return list_nodes(options, tpu.hosts_source, tpu.hosts, ("TPU_WORKER_ID", tpu.worker))

    @classmethod
    @override
    def describe_environment(
        cls, machine: Machine, environ: Mapping[str, str]
    ) -> Mapping[str, Mapping[str, str] | str]:
        """Return the chips and hosts of a TPU, and the state of torch_xla."""
        devices = get_devices(machine)
        tpu, packages = devices.tpu, devices.packages
        return {
            "tpu": {
                "chips": tpu.summary or "none",
                **(
                    {"hosts": f"{len(tpu.hosts)}, this is number {tpu.worker} ({tpu.hosts_source})"}
                    if tpu.hosts
                    else {}
                ),
                "torch_xla": devices.problem or f"{packages.torch_xla}, with torch {packages.torch}",
                "PJRT_DEVICE": environ.get("PJRT_DEVICE", "not set"),
            }
        }

    @property
    @override
    def may_share_files(self) -> bool:
        # Each host of a pod has its own disk.
        return self.range[1] == 1

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        self.check_node_rank(spec)
        _check_settings(spec)
        pjrt_device = _find_pjrt_device(spec)
        if pjrt_device == "CPU" and self.replicas != 1 and not self.spmd:
            _check_cpu_replicas({**spec.env, **spec.environ})
        # SPMD prints a warning of XLA for every graph that it compiles.
        log_level = {"TF_CPP_MIN_LOG_LEVEL": "2"} if self.spmd else {}
        replica_spec = replace(spec, settings=replace(spec.settings, device="xla", spmd=self.spmd))
        env = build_environment(replica_spec, {**self.get_interfaces(), **log_level})
        function = "" if spec.is_builtin else self.main_training_function or ""
        mode = "spmd" if self.spmd else str(self.replicas)
        return Plan(
            launcher=self.kind,
            argv=build_rank_command(spec, "extensions/xla/replicas.py", mode, function),
            # Also if the user has set it, so that the plan shows the device.
            env={**env, "PJRT_DEVICE": pjrt_device},
            device=f"xla (PJRT_DEVICE={pjrt_device})",
            target=spec.target,
            nnodes=self.range[1],
            nproc_per_node=1,
            process_description=self._process_description,
            node_summary=spec.nodes.summary,
            agent=self.build_agent_settings(
                spec,
                ("exec", "SPMD runs one process per node") if self.spmd else ("torch_xla.launch", ""),
                starts_replicas=True,
            ),
        )

    @property
    def _process_description(self) -> str:
        if self.spmd:
            return "one process on all devices (SPMD)"
        return "one replica" if self.replicas == 1 else "a replica on every device"


def _check_recorders(spec: LaunchSpec) -> None:
    """Raise for variables of recorders, which have no effect under torch_xla."""
    for variable, value in {**spec.env, **spec.environ}.items():
        if variable.startswith(RECORD) and value:
            raise UsageError(
                f"Cannot use {variable} with launcher.kind: xla: torch_xla executes a step as a graph, whose numbers a recorder does "
                "not see. Unset it."
            )


def _check_settings(spec: LaunchSpec) -> None:
    """Raise before the start if torch_xla would ignore a setting or fail on it."""
    settings = spec.settings
    if spec.kind == "program":
        raise UsageError(
            f"Cannot use --no-python with launcher.kind: xla: torch_xla runs Python code, and {spec.target} is a program. "
            "Give a script, or a module with -m."
        )
    _check_recorders(spec)
    if settings.device not in {"auto", "xla"}:
        raise UsageError(
            f"Cannot use device: {settings.device} with launcher.kind: xla: PJRT_DEVICE selects the device. Set "
            "PJRT_DEVICE=CPU to try a script on torch_xla's CPU device."
        )
    if settings.process_group_backend != "auto":
        raise UsageError(
            f"Cannot use process_group_backend: {settings.process_group_backend} with launcher.kind: xla: torch_xla has "
            "its own collectives. Use auto."
        )
    if settings.measure_flops or settings.check_replay != "never":
        key = "measure_flops" if settings.measure_flops else "check_replay"
        raise UsageError(
            f"Cannot use {key} with launcher.kind: xla: torch_xla executes a step as a graph, in which no pass and no operation of torch "
            "is seen. Unset it."
        )
    if settings.mixed_precision == "fp16":
        raise UsageError(
            "Cannot use mixed_precision: fp16 with launcher.kind: xla: it needs GPUs. Use bf16, which needs no loss scaling."
        )
    environ = {**spec.env, **spec.environ}
    for name in ROUNDING:
        if environ.get(name, "").lower() not in _OFF:
            raise UsageError(
                f"Cannot use {name}={environ[name]}: torch_xla would round every float32 number, also weights and optimizer "
                "state. Unset it, and use mixed_precision: bf16."
            )
    if environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            f"Cannot start replicas with WORLD_SIZE={environ['WORLD_SIZE']}: another launcher has started this process as one "
            "of several. Run accel launch once on each node."
        )
    if problem := spec.machine.problem or get_devices(spec.machine).problem:
        raise UsageError(problem)


def _check_cpu_replicas(environ: Mapping[str, str]) -> None:
    """Raise for several replicas of torch_xla's CPU device: their first collective would end the process."""
    count = environ.get("CPU_NUM_DEVICES") or "1"
    if count != "1":
        raise UsageError(
            f"Cannot use CPU_NUM_DEVICES={count}: torch_xla's CPU device has no collectives between its replicas (pytorch/xla "
            "issue 5005). Unset it to try a script with one replica, or set launcher.spmd: true to use all devices."
        )


def _find_pjrt_device(spec: LaunchSpec) -> str:
    """Return the device of torch_xla: that of the user, or the TPU of this machine."""
    if device := spec.environ.get("PJRT_DEVICE") or spec.env.get("PJRT_DEVICE"):
        return device
    if get_devices(spec.machine).exists:
        return "TPU"
    raise UsageError(
        f"Cannot use launcher.kind: xla: this machine has no TPU ({spec.machine.summary}). Set PJRT_DEVICE=CPU to try a script "
        "on torch_xla's CPU device."
    )
