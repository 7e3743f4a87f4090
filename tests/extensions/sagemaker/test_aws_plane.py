"""Tests of the plane itself: its validation, its states, running a bundle, and injected faults."""

import io
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError
from support.waits import wait_until

GROUP = "/aws/sagemaker/TrainingJobs"
KINDS = ("Completed", "Failed", "Stopped")


@pytest.fixture
def account(aws):
    """An account with a role and a bucket."""
    aws.role()
    aws.bucket("sagemaker-out")
    return aws


def create(aws, name, **changes):
    return aws.client("sagemaker").create_training_job(**aws.request(name, **changes))


def refused(aws, name="one", **changes):
    with pytest.raises(ClientError) as error:
        create(aws, name, **changes)
    return f"{error.value.response['Error']['Code']}: {error.value.response['Error']['Message']}"


def lines(aws, job):
    """Return the lines of all hosts of a job, by stream."""
    logs = aws.client("logs")
    streams = logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix=f"{job}/")["logStreams"]
    names = [stream["logStreamName"] for stream in streams]
    messages = [
        logs.get_log_events(logGroupName=GROUP, logStreamName=name, startFromHead=True)["events"]
        for name in names
    ]
    return {
        name: [event["message"] for event in events] for name, events in zip(names, messages, strict=True)
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "a_b"},
            ("ValidationException: 1 validation error detected: Value 'a_b' at 'trainingJobName' failed to satisfy constraint: "
            "Member must satisfy regular expression pattern: [a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"),
        ),
        ({"ResourceConfig": {"InstanceType": "ml.nope", "InstanceCount": 1}}, "Member must satisfy enum value set: ["),
        (
            {"Environment": {"A": "x" * 513}},
            "Map value must satisfy constraint: [Member must have length less than or equal to 512]",
        ),
        ({"RoleArn": "arn:aws:iam::123456789012:role/nope"}, "ValidationException: Could not assume role arn:aws:iam::"),
        ({"EnableManagedSpotTraining": True}, "Invalid MaxWaitTimeInSeconds"),
        (
            {
                "EnableManagedSpotTraining": True,
                "StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 9},
                "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "KeepAlivePeriodInSeconds": 60},
            },
            "KeepAlivePeriodInSeconds cannot be set",
        ),
        (
            {"InputDataConfig": [{"ChannelName": "x", "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://no/x"}}}]},
            'ValidationException: No S3 objects found under S3 URL "s3://no/x"',
        ),
    ],
)  # fmt: skip
def test_requests_that_sagemaker_rejects_are_rejected(account, changes, message):
    assert message in refused(account, **changes)


def test_a_role_that_sagemaker_cannot_assume_is_rejected(account):
    trust = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]}  # fmt: skip
    assert "Could not assume role" in refused(account, RoleArn=account.role("other", trust))


def test_a_duplicate_name_and_an_exceeded_quota_are_rejected(account):
    account.settings(hold="Training", quota={"ml.m5.large": 1})
    create(account, "one")
    assert refused(account).startswith("ResourceInUse: Training job names must be unique")
    assert refused(account, "two").startswith(
        "ResourceLimitExceeded: The account-level service limit 'ml.m5.large for training job usage' is 1 Instances, with "
        "current utilization of 1 Instances and a request delta of 1 Instances."
    )


def test_a_job_passes_through_its_states_and_writes_its_log(account):
    account.settings(play={"lines": ["a", "b\rc"], "model": {"m.txt": "weights"}}, time=100)
    create(account, "one", EnableManagedSpotTraining=True, StoppingCondition={"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 9},
           ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 2, "VolumeSizeInGB": 30})  # fmt: skip
    description = account.wait("one")
    states = [step["Status"] for step in description["SecondaryStatusTransitions"]]
    assert states == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert (description["TrainingTimeInSeconds"], description["BillableTimeInSeconds"]) == (100, 30)
    log_lines = lines(account, "one")
    assert [name.rpartition("-")[0] for name in log_lines] == ["one/algo-1", "one/algo-2"]
    assert list(log_lines.values())[1] == ["a", "b\rc", "accel: algo-2 ended with exit code 0"]
    assert (
        description["ModelArtifacts"]["S3ModelArtifacts"]
        == "s3://sagemaker-out/accel/one/output/model.tar.gz"
    )
    body = account.client("s3").get_object(Bucket="sagemaker-out", Key="accel/one/output/model.tar.gz")[
        "Body"
    ]
    with tarfile.open(fileobj=io.BytesIO(body.read())) as archive:
        assert archive.getnames() == ["m.txt"]


def test_a_failed_job_has_its_reason(account):
    account.settings(play={"exit": 3, "failure": "ValueError: boom"})
    create(account, "failed")
    assert account.wait("failed")["FailureReason"] == "AlgorithmError: ValueError: boom, exit code: 3"
    account.settings(play={"seconds": 60}, hold="Training")
    create(account, "stopped")
    account.wait("stopped", "Training")
    client = account.client("sagemaker")
    client.stop_training_job(TrainingJobName="stopped")
    assert account.wait("stopped")["TrainingJobStatus"] == "Stopped"
    with pytest.raises(ClientError, match="rejected because the training job is in status Stopped"):
        client.stop_training_job(TrainingJobName="stopped")
    account.settings(speed=36000)
    create(account, "long")
    description = account.wait("long")
    assert (description["TrainingJobStatus"], description["SecondaryStatus"]) == (
        "Stopped",
        "MaxRuntimeExceeded",
    )


@pytest.mark.full
def test_faults_are_injected_as_often_as_configured(account):
    sts = account.client("sts")
    sts.meta.events.unregister("needs-retry.sts")
    account.fault("GetCallerIdentity", "expired")
    with pytest.raises(ClientError, match="ExpiredToken"):
        sts.get_caller_identity()
    assert sts.get_caller_identity()["Account"] == "123456789012"
    client = account.client("sagemaker")
    account.fault("sagemaker:*", "throttled", times=2)
    assert client.list_training_jobs()["TrainingJobSummaries"] == []  # boto3 tries again
    assert account.calls().count("sagemaker:ListTrainingJobs") == 3
    account.fault("PutObject", "dropped", times=None)
    with pytest.raises(ConnectionClosedError):
        account.client("s3").put_object(Bucket="sagemaker-out", Key="x", Body=b"x")


STARTS = """
import importlib.util, pathlib, sys
sys.path.append({tests!r})
spec = importlib.util.spec_from_file_location("client", {client!r})
client = importlib.util.module_from_spec(spec)
spec.loader.exec_module(client)
plane = client.AwsPlane(pathlib.Path({root!r}))
print(plane._process.pid, flush=True)
sys.stdin.read()
"""


def test_the_plane_ends_with_its_parent_process_also_if_killed(tmp_path):
    tests = Path(__file__).parents[2]
    code = STARTS.format(tests=str(tests), client=str(tests / "aws" / "client.py"), root=str(tmp_path))
    starter = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid = starter.stdout.readline().strip()
    assert pid, "the plane was not started"
    plane = Path("/proc") / pid
    assert plane.exists()
    starter.kill()
    starter.communicate()
    with suppress(OSError):  # gone, perhaps between opening and reading
        wait_until(lambda: (plane / "stat").read_text().split()[2] == "Z")
