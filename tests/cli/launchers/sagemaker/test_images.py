import json

import pytest

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker import images

GPU, CPU = "ml.g5.2xlarge", "ml.m5.xlarge"


def refused(*args):
    with pytest.raises(UsageError) as caught:
        images.image_uri(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("version", "region", "kind", "expected"),
    [
        ("2.13", "us-east-1", GPU, "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker"),
        ("2.13", "us-east-1", CPU, "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cpu-amzn2023-sagemaker"),
        ("2.9", "eu-south-1", CPU, "692866216735.dkr.ecr.eu-south-1.amazonaws.com/pytorch-training:2.9.0-cpu-py312"),
        ("2.10", "cn-north-1", GPU, "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch-training:2.10.0-gpu-py313"),
        ("2.12", "us-gov-west-1", CPU, "442386744353.dkr.ecr.us-gov-west-1.amazonaws.com/pytorch:2.12-cpu-amzn2023-sagemaker"),
        ("2.11", "us-iso-east-1", CPU, "886529160074.dkr.ecr.us-iso-east-1.c2s.ic.gov/pytorch:2.11-cpu-amzn2023-sagemaker"),
    ],
)  # fmt: skip
def test_an_image_has_the_account_and_domain_of_its_region(version, region, kind, expected):
    assert images.image_uri(version, region, kind) == expected


@pytest.mark.parametrize(
    "version",
    ["2.13", "2.13.0", "2.13.1", "2.13.0+cpu", "2.13.0+cu130", "2.13.0a0+git1234", "2.13.0.dev20260701"],
)
def test_a_local_torch_of_any_build_gets_the_image_of_its_version(version):
    assert images.image_uri(version, "us-east-1", GPU) == images.image_uri("2.13", "us-east-1", GPU)


def test_types_with_gpus_get_the_image_with_cuda():
    gpus = ("ml.p4d.24xlarge", "ml.p6-b200.48xlarge", "ml.g4dn.xlarge", "ml.g7e.48xlarge")
    assert {images.image_uri("2.13", "us-east-1", kind) for kind in gpus} == {
        images.image_uri("2.13", "us-east-1", GPU)
    }
    assert "-cpu-" in images.image_uri("2.13", "us-east-1", "ml.c7i-flex.xlarge")


def test_a_version_newer_than_the_table_is_never_replaced_by_another():
    said = refused("2.99.0+cu140", "us-east-1", GPU)
    assert "no image of torch 2.99.0+cu140" in said
    assert "2.9, 2.10, 2.11, 2.12, 2.13, 2.14" in said
    assert "launcher.pytorch_version: '2.14'" in said
    assert "launcher.image_uri" in said


def test_a_version_older_than_accel_supports_is_refused_with_that_reason():
    assert "accel needs torch 2.9 or newer, got 1.10.2" in refused("1.10.2", "us-east-1", GPU)
    assert "accel needs torch 2.9 or newer" in refused("2.8.0", "us-east-1", GPU)


def test_what_is_no_version_is_refused_with_what_was_meant():
    assert "got '2,13' (did you mean 2.13?)" in refused("2,13", "us-east-1", GPU)
    assert "got 'newest'" in refused("newest", "us-east-1", GPU)


def test_an_unknown_region_is_refused_with_what_was_meant_and_what_to_do():
    said = refused("2.13", "us-eastt-1", GPU)
    assert "in 'us-eastt-1'" in said
    assert "(did you mean us-east-1?)" in said
    assert "launcher.image_uri" in said


def test_a_region_without_the_newest_image_says_the_newest_it_has():
    said = refused("2.14", "us-gov-west-1", GPU)
    assert "no image of torch 2.14 in us-gov-west-1" in said
    assert "launcher.pytorch_version: '2.13'" in said
    assert images.known_versions("us-gov-west-1")[-1] == "2.13"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ml.trn1.32xlarge", "Neuron"),
        ("ml.inf2.xlarge", "Neuron"),
        ("ml.p2.xlarge", "too old"),
        ("ml.p3.2xlarge", "CUDA 13 in AWS's image pytorch:2.13-cu133-amzn2023-sagemaker"),
        ("ml.p6e-gb200.36xlarge", "Arm"),
        ("p4d.24xlarge", "expected a name like ml.g5.2xlarge"),
    ],
)
def test_types_that_no_image_runs_on_are_refused(kind, reason):
    assert reason in refused("2.13", "us-east-1", kind)


def test_v100_gpus_get_the_images_with_an_older_cuda():
    assert images.image_uri("2.9", "us-east-1", "ml.p3dn.24xlarge").endswith(
        "pytorch-training:2.9.0-gpu-py312"
    )


def test_the_python_of_an_image_is_known_from_the_table_or_its_name():
    assert images.python_of("2.9") == "3.12"
    assert images.python_of("2.10.0+cu128") == "3.13"
    assert images.python_of(images.image_uri("2.13", "us-east-1", GPU)) == "3.12"
    assert images.python_of("1.dkr.ecr.eu-west-1.amazonaws.com/mine:2.7-gpu-py311-cu128") == "3.11"
    assert images.python_of("1.dkr.ecr.eu-west-1.amazonaws.com/mine:latest") is None
    assert images.python_of("1.dkr.ecr.eu-west-1.amazonaws.com/2.13") is None


def test_the_table_is_small_and_every_version_is_whole():
    text = images.TABLE.read_text(encoding="utf-8")
    assert len(text) < 6000
    table = json.loads(text)
    assert all({"cpu", "gpu", "python"} <= set(image) for image in table["images"].values())
    assert all(len(account) == 12 and account.isdigit() for account in table["accounts"].values())
