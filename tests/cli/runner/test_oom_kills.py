"""Out-of-memory kills in the files of control groups, versions 1 and 2."""

import pytest

from accel_cli.runner.processes import OomKillCounter


@pytest.mark.parametrize(
    ("own_cgroup", "file"),
    [
        ("0::/job\n", "job/memory.events"),
        ("9:cpu:/\n4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
        ("0::/elsewhere\n", "memory.events"),
    ],
)
def test_an_oom_kill_is_read_from_the_control_group(tmp_path, own_cgroup, file):
    (tmp_path / "own").write_text(own_cgroup)
    counts = tmp_path / "groups" / file
    counts.parent.mkdir(parents=True)
    counts.write_text("oom 3\noom_kill 2\n")
    kills = OomKillCounter(membership=tmp_path / "own", cgroups=tmp_path / "groups")
    assert not kills.has_killed([2**22 + 1])
    counts.write_text("oom 4\noom_kill 3\n")
    assert kills.has_killed([2**22 + 1])


def test_unreadable_control_groups_report_no_oom_kill(tmp_path):
    assert not OomKillCounter(membership=tmp_path / "none", cgroups=tmp_path).has_killed([2**22 + 1])
