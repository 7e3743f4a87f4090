"""Goodput: the division of the wall time of a run, for recorded attempts of known times and for a real run."""

import json
import os
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes.commands import run_accel
from support.runs.run_folders import START, RunWriter, write_beat

from accel_cli.runner import agent
from accel_cli.runner.agent import ElasticAgent
from accel_cli.runs.goodput import CAUSES, Goodput, measure_goodput
from accel_cli.runs.heartbeats import Totals
from accel_cli.runs.run_dir import RunFolder
from accel_runtime.environment import settings as env


def write_attempt(  # noqa: PLR0913
    writer, number, first, last, *, parts=(0.1, 0.3, 0.4, 0.1, 0.05), saves=(), loads=()
):
    """Write an attempt with a step a second from `first` to `last`, in seconds since the start of the run.

    Args:
        writer: The run.
        number: The attempt.
        first: The end of its first step.
        last: The end of its last step.
        parts: Seconds of a step: data, forward, backward, update, wait.
        saves: The end and the seconds of each checkpoint that was saved, and its path.
        loads: The end and the path of each that was loaded.
    """
    data, forward, backward, update, wait = parts
    history = [
        Totals(
            step + 1,
            first + step,
            step * (1 - wait),
            step * data,
            step * forward,
            step * backward,
            step * update,
            step * wait,
            0,
            0,
        )
        for step in range(last - first + 1)
    ]
    folder = f"attempt_{number}/rank_0"
    write_beat(writer.path / folder / env.BEAT, history, pid=os.getpid())
    records = [{"time": at, "kind": "save", "seconds": seconds, "path": path} for at, seconds, path in saves]
    records += [{"time": at, "kind": "load", "seconds": 0.1, "path": path} for at, path in loads]
    writer.lines(f"{folder}/{env.CHECKPOINTS}", records)


def measure(writer, now, *, is_kept=True):
    return measure_goodput(RunFolder(writer.path), START, START + now, is_kept=is_kept)


@pytest.fixture
def writer(tmp_path):
    return RunWriter(tmp_path)


def approx(values):
    return pytest.approx(values, abs=0.02)


def test_a_run_is_divided_into_its_start_its_steps_and_its_end(writer):
    write_attempt(writer, 0, 10, 90, saves=[(50.0, 4.0, "a/0"), (95.0, 2.0, "a/1")])
    goodput = measure(writer, 100)
    # 80 steps: 0.85 s of each are computed or waited for, 0.1 s are data.
    assert goodput.productive == approx(68.0)
    assert goodput.causes == approx(
        {
            "start": 10.0,
            "restarts": 0.0,
            "lost_steps": 0.0,
            "saves": 6.0,
            "data": 8.0,
            "between_steps": 0.0,
            "end": 8.0,
        }
    )
    assert goodput.format() == "goodput 68% (start 10 s, end 8 s, data 8 s)"


def test_steps_after_the_checkpoint_that_a_restart_loads_are_lost(writer):
    write_attempt(writer, 0, 10, 40, saves=[(20.0, 0.0, "/x/a/0"), (30.0, 0.0, "/x/a/1")])
    # The newest is damaged, and the path is relative.
    write_attempt(writer, 1, 60, 80, loads=[(55.0, "a/0")])
    goodput = measure(writer, 80)
    assert goodput.causes["lost_steps"] == approx(20.0)
    assert goodput.causes["restarts"] == approx(20.0)
    assert goodput.productive == approx((10 + 20) * 0.85)


def test_a_restart_without_a_checkpoint_loses_all_steps(writer):
    write_attempt(writer, 0, 10, 40)
    write_attempt(writer, 1, 50, 60, saves=[(55.0, 1.0, "a/0")])
    goodput = measure(writer, 60)
    assert goodput.causes["lost_steps"] == approx(30.0)


def test_a_checkpoint_of_an_attempt_before_the_last_loses_all_of_the_one_between(writer):
    write_attempt(writer, 0, 10, 20, saves=[(20.0, 0.0, "a/0")])
    write_attempt(writer, 1, 30, 40, loads=[(29.0, "a/0")])
    write_attempt(writer, 2, 50, 60, loads=[(49.0, "a/0")])
    assert measure(writer, 60).causes["lost_steps"] == approx(10.0)


def test_a_failed_run_keeps_what_it_saved(writer):
    write_attempt(writer, 0, 10, 40, saves=[(30.0, 0.0, "a/0")])
    assert measure(writer, 40, is_kept=False).causes["lost_steps"] == approx(10.0)
    assert measure(writer, 40, is_kept=True).causes["lost_steps"] == 0


