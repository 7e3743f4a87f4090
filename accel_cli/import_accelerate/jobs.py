"""What an Accelerate config file for Amazon SageMaker asks for, in the words of accel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from accel_cli.import_accelerate import arguments
from accel_cli.import_accelerate.asked import Asked
from accel_cli.import_accelerate.fates import Fate, left
from accel_cli.import_accelerate.ways import Way
from accel_cli.launchers.sagemaker.instances import SMDDP

__all__ = ["FATES", "SAID_BY", "AskedJob"]

SAID_BY: Mapping[str, str] = {
    "base_job_name": "base_job_name",
    "ec2_instance_type": "instance_type",
    "iam_role_name": "role",
    "image_uri": "image_uri",
    "num_machines": "instance_count",
    "profile": "aws_profile",
    "pytorch_version": "pytorch_version",
    "region": "region",
    "sagemaker_inputs_file": "inputs_file",
    "sagemaker_metrics_file": "metrics_file",
}
"""The launcher's key that says what a key of the file says."""
_OLDEST = (2, 9)
_VERSION = re.compile(r"(\d+)\.(\d+).*", re.DOTALL)
# The wizard of Accelerate offers a type that there has never been.
_MEANT: Mapping[str, str] = {"ml.p4dn.24xlarge": "ml.p4d.24xlarge"}


@dataclass(frozen=True)
class AskedJob(Asked):
    """The keys that shape the profile of a job, with Accelerate's defaults."""

    ec2_instance_type: str | None = None
    iam_role_name: str | None = None
    image_uri: str | None = None
    profile: str | None = None
    region: str | None = None
    base_job_name: str | None = None
    pytorch_version: str | None = None
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    @override
    def way(self) -> Way:
        return Way("sagemaker")

    @property
    @override
    def spread(self) -> bool:
        return False

    @property
    def alone(self) -> bool:
        """Whether every host runs the script once, whatever it has."""
        return self.distributed_type == "NO" and not self.additional_args.get("distribution")

    @property
    def chosen(self) -> dict[str, Any]:
        """What the file says, by key of the launcher; Accelerate takes additional_args where both say a thing."""
        said = {key: getattr(self, name) for name, key in SAID_BY.items()}
        said = {key: value for key, value in said.items() if value} | arguments.said(self.additional_args)
        if "instance_type" in said:
            said["instance_type"] = _MEANT.get(said["instance_type"], said["instance_type"])
        if not self._keeps_version(said):
            said.pop("pytorch_version", None)
        return said

    @staticmethod
    def _keeps_version(said: Mapping[str, Any]) -> bool:
        return "image_uri" not in said and _supported(said.get("pytorch_version", ""))

    @property
    def without_smddp(self) -> str:
        """Why SageMaker's data-parallel library is not used; empty where it is."""
        instead = "torchrun over NCCL trains on every GPU"
        if self.chosen.get("instance_type") not in SMDDP:
            return f"SageMaker's data-parallel library (smddp) runs on {' and '.join(SMDDP)} only; {instead}"
        if "image_uri" in self.chosen:
            return ""
        oldest = ".".join(map(str, _OLDEST))
        return f"no image of AWS's with torch {oldest} or newer has SageMaker's data-parallel library (smddp); {instead}"

    @property
    @override
    def launcher(self) -> dict[str, Any]:
        alone = {"nproc_per_node": 1} if self.alone else {}
        return {"kind": self.way.kind, **self.chosen, **alone}

    @override
    def as_profile(self) -> dict[str, Any]:
        smddp = self.distributed_type == "DATA_PARALLEL" and not self.without_smddp
        found = super().as_profile()
        found["env"] |= arguments.variables(self.additional_args)
        return found | ({"process_group_backend": "smddp"} if smddp else {})

    @override
    def misread(self) -> Iterator[tuple[str, str, str]]:
        yield from arguments.wrong(self.additional_args)

    @property
    @override
    def places(self) -> Mapping[str, str]:
        top = {key: name for name, key in SAID_BY.items()}
        given = [
            (name, arguments.TAKEN[name].key) for name in self.additional_args if name in arguments.TAKEN
        ]
        below = {key: f"additional_args.{name}" for name, key in given}
        return {f"launcher.{key}": name for key, name in (top | below).items()}

    def argument(self, path: tuple[str, ...], value: Any) -> Fate:
        """What becomes of an argument in additional_args, or of a part of one."""
        key = arguments.TAKEN[path[0]].key if path[0] in arguments.TAKEN else ""
        if key == "instance_type" and str(value) in _MEANT:
            return _type_meant(value)
        if key == "pytorch_version" and value:
            return _version(self, str(value))
        return arguments.fate(path, value)


def _supported(version: str) -> bool:
    matched = _VERSION.fullmatch(version)
    return matched is not None and (int(matched[1]), int(matched[2])) >= _OLDEST


def _said(name: str) -> Callable[[Any, Any], Fate]:
    """What becomes of a key that one of the launcher says, unless additional_args say it too."""
    key = SAID_BY[name]

    def found(asked: AskedJob, value: Any) -> Fate:
        if not value:
            return Fate("not set")
        if key in arguments.said(asked.additional_args):
            return left("it is in additional_args too, and Accelerate takes that")
        if name == "pytorch_version":
            return _version(asked, value)
        if value in _MEANT:
            return _type_meant(value)
        return Fate(f"launcher.{key}: {value}")

    return found


def _type_meant(value: str) -> Fate:
    return Fate(f"launcher.instance_type: {_MEANT[value]}, which is meant: AWS has no {value}")


def _version(asked: AskedJob, value: str) -> Fate:
    if "image_uri" in asked.chosen:
        return left("launcher.image_uri says the image, and so the torch")
    if _supported(value):
        return Fate(f"launcher.pytorch_version: {value}")
    return left(
        f"accel needs torch {'.'.join(map(str, _OLDEST))} or newer; the image follows the torch of the machine that "
        "launches, unless launcher.pytorch_version says another"
    )


def _type(asked: AskedJob, value: str) -> Fate:
    if value == "NO":
        return Fate("launcher.nproc_per_node: 1" if asked.alone else "launcher.kind: sagemaker")
    if value == "MODEL_PARALLEL":
        return left(
            "Accelerate has no model parallelism there either; launcher.model_parallel configures SageMaker's"
        )
    return left(asked.without_smddp) if asked.without_smddp else Fate("process_group_backend: smddp")


FATES: Mapping[str, Callable[[Any, Any], Fate]] = {
    **{name: _said(name) for name in SAID_BY},
    "compute_environment": lambda *_: Fate("launcher.kind: sagemaker"),
    "distributed_type": _type,
}
"""What becomes of a key of a file for SageMaker, from all that is asked and the key's value."""
