"""Secrets, asked of a Secrets Manager that answers over HTTP."""

import sys

import pytest

from accel_cli.container import vault
from accel_cli.container.problem import ContainerError

ARN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-AbCdEf"
pytest.importorskip("boto3", reason="boto3 is not installed")


def test_a_secret_is_found_by_name_and_by_arn_whole_or_by_key(manager):
    asked = {"A": "wandb", "B": ARN, "C": f"{ARN}:key::", "D": f"{ARN}:number:AWSCURRENT:"}
    said = vault.resolved(asked, "us-east-1")
    assert said == {"A": manager["wandb"], "B": manager[ARN], "C": "inner", "D": "7"}


@pytest.mark.usefixtures("manager")
@pytest.mark.parametrize(
    ("secret", "reason"),
    [
        ("absent", "secrets.KEY: absent: there is no such secret in us-east-1"),
        ("forbidden", "the job's role may not read it: allow it secretsmanager:GetSecretValue"),
        ("binary", "is binary"),
        (f"{ARN}:other::", "no JSON object with that key"),
    ],
)
def test_a_secret_that_cannot_be_had_is_one_message_without_a_value(secret, reason):
    with pytest.raises(ContainerError) as caught:
        vault.resolved({"KEY": secret}, "us-east-1")
    assert reason in str(caught.value)
    assert "inner" not in str(caught.value)


def test_an_image_without_boto3_is_told_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ContainerError, match="has no boto3: put boto3 in the job's requirements"):
        vault.resolved({"KEY": "wandb"}, "us-east-1")


def test_a_job_without_secrets_asks_nobody(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert vault.resolved({}, None) == {}


def test_a_service_that_does_not_answer_is_said(manager, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ContainerError, match="AWS Secrets Manager cannot be asked"):
        vault.resolved({"KEY": "wandb"}, "us-east-1")
