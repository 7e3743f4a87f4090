"""The table of images against the SDK it is made from; `make test-images` runs it."""

import importlib.util
import sys
from pathlib import Path

import pytest

from accel_cli.launchers.sagemaker import images, instances

pytest.importorskip(
    "sagemaker.core", reason="sagemaker-core is in an environment of its own: make test-images"
)

TYPES = ("ml.m5.xlarge", "ml.g5.12xlarge")
# Neuron chips, GPUs of 2014 and Arm processors are refused, whatever the SDK says of them; V100 GPUs with CUDA 13 too.
REFUSED = ("ml.trn", "ml.p2.", "ml.p6e-gb200.")
V100 = ("ml.p3.", "ml.p3dn.")


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("table", Path(__file__).with_name("table.py"))
    module = sys.modules["table"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def newest(table):
    """The newest version of every minor one, which is what accel takes."""
    return {table.minor(name): (framework, name, config) for framework, name, config in table.configs()}


def test_the_table_is_what_this_sdk_would_make_it(table):
    assert images.TABLE.read_text(encoding="utf-8") == table.text(), "run python tests/sagemaker_sdk/table.py"


def test_every_version_has_the_image_of_the_sdk_in_every_region(table):
    compared = 0
    for minor, (framework, name, config) in newest(table).items():
        for region in config["registries"]:
            for kind in TYPES:
                expected = table.retrieved(framework, name, region, kind)
                assert images.image_uri(minor, region, kind) == expected
                compared += 1
    assert compared > 500


def test_no_version_or_region_of_the_sdk_is_missing_and_none_is_invented(table):
    found = newest(table)
    assert images.known_versions() == tuple(found)
    for region in images.known_regions():
        expected = {minor for minor, (_, _, config) in found.items() if region in config["registries"]}
        assert set(images.known_versions(region)) == expected


@pytest.mark.parametrize("minor", images.known_versions())
def test_every_type_that_accel_trains_on_gets_the_image_of_the_sdk(table, minor):
    framework, name, _ = newest(table)[minor]
    types = [kind for kind in instances.known() if not kind.startswith(REFUSED)]
    assert len(types) > 200
    for kind in types:
        expected = table.retrieved(framework, name, "us-east-1", kind)
        if kind.startswith(V100) and "-cu13" in expected:
            continue
        assert images.image_uri(minor, "us-east-1", kind) == expected


def test_the_sdk_says_the_same_python_where_it_says_one(table):
    for minor, (_, _, config) in newest(table).items():
        for python in config.get("py_versions", ()):
            assert images.python_of(minor) == f"{python[2]}.{python[3:]}"
