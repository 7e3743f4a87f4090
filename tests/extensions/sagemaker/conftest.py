"""A source folder, git in it, and the models of AWS."""

from dataclasses import replace

import pytest
from aws.models import keep_models
from support.cases.folders import git, tree, write

import accel_cli.launchers  # noqa: F401 - the section of SageMaker is in its table
from accel_cli.extensions.sagemaker import bundle
from accel_cli.launchers.source_files import SelectedFile

__all__ = ["git", "tree", "write"]


@pytest.fixture(scope="session", autouse=True)
def _models():
    keep_models()


@pytest.fixture
def small_bundle(monkeypatch):
    """Let bundles have no wheels, and one file of accel: what they hold is the subject of `test_bundle.py`."""
    accel = replace(bundle.select_accel(), files=(SelectedFile("accel_cli/__init__.py"),))
    monkeypatch.setattr(bundle, "select_accel", lambda: accel)
    monkeypatch.setattr(bundle, "fetch_wheels", lambda *_: "")
