"""The table of a run on screens of several sizes, from made-up heartbeats."""

import math
import os
import re
import select
import signal
import subprocess
import sys
import termios

import pytest
from support.cases import golden
from support.processes.children import AS_SESSION

from accel_cli.runs.heartbeats import Beat, Totals
from accel_cli.runs.live_view import build_help, build_view, format_sparkline, render_lines, shorten_location
from accel_cli.runs.screen import Controls
from accel_cli.runs.snapshot import MetricSeries, RankSnapshot, RunSnapshot, find_goal

STEPS = 400
LOSS = MetricSeries("train/loss", 0.1353, 390, [math.exp(-step / 20) for step in range(40)])
TEXT = MetricSeries("stage", "warmup", 0)


def beat(*, own=0.02, **changes):
    """Build the heartbeat of a rank that made 10 steps a second up to 1000 s, with this own time per step.

    It has waited 1 ms a step for data, and for other ranks the rest of a step; all ranks have trained on 64 samples and 8192 tokens a step.
    """

    def build_totals(step):
        busy = (own - 0.001) * step
        return Totals(
            step, 960 + step / 10, own * step, 0.001 * step, 0.2 * busy, 0.6 * busy, 0.1 * busy, (0.1 - own) * step, 64 * step, 8192 * step
        )  # fmt: skip

    times = [960 + step / 10 for step in range(1, STEPS + 1)]
    values = {
        "pid": 1, "steps": STEPS, "batches": STEPS, "collectives": 7, "is_inside": False, "time": times[-1],
        "collective": "gather at train.py:14 (<module>)", "started": 960.0, "started_epoch": 5000.0,
        "step_time": times[-1], "totals": build_totals(STEPS), "flops": 0, "peak_flops": 0, "epoch": 3, "epoch_batches": 120, "epoch_length": 1000,
        "epoch_first": 0, "epoch_started": 988.0, "first_batch": 960.5, "ended": None, "has_failed": False,
        "recent": tuple(times[-64:]),
        "history": tuple(map(build_totals, range(1, STEPS + 1))),
    }  # fmt: skip
    return Beat(**(values | changes))


def rank(number, heartbeat, **changes):
    values = {"now": 1000.2, "pid": 100 + number, "memory": 1_230_000_000 + number}
    return RankSnapshot(number, heartbeat, **(values | changes))


def snapshot(ranks, **changes):
    values = {
        "run": "20260102-030405-train-4711", "script": "train.py", "state": "running", "is_running": True,
        "time": 5040.0, "started": 4995.0, "exit_code": None, "attempt": 0, "world_size": len(ranks),
        "ranks": tuple(ranks), "metrics": (LOSS, TEXT),
    }  # fmt: skip
    return RunSnapshot(**(values | changes))


def draw(run, width, height=24, **options):
    lines = render_lines(build_view(run, width, height, **options), width, is_coloured=False)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    return "\n".join(lines) + "\n"


