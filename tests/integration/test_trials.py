"""Loops in the style of published scripts run on two processes, die, and resume with the steps of the whole run."""

import re
from pathlib import Path

import pytest
from support.processes.commands import preload, run_accel

TRIALS = Path(__file__).parent.parent / "trials"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def environment(home, monkeypatch):
    preload("transformers.models.bert.modeling_bert")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train(cwd, script, *options, code=0, processes=2):
    """Return the lines of a run with a step or the number of steps."""
    launch = ("launch", "--quiet", "--cpu", "--set", "launcher.kind=torchrun", "--ranks", "all")
    result = run_accel(*launch, "--nproc-per-node", processes, TRIALS / script, *options, cwd=cwd)
    assert result.returncode == code, result.stderr
    matches = re.findall(r"(?:rank \d )?step \d+ (?:loss|images) .*|\d+ steps, weights \w+", result.stdout)
    return sorted(matches)


def from_step(lines, first):
    """Return the lines of the steps from `first` on, and the last line."""
    return [line for line in lines if "steps" in line or int(re.search(r"step (\d+)", line)[1]) >= first]


def test_a_loop_in_the_style_of_glue_resumes_with_the_steps_of_the_whole_run(cwd):
    uninterrupted = train(cwd, "glue_style.py", "--output_dir", "whole")
    assert len(uninterrupted) == 13  # six steps on two ranks, and the weights
    died = train(
        cwd, "glue_style.py", "--output_dir", "out", "--checkpointing_steps", 1, "--die_at_step", 5, code=9
    )
    assert set(died) <= set(uninterrupted)
    for step in (2, 5):
        resumed = train(
            cwd, "glue_style.py", "--output_dir", "more", "--resume_from_checkpoint", f"out/step_{step}"
        )
        assert resumed == from_step(uninterrupted, step + 1)


@pytest.mark.full
def test_a_loop_in_the_style_of_glue_begins_the_next_epoch_after_the_last_batch(cwd):
    """The evaluation draws random numbers, so only the number of steps equals that of the whole run."""
    options = ("glue_style.py", "--output_dir", "out")
    uninterrupted = train(cwd, *options, "--checkpointing_steps", 3)
    resumed = train(cwd, *options, "--resume_from_checkpoint", "out/step_3")
    assert len(resumed) == len(from_step(uninterrupted, 4))
    by_epoch = train(cwd, *options, "--checkpointing_steps", "epoch")
    assert by_epoch == uninterrupted
    assert train(cwd, *options, "--resume_from_checkpoint", "out/epoch_0") == from_step(uninterrupted, 4)


@pytest.mark.full
def test_a_loop_in_the_style_of_diffusion_models_resumes_exactly_on_one_process(cwd):
    """The script saves in hooks, draws noise and flips, and skips batches itself."""
    script = ("diffusion_style.py", "--num_train_epochs", 2)
    uninterrupted = train(cwd, *script, "--output_dir", "whole", processes=1)
    died = (*script, "--output_dir", "out", "--checkpointing_steps", 5)
    train(cwd, *died, "--die_at_step", 17, code=9, processes=1)
    for checkpoint, first in (("latest", 16), ("checkpoint-10", 11), ("checkpoint-5", 6)):
        resumed = train(
            cwd, *script, "--output_dir", "out", "--resume_from_checkpoint", checkpoint, processes=1
        )
        assert resumed == from_step(uninterrupted, first)


@pytest.mark.full
def test_a_loop_whose_main_process_saves_alone_resumes_with_the_images_of_the_whole_run(cwd):
    """The noise of each process is drawn again, so the weights differ; five steps are an epoch."""
    script = ("diffusion_style.py", "--output_dir", "out", "--num_train_epochs", 3)
    uninterrupted = train(cwd, *script)
    saved = (*script, "--checkpointing_steps", 2, "--checkpoints_total_limit", 3)
    train(cwd, *saved, "--die_at_step", 11, code=9)
    assert sorted(path.name for path in (cwd / "out").glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-6",
        "checkpoint-8",
    ]
    for checkpoint, first in (("latest", 11), ("checkpoint-8", 9), ("checkpoint-6", 7)):
        resumed = train(cwd, *script, "--resume_from_checkpoint", checkpoint)
        assert resumed[1:] == from_step(uninterrupted, first)[1:]
