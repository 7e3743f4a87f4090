import copy
import re

import botocore.session
import pytest
from botocore.validate import ParamValidator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker.check import check, problems
from accel_cli.launchers.sagemaker.request import Facts, training_job
from accel_cli.launchers.sagemaker.section import SageMaker

ROLE = "arn:aws:iam::123456789012:role/train"


def made(**said):
    section = SageMaker(**said)
    facts = Facts(
        "job-1", "eu-west-1", "123456789012", "aws", ROLE, "bucket", "image:1", {"train": "s3://b/x"}
    )
    return training_job({**section.model_dump(), "max_wait": section.longest}, {"A": "1"}, facts)


def changed(place, value, **said):
    """A good request with one place changed; a list's index is a number."""
    request = copy.deepcopy(made(**said))
    *above, last = place.split(".")
    inner = request
    for name in above:
        inner = inner[int(name)] if name.isdigit() else inner.setdefault(name, {})
    inner[int(last) if last.isdigit() else last] = value
    return request


SHAPE = (
    botocore.session.get_session()
    .get_service_model("sagemaker")
    .operation_model("CreateTrainingJob")
    .input_shape
)


def shapes(shape, seen):
    if shape.name in seen:
        return
    seen[shape.name] = shape
    inner = {
        "structure": lambda: list(shape.members.values()),
        "list": lambda: [shape.member],
        "map": lambda: [shape.key, shape.value],
    }
    for each in inner.get(shape.type_name, list)():
        shapes(each, seen)


ALL: dict = {}
shapes(SHAPE, ALL)


# What is taken.


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"spot": True, "max_run": 60, "max_wait": 60},
        {"keep_alive": 21600, "tags": {"équipe": "数据 1\u00a0\u0663", "a:b/c=d+e-f@g": ""}},
        {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"], "network_isolation": True, "encrypt_traffic": True},
        {"model_parallel": {"hybrid_shard_degree": 8}, "volume_kms_key": "arn:aws:kms:eu-west-1:1:key/2"},
    ],
)  # fmt: skip
def test_what_a_profile_makes_is_taken(said):
    assert problems(made(**said)) == []
    check(made(**said))


