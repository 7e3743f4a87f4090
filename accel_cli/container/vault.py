"""Secrets of a job: looked up on the host in AWS Secrets Manager, and told to the processes alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from accel_cli.container.problem import ContainerError

__all__ = ["resolved"]

_PARTS = 7
"""Of a secret's ARN, which ends with its name; more, as in a task of ECS, choose a key and a version of it."""
_SAID = {
    "ResourceNotFoundException": "there is no such secret in {region}",
    "AccessDeniedException": "the job's role may not read it: allow it secretsmanager:GetSecretValue",
    "DecryptionFailure": "the job's role may not decrypt it: allow it kms:Decrypt on the secret's key",
    "UnrecognizedClientException": "the credentials of the job's role are not accepted",
}


def resolved(secrets: Mapping[str, str], region: str | None) -> dict[str, str]:
    """The values of secrets, by variable.

    Args:
        secrets: The name or ARN of each; `ARN:key::` is the value of that key in a secret that is JSON.
        region: Where they are.

    Raises:
        ContainerError: One cannot be read. No message has a value in it.
    """
    if not secrets:
        return {}
    try:
        boto3, failing = import_module("boto3"), import_module("botocore.exceptions")
    except ImportError:
        raise ContainerError(
            f"secrets: {', '.join(secrets)} cannot be looked up, as this image has no boto3: put boto3 in the job's "
            "requirements, or use an image that has it"
        ) from None
    try:
        client = boto3.client("secretsmanager", region_name=region)
        return {name: _value(client, name, secret, region, failing) for name, secret in secrets.items()}
    except failing.BotoCoreError as error:
        raise ContainerError(f"secrets: AWS Secrets Manager cannot be asked: {error}") from None


def _value(client: Any, name: str, secret: str, region: str | None, failing: Any) -> str:
    words, key = _asked(secret)
    try:
        found = client.get_secret_value(**words)
    except failing.ClientError as error:
        said = error.response.get("Error", {})
        why = _SAID.get(said.get("Code"), f"{said.get('Code')}: {said.get('Message')}").format(region=region)
        raise ContainerError(f"secrets.{name}: {secret}: {why}") from None
    if "SecretString" not in found:
        raise ContainerError(f"secrets.{name}: {secret} is binary, and a variable holds text")
    return (
        _of_key(found["SecretString"], key, f"secrets.{name}: {secret}")
        if key
        else str(found["SecretString"])
    )


def _asked(secret: str) -> tuple[dict[str, str], str]:
    """What the service is asked, and the key of what it answers."""
    parts = secret.split(":")
    if not secret.startswith("arn:") or len(parts) <= _PARTS:
        return {"SecretId": secret}, ""
    key, stage, version = (*parts[_PARTS:], "", "")[:3]
    chosen = {"VersionStage": stage, "VersionId": version}
    return {
        "SecretId": ":".join(parts[:_PARTS]),
        **{name: said for name, said in chosen.items() if said},
    }, key


def _of_key(text: str, key: str, where: str) -> str:
    try:
        value = json.loads(text)[key]
    except (ValueError, KeyError, TypeError):
        # Not even the keys are said.
        raise ContainerError(f"{where}: the secret is no JSON object with that key") from None
    return value if isinstance(value, str) else json.dumps(value)
