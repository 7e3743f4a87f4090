"""The keys at the top of an Accelerate config file: how each is read, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_cli.import_accelerate import arguments, jobs
from accel_cli.import_accelerate.asked import LOCAL, SAGEMAKER, Asked
from accel_cli.import_accelerate.fates import FATES, OFF, Fate, left, tpu_only
from accel_cli.import_accelerate.sections import SECTIONS
from accel_cli.import_accelerate.values import (
    Read,
    choice,
    distributed_type,
    host,
    ids,
    job_type,
    precision,
    processes,
    section,
    shown,
    text,
    texts,
    truth,
    whole,
)

__all__ = ["CLUSTER", "DIVIDING", "JOB", "Key"]


@dataclass(frozen=True)
class Key:
    """A key at the top of the file."""

    read: Read
    fate: Callable[[Asked, Any], Fate]
    """What becomes of it, from all that is asked and its value."""


def _unused(read: Read, reason: str, default: Any = None) -> Key:
    """A key that no profile has: nothing is lost where it is off, or at its default."""
    return Key(read, lambda _, value: OFF if not value or value == default else left(reason))


def _tpu(read: Read, instead: str) -> Key:
    """A key for TPUs that no profile has; `{}` in what to do instead is its value."""
    return Key(read, tpu_only(lambda _, value: left(instead.format(shown("", value)))))


def _job(read: Read, name: str) -> Key:
    """A key of a file for SageMaker that the launcher's section says too."""
    return Key(read, jobs.FATES[name])


_SECTION = Key(section, lambda *_: OFF)
_LAST_PORT = 65535
DIVIDING = ("fsdp_config", "deepspeed_config", "parallelism_config", "tp_config")
"""The sections that say how models are divided."""
_BASE: Mapping[str, Key] = {
    "compute_environment": Key(choice(LOCAL, SAGEMAKER), FATES["compute_environment"]),
    "mixed_precision": Key(precision, FATES["mixed_precision"]),
    "fp16": Key(truth, FATES["fp16"]),
    "use_cpu": Key(truth, FATES["use_cpu"]),
    "gpu_ids": Key(ids, FATES["gpu_ids"]),
    "num_machines": Key(whole("expected a whole number of at least 1", 1), FATES["num_machines"]),
    "debug": _unused(truth, "this version of accel has no such check of collectives to switch on"),
    "enable_cpu_affinity": _unused(truth, "accel does not bind processes to processor cores"),
    "dynamo_backend": Key(text, lambda _, value: SECTIONS["dynamo_config"].fate("dynamo_backend", value)),
    "dynamo_config": _SECTION,
}
CLUSTER: Mapping[str, Key] = {
    **_BASE,
    "distributed_type": Key(distributed_type, FATES["distributed_type"]),
    "num_processes": Key(processes, FATES["num_processes"]),
    "machine_rank": Key(whole("expected a whole number of at least 0", 0), FATES["machine_rank"]),
    "main_process_ip": Key(host, FATES["main_process_ip"]),
    "main_process_port": Key(
        whole(f"expected a port, 0 to {_LAST_PORT}", 0, _LAST_PORT), FATES["main_process_port"]
    ),
    "rdzv_backend": Key(text, FATES["rdzv_backend"]),
    "same_network": Key(truth, FATES["same_network"]),
    "main_training_function": Key(text, FATES["main_training_function"]),
    "downcast_bf16": _tpu(
        truth,
        "it rounds weights and optimizer state too: mixed_precision: bf16 computes in bfloat16 and keeps them",
    ),
    "tpu_name": _tpu(text, "said at the launch: accel launch --tpu-pod {}"),
    "tpu_zone": _tpu(text, "said at the launch: accel launch --tpu-pod NAME --zone {}"),
    "tpu_use_cluster": _tpu(truth, "accel launch --tpu-pod NAME starts the same on every worker of a pod"),
    "tpu_use_sudo": _tpu(truth, "accel uses no sudo; a line of accel launch --pod-setup may"),
    "tpu_vm": _tpu(texts, "accel launch --tpu-pod NAME starts all workers of the pod"),
    "tpu_env": Key(texts, FATES["tpu_env"]),
    "commands": _tpu(texts, "said at the launch: accel launch --pod-setup LINE, for each"),
    "command_file": _tpu(text, "said at the launch: accel launch --pod-setup LINE, for each line of it"),
    **dict.fromkeys(SECTIONS, _SECTION),
    **dict.fromkeys(DIVIDING, _SECTION),
}
"""The keys of a file for machines of one's own."""
JOB: Mapping[str, Key] = {
    **_BASE,
    **{name: _job(text, name) for name in jobs.SAID_BY},
    "compute_environment": _job(choice(LOCAL, SAGEMAKER), "compute_environment"),
    "distributed_type": _job(job_type, "distributed_type"),
    "num_machines": _job(_BASE["num_machines"].read, "num_machines"),
    "transformers_version": _unused(text, arguments.NOT_HERE["transformers_version"]),
    "py_version": _unused(text, arguments.NOT_HERE["py_version"]),
    "additional_args": _SECTION,
}
"""The keys of a file for Amazon SageMaker."""
