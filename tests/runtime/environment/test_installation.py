"""Commands that install packages: in the form that works for the environment of the process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from accel_runtime.environment import installation

REQUIREMENTS = (
    "numpy>=1.26",
    "torch>=2.9",
    "torch==2.9.0; extra == 'xla'",
    "torch-xla==2.9.0; extra == 'xla'",
    'libcst>=1.8; extra == "migrate"',
    f"{installation.DISTRIBUTION}[demo]; extra == 'dev'",
)
PYTHON = installation.format_python()


class Installed(Distribution):
    """An installation of accel with the files of its metadata."""

    def __init__(self, **files: str) -> None:
        self.files_of_metadata = files

    def read_text(self, filename):
        return self.files_of_metadata.get(filename.partition(".")[0])

    def locate_file(self, path):
        raise NotImplementedError


@pytest.fixture
def install(monkeypatch):
    """Return a function that replaces the installation of accel."""

    def replace(requirements=REQUIREMENTS, origin=None):
        metadata = "".join(f"Requires-Dist: {each}\n" for each in requirements)
        found = Installed(METADATA=metadata, direct_url=json.dumps(origin) if origin else None)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda _: found)

    replace()
    return replace


def test_an_extra_is_named_by_its_packages_and_their_versions(install):
    assert installation.list_requirements("xla") == ["torch==2.9.0", "torch-xla==2.9.0"]
    assert (
        installation.format_install(extra="xla") == f"{PYTHON} -m pip install torch==2.9.0 torch-xla==2.9.0"
    )
    assert installation.format_install(extra="migrate") == f"{PYTHON} -m pip install 'libcst>=1.8'"


def test_accels_own_requirements_are_those_without_an_extra(install):
    assert installation.list_requirements() == ["numpy>=1.26", "torch>=2.9"]
    assert installation.list_requirements("dev") == []


def test_a_package_gets_the_version_that_accel_requires(install):
    command = installation.format_install("torch", "torch_xla", "unknown", options="--upgrade")
    assert command == f"{PYTHON} -m pip install --upgrade 'torch>=2.9' torch-xla==2.9.0 unknown"


def test_without_metadata_the_packages_of_the_caller_are_named(monkeypatch):
    def fail(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", fail)
    assert installation.format_install("plotly", "jinja2", extra="report") == (
        f"{PYTHON} -m pip install plotly jinja2"
    )
    assert installation.find_source_tree() is None
    assert "the extra xla" in installation.format_new_environment("xla")


def test_a_new_environment_gets_accel_from_its_source_tree(install, tmp_path):
    tree = tmp_path / "source tree"
    tree.mkdir()
    origin = {"url": tree.as_uri(), "dir_info": {"editable": True}}
    install(origin=origin)
    assert installation.find_source_tree() is None  # the tree was moved
    (tree / "pyproject.toml").touch()
    assert installation.find_source_tree() == tree
    assert installation.format_new_environment("xla") == f"pip install -e '{tree}[xla]'"


@pytest.mark.parametrize(
    "origin", [None, {"url": "file:///x.whl", "archive_info": {}}, {"url": "file:///x", "dir_info": {}}]
)
def test_a_new_environment_gets_the_packages_if_there_is_no_source_tree(install, origin):
    install(origin=origin)
    assert installation.format_new_environment("xla") == (
        "pip install torch==2.9.0 torch-xla==2.9.0, then install accel as you did here"
    )


@pytest.mark.parametrize(
    ("uv", "settings", "expected"),
    [
        ("/bin/uv", "", "uv pip install --python {} 'libcst>=1.8'"),
        (None, "home = /usr\nuv = 0.9.1\n", "uv pip install --python {} 'libcst>=1.8'"),
        (None, "home = /usr\n", "{0} -m ensurepip && {0} -m pip install 'libcst>=1.8'"),
    ],
)
@pytest.mark.usefixtures("install")
def test_an_environment_without_pip_is_installed_into_by_what_made_it(
    monkeypatch, tmp_path, uv, settings, expected
):
    (tmp_path / "pyvenv.cfg").write_text(settings)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda name: uv if name == "uv" else None)
    assert installation.format_install("libcst") == expected.format(sys.executable)


def test_python_is_named_by_its_path_unless_path_leads_to_it(monkeypatch):
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python")
    assert installation.format_python() == "'/opt/my env/bin/python'"
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/my env/bin/{name}")
    assert installation.format_python() == "python"
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python3")
    assert installation.format_python() == "python3"


def test_the_source_tree_of_this_installation_has_its_packages():
    tree = installation.find_source_tree()
    assert tree is None or Path(tree, "accel_runtime").is_dir()
