"""The bundle of a job is complete, and enough for a container to run it."""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import accel_cli
from accel_cli.errors import AccelError, UsageError
from accel_cli.sagemaker import bundle
from accel_cli.sagemaker.files import Selection, select_files

RUN = {"kind": "script", "target": "train.py", "args": []}


@pytest.fixture
def made(tree, write, tmp_path, monkeypatch):
    """Makes a bundle of a tree, without pip."""
    write("train.py", "lib/a.py")

    def fetch(into, requirements, python, architecture):
        into.mkdir()
        (into / f"a-1-{python}.whl").write_text("wheel")
        return "" if python else "no network"

    monkeypatch.setattr(bundle, "fetch_wheels", fetch)

    def make(run=RUN, python="3.12", files=...):
        into = tmp_path / f"bundle-{len(list(tmp_path.glob('bundle-*')))}"
        into.mkdir()
        return bundle.build_bundle(run, select_files(tree) if files is ... else files, into, python)

    return make


def list_files(made):
    """Return the paths of a bundle by name."""
    return {
        str(path.relative_to(made.folder)): path for path in sorted(made.folder.rglob("*")) if path.is_file()
    }


def unpacked(path, folder):
    with tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_bundle_is_all_that_a_container_gets(made, tmp_path):
    found = made()
    assert list(list_files(found)) == [
        "accel.tar.gz",
        "entry.py",
        "job.json",
        "source.tar.gz",
        "wheels/a-1-3.12.whl",
    ]
    assert found.size == sum(path.stat().st_size for path in found.folder.rglob("*") if path.is_file())
    assert found.note == ""
    assert unpacked(list_files(found)["source.tar.gz"], tmp_path / "source") == ["lib/a.py", "train.py"]
    job = json.loads(list_files(found)["job.json"].read_text())
    assert job == {**RUN, "packages": bundle.list_requirements()}
    entry = Path(accel_cli.__file__).parent / "sagemaker" / "entry.py"
    assert list_files(found)["entry.py"].read_text() == entry.read_text()


def test_missing_wheels_are_a_note(made):
    assert made(python=None).note == (
        "the packages that accel needs are not sent with the job (no network); its hosts install what the image lacks"
    )


def test_the_packages_are_all_that_the_launcher_and_the_runtime_import():
    """The third-party modules of the sources, but for those of launchers and trackers with packages of their own."""
    names = {re.match(r"[\w.-]+", text)[0] for text in bundle.list_requirements()}
    modules = {"pyyaml": "yaml"}
    packages = {modules.get(name, name.replace("-", "_")) for name in names}
    packages |= {"click", "prompt_toolkit", "pydantic_core"}  # of typer, questionary and pydantic
    root, found = Path(accel_cli.__file__).parent.parent, set()
    for file in [*(root / "accel_cli").rglob("*.py"), *(root / "accel_runtime").rglob("*.py")]:
        if not {"tracking", "sagemaker"} & set(file.parts):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.partition(".")[0])
    own = {"accel_cli", "accel_runtime", "torch", "torch_xla", "numpy", *sys.stdlib_module_names}
    assert found - own <= packages


def test_the_accel_that_runs_is_sent_and_nothing_else(made, tmp_path):
    names = unpacked(list_files(made())["accel.tar.gz"], tmp_path / "accel")
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
    unpacked(list_files(made())["accel.tar.gz"], tmp_path / "accel")
    code = "import accel_cli, accel_runtime.env; print(accel_cli.__file__)"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "accel")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "accel" / "accel_cli" / "__init__.py")


def test_arguments_travel_byte_for_byte(made):
    args = ["it's", "a b", "", "ü", "\udce9", "--x=\n", "--", "007", "1e-4", "😀", "\udcf0\udc9f"]
    assert json.loads(list_files(made({**RUN, "args": args}))["job.json"].read_bytes())["args"] == args


def test_a_file_that_is_gone_stops_it(made, tree):
    files = select_files(tree)
    (tree / "train.py").unlink()
    with pytest.raises(UsageError, match=r"Cannot read .*train\.py"):
        made(files=files)


def test_caches_and_what_is_hidden_are_no_part_of_accel(write, tree, monkeypatch):
    write(
        "accel_cli/__init__.py",
        "accel_cli/sagemaker/entry.py",
        "accel_runtime/a.json",
        "other/x.py",
    )
    write("accel_cli/__pycache__/a.pyc", "accel_runtime/b.pyc", "accel_cli/.swp", "accel_runtime/.cache/x")
    monkeypatch.setattr(accel_cli, "__file__", str(tree / "accel_cli" / "__init__.py"))
    found = [file.name for file in bundle.select_accel().files]
    assert found == [
        "accel_cli/__init__.py",
        "accel_cli/sagemaker/entry.py",
        "accel_runtime/a.json",
    ]


def test_an_accel_that_is_not_whole_is_said(made, tmp_path, monkeypatch):
    (tmp_path / "accel_cli").mkdir()
    monkeypatch.setattr(accel_cli, "__file__", str(tmp_path / "accel_cli" / "__init__.py"))
    with pytest.raises(AccelError, match=r"File not found: .*accel_runtime. Install accel again"):
        made()


def test_a_folder_that_cannot_be_written_is_said(made, tmp_path):
    with pytest.raises(
        AccelError, match=r"Cannot write .*nowhere/source\.tar\.gz: No such file or directory"
    ):
        bundle.build_bundle(RUN, Selection(tmp_path, ()), tmp_path / "nowhere", "3.12")
