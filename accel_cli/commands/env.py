"""`accel env`: what a bug report needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from accel_cli.planning.machine import Machine

__all__ = ["EXAMPLE", "env"]

EXAMPLE = "Example: accel env --json > report.json"
_PACKAGES = (
    "accel",
    "torch",
    "torch_xla",
    "libtpu",
    "numpy",
    "safetensors",
    "pydantic",
    "typer",
    "rich",
    "questionary",
    "boto3",
)
_RELEVANT = (
    "ACCEL_", "CPU_NUM_DEVICES", "CUDA_", "GLOO_", "HIP_", "KMP_", "LD_", "LIBTPU_", "LOCAL_", "MASTER_", "MEGASCALE_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "OMPI_",
    "PET_", "PJRT_", "PMI_", "PYTHON", "PYTORCH_", "RANK", "ROCR_", "SLURM_", "SM_", "TORCH", "TPU_", "WORLD_SIZE", "XLA_",
)  # fmt: skip


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
) -> None:
    """Print versions, devices, the profile in force and the relevant variables.

    Values whose name speaks of a secret are masked.
    """
    import json

    from accel_cli import console

    facts = _facts()
    if as_json:
        console.plain(json.dumps(facts, indent=2))
        return
    for title, section in facts.items():
        console.plain(f"{title}:")
        for name, value in section.items() if isinstance(section, dict) else (("", section),):
            console.plain(f"  {name}: {value}" if name else f"  {value}")


def _facts() -> dict[str, Any]:
    import os
    import platform
    import sys

    from accel_cli.console import mask_secrets
    from accel_cli.planning import machine

    found = machine.detect(os.environ)
    return {
        "system": {
            "platform": platform.platform(),
            "python": f"{platform.python_version()} ({sys.executable})",
            "cpu cores": found.cpus,
        },
        "packages": _versions(),
        "devices": found.problem or {str(index): name for index, name in enumerate(found.devices)} or "none",
        "tpu": _tpu(found),
        "aws": _aws(),
        "profile": _profile(found),
        "variables": {
            name: mask_secrets(name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith(_RELEVANT)
        },
    }


def _tpu(found: Machine) -> dict[str, str]:
    """What there is of a TPU, what would keep torch_xla from it, and where torch_xla was told to compute."""
    import os

    hosts = f"{len(found.tpu.hosts)}, this is number {found.tpu.worker} ({found.tpu.hosts_by})"
    return {
        "chips": found.tpu.summary or "none",
        **({"hosts": hosts} if found.tpu.hosts else {}),
        "torch_xla": found.xla_problem or f"{found.packages.torch_xla}, beside torch {found.packages.torch}",
        "PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "not set"),
    }


def _aws() -> dict[str, str] | str:
    """What AWS's own tools would take here; no key of anybody's."""
    from accel_cli.errors import AccelError
    from accel_cli.launchers.sagemaker.aws import Account

    try:
        session = Account().session
    except AccelError as error:
        return f"cannot be used: {error}"
    return {"profile": session.profile_name, "region": session.region_name or "none"}


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _profile(found: Any) -> dict[str, str] | str:
    import os

    from accel_cli.console import mask_secrets
    from accel_cli.errors import UsageError
    from accel_cli.planning import planner
    from accel_cli.profile.layers import flat

    try:
        resolved = planner.resolve(planner.Request("env"), os.environ, found)
    except UsageError as error:
        return f"cannot be used: {error}"
    values = flat(resolved.profile.model_dump())
    return {
        key: f"{mask_secrets(key, str(value))}  [{resolved.source(key)}]" for key, value in values.items()
    }
