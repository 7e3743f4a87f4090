"""`accel env`: versions, devices, the profile and variables for a bug report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from accel_cli import console
from accel_cli.errors import UsageError

if TYPE_CHECKING:
    from accel_cli.planning.machine import Machine

__all__ = ["app"]

app = typer.Typer()

_MISSING = "not installed"
_PACKAGES = ("torch", "numpy", "safetensors", "pydantic", "typer", "rich", "questionary")
_LIBRARIES = (
    "transformers", "accelerate", "trl", "peft", "diffusers", "sentence-transformers", "datasets", "tokenizers",
    "bitsandbytes", "flash-attn", "torchvision", "torchaudio", "torchdata", "lightning-fabric",
)  # fmt: skip
"""Libraries of scripts; only those that are installed are printed."""
_RELEVANT = (
    "ACCEL_", "ACCELERATE_", "CUDA_", "DS_", "FSDP_", "GLOO_", "HF_", "HIP_", "KMP_", "LD_", "LOCAL_", "MASTER_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "OMPI_",
    "PARALLELISM_CONFIG_", "PET_", "PMI_", "PYTHON", "PYTORCH_", "RANK", "ROCR_", "TORCH", "WORLD_SIZE",
)  # fmt: skip


@app.command("env", rich_help_panel="Set up", epilog="Example: accel env --json > report.json")
def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print versions, devices, the effective profile and the relevant variables.

    Variables that look like secrets are masked.
    """
    from accel_cli.launchers import LAUNCHERS, describe_environment
    from accel_cli.planning import machine
    from accel_runtime.environment.engines import list_engines
    from accel_runtime.environment.settings import __version__

    launchers = [LAUNCHERS[kind] for kind in LAUNCHERS.names]
    packages = (*_PACKAGES, *(package for launcher in launchers for package in launcher.listed_packages))
    libraries = (*_LIBRARIES, *(engine.package for engine in list_engines()))
    prefixes = (*_RELEVANT, *(prefix for launcher in launchers for prefix in launcher.variables))
    detected = machine.detect(os.environ)
    devices = {str(index): name for index, name in enumerate(detected.devices)}
    sections = {
        "system": {
            "platform": platform.platform(),
            "python": f"{platform.python_version()} ({sys.executable})",
            "cpu cores": detected.cpus,
        },
        "packages": {"accel": __version__, **_find_versions(packages)},
        "libraries": {
            name: version for name, version in _find_versions(libraries).items() if version != _MISSING
        }
        or "none",
        "devices": detected.problem or devices or "none",
        **describe_environment(detected, os.environ),
        "profile": _list_profile_values(detected),
        "variables": {
            name: console.mask_secrets(name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith(prefixes)
        },
    }
    if as_json:
        console.print_json(sections)
        return
    for title, section in sections.items():
        console.plain(f"{title}:")
        lines = (
            [f"{name}: {value}" for name, value in section.items()]
            if isinstance(section, Mapping)
            else [section]
        )
        for line in lines:
            console.plain(f"  {line}")


def _find_versions(packages: Iterable[str]) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = _MISSING
    return versions


def _list_profile_values(machine: Machine) -> dict[str, str] | str:
    """Return every value of the effective profile with its source."""
    from accel_cli.planning.launch_options import Request
    from accel_cli.profile import planner

    try:
        resolved = planner.resolve(Request("env"), os.environ, machine, reads_engine_file=False)
        console.print_notes(resolved.notes)
    except UsageError as error:
        console.print_notes(error.notes)
        return f"invalid: {error}"
    return {
        key: f"{console.mask_secrets(key, str(value))}  [{resolved.get_source(key)}]"
        for key, value in resolved.values.items()
    }
