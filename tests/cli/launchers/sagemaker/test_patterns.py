"""Patterns of files, beside git's own idea of them and Python's."""

import re
import subprocess
import warnings
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.launchers.sagemaker import patterns

ALPHABET = "ab.[]!*?-^\\&~|"


@pytest.mark.parametrize(
    ("pattern", "name", "means"),
    [
        ("*.csv", "a.csv", True),
        ("*.csv", "data/deep/a.csv", True),
        ("*.csv", "a.csv.gz", False),
        ("data", "data/a/b", True),
        ("data", "x/data/a", True),
        ("data", "data2/a", False),
        ("data/", "data/a", True),
        ("/data", "x/data/a", False),
        ("/data", "data/a", True),
        ("./data", "x/data/a", False),
        ("data/*.csv", "data/a.csv", True),
        ("data/*.csv", "x/data/a.csv", False),
        ("data/*.csv", "data/b/a.csv", False),
        ("data/**", "data/b/a.csv", True),
        ("data/**/a.csv", "data/a.csv", True),
        ("data/**/a.csv", "data/b/c/a.csv", True),
        ("**/c/a.csv", "b/c/a.csv", True),
        ("**", "a", True),
        ("a?c", "a/c", False),
        ("a[!b]c", "a/c", False),
        ("a[!b]c", "axc", True),
        ("A", "a", False),
        ("a\nb", "a\nb", True),
        ("*", "a\nb", True),
        ("weights.pt", "weights.pt", True),
    ],
)
def test_a_pattern_means_a_file(pattern, name, means):
    assert patterns.parsed(pattern).matches(name) is means


@pytest.mark.parametrize("text", ["", "/", ".", "..", "../data", "a/../b", "!a", "~/data", "[z-a]"])
def test_what_is_no_pattern_is_refused(text):
    with pytest.raises(ValueError, match="expected a pattern of files"):
        patterns.parsed(text)


@given(
    st.text(ALPHABET, min_size=1).filter(lambda text: text[0] != "!" and set(text) != {"."}),
    st.text(ALPHABET, min_size=1),
)
def test_a_pattern_without_a_slash_is_read_as_python_reads_it(pattern, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's own translation
        try:
            expected = fnmatchcase(name, pattern)
        except re.error:
            expected = None
    try:
        found = patterns.parsed(pattern).matches(name)
    except ValueError:
        found = None
    if found is not None and expected is not None:
        assert found == expected


def test_patterns_mean_what_they_mean_in_a_gitignore(tree, write, git):
    names = ["a.csv", "data/a.csv", "data/b/a.csv", "x/data/a.csv", "x/y/z.bin", "z.bin", "data2/q"]
    write(*names)
    git("init")
    for pattern in [
        "*.csv",
        "data",
        "data/",
        "/data",
        "data/*.csv",
        "data/**",
        "**/a.csv",
        "x/**/z.bin",
        "x",
        "?.bin",
    ]:
        (tree / ".git" / "info" / "exclude").write_text(pattern + "\n")
        said = subprocess.run(
            ["git", "ls-files", "--others", "--ignored", "--exclude-standard"],
            cwd=tree,
            check=True,
            capture_output=True,
            text=True,
        )
        assert set(said.stdout.split()) == {
            name for name in names if patterns.parsed(pattern).matches(name)
        }, pattern


@pytest.mark.parametrize(
    "name",
    [
        ".env",
        "conf/.env.local",
        "a.pem",
        "id_rsa",
        "id_ed25519.pub",
        ".aws/config",
        ".NETRC",
        "x/credentials.json",
        "prod.env",
        ".envrc",
        "conf/secrets.yaml",
        "service-account.json",
        "service_account_prod.json",
        "token.txt",
        "kaggle.json",
        "server.key",
        ".npmrc",
        ".pgpass",
        ".kube/config",
        ".docker/config.json",
    ],
)
def test_names_under_which_secrets_are_kept(name):
    assert patterns.may_be_secret(name)


@pytest.mark.parametrize(
    "name",
    ["env", "environment.yml", "a.pem.py", "aws/config", "grid_rsa", "tokens.py", "keys", "secrets.py"],
)
def test_names_that_are_like_those_of_secrets(name):
    assert not patterns.may_be_secret(name)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (".env", True),
        ("conf/.env", True),
        ("*.pem", True),
        (".aws/**", True),
        ("*", False),
        ("conf/**", False),
        ("*.json", False),
        (".e*", False),
    ],
)
def test_a_pattern_names_a_secret_or_only_happens_to_mean_it(pattern, named):
    assert patterns.parsed(pattern).names_a_secret is named
