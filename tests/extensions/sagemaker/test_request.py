"""The request of a training job, validated by the service model of botocore."""

import json
import re
from datetime import UTC, datetime

import botocore.session
import pytest
from botocore.validate import ParamValidator
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.cases import golden

from accel_cli.errors import UsageError
from accel_cli.extensions.sagemaker.launcher import SageMaker
from accel_cli.extensions.sagemaker.request import (
    SageMakerJobPlan,
    Submission,
    build_request,
    check_request,
    name_job,
)

NOW = datetime(2026, 11, 21, 22, 30, 15, 678_901, tzinfo=UTC)
ROLE = "arn:aws:iam::123456789012:role/train"


def request(settings=None, env=None):
    section = SageMaker(**(settings or {}))
    facts = Submission("job-1", "eu-west-1", "123456789012", ROLE, "bucket", "image:1")
    job = SageMakerJobPlan(section=section, run={"env": env or {}}, source=".", output_dir=".")
    return build_request(job, facts)


VPC = {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]}
PLAN = "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/large-models"
LOGIN = "arn:aws:lambda:eu-west-1:123456789012:function:registry-login"


PROFILES = {
    "minimal": {},
    "options": {
        **VPC, "spot": True, "max_run": 10, "tags": {"team": "x"}, "volume_kms_key": "k1", "output_kms_key": "k2",
        "encrypt_traffic": True, "checkpoint_uri": "s3://other/place", "metrics": {"loss": "loss ([0-9.]+)"},
        "inputs": {"train": "s3://b/x", "big": {"uri": "s3://b/y", "input_mode": "FastFile"}},
    },
    "rarer": {
        **VPC, "compress_output": False, "tensorboard_uri": "s3://b/events", "remote_debug": True, "max_retries": 2,
        "training_plan": PLAN, "image_uri": "registry.example.com:5000/team/accel:1", "registry_credentials": LOGIN,
        "network_isolation": True, "volume_kms_key": "arn:aws:kms:eu-west-1:1:key/2",
    },
    "file-systems": {
        **VPC, "keep_alive": 21600, "tags": {"équipe": "数据 1\u00a0\u0663", "a:b/c=d+e-f@g": ""},
        "inputs": {
            "train": "fsx://fs-0123456789abcdef0/abcdefgh/images",
            "home": {"uri": "efs://fs-01234567", "access": "rw"},
            "test": "s3://b/test",
        },
    },
    "patch": {
        "inputs": {"train": "s3://b/x"}, "tags": {"team": "a"},
        "request": {
            "ExperimentConfig": {"ExperimentName": "digits"},
            "ResourceConfig": {"InstancePlacementConfig": {"EnableMultipleJobs": True}},
            "InputDataConfig": [{"ChannelName": "train", "ContentType": "text/csv"}, {"ChannelName": "x", "DataSource": {}}],
            "Tags": [{"Key": "team", "Value": "b"}, {"Key": "cost", "Value": "1"}],
        },
    },
}  # fmt: skip
"""Profiles by the name of the golden file of their request."""


@pytest.mark.parametrize("name", PROFILES)
def test_the_request_of_a_profile_is_valid_and_that_of_its_golden_file(name):
    built_request = request(PROFILES[name], {"A": "1"} if name == "options" else None)
    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    assert not ParamValidator().validate(built_request, shape).has_errors()
    check_request(built_request)
    golden.check(f"sagemaker/{name}.json", json.dumps(built_request, indent=2, ensure_ascii=False) + "\n")


