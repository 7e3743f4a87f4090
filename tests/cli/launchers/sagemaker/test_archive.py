"""The archive of a folder: the same bytes from the same files, everything in it, and never half of a file."""

import gzip
import hashlib
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.sagemaker import archive
from accel_cli.launchers.sagemaker.files import Chosen, File, chosen

PARTS = st.binary(min_size=1, max_size=20).filter(
    lambda part: not {0, 47} & set(part) and part not in {b".", b".."}
)
TREES = st.dictionaries(
    st.lists(PARTS, min_size=1, max_size=3).map(b"/".join), st.binary(max_size=700), max_size=8
)


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
    packed = archive.write(chosen(tree), tmp_path / "source.tar.gz")
    assert content(packed.path) == {
        "lib/run.sh": ("0o755", b"x\n"),
        "link": ("0o644", "lib/run.sh"),
        "train.py": ("0o644", b"print(1)\n"),
    }
    with tarfile.open(packed.path) as tar:
        assert {(head.mtime, head.uid, head.gid, head.uname, head.gname) for head in tar} == {
            (0, 0, 0, "", "")
        }
    assert (packed.files, packed.size) == (3, packed.path.stat().st_size)
    assert packed.sha256 == hashlib.sha256(gzip.decompress(packed.path.read_bytes())).hexdigest()


def test_the_same_files_make_the_same_bytes_wherever_and_whenever(tmp_path):
    made = []
    for folder in ("here", "there"):
        tree = tmp_path / folder
        tree.mkdir()
        for number in range(20) if folder == "here" else reversed(range(20)):
            (tree / f"{number}.py").write_text("x" * number)
            os.utime(tree / f"{number}.py", (number, len(made)))
            (tree / f"{number}.py").chmod(0o644 if made else 0o600)
        made.append(archive.write(chosen(tree), tmp_path / f"{folder}.tar.gz"))
    one, other = made
    assert one.path.read_bytes()[4:8] == bytes(4)  # the time in a head of gzip
    assert one.path.read_bytes() == other.path.read_bytes()
    assert one.sha256 == other.sha256


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
    found = Chosen(tree, tuple(File(os.fsdecode(name)) for name in sorted(files)))
    packed = archive.write(found, tmp_path_factory.mktemp("packed") / "a.tar.gz")
    out = tmp_path_factory.mktemp("out")
    with tarfile.open(packed.path) as tar:
        tar.extractall(out, filter="data")
    assert {name: (out / os.fsdecode(name)).read_bytes() for name in files} == {
        name: said[name] for name in files
    }
    assert archive.write(found, packed.path.with_name("b")).sha256 == packed.sha256


def test_other_programs_unpack_it_too(tree, write, tmp_path):
    names = ["train.py", os.fsdecode(b"caf\xe9.py"), "ü/" + "long" * 60, "/".join(["deep" * 10] * 6)]
    write(*names)
    packed = archive.write(chosen(tree), tmp_path / "a.tar.gz")
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xzf", packed.path, "-C", tmp_path / "out"], check=True)
    assert all((tmp_path / "out" / name).read_text() == "x\n" for name in names)


def test_a_container_without_a_locale_reads_the_same_names(tree, write, tmp_path):
    write(os.fsdecode(b"caf\xe9.py"), "ü.py")
    packed = archive.write(chosen(tree), tmp_path / "a.tar.gz")
    code = (
        "import os, sys, tarfile; print([os.fsencode(name) for name in tarfile.open(sys.argv[1]).getnames()])"
    )
    done = subprocess.run(
        ["python3", "-c", code, packed.path],
        env={"PATH": os.environ["PATH"], "LC_ALL": "POSIX"},
        check=True,
        capture_output=True,
    )
    assert done.stdout == b"[b'caf\\xe9.py', b'\\xc3\\xbc.py']\n"


@pytest.fixture
def disturbed(tree, write, monkeypatch):
    """A tree of which one file is changed right after its content was read, as often as is asked."""
    write("a.py", "log.txt", "z.py")

    def arrange(times, change):
        left, real = [times], archive._Content.read

        def read(self, size=-1, /):
            data = real(self, size)
            if left[0] and self._name == "log.txt":
                left[0] -= 1
                change(tree / "log.txt")
            return data

        monkeypatch.setattr(archive._Content, "read", read)
        return chosen(tree)

    return arrange


def longer(path):
    with path.open("a") as file:
        file.write("more\n")


def other(path):
    path.write_text("y\n")
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", [longer, other])
def test_a_file_that_changes_while_it_is_packed_is_packed_anew(disturbed, tmp_path, change):
    found = disturbed(1, change)
    packed = archive.write(found, tmp_path / "a.tar.gz")
    assert content(packed.path)["log.txt"][1] == (found.source / "log.txt").read_bytes()


@pytest.mark.parametrize("change", [longer, other])
def test_a_file_that_changes_all_the_time_is_named_and_nothing_is_left(disturbed, tmp_path, change):
    with pytest.raises(
        UsageError, match=r"log.txt in \S+ is written to while it is packed\. Wait .* launcher\.exclude"
    ):
        archive.write(disturbed(2, change), tmp_path / "a.tar.gz")
    assert not (tmp_path / "a.tar.gz").exists()


def test_a_file_that_is_cut_short_while_it_is_packed_is_packed_anew(tree, write, tmp_path, monkeypatch):
    write("a.py", text="x" * 10_000)
    real, done = archive._Content.status, []

    def status(self):
        found = real(self)
        if not done:
            done.append(1)
            (tree / "a.py").write_text("short")
        return found

    monkeypatch.setattr(archive._Content, "status", status)
    assert content(archive.write(chosen(tree), tmp_path / "a.tar.gz").path)["a.py"][1] == b"short"


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
    found = chosen(tree)
    become(tree / "a.py")
    with pytest.raises(UsageError, match=r"a\.py"):
        archive.write(found, tmp_path / "a.tar.gz")
    assert not (tmp_path / "a.tar.gz").exists()


def test_a_disk_that_is_full_is_said_and_nothing_is_left(tree, write, tmp_path):
    write("a.py", text="".join(map(str, range(100_000))))
    into = tmp_path / "a.tar.gz"
    into.symlink_to("/dev/full")
    with pytest.raises(AccelError, match=r"a\.tar\.gz cannot be written: No space left on device"):
        archive.write(chosen(tree), into)
    assert not into.is_symlink()