@pytest.mark.parametrize("failed", [True, False])
def test_nothing_is_claimed_of_checkpoints_that_are_not_seen(writer, failed):
    write_attempt(writer, 0, 10, 40)
    if not failed:
        write_attempt(writer, 1, 60, 80)
    assert measure(writer, 80, is_kept=not failed) is None


def test_a_step_whose_backward_pass_is_not_seen_counts_as_a_whole(writer):
    write_attempt(writer, 0, 10, 90, parts=(0.1, 0.0, 0.0, 0.0, 0.05))
    assert measure(writer, 100).productive == approx(72.0)


def test_without_a_step_nothing_is_known(writer):
    assert measure(writer, 10) is None


@given(
    times=st.lists(st.integers(1, 30), min_size=2, max_size=8),
    save_after=st.lists(st.integers(0, 20), max_size=4),
    parts=st.tuples(*[st.floats(0, 0.5)] * 5),
    is_kept=st.booleans(),
)
def test_the_parts_of_a_run_add_up_to_its_wall_time(tmp_path_factory, times, save_after, parts, is_kept):
    writer = RunWriter(tmp_path_factory.mktemp("run"))
    bounds = [sum(times[: index + 1]) for index in range(len(times))]
    attempts, has_saves = [*pairwise(bounds)][::2], False
    for number, (first, last) in enumerate(attempts):
        saves = [
            (float(first + after), 0.5, f"a/{number}-{after}")
            for after in save_after
            if first + after <= last
        ]
        has_saves = has_saves or bool(saves)
        loads = [(first - 0.5, f"a/{number - 1}-{save_after[0]}")] if number and save_after else []
        write_attempt(writer, number, first, last, parts=parts, saves=saves, loads=loads)
    goodput = measure(writer, bounds[-1] + 5, is_kept=is_kept)
    assert (goodput is None) == (not has_saves and (len(attempts) > 1 or not is_kept))
    if goodput is None:
        return
    assert goodput.causes.keys() == CAUSES.keys()
    assert min(goodput.productive, *goodput.causes.values()) >= 0
    assert goodput.productive + sum(goodput.causes.values()) == pytest.approx(goodput.wall)


@pytest.mark.parametrize(
    ("seconds", "is_leading", "shown"),
    [(120, True, "goodput 57% (end 30 s, start 10 s, data 8 s)"), (120, False, ""), (59, True, "")],
)
def test_the_closing_line_of_the_first_node_shows_the_goodput_of_a_run_of_a_minute(
    tmp_path, monkeypatch, seconds, is_leading, shown
):
    writer = RunWriter(tmp_path)
    write_attempt(writer, 0, 10, 90)
    monkeypatch.setattr(agent.time, "time", lambda: START + seconds)
    context = SimpleNamespace(
        progress_sinks=SimpleNamespace(is_leading=is_leading), folder=RunFolder(writer.path)
    )
    assert ElasticAgent._describe_goodput(SimpleNamespace(_run_context=context), 0) == shown


def test_only_the_largest_causes_are_shown():
    goodput = Goodput(100.0, 50.0, {"start": 20.0, "saves": 15.0, "data": 9.0, "end": 5.5, "lost_steps": 0.5})
    assert goodput.format() == "goodput 50% (start 20 s, saves 15 s, data 9 s)"


SCRIPT = """
import os, sys, time
import torch
from accel_runtime import Accelerator, ProjectConfiguration
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration("p", automatic_checkpoint_naming=True))
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
accelerator.resume()
for step in range(1, 41):
    loss = model(torch.ones(1, 1)).sum()
    time.sleep(0.1)
    accelerator.backward(loss)
    optimizer.step()
    if is_first and step == 20:
        accelerator.save_state()
    if is_first and step == 40:
        sys.exit(3)
"""


@pytest.mark.slow
def test_a_run_that_restarts_shows_its_lost_steps_in_the_closing_line(script, home):
    script(SCRIPT)
    done = run_accel(
        "launch", "--no-profile", "--cpu", "--nproc-per-node", 2, "--max-restarts", 1, "train.py"
    )
    assert done.returncode == 0, done.stderr
    (folder,) = home.glob("runs/*-train-*")
    record = json.loads((folder / "run.json").read_text())
    goodput = measure_goodput(RunFolder(folder), record["started"], record["ended"], is_kept=True)
    # 20 steps of at least 0.1 s after the checkpoint, and 20 and 40 that were kept.
    assert goodput.causes["lost_steps"] >= 1.9
    assert goodput.productive >= 5.8
    assert goodput.productive + sum(goodput.causes.values()) == pytest.approx(goodput.wall)
