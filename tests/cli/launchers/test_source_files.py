"""Selection of source files: in and outside of a repository, with links, secrets and unreadable files."""

import os
import re
import shutil
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_cli.errors import UsageError
from accel_cli.launchers import source_files
from accel_cli.launchers.secret_files import is_secret_name
from accel_cli.launchers.source_files import select_files

NOBODY = 65534


def names(selection):
    return [file.name for file in selection.files]


def test_files_listed_by_git_are_selected(tree, write, git):
    write("train.py", "lib/a.py", "data/big.bin", "deleted.py", ".venv/bin/python")
    write(".gitignore", text="data/\n.venv/\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    (tree / "deleted.py").unlink()
    write("new.py", "lib/new.txt")
    selection = select_files(tree)
    assert names(selection) == [".gitignore", "lib/a.py", "lib/new.txt", "new.py", "train.py"]
    assert selection.notes == ()


PARTS = st.binary(min_size=1, max_size=12).filter(lambda part: not {0, 47} & set(part)).map(os.fsdecode)
NAMES = st.lists(PARTS.filter(lambda part: part not in {".", ".."}), min_size=1, max_size=3).map(
    lambda parts: "/".join(parts) + ".py"
)


def is_ordinary(name):
    unwanted = any(
        source_files.is_clutter(Path(part)) or part.lower() == ".gitignore" for part in name.split("/")
    )
    return not unwanted and not is_secret_name(name) and not name.endswith(".accelignore")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.sets(NAMES.filter(is_ordinary), max_size=6))
def test_git_and_the_fallback_select_the_same_files_without_ignore_rules(tmp_path_factory, git, said):
    tree = tmp_path_factory.mktemp("tree")
    there = set()
    for name in said:
        try:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes(b"")
        except OSError:  # a file where another needs a folder
            continue
        there.add(name)
    without = select_files(tree)
    git("init", below=tree)
    assert set(names(without)) == there
    assert names(select_files(tree)) == names(without)


def test_untracked_files_are_selected_except_caches_and_environments(tree, write, git):
    write("train.py", "__pycache__/train.pyc", "env3/pyvenv.cfg", "env3/lib/x.py", "wandb/run/log")
    git("init")
    assert names(select_files(tree)) == ["train.py"]


def test_tracked_files_are_selected_whatever_their_name(tree, write, git):
    write("wandb/setup.py", "train.py")
    git("init")
    git("add", ".")
    assert names(select_files(tree)) == ["train.py", "wandb/setup.py"]


