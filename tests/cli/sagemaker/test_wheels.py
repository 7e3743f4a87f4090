"""Wheels for a container: fetched once with the user's pip, kept, and never a reason to stop."""

import os
import stat
import sys
import zipfile

import pytest

from accel_cli.sagemaker import bundle

REQUIREMENTS = ["xxhash>=3", "rich>=13"]


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is all pip knows, with wheels for these Pythons, one of which needs another."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for python in (311, 312):
        for machine in ("x86_64", "aarch64"):
            made(folder, "xxhash", f"cp{python}-cp{python}-manylinux_2_17_{machine}.manylinux2014_{machine}")
    made(folder, "rich", "py3-none-any", "Requires-Dist: pygments\n")
    made(folder, "pygments", "py3-none-any")
    return folder


def made(folder, name, tag, needs=""):
    """Write the smallest wheel that pip takes, of version 20."""
    info = f"{name}-20.dist-info"
    with zipfile.ZipFile(folder / f"{name}-20-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 20\n{needs}")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


def fetched(tmp_path, python="3.12", **options):
    into = tmp_path / f"wheels-{len(list(tmp_path.iterdir()))}"
    said = bundle.fetch_wheels(into, REQUIREMENTS, python, cache=tmp_path / "cache", **options)
    return said, sorted(path.name for path in into.iterdir()) if into.exists() else None


@pytest.mark.parametrize(
    ("python", "machine", "tag"), [("3.12", "x86_64", "cp312"), ("3.11", "aarch64", "cp311")]
)
def test_the_wheels_are_those_of_the_container_s_python_and_processors(index, tmp_path, python, machine, tag):
    said, names = fetched(tmp_path, python, architecture=machine)
    assert said == ""
    assert [name.split("-")[0] for name in names] == ["pygments", "rich", "xxhash"]
    assert [f"-{tag}-" in name and machine in name for name in names] == [False, False, True]


def test_a_second_launch_needs_no_pip(index, tmp_path, monkeypatch):
    first = fetched(tmp_path)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert fetched(tmp_path) == first
    assert "pip cannot be run" in fetched(tmp_path, "3.11")[0]


@pytest.mark.slow
def test_for_a_python_that_is_not_known_there_are_wheels_for_each_that_has_some(index, tmp_path):
    said, names = fetched(tmp_path, None)
    assert said == ""
    assert {name.split("-")[2] for name in names} == {"py3", "cp311", "cp312"}


def test_the_cache_is_the_user_s_own(index, tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "user" / name)
    assert bundle.fetch_wheels(tmp_path / "wheels", REQUIREMENTS, "3.12") == ""
    [kept] = (tmp_path / "user" / "accel" / "wheels").iterdir()
    assert {path.name for path in kept.iterdir()} == {path.name for path in (tmp_path / "wheels").iterdir()}


def test_without_a_network_there_are_none_and_that_is_said_in_one_line(index, tmp_path):
    next(index.glob("xxhash*cp312*x86_64*")).unlink()
    said, names = fetched(tmp_path)
    assert names is None
    assert said == "No matching distribution found for xxhash>=3"
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(index, tmp_path):
    (tmp_path / "cache").write_text("a file")
    said, names = fetched(tmp_path)
    assert (said, len(names)) == ("", 3)


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A stand-in for Python and its pip."""

    def stand_in(text):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))

    return stand_in


def test_a_python_without_pip_is_no_reason_to_stop(pip, tmp_path):
    pip("echo $0: No module named pip >&2; exit 1")
    said, names = fetched(tmp_path)
    assert names is None
    assert "No module named pip" in said


def test_a_pip_that_hangs_is_ended(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "_PIP_TIMEOUT_S", 0.5)
    pip("exec sleep 60")
    assert "pip took longer than 0.5 s" in fetched(tmp_path)[0]


def test_a_login_in_an_address_is_not_shown(pip, tmp_path):
    pip("echo https://me:secret@index/simple; echo 'ERROR: no https://me:secret@index/simple' >&2; exit 1")
    assert "secret" not in fetched(tmp_path)[0]
    assert "no https://***@index/simple" in fetched(tmp_path)[0]
