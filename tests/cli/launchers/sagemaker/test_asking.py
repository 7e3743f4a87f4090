"""What the wizard offers for SageMaker, asked of a real boto3 with AWS configurations of all kinds."""

import json
import os
import sys

import pytest

from accel_cli.launchers.sagemaker import asking
from accel_cli.planning.machine import Machine
from accel_cli.profile.fields import Choice

MACHINE = Machine(2, torch="2.13.0+cpu")
CONFIG = """\
[default]
region = eu-west-1
[profile team]
region = us-gov-west-1
[profile bare]
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes the AWS configuration, and takes every variable of AWS away."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def write(text=CONFIG):
        (tmp_path / "config").write_text(text)

    write()
    return write


def values(offers):
    return [choice.value for choice in offers.choices]


def no(text, question):
    pytest.fail(f"nobody was to be asked {question}")


def test_profiles_begin_with_the_one_aws_tools_take(config, monkeypatch):
    offers = asking.profiles(MACHINE, {})
    assert values(offers) == [None, "default", "team", "bare"]
    assert offers.choices[0].title == "the one AWS tools take here (default)"
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert "(team)" in asking.profiles(MACHINE, {}).choices[0].title


def test_regions_begin_with_that_of_the_chosen_profile_and_stay_in_its_part_of_aws(config):
    own = asking.regions(MACHINE, {})
    assert own.choices[0] == Choice("eu-west-1", "eu-west-1: that of the AWS configuration")
    assert values(own)[1] == "us-east-1"
    assert len(values(own)) > 30
    assert len(set(values(own))) == len(values(own))
    government = values(asking.regions(MACHINE, {"aws_profile": "team"}))
    assert government[0] == "us-gov-west-1"
    assert all(region.startswith("us-gov-") for region in government)


def test_without_a_region_of_its_own_a_profile_is_offered_the_usual_one_first(config):
    assert values(asking.regions(MACHINE, {"aws_profile": "bare"}))[:2] == ["us-east-1", "af-south-1"]


@pytest.mark.parametrize(
    ("ask", "text", "said", "wrong"),
    [
        (asking.profiles, "no configuration [", {}, "AWS configuration cannot be read"),
        (asking.regions, CONFIG, {"aws_profile": "taem"}, "did you mean team?"),
        (asking.roles, CONFIG, {"region": "eu-west-1"}, "there are no AWS credentials"),
    ],
)
def test_what_cannot_be_looked_up_is_said_and_then_typed(config, ask, text, said, wrong):
    config(text)
    offers = ask(MACHINE, said)
    assert not offers.choices
    assert offers.note.startswith(
        ("no choices can be offered here, so you type: ", "no roles can be offered")
    )
    assert wrong in offers.note


def test_without_boto3_one_note_names_what_to_install(config, monkeypatch):
    for module in ("boto3", "boto3.session"):
        monkeypatch.setitem(sys.modules, module, None)
    notes = {ask(MACHINE, {}).note for ask in (asking.profiles, asking.regions, asking.roles)}
    assert notes == {
        'boto3 is not installed, so AWS is not asked, and you type: pip install "accel[sagemaker]"'
    }
    assert asking.instances() == []
    assert asking.misspelt("ml.nonsense.xlarge") is None


def test_instance_types_are_completed_and_near_misses_are_named():
    assert "ml.g5.xlarge" in asking.instances()
    assert asking.misspelt("ml.g5.xlarge") is None
    assert (
        asking.misspelt("ml.g5.xlrge")
        == "there is no ml.g5.xlrge; did you mean ml.g5.xlarge or ml.g5.2xlarge?"
    )
    assert "pip install -U boto3" in asking.misspelt("zzz")


def test_the_torch_of_this_machine_comes_before_those_of_aws(config):
    offers = asking.versions(MACHINE, {"region": "us-east-1"})
    assert offers.choices[0] == Choice(None, "as on the machine of the launch; here 2.13.0+cpu")
    assert values(offers)[-1] == "2.9"
    assert "2.13" in values(offers)


def test_roles_are_those_that_sagemaker_may_assume(aws):
    arn = aws.role()
    aws.role("of-lambda", {"Version": "2012-10-17", "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}]})  # fmt: skip
    offers = asking.roles(MACHINE, {"region": "us-east-1"})
    assert [(choice.value, choice.title) for choice in offers.choices[:-1]] == [(arn, "trainer")]
    assert offers.choices[-1].make


def test_who_may_not_list_roles_is_told_so_and_types(aws):
    aws.fault("ListRoles", "denied")
    offers = asking.roles(MACHINE, {"region": "us-east-1"})
    assert not offers.choices
    assert "may not do iam:ListRoles" in offers.note


def test_a_role_is_made_after_a_yes_with_the_rights_that_were_shown(aws, capsys):
    shown = {}

    def yes(text, question):
        shown["policy"], shown["question"] = json.loads(text), question
        return True

    said = {
        "region": "us-east-1",
        "inputs": {"train": "s3://data/train", "test": {"uri": "s3://other"}},
        "secrets": {"WANDB_API_KEY": "wandb"},
        "subnets": ["subnet-1"],
    }
    arn = asking.roles(MACHINE, said).choices[-1].make(said, yes)
    assert arn.endswith(":role/accel-training")
    made = aws.client("iam").get_role_policy(RoleName="accel-training", PolicyName="accel-training")
    assert made["PolicyDocument"] == shown["policy"]
    rights = {statement["Sid"]: statement["Resource"] for statement in shown["policy"]["Statement"]}
    assert [
        f"arn:aws:s3:::{name}" for name in ("sagemaker-us-east-1-123456789012", "data", "other")
    ] == rights["Bucket"]
    assert rights["Secrets"] == ["arn:aws:secretsmanager:*:*:secret:wandb-??????"]
    assert "Network" in rights
    assert "accel-training is made" in capsys.readouterr().err


def test_no_role_is_made_without_a_yes(aws):
    said = {"region": "us-east-1", "bucket": "mine"}
    assert asking.roles(MACHINE, said).choices[-1].make(said, lambda *_: False) is None
    assert not aws.client("iam").list_roles()["Roles"]
