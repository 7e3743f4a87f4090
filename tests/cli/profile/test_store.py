import json
import os

import pytest

from accel_cli.errors import UsageError
from accel_cli.profile import store
from accel_cli.profile.store import ProfileStore


@pytest.mark.parametrize(
    "name", ["a/b", "../x", "", ".hidden", "-x", "a b", "x" * 65, "ä", "pair.yaml", "pair.yml"]
)
def test_an_invalid_profile_name_is_rejected(tmp_path, name):
    with pytest.raises(UsageError, match="Invalid profile name"):
        ProfileStore(tmp_path, tmp_path).get_path(name)


def test_profiles_are_in_the_folder_of_the_variable_or_of_the_platform(tmp_path):
    assert ProfileStore.from_env({"ACCEL_HOME": str(tmp_path)}, tmp_path).home == tmp_path / "profiles"
    assert ProfileStore.from_env({}, tmp_path).home.parts[-2:] == ("accel", "profiles")


def test_the_first_line_of_a_written_file_refers_to_an_existing_schema(tmp_path):
    path = tmp_path / "new" / "x.yaml"
    store.write(path, store.render({"schema_version": 1}))
    pointer = path.read_text().splitlines()[0].partition("$schema=")[2]
    assert json.loads((path.parent / pointer).read_text())["title"] == "accel profile"


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    store.write(path, "schema_version: 1\n")

    def broken(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(UsageError, match=r"Cannot write .*x\.yaml: No space left on device"):
        store.write(path, "schema_version: 1\ndevice: cpu\n")
    assert path.read_text() == "schema_version: 1\n"
    assert sorted(item.name for item in tmp_path.iterdir()) == [".accel.schema.json", "x.yaml"]


def test_a_new_profile_is_private_and_a_project_file_is_not(tmp_path):
    for name, mode in (("x.yaml", 0o600), ("accel.yaml", 0o644), (".accel.schema.json", 0o644)):
        store.write(tmp_path / name, "schema_version: 1\n")
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_the_umask_applies_to_new_files_and_not_to_replaced_ones(tmp_path):
    before = os.umask(0o027)
    try:
        for name, mode in (("x.yaml", 0o600), ("accel.yaml", 0o640), (".accel.schema.json", 0o640)):
            store.write(tmp_path / name, "schema_version: 1\n")
            assert (tmp_path / name).stat().st_mode & 0o777 == mode
            (tmp_path / name).chmod(0o604)
            store.write(tmp_path / name, "schema_version: 1\n")
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)


def test_what_a_killed_write_has_left_is_replaced(tmp_path):
    (tmp_path / ".x.yaml.new").write_text("half")
    (tmp_path / "..accel.schema.json.new").write_text("half")
    store.write(tmp_path / "x.yaml", "schema_version: 1\n")
    assert sorted(item.name for item in tmp_path.iterdir()) == [".accel.schema.json", "x.yaml"]


def test_a_project_file_is_not_written_through_a_link_out_of_its_folder(tmp_path):
    (tmp_path / "project").mkdir()
    for name in ("victim", ".accel.schema.json"):
        (tmp_path / name).write_text("kept")
    link = tmp_path / "project" / "accel.yaml"
    link.symlink_to("../victim")
    with pytest.raises(UsageError, match=r"project/accel.yaml: it is a link out of its folder, to .*/victim"):
        store.write(link, "{}")
    link.unlink()
    (tmp_path / "project" / ".accel.schema.json").symlink_to("../.accel.schema.json")
    store.write(link, "{}")
    assert {(tmp_path / name).read_text() for name in ("victim", ".accel.schema.json")} == {"kept"}


def test_a_symbolic_link_and_the_file_mode_are_kept(tmp_path):
    real = tmp_path / "dotfiles" / "x.yaml"
    store.write(real, "schema_version: 1\n")
    real.chmod(0o600)
    link = tmp_path / "x.yaml"
    link.symlink_to(real)
    store.write(link, "schema_version: 1\ndevice: cpu\n")
    assert link.is_symlink()
    assert "device" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"a: [", "invalid YAML"),
        (b"schema_version: 99\n", "schema_version"),
    ],
)
def test_an_unreadable_file_is_reported(tmp_path, content, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        store.read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_instead_of_a_file_is_reported(tmp_path):
    with pytest.raises(UsageError, match=r"Cannot read .*: Is a directory"):
        store.read(tmp_path)


def test_a_file_instead_of_the_profile_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Cannot write "):
        store.write(tmp_path / "file" / "x.yaml", "")


def test_check_writable_detects_an_unwritable_file_before_writing(tmp_path, monkeypatch):
    store.check_writable(tmp_path / "a" / "b" / "x.yaml")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"Cannot write .*x\.yaml: Not a directory"):
        store.check_writable(tmp_path / "file" / "a" / "x.yaml")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match=r"Cannot write .*x\.yaml: Permission denied"):
        store.check_writable(tmp_path / "a" / "x.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: cpu", "x.yaml:1: schema_version: missing. Add this line: schema_version: 1"),
        ("device: cpu\nschema_version: '1'", "x.yaml:2: schema_version: expected a whole number above 0, got '1'"),
        ("schema_version: true", "expected a whole number above 0"),
        ("schema_version: 0", "expected a whole number above 0"),
    ],
)  # fmt: skip
def test_an_invalid_version_is_a_problem_and_the_rest_is_read(tmp_path, text, message):
    document = store.parse(text, tmp_path / "x.yaml")
    assert message in str(document.problems[0])
    assert document.data.get("device", "cpu") == "cpu"


def test_a_version_of_a_newer_accel_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="expected at most 1: the file was written by a newer accel, got 99"):
        store.parse("schema_version: 99", tmp_path / "x.yaml")


def test_a_file_keeps_its_line_ends(tmp_path):
    path = tmp_path / "accel.yaml"
    path.write_bytes(b"schema_version: 1\r\n# kept\r\nresume: true\r\n")
    store.write(path, store.read_text(path).replace("true", "false"))
    assert path.read_bytes() == b"schema_version: 1\r\n# kept\r\nresume: false\r\n"
