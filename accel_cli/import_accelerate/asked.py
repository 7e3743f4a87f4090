"""What an Accelerate config file asks for, in the words of accel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_cli.import_accelerate import deepspeed
from accel_cli.import_accelerate.dividing import Division
from accel_cli.import_accelerate.ways import WAYS, Way
from accel_cli.launchers import LAUNCHERS

__all__ = ["LOCAL", "SAGEMAKER", "Asked"]

LOCAL, SAGEMAKER = "LOCAL_MACHINE", "AMAZON_SAGEMAKER"
_PORT = 29500
"""Where Accelerate lets machines meet unless told otherwise."""


@dataclass(frozen=True)
class Asked:
    """The keys that shape the profile, with Accelerate's defaults."""

    compute_environment: str = LOCAL
    distributed_type: str = "NO"
    num_processes: int = -1
    num_machines: int = 1
    main_process_ip: str | None = None
    main_process_port: int | None = None
    mixed_precision: str | None = None
    fp16: bool = False
    use_cpu: bool = False
    gpu_ids: str = "all"
    main_training_function: str | None = None
    tpu_env: list[str] = field(default_factory=list)
    fsdp_config: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict)
    parallelism_config: Mapping[str, Any] = field(default_factory=dict)
    tp_config: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_file: Mapping[str, Any] | None = None
    """What the JSON file says that `deepspeed_config` names; None where there is none."""

    @property
    def unnamed(self) -> list[str]:
        """What should be an assignment to a variable on the TPU, and is none."""
        parts = {entry: _parts(entry) for entry in self.tpu_env if self.way.tpu}
        return [entry for entry, (name, equals, _) in parts.items() if not (name and equals) or "\0" in entry]

    @property
    def way(self) -> Way:
        """How this runs in accel."""
        return WAYS[self.distributed_type]

    @property
    def spread(self) -> bool:
        """Whether machines have to meet."""
        return self.way.several and not self.way.tpu and self.num_machines > 1

    @property
    def per_node(self) -> int | str:
        """The processes on each machine."""
        return "auto" if self.num_processes == -1 else self.num_processes // self.num_machines

    @property
    def replicas(self) -> int | str:
        """The replicas on the TPU of each machine."""
        return 1 if self.num_processes == self.num_machines == 1 else "all"

    @property
    def endpoint(self) -> str:
        """Where the machines meet."""
        host = self.main_process_ip or ""
        return f"{f'[{host}]' if ':' in host else host}:{self.main_process_port or _PORT}"

    @property
    def device(self) -> str:
        """The hardware to compute on."""
        return "cpu" if self.use_cpu else self.way.device

    @property
    def precision(self) -> str:
        """The number format."""
        by_file = deepspeed.precision(self.deepspeed_file) if self.way.divides == "deepspeed_config" else None
        return self.mixed_precision or ("fp16" if self.fp16 else by_file or "no")

    @property
    def division(self) -> Division:
        """How models are divided."""
        return Division(
            engine=self.way.divides,
            machines=self.num_machines,
            precision=self.precision,
            nowhere=self._nowhere,
            fsdp_config=self.fsdp_config,
            deepspeed_config=self.deepspeed_config,
            parallelism_config=self.parallelism_config,
            tp_config=self.tp_config,
            file=self.deepspeed_file,
        )

    @property
    def _nowhere(self) -> str:
        if self.way.tpu:
            return "on a TPU, launcher.spmd: true divides a model, as the script says"
        return "" if self.way.several else f"distributed_type: {self.distributed_type} is one process"

    @property
    def chosen_gpus(self) -> dict[str, str]:
        """The key of the launcher that chooses some of the GPUs."""
        numbers = all(name.isdecimal() for name in self.gpu_ids.split(","))
        known = "gpu_ids" in LAUNCHERS[self.way.kind].model_fields
        return {"gpu_ids": self.gpu_ids} if self.chooses_gpus and numbers and known else {}

    @property
    def chooses_gpus(self) -> bool:
        """Return True if the file names some of several GPUs."""
        return self.gpu_ids.lower() != "all" and self.device not in {"cpu", "mps", "xla"}

    @property
    def visible(self) -> dict[str, str]:
        """The variable that shows the processes GPUs by other names than numbers, such as UUIDs."""
        if not self.chooses_gpus or self.chosen_gpus:
            return {}
        return {"ZE_AFFINITY_MASK" if self.device == "xpu" else "CUDA_VISIBLE_DEVICES": self.gpu_ids}

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the processes on a TPU."""
        return {name: value for name, _, value in map(_parts, self.tpu_env) if self.way.tpu}

    @property
    def launcher(self) -> dict[str, Any]:
        """The keys of the launcher's section."""
        if self.way.tpu:
            function = self.main_training_function
            called = {"main_training_function": function} if function else {}
            return {"kind": self.way.kind, "replicas": self.replicas, **called}
        several = {"nnodes": self.num_machines, "nproc_per_node": self.per_node}
        meeting = {"rdzv_endpoint": self.endpoint}
        return {
            "kind": self.way.kind,
            **(several if self.way.several else {}),
            **self.chosen_gpus,
            **(meeting if self.spread else {}),
        }

    @property
    def places(self) -> Mapping[str, str]:
        """The key of the file that says a key of the profile, where that alone can be wrong."""
        return {}

    def misread(self) -> Iterator[tuple[str, str, str]]:
        """What is wrong below a key: key, what was expected, what came."""
        yield from self.division.misread()

    def as_profile(self) -> dict[str, Any]:
        """The keys of a profile that say the same."""
        return {
            "launcher": self.launcher,
            "device": self.device,
            "mixed_precision": self.precision,
            "parallel": self.division.parallel,
            "fully_shard": self.division.options,
            "env": self.visible | self.variables,
        }


def _parts(entry: str) -> tuple[str, str, str]:
    return entry.partition("=")
