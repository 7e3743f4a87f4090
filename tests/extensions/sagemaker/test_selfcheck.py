"""`accel test` as a SageMaker job, which checks all parts in an account."""

import pytest


@pytest.fixture
def profile(aws, accel):
    """A profile of SageMaker, and an AWS on loopback that runs jobs."""
    aws.role()
    aws.run = True
    accel(
        "config",
        "set",
        "launcher.kind=sagemaker",
        "launcher.instance_type=ml.m5.xlarge",
        "launcher.instance_count=2",
    )
    return aws


@pytest.mark.full
def test_the_self_check_runs_on_every_instance_and_leaves_nothing(profile, accel, cwd, script):
    script("raise SystemExit('nobody runs this')")
    result = accel("test")
    assert result.returncode == 0, result.stderr
    assert "processes: 2 of 2 ranks answer" in result.stdout
    assert "everything works here" in result.stdout
    assert "is Completed" in result.stderr
    assert sorted(path.name for path in cwd.iterdir()) == [".git", "train.py"]
    bucket = "sagemaker-us-east-1-123456789012"
    sent = [entry["Key"] for entry in profile.client("s3").list_objects_v2(Bucket=bucket)["Contents"]]
    source = next(key for key in sent if key.endswith("source.tar.gz"))
    assert profile.client("s3").head_object(Bucket=bucket, Key=source)["ContentLength"] < 200