# What is refused, with the profile's key.


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("TrainingJobName", "-a", "launcher.job_name (TrainingJobName): expected text that matches [a-zA-Z0-9]"),
        ("TrainingJobName", "a" * 64, "launcher.job_name (TrainingJobName): expected at most 63 characters, got 64"),
        ("RoleArn", "train", "launcher.role (RoleArn): expected at least 20 characters, got 5"),
        ("RoleArn", "arn:aws:iam::1234:role/train", "launcher.role (RoleArn): expected text that matches"),
        ("HyperParameters", {"mp_parameters": "x" * 2501}, "launcher.model_parallel.mp_parameters (HyperParameters.mp_parameters): expected at most 2,500 characters"),
        ("HyperParameters", {"a": 1}, "launcher.model_parallel.a (HyperParameters.a): expected text, got 1"),
        ("AlgorithmSpecification.TrainingImage", "x" * 256, "launcher.image_uri (AlgorithmSpecification.TrainingImage): expected at most 255"),
        ("AlgorithmSpecification.TrainingInputMode", "file", "AlgorithmSpecification.TrainingInputMode: expected Pipe, File or FastFile, got 'file' (did you mean File?)"),
        ("AlgorithmSpecification.MetricDefinitions", [{"Name": "loss", "Regex": ""}], "launcher.metrics.loss (AlgorithmSpecification.MetricDefinitions[0].Regex): expected at least 1 characters, got 0"),
        ("InputDataConfig.1.ChannelName", "tra in", "launcher.inputs.tra in (InputDataConfig[1].ChannelName): expected text that matches"),
        ("InputDataConfig.1.ChannelName", "accel", "launcher.inputs.accel (InputDataConfig[1]): there are two of this name"),
        ("InputDataConfig.1.DataSource.S3DataSource.S3Uri", "/data", "launcher.inputs.train (InputDataConfig[1].DataSource.S3DataSource.S3Uri): expected text that matches (https|s3)"),
        ("OutputDataConfig.S3OutputPath", "bucket", "launcher.bucket (OutputDataConfig.S3OutputPath): expected text that matches"),
        ("OutputDataConfig.KmsKeyId", "key!", "launcher.output_kms_key"),
        ("ResourceConfig.InstanceType", "ml.g5.3xlarge", "launcher.instance_type (ResourceConfig.InstanceType): the installed boto3 knows no such type, got 'ml.g5.3xlarge' (did you mean ml.g5.xlarge, ml.g5.2xlarge"),
        ("ResourceConfig.InstanceCount", -1, "launcher.instance_count (ResourceConfig.InstanceCount): expected at least 0, got -1"),
        ("ResourceConfig.InstanceCount", True, "launcher.instance_count (ResourceConfig.InstanceCount): expected a whole number, got True"),
        ("ResourceConfig.VolumeSizeInGB", "30", "launcher.volume_size (ResourceConfig.VolumeSizeInGB): expected a whole number, got '30'"),
        ("ResourceConfig.KeepAlivePeriodInSeconds", 21601, "launcher.keep_alive (ResourceConfig.KeepAlivePeriodInSeconds): expected at most 21,600, got 21,601"),
        ("StoppingCondition.MaxRuntimeInSeconds", 0, "launcher.max_run (StoppingCondition.MaxRuntimeInSeconds): expected at least 1, got 0"),
        ("StoppingCondition.MaxWaitTimeInSeconds", 99999, "launcher.max_wait (StoppingCondition.MaxWaitTimeInSeconds): only spot jobs wait"),
        ("VpcConfig", {"Subnets": ["s"]}, "launcher.security_group_ids (VpcConfig.SecurityGroupIds): this is needed"),
        ("VpcConfig", {"SecurityGroupIds": ["s"]}, "launcher.subnets (VpcConfig.Subnets): this is needed"),
        ("VpcConfig", {"Subnets": ["s"] * 17, "SecurityGroupIds": ["g"]}, "launcher.subnets (VpcConfig.Subnets): expected at most 16 entries, got 17"),
        ("CheckpointConfig.S3Uri", "bucket", "launcher.checkpoint_uri (CheckpointConfig.S3Uri): expected text that matches"),
        ("Environment", {"A-B": ""}, "env.A-B (Environment.A-B): expected text that matches"),
        ("Environment", {f"N{n}": "" for n in range(101)}, "env (Environment): expected at most 100 entries, got 101"),
        ("Environment", {"A": "x" * 513}, "env.A (Environment.A): expected at most 512 characters, got 513"),
        ("Tags", [{"Key": "a!", "Value": ""}], "launcher.tags.a! (Tags[0].Key): expected text that matches"),
        ("Tags", [{"Key": "aws:a", "Value": ""}], "launcher.tags.aws:a (Tags[0]): names that begin with aws:"),
        ("Tags", [{"Key": "a"}], "launcher.tags.a (Tags[0].Value): this is needed"),
        ("Tags", [{"Key": str(n), "Value": ""} for n in range(51)], "launcher.tags (Tags): expected at most 50 entries, got 51"),
        ("TrainingJobNam", "a", "TrainingJobNam: SageMaker has no such member (did you mean TrainingJobName?)"),
        ("EnableNetworkIsolation", "yes", "launcher.network_isolation (EnableNetworkIsolation): expected true or false, got 'yes'"),
        ("ResourceConfig", [], "ResourceConfig: expected keys and values, got []"),
    ],
)  # fmt: skip
def test_what_sagemaker_refuses_is_said_with_the_key_of_the_profile(place, value, said):
    found = problems(changed(place, value))
    assert any(each.startswith(said) for each in found), found
    assert len(found) <= 2
    with pytest.raises(UsageError, match="nothing was sent"):
        check(changed(place, value))


def test_what_is_not_said_at_all_is_found():
    request = made()
    del request["RoleArn"]
    assert problems(request) == ["launcher.role (RoleArn): this is needed, and nothing says it"]


def test_everything_is_said_at_once():
    request = changed(
        "ResourceConfig", {"InstanceType": "large", "KeepAlivePeriodInSeconds": 9, "VolumeSizeInGB": 0}
    )
    request |= {"TrainingJobName": "", "EnableManagedSpotTraining": True}
    with pytest.raises(UsageError) as caught:
        check(request)
    assert len(str(caught.value).splitlines()) > 5


