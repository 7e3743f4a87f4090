"""What a request needs and no profile says: asked of AWS, or said to be unknown; and everything that can be refused before."""

import json
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from accel_cli.errors import UsageError
from accel_cli.launchers.base import Job
from accel_cli.launchers.sagemaker import buckets, check, facts
from accel_cli.launchers.sagemaker.aws import Account
from accel_cli.launchers.sagemaker.request import training_job
from accel_cli.launchers.sagemaker.section import SageMaker
from accel_cli.planning.machine import Machine
from accel_runtime.env import Settings

NOW = datetime(2026, 11, 21, 22, 30, 1, 5000, tzinfo=timezone.utc)
READS = {
    "iam:GetRole", "iam:ListRoles", "s3:HeadBucket", "s3:GetBucketLocation", "sagemaker:DescribeTrainingJob",
    "sts:GetCallerIdentity",
}  # fmt: skip


@pytest.fixture
def plan(cwd, script):
    script("pass")

    def make(settings=None, **said):
        said = {"pytorch_version": "2.9", "instance_type": "ml.m5.large"} | said
        told = Settings(**(settings or {}))
        return SageMaker(**said).plan(
            Job("train.py", (), "script", told, {}, {}, Machine(2), python="python")
        )

    return make


@pytest.fixture
def gather(aws, plan):
    """What there is, asked of the plane; that nothing was changed by it is checked each time."""

    def ask(settings=None, region=None, **said):
        before = len(aws.calls())
        try:
            return facts.gather(Account(region), plan(settings, **said), NOW)
        finally:
            assert set(aws.calls()[before:]) <= READS

    return ask


def test_aws_says_what_the_profile_does_not(aws, gather):
    role = aws.role()
    found = gather()
    assert found.facts == facts.Facts(
        name="train-20261121-223001-005",
        region="us-east-1",
        account="123456789012",
        partition="aws",
        role_arn=role,
        bucket="sagemaker-us-east-1-123456789012",
        image_uri=found.facts.image_uri,
    )
    assert ".dkr.ecr.us-east-1.amazonaws.com/pytorch" in found.facts.image_uri
    assert not found.has_bucket
    assert found.who.startswith("arn:aws:sts::123456789012:")


def test_the_profiles_own_word_is_taken(aws, gather):
    aws.role("one")
    two = aws.role("two")
    aws.client("s3", "eu-west-1").create_bucket(
        Bucket="my-bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    found = gather(
        region="eu-west-1", role="two", bucket="my-bucket", job_name="mine", image_uri="x/y:z", pytorch_version=None
    )  # fmt: skip
    of = found.facts
    assert (of.role_arn, of.bucket, of.name, of.image_uri, of.region) == (
        two, "my-bucket", "mine", "x/y:z", "eu-west-1",
    )  # fmt: skip
    assert found.has_bucket


def test_a_name_that_is_taken_is_refused(aws, gather):
    aws.role()
    aws.bucket("sagemaker-out")
    aws.client("sagemaker").create_training_job(**aws.request("mine"))
    aws.ask("clear")
    with pytest.raises(
        UsageError, match=r"a training job mine already in us-east-1.*choose another --job-name"
    ):
        gather(job_name="mine")


def test_a_bucket_that_was_named_and_is_not_there_is_not_made(aws, gather):
    aws.role()
    with pytest.raises(UsageError, match=r"launcher\.bucket: there is no bucket my-bucket; leave it out"):
        gather(bucket="my-bucket")


def test_a_bucket_of_somebody_else_is_refused(aws, gather):
    aws.fault("s3:HeadBucket", "error", code="403", status=403)
    with pytest.raises(UsageError, match="sagemaker-us-east-1-123456789012 is none of account 123456789012"):
        gather()


def test_a_bucket_of_another_region_is_refused_with_both_ways_out(aws, gather):
    aws.bucket("my-bucket")
    with pytest.raises(
        UsageError,
        match=r"my-bucket is in us-east-1, and the job would run in eu-west-1.*launcher\.region to us-e",
    ):
        gather(region="eu-west-1", bucket="my-bucket")


@pytest.mark.parametrize(
    ("said", "region"), [(None, "us-east-1"), ("EU", "eu-west-1"), ("eu-west-2", "eu-west-2")]
)
def test_where_a_bucket_is_is_asked_where_it_is_not_said_by_the_way(said, region):
    class Old:
        def get_bucket_location(self, **_):
            return {"LocationConstraint": said}

    assert buckets._location(Old(), "mine") == region