RUNS = {
    "one": snapshot([rank(0, beat())]),
    "two": snapshot([rank(0, beat(is_inside=True)), rank(1, beat(own=0.05))], attempt=1,
                    restart_reason="rank 1 on n0: ValueError: no data (its log: /tmp/runs/attempt_0/rank_1/output.log)"),
    "starting": snapshot([rank(0, None), rank(1, beat(collective="", steps=0, recent=(), step_time=0.0, history=()))], metrics=()),
    "sixteen": snapshot([rank(number, beat(own=0.02 + number / 2000)) for number in range(16)], world_size=64),
    "gpu": snapshot([rank(number, beat(), gpu_memory=61_000_000_000, gpu_percent=97) for number in range(2)]),
    "stalled": snapshot([rank(0, beat(is_inside=True), now=1034.0), rank(1, beat(), now=1034.0)]),
    "failed": snapshot(
        [rank(0, beat(), is_running=False), rank(1, beat(ended=1000.1, has_failed=True), is_running=False)],
        state="exit code 1", is_running=False, exit_code=1, failure="rank 1: ValueError: no more data\nhint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_table_fits_on_screens_of_80_and_40_columns(name):
    golden.check(f"top/{name}.txt", "\n".join(draw(RUNS[name], width) for width in (80, 40)))


def test_a_wide_screen_shows_all_columns_and_locations_as_they_are():
    golden.check("top/wide.txt", draw(RUNS["two"], 170))


def test_all_shows_every_rank_that_fits():
    assert draw(RUNS["sixteen"], 80, 24, controls=Controls(shows_all=True)).count("after :14") == 16
    small = draw(RUNS["sixteen"], 80, 10, controls=Controls(shows_all=True))
    assert "12 more ranks do not fit on the screen" in small


def test_folded_ranks_have_no_order_until_their_speeds_are_known():
    first_step = {"steps": 1, "recent": (960.0,), "history": ()}
    ranks = [rank(number, beat(**first_step)) for number in range(16)]
    text = draw(snapshot(ranks), 80)
    assert re.findall(r"^ *(\S.*?)  +1 ", text, re.MULTILINE) == ["0", "7", "15"]
    assert "16 ranks; accel top --all shows each" in text
    ended = [rank(number, beat(ended=1000.1)) for number in range(1, 16)]
    text = draw(snapshot([rank(0, beat()), *ended]), 80)
    assert re.findall(r"^ *(\S.*?)  +400 ", text, re.MULTILINE) == ["0", "1"]


@pytest.mark.parametrize("width", [10, 20, 60, 79, 81, 200])
def test_every_size_of_the_screen_is_kept(width):
    for run in RUNS.values():
        for height in (1, 2, 3, 5, 8, 12):
            draw(run, width, height)


def test_ascii_screens_get_ascii():
    for run in RUNS.values():
        assert draw(run, 40, is_ascii=True).isascii()


def test_colours_are_escape_sequences_that_change_no_text():
    body = build_view(RUNS["two"], 80)
    coloured = render_lines(body, 80, is_coloured=True)
    assert any("\x1b[" in line for line in coloured)
    assert not any("\x1b" in line for line in render_lines(body, 80, is_coloured=False))


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (40, "in gather at train.py:14 (train_epoch)"),
        (30, "in gather at train.py:14"),
        (22, "in gather train.py:14"),
        (16, "in train.py:14"),
        (11, "train.py:14"),
        (8, "…n.py:14"),
        (3, "…14"),
        (1, "4"),
    ],
)
def test_a_location_is_shortened_to_its_file_and_line(width, text):
    assert shorten_location("in gather at train.py:14 (train_epoch)", width) == text


@pytest.mark.parametrize(
    ("width", "text"),
    [(24, "after gather train.py:14"), (16, "after :14"), (17, "after train.py:14"), (8, "after :…")],
)
def test_a_rank_after_a_collective_does_not_look_as_if_it_were_in_its_line(width, text):
    assert shorten_location("after gather at train.py:14 (train_epoch)", width) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"state": "ended"}, "\x1b[32mended after 45 s"),
        ({"state": "unknown"}, "\x1b[33munknown after 45 s"),
        ({"state": "killed or crashed"}, "\x1b[31mkilled or crashed after 45 s"),
        ({"state": "exit code 0", "exit_code": 0}, "\x1b[32mexit code 0 after 45 s"),
        ({"state": "not ended, on n1", "is_elsewhere": True}, "\x1b[33mnot ended, on n1 for 45 s"),
    ],
)
def test_only_a_run_that_failed_is_red(changes, text):
    run = snapshot([rank(0, beat())], is_running=False, **changes)
    assert render_lines(build_view(run, 80), 80, is_coloured=True)[1].startswith(text)


def test_control_characters_of_names_values_and_notes_do_not_reach_the_terminal():
    run = snapshot(
        [rank(0, beat(collective="gather at \x1b[2Jtrain.py:14 (main)"))], script="a\x1b]0;title\x07.py", exit_code=1,
        metrics=(MetricSeries("lo\x1b[31mss", "war\x9bm\nup", 0),), failure="rank 0: \x1b[3Aerror", is_running=False,
    )  # fmt: skip
    for is_coloured in (False, True):
        lines = render_lines(build_view(run, 100), 100, is_coloured=is_coloured)
        plain = "".join(re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines)
        assert plain.isprintable()
        for text in ("a?]0;title.py", "lo?[31mss  war?m up", "rank 0: ?[3Aerror", "?[2Jtrain.py:14"):
            assert text in plain


