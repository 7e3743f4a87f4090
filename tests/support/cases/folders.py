"""A source folder, and git in it, as fixtures."""

import subprocess

import pytest


@pytest.fixture
def tree(tmp_path):
    """An empty folder that is in no repository."""
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


@pytest.fixture
def write(tree):
    """Return a function that writes files of the given names and text into the folder."""

    def written(*names, text="x\n"):
        for name in names:
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return written


@pytest.fixture
def git(tree, monkeypatch):
    """Return a function that runs git in the folder, without the configuration of this user."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")

    def run(*args, below="."):
        options = [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "protocol.file.allow=always",
            "-c",
            "init.defaultBranch=main",
        ]
        subprocess.run(["git", *options, *args], cwd=tree / below, check=True, capture_output=True)

    return run
