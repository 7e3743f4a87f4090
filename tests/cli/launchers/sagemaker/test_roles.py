"""The role of a job: found among those SageMaker may assume, refused with the way out, made whole or not at all."""

import json

import pytest
from moto import mock_aws

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker import rights, roles
from accel_cli.launchers.sagemaker.aws import Account


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
def test_a_role_is_for_sagemaker_if_its_trust_policy_says_so(iam, statements, fits):
    made(iam, "role", *statements)
    assert [role.name for role in roles.trusted(iam)] == (["role"] if fits else [])


def test_roles_that_services_keep_for_themselves_are_not_offered(iam):
    made(iam, "AWSServiceRoleForAmazonSageMakerNotebooks", path="/aws-service-role/sagemaker.amazonaws.com/")
    assert roles.trusted(iam) == []


def test_a_policy_that_comes_as_text_is_read_too():
    text = json.dumps(rights.TRUST).replace("[", "%5B")
    assert roles._fits({"AssumeRolePolicyDocument": text})
    assert not roles._fits({})


def test_all_pages_of_roles_are_read(iam):
    for number in range(130):
        made(iam, f"role-{number:03}", statement(LAMBDA))
    made(iam, "zz-training")
    assert [role.name for role in roles.trusted(iam)] == ["zz-training"]


def test_the_only_role_needs_no_name(account, iam):
    made(iam, "other", statement(LAMBDA))
    arn = made(iam, "training")
    assert roles.find(account, None) == arn


def test_several_roles_are_listed(account, iam):
    for name in ("one", "two"):
        made(iam, name)
    with pytest.raises(UsageError, match=r"so say which: one, two; as --set launcher\.role=one"):
        roles.find(account, None)


def test_no_role_is_answered_with_how_to_make_one(account):
    with pytest.raises(UsageError, match="no role that SageMaker may assume; make one with accel config"):
        roles.find(account, None)


def test_a_name_becomes_an_arn_with_the_path_it_has(account, iam):
    arn = made(iam, "AmazonSageMaker-ExecutionRole", path="/service-role/")
    assert arn.endswith(":role/service-role/AmazonSageMaker-ExecutionRole")
    assert roles.find(account, "AmazonSageMaker-ExecutionRole") == arn
    assert roles.find(account, "service-role/AmazonSageMaker-ExecutionRole") == arn
    assert roles.find(account, arn) == arn


@pytest.mark.parametrize("said", ["trainig", "arn:aws:iam::123456789012:role/trainig"])
def test_a_role_that_is_not_there_is_answered_with_the_one_that_is_meant(account, iam, said):
    made(iam, "training")
    with pytest.raises(
        UsageError, match=f"no role {said}; did you mean training[?]. SageMaker may assume training$"
    ):
        roles.find(account, said)


@pytest.mark.parametrize("said", ["no role", "x" * 65])
def test_what_cannot_be_a_name_is_no_role(account, said):
    with pytest.raises(UsageError, match="the account has no role"):
        roles.find(account, said)


def test_a_role_for_others_is_refused_with_the_line_its_trust_policy_lacks(account, iam):
    arn = made(iam, "lambda", statement(LAMBDA))
    for said in ("lambda", arn):
        with pytest.raises(UsageError) as caught:
            roles.find(account, said)
        text = str(caught.value)
        assert "SageMaker may not assume lambda; add this statement to its trust policy" in text
        assert json.loads(text[text.index("{") :]) == statement(SAGEMAKER)


def test_an_arn_of_another_path_or_account_is_refused(account, iam):
    arn = made(iam, "training")
    with pytest.raises(
        UsageError, match=f"there is no .*999999999999.*; the role of that name here is {arn}"
    ):
        roles.find(account, "arn:aws:iam::999999999999:role/training")
    with pytest.raises(UsageError, match="expected an ARN like"):
        roles.find(account, "arn:aws:iam::training")


def test_who_may_not_look_at_roles_may_still_give_an_arn(account, iam):
    refusing(iam, "GetRole", "AccessDenied")
    arn = "arn:aws:iam::123456789012:role/training"
    assert roles.find(account, arn) == arn
    with pytest.raises(
        UsageError, match=r"bob may not do iam:GetRole.*, or set launcher\.role to the role's ARN"
    ):
        roles.find(account, "training")