@pytest.fixture
def submodule(tree, write, git, tmp_path):
    """A repository with another as a submodule."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "lib.py").write_text("")
    (library / "cache.bin").write_text("")
    (library / ".gitignore").write_text("*.bin\n")
    git("init", below=library)
    git("add", ".", below=library)
    git("commit", "-m", "x", below=library)
    write("train.py")
    git("init")
    git("submodule", "add", str(library), "libs/library")
    git("commit", "-am", "x")


def test_nested_repositories_are_selected_without_their_ignored_files(tree, write, git, submodule):
    write("libs/library/new.py", "libs/library/x.bin", "clone/a.py")
    git("init", below="clone")
    assert names(select_files(tree)) == [
        ".gitmodules", "clone/a.py", "libs/library/.gitignore", "libs/library/lib.py", "libs/library/new.py", "train.py",
    ]  # fmt: skip


def test_a_submodule_that_is_not_checked_out_is_reported(tree, git, submodule):
    git("submodule", "deinit", "-f", "--all")
    selection = select_files(tree)
    assert names(selection) == [".gitmodules", "train.py"]
    assert "submodule libs/library is not checked out" in selection.notes[0]
    assert "git submodule update --init" in selection.notes[0]


def test_source_files_except_clutter_are_selected_outside_of_a_repository(tree, write):
    write(
        "train.py",
        "data/x.yaml",
        "__pycache__/a.pyc",
        "b.pyc",
        ".venv/x",
        "my/pyvenv.cfg",
        "my/lib/a.py",
        "node_modules/a/b",
    )
    os.mkfifo(tree / "pipe")
    selection = select_files(tree)
    assert names(selection) == ["data/x.yaml", "train.py"]
    assert selection.notes == ()


def test_git_variables_of_another_repository_are_ignored(tree, write, git, monkeypatch, tmp_path):
    write("train.py", "x.bin", "job/a.py")
    write(".gitignore", text="*.bin\n")
    git("init")
    git("add", "train.py")
    (tmp_path / "other").mkdir()
    git("init", below=tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "nowhere"))
    assert names(select_files(tree)) == [".gitignore", "job/a.py", "train.py"]
    assert names(select_files(tree / "job")) == ["a.py"]


def test_an_ignored_source_folder_is_selected(tree, write, git):
    write("out/job/train.py", "out/job/lib/a.py", "out/job/__pycache__/a.pyc")
    write(".gitignore", text="out/\n")
    git("init")
    selection = select_files(tree / "out" / "job")
    assert names(selection) == ["lib/a.py", "train.py"]
    assert "git lists no files of" in selection.notes[0]


@pytest.mark.parametrize("repository", [True, False])
def test_include_and_exclude_override_other_rules(tree, write, git, repository):
    write("train.py", "data/a.csv", "data/b.bin", "data/deep/c.csv", "wandb/a.log", "tests/x.py")
    write(".gitignore", text="data/\n")
    if repository:
        git("init")
    selection = select_files(
        tree, ["data/**/*.csv", "wandb/*"], ["tests", "data/deep", *([] if repository else ["*.bin"])]
    )
    assert names(selection) == [".gitignore", "data/a.csv", "train.py", "wandb/a.log"]


@pytest.mark.parametrize("pattern", ["data/*.csv", "nothing", "link/*", "link/a"])
def test_an_include_pattern_without_matches_is_rejected(tree, write, tmp_path, pattern):
    write("train.py")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").write_text("")
    (tree / "link").symlink_to(tmp_path / "there")
    with pytest.raises(UsageError, match=r"launcher.include \S+ matches no file in"):
        select_files(tree, [pattern])


def test_an_invalid_pattern_is_rejected(tree):
    with pytest.raises(UsageError, match=r"Invalid pattern in launcher.exclude: bad character range"):
        select_files(tree, [], ["[z-a]"])


@pytest.mark.parametrize(
    "pattern",
    ["*.txt", "data", "data/", "/data", "./data", "data/*.txt", "data/**", "**/a.txt", "x/**/z.md", "?.md"],
)
def test_patterns_match_as_in_gitignore(tree, write, git, pattern):
    listed = ["a.txt", "data/a.txt", "data/b/a.txt", "x/data/a.txt", "x/y/z.md", "z.md", "data2/q.py"]
    write(*listed)
    excluded = {*listed} - {*names(select_files(tree, [], [pattern]))}
    included = names(select_files(tree, [pattern]))
    assert sorted(listed) == included
    git("init")
    (tree / ".git" / "info" / "exclude").write_text(f"{pattern.removeprefix('.')}\n")
    assert excluded == {*listed} - {*names(select_files(tree))}


def test_a_source_that_is_not_a_folder_is_rejected(tree, write):
    write("file")
    with pytest.raises(UsageError, match="Folder not found"):
        select_files(tree / "file")


@pytest.mark.parametrize("repository", [True, False])
def test_files_that_may_contain_secrets_are_selected_only_if_include_names_them(tree, write, git, repository):
    write("train.py", ".env", "conf/.env.prod", "conf/key.pem", ".aws/credentials", "credentials.json")
    if repository:
        git("init")
        git("add", "-f", ".")
    selection = select_files(tree, ["conf/**"])
    assert names(selection) == ["train.py"]
    assert selection.notes == (
        (
            "not sent, since they may hold secrets: .aws/credentials, .env, conf/.env.prod, conf/key.pem, credentials.json. "
            "Add those that the script needs to launcher.include"
        ),
    )
    assert names(select_files(tree, ["*.pem"])) == ["conf/key.pem", "train.py"]
    assert names(select_files(tree, [".env"], ["conf"])) == [".env", "train.py"]


@pytest.mark.parametrize("pattern", ["*", "conf/**", "*.json", ".e*"])
def test_a_wildcard_pattern_does_not_select_secrets(tree, write, pattern):
    write("conf/.env", "conf/kaggle.json", "conf/a.json", ".env")
    selection = select_files(tree, [pattern])
    assert names(selection) == ["conf/a.json"]
    assert names(select_files(tree, [pattern, "conf/.env"])) == ["conf/.env", "conf/a.json"]


def test_links_inside_of_the_folder_are_kept(tree, write):
    write("a/x.py", "b/y.py")
    (tree / "b" / "up").symlink_to("../a/x.py")
    (tree / "folder").symlink_to("a")
    (tree / "b" / "absolute").symlink_to(tree / "a")
    (tree / "round").symlink_to("../tree/a/x.py")
    links = {file.name: file.link for file in select_files(tree).files if file.link}
    assert links == {"b/up": "../a/x.py", "folder": "a", "b/absolute": "../a", "round": "a/x.py"}
    assert "folder/x.py" not in names(select_files(tree))


def test_links_out_of_the_folder_or_to_missing_files_are_all_reported_at_once(tree, write, tmp_path):
    write("train.py")
    (tmp_path / "data").mkdir()
    (tree / "data").symlink_to(tmp_path / "data")
    (tree / "gone").symlink_to("nothing")
    (tree / "itself").symlink_to("itself")
    with pytest.raises(UsageError, match=r"3 link\(s\) .* lead out of it or to missing files") as error:
        select_files(tree)
    for message in (
        f"data -> {tmp_path}/data",
        "gone -> nothing",
        "itself -> itself",
        "launcher.exclude",
        "launcher.inputs",
    ):
        assert message in str(error.value)
    assert names(select_files(tree, [], ["data", "gone", "itself"])) == ["train.py"]


def test_a_link_to_an_unselected_file_is_reported(tree, write):
    write("runs/1/x.py", "train.py")
    (tree / "last").symlink_to("runs/1")
    assert select_files(tree).notes == ()
    assert select_files(tree, [], ["runs"]).notes == (
        "links that will be broken, since their targets are not sent: last",
    )


def test_a_tracked_file_whose_folder_became_a_link_is_not_selected(tree, write, git):
    write("a/x.py", "b/x.py")
    git("init")
    git("add", ".")
    shutil.rmtree(tree / "a")
    (tree / "a").symlink_to("b")
    assert names(select_files(tree)) == ["a", "b/x.py"]


def test_names_that_are_not_valid_text_are_kept_and_shown_escaped(tree, git):
    name = os.fsdecode(b"caf\xe9\n.py")
    (tree / name).write_text("")
    for repository in (False, True):
        if repository:
            git("init")
        assert names(select_files(tree)) == [name]
        assert "'caf\\udce9\\n.py'" in list(source_files.describe_selection(select_files(tree)))[1]


@pytest.fixture
def unprivileged_user(tmp_path):
    """Run as another user if this one is root with its capabilities, so that file modes apply."""
    probe = tmp_path / "probe"
    probe.touch(mode=0)
    is_limited = not os.access(probe, os.R_OK)
    probe.unlink()
    if is_limited:
        yield
        return
    modes = [(path, path.stat().st_mode) for path in (tmp_path, *tmp_path.parents)]
    for path, mode in modes:
        path.chmod(mode | 0o055)
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)
    for path, mode in modes:
        path.chmod(mode)


def test_an_unreadable_folder_is_reported_and_can_be_excluded(tree, write, request):
    write("train.py", "private/x")
    (tree / "private").chmod(0)
    request.getfixturevalue("unprivileged_user")
    with pytest.raises(UsageError, match=r"Cannot read folder \S+/private: Permission denied"):
        select_files(tree)
    assert names(select_files(tree, [], ["private"])) == ["train.py"]


def test_the_summary_lists_selected_and_omitted_files(tree, write, git):
    write("train.py", "a.py", ".env", "big.bin")
    write("lib/large.py", text="x" * 1234)
    write(".gitignore", text="*.bin\n")
    git("init")
    assert list(source_files.describe_selection(select_files(tree, [], ["a.py"]))) == [
        f"3 files of {tree}, 1.2 kB: tracked by git, or source and configuration files that it does not ignore",
        "     1.2 kB  lib/large.py",
        "        6 B  .gitignore",
        "        2 B  train.py",
        "not sent, since they may hold secrets: .env",
    ]


def test_a_dry_run_lists_every_file_and_no_log_of_accel(tree, write):
    write(*(f"data/part{number}.txt" for number in range(20)))
    folder = "logs/20261128-001859-train-16143"
    write(f"{folder}/run.json", f"{folder}/attempt_0/rank_0/output.log", "20261128-001859-notes-1/a.txt")
    (tree / "link").symlink_to("data")
    lines = list(source_files.describe_selection(select_files(tree)))
    assert len(lines) == 23
    assert "        0 B  link -> data" in lines
    assert not [line for line in lines if "logs" in line]
    assert [line for line in lines if "notes" in line]


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *((name, True) for name in (
            ".env", "conf/.env.local", "prod.env", "a.pem", "id_rsa", ".aws/config", ".NETRC", "x/credentials.json",
            "conf/secrets.yaml", "service-account.json", "token.txt", "server.key", ".npmrc", ".docker/config.json",
        )),
        *((name, False) for name in ("env", "environment.yml", "a.pem.py", "aws/config", "tokens.py", "secrets.py")),
    ],
)  # fmt: skip
def test_files_that_may_contain_secrets_are_recognized_by_name(tree, write, name, is_secret):
    write(name)
    assert select_files(tree).secrets == ((name,) if is_secret else ())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        *((target, None) for target in ("train.py", "./train.py", "lib/../train.py", "link.py", "folder/a.py", "lib", ".")),
        ("ignored.py", "ignored.py is needed, but is not sent: git ignores it, it is a cache or empty, or launcher.exclude or .accelignore matches it"),
        ("data.bin", "data.bin is needed, but is not sent: it is neither source nor configuration. Add it to"),
        ("folder/y.csv", "folder/y.csv is needed, but is not sent: it is neither source nor configuration. Add it to"),
        ("folder/key.pem", "folder/key.pem is needed, but is not sent: it may hold secrets. Add it to"),
        ("large.json", "large.json is needed, but is not sent: it is larger than 20 MB. Add it to"),
        ("excluded.py", "Add it to launcher.include, or change launcher.exclude."),
        ("empty", "empty is needed, but is not sent: git ignores it, it is a cache or empty,"),
        ("key.pem", "key.pem is needed, but is not sent: it may hold secrets. Add it to launcher.include"),
    ],
)  # fmt: skip
def test_a_file_that_the_job_needs_must_be_selected(tree, write, git, target, reason):
    write(
        "train.py", "lib/a.py", "ignored.py", "excluded.py", "key.pem", "data.bin", "lib/y.csv", "lib/key.pem"
    )
    write_sparse(tree / "large.json", 20_000_001)
    write(".gitignore", text="ignored.py\n")
    (tree / "link.py").symlink_to("train.py")
    (tree / "folder").symlink_to("lib")
    (tree / "empty").mkdir()
    git("init")
    selection = select_files(tree, [], ["excluded.py"])
    if reason is None:
        source_files.check_selected(selection, target)
        return
    with pytest.raises(UsageError) as error:
        source_files.check_selected(selection, target)
    assert reason in str(error.value)


@pytest.mark.parametrize("has_git", [True, False])
def test_source_files_except_clutter_are_selected_if_git_fails(  # noqa: PLR0913, PLR0917
    tree, write, git, has_git, monkeypatch, tmp_path
):
    write("train.py", "x.md", "x.bin")
    write(".gitignore", text="x.*\n")
    git("init")
    if has_git:
        (tree / ".git" / "index").write_text("no index")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    selection = select_files(tree)
    assert names(selection) == [".gitignore", "train.py", "x.md"]
    assert re.search(
        "(index file smaller than expected|git is not found).*all source and configuration",
        selection.notes[0],
    )


SOURCE = [
    "train.py", "stubs.pyi", "demo.ipynb", "run.sh", "job.sbatch", "job.slurm", "conf/model.yaml", "a.yml", "a.json", "a.toml", "setup.cfg",
    "tox.ini", "requirements.txt", "README.md", "k.c", "k.cpp", "k.cu", "k.cuh", "k.h", "k.hip", "Dockerfile", "Dockerfile.gpu",
    "dockerfile-cpu", "Makefile", "LICENSE", "LICENSE-MIT", "requirements-dev", "chat.jinja", "chat_template.j2", "tokenizer.model",
    "tokenizer.json", "vocab.txt", "merges.txt", "cl100k.tiktoken", "bpe.codes", "a.proto", "main.tf", "CMakeLists.txt", "ops.CPP", "py.typed",
    ".gitignore", ".accelignore", ".dockerignore", ".flake8", ".python-version", ".env.example", "MANIFEST.in", "uv.lock", "Snakefile",
    "hostfile", "VERSION", "query.sql", "page.html", "deploy.service", "kernel.metal", "main.rs", "main.go", "main.jl", "Main.java", "index.ts",
]  # fmt: skip
DATA = [
    "train.csv", "train.tsv", "train.jsonl", "train.parquet", "train.pth", "train.arrow", "train.npy", "train.npz", "train.h5", "train.bin", "train.pt",
    "train.pth.tar", "train.ckpt", "train.safetensors", "train.gguf", "train.onnx", "train.pkl", "train.zip", "train.tar.gz", "image.png",
    "image.jpg", "image.svg", "sound.wav", "film.mp4", "train.tfrecord", "train.db", "train.sqlite", "output.log", "core", "a.out", "lib.so",
    "lib.a", "a.o", "a.whl", "a.pdf", "events.out.tfevents.1", "train.lmdb", "train.mdb", "train.feather", "weights", "part-00000",
]  # fmt: skip


@pytest.mark.parametrize("repository", [True, False])
def test_new_files_are_sent_if_they_are_source_or_configuration(tree, write, git, repository):
    if repository:
        git("init")
    write(*SOURCE, *DATA)
    selection = select_files(tree)
    assert names(selection) == sorted(SOURCE, key=os.fsencode)
    assert [file.name for file in selection.left_out] == sorted(DATA)
    assert names(select_files(tree, DATA)) == sorted(SOURCE + DATA, key=os.fsencode)


def test_tracked_files_are_sent_whatever_they_contain(tree, write, git):
    write(*DATA)
    git("init")
    git("add", "-f", ".")
    selection = select_files(tree)
    assert (names(selection), selection.left_out) == (sorted(DATA), ())


def test_a_script_without_an_ending_is_source(tree, write):
    write("bin/prepare", text="#!/usr/bin/env python\n")
    write("bin/data", text="#")
    (tree / "pipe").symlink_to("bin/prepare")
    assert names(select_files(tree)) == ["bin/prepare", "pipe"]


def write_sparse(path, size):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


LIMITS = (
    "Files that git does not track are sent if they are source or configuration of up to 20 MB, and 100 MB together. Add those that "
    "the script needs to launcher.include"
)


@pytest.mark.parametrize("repository", [True, False])
def test_what_is_left_out_is_listed_with_its_size(tree, write, git, repository):
    if repository:
        git("init")
    write("train.py", "labels.csv")
    write_sparse(tree / "data" / "train.bin", 2 * 10**9)
    write_sparse(tree / "large.json", 20_000_001)
    write_sparse(tree / "small.json", 20_000_000)
    selection = select_files(tree)
    assert names(selection) == ["small.json", "train.py"]
    assert selection.notes == (
        f"left out: data/train.bin (2.00 GB), large.json (20.0 MB), labels.csv (2 B). {LIMITS}",
    )
    assert list(source_files.describe_selection(selection))[-4:] == [
        f"left out: 3 files. {LIMITS}",
        "    2.00 GB  data/train.bin",
        "    20.0 MB  large.json",
        "        2 B  labels.csv",
    ]
    assert names(select_files(tree, ["data/*", "large.json"])) == [
        "data/train.bin", "large.json", "small.json", "train.py",
    ]  # fmt: skip
    assert select_files(tree, [], ["data", "*.json", "*.csv"]).notes == ()


def test_the_smallest_files_are_sent_if_all_are_too_large_together(tree, write):
    write("train.py")
    for number in range(7):
        write_sparse(tree / f"results/part{number}.json", 16_000_000 + number)
    selection = select_files(tree)
    assert names(selection) == [*(f"results/part{number}.json" for number in range(6)), "train.py"]
    assert selection.notes == (f"left out: results/part6.json (16.0 MB). {LIMITS}",)
    assert f"left out: 1 file. {LIMITS}" in source_files.describe_selection(selection)
    with pytest.raises(
        UsageError, match=r"it is one of the largest files, which have more than 100 MB together\."
    ):
        source_files.check_selected(selection, "results/part6.json")


def test_a_folder_with_many_files_that_are_left_out_is_shown_as_one(tree, write):
    write("train.py", *(f"images/{number // 50}/{number}.png" for number in range(200)))
    write(*(f"{letter}.csv" for letter in "abcdef"), *(f"arrays/{letter}.npy" for letter in "abc"))
    selection = select_files(tree)
    assert selection.notes == (
        (
            "left out: images/ (200 files, 400 B), a.csv (2 B), arrays/a.npy (2 B), arrays/b.npy (2 B), arrays/c.npy (2 B) and 5 more "
            f"(10 B). {LIMITS}"
        ),
    )
    lines = list(source_files.describe_selection(selection))
    assert lines[2] == f"left out: 209 files. {LIMITS}"
    assert lines[-1] == "      218 B  in 109 more files"


def test_secrets_are_listed_as_such_whatever_their_ending(tree, write):
    write("train.py", "key.p12", "id_rsa", "x.bin")
    selection = select_files(tree)
    assert selection.secrets == ("id_rsa", "key.p12")
    assert [file.name for file in selection.left_out] == ["x.bin"]


@pytest.mark.parametrize("repository", [True, False])
def test_each_rule_overrides_the_one_before(tree, write, git, repository):
    """What git lists, `.accelignore`, `include`, `exclude`."""
    write(
        "train.py",
        "tracked.bin",
        "draft.py",
        "kept.py",
        "notes.md",
        "data/a.bin",
        "data/b.bin",
        "data/c.bin",
        "data/d.bin",
        "ignored.py",
    )
    if repository:
        write(".gitignore", text="ignored.py\ndata/\n")
        git("init")
        git("add", "tracked.bin", "draft.py")
    ignored = "# a comment\n\ndraft.py\n*.md\ntracked.bin\nkept.py\n!kept.py\ndata/\n!data/b.bin\n!data/d.bin\n!ignored.py\n!nothing\n"
    write(".accelignore", text=ignored)
    expected = [
        ".accelignore",
        *([".gitignore"] if repository else []),
        "data/b.bin",
        "data/d.bin",
        "ignored.py",
        "kept.py",
        "train.py",
    ]
    selection = select_files(tree)
    assert (names(selection), selection.notes) == (expected, ())
    selection = select_files(
        tree, ["*.md", "data/a.bin", "data/d.bin", "draft.py"], ["data/d.bin", "kept.py", "ignored.py"]
    )
    assert names(selection) == [
        *expected[: 1 + repository],
        "data/a.bin",
        "data/b.bin",
        "draft.py",
        "notes.md",
        "train.py",
    ]


def test_an_ignore_file_cannot_send_secrets(tree, write):
    """It may come with a folder of somebody else."""
    write("train.py", ".env", ".aws/credentials")
    write(".accelignore", text="!.env\n!.aws/credentials\n!*\n")
    assert names(select_files(tree)) == [".accelignore", "train.py"]
    assert names(select_files(tree, [".env"])) == [".accelignore", ".env", "train.py"]


@pytest.mark.parametrize("pattern", ["!.git/config", "!.git", "!.git/", "!**/.git/*", "!sub/.git/**", "!*"])
def test_an_ignore_file_cannot_send_a_repository(tree, write, git, pattern):
    """Its configuration may hold a token: `extraheader = AUTHORIZATION`."""
    write("train.py", "sub/.git/config", "lib/.git")
    git("init")
    write(".accelignore", text=f"{pattern}\n")
    assert names(select_files(tree)) == [".accelignore", "train.py"]
    assert ".git/config" in names(select_files(tree, [".git/config"]))
    assert not [name for name in names(select_files(tree, ["**"])) if ".git" in name.split("/")]


def test_one_file_is_counted_as_one(tree, write):
    write("train.py", *(f"{number:03}.bin" for number in range(101)))
    lines = list(source_files.describe_selection(select_files(tree)))
    assert lines[0].startswith("1 file of ")
    assert lines[-1] == "        2 B  in 1 more file"


def test_an_ignored_folder_is_not_entered(tree, write, request):
    write("train.py", "private/x")
    write(".accelignore", text="private/\n")
    (tree / "private").chmod(0)
    request.getfixturevalue("unprivileged_user")
    assert names(select_files(tree)) == [".accelignore", "train.py"]


def test_an_invalid_or_special_ignore_file_is_reported_or_skipped(tree, write):
    write("train.py")
    write(".accelignore", text="[z-a]\n")
    with pytest.raises(UsageError, match=r"Invalid pattern in \S+/\.accelignore: bad character range"):
        select_files(tree)
    (tree / ".accelignore").unlink()
    os.mkfifo(tree / ".accelignore")
    assert names(select_files(tree)) == ["train.py"]


def test_the_example_of_the_documentation_selects_what_it_says(tree, write):
    page = (Path(__file__).parents[3] / "docs" / "files-of-a-job.md").read_text(encoding="utf-8")
    text = re.search(r"An example of `\.accelignore`:\n\n((?:    .*\n)+)", page)[1]
    write(".accelignore", text=textwrap.dedent(text))
    write(
        "train.py",
        "notebooks/a.ipynb",
        "results/a.json",
        "results/best.json",
        "data/train.bin",
        "data/vocab.bin",
    )
    assert names(select_files(tree)) == [".accelignore", "data/vocab.bin", "results/best.json", "train.py"]
