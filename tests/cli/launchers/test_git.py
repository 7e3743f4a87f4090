"""Listing with git: a folder of somebody else runs nothing, whatever its repository contains."""

import hashlib
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from accel_cli.errors import UsageError
from accel_cli.extensions.migrate.files import find_files
from accel_cli.launchers import git
from accel_cli.launchers.source_files import select_files

# Every key of `git help --config` whose value is a command, a program or a folder of programs.
KEYS = (
    "alias.config", "alias.ls-files", "browser.x.cmd", "browser.x.path", "core.alternateRefsCommand", "core.askPass",
    "core.editor", "core.fsmonitor", "core.gitProxy", "core.pager", "core.sshCommand", "credential.helper",
    "diff.external", "diff.x.command", "diff.x.textconv", "difftool.x.cmd", "difftool.x.path", "filter.x.clean",
    "filter.x.process", "filter.x.smudge", "gc.recentObjectsHook", "gpg.program", "gpg.ssh.defaultKeyCommand", "gpg.ssh.program",
    "gpg.x509.program", "guitool.x.cmd", "hook.x.command", "imap.tunnel", "instaweb.httpd", "interactive.diffFilter", "man.x.cmd",
    "man.x.path", "merge.x.driver", "mergetool.x.cmd", "mergetool.x.path", "pager.config", "pager.ls-files",
    "receive.procReceiveRefs", "remote.origin.receivepack", "remote.origin.uploadpack", "remote.origin.vcs",
    "sendemail.ccCmd", "sendemail.smtpServer", "sendemail.tocmd", "sequence.editor", "submodule.x.update", "trailer.x.cmd",
    "trailer.x.command", "uploadpack.packObjectsHook", "web.browser",
)  # fmt: skip
PLACES = (
    "config",
    "include",
    "conditional include",
    "worktree",
    "separate",
    "linked worktree",
    "submodule",
    "bare",
)


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs git without the configuration of this user, and returns its output."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")

    def call(*words, cwd):
        options = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
        done = subprocess.run(["git", *options, *map(str, words)], cwd=cwd, check=True, capture_output=True)
        return done.stdout.decode()

    return call


@pytest.fixture
def folder(tmp_path, run):
    """A repository with a tracked, a new and an ignored script, and attributes that name a filter."""
    folder = tmp_path / "folder"
    fill_repository(folder, run)
    return folder


def fill_repository(folder, run):
    folder.mkdir()
    for name in ("tracked.py", "ignored.py", "tracked_and_ignored.py"):
        (folder / name).write_text("import torch\n")
    (folder / ".gitignore").write_text("*ignored.py\n")
    (folder / ".gitattributes").write_text("*.py filter=x diff=x merge=x\n")
    run("init", "-q", "-b", "main", cwd=folder)
    run("add", ".", cwd=folder)
    run("add", "-f", "tracked_and_ignored.py", cwd=folder)
    run("commit", "-q", "-m", "x", cwd=folder)
    (folder / "new.py").write_text("import torch\n")


@pytest.fixture
def trap(tmp_path):
    """A program that leaves a file, and the file."""
    program, proof = tmp_path / "trap", tmp_path / "proof"
    program.write_text(f"#!/bin/sh\necho run >> {proof}\n")
    program.chmod(0o755)
    return program, proof


def list_both(folder):
    """Return the names that `accel migrate` converts, and those that a job is sent."""
    return (
        sorted(os.path.relpath(path, folder) for path, _ in find_files([folder])),
        [file.name for file in select_files(folder).files if file.name.endswith(".py")],
    )


NAMES = ["new.py", "tracked.py", "tracked_and_ignored.py"]
EXPECTED = (NAMES, NAMES)


@pytest.mark.parametrize("key", KEYS)
def test_no_command_of_a_repositorys_configuration_is_run(folder, run, trap, key):
    run("config", key, trap[0], cwd=folder)
    os.utime(folder / "tracked.py", (1, 1))  # git would compare its contents
    assert list_both(folder) == EXPECTED
    assert not trap[1].exists()


