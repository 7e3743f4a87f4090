"""The bundle of a job is complete: archives of the source and of accel, wheels, `entry.py` and `job.json`."""

import ast
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import accel_cli
from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.sagemaker import bundle
from accel_cli.launchers.source_files import SelectedFile, Selection, select_files

SPEC = {"kind": "script", "target": "train.py", "args": []}
REQUIREMENTS = ["xxhash>=3", "rich>=13"]
PARTS = st.binary(min_size=1, max_size=20).filter(
    lambda part: not {0, 47} & set(part) and part not in {b".", b".."}
)
TREES = st.dictionaries(
    st.lists(PARTS, min_size=1, max_size=3).map(b"/".join), st.binary(max_size=700), max_size=8
)


def unpack(path, folder):
    with tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def make(tree, write, tmp_path, monkeypatch):
    """Return a function that makes a bundle of a tree without pip, and returns its folder."""
    write("train.py", "lib/a.py")

    def fetch(folder, requirements, python, architecture):
        folder.mkdir()
        (folder / f"a-1-{python}.whl").write_text("wheel")
        return ""

    monkeypatch.setattr(bundle, "fetch_wheels", fetch)
    folder = tmp_path / "bundle"

    def make(spec=SPEC):
        folder.mkdir()
        assert bundle.build_bundle(spec, select_files(tree), folder, "3.12") == ""
        return folder

    return make


def test_a_bundle_contains_all_files_for_the_container(make, tmp_path):
    args = ["it's", "a b", "", "ü", "\udce9", "--x=\n", "--", "007", "1e-4", "😀", "\udcf0\udc9f"]
    folder = make({**SPEC, "args": args})
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == ["accel.tar.gz", "entry.py", "job.json", "source.tar.gz", "wheels/a-1-3.12.whl"]
    assert unpack(folder / "source.tar.gz", tmp_path / "source") == ["lib/a.py", "train.py"]
    job = json.loads((folder / "job.json").read_bytes())
    assert job == {**SPEC, "args": args, "packages": bundle.list_requirements()}
    root = Path(accel_cli.__file__).parent.parent
    assert (folder / "entry.py").read_text() == (
        root / "accel_cli" / "extensions" / "sagemaker" / "entry.py"
    ).read_text()
    sent = unpack(folder / "accel.tar.gz", tmp_path / "accel")
    command = ["git", "ls-files", "accel_cli", "accel_runtime"]
    tracked = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    assert {name.split("/")[0] for name in sent} == {"accel_cli", "accel_runtime"}
    assert not {name for name in tracked if (root / name).exists()} - set(sent)
    assert not [name for name in sent if "__pycache__" in name or name.endswith(".pyc")]
    code = "import accel_cli, accel_runtime.environment.settings; print(accel_cli.__file__)"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "accel")}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == str(tmp_path / "accel" / "accel_cli" / "__init__.py")


def test_the_required_packages_are_those_that_launcher_and_runtime_import():
    """Compare with the third-party imports of the sources, without those of optional launchers and trackers."""
    names = {re.match(r"[\w.-]+", text)[0] for text in bundle.list_requirements()}
    modules = {"pyyaml": "yaml"}
    packages = {modules.get(name, name.replace("-", "_")) for name in names}
    packages |= {"prompt_toolkit", "pydantic_core"}  # of questionary and pydantic
    root, imported = Path(accel_cli.__file__).parent.parent, set()
    for file in [*(root / "accel_cli").rglob("*.py"), *(root / "accel_runtime").rglob("*.py")]:
        optional = {"tracking", "trackers", "sagemaker", "ray", "migrate", "report", "prometheus.py"}
        if not optional & set(file.relative_to(root).parts):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.partition(".")[0])
    known_modules = {"accel_cli", "accel_runtime", "torch", "torch_xla", "numpy", *sys.stdlib_module_names}
    assert imported - known_modules <= packages


def test_an_incomplete_installation_of_accel_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "accel_cli").mkdir()
    monkeypatch.setattr(accel_cli, "__file__", str(tmp_path / "accel_cli" / "__init__.py"))
    with pytest.raises(AccelError, match=r"File not found: .*accel_runtime. Install accel again"):
        bundle.select_accel()