def test_who_may_not_list_roles_is_told_to_name_one(account, iam):
    refusing(iam, "ListRoles", "AccessDenied")
    with pytest.raises(
        UsageError, match=r"bob may not do iam:ListRoles.*, or set launcher\.role to the role's ARN"
    ):
        roles.find(account, None)


def test_another_refusal_is_not_taken_for_a_role(account, iam):
    refusing(iam, "GetRole", "InvalidClientTokenId")
    with pytest.raises(UsageError, match="the access key is wrong"):
        roles.find(account, "arn:aws:iam::123456789012:role/training")


def test_a_role_that_is_made_is_one_that_is_found(account, iam):
    role = roles.create(iam, "accel-training", "my-bucket", secrets=["wandb"])
    assert roles.find(account, None) == role.arn == roles.find(account, "accel-training")
    name = iam.list_role_policies(RoleName="accel-training")["PolicyNames"]
    said = iam.get_role_policy(RoleName="accel-training", PolicyName=name[0])["PolicyDocument"]
    assert said == rights.policy("my-bucket", secrets=["wandb"])


def test_a_role_of_the_same_name_is_left_as_it_is(account, iam):
    made(iam, "training", statement(LAMBDA))
    with pytest.raises(UsageError, match="there is a role training already, and it is left as it is"):
        roles.create(iam, "training", "my-bucket")
    assert iam.list_role_policies(RoleName="training")["PolicyNames"] == []
    assert roles.trusted(iam) == []


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "ä"])
def test_a_name_that_iam_does_not_take_is_refused(iam, name):
    with pytest.raises(UsageError, match="is no name for a role"):
        roles.create(iam, name, "my-bucket")


def test_a_role_without_its_rights_is_taken_away_again(account, iam):
    refusing(iam, "PutRolePolicy", "AccessDenied")
    with pytest.raises(UsageError, match="bob may not do iam:PutRolePolicy"), account.speaking("make a role"):
        roles.create(iam, "training", "my-bucket")
    assert iam.list_roles()["Roles"] == []


def test_a_role_is_taken_away_also_when_only_the_answer_was_lost(iam):
    def lost(**_):
        raise KeyboardInterrupt

    iam.meta.events.register("after-call.iam.PutRolePolicy", lost)
    with pytest.raises(KeyboardInterrupt):
        roles.create(iam, "training", "my-bucket")
    assert iam.list_roles()["Roles"] == []


def test_the_rights_are_those_of_one_bucket_and_what_is_asked_for():
    few = rights.policy("my-bucket")
    by_sid = {said["Sid"]: said for said in few["Statement"]}
    assert by_sid["Write"]["Resource"] == ["arn:aws:s3:::my-bucket/*"]
    assert by_sid["Read"]["Resource"] == ["arn:aws:s3:::my-bucket/*"]
    assert {"Secrets", "Network"}.isdisjoint(by_sid)
    starred = {sid for sid, said in by_sid.items() if "*" in said["Resource"]}
    assert starred == {"Metrics", "ImageLogin"}
    assert all("*" not in action for said in few["Statement"] for action in said["Action"])
    arn = "arn:aws-cn:secretsmanager:cn-north-1:1:secret:x-123456"
    many = rights.policy("b", partition="aws-cn", reads=["data"], secrets=["wandb", f"{arn}:key::"], vpc=True)
    by_sid = {said["Sid"]: said["Resource"] for said in many["Statement"]}
    assert by_sid["Secrets"] == ["arn:aws-cn:secretsmanager:*:*:secret:wandb-??????", arn]
    assert by_sid["Read"] == ["arn:aws-cn:s3:::b/*", "arn:aws-cn:s3:::data/*"]
    assert by_sid["Write"] == ["arn:aws-cn:s3:::b/*"]
    assert by_sid["Network"] == ["*"]


def test_iam_takes_the_policy(iam):
    iam.create_policy(PolicyName="p", PolicyDocument=json.dumps(rights.policy("b", secrets=["x"], vpc=True)))