@pytest.mark.parametrize("place", PLACES)
def test_no_file_of_a_repositorys_configuration_is_read_for_commands(folder, run, trap, tmp_path, place):
    config = folder / ".git" / "config"
    names = EXPECTED
    if place.endswith("include"):
        other = config.with_name("other")
        other.write_text(f"[core]\n\tfsmonitor = {trap[0]}\n")
        run(
            "config",
            "include.path" if place == "include" else f"includeIf.gitdir:{folder}/.path",
            other,
            cwd=folder,
        )
    elif place == "worktree":
        run("config", "extensions.worktreeConfig", "true", cwd=folder)
        run("config", "--worktree", "core.fsmonitor", trap[0], cwd=folder)
    elif place == "separate":
        run("config", "core.fsmonitor", trap[0], cwd=folder)
        run("init", "--separate-git-dir", tmp_path / "elsewhere", cwd=folder)
    elif place == "linked worktree":
        run("worktree", "add", "-q", tmp_path / "linked", cwd=folder)
        run("config", "core.fsmonitor", trap[0], cwd=folder)
        folder = tmp_path / "linked"
        (folder / "ignored.py").touch()
        (folder / "new.py").touch()
    elif place == "submodule":
        run("submodule", "--quiet", "add", str(folder), "sub", cwd=folder)
        run("config", "core.fsmonitor", trap[0], cwd=folder / "sub")
        every = [
            "new.py",
            "sub/tracked.py",
            "sub/tracked_and_ignored.py",
            "tracked.py",
            "tracked_and_ignored.py",
        ]
        names = (every, every)
    elif place == "bare":
        shutil.copytree(folder / ".git", folder, dirs_exist_ok=True)
        shutil.rmtree(folder / ".git")
        run("config", "--file", "config", "core.bare", "false", cwd=folder)
        run("config", "--file", "config", "core.worktree", folder, cwd=folder)
        run("config", "--file", "config", "core.fsmonitor", trap[0], cwd=folder)
        every = sorted(path.name for path in folder.glob("*.py"))
        names = (every, every)
    else:
        run("config", "core.fsmonitor", trap[0], cwd=folder)
    assert list_both(folder) == names
    assert not trap[1].exists()


def test_no_hook_of_a_repository_is_run(folder, trap):
    hooks = folder / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in (
        "post-index-change",
        "fsmonitor-watchman",
        "post-checkout",
        "pre-commit",
        "reference-transaction",
    ):
        shutil.copy(trap[0], hooks / name)
    assert list_both(folder) == EXPECTED
    assert not trap[1].exists()


def test_no_missing_object_is_fetched_by_a_command_of_the_repository(folder, run, trap):
    """A sparse index names a folder by an object; git would fetch it from the remote of a partial clone."""
    (folder / "sub").mkdir()
    (folder / "sub" / "a.py").touch()
    run("add", "sub", cwd=folder)
    run("commit", "-q", "-m", "y", cwd=folder)
    missing = run("rev-parse", "HEAD:sub", cwd=folder).strip()
    run("sparse-checkout", "init", "--cone", "--sparse-index", cwd=folder)
    assert list_both(folder) == EXPECTED
    (folder / ".git" / "objects" / missing[:2] / missing[2:]).unlink()
    for key, value in {
        "core.repositoryFormatVersion": "1", "extensions.partialClone": "origin", "remote.origin.promisor": "true",
        "remote.origin.url": folder, "remote.origin.uploadpack": trap[0],
    }.items():  # fmt: skip
        run("config", key, value, cwd=folder)
    assert list_both(folder) == EXPECTED
    assert not trap[1].exists()


def test_no_missing_object_is_fetched_from_a_bundle_of_the_repository(folder, run, trap):
    """Switching keys off does not suffice: `ls-files` of git 2.43 fetches the folder of a sparse index from `fetch.bundleURI`.

    No transport is used, so that none can be forbidden; after it, git collects garbage, and asks a program what is recent.
    """
    (folder / "sub").mkdir()
    (folder / "sub" / "a.py").touch()
    run("add", "sub", cwd=folder)
    run("commit", "-q", "-m", "y", cwd=folder)
    missing = run("rev-parse", "HEAD:sub", cwd=folder).strip()
    run("bundle", "create", folder / ".git" / "bundle", "main", cwd=folder)
    for number in range(2):
        (folder / ".git" / "content").write_text(str(number))
        name = run("hash-object", "-w", ".git/content", cwd=folder)
        (folder / ".git" / "names").write_text(name)
        with (folder / ".git" / "names").open() as names:
            command = ["git", "pack-objects", "-q", folder / ".git" / "objects" / "pack" / "pack"]
            subprocess.run(command, cwd=folder, stdin=names, check=True, capture_output=True)
    run("sparse-checkout", "init", "--cone", "--sparse-index", cwd=folder)
    (folder / ".git" / "objects" / missing[:2] / missing[2:]).unlink()
    for key, value in {
        "core.repositoryFormatVersion": "1", "extensions.partialClone": "origin", "remote.origin.promisor": "true",
        "remote.origin.url": folder / ".git", "fetch.bundleURI": folder / ".git" / "bundle", "gc.auto": "1",
        "gc.autoDetach": "false", "maintenance.autoDetach": "false", "gc.autoPackLimit": "1", "gc.recentObjectsHook": trap[0],
        "hook.x.command": trap[0], "hook.x.event": "reference-transaction",
    }.items():  # fmt: skip
        run("config", key, value, cwd=folder)
    files = [path for path in (folder / ".git").rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, (1_000_000_000, 1_000_000_000))  # garbage, if it is not reachable
    assert list_both(folder) == EXPECTED
    assert not trap[1].exists()
    assert [path for path in (folder / ".git").rglob("*") if path.is_file()] == files