def test_hidden_files_and_broken_links_of_an_installation_are_not_packed(tmp_path, monkeypatch):
    packages = [tmp_path / name for name in ("accel_cli", "accel_runtime")]
    (packages[0] / "extensions" / "sagemaker").mkdir(parents=True)
    packages[1].mkdir()
    files = (packages[0] / "extensions" / "sagemaker" / "entry.py", packages[1] / "env.py")
    for file in (*files, packages[0] / ".a.py.swp"):
        file.touch()
    (packages[0] / ".#a.py").symlink_to("user@host.1")
    (packages[1] / "gone.py").symlink_to("nowhere")
    monkeypatch.setattr(accel_cli, "__file__", str(packages[0] / "__init__.py"))
    sent = [file.name for file in bundle.select_accel().files]
    assert sent == [str(file.relative_to(tmp_path)) for file in files]


def test_an_archive_has_files_links_and_modes_without_owner_and_time(tree, write, tmp_path):
    write("train.py", text="print(1)\n")
    write("lib/run.sh")
    (tree / "lib" / "run.sh").chmod(0o700)
    (tree / "train.py").chmod(0o600)
    (tree / "link").symlink_to("lib/run.sh")
    bundle.write_archive(select_files(tree), tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        members = tar.getmembers()
        content = {
            each.name: (oct(each.mode), each.linkname or tar.extractfile(each).read()) for each in members
        }
    assert content == {
        "lib/run.sh": ("0o755", b"x\n"),
        "link": ("0o644", "lib/run.sh"),
        "train.py": ("0o644", b"print(1)\n"),
    }
    assert {(each.mtime, each.uid, each.gid, each.uname, each.gname) for each in members} == {
        (0, 0, 0, "", "")
    }


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=TREES)
def test_an_archive_with_any_names_unpacks_to_the_same_tree(tmp_path_factory, files):
    tree = tmp_path_factory.mktemp("tree")
    written = {}
    for name, data in files.items():
        path = tree / os.fsdecode(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError:  # a file where another needs a folder
            continue
        written[os.fsdecode(name)] = data
    archive = tmp_path_factory.mktemp("packed") / "a.tar.gz"
    bundle.write_archive(Selection(tree, tuple(map(SelectedFile, written))), archive)
    out = tmp_path_factory.mktemp("out")
    unpack(archive, out)
    assert {name: (out / name).read_bytes() for name in written} == written


def test_a_container_without_a_locale_unpacks_the_same_names(tree, write, tmp_path):
    write(os.fsdecode(b"caf\xe9.py"), "ü.py")
    bundle.write_archive(select_files(tree), tmp_path / "a.tar.gz")
    code = (
        "import os, sys, tarfile; print([os.fsencode(name) for name in tarfile.open(sys.argv[1]).getnames()])"
    )
    process = subprocess.run(
        ["python3", "-c", code, tmp_path / "a.tar.gz"],
        env={"PATH": os.environ["PATH"], "LC_ALL": "POSIX"},
        check=True,
        capture_output=True,
    )
    assert process.stdout == b"[b'caf\\xe9.py', b'\\xc3\\xbc.py']\n"


def test_read_and_write_errors_name_the_file(tree, write, tmp_path):
    write("a.py", text="".join(map(str, range(100_000))))
    files = select_files(tree)
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(AccelError, match=r"Cannot write .*full: No space left on device"):
        bundle.write_archive(files, tmp_path / "full")
    (tree / "a.py").unlink()
    with pytest.raises(UsageError, match=r"Cannot read .*a\.py: No such file"):
        bundle.write_archive(files, tmp_path / "a.tar.gz")


# Wheels -----------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The only folder that pip reads, with wheels for some Pythons, one of which needs another."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for python in (311, 312):
        for machine in ("x86_64", "aarch64"):
            tag = f"cp{python}-cp{python}-manylinux_2_17_{machine}.manylinux2014_{machine}"
            write_wheel(folder, "xxhash", tag)
    write_wheel(folder, "rich", "py3-none-any", "Requires-Dist: pygments\n")
    write_wheel(folder, "pygments", "py3-none-any")
    return folder


def write_wheel(folder, name, tag, needs=""):
    """Write the smallest wheel that pip accepts, of version 20."""
    info = f"{name}-20.dist-info"
    with zipfile.ZipFile(folder / f"{name}-20-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 20\n{needs}")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


def fetch(tmp_path, python="3.12", **options):
    folder = tmp_path / f"wheels-{len(list(tmp_path.iterdir()))}"
    reason = bundle.fetch_wheels(folder, REQUIREMENTS, python, cache=tmp_path / "cache", **options)
    return reason, sorted(path.name for path in folder.iterdir()) if folder.exists() else None


@pytest.mark.parametrize(
    ("python", "machine", "tag"), [("3.12", "x86_64", "cp312"), ("3.11", "aarch64", "cp311")]
)
@pytest.mark.usefixtures("index")
def test_wheels_match_the_container_and_the_second_launch_downloads_none(  # noqa: PLR0913, PLR0917
    tmp_path, monkeypatch, capsys, python, machine, tag
):
    reason, names = first = fetch(tmp_path, python, architecture=machine)
    assert reason == ""
    assert [name.split("-")[0] for name in names] == ["pygments", "rich", "xxhash"]
    assert [f"-{tag}-" in name and machine in name for name in names] == [False, False, True]
    assert f"packages of accel for Python {python} (about 8 MB, once)" in capsys.readouterr().err
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert fetch(tmp_path, python, architecture=machine) == first
    assert capsys.readouterr().err == ""
    assert "pip cannot be run" in fetch(tmp_path, "3.13")[0]


@pytest.mark.full
def test_an_unknown_python_gets_wheels_for_each_available_version(index, tmp_path, capsys):
    reason, names = fetch(tmp_path, None)
    assert reason == ""
    assert {name.split("-")[2] for name in names} == {"py3", "cp311", "cp312"}
    assert "Python 3.11 (about 8 MB, once, 2 of 5 since that of the image is not known)" in (
        capsys.readouterr().err
    )


def test_missing_wheels_are_a_reason_of_one_line(index, tmp_path):
    next(index.glob("xxhash*cp312*x86_64*")).unlink()
    assert fetch(tmp_path) == ("No matching distribution found for xxhash>=3", None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_wheels_are_sent_although_the_cache_is_not_writable(index, tmp_path):
    (tmp_path / "cache").write_text("a file")
    reason, names = fetch(tmp_path)
    assert (reason, len(names)) == ("", 3)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo $0: No module named pip >&2; exit 1", "No module named pip"),
        ("exec sleep 60", "pip took longer than 0.5 s"),
        ("echo 'ERROR: no https://me:secret@index/simple' >&2; exit 1", "no https://***@index/simple"),
    ],
)
def test_a_failed_pip_is_a_reason_without_credentials(tmp_path, monkeypatch, script, reason):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(bundle, "_PIP_TIMEOUT_S", 0.5)
    assert reason in fetch(tmp_path)[0]


def test_an_upload_above_the_limit_is_rejected_with_the_largest_files(tree, write):
    for number in range(7):
        write(f"part{number}.txt", text="x" * 200_000 * number)
    selection = select_files(tree)
    bundle.check_size(selection, 5)
    with pytest.raises(UsageError) as error:
        bundle.check_size(selection, 4)
    assert "The 7 files in" in str(error.value)
    assert "have 4.2 MB: launcher.max_upload_size is 4 MB" in str(error.value)
    assert (
        "part6.txt (1.2 MB), part5.txt (1.0 MB), part4.txt (800.0 kB), part3.txt (600.0 kB), part2.txt (400.0 kB). Add"
        in str(error.value)
    )
    for help_ in ("launcher.exclude", ".gitignore", "launcher.inputs", "raise launcher.max_upload_size"):
        assert help_ in str(error.value)