@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
def test_a_bucket_that_is_made_is_private_and_encrypted(aws, region):
    account = Account(region)
    name = buckets.default(region, "123456789012")
    assert not buckets.is_there(account, name, "123456789012")
    buckets.make(account, name)
    s3 = aws.client("s3", region)
    assert (s3.get_bucket_location(Bucket=name)["LocationConstraint"] or "us-east-1") == region
    assert set(s3.get_public_access_block(Bucket=name)["PublicAccessBlockConfiguration"].values()) == {True}
    rules = s3.get_bucket_encryption(Bucket=name)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rules[0]["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    assert buckets.is_there(account, name, "123456789012")
    buckets.make(account, name)  # as after another launch that was faster


def test_a_bucket_that_cannot_be_made_private_is_taken_away_again(aws):
    aws.fault("s3:PutPublicAccessBlock", "denied")
    with pytest.raises(UsageError, match="cannot make bucket mine-1"):
        buckets.make(Account(), "mine-1")
    assert aws.client("s3").list_buckets()["Buckets"] == []


def test_a_bucket_whose_name_somebody_has_is_refused(aws):
    aws.fault("s3:CreateBucket", "error", code="BucketAlreadyExists", status=409)
    with pytest.raises(UsageError, match="it belongs to somebody else"):
        buckets.make(Account(), "mine-1")


@pytest.mark.parametrize(
    ("kind", "words"),
    [("expired", "have expired: run aws sso login"), ("invalid", "AWS does not know the credentials")],
)
def test_credentials_that_are_none_are_found_out_first(aws, gather, kind, words):
    aws.fault("*", kind, times=None)
    with pytest.raises(UsageError, match=words):
        gather()
    assert aws.calls() == ["sts:GetCallerIdentity"]


@pytest.mark.parametrize(
    ("settings", "said", "words"),
    [
        ({}, {"instance_type": "ml.g5.xlage"}, r"no ml\.g5\.xlage for training.*did you mean ml\.g5\.xlarge"),
        ({"process_group_backend": "nccl"}, {}, r"nccl needs GPUs, and launcher\.instance_type: ml\.m5\.large has none"),
        ({"process_group_backend": "nccl", "device": "cpu"}, {"instance_type": "ml.g5.xlarge"}, "device: cpu uses none"),
        ({"process_group_backend": "smddp"}, {"instance_type": "ml.g5.xlarge", "image_uri": "x/y:1"}, r"smddp needs launcher\.instance_type"),
        ({"mixed_precision": "fp16"}, {}, "fp16 needs GPUs"),
        ({"device": "cuda"}, {}, "device: cuda needs GPUs"),
        ({}, {"model_parallel": {"hybrid_shard_degree": 2}, "image_uri": "x/y:1"}, r"launcher\.model_parallel needs"),
        ({}, {"pytorch_version": "1.13"}, "accel needs torch 2.9 or newer"),
        ({}, {"inputs_file": "none.tsv"}, "none.tsv: cannot be read"),
        ({}, {"inputs_file": "in.tsv", "inputs": {"train": "s3://bucket/x"}}, "inputs_file both have train; say it once"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_anybody_is_asked(aws, gather, settings, said, words):
    Path("in.tsv").write_text("channel_name\tdata_location\ntrain\ts3://bucket/y\n")
    with pytest.raises(UsageError, match=words):
        gather(settings, **said)
    assert aws.calls() == []


def test_files_bring_more_inputs_and_metrics(plan, cwd):
    (cwd / "in.tsv").write_text("channel_name\tdata_location\ntrain\ts3://bucket/y\n")
    (cwd / "m.tsv").write_text("metric_name\tmetric_regex\nloss\tloss (.*)\n")
    made = plan(
        inputs={"test": {"uri": "s3://bucket/x", "input_mode": "FastFile"}}, inputs_file="in.tsv", metrics_file="m.tsv",
        metrics={"lr": "lr (.*)"},
    )  # fmt: skip
    of = facts.assumed(Account("us-east-1"), made, NOW)
    assert of.inputs["train"] == "s3://bucket/y"
    assert of.inputs["test"]["input_mode"] == "FastFile"
    assert of.metrics == {"lr": "lr (.*)", "loss": "loss (.*)"}


def test_the_image_follows_the_torch_that_is_here_which_is_not_imported(plan, monkeypatch):
    monkeypatch.setattr(facts, "version", lambda _: "2.9.1+cpu")
    assert facts.assumed(Account("us-east-1"), plan(pytorch_version=None), NOW).image_uri == (
        facts.assumed(Account("us-east-1"), plan(pytorch_version="2.9"), NOW).image_uri
    )

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(facts, "version", absent)
    with pytest.raises(UsageError, match=r"launcher\.pytorch_version: torch is not installed here"):
        facts.assumed(Account("us-east-1"), plan(pytorch_version=None), NOW)


@pytest.mark.parametrize(
    ("region", "said", "expected"),
    [
        ("us-east-1", {}, ("arn:aws:iam::<account>:role/<role>", "sagemaker-us-east-1-<account>")),
        ("cn-north-1", {"role": "r"}, ("arn:aws-cn:iam::<account>:role/r", "sagemaker-cn-north-1-<account>")),
        ("us-gov-west-1", {"role": "arn:x:role/r", "bucket": "mine"}, ("arn:x:role/r", "mine")),
    ],
)
def test_offline_what_only_aws_knows_is_recognisable(plan, monkeypatch, region, said, expected):
    monkeypatch.setattr("socket.socket.connect", None)
    of = facts.assumed(Account(region), plan(**said), NOW)
    assert (of.role_arn, of.bucket) == expected
    assert of.account == "<account>"


def test_a_request_of_assumed_facts_is_checked_with_their_places_filled(plan):
    made = plan()
    request = training_job(made.request["profile"], {}, facts.assumed(Account("us-east-1"), made, NOW))
    assert any("RoleArn" in problem for problem in check.problems(request))
    assert check.problems(json.loads(facts.filled(json.dumps(request)))) == []
