"""Ranks that end with code 0 while others run: their lines, and the note if another rank waits for them."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from accel_cli import worker
from accel_cli.runner import stalls
from accel_cli.runner.hang_report import Collective, GroupTrace
from accel_cli.runner.stalls import EarlyExit, ExitWatch, Stacks, format_exits, read_exit
from accel_cli.runs.run_dir import RankFolder


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("import sys\ndef main():\n    sys.exit(0)\nmain()\n", " at train.py:3 (main)"),
        ("exit()\n", " at train.py:1 (<module>)"),
        ("import argparse\nargparse.ArgumentParser().exit()\n", " at train.py:2 (<module>)"),
        ("pass\n", " at the end of its script"),
        ("import os\nos._exit(0)\n", " at train.py:2 (<module>)"),
        ("import ctypes\nctypes.CDLL(None)._exit(0)\n", ""),
    ],
)
def test_the_line_at_which_a_script_ended_is_that_of_the_user(tmp_path, source, place):
    rank = RankFolder(tmp_path / "rank_0")
    rank.path.mkdir()
    (tmp_path / "train.py").write_text(source)
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(rank.error)}
    process = subprocess.Popen(
        [sys.executable, worker.__file__, "script", "train.py"], cwd=tmp_path, env=environ
    )
    assert process.wait() == 0
    assert read_exit(rank, 0, "box", process.pid).place == place
    assert read_exit(rank, 0, "box", process.pid + 1).place == "", "a file of another process"


def test_a_script_that_fails_has_not_exited_early(tmp_path):
    rank = RankFolder(tmp_path / "rank_0")
    rank.path.mkdir()
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(rank.error)}
    command = [sys.executable, worker.__file__, "script", "train.py"]
    assert subprocess.run(command, cwd=tmp_path, env=environ, check=False).returncode == 3
    assert not rank.exit.exists()


def test_the_first_ranks_that_exited_are_named():
    exits = [EarlyExit(rank, "box", f" at a.py:{rank} (f)", -rank) for rank in range(4)]
    assert format_exits(exits) == (
        "rank 3 on box had exited before with code 0 at a.py:3 (f), rank 2 on box had exited before with code 0 at a.py:2 (f), "
        "and 2 more ranks"
    )
    assert format_exits([]) == ""


SCRIPT = 'File "/home/me/train.py", line 9 in <module>'
BARRIER = (
    'File "/x/site-packages/torch/distributed/distributed_c10d.py", line 5012 in barrier',
    'File "/x/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper',
    SCRIPT,
)
UPLOAD = ('File "/usr/lib/python3.11/ssl.py", line 9 in write', SCRIPT)
CHECKPOINT = ('File "/x/site-packages/torch/distributed/checkpoint/filesystem.py", line 9 in write', SCRIPT)


@pytest.fixture
def watch(tmp_path, monkeypatch, capsys):
    """Checks a watch at a time, with the stack and the groups that are waiting of rank 0; the note, if there is one."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    found = SimpleNamespace(exits=[EarlyExit(1, "box", " at train.py:7 (<module>)", 1.0)])
    monkeypatch.setattr(stalls, "time", clock)
    monkeypatch.setattr(stalls, "request_stacks", lambda folders: dict.fromkeys(folders, found.stacks))
    monkeypatch.setattr(stalls, "request_traces", lambda folders: dict.fromkeys(folders, found.traces))
    folders = {rank: RankFolder(tmp_path / f"rank_{rank}") for rank in (0, 1)}
    exit_watch = ExitWatch(folders, lambda: found.exits)

    def check(seconds, stack, pending=None, exits=None):
        clock.now, found.stacks = float(seconds), Stacks(stack)
        found.exits = found.exits if exits is None else exits
        group, number = pending or ((), None)
        found.traces = (
            {"0": GroupTrace(group, {number: Collective("gloo:barrier", (), False)})} if pending else {}
        )
        exit_watch.check()
        return capsys.readouterr().err

    return check


def test_a_rank_that_waits_for_one_that_has_exited_is_reported_once(watch):
    assert watch(29, BARRIER) == watch(31, BARRIER) == watch(60, BARRIER) == ""
    assert watch(62, BARRIER).startswith(
        "accel: rank 0 waits in barrier() at train.py:9 (<module>), and rank 1 on box had exited before with code 0 at train.py:7"
    )
    assert watch(200, BARRIER) == ""


@pytest.mark.parametrize("stack", [UPLOAD, CHECKPOINT])
def test_a_rank_that_works_after_others_have_ended_is_left_alone(watch, stack):
    assert "".join(watch(seconds, stack) for seconds in range(0, 7200, 10)) == ""


def test_collectives_that_complete_and_those_of_other_groups_are_no_wait_for_a_rank_that_has_exited(watch):
    assert "".join(watch(31 * step, BARRIER, ((0, 1), step)) for step in range(1, 9)) == ""
    assert "".join(watch(31 * step, BARRIER, ((0, 2), 9)) for step in range(9, 19)) == ""


def test_a_wait_while_all_ranks_run_is_left_alone(watch):
    assert "".join(watch(seconds, BARRIER, exits=[]) for seconds in range(0, 600, 10)) == ""
