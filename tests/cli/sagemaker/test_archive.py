"""The archive of a folder holds every file as it was at one moment, and nothing about its owner."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_cli.errors import AccelError, UsageError
from accel_cli.sagemaker import bundle
from accel_cli.sagemaker.files import SelectedFile, Selection, select_files

PARTS = st.binary(min_size=1, max_size=20).filter(
    lambda part: not {0, 47} & set(part) and part not in {b".", b".."}
)
TREES = st.dictionaries(
    st.lists(PARTS, min_size=1, max_size=3).map(b"/".join), st.binary(max_size=700), max_size=8
)


def pack(selection, path):
    bundle.write_archive(selection, path)
    return path


def content(path):
    """What is in an archive: of each name, the mode, and the bytes or where it points."""
    with tarfile.open(path) as tar:
        return {
            head.name: (oct(head.mode), head.linkname if head.issym() else tar.extractfile(head).read())
            for head in tar
        }


def test_an_archive_holds_the_files_and_says_nothing_of_their_owner_and_time(tree, write, tmp_path):
    write("train.py", text="print(1)\n")
    write("lib/run.sh")
    (tree / "lib" / "run.sh").chmod(0o700)
    (tree / "train.py").chmod(0o600)
    (tree / "link").symlink_to("lib/run.sh")
    packed = pack(select_files(tree), tmp_path / "source.tar.gz")
    assert content(packed) == {
        "lib/run.sh": ("0o755", b"x\n"),
        "link": ("0o644", "lib/run.sh"),
        "train.py": ("0o644", b"print(1)\n"),
    }
    with tarfile.open(packed) as tar:
        assert {(head.mtime, head.uid, head.gid, head.uname, head.gname) for head in tar} == {
            (0, 0, 0, "", "")
        }


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=TREES)
def test_whatever_the_names_the_archive_unpacks_to_the_same_tree(tmp_path_factory, said):
    tree = tmp_path_factory.mktemp("tree")
    files = []
    for name, data in said.items():
        path = tree / os.fsdecode(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError:  # a file where another needs a folder
            continue
        files.append(name)
    found = Selection(tree, tuple(SelectedFile(os.fsdecode(name)) for name in sorted(files)))
    packed = pack(found, tmp_path_factory.mktemp("packed") / "a.tar.gz")
    out = tmp_path_factory.mktemp("out")
    with tarfile.open(packed) as tar:
        tar.extractall(out, filter="data")
    assert {name: (out / os.fsdecode(name)).read_bytes() for name in files} == {
        name: said[name] for name in files
    }


def test_other_programs_unpack_it_too(tree, write, tmp_path):
    names = ["train.py", os.fsdecode(b"caf\xe9.py"), "ü/" + "long" * 60, "/".join(["deep" * 10] * 6)]
    write(*names)
    packed = pack(select_files(tree), tmp_path / "a.tar.gz")
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xzf", packed, "-C", tmp_path / "out"], check=True)
    assert all((tmp_path / "out" / name).read_text() == "x\n" for name in names)


def test_a_container_without_a_locale_reads_the_same_names(tree, write, tmp_path):
    write(os.fsdecode(b"caf\xe9.py"), "ü.py")
    packed = pack(select_files(tree), tmp_path / "a.tar.gz")
    code = (
        "import os, sys, tarfile; print([os.fsencode(name) for name in tarfile.open(sys.argv[1]).getnames()])"
    )
    done = subprocess.run(
        ["python3", "-c", code, packed],
        env={"PATH": os.environ["PATH"], "LC_ALL": "POSIX"},
        check=True,
        capture_output=True,
    )
    assert done.stdout == b"[b'caf\\xe9.py', b'\\xc3\\xbc.py']\n"


@pytest.fixture
def disturbed(tree, write, monkeypatch):
    """A tree with a file that changes while it is read, as often as is asked."""
    write("a.py", "log.txt", "z.py")

    def arrange(times, change):
        left, real, log = [times], os.fstat, (tree / "log.txt").stat().st_ino

        def fstat(fd):
            status = real(fd)
            if left[0] and status.st_ino == log:
                left[0] -= 1
                change(tree / "log.txt")
            return status

        monkeypatch.setattr(bundle.os, "fstat", fstat)
        return select_files(tree)

    return arrange


def longer(path):
    with path.open("a") as file:
        file.write("more\n")


def shorter(path):
    path.write_text("")


def other(path):
    path.write_text("y\n")
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", [longer, shorter, other])
def test_a_file_that_changes_while_it_is_packed_is_packed_anew(disturbed, tmp_path, change):
    found = disturbed(1, change)
    packed = pack(found, tmp_path / "a.tar.gz")
    assert content(packed)["log.txt"][1] == (found.source / "log.txt").read_bytes()


@pytest.mark.parametrize("change", [longer, shorter, other])
def test_a_file_that_changes_all_the_time_is_named_and_nothing_is_left(disturbed, tmp_path, change):
    with pytest.raises(
        UsageError, match=r"Cannot pack log.txt in \S+: it keeps changing\. Wait .* launcher\.exclude"
    ):
        pack(disturbed(9, change), tmp_path / "a.tar.gz")
    assert not (tmp_path / "a.tar.gz").exists()


@pytest.mark.parametrize(
    "become",
    [
        Path.unlink,
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.symlink_to("b.py")),
    ],
)
def test_a_file_that_is_none_any_more_is_named_and_nothing_is_left(tree, write, tmp_path, become):
    write("a.py", "b.py")
    found = select_files(tree)
    become(tree / "a.py")
    with pytest.raises(UsageError, match=r"a\.py"):
        pack(found, tmp_path / "a.tar.gz")
    assert not (tmp_path / "a.tar.gz").exists()


def test_a_disk_that_is_full_is_said_and_nothing_is_left(tree, write, tmp_path):
    write("a.py", text="".join(map(str, range(100_000))))
    into = tmp_path / "a.tar.gz"
    into.symlink_to("/dev/full")
    with pytest.raises(AccelError, match=r"Cannot write .*a\.tar\.gz: No space left on device"):
        pack(select_files(tree), into)
    assert not into.is_symlink()
