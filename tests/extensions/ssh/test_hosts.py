"""Entries of hosts and hostfiles."""

import pytest

from accel_cli.errors import UsageError
from accel_cli.extensions.ssh.hosts import Host, check_hosts, parse_host, read_hostfile


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1", Host("node1")),
        ("ann@node-1.example.org slots=8", Host("ann@node-1.example.org", 8)),
        ("10.0.0.1 slots=4 max_slots=8", Host("10.0.0.1", 4)),
        ("node2 python=/opt/venv/bin/python slots=2", Host("node2", 2, "/opt/venv/bin/python")),
        ("[fd00::1]", Host("fd00::1")),
        ("ann@fe80::1%eth0", Host("ann@fe80::1%eth0")),
    ],
)
def test_an_entry_is_what_ssh_takes_with_its_slots(text, host):
    assert parse_host(text) == host


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-oProxyCommand=sh",
        "a:22",
        "a b",
        "a slots=0",
        "a slots=x",
        "a slots=2 slots=4",
        "a python=~/bin/python",
        "a python=/x python=/y",
        "@a",
        "a;b",
        "-l@a",
        "a/b",
        "a$(b)",
    ],
)
def test_an_entry_of_another_form_is_an_error(text):
    with pytest.raises(ValueError, match="expected"):
        parse_host(text)


def test_a_host_that_is_listed_twice_is_an_error():
    with pytest.raises(ValueError, match="a is listed twice"):
        check_hosts([Host("a", 2), Host("b"), Host("ann@A")])


def test_a_hostfile_has_an_entry_on_each_line_and_comments(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two\n\nnode1 slots=2  # fast\nnode2\n")
    assert read_hostfile(file) == (Host("node1", 2), Host("node2"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "Cannot read the hostfile .*No such file"),
        ("a\nb slots=two\n", "line 2: expected slots=N"),
        ("# none\n", "expected at least one host"),
        ("a\na\n", "a is listed twice"),
    ],
)
def test_an_invalid_hostfile_is_an_error_with_its_line(tmp_path, text, reason):
    file = tmp_path / "hosts"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=reason):
        read_hostfile(file)