@pytest.mark.parametrize(
    ("image", "is_private"),
    [
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13", False),
        ("763104351884.dkr-ecr.us-east-1.on.aws/pytorch:2.13", False),
        ("my-image:1", False),
        ("registry.example.com/team/accel:1", True),
        ("ghcr.io/team/accel:1", True),
        ("localhost:5000/accel", True),
    ],
)
def test_an_image_outside_ecr_is_read_from_a_vpc(image, is_private):
    assert (
        "TrainingImageConfig" in request({**VPC, "image_uri": image})["AlgorithmSpecification"]
    ) == is_private


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": {"a": "efs://fs-01234567/x"}}, "subnets: a file system is mounted from a VPC"),
        ({"inputs": {"a": {"uri": "efs://fs-01234567"}}}, "subnets: a file system is mounted from a VPC"),
        ({"inputs": {"a": "fsx://fs-01234567"}}, "expected an address such as"),
        ({"inputs": {"a": "efs://123/x"}}, "expected an address such as"),
        ({"inputs": {"a": {"uri": "s3://b/x", "access": "rw"}}}, "only a file system can be written"),
        ({"inputs": {"a": {"uri": "efs://fs-01234567", "input_mode": "FastFile"}}}, "input_mode and distribution are for S3"),
        ({"image_uri": "ghcr.io/a/b:1"}, "subnets: SageMaker reads ghcr.io/a/b:1, which is not in ECR, from a VPC"),
        ({"registry_credentials": LOGIN}, "registry_credentials: only a registry outside ECR needs them"),
        ({"max_retries": 31}, "less than or equal to 30"),
    ],
)  # fmt: skip
def test_combinations_that_sagemaker_cannot_run_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        SageMaker(**settings)


def test_variables_that_a_request_cannot_contain_are_only_in_the_bundle():
    built_request = request(env={"LONG": "x" * 513, "A.B": "1", **{f"N{n}": "" for n in range(120)}})[
        "Environment"
    ]
    assert len(built_request) == 100
    assert not {"LONG", "A.B"} & set(built_request)


def test_a_job_name_consists_of_script_and_time():
    assert name_job(None, "src/train_it.py", NOW) == "train-it-20261121-223015-678"
    assert name_job(None, "pkg.train", NOW) == "pkg-train-20261121-223015-678"
    assert name_job("my-base", "x.py", NOW) == "my-base-20261121-223015-678"
    assert name_job(None, "___", NOW) == "accel-20261121-223015-678"


@given(st.text(), st.text(min_size=1))
def test_every_job_name_is_valid(base, target):
    pattern = r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
    assert re.fullmatch(pattern, name_job(base or None, target.replace("\0", ""), NOW))


def test_a_patch_of_a_key_is_refused_with_the_key():
    with pytest.raises(UsageError, match=r"EnableNetworkIsolation.*Set launcher\.network_isolation"):
        request({"request": {"EnableNetworkIsolation": None}})


@pytest.mark.parametrize(
    ("patch", "cure"),
    [
        ({"TrainingJobName": "x"}, r"Set launcher\.job_name"),
        ({"ResourceConfig": None}, r"Set launcher\.instance_type"),
        ({"AlgorithmSpecification": {"ContainerArguments": ["x"]}}, "arguments of the script"),
        (
            {"InputDataConfig": [{"ChannelName": "accel", "InputMode": "Pipe"}]},
            "another name for the channel",
        ),
        ({"InputDataConfig": [{"ChannelName": "accel", "$patch": "delete"}]}, "another name for the channel"),
        ({"Environment": {"A": "1"}}, r"Set env in the profile"),
        ({"RetryStrategy": {"MaximumRetryAttempts": 2}}, r"Set launcher\.max_retries"),
        ({"CheckpointConfig": {"LocalPath": "/x"}}, r"Set launcher\.checkpoint_uri"),
    ],
)
def test_a_patch_cannot_change_what_accel_sets(patch, cure):
    with pytest.raises(UsageError, match=cure):
        request({"request": patch})


