"""What a role of ours may do, and who may assume it: the policies of IAM, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["TRUST", "policy"]

TRUST: Mapping[str, Any] = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}
"""Who may assume a role of ours."""
_NETWORK = (
    "CreateNetworkInterface", "CreateNetworkInterfacePermission", "DeleteNetworkInterface",
    "DeleteNetworkInterfacePermission", "DescribeDhcpOptions", "DescribeNetworkInterfaces",
    "DescribeSecurityGroups", "DescribeSubnets", "DescribeVpcs",
)  # fmt: skip
"""What SageMaker does in a VPC as the job's role."""

_PARTS = 7
"""Of the ARN of a secret."""


def policy(
    bucket: str,
    *,
    partition: str = "aws",
    reads: Sequence[str] = (),
    secrets: Sequence[str] = (),
    vpc: bool = False,
) -> dict[str, Any]:
    """The rights a job needs, and no more: its bucket, its logs and metrics, and to fetch its image.

    Args:
        bucket: Where everything of the job is.
        partition: `aws`, or that of another AWS.
        reads: Buckets with data that jobs read, beside it.
        secrets: Names or ARNs in Secrets Manager that jobs read.
        vpc: Whether jobs are in a VPC.
    """
    s3 = f"arn:{partition}:s3:::"
    ways = [f"{s3}{bucket}", *(f"{s3}{name}" for name in reads)]
    logs = ("CreateLogGroup", "CreateLogStream", "PutLogEvents", "DescribeLogStreams")
    pull = ("BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer")
    statements = [
        _allow("Bucket", _named("s3", "ListBucket", "GetBucketLocation"), ways),
        _allow("Read", _named("s3", "GetObject"), [f"{way}/*" for way in ways]),
        _allow("Write", _named("s3", "PutObject", "AbortMultipartUpload"), [f"{s3}{bucket}/*"]),
        _allow("Logs", _named("logs", *logs), [f"arn:{partition}:logs:*:*:log-group:/aws/sagemaker/*"]),
        {
            **_allow("Metrics", ["cloudwatch:PutMetricData"], ["*"]),
            "Condition": {"StringLike": {"cloudwatch:namespace": ["/aws/sagemaker/*", "aws/sagemaker/*"]}},
        },
        _allow("Image", _named("ecr", *pull), [f"arn:{partition}:ecr:*:*:repository/*"]),
        _allow("ImageLogin", ["ecr:GetAuthorizationToken"], ["*"]),
    ]
    if secrets:
        arns = [_secret(partition, name) for name in secrets]
        statements.append(_allow("Secrets", ["secretsmanager:GetSecretValue"], arns))
    if vpc:
        statements.append(_allow("Network", _named("ec2", *_NETWORK), ["*"]))
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(sid: str, actions: Sequence[str], resources: Sequence[str]) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}


def _named(service: str, *actions: str) -> list[str]:
    return [f"{service}:{action}" for action in actions]


def _secret(partition: str, name: str) -> str:
    if name.startswith("arn:"):
        # What follows the name chooses a key of the secret, and is no part of what rights are about.
        return ":".join(name.split(":")[:_PARTS])
    # Secrets Manager adds six characters of its own to a name.
    return f"arn:{partition}:secretsmanager:*:*:secret:{name}-??????"
