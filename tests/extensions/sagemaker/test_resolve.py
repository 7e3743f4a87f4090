"""Facts of a request that the profile omits: read from AWS or assumed offline; and early errors."""

import json
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError

import pytest

from accel_cli.errors import UsageError
from accel_cli.extensions.sagemaker import roles, s3, service
from accel_cli.extensions.sagemaker.aws import Account
from accel_cli.extensions.sagemaker.launcher import SageMaker
from accel_cli.extensions.sagemaker.request import Submission, build_request, check_request
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.planning.machine import Machine
from accel_runtime.environment.settings import Settings

NOW = datetime(2026, 11, 21, 22, 30, 1, 5000, tzinfo=UTC)
READS = {
    "iam:GetRole", "iam:ListRoles", "s3:HeadBucket", "s3:GetBucketLocation", "sagemaker:DescribeTrainingJob",
    "sts:GetCallerIdentity",
}  # fmt: skip


@pytest.fixture
def plan(cwd, script):
    script("pass")

    def make(settings=None, **options):
        options = {"pytorch_version": "2.9", "instance_type": "ml.m5.large"} | options
        settings_section = Settings(**(settings or {}))
        return SageMaker(**options).plan(
            LaunchSpec("train.py", (), "script", settings_section, {}, {}, Machine(2), python="python")
        )

    return make


@pytest.fixture
def gather(aws, plan):
    """Return a function that reads the facts from AWS, and checks that nothing was changed."""

    def ask(settings=None, region=None, **options):
        try:
            return service.resolve_submission(Account(region), plan(settings, **options).job, NOW)
        finally:
            assert set(aws.calls()) <= READS

    return ask


def test_facts_missing_in_the_profile_are_read_from_aws(aws, gather):
    role = aws.role()
    facts = gather()
    assert facts == Submission(
        name="train-20261121-223001-005",
        region="us-east-1",
        account="123456789012",
        role_arn=role,
        bucket="sagemaker-us-east-1-123456789012",
        image_uri=facts.image_uri,
        caller=facts.caller,
        bucket_exists=False,
    )
    assert ".dkr.ecr.us-east-1.amazonaws.com/pytorch" in facts.image_uri
    assert facts.caller.startswith("arn:aws:sts::123456789012:")


def test_facts_of_the_profile_take_precedence(aws, gather):
    aws.role("one")
    two = aws.role("two")
    aws.client("s3", "eu-west-1").create_bucket(
        Bucket="my-bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    facts = gather(
        region="eu-west-1", role="two", bucket="my-bucket", job_name="mine", image_uri="x/y:z", pytorch_version=None
    )  # fmt: skip
    of = facts
    assert (of.role_arn, of.bucket, of.name, of.image_uri, of.region) == (
        two, "my-bucket", "mine", "x/y:z", "eu-west-1",
    )  # fmt: skip
    assert facts.bucket_exists


def test_an_existing_job_name_is_rejected(aws, gather):
    aws.role()
    aws.bucket("sagemaker-out")
    aws.create("mine")
    with pytest.raises(
        UsageError,
        match=r"Cannot use job name 'mine': a training job of this name exists already.*Choose another --job-name",
    ):
        gather(job_name="mine")


def test_a_missing_bucket_of_the_profile_is_an_error_and_not_created(aws, gather):
    aws.role()
    with pytest.raises(
        UsageError, match=r"Bucket not found: my-bucket \(launcher\.bucket\)\. Remove the key"
    ):
        gather(bucket="my-bucket")


def test_a_bucket_of_another_account_is_rejected(aws, gather):
    aws.fault("HeadBucket", "error", code="403", status=403)
    with pytest.raises(
        UsageError,
        match="Cannot access bucket sagemaker-us-east-1-123456789012: account 123456789012 does not own it",
    ):
        gather()


def test_a_bucket_of_another_region_is_rejected_with_two_solutions(aws, gather):
    aws.bucket("my-bucket")
    with pytest.raises(
        UsageError,
        match=r"Bucket my-bucket is in us-east-1, and the job would run in eu-west-1.*launcher\.region to us-e",
    ):
        gather(region="eu-west-1", bucket="my-bucket")


