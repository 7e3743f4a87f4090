"""Choices of the wizard for SageMaker, from boto3 with different AWS configurations."""

import os
import subprocess
import sys

import pytest

from accel_cli.extensions.sagemaker import fields as wizard
from accel_cli.launchers.sections import Choice
from accel_cli.planning.machine import Machine
from accel_runtime.environment.installation import format_install

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
    """Return a function that writes the AWS configuration, without AWS variables in the environment."""
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


def test_profiles_start_with_the_default_of_aws_tools(config, monkeypatch):
    offers = wizard._offer_profiles(MACHINE, {})
    assert values(offers) == [None, "default", "team", "bare"]
    assert offers.choices[0].title == "the default of AWS's tools (default)"
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert "(team)" in wizard._offer_profiles(MACHINE, {}).choices[0].title


def test_regions_start_with_that_of_the_profile_and_stay_in_its_partition(config):
    regions = wizard._offer_regions(MACHINE, {})
    assert regions.choices[0] == Choice("eu-west-1", "eu-west-1 (from the AWS configuration)")
    assert values(regions)[1] == "us-east-1"
    assert len(values(regions)) > 30
    assert len(set(values(regions))) == len(values(regions))
    government = values(wizard._offer_regions(MACHINE, {"aws_profile": "team"}))
    assert government[0] == "us-gov-west-1"
    assert all(region.startswith("us-gov-") for region in government)


@pytest.mark.parametrize(
    ("ask", "text", "answer", "message"),
    [
        (wizard._offer_profiles, "no configuration [", {}, "Unable to parse config file"),
        (wizard._offer_regions, CONFIG, {"aws_profile": "taem"}, "Did you mean team?"),
        (wizard._offer_roles, CONFIG, {"region": "eu-west-1"}, "No AWS credentials found"),
    ],
)
def test_choices_that_cannot_be_listed_are_reported_and_typed(config, ask, text, answer, message):
    config(text)
    offers = ask(MACHINE, answer)
    assert not offers.choices
    assert offers.note.startswith(
        ("The choices cannot be listed; type the answer. ", "The roles cannot be listed")
    )
    assert message in offers.note


def test_a_missing_boto3_is_one_note_with_the_install_command(config, monkeypatch):
    for module in ("boto3", "boto3.session"):
        monkeypatch.setitem(sys.modules, module, None)
    notes = {
        ask(MACHINE, {}).note for ask in (wizard._offer_profiles, wizard._offer_regions, wizard._offer_roles)
    }
    assert notes == {
        "boto3 is not installed, so nothing can be listed. Type the answers, or install it: "
        + format_install(extra="sagemaker")
    }
    assert wizard._complete_types() == []
    assert wizard._find_type_error("ml.nonsense.xlarge") is None


def test_instance_types_are_completed_and_misspelled_ones_get_a_suggestion():
    assert "ml.g5.xlarge" in wizard._complete_types()
    assert wizard._find_type_error("ml.g5.xlarge") is None
    assert wizard._find_type_error("ml.g5.xlrge").startswith(
        "Unknown launcher.instance_type 'ml.g5.xlrge'. Did you mean ml.g5.xlarge, "
    )
    assert "pip install --upgrade 'boto3>=1.43.90'" in wizard._find_type_error("ml.g99.xlarge")


def test_the_local_torch_version_is_listed_before_those_of_aws(config):
    offers = wizard._offer_versions(MACHINE, {"region": "us-east-1"})
    assert offers.choices[0] == Choice(None, "the version of the machine that launches (here: 2.13.0+cpu)")
    assert values(offers)[-1] == "2.9"
    assert "2.13" in values(offers)


def test_listed_roles_are_those_that_sagemaker_can_assume(aws):
    arn = aws.role()
    aws.role("of-lambda", {"Version": "2012-10-17", "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}]})  # fmt: skip
    offers = wizard._offer_roles(MACHINE, {"region": "us-east-1"})
    assert [(choice.value, choice.title) for choice in offers.choices] == [(arn, "trainer")]


def test_missing_permission_to_list_roles_is_reported(aws):
    aws.fault("ListRoles", "denied")
    offers = wizard._offer_roles(MACHINE, {"region": "us-east-1"})
    assert not offers.choices
    assert "is not authorized to perform: iam:ListRoles" in offers.note


def test_the_first_questions_do_not_import_the_sdk(config):
    code = (
        "import sys; from accel_cli.extensions.sagemaker import fields as wizard; wizard._offer_profiles(None, {}); "
        "wizard._offer_regions(None, {}); wizard._find_type_error('ml.g5.xlarge'); "
        "print('botocore' in sys.modules, 'sagemaker.core' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["True", "False"]
