"""The time from which the launcher counts a stall."""

from types import SimpleNamespace

import pytest

from accel_cli.runner import stalls
from accel_cli.runner.stalls import StallWatch
from accel_cli.runs.run_dir import RankFolder


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """A watch of two ranks with a timeout of 30 s, and a function that checks at a time; it returns what was recorded."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _: None, now=100.0)
    monkeypatch.setattr(stalls, "time", clock)
    folders = {rank: RankFolder(tmp_path / f"rank_{rank}") for rank in (0, 1)}
    for folder in folders.values():
        folder.path.mkdir()
    events = []
    stall_watch = StallWatch(folders, 30, lambda event, **_: events.append(event))

    def check(seconds):
        clock.now = 100.0 + seconds
        stall_watch.check()
        return events

    return folders, check


def test_a_stall_is_counted_from_the_begin_of_the_script_on_all_ranks(watch):
    folders, check = watch
    folders[0].stacks.touch()
    assert check(200) == []
    folders[1].stacks.touch()
    assert check(210) == []
    assert check(239) == []
    assert check(241) == ["stall"]


def test_ranks_that_do_not_begin_their_script_are_a_stall_after_ten_timeouts(watch, capsys):
    _, check = watch
    assert check(299) == []
    assert check(301) == ["stall"]
    assert "no process on this machine has made progress for 301 s" in capsys.readouterr().err
