"""A source in its container: what is unpacked, and what is linked."""

import io
import tarfile

import pytest

from accel_cli.container import source
from accel_cli.container.problem import ContainerError


def archive(file, *members):
    with tarfile.open(file, "w:gz") as tar:
        for name, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            tar.addfile(member, io.BytesIO(b""))
    return file


@pytest.fixture(params=["of Python", "of ours"])
def check(request, monkeypatch):
    """Both ways to keep an archive in its folder: Pythons before 3.10.12 and 3.11.4 have none."""
    if request.param == "of ours":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


@pytest.mark.usefixtures("check")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "member",
    [
        ("../out", tarfile.REGTYPE, ""),
        ("a/../../out", tarfile.REGTYPE, ""),
        ("link", tarfile.SYMTYPE, "../out"),
        ("a/link", tarfile.SYMTYPE, "/etc/passwd"),
        ("hard", tarfile.LNKTYPE, "../out"),
        ("pipe", tarfile.FIFOTYPE, ""),
    ],
)
def test_what_would_leave_the_source_is_refused(tmp_path, member):
    with pytest.raises(ContainerError, match=r"s\.tar\.gz cannot be unpacked"):
        source.unpack(archive(tmp_path / "s.tar.gz", member), tmp_path / "code")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code", "s.tar.gz"]


@pytest.mark.usefixtures("check")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_links_within_the_source_stay(tmp_path):
    members = [("a", tarfile.DIRTYPE, ""), ("a/file", tarfile.REGTYPE, ""), ("b", tarfile.SYMTYPE, "a/file")]
    source.unpack(archive(tmp_path / "s.tar.gz", *members), tmp_path / "code")
    assert (tmp_path / "code" / "b").resolve() == tmp_path / "code" / "a" / "file"


def test_a_source_that_was_cut_off_is_refused(tmp_path):
    file = archive(tmp_path / "s.tar.gz", *[(f"file{n}", tarfile.REGTYPE, "") for n in range(50)])
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ContainerError, match="cannot be unpacked"):
        source.unpack(file, tmp_path / "code")


def test_a_linked_folder_keeps_what_the_source_has_in_it_and_a_file_of_the_platform_wins(tmp_path):
    cwd, kept = tmp_path / "code", tmp_path / "checkpoints"
    for file, text in (
        (cwd / "runs/a/new", "new"),
        (cwd / "runs/a/both", "shipped"),
        (kept / "a/both", "saved"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (cwd / "runs" / "link").symlink_to("a/new")
    source.link(cwd, "runs", kept, key="checkpoint_dir")
    assert (cwd / "runs").resolve() == kept
    assert {name: (kept / name).read_text() for name in ("a/new", "a/both", "link")} == {
        "a/new": "new",
        "a/both": "saved",
        "link": "new",
    }


def test_a_folder_that_is_not_there_yet_is_linked_too(tmp_path):
    (tmp_path / "code").mkdir()
    source.link(tmp_path / "code", "deep/out", tmp_path / "model", key="model_dir")
    (tmp_path / "code" / "deep" / "out" / "x").touch()
    assert (tmp_path / "model" / "x").exists()


@pytest.mark.parametrize("name", ["file", "/out", "../out", ".", "a/../../b"])
def test_what_is_no_folder_below_is_refused(tmp_path, name):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "file").touch()
    with pytest.raises(ContainerError, match="model_dir: "):
        source.link(tmp_path / "code", name, tmp_path / "model", key="model_dir")
    assert (tmp_path / "code" / "file").exists()