@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
def test_the_default_bucket_is_created_in_the_region_of_the_job(aws, region):
    account, name = Account(region), f"sagemaker-{region}-123456789012"
    assert not s3.check_bucket(account, name, "123456789012")
    s3.create_bucket(account, name)
    location = aws.client("s3", region).get_bucket_location(Bucket=name)["LocationConstraint"]
    assert (location or "us-east-1") == region
    assert s3.check_bucket(account, name, "123456789012")
    s3.create_bucket(Account(region), name)  # as after another launch that was faster


@pytest.mark.parametrize(
    ("kind", "words"),
    [("expired", "have expired. Run aws sso login"), ("invalid", "AWS does not know the access key")],
)
def test_invalid_credentials_are_detected_first(aws, gather, kind, words):
    aws.fault("*", kind, times=None)
    with pytest.raises(UsageError, match=words):
        gather()
    assert aws.calls() == ["sts:GetCallerIdentity"]


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({}, {"instance_type": "ml.g5.xlage"}, r"Unknown launcher.instance_type \'ml\.g5\.xlage\'.*Did you mean ml\.g5\.xlarge"),
        ({"process_group_backend": "nccl"}, {}, r"nccl needs GPUs, and ml\.m5\.large has none"),
        ({"process_group_backend": "nccl", "device": "cpu"}, {"instance_type": "ml.g5.xlarge"}, "device: cpu uses none"),
        ({"process_group_backend": "smddp"}, {"instance_type": "ml.g5.xlarge", "image_uri": "x/y:1"}, r"smddp needs launcher\.instance_type"),
        ({"mixed_precision": "fp16"}, {}, "fp16 needs GPUs"),
        ({"device": "cuda"}, {}, "device: cuda needs GPUs"),
        ({}, {"pytorch_version": "1.13"}, "of torch 2.9 and newer"),
    ],
)  # fmt: skip
def test_unsupported_profiles_are_rejected_without_calls_to_aws(aws, gather, settings, options, words):
    with pytest.raises(UsageError, match=words):
        gather(settings, **options)
    assert aws.calls() == []


def test_the_image_has_the_version_of_the_installed_torch_without_importing_it(plan, monkeypatch):
    monkeypatch.setattr(service, "version", lambda _: "2.9.1+cpu")
    assert service.assume_submission(Account("us-east-1"), plan(pytorch_version=None).job, NOW).image_uri == (
        service.assume_submission(Account("us-east-1"), plan(pytorch_version="2.9").job, NOW).image_uri
    )

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(service, "version", absent)
    with pytest.raises(UsageError, match=r"torch is not installed here. Set launcher\.pytorch_version"):
        service.assume_submission(Account("us-east-1"), plan(pytorch_version=None).job, NOW)


@pytest.mark.parametrize(
    ("region", "options", "expected"),
    [
        ("us-east-1", {}, ("arn:aws:iam::<account>:role/<role>", "sagemaker-us-east-1-<account>")),
        ("cn-north-1", {"role": "r"}, ("arn:aws-cn:iam::<account>:role/r", "sagemaker-cn-north-1-<account>")),
        ("us-gov-west-1", {"role": "arn:x:role/r", "bucket": "mine"}, ("arn:x:role/r", "mine")),
    ],
)
def test_facts_unknown_offline_are_placeholders(plan, monkeypatch, region, options, expected):
    monkeypatch.setattr("socket.socket.connect", None)
    of = service.assume_submission(Account(region), plan(**options).job, NOW)
    assert (of.role_arn, of.bucket) == expected
    assert of.account == "<account>"


def test_a_request_with_placeholders_can_be_checked(plan):
    plan_of_job = plan()
    request = build_request(
        plan_of_job.job, service.assume_submission(Account("us-east-1"), plan_of_job.job, NOW)
    )
    with pytest.raises(UsageError, match="RoleArn"):
        check_request(request)
    check_request(json.loads(service.fill_placeholders(json.dumps(request))))


# Roles ------------------------------------------------------------------------------------

LAMBDA = {"Service": "lambda.amazonaws.com"}
SAGEMAKER = {"Service": "sagemaker.amazonaws.com"}


