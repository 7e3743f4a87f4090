"""The commit of a folder, without running git."""

import subprocess

import pytest

from accel_cli.runs.recorder import read_git_commit


@pytest.fixture
def git(tmp_path):
    def run(*args):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", *settings, *args]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    run("init", "--initial-branch", "main")
    return run


def test_the_commit_is_that_of_git_loose_packed_detached_and_in_a_worktree(git, tmp_path):
    assert read_git_commit(tmp_path) == ""
    git("commit", "--allow-empty", "-m", "first")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "deep").mkdir()
    assert read_git_commit(tmp_path / "deep") == f"{commit} (main)"
    git("pack-refs", "--all")
    assert read_git_commit(tmp_path) == f"{commit} (main)"
    git("worktree", "add", "-b", "side/x", "tree")
    assert read_git_commit(tmp_path / "tree") == f"{commit} (side/x)"
    git("checkout", "--detach")
    assert read_git_commit(tmp_path) == commit


def test_a_head_that_is_no_reference_is_not_followed(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/../../secret\n")
    assert read_git_commit(tmp_path) == ""
