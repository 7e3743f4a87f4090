"""The time from which the launcher counts a stall, and the limits before and after the first step."""

from types import SimpleNamespace

import pytest

from accel_cli.runner import stalls
from accel_cli.runner.stalls import StallWatch
from accel_cli.runs.run_dir import RankFolder

STARTUP_S = 100


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """A watch of two ranks with a timeout of 30 s, and a function that checks at a time; it returns what was recorded."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _: None, now=100.0)
    monkeypatch.setattr(stalls, "time", clock)
    folders = {rank: RankFolder(tmp_path / f"rank_{rank}") for rank in (0, 1)}
    for folder in folders.values():
        folder.path.mkdir()
    events = []
    beats = {}
    monkeypatch.setattr(stalls.Beat, "read", lambda file: beats.get(file.parent.name))
    stall_watch = StallWatch(folders, 30, lambda event, **_: events.append(event), startup_timeout=STARTUP_S)

    def check(seconds, **progress):
        clock.now = 100.0 + seconds
        if progress:
            beats["rank_0"] = SimpleNamespace(
                **{"steps": 0, "batches": 0, "location": "", "time": clock.now} | progress
            )
        return events, stall_watch.check()

    return folders, check


def test_a_stall_is_counted_from_the_begin_of_the_script_on_all_ranks(watch):
    folders, check = watch
    folders[0].stacks.touch()
    assert check(90) == ([], None)
    folders[1].stacks.touch()
    assert check(95) == ([], None)
    assert check(194) == ([], None)
    assert check(196) == (["stall"], (101, False, False))
    assert check(197) == (["stall"], None), "a stall is reported once"


def test_ranks_that_do_not_begin_their_script_are_a_stall_too(watch, capsys):
    _, check = watch
    assert check(99) == ([], None)
    assert check(101) == (["stall"], (101, False, False))
    assert "no process on this machine has made progress for 101 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("progress", "limit", "has_trained"),
    [
        ({}, STARTUP_S, False),
        ({"batches": 1}, STARTUP_S, False),
        ({"batches": 2}, 30, True),
        ({"steps": 1}, 30, True),
    ],
    ids=["an Accelerator", "the first batch", "the second batch", "a step"],
)
def test_the_limit_is_longer_until_a_step_or_a_second_batch(watch, progress, limit, has_trained):
    _, check = watch
    assert check(10, time=110.0, **progress) == ([], None)
    assert check(9 + limit) == ([], None)
    assert check(11 + limit) == (["stall"], (limit + 1, has_trained, True))


def test_the_limit_before_the_first_step_is_ten_timeouts_by_default(tmp_path):
    assert StallWatch({0: RankFolder(tmp_path)}, 30)._startup_timeout == 300
