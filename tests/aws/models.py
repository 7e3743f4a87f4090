"""Cache of the service models of botocore, which parses megabytes of JSON for every session."""

from __future__ import annotations

import functools
import importlib

import boto3
from botocore.loaders import JSONFileLoader

__all__ = ["keep_models"]


def keep_models():
    """Let botocore keep each parsed model file for all sessions of this process."""
    if not hasattr(JSONFileLoader.load_file, "cache_info"):
        read = JSONFileLoader().load_file
        JSONFileLoader.load_file = staticmethod(functools.cache(read))


if __name__ == "preloaded":  # by the interpreter that forks commands, before the first of them
    # A second of each command, and once torch is loaded it makes torch create folders for its compiler.
    for module in ("helper.session_helper", "image_uris", "logs"):
        importlib.import_module(f"sagemaker.core.{module}")
    keep_models()
    session = boto3.session.Session("nobody", "nothing", region_name="us-east-1")
    for service in ("iam", "logs", "s3", "sagemaker", "sts"):
        session.client(service)
