"""What the platform says of a job in its files: the hosts, the channels, and the `SM_` variables made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_cli.container.problem import ContainerError

__all__ = ["CHANNEL", "PORT", "Told", "natural", "read", "variables"]

PORT = "7777"
"""Where hosts meet, on the first of them: the port of SageMaker's own launchers."""
CHANNEL = "accel"
"""The channel that holds accel and the source."""
_UNFIT = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True)
class Told:
    """The platform's files."""

    hosts: tuple[str, ...]
    """In the order of their numbers."""
    host: str
    """This one."""
    interface: str = ""
    """The network interface on which hosts reach each other."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """The whole file about the hosts."""
    channels: Mapping[str, Any] = field(default_factory=dict)
    """The channels of the job but that of accel, each with what it is."""
    hyperparameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The number of this host."""
        return self.hosts.index(self.host)


def natural(name: str) -> list[tuple[int, str]]:
    """The key with which `algo-2` comes before `algo-10`."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def read(config: Path) -> Told:
    """What the files in a folder say; channels and hyperparameters may be absent.

    Raises:
        ContainerError: They do not name the hosts.
    """
    try:
        resources = json.loads((config / "resourceconfig.json").read_text(encoding="utf-8"))
        hosts, host = tuple(sorted(resources["hosts"], key=natural)), resources["current_host"]
    except (OSError, ValueError, KeyError) as error:
        raise ContainerError(
            f"{config / 'resourceconfig.json'} does not name the hosts ({type(error).__name__}: {error}): is this a "
            "training job of SageMaker?"
        ) from error
    if host not in hosts:
        raise ContainerError(f"resourceconfig.json says this is {host}, and the hosts are {', '.join(hosts)}")
    channels = _optional(config / "inputdataconfig.json")
    return Told(
        hosts,
        host,
        interface=resources.get("network_interface_name") or "",
        resources=resources,
        channels={name: said for name, said in sorted(channels.items()) if name != CHANNEL},
        hyperparameters=_optional(config / "hyperparameters.json"),
    )


def variables(
    root: Path, told: Told, *, machine: Mapping[str, int], more: Mapping[str, Any]
) -> dict[str, str]:
    """The variables that SageMaker's own containers give to a script.

    Args:
        root: `/opt/ml`.
        told: What the platform says.
        machine: What this host has.
        more: Hyperparameters that the job has besides.
    """
    channels = {channel: str(root / "input" / "data" / channel) for channel in told.channels}
    parameters = {key: _plain(value) for key, value in told.hyperparameters.items()} | dict(more)
    said: dict[str, Any] = {
        "INPUT_DIR": str(root / "input"),
        "INPUT_DATA_DIR": str(root / "input" / "data"),
        "INPUT_CONFIG_DIR": str(root / "input" / "config"),
        "MODEL_DIR": str(root / "model"),
        "OUTPUT_DIR": str(root / "output"),
        "OUTPUT_DATA_DIR": str(root / "output" / "data"),
        "CHECKPOINT_DIR": str(root / "checkpoints"),
        "CHANNELS": list(channels),
        "HOSTS": list(told.hosts),
        "HOST_COUNT": len(told.hosts),
        "CURRENT_HOST": told.host,
        "CURRENT_HOST_RANK": told.rank,
        "CURRENT_INSTANCE_TYPE": told.resources.get("current_instance_type", ""),
        "NETWORK_INTERFACE_NAME": told.interface,
        **machine,
        "MASTER_ADDR": told.hosts[0],
        "MASTER_PORT": PORT,
        "HPS": parameters,
        "RESOURCE_CONFIG": told.resources,
        "INPUT_DATA_CONFIG": told.channels,
    }
    said["TRAINING_ENV"] = {
        "channel_input_dirs": channels,
        "hyperparameters": parameters,
        **{key.lower(): value for key, value in said.items() if key not in {"HPS", "CHANNELS"}},
    }
    said |= _named("CHANNEL", channels) | _named("HP", parameters)
    return {f"SM_{key}": _text(value) for key, value in said.items()}


def _named(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A variable for each: under its name, as SageMaker's toolkit has it, and under one that a shell can write."""
    fit = {f"{kind}_{_UNFIT.sub('_', name).upper()}": value for name, value in values.items()}
    return fit | {f"{kind}_{name.upper()}": value for name, value in values.items() if "=" not in name}


def _optional(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ContainerError(f"{file} cannot be read: {error}") from error


def _plain(value: str) -> Any:
    """A hyperparameter: its text may be JSON, as SageMaker's own libraries write it."""
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