def trust(*statements):
    return {"Version": "2012-10-17", "Statement": list(statements)}


def statement(principal, effect="Allow"):
    return {"Effect": effect, "Principal": principal, "Action": "sts:AssumeRole"}


@pytest.mark.parametrize(
    ("statements", "fits"),
    [
        ([statement(SAGEMAKER)], True),
        ([statement({"Service": ["lambda.amazonaws.com", "sagemaker.amazonaws.com"]})], True),
        ([statement(LAMBDA), statement(SAGEMAKER)], True),
        ([statement(LAMBDA)], False),
        ([statement({"AWS": "arn:aws:iam::123456789012:root"})], False),
        ([statement("*")], True),
        ([statement({"Service": "*"})], True),
        ([statement(LAMBDA), statement(SAGEMAKER, effect="Deny")], False),
        ([statement(SAGEMAKER), statement(SAGEMAKER, effect="Deny")], False),
        (
            [
                statement(SAGEMAKER),
                statement("*", "Deny") | {"Condition": {"Bool": {"aws:SecureTransport": "false"}}},
            ],
            True,
        ),
        ([statement(SAGEMAKER), statement(SAGEMAKER, "Deny") | {"Action": "sts:TagSession"}], True),
    ],
)
def test_a_role_is_listed_if_its_trust_policy_allows_sagemaker(aws, statements, fits):
    arn = aws.role("role", trust(*statements))
    aws.client("iam").create_role(
        RoleName="AWSServiceRoleForAmazonSageMakerNotebooks",
        Path="/aws-service-role/sagemaker.amazonaws.com/",
        AssumeRolePolicyDocument=json.dumps(trust(statement(SAGEMAKER))),
    )
    assert roles.list_roles(Account()) == ({"role": arn} if fits else {})


def test_a_single_role_is_selected_and_several_need_a_choice(aws):
    account = Account()
    with pytest.raises(UsageError, match=r"no role that SageMaker may assume. Create one as the page"):
        service.resolve_role(account, None)
    for number in range(3):
        aws.role(f"role-{number}", trust(statement(LAMBDA)))
    arn = aws.role("zz-training")
    # As if IAM listed no more than two at once, of its hundred.
    account.client("iam").meta.events.register(
        "provide-client-params.iam.ListRoles", lambda params, **_: {**params, "MaxItems": 2}
    )
    assert service.resolve_role(account, None) == arn
    aws.role("another")
    with pytest.raises(
        UsageError, match=r"several roles: another, zz-training. Choose one, for example --set"
    ):
        service.resolve_role(account, None)


def test_a_role_name_becomes_an_arn_with_its_path(aws):
    document = json.dumps(trust(statement(SAGEMAKER)))
    created_role = aws.client("iam").create_role(
        RoleName="Execution", Path="/service-role/", AssumeRolePolicyDocument=document
    )
    arn = created_role["Role"]["Arn"]
    for role in ("Execution", "service-role/Execution", arn):
        assert service.resolve_role(Account(), role) == arn


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("trainig", r"no role 'trainig'\. Did you mean training\? SageMaker may assume training\.$"),
        ("arn:aws:iam::999999999999:role/training", r"no role '.*999999999999.*Did you mean training"),
        ("no role", "The account has no role 'no role'"),
        ("lambda", r"may not assume role 'lambda'\. Add this statement .*\"sagemaker\.amazonaws\.com\""),
    ],
)
def test_an_unsuitable_role_is_rejected_with_a_solution(aws, role, words):
    aws.role("training")
    aws.role("lambda", trust(statement(LAMBDA)))
    with pytest.raises(UsageError, match=words):
        service.resolve_role(Account(), role)


def test_users_without_permission_to_read_roles_can_pass_an_arn(aws):
    aws.fault("iam:*", "denied", times=None)
    arn = "arn:aws:iam::123456789012:role/training"
    assert service.resolve_role(Account(), arn) == arn
    for role, action in (("training", "GetRole"), (None, "ListRoles")):
        words = rf"not authorized to perform: iam:{action}.* Or set launcher\.role to the role's ARN"
        with pytest.raises(UsageError, match=words):
            service.resolve_role(Account(), role)