def test_an_unknown_member_of_a_patch_is_named_with_its_path():
    for patch, message in (
        ({"ExperimentConfi": {}}, r"launcher\.request\.ExperimentConfi: unknown member\. Did you mean ExperimentConfig\?"),
        ({"ExperimentConfig": {"Name": "a"}}, r"launcher\.request\.ExperimentConfig\.Name: unknown member"),
        ({"ExperimentConfig": {"ExperimentName": "x" * 121}}, r"launcher\.request\.ExperimentConfig\.ExperimentName: expected at most 120"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            check_request(request({"request": patch}))


# The check against the limits and patterns of botocore's model.


def changed(path, value):
    """Return a valid request with one value changed."""
    base_request = request({"inputs": {"train": "s3://b/x"}})
    *above, last = path.split(".")
    inner = base_request
    for name in above:
        inner = inner[int(name)] if name.isdigit() else inner[name]
    inner[last] = value
    return base_request


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("TrainingJobName", "-a", "launcher.job_name (TrainingJobName): expected text that matches [a-zA-Z0-9]"),
        ("TrainingJobName", "a" * 64, "launcher.job_name (TrainingJobName): expected at most 63 characters, got 64"),
        ("RoleArn", "arn:aws:iam::1234:role/train", "launcher.role (RoleArn): expected text that matches"),
        ("AlgorithmSpecification.TrainingImage", "x" * 256, "launcher.image_uri (AlgorithmSpecification.TrainingImage): expected at most 255"),
        ("AlgorithmSpecification.MetricDefinitions", [{"Name": "loss", "Regex": "x" * 501}], "launcher.metrics (AlgorithmSpecification.MetricDefinitions[0].Regex): expected at most 500 characters"),
        ("InputDataConfig.1.ChannelName", "tra in", "launcher.inputs (InputDataConfig[1].ChannelName): expected text that matches"),
        ("OutputDataConfig.S3OutputPath", "bucket", "launcher.bucket (OutputDataConfig.S3OutputPath): expected text that matches"),
        ("OutputDataConfig.KmsKeyId", "key!", "launcher.output_kms_key"),
        ("ResourceConfig.KeepAlivePeriodInSeconds", 21601, "launcher.keep_alive (ResourceConfig.KeepAlivePeriodInSeconds): expected at most 21,600, got 21,601"),
        ("ResourceConfig.InstanceCount", -1, "ResourceConfig.InstanceCount, value: -1"),
        ("ResourceConfig.VolumeSizeInGB", "30", "ResourceConfig.VolumeSizeInGB, value: 30, type: <class 'str'>"),
        ("VpcConfig", {"Subnets": ["s"]}, "SecurityGroupIds"),
        ("VpcConfig", {"Subnets": ["s"] * 17, "SecurityGroupIds": ["g"]}, "launcher.subnets (VpcConfig.Subnets): expected at most 16 entries, got 17"),
        ("CheckpointConfig.S3Uri", "bucket", "launcher.checkpoint_uri (CheckpointConfig.S3Uri): expected text that matches"),
        ("Environment", {f"N{n}": "" for n in range(101)}, "env (Environment): expected at most 100 entries, got 101"),
        ("Tags", [{"Key": "a!", "Value": ""}], "launcher.tags (Tags[0].Key): expected text that matches"),
        ("Tags", [{"Key": str(n), "Value": ""} for n in range(51)], "launcher.tags (Tags): expected at most 50 entries, got 51"),
        ("TrainingJobNam", "a", "TrainingJobNam"),
    ],
)  # fmt: skip
def test_invalid_values_are_reported_with_the_key_of_the_profile(path, value, message):
    with pytest.raises(UsageError) as caught:
        check_request(changed(path, value))
    first, *problems = str(caught.value).splitlines()
    assert first == "SageMaker would refuse this job; nothing was sent:"
    assert any(message in each for each in problems), problems
    assert len(problems) <= 2


def test_all_problems_are_reported_at_once():
    built_request = changed("ResourceConfig.KeepAlivePeriodInSeconds", 10**9) | {"TrainingJobName": "-"}
    with pytest.raises(UsageError) as caught:
        check_request(built_request)
    assert len(str(caught.value).splitlines()) == 3


def test_secrets_are_never_printed():
    for built_request in (
        changed("Environment", {"TOKEN": "hunter2" * 99}),
        changed("OutputDataConfig.S3OutputPath", "ftp://me:hunter2@host/x"),
    ):
        with pytest.raises(UsageError) as caught:
            check_request(built_request)
        assert "hunter2" not in str(caught.value)
