"""accel in one archive, as `python -m zipapp` makes it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def archive(tmp_path):
    """Return an archive with both packages of accel."""
    for package in ("accel_cli", "accel_runtime"):
        shutil.copytree(
            ROOT / package, tmp_path / "app" / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    zipapp.create_archive(tmp_path / "app", tmp_path / "accel.pyz", main="accel_cli.__main__:main")
    return tmp_path / "accel.pyz"


@pytest.mark.usefixtures("home")
def test_accel_in_an_archive_reads_profiles_and_refuses_to_start_processes(archive, tmp_path):
    (tmp_path / "train.py").write_text("")

    def accel(*arguments):
        command = [sys.executable, archive, *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)

    assert accel("config", "get", "mixed_precision").stdout == "no\n"
    for count in ("1", "2"):
        result = accel("launch", "--cpu", "--nproc-per-node", count, "train.py")
        assert result.returncode == 2
        assert f"Cannot start processes: accel is in the archive {archive}" in result.stderr
