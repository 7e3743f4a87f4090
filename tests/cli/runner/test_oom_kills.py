"""Whether the kernel killed for memory: groups of both versions, as files."""

import pytest

from accel_cli.runner.processes import OomKillCounter


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/job\n", "job/memory.events"),
        ("9:cpu:/\n4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
        ("0::/elsewhere\n", "memory.events"),
    ],
)
def test_a_kill_that_the_group_counts_is_known(tmp_path, own, file):
    (tmp_path / "own").write_text(own)
    counts = tmp_path / "groups" / file
    counts.parent.mkdir(parents=True)
    counts.write_text("oom 3\noom_kill 2\n")
    kills = OomKillCounter(membership=tmp_path / "own", cgroups=tmp_path / "groups")
    assert not kills.was_killed(2**22 + 1)
    counts.write_text("oom 4\noom_kill 3\n")
    assert kills.was_killed(2**22 + 1)


def test_where_nothing_can_be_read_nothing_is_claimed(tmp_path):
    assert not OomKillCounter(membership=tmp_path / "none", cgroups=tmp_path).was_killed(2**22 + 1)
