"""Secrets, asked of a Secrets Manager that answers over HTTP."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from accel_cli.container import vault
from accel_cli.container.problem import ContainerError

ARN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-AbCdEf"
pytest.importorskip("boto3", reason="boto3 is not installed")


KEPT = {"wandb": "s3cr3t", ARN: '{"key": "inner", "number": 7}', "binary": None}


class Manager(BaseHTTPRequestHandler):
    """Answers as AWS Secrets Manager does, in as far as this asks."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["SecretId"]
        code, said = 400, {"__type": "ResourceNotFoundException", "Message": "can't find it"}
        if asked == "forbidden":
            said = {"__type": "AccessDeniedException", "Message": "User: arn:... is not authorized"}
        elif asked in KEPT:
            code, text = 200, KEPT[asked]
            said = {"Name": asked, **({"SecretBinary": "AAAA"} if text is None else {"SecretString": text})}
        body = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    with HTTPServer(("127.0.0.1", 0), Manager) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def manager(address, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("manager")
def test_a_secret_is_found_by_name_and_by_arn_whole_or_by_key():
    asked = {"A": "wandb", "B": ARN, "C": f"{ARN}:key::", "D": f"{ARN}:number:AWSCURRENT:"}
    said = vault.resolved(asked, "us-east-1")
    assert said == {"A": "s3cr3t", "B": KEPT[ARN], "C": "inner", "D": "7"}


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
