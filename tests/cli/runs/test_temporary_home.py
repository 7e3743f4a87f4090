"""The folder of runs if the home directory cannot be written, as in a container with any user id."""

import os
import tempfile

import pytest

from accel_cli.runs.run_dir import RunFolder, get_log_home


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A home that cannot be written; the folder for temporary files."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_a_home_that_cannot_be_written_is_replaced_by_a_private_temporary_folder(temporary):
    base = get_log_home({})
    assert base == temporary / f"accel-{os.getuid()}" / "runs"
    for _ in range(2):
        assert RunFolder.create(base, "train.py", {}).path.parent == base
    assert base.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_the_user_names_is_not_replaced(temporary, tmp_path):
    assert get_log_home({"ACCEL_HOME": str(tmp_path / "x")}) == tmp_path / "x" / "runs"
    assert get_log_home({}, str(tmp_path / "y")) == tmp_path / "y"


def test_a_temporary_folder_that_others_may_write_is_refused(temporary):
    base = get_log_home({})
    base.parent.mkdir()
    base.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="only this user may enter"):
        RunFolder.create(base, "train.py", {})


@pytest.mark.parametrize("home", ["/nonexistent/home", None])
def test_a_home_that_is_missing_is_no_relative_folder(temporary, monkeypatch, home):
    monkeypatch.undo()
    monkeypatch.setattr(os.path, "expanduser", lambda path: path if home is None else path.replace("~", home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert get_log_home({}).is_absolute()
