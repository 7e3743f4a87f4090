"""SageMaker's instance types: which there are, and what of a type decides how a job runs on it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker.service import model

__all__ = [
    "MODEL_PARALLEL",
    "SMDDP",
    "check_known",
    "check_model_parallel",
    "check_smddp",
    "gpus",
    "has_efa",
    "has_gpu",
    "is_arm",
    "known",
    "nearby",
    "processor",
]

SMDDP = ("ml.p4d.24xlarge", "ml.p4de.24xlarge")
"""The types of SageMaker's data-parallel library; AWS has ended its support for P3."""
MODEL_PARALLEL = (*SMDDP, "ml.p5.48xlarge", "ml.p5e.48xlarge")
"""The types of version 2 of SageMaker's model-parallel library."""
_EFA = frozenset({
    *MODEL_PARALLEL, "ml.g4dn.8xlarge", "ml.g4dn.12xlarge", "ml.g5.48xlarge", "ml.p3dn.24xlarge", "ml.p5en.48xlarge",
    "ml.p6-b200.48xlarge", "ml.p6-b300.48xlarge", "ml.p6e-gb200.36xlarge",
})  # fmt: skip
_GPUS: Mapping[str, Mapping[int, str]] = MappingProxyType({
    "p3": {1: "2xlarge", 4: "8xlarge", 8: "16xlarge"},
    "p3dn": {8: "24xlarge"},
    "p4d": {8: "24xlarge"},
    "p4de": {8: "24xlarge"},
    "p5": {1: "4xlarge", 8: "48xlarge"},
    "p5e": {8: "48xlarge"},
    "p5en": {8: "48xlarge"},
    "p6-b200": {8: "48xlarge"},
    "p6-b300": {8: "48xlarge"},
    "g4dn": {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge"},
    "g5": {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"},
    "g6": {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"},
    "g6e": {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"},
})  # fmt: skip
"""How many GPUs there are in which sizes of a family; of others the job says so when it runs."""
_FORM = re.compile(r"ml\.(?P<family>(?P<letters>[a-z]+)\d+(?P<attributes>[a-z]*)(?P<chip>-[a-z\d-]+)?)\.\w+")
_NEURON = ("trn", "inf")


def known() -> tuple[str, ...]:
    """The training types that this installation of botocore knows.

    Raises:
        UsageError: boto3 is not installed.
    """
    return tuple(model().shape_for("TrainingInstanceType").enum)


def check_known(instance_type: str, *, allow_unknown: bool = False) -> None:
    """Refuses a type that there is none of, or that accel cannot train on.

    Args:
        instance_type: What `launcher.instance_type` says.
        allow_unknown: Whether a type that is newer than botocore may be one.

    Raises:
        UsageError: It is misspelt, unknown, or has no processor that accel supports.
    """
    processor(instance_type)
    if not allow_unknown and instance_type not in known():
        raise UsageError(
            f"launcher.instance_type: SageMaker has no {instance_type} for training, as far as the installed boto3 "
            f"knows{_meant(instance_type)}. If it is newer than that boto3: pip install -U boto3, or set "
            "launcher.allow_unknown_instance: true"
        )


def check_smddp(instance_type: str) -> None:
    """Refuses a type that SageMaker's data-parallel library does not run on.

    Raises:
        UsageError: It is none of `SMDDP`.
    """
    _check_listed(instance_type, SMDDP, "process_group_backend: smddp", "use nccl")


def check_model_parallel(instance_type: str) -> None:
    """Refuses a type that SageMaker's model-parallel library does not run on.

    Raises:
        UsageError: It is none of `MODEL_PARALLEL`.
    """
    _check_listed(instance_type, MODEL_PARALLEL, "launcher.model_parallel", "take the key out")


def processor(instance_type: str) -> Literal["cpu", "gpu"]:
    """What a type computes on, of those that accel trains on.

    Raises:
        UsageError: It is not the name of a type, or one with AWS's own chips.
    """
    matched = _FORM.fullmatch(instance_type)
    if matched is None:
        raise UsageError(
            f"launcher.instance_type: expected a name like ml.g5.2xlarge, got {instance_type!r}{_meant(instance_type)}"
        )
    if matched["letters"] in _NEURON:
        raise UsageError(
            f"launcher.instance_type: {instance_type} computes on AWS's own chips (Neuron), which accel does not "
            "support; choose a type with NVIDIA GPUs, like ml.g5.2xlarge, or with CPUs only"
        )
    return "gpu" if matched["letters"] in {"g", "p", "gr"} else "cpu"


def has_gpu(instance_type: str) -> bool:
    """Whether a type has GPUs.

    Raises:
        UsageError: It is not the name of a type that accel trains on.
    """
    return processor(instance_type) == "gpu"


def gpus(instance_type: str | None) -> int | None:
    """How many GPUs a type has, as far as this is known before a job runs.

    Raises:
        UsageError: It is not the name of a type that accel trains on.
    """
    if instance_type is None:
        return None
    if not has_gpu(instance_type):
        return 1
    _, family, size = instance_type.split(".")
    return next((count for count, sizes in _GPUS.get(family, {}).items() if size in sizes.split()), None)


def has_efa(instance_type: str) -> bool:
    """Whether hosts of a type talk over EFA, AWS's fast network, in a SageMaker job."""
    return instance_type in _EFA


def is_arm(instance_type: str) -> bool:
    """Whether a type's processors are Arm ones: Graviton, as in `m7g`, or Grace, as in `p6e-gb200`."""
    matched = _FORM.fullmatch(instance_type)
    return matched is not None and ("g" in matched["attributes"] or (matched["chip"] or "").startswith("-g"))


def nearby(instance_type: str, among: Sequence[str]) -> list[str]:
    """The types that were probably meant: all of its family, where there is that; else those of similar names."""
    text = instance_type.strip().lower().replace("_", ".")
    text = text if text.startswith("ml.") else f"ml.{text}"
    if text in among:
        return [text]
    family = ".".join(text.split(".")[:2])
    return [name for name in among if name.startswith(f"{family}.")] or get_close_matches(text, among, 3)


def _meant(instance_type: str) -> str:
    meant = nearby(instance_type, known())
    return f" (did you mean {_or(meant)}?)" if meant else ""


def _check_listed(instance_type: str, listed: Sequence[str], what: str, instead: str) -> None:
    if instance_type not in listed:
        raise UsageError(
            f"{what} needs launcher.instance_type {_or(listed)}; it is {instance_type}. Choose one of these, or {instead}"
        )


def _or(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