WATCH = """
import os, time
from rich.console import Group
from rich.text import Text
from accel_cli.runs.screen import View, watch
while os.tcgetpgrp(0) != os.getpgrp(): time.sleep(0.01)
watch(lambda width, height, _: View(Group(Text(f"size {width}x{height}")), is_final=False), interval=0.05)
"""
SHELL = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=sys.stderr, process_group=0)
os.tcsetpgrp(0, child.pid)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
print(child.pid, flush=True)
while True:
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    print(status, flush=True)
    if not os.WIFSTOPPED(status): break
    sys.stdin.readline()
    os.tcsetpgrp(0, child.pid)
    os.kill(child.pid, signal.SIGCONT)
"""


@pytest.fixture
def shell():
    """A shell with a view in the foreground of a terminal of unknown size: the terminal, and the output of the shell."""
    local_end, remote_end = os.openpty()
    command = [*AS_SESSION, sys.executable, "-c", SHELL, WATCH]
    environ = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=remote_end, stdout=subprocess.PIPE, stderr=remote_end, env=environ
    ) as process:
        try:
            yield local_end, process.stdout
        finally:
            os.close(local_end)  # ends the view and the shell of a failed test
            os.close(remote_end)


def read_until(terminal, text):
    data = b""
    while text not in data:
        assert select.select([terminal], [], [], 60)[0], data
        data += os.read(terminal, 4096)
    return data


def is_restored(terminal):
    """Whether keys are echoed, and read as lines."""
    flags = termios.tcgetattr(terminal)[3]
    return bool(flags & termios.ICANON and flags & termios.ECHO)


LEAVE_SCREEN, SHOW_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


def test_ctrl_z_restores_the_terminal_and_the_view_returns_with_fg(shell):
    terminal, output = shell
    output.readline()
    read_until(terminal, b"size 80x24")
    assert not is_restored(terminal)
    os.write(terminal, b"\x1a")
    assert os.WIFSTOPPED(int(output.readline()))
    assert is_restored(terminal)
    assert SHOW_CURSOR in read_until(terminal, LEAVE_SCREEN)
    os.write(terminal, b"\n")
    read_until(terminal, b"size 80x24")
    os.write(terminal, b"q")
    assert output.readline() == b"0\n"
    assert is_restored(terminal)


def test_sigterm_ends_the_view_after_the_terminal_is_restored(shell):
    terminal, output = shell
    child = int(output.readline())
    read_until(terminal, b"size 80x24")
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(int(output.readline())) == 128 + signal.SIGTERM
    assert is_restored(terminal)
    assert SHOW_CURSOR in read_until(terminal, LEAVE_SCREEN)


def test_a_sparkline_has_a_block_for_each_of_the_last_values():
    assert format_sparkline([9, 0, 1, 2, 3], 4) == "▁▃▆█"
    assert format_sparkline([0, 1, 2, 3], 4, is_ascii=True) == "_-*@"
    assert format_sparkline([5, 5], 4) == "▁▁"
    assert format_sparkline([], 4) == ""
    assert format_sparkline([0.0, math.nan, math.inf, 1.0], 4) == "▁!!█"


def test_many_ranks_scroll_and_the_last_line_names_the_keys():
    controls = Controls(shows_all=True, has_keys=True, first=5)
    lines = draw(RUNS["sixteen"], 80, 12, controls=controls).splitlines()
    assert lines[-1].startswith("q quit  ? help  a fold")
    assert [line for line in lines if "rows 6 to" in line and "of 16 ranks" in line]
    assert next(line.split()[0] for line in lines if "after" in line).startswith("5")
    end = draw(RUNS["sixteen"], 80, 12, controls=Controls(shows_all=True, has_keys=True, first=1 << 20))
    assert "of 16 ranks" in end
    assert [line for line in end.splitlines() if line.strip().startswith("15")]


@pytest.mark.parametrize("width", [40, 80])
def test_the_help_has_each_key_and_column_and_scrolls(width):
    def show(first):
        return "\n".join(render_lines(build_help(width, 20, first=first), width, is_coloured=False))

    whole = "\n".join(show(first) for first in range(0, 60, 5))
    for word in ("quit", "scroll by a line", "own time", "location", "batches"):
        assert word in whole
    assert show(0).splitlines()[-1] == "? back   q quit"
    assert len(show(0).splitlines()) == 20


def test_the_end_of_the_run_is_foreseen_from_its_arguments():
    run = snapshot([rank(0, beat(epoch=1))], goal=find_goal(["--epochs", "4"], {}))
    assert re.search(r"ETA of the run [0-9:]+ \(--epochs 4\)", draw(run, 80))
