"""The role of a job is one that SageMaker may assume; any other is refused with what to do."""

import json

import pytest
from moto import mock_aws

from accel_cli.errors import UsageError
from accel_cli.sagemaker.aws import Account
from accel_cli.sagemaker.resolve import list_roles, resolve_role


@pytest.fixture(autouse=True)
def aws(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with mock_aws():
        yield


@pytest.fixture
def account():
    return Account("us-east-1")


@pytest.fixture
def iam(account):
    return account.client("iam")


def statement(principal, *, effect="Allow", action="sts:AssumeRole"):
    return {"Effect": effect, "Principal": principal, "Action": action}


SAGEMAKER = {"Service": "sagemaker.amazonaws.com"}
LAMBDA = {"Service": "lambda.amazonaws.com"}


def made(iam, name, *statements, path="/"):
    trust = {"Version": "2012-10-17", "Statement": list(statements) or [statement(SAGEMAKER)]}
    return iam.create_role(RoleName=name, Path=path, AssumeRolePolicyDocument=json.dumps(trust))["Role"][
        "Arn"
    ]


def refusing(iam, operation, name):
    """Have a call answered with a refusal."""
    from botocore.exceptions import ClientError

    def refuse(**_):
        said = f"User: arn:aws:iam::1:user/bob is not authorized to perform: iam:{operation} on resource: x"
        raise ClientError({"Error": {"Code": name, "Message": said}}, operation)

    iam.meta.events.register(f"before-call.iam.{operation}", refuse)


@pytest.mark.parametrize(
    ("statements", "fits"),
    [
        ([statement(SAGEMAKER)], True),
        ([statement({"Service": ["lambda.amazonaws.com", "sagemaker.amazonaws.com"]})], True),
        ([statement(SAGEMAKER, action=["sts:TagSession", "sts:AssumeRole"])], True),
        ([statement(SAGEMAKER, action="sts:*")], True),
        ([statement(LAMBDA), statement(SAGEMAKER)], True),
        ([statement(LAMBDA)], False),
        ([statement({"AWS": "arn:aws:iam::123456789012:root"})], False),
        ([statement(SAGEMAKER, action="sts:TagSession")], False),
        ([statement(SAGEMAKER), statement(SAGEMAKER, effect="Deny")], False),
        ([statement({"Service": "sagemaker.amazonaws.com.evil.com"})], False),
    ],
)
def test_a_role_is_for_sagemaker_if_its_trust_policy_says_so(account, iam, statements, fits):
    made(iam, "role", *statements)
    assert [role.name for role in list_roles(account)] == (["role"] if fits else [])


def test_roles_that_services_keep_for_themselves_are_not_offered(account, iam):
    made(iam, "AWSServiceRoleForAmazonSageMakerNotebooks", path="/aws-service-role/sagemaker.amazonaws.com/")
    assert list_roles(account) == []


def test_all_pages_of_roles_are_read(account, iam):
    for number in range(130):
        made(iam, f"role-{number:03}", statement(LAMBDA))
    made(iam, "zz-training")
    assert [role.name for role in list_roles(account)] == ["zz-training"]


def test_the_only_role_needs_no_name(account, iam):
    made(iam, "other", statement(LAMBDA))
    arn = made(iam, "training")
    assert resolve_role(account, None) == arn


def test_several_roles_are_listed(account, iam):
    for name in ("one", "two"):
        made(iam, name)
    with pytest.raises(
        UsageError, match=r"several roles: one, two. Choose one, for example --set launcher\.role=one"
    ):
        resolve_role(account, None)


def test_no_role_is_answered_with_how_to_make_one(account):
    with pytest.raises(
        UsageError, match=r"no role that SageMaker may assume. Create one as the page SageMaker"
    ):
        resolve_role(account, None)


def test_a_name_becomes_an_arn_with_the_path_it_has(account, iam):
    arn = made(iam, "AmazonSageMaker-ExecutionRole", path="/service-role/")
    assert arn.endswith(":role/service-role/AmazonSageMaker-ExecutionRole")
    assert resolve_role(account, "AmazonSageMaker-ExecutionRole") == arn
    assert resolve_role(account, "service-role/AmazonSageMaker-ExecutionRole") == arn
    assert resolve_role(account, arn) == arn


@pytest.mark.parametrize("said", ["trainig", "arn:aws:iam::123456789012:role/trainig"])
def test_a_role_that_is_not_there_is_answered_with_the_one_that_is_meant(account, iam, said):
    made(iam, "training")
    with pytest.raises(
        UsageError, match=f"no role '{said}'. Did you mean training[?] SageMaker may assume training.$"
    ):
        resolve_role(account, said)


@pytest.mark.parametrize("said", ["no role", "x" * 65])
def test_what_cannot_be_a_name_is_no_role(account, said):
    with pytest.raises(UsageError, match="The account has no role"):
        resolve_role(account, said)


def test_a_role_for_others_is_refused_with_the_line_its_trust_policy_lacks(account, iam):
    arn = made(iam, "lambda", statement(LAMBDA))
    for said in ("lambda", arn):
        with pytest.raises(UsageError) as caught:
            resolve_role(account, said)
        text = str(caught.value)
        assert "SageMaker may not assume role 'lambda'. Add this statement to its trust policy" in text
        assert json.loads(text[text.index("{") :]) == statement(SAGEMAKER)


def test_an_arn_of_another_path_or_account_is_refused(account, iam):
    made(iam, "training")
    with pytest.raises(UsageError, match=r"The account has no role '.*999999999999.*Did you mean training"):
        resolve_role(account, "arn:aws:iam::999999999999:role/training")
    with pytest.raises(UsageError, match="The account has no role 'arn:aws:iam::training'"):
        resolve_role(account, "arn:aws:iam::training")


def test_who_may_not_look_at_roles_may_still_give_an_arn(account, iam):
    refusing(iam, "GetRole", "AccessDenied")
    arn = "arn:aws:iam::123456789012:role/training"
    assert resolve_role(account, arn) == arn
    with pytest.raises(
        UsageError,
        match=r"bob is not authorized to perform: iam:GetRole.* Or set launcher\.role to the role's ARN",
    ):
        resolve_role(account, "training")


def test_who_may_not_list_roles_is_told_to_name_one(account, iam):
    refusing(iam, "ListRoles", "AccessDenied")
    with pytest.raises(
        UsageError,
        match=r"bob is not authorized to perform: iam:ListRoles.* Or set launcher\.role to the role's ARN",
    ):
        resolve_role(account, None)


def test_another_refusal_is_not_taken_for_a_role(account, iam):
    refusing(iam, "GetRole", "InvalidClientTokenId")
    with pytest.raises(UsageError, match="AWS refused GetRole with InvalidClientTokenId"):
        resolve_role(account, "arn:aws:iam::123456789012:role/training")
