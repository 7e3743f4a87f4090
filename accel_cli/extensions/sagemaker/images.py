"""Instance types, and AWS's container images for training with PyTorch on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from accel_cli.errors import UsageError
from accel_cli.extensions.sagemaker.aws import format_hint, import_sdk, list_regions, load_service_model
from accel_runtime.environment.installation import format_install

__all__ = [
    "SMDDP_TYPES",
    "check_type",
    "count_gpus",
    "find_image",
    "has_gpu",
    "is_arm",
    "list_types",
    "list_versions",
    "parse_python_version",
]

SMDDP_TYPES = ("ml.p4d.24xlarge", "ml.p4de.24xlarge")
"""Instance types that run SageMaker's data-parallel library; AWS has ended its support for P3."""
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
"""Number of GPUs by family and size; the job itself counts those of other types."""
_FRAMEWORKS = ("pytorch", "pytorch-amzn2023")
"""AWS's names for its images: the second one from torch 2.11 on."""
_OLDEST = (2, 9)
_PYTHON = "3.12"
"""Python of the images of Amazon Linux 2023, whose tags do not name it."""


def list_types() -> tuple[str, ...]:
    """Return the types for training jobs that the installed botocore knows."""
    return tuple(load_service_model().shape_for("TrainingInstanceType").enum)


def check_type(instance_type: str, *, allow_unknown: bool = False) -> None:
    """Raise UsageError if accel cannot train on a type, or botocore does not know it and `allow_unknown` is false."""
    if instance_type.startswith(("ml.trn", "ml.inf")):
        raise UsageError(
            f"Invalid launcher.instance_type {instance_type!r}: AWS's own chips (Neuron) are not supported. Choose a type "
            "with NVIDIA GPUs, such as ml.g5.2xlarge, or with CPUs only."
        )
    if not allow_unknown and instance_type not in list_types():
        near = get_close_matches(instance_type, list_types(), 3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise UsageError(
            f"Unknown launcher.instance_type {instance_type!r}.{hint} If it is newer than the installed boto3, set "
            f"launcher.allow_unknown_instance: true, or run: {format_install('boto3', options='--upgrade')}"
        )


def has_gpu(instance_type: str) -> bool:
    """Return whether a type has NVIDIA GPUs."""
    return instance_type.startswith(("ml.g", "ml.p"))


def count_gpus(instance_type: str | None) -> int | None:
    """Return the number of GPUs of a type, 1 for a type without GPUs, or None if it is not known before the job runs."""
    if instance_type is None:
        return None
    if not has_gpu(instance_type):
        return 1
    family, _, size = instance_type.removeprefix("ml.").partition(".")
    return next((count for count, sizes in _GPUS.get(family, {}).items() if size in sizes.split()), None)


def is_arm(instance_type: str) -> bool:
    """Return whether a type has Arm processors: Graviton, as in `m7g`, or Grace, as in `p6e-gb200`."""
    return re.match(r"ml\.[a-z]+\d+([a-z]*g|[a-z]*-g)", instance_type) is not None


def find_image(pytorch_version: str, region: str, instance_type: str) -> str:
    """Return the address of AWS's image for a version of torch, such as 2.13 or `2.13.0+cpu`."""
    releases = _list_releases(region)
    match = re.match(r"\d+\.\d+", pytorch_version)
    if not releases:
        raise UsageError(
            f"AWS has no training images in region {region!r}, as far as the installed sagemaker-core knows."
            f"{format_hint(region, list_regions())} Choose another launcher.region, or set launcher.image_uri."
        )
    if match is None or match[0] not in releases:
        raise UsageError(
            f"No image with torch {pytorch_version} in {region}: of torch 2.9 and newer, the installed sagemaker-core lists "
            f"{', '.join(releases)}. Set launcher.pytorch_version to one that is listed, set launcher.image_uri to another "
            f"image, or run: {format_install('sagemaker-core', options='--upgrade')}"
        )
    # For a type that it does not know, the SDK returns the image for CPUs.
    check_type(instance_type, allow_unknown=has_gpu(instance_type))
    framework, version = releases[match[0]]
    image = reason = ""
    if is_arm(instance_type):
        reason = "it has Arm processors, and AWS's training images are built for x86"
    elif instance_type.startswith("ml.p2."):
        reason = "its GPUs (K80) are supported up to torch 1.13 only"
    else:
        try:
            image = import_sdk("image_uris").retrieve(
                framework, region, version=version, instance_type=instance_type, image_scope="training"
            )
        except ValueError as error:
            text = str(error).rstrip(".")
            raise UsageError(
                f"Cannot find an image for {instance_type!r}: {text}. Choose another launcher.instance_type, or set "
                "launcher.image_uri to an image."
            ) from None
    if instance_type.startswith(("ml.p3.", "ml.p3dn.")) and "-cu13" in image:
        reason = f"its GPUs are not supported by CUDA 13 of AWS's image {image.rpartition('/')[2]}"
    if reason:
        raise UsageError(
            f"Invalid launcher.instance_type {instance_type!r}: {reason}. Choose another type, or set launcher.image_uri to "
            "another image."
        )
    return image


def list_versions(region: str | None = None) -> list[str]:
    """Return the versions of torch that have an image, oldest first; in one region if it is given."""
    return list(_list_releases(region))


def parse_python_version(image: str) -> str | None:
    """Return the Python version of an image, such as `3.12`, or None if its address does not contain it."""
    tag = image.rpartition("/")[2]
    if match := re.search(r"-py3(\d+)\b", tag):
        return f"3.{match[1]}"
    return _PYTHON if re.fullmatch(r"pytorch:\S+-amzn2023-sagemaker", tag) else None


def _list_releases(region: str | None) -> dict[str, tuple[str, str]]:
    """Return AWS's framework and version by minor version of torch, oldest first."""
    sdk = import_sdk("image_uris")
    releases = {}
    for framework in _FRAMEWORKS:
        for version, config in sdk.config_for_framework(framework)["training"]["versions"].items():
            major, minor = (int(part) for part in version.split(".")[:2])
            if (major, minor) >= _OLDEST and (region is None or region in config["registries"]):
                releases[major, minor] = framework, version
    return {f"{major}.{minor}": releases[major, minor] for major, minor in sorted(releases)}
