"""Writes the table of images anew from the installed sagemaker-core: `python tests/sagemaker_sdk/table.py`."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from sagemaker.core import common_utils, image_uris

PATH = Path(__file__).parents[2] / "accel_cli" / "launchers" / "sagemaker" / "images.json"
OLDEST = (2, 9)
# Newer images say no Python in their names; AWS's release notes say this one.
UNNAMED = "3.12"
# The SDK reads botocore's list of endpoints anew for every image.
common_utils._botocore_resolver = lru_cache(common_utils._botocore_resolver)


@lru_cache
def configs():
    """Every version that accel supports: the framework's name in the SDK, the version, and what the SDK has of it."""
    found = [
        (framework, name, config)
        for framework in ("pytorch", "pytorch-amzn2023")
        for name, config in image_uris.config_for_framework(framework)["training"]["versions"].items()
    ]
    return [each for each in sorted(found, key=lambda each: numbers(each[1])) if numbers(each[1]) >= OLDEST]


def numbers(name):
    """A version as it is compared."""
    return tuple(map(int, name.split(".")))


def minor(name):
    """`2.9.0` is an image of 2.9."""
    return ".".join(name.split(".")[:2])


def retrieved(framework, name, region, instance_type):
    """The address as the SDK has it."""
    return image_uris.retrieve(
        framework, region, version=name, instance_type=instance_type, image_scope="training"
    )


def accounts():
    """The account of every region, which is the same for all versions."""
    found = {}
    for _, _, config in configs():
        for region, account in config["registries"].items():
            assert found.setdefault(region, account) == account, f"{region} has two accounts"
    return dict(sorted(found.items()))


def image(framework, name, config, regions):
    """One version's entry."""
    first = next(iter(config["registries"]))
    tags = {
        kind: retrieved(framework, name, first, instance_type).rpartition("/")[2]
        for kind, instance_type in {"cpu": "ml.m5.xlarge", "gpu": "ml.g5.xlarge"}.items()
    }
    python = config.get("py_versions", [None])[0]
    entry = {**tags, "python": f"{python[2]}.{python[3:]}" if python else UNNAMED}
    missing = [region for region in regions if region not in config["registries"]]
    return entry | ({"not_in": missing} if missing else {})


def table():
    """The whole table."""
    regions, images, domains = accounts(), {}, {}
    for framework, name, config in configs():
        images[minor(name)] = image(framework, name, config, regions)
        for region in config["registries"]:
            host = retrieved(framework, name, region, "ml.m5.xlarge").partition("/")[0]
            domains[region] = host.partition(f".{region}.")[2]
    special = {region: domain for region, domain in sorted(domains.items()) if domain != "amazonaws.com"}
    return {
        "sagemaker_core": version("sagemaker-core"),
        "accounts": regions,
        "domains": special,
        "images": images,
    }


def text():
    """The file, as it stands in the repository."""
    return json.dumps(table(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
