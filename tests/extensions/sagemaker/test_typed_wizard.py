"""The wizard for SageMaker on a real pseudo-terminal, with an AWS on loopback."""

import time

import pytest
from support.processes.commands import call_accel

from accel_cli.planning.machine import Machine

ENTER, DOWN, CLEAR = "\r", "\x1b[B", "\x15"
KIND, PROFILE, REGION, ROLE = "How should scripts run?", "Which AWS profile?", "Which region?", "Which role"
TYPE, COUNT, SPOT = "Which instance type?", "How many instances?", "On demand, or spot?"
RUN, KEEP, PACKAGES, MORE = (
    "How long may it run?",
    "instances warm",
    "requirements file?",
    "advanced options (image",
)
PRECISION, WRITE = "Mixed precision?", "default.yaml?"
FITS = "fit on one device?"
SAGEMAKER = DOWN * 4 + ENTER
REST = (TYPE, COUNT, SPOT, RUN, KEEP, PACKAGES, MORE, PRECISION, WRITE)


@pytest.fixture
def configured(aws, tmp_path, monkeypatch):
    """An AWS with two profiles in the configuration of this machine."""
    config = tmp_path / "aws-config"
    config.write_text("[default]\nregion = eu-west-1\n[profile team]\nregion = us-west-2\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    # Credentials of a profile win over those of the environment.
    credentials = tmp_path / "aws-credentials"
    keys = "aws_access_key_id = testing\naws_secret_access_key = testing\n"
    credentials.write_text(f"[default]\n{keys}[team]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    return aws


def enter(screen, *questions):
    for question in questions:
        screen.answer(question, ENTER)


@pytest.mark.full
def test_enter_on_every_question_writes_a_profile_that_can_be_launched(
    terminal, configured, read_profile, accel, script
):
    arn = configured.role()
    screen = terminal(columns=120, lines=60)
    screen.answer(KIND, SAGEMAKER)
    enter(screen, PROFILE, REGION, ROLE, *REST)
    assert screen.end() == 0
    section = read_profile().launcher
    assert (section.aws_profile, section.region, section.role) == (None, "eu-west-1", arn)
    assert (section.instance_type, section.instance_count, section.max_run) == ("ml.g5.xlarge", 1, 86400)
    script("print('it ran')")
    result = accel("launch", "--offline", "train.py")
    assert result.returncode == 0, result.stderr
    assert arn in result.stdout


@pytest.mark.full
def test_profile_region_and_role_are_selected_and_an_unknown_type_is_asked_again(
    terminal, configured, read_profile
):
    configured.role("a-first")
    arn = configured.role("b-second")
    screen = terminal(columns=120, lines=60)
    screen.answer(KIND, SAGEMAKER)
    screen.answer(PROFILE, DOWN * 2 + ENTER)  # team
    screen.see("us-west-2 (from the AWS configuration)")
    screen.answer(REGION, "eu-central-1" + ENTER)  # typing narrows
    screen.answer(ROLE, DOWN + ENTER)
    screen.answer(TYPE, "ml.g5.xlrge" + ENTER)
    screen.see("Did you mean ml.g5.xlarge")
    screen.process.send(CLEAR + "ml.p4d.24xlarge" + ENTER)
    screen.answer(COUNT, "2" + ENTER)
    screen.answer(SPOT, DOWN + ENTER)
    screen.answer(RUN, "2h" + ENTER)
    enter(screen, PACKAGES, MORE, PRECISION, FITS, WRITE)  # instances of spot jobs are not kept
    assert screen.end() == 0
    section = read_profile().launcher
    assert (section.aws_profile, section.region, section.role) == ("team", "eu-central-1", arn)
    assert (section.instance_type, section.instance_count) == ("ml.p4d.24xlarge", 2)
    assert (section.spot, section.max_run, section.keep_alive) == (True, 7200, None)


@pytest.mark.full
def test_advanced_questions_are_asked_on_request_and_text_is_kept_as_typed(
    terminal, configured, read_profile
):
    configured.role()
    screen = terminal(columns=120, lines=80)
    screen.answer(KIND, SAGEMAKER)
    enter(screen, PROFILE, REGION, ROLE, TYPE, COUNT, SPOT, RUN)
    screen.answer(KEEP, "30m" + ENTER)
    screen.answer(PACKAGES, "007" + ENTER)
    screen.answer(MORE, DOWN + ENTER)
    enter(screen, "Which image?", "Which torch version in AWS")
    screen.answer("Which data does it read?", "train=s3://data/PATH/1e-4, no=s3://data/no" + ENTER)
    screen.answer("from the log?", "loss=loss=([0-9.]{1,3}), acc=acc (.+)" + ENTER)
    screen.answer("in Secrets Manager?", "API_KEY=007, MODE=no" + ENTER)
    screen.answer("write its model?", "Out" + ENTER)
    screen.answer("write checkpoints?", ENTER)
    enter(screen, PRECISION, WRITE)
    assert screen.end() == 0
    section = read_profile().launcher
    assert section.inputs == {"train": "s3://data/PATH/1e-4", "no": "s3://data/no"}
    assert section.metrics == {"loss": "loss=([0-9.]{1,3})", "acc": "acc (.+)"}
    assert section.secrets == {"API_KEY": "007", "MODE": "no"}
    assert (section.requirements, section.keep_alive, section.model_dir) == ("007", 1800, "Out")


@pytest.mark.full
def test_every_kind_of_question_allows_to_go_back(terminal, configured, read_profile):
    configured.role()
    screen = terminal(columns=120, lines=60)
    screen.answer(KIND, SAGEMAKER)
    screen.answer(PROFILE, DOWN * 2 + ENTER)
    enter(screen, REGION, ROLE)
    screen.answer(TYPE, "<" + ENTER)
    screen.answer(ROLE, "<")
    screen.answer(REGION, "<")
    screen.answer(PROFILE, "<")
    enter(screen, KIND, PROFILE, REGION)  # what was answered is what Enter keeps
    screen.answer(ROLE, DOWN + ENTER)  # Type another value
    time.sleep(0.2)
    screen.answer("name or ARN", "<" + ENTER)
    screen.see("Type another value")
    screen.answer(ROLE, DOWN + ENTER)
    screen.answer("name or ARN", "My-Role" + ENTER)
    screen.answer(TYPE, "<" + ENTER)
    screen.see("My-Role (current)")
    enter(screen, ROLE, *REST)
    assert screen.end() == 0
    assert (read_profile().launcher.role, read_profile().launcher.aws_profile) == ("My-Role", "team")


@pytest.mark.slow
def test_answers_are_typed_if_aws_does_not_respond(terminal, configured, read_profile, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    screen = terminal(columns=200, lines=60)
    screen.answer(KIND, SAGEMAKER)
    enter(screen, PROFILE, REGION)
    screen.answer("name or ARN", "Trainer" + ENTER)
    assert "The roles cannot be listed; type the answer. " in screen.text()
    enter(screen, *REST)
    assert screen.end() == 0
    assert read_profile().launcher.role == "Trainer"


@pytest.mark.full
def test_enter_keeps_the_values_of_the_profile(terminal, configured, read_profile, accel):
    configured.role()
    accel(
        "config", "set", "launcher.kind=sagemaker", "launcher.region=eu-north-1", "launcher.role=Mine",
        "launcher.instance_type=ml.m5.large", "launcher.max_run=90m", "launcher.tags={team: vision}",
        "launcher.requirements=gone.txt",
    )  # fmt: skip
    screen = terminal(columns=120, lines=60)
    enter(screen, KIND, PROFILE)
    screen.see("eu-north-1")
    enter(screen, REGION)
    screen.see("Mine (current)")
    enter(screen, ROLE, TYPE, COUNT, SPOT, RUN, KEEP, PACKAGES, MORE, PRECISION, "Replace")
    assert screen.end() == 0
    section = read_profile().launcher
    assert (section.region, section.role, section.instance_type, section.max_run) == (
        "eu-north-1",
        "Mine",
        "ml.m5.large",
        5400,
    )
    assert (section.tags, section.requirements) == ({"team": "vision"}, "gone.txt")


def test_defaults_for_the_machine_are_written_without_calls_to_aws(aws, cwd, capfd, monkeypatch):
    monkeypatch.setattr("accel_cli.planning.machine.detect", lambda *_: Machine(2))
    assert call_accel(capfd, "config", "default").returncode == 0
    assert not aws.calls()
