"""SageMaker as botocore's own data describe it: read from this installation, without a call to AWS."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from accel_cli.errors import UsageError

__all__ = ["model"]


@lru_cache(maxsize=1)
def model() -> Any:
    """What botocore knows of SageMaker's requests: names, types, limits and patterns.

    Raises:
        UsageError: boto3 is not installed.
    """
    try:
        from botocore.loaders import Loader  # noqa: PLC0415 - only SageMaker's commands need it
        from botocore.model import ServiceModel  # noqa: PLC0415
    except ImportError:
        raise UsageError(
            'SageMaker jobs need boto3, which is not installed: pip install "accel[sagemaker]"'
        ) from None
    # A session would read the user's configuration, and fail where that names an AWS profile that is not there.
    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
