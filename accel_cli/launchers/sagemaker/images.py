"""AWS's container images for training with PyTorch: which one suits a version, a region and an instance type."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker import instances
from accel_runtime.env import find_nearest

__all__ = ["TABLE", "image_uri", "known_regions", "known_versions", "python_of"]

TABLE = Path(__file__).with_name("images.json")
"""What `sagemaker.core.image_uris` of the version it names says; `tests/sagemaker_sdk/table.py` writes it anew."""
_OLDEST = (2, 9)
_MINOR = re.compile(r"(\d+)\.(\d+)(?:[.+a-z-].*)?")
_OWN = "or set launcher.image_uri to an image of your own"


def image_uri(pytorch_version: str, region: str, instance_type: str) -> str:
    """The address of AWS's image with this torch.

    Args:
        pytorch_version: As torch says it: `2.13.0+cpu` is 2.13 too, and gets AWS's newest image of 2.13.
        region: Where the job runs; its images come from an account of AWS's there.
        instance_type: The type of its hosts, which decides between the images for CPUs and GPUs.

    Raises:
        UsageError: There is no such image, as far as the table knows; nothing else is taken instead.
    """
    minor = _known_minor(pytorch_version)
    image = _table()["images"][minor]
    _check_region(region, minor)
    kind = instances.processor(instance_type)
    _check_type(instance_type, image[kind])
    host = (
        f"{_table()['accounts'][region]}.dkr.ecr.{region}.{_table()['domains'].get(region, 'amazonaws.com')}"
    )
    return f"{host}/{image[kind]}"


def python_of(image_or_version: str) -> str | None:
    """The Python, like `3.12`, of an image's address or of the image of a torch version; None where it is unknown."""
    images: Mapping[str, Any] = _table()["images"]
    name = image_or_version.rpartition("/")[2]
    for minor, image in images.items():
        if name in {image["cpu"], image["gpu"]} or ("/" not in image_or_version and minor == _minor(name)):
            return str(image["python"])
    tag = re.search(r"-py3(\d+)\b", name)
    return f"3.{tag[1]}" if tag else None


def known_versions(region: str | None = None) -> tuple[str, ...]:
    """The torch versions of which there is an image, in a region if one is given, the oldest first."""
    images: Mapping[str, Any] = _table()["images"]
    return tuple(minor for minor, image in images.items() if region not in image.get("not_in", ()))


def known_regions() -> tuple[str, ...]:
    """The regions that have images."""
    return tuple(_table()["accounts"])


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def _minor(version: str) -> str | None:
    matched = _MINOR.fullmatch(version.strip())
    return f"{int(matched[1])}.{int(matched[2])}" if matched else None


def _known_minor(version: str) -> str:
    minor, known = _minor(version), known_versions()
    if minor in known:
        return minor
    if minor is None:
        meant = find_nearest(version, list(known))
        hint = f" (did you mean {meant}?)" if meant else ""
        raise UsageError(
            f"launcher.pytorch_version: expected a version like {known[-1]}, got {version!r}{hint}"
        )
    if _parts(minor) < _OLDEST:
        raise UsageError(
            f"launcher.pytorch_version: accel needs torch {_dotted(_OLDEST)} or newer, got {version}; "
            f"AWS has images of {', '.join(known)}"
        )
    older = [each for each in known if _parts(each) < _parts(minor)]
    raise UsageError(
        f"AWS has no image of torch {version} that this version of accel knows; it knows {', '.join(known)}. "
        f"To train with another torch than here, set launcher.pytorch_version: '{older[-1]}', {_OWN}"
    )


def _check_region(region: str, minor: str) -> None:
    if region not in known_regions():
        meant = find_nearest(region, list(known_regions()))
        hint = f" (did you mean {meant}?)" if meant else ""
        raise UsageError(
            f"launcher.region: AWS has no training images in {region!r} that this version of accel knows{hint}; "
            f"it knows {', '.join(known_regions())}. Choose one of these, {_OWN}"
        )
    if minor not in known_versions(region):
        newest = known_versions(region)[-1]
        raise UsageError(
            f"AWS has no image of torch {minor} in {region} that this version of accel knows; the newest there is "
            f"{newest}. To train with that, set launcher.pytorch_version: '{newest}', {_OWN}"
        )


def _check_type(instance_type: str, image: str) -> None:
    reason = ""
    if instances.is_arm(instance_type):
        reason = "has Arm processors, and AWS's training images for SageMaker are for x86"
    elif instance_type.startswith("ml.p2."):
        reason = "has GPUs that are too old: AWS ended their support with torch 1.13"
    elif instance_type.startswith(("ml.p3.", "ml.p3dn.")) and "-cu13" in image:
        reason = f"has GPUs of 2017 (V100), which CUDA 13 in AWS's image {image} does not support"
    if reason:
        raise UsageError(f"launcher.instance_type: {instance_type} {reason}; choose another type, {_OWN}")


def _parts(minor: str) -> tuple[int, ...]:
    return tuple(map(int, minor.split(".")))


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
