"""The request is a pure function, and botocore's own model of the service takes it."""

import json
from datetime import datetime, timezone

import botocore.session
import pytest
from botocore.validate import ParamValidator
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.launchers.sagemaker.request import Facts, named, training_job
from accel_cli.launchers.sagemaker.section import SageMaker

NOW = datetime(2026, 11, 21, 22, 30, 15, 678_901, tzinfo=timezone.utc)
ROLE = "arn:aws:iam::123456789012:role/train"


def request(said=None, env=None, **known):
    section = SageMaker(**(said or {}))
    facts = Facts("job-1", "eu-west-1", "123456789012", "aws", ROLE, "bucket", "image:1", **known)
    return training_job({**section.model_dump(), "max_wait": section.longest}, env or {}, facts)


@pytest.fixture(scope="module")
def shape():
    model = botocore.session.get_session().get_service_model("sagemaker")
    return model.operation_model("CreateTrainingJob").input_shape


def test_the_least_request_says_what_it_must_and_no_more(shape):
    made = request()
    assert not ParamValidator().validate(made, shape).has_errors()
    assert sorted(made) == [
        "AlgorithmSpecification", "CheckpointConfig", "EnableInterContainerTrafficEncryption",
        "EnableManagedSpotTraining", "EnableNetworkIsolation", "InputDataConfig", "OutputDataConfig",
        "ResourceConfig", "RoleArn", "StoppingCondition", "TrainingJobName",
    ]  # fmt: skip
    assert made["ResourceConfig"] == {
        "InstanceType": "ml.g5.xlarge",
        "InstanceCount": 1,
        "VolumeSizeInGB": 30,
    }
    assert made["OutputDataConfig"] == {"S3OutputPath": "s3://bucket/accel/job-1/output"}
    channel = made["InputDataConfig"][0]
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/accel/job-1/bundle/"


def test_everything_that_can_be_said_has_its_place(shape):
    made = request(
        {
            "spot": True, "max_run": 10, "tags": {"team": "x"}, "subnets": ["subnet-1"],
            "security_group_ids": ["sg-1"], "volume_kms_key": "k1", "output_kms_key": "k2", "encrypt_traffic": True,
            "checkpoint_uri": "s3://other/place", "model_parallel": {"hybrid_shard_degree": 8},
        },
        {"A": "1"},
        inputs={"train": "s3://b/x", "big": {"uri": "s3://b/y", "input_mode": "FastFile"}},
        metrics={"loss": "loss ([0-9.]+)"},
    )  # fmt: skip
    assert not ParamValidator().validate(made, shape).has_errors()
    assert made["StoppingCondition"] == {"MaxRuntimeInSeconds": 10, "MaxWaitTimeInSeconds": 86410}
    assert made["CheckpointConfig"]["S3Uri"] == "s3://other/place"
    assert made["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert [channel["InputMode"] for channel in made["InputDataConfig"]] == ["File", "File", "FastFile"]
    assert made["AlgorithmSpecification"]["MetricDefinitions"] == [
        {"Name": "loss", "Regex": "loss ([0-9.]+)"}
    ]
    assert json.loads(made["HyperParameters"]["mp_parameters"]) == {"hybrid_shard_degree": 8}
    assert made["Environment"] == {"A": "1"}


def test_instances_are_kept_for_a_next_job_only_where_it_is_asked():
    assert request({"keep_alive": 600})["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 600


def test_variables_that_a_request_cannot_hold_travel_with_the_files_only():
    made = request(env={"LONG": "x" * 513, "A.B": "1", **{f"N{n}": "" for n in range(120)}})["Environment"]
    assert len(made) == 100
    assert not {"LONG", "A.B"} & set(made)


def test_no_argument_of_the_script_is_in_the_request():
    made = request()
    assert made["AlgorithmSpecification"]["ContainerArguments"] == [
        "exec $(command -v python3 || command -v python) /opt/ml/input/data/accel/entry.py"
    ]


def test_a_name_is_of_the_script_and_the_time():
    assert named(None, "src/train_it.py", NOW) == "train-it-20261121-223015-678"
    assert named("my-base", "x.py", NOW) == "my-base-20261121-223015-678"
    assert named(None, "___", NOW) == "accel-20261121-223015-678"


@given(st.text(), st.text(min_size=1))
def test_every_name_is_one_that_sagemaker_takes(base, target):
    import re

    pattern = r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
    assert re.fullmatch(pattern, named(base or None, target.replace("\0", ""), NOW))
