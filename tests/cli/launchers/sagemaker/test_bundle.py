"""What is sent for a job: complete, the same from the same files, and enough for a container to run it."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import accel_cli
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.sagemaker import bundle, wheels
from accel_cli.launchers.sagemaker.files import Chosen, chosen

RUN = {"version": 1, "kind": "script", "target": "train.py", "args": []}


@pytest.fixture
def made(tree, write, tmp_path, monkeypatch):
    """Makes a bundle of a tree, without pip."""
    write("train.py", "lib/a.py")

    def fetch(into, python, **_):
        into.mkdir()
        (into / f"a-1-{python}.whl").write_text("wheel")
        return "" if python else "said of wheels"

    monkeypatch.setattr(wheels, "fetch", fetch)

    def make(run=RUN, python="3.12", files=...):
        into = tmp_path / f"bundle-{len(list(tmp_path.glob('bundle-*')))}"
        into.mkdir()
        return bundle.make(run, chosen(tree) if files is ... else files, into, python)

    return make


def unpacked(path, folder):
    with tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_bundle_is_all_that_a_container_gets(made, tmp_path):
    found = made()
    assert list(found.files) == [
        "accel.tar.gz",
        "entry.py",
        "job.json",
        "source.tar.gz",
        "wheels/a-1-3.12.whl",
    ]
    assert found.size == sum(path.stat().st_size for path in found.folder.rglob("*") if path.is_file())
    assert found.notes == ()
    assert unpacked(found.files["source.tar.gz"], tmp_path / "source") == ["lib/a.py", "train.py"]
    assert json.loads(found.files["job.json"].read_text()) == RUN
    entry = Path(accel_cli.__file__).parent / "container" / "entry.py"
    assert found.files["entry.py"].read_text() == entry.read_text()


def test_what_is_to_be_said_of_wheels_is_kept(made):
    assert made(python=None).notes == ("said of wheels",)


def test_the_accel_that_runs_is_sent_and_nothing_else(made, tmp_path):
    names = unpacked(made().files["accel.tar.gz"], tmp_path / "accel")
    assert {name.split("/")[0] for name in names} == {"accel_cli", "accel_runtime"}
    root = Path(accel_cli.__file__).parent.parent
    tracked = subprocess.run(
        ["git", "ls-files", "accel_cli", "accel_runtime"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not set(tracked) - set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_a_container_s_python_starts_the_accel_that_was_sent(made, tmp_path):
    unpacked(made().files["accel.tar.gz"], tmp_path / "accel")
    code = "import accel_cli, accel_runtime.env, accel_cli.container.work; print(accel_cli.__file__)"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "accel")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "accel" / "accel_cli" / "__init__.py")


def test_the_same_files_make_the_same_bundle(made):
    one, other = (
        {name: hashlib.sha256(path.read_bytes()).digest() for name, path in made().files.items()}
        for _ in range(2)
    )
    assert one == other


def test_arguments_travel_byte_for_byte(made):
    args = ["it's", "a b", "", "ü", "\udce9", "--x=\n", "--", "007", "1e-4", "😀", "\udcf0\udc9f"]
    assert json.loads(made({**RUN, "args": args}).files["job.json"].read_bytes())["args"] == args


def test_what_accel_brings_along_needs_no_files(made, tmp_path):
    found = made(files=None)
    assert unpacked(found.files["source.tar.gz"], tmp_path / "source") == []


def test_a_file_that_is_gone_stops_it(made, tree):
    files = chosen(tree)
    (tree / "train.py").unlink()
    with pytest.raises(UsageError, match=r"train\.py cannot be read"):
        made(files=files)


def test_caches_and_what_is_hidden_are_no_part_of_accel(write, tree, monkeypatch):
    write("accel_cli/__init__.py", "accel_cli/container/entry.py", "accel_runtime/a.json", "other/x.py")
    write("accel_cli/__pycache__/a.pyc", "accel_runtime/b.pyc", "accel_cli/.swp", "accel_runtime/.cache/x")
    monkeypatch.setattr(accel_cli, "__file__", str(tree / "accel_cli" / "__init__.py"))
    found = [file.name for file in bundle.accel_files().files]
    assert found == ["accel_cli/__init__.py", "accel_cli/container/entry.py", "accel_runtime/a.json"]


def test_an_accel_that_is_not_whole_is_said(made, tmp_path, monkeypatch):
    (tmp_path / "accel_cli").mkdir()
    monkeypatch.setattr(accel_cli, "__file__", str(tmp_path / "accel_cli" / "__init__.py"))
    with pytest.raises(AccelError, match=r"there is no accel_runtime in .* install it anew"):
        made()


def test_a_folder_that_cannot_be_written_is_said(made, tmp_path):
    with pytest.raises(
        AccelError, match=r"nowhere/source\.tar\.gz cannot be written: No such file or directory"
    ):
        bundle.make(RUN, Chosen(tmp_path, ()), tmp_path / "nowhere", "3.12")
