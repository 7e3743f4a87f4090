"""A source folder, git in it, and the models of AWS."""

import pytest
from aws.models import keep_models
from support.folders import git, tree, write

import accel_cli.launchers  # noqa: F401 - the section of SageMaker is in its table

__all__ = ["git", "tree", "write"]


@pytest.fixture(scope="session", autouse=True)
def _models():
    keep_models()
