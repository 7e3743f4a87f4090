import sys

import pytest
from sagemaker.core import image_uris

from accel_cli.errors import UsageError
from accel_cli.extensions.sagemaker import aws, images

GPU, CPU = "ml.g5.2xlarge", "ml.m5.xlarge"


def refused(*args, check=images.find_image, **options):
    with pytest.raises(UsageError) as caught:
        check(*args, **options)
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
    assert images.find_image(version, region, kind) == expected


@pytest.mark.parametrize(
    "version",
    ["2.13", "2.13.0", "2.13.1", "2.13.0+cpu", "2.13.0+cu130", "2.13.0a0+git1234", "2.13.0.dev20260701"],
)
def test_a_local_torch_of_any_build_selects_the_image_of_its_version(version):
    assert images.find_image(version, "us-east-1", GPU) == images.find_image("2.13", "us-east-1", GPU)


@pytest.mark.parametrize("version", ["2.99.0+cu140", "1.10.2", "2.8.0", "2,13", "newest"])
def test_a_version_without_an_image_is_rejected_with_the_available_ones(version):
    message = refused(version, "us-east-1", GPU)
    assert f"No image with torch {version} in us-east-1: of torch 2.9 and newer, " in message
    assert "2.9, 2.10, 2.11, 2.12, 2.13, 2.14" in message
    assert "launcher.image_uri" in message


def test_an_unknown_region_is_rejected_with_a_suggestion():
    assert (
        "in region 'us-eastt-1', as far as the installed sagemaker-core knows. Did you mean us-east-1?"
        in refused("2.13", "us-eastt-1", GPU)
    )


def test_a_region_without_the_newest_image_is_reported_with_its_versions():
    assert "2.12, 2.13. Set launcher.pytorch_version" in refused("2.14", "us-gov-west-1", GPU)
    assert images.list_versions("us-gov-west-1")[-1] == "2.13"


def test_the_python_of_an_image_comes_from_the_table_or_its_name():
    assert images.parse_python_version(images.find_image("2.10.0+cu128", "us-east-1", GPU)) == "3.13"
    assert images.parse_python_version(images.find_image("2.13", "us-east-1", GPU)) == "3.12"
    assert images.parse_python_version("1.dkr.ecr.eu-west-1.amazonaws.com/mine:2.7-gpu-py311-cu128") == "3.11"
    assert images.parse_python_version("1.dkr.ecr.eu-west-1.amazonaws.com/mine:latest") is None
    assert images.parse_python_version("1.dkr.ecr.eu-west-1.amazonaws.com/2.13") is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ml.trn1.32xlarge", "Neuron"),
        ("ml.inf2.xlarge", "Neuron"),
        ("ml.p3.2xlarge", "CUDA 13 of AWS's image pytorch:2.13-cu133-amzn2023-sagemaker"),
        ("ml.p6e-gb200.36xlarge", "Arm"),
        ("ml.p2.xlarge", "its GPUs (K80) are supported up to torch 1.13 only. Choose"),
        ("p4d.24xlarge", "Unknown launcher.instance_type"),
    ],
)
def test_instance_types_that_no_image_supports_are_rejected(kind, reason):
    assert reason in refused("2.13", "us-east-1", kind)


def test_another_error_of_the_sdk_is_reported_as_it_is(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("Unsupported image scope: training.")

    monkeypatch.setattr(image_uris, "retrieve", refuse)
    text = refused("2.13", "us-east-1", GPU)
    assert text.startswith(f"Cannot find an image for '{GPU}': Unsupported image scope: training. Choose")


def test_every_version_has_an_image_in_its_listed_regions():
    regions = image_uris.config_for_framework("pytorch-amzn2023")["training"]["versions"]["2.13"][
        "registries"
    ]
    for version in images.list_versions():
        for region in regions:
            if version in images.list_versions(region):
                assert f".{region}." in images.find_image(version, region, GPU)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("ml.g5.3xlarge", "ml.g5."),
        ("ml.p4dn.24xlarge", "ml.p4d.24xlarge"),
        ("p4d.24xlarge", "ml.p4d.24xlarge"),
        ("ml.m5.xlage", "ml.m5.xlarge"),
    ],
)
def test_a_misspelled_instance_type_is_rejected_with_a_suggestion(typed, meant):
    message = refused(typed, check=images.check_type)
    assert typed in message
    assert meant in message.partition("Did you mean")[2]


def test_an_instance_type_unknown_to_boto3_is_accepted_on_request():
    message = refused("ml.g9.xlarge", check=images.check_type)
    assert "launcher.allow_unknown_instance: true" in message
    images.check_type("ml.g9.xlarge", allow_unknown=True)


def test_graviton_and_grace_types_are_arm():
    arm = ["ml.m7g.large", "ml.c6gn.xlarge", "ml.g5g.xlarge", "ml.t4g.medium", "ml.p6e-gb200.36xlarge"]
    assert all(images.is_arm(kind) for kind in arm)
    assert [kind for kind in images.list_types() if images.is_arm(kind)] == ["ml.p6e-gb200.36xlarge"]


def test_gpus_are_counted_only_for_known_types():
    counted = {
        kind: images.count_gpus(f"ml.{kind}")
        for kind in ("p4d.24xlarge", "g5.xlarge", "g5.12xlarge", "m5.large")
    }
    assert counted == {"p4d.24xlarge": 8, "g5.xlarge": 1, "g5.12xlarge": 4, "m5.large": 1}
    assert images.count_gpus("ml.g99.xlarge") is None
    assert images.count_gpus(None) is None
    for family, sizes in images._GPUS.items():
        for size in " ".join(sizes.values()).split():
            assert f"ml.{family}.{size}" in images.list_types()
            assert images.count_gpus(f"ml.{family}.{size}")


def test_every_instance_type_of_botocore_has_an_image():
    for kind in images.list_types():
        if kind.startswith(("ml.trn", "ml.p2.", "ml.p6e-gb200.")):
            continue
        images.check_type(kind)
        image = images.find_image("2.10", "us-east-1", kind)
        assert images.has_gpu(kind) is (kind.split(".")[1][0] in "gp")
        assert ("-gpu-" in image) == images.has_gpu(kind)
        assert ("-cpu-" in image) != images.has_gpu(kind)


def test_a_missing_boto3_is_an_error_with_the_install_command(monkeypatch):
    aws.load_service_model.cache_clear()
    monkeypatch.setitem(sys.modules, "botocore.loaders", None)
    assert "'boto3>=1.43.90'" in refused(check=images.list_types)


def test_an_unknown_aws_profile_does_not_matter(monkeypatch):
    aws.load_service_model.cache_clear()
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    assert images.list_types()