def test_spot_jobs_say_how_long_they_wait_and_are_not_kept():
    spot = made(spot=True, max_run=100, max_wait=100)
    assert problems(spot) == []
    del spot["StoppingCondition"]["MaxWaitTimeInSeconds"]
    assert "a spot job needs it" in problems(spot)[0]
    short = changed("StoppingCondition.MaxWaitTimeInSeconds", 99, spot=True, max_run=100)
    assert (
        "expected at least launcher.max_run, 100, since it counts the run too, got 99" in problems(short)[0]
    )
    kept = changed("ResourceConfig.KeepAlivePeriodInSeconds", 60, spot=True)
    assert "launcher.keep_alive" in problems(kept)[0]
    assert "cannot be kept" in problems(kept)[0]


def test_a_type_newer_than_boto3_is_taken_when_that_is_said():
    request = changed("ResourceConfig.InstanceType", "ml.g9.xlarge")
    assert problems(request)
    assert problems(request, allow_unknown_instance=True) == []


def test_a_secret_is_never_shown():
    found = problems(
        changed("Environment", {"HF_TOKEN": ["hunter2"], "API_KEY": 4711, "TOKEN": "hunter2" * 99})
    )
    assert len(found) == 3
    assert "expected text, got ***" in found[0]
    found += problems(changed("OutputDataConfig.S3OutputPath", "ftp://me:hunter2@host/x"))
    assert len(found) == 4
    assert "hunter2" not in str(found)
    assert "4711" not in str(found)


# Against botocore itself.


def test_every_kind_of_value_in_a_request_is_known_here():
    from accel_cli.launchers.sagemaker import check as module

    assert {shape.type_name for shape in ALL.values()} <= set(module._TYPES)


def test_every_pattern_of_a_request_can_be_checked_here():
    from accel_cli.launchers.sagemaker import check as module

    patterns = [shape.metadata["pattern"] for shape in ALL.values() if "pattern" in shape.metadata]
    assert len(patterns) > 20
    for pattern in patterns:
        assert r"\p" not in module._compiled(pattern).pattern


def test_what_a_newer_botocore_has_and_this_does_not_know_is_left_to_sagemaker(monkeypatch):
    from accel_cli.launchers.sagemaker import check as module

    assert module._compiled(r"[\p{Han}]+").fullmatch("anything")
    monkeypatch.setattr(
        module, "_TYPES", {k: v for k, v in module._TYPES.items() if k not in {"integer", "boolean"}}
    )
    assert problems(changed("ResourceConfig.VolumeSizeInGB", True)) == []


TEXT = st.sampled_from(["", "a", "ml.g5.xlarge", "s3://b/x", ROLE, "File", "x" * 300, "é", "File"]) | st.text(
    max_size=9
)
LEAF = TEXT | st.integers(-2, 10**6) | st.booleans() | st.none() | st.floats(allow_nan=False)


def values(shape, depth=0):
    """Values that nearly fit a shape."""
    if shape.type_name == "structure" and depth < 4:
        fitting = {name: values(member, depth + 1) for name, member in shape.members.items()}
        required = {name: fitting.pop(name) for name in shape.required_members}
        return st.fixed_dictionaries(required, optional={**dict(list(fitting.items())[:6]), "Odd": LEAF})
    if shape.type_name == "list" and depth < 4:
        return st.lists(values(shape.member, depth + 1), max_size=2)
    if shape.type_name == "map":
        return st.dictionaries(st.text(max_size=3), LEAF, max_size=2)
    if shape.type_name == "string":
        return st.sampled_from(shape.enum or ["a", "s3://b/x", ROLE]) | TEXT
    return LEAF


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_passes_here_passes_botocore(data):
    request = copy.deepcopy(made(spot=True))
    for name in data.draw(st.sets(st.sampled_from(sorted(SHAPE.members)), max_size=2)):
        request[name] = data.draw(values(SHAPE.members[name], 1) | LEAF)
    found = problems(request)
    if not found:
        assert not ParamValidator().validate(request, SHAPE).has_errors()
    assert all(re.match(r"[\w.]", line) for line in found)


@settings(max_examples=100)
@given(
    st.sampled_from(sorted(SHAPE.members)),
    LEAF | st.lists(LEAF, max_size=2) | st.dictionaries(TEXT, LEAF, max_size=2),
)
def test_what_botocore_refuses_is_refused_here(name, value):
    request = {**made(), name: value}
    if ParamValidator().validate(request, SHAPE).has_errors():
        assert problems(request)