def test_a_git_of_the_folder_is_not_run(folder, trap, monkeypatch):
    shutil.copy(trap[0], folder / "git")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f".{os.pathsep}{os.environ['PATH']}")
    selection = select_files(folder)
    assert not trap[1].exists()
    assert "git cannot list the files of" in selection.notes[0]


def test_settings_that_say_how_names_are_compared_are_honoured(folder, run):
    (folder / "rules").write_text("new.py\n")
    run("config", "core.excludesFile", "rules", cwd=folder)
    (folder / ".git" / "info").mkdir(exist_ok=True)
    assert list_both(folder) == (NAMES[1:], NAMES[1:])
    (folder / ".git" / "info" / "exclude").write_text("!new.py\nLOCAL.PY\n")
    assert list_both(folder) == EXPECTED
    (folder / "local.py").touch()
    assert "local.py" in list_both(folder)[0]
    run("config", "core.ignoreCase", "true", cwd=folder)
    assert list_both(folder) == EXPECTED


def test_rules_of_the_user_are_honoured(folder, monkeypatch, tmp_path):
    (tmp_path / "rules").write_text("new.py\n")
    (tmp_path / "gitconfig").write_text(
        f"[core]\n\texcludesFile = {tmp_path / 'rules'}\n\tfsmonitor = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    assert list_both(folder) == (NAMES[1:], NAMES[1:])


@pytest.mark.parametrize("kind", ["split", "sha256", "version 4", "untracked cache"])
def test_every_format_of_the_index_is_read(folder, run, kind):
    if kind == "split":
        run("update-index", "--split-index", cwd=folder)
        run("rm", "-q", "--cached", "tracked.py", cwd=folder)
        run("add", "tracked.py", cwd=folder)
    elif kind == "sha256":
        shutil.rmtree(folder / ".git")
        run("init", "-q", "--object-format=sha256", cwd=folder)
        run("add", "-f", "tracked.py", "tracked_and_ignored.py", cwd=folder)
    elif kind == "version 4":
        run("update-index", "--index-version", "4", cwd=folder)
    else:
        run("update-index", "--force-untracked-cache", cwd=folder)
        run("status", cwd=folder)
    assert list_both(folder) == EXPECTED


def write_index(folder, *names):
    """Write an index of names that git would refuse."""
    body = struct.pack(">4sII", b"DIRC", 2, len(names))
    for name in sorted(os.fsencode(name) for name in names):
        entry = struct.pack(">10I20sH", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, 0, bytes(20), len(name)) + name
        body += entry + b"\0" * (8 - len(entry) % 8)
    (folder / ".git" / "index").write_bytes(body + hashlib.sha1(body, usedforsecurity=False).digest())


def test_names_of_a_forged_index_do_not_leave_the_folder(folder, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a.txt").write_text("private")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / ".gitignore").write_text("link\n")
    write_index(
        folder, "../outside/a.txt", str(tmp_path / "outside" / "a.txt"), "link/a.txt", ".git/config", ".GIT/config", ".",
        "./tracked.py", "tracked.py",
    )  # fmt: skip
    assert [file.name for file in select_files(folder).files] == [
        ".gitattributes", ".gitignore", "ignored.py", "new.py", "tracked.py", "tracked_and_ignored.py",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [".gitignore", ".git/info/exclude", ".git/index", ".git/config", ".git"])
def test_a_pipe_in_place_of_a_file_of_git_does_not_hang(folder, monkeypatch, name):
    monkeypatch.setattr(git, "_TIMEOUT_S", 0.3)
    path = folder / name
    if name == ".git":
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    if name == ".gitignore":
        with pytest.raises(
            UsageError, match=r"git does not end within 0\.3 s\. Remove pipes named \.gitignore"
        ):
            select_files(folder)
    else:
        select_files(folder)


@pytest.mark.parametrize("text", ["nonsense", "gitdir: nowhere", "gitdir: \0", "gitdir: " + "x" * 5000, ""])
def test_a_broken_link_to_a_repository_is_reported(folder, text):
    shutil.rmtree(folder / ".git")
    (folder / ".git").write_text(text)
    assert f"{folder}/.git is not a repository" in select_files(folder).notes[0]
    assert [path.name for path, _ in find_files([folder])] == sorted(
        path.name for path in Path(folder).glob("*.py")
    )


def test_a_repository_of_another_owner_is_listed(folder, monkeypatch):
    """It needs no entry in `safe.directory`, since nothing of it is trusted."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert list_both(folder) == EXPECTED
