"""Loops in the style of published scripts run on two processes, die, and resume with the steps of the whole run."""

import re
from pathlib import Path

import pytest
from forked_launch import preload, run

TRIALS = Path(__file__).parent.parent / "trials"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def environment(home, monkeypatch):
    preload("transformers.models.bert.modeling_bert")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train(cwd, script, *options, code=0):
    """Return the lines of a run on two processes that tell a step, or the number of all."""
    done = run(
        "launch",
        "--quiet",
        "--cpu",
        "--ranks",
        "all",
        "--nproc-per-node",
        2,
        TRIALS / script,
        *options,
        cwd=cwd,
    )
    assert done.returncode == code, done.stderr
    found = re.findall(r"(?:rank \d )?step \d+ loss .*|\d+ steps, weights \w+", done.stdout)
    return sorted(found)


def from_step(lines, first):
    """Return the lines of the steps from `first` on, and the last line."""
    return [line for line in lines if "steps" in line or int(re.search(r"step (\d+)", line)[1]) >= first]


def test_a_loop_in_the_style_of_glue_resumes_with_the_steps_of_the_whole_run(cwd):
    whole = train(cwd, "glue_style.py", "--output_dir", "whole")
    assert len(whole) == 13  # six steps on two ranks, and the weights
    died = train(
        cwd, "glue_style.py", "--output_dir", "out", "--checkpointing_steps", 1, "--die_at_step", 5, code=9
    )
    assert set(died) <= set(whole)
    for step in (1, 2, 5):
        resumed = train(
            cwd, "glue_style.py", "--output_dir", "more", "--resume_from_checkpoint", f"out/step_{step}"
        )
        assert resumed == from_step(whole, step + 1)


def test_a_loop_in_the_style_of_glue_begins_the_next_epoch_after_the_last_batch(cwd):
    """Its evaluation draws random numbers, so that only the number of steps is that of the whole run."""
    options = ("glue_style.py", "--output_dir", "out")
    whole = train(cwd, *options, "--checkpointing_steps", 3)
    resumed = train(cwd, *options, "--resume_from_checkpoint", "out/step_3")
    assert len(resumed) == len(from_step(whole, 4))
    by_epoch = train(cwd, *options, "--checkpointing_steps", "epoch")
    assert by_epoch == whole
    assert train(cwd, *options, "--resume_from_checkpoint", "out/epoch_0") == from_step(whole, 4)
