"""Scripts of Transformers, TRL, PEFT, Diffusers and sentence-transformers train unchanged under `accel launch`.

The reference is the same script in two ranks without a launcher, with the variables of torchrun and of Accelerate, set by hand:
`test_accelerate_scripts.py` compares a script with torchrun itself. What a launch adds, such as failure reports and preemption,
works with each library. All processes are forked from one that has imported the libraries, which takes 20 seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess

import pytest
from support.processes.commands import Accel, preload, run_accel, run_ranks
from support.processes.waits import limit, wait_until
from support.runs import library_scripts as script

pytestmark = pytest.mark.slow

SCRIPT = script.__file__
LIBRARIES = (*script.TRAINERS, "diffusion")
IMPORTED = (
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
    "datasets",
    "peft",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "diffusers.models.unets.unet_2d",
    "diffusers.optimization",
    "sentence_transformers",
)
ONE = ("--no-profile", "--cpu", "--set", "launcher.kind=torchrun", "--nproc-per-node", "1")
PAIR = ("--no-profile", "--cpu", "--nproc-per-node", "2")


@pytest.fixture
def accel():
    preload(*IMPORTED)
    return run_accel


def read_facts(output):
    """Return what the script printed, by library."""
    lines = [line.partition("FACTS ")[2] for line in output.splitlines() if "FACTS " in line]
    return {facts.pop("library"): facts for facts in map(json.loads, lines)}


def test_each_library_trains_as_without_a_launch_and_as_on_one_process(accel, cwd, port):
    results = {}
    for processes, options in {1: ONE, 2: PAIR}.items():
        (folder := cwd / str(processes)).mkdir()
        done = accel("launch", "-q", *options, SCRIPT, *LIBRARIES, cwd=folder)
        assert done.returncode == 0, done.stderr
        results[processes] = read_facts(done.stdout)
    one, two = results[1], results[2]
    (folder := cwd / "ranks").mkdir()
    output, _ = run_ranks(2, port, SCRIPT, *LIBRARIES, cwd=folder, ACCELERATE_USE_CPU="true")
    assert two == read_facts(output)
    assert {name: facts["size"] for name, facts in two.items()} == dict.fromkeys(LIBRARIES, 2)
    for name in LIBRARIES:
        if name != "grpo":  # each process draws completions of its own
            assert two[name]["losses"] == pytest.approx(one[name]["losses"], rel=1e-5), name
    trainer = two["trainer"]
    assert trainer["exported"]
    assert trainer["resumed"] == trainer["losses"]
    assert trainer["predicted"] == [10, 16, script.VOCABULARY]
    assert trainer["mean"] == pytest.approx(one["trainer"]["mean"], rel=1e-5)


# What a launch adds, with each library ------------------------------------------------------


@pytest.fixture
def start(cwd, home):
    """Return a function that starts a launch of one library; end those that are left."""
    processes = []

    def start(name, *options, **variables):
        preload(*IMPORTED)
        command = ("launch", *PAIR, *options, SCRIPT, name)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(Accel(*command, cwd=cwd, env={**os.environ, **variables}, text=True, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_snapshot(accel, home):
    """Return what `accel top` knows about the newest run."""
    runs = sorted((home / "runs").iterdir()) if (home / "runs").is_dir() else []
    done = accel("top", runs[-1].name, "--json") if runs else None
    return json.loads(done.stdout) if done is not None and done.returncode == 0 else {"ranks": []}


@pytest.mark.full
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_failure_is_reported_with_its_rank_and_line(start, name):
    process = start(name, FAIL_AT="2")
    _, errors = process.communicate(timeout=limit(120))
    assert process.returncode == 1
    assert "error: rank 1 of 2" in errors
    assert "ValueError: the test failed here" in errors
    assert 'raise ValueError("the test failed here")' in errors


@pytest.mark.full
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_run_is_watched_and_ended_by_ctrl_c(start, accel, home, name):
    process = start(name, PAUSE_AT="2")
    wait_until(lambda: any(rank["steps"] == 2 for rank in read_snapshot(accel, home)["ranks"]), 120)
    stacks = accel("stacks").stdout
    assert re.search(r"interrupt.*library_scripts\.py|library_scripts\.py.*interrupt", stacks), stacks
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=limit(60))
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.full
@pytest.mark.parametrize("name", script.TRAINERS)
def test_a_preempted_trainer_goes_on_as_if_nothing_had_happened(start, accel, cwd, home, name):
    def train(*options, **variables):
        process = start(name, "-q", *options, CALLBACK="1", STEPS="6", **variables)
        output, errors = process.communicate(timeout=limit(120))
        assert process.returncode == 0, errors
        return read_facts(output)[name]["losses"], errors

    expected, _ = train()
    shown = read_snapshot(accel, home)
    assert [rank["steps"] for rank in shown["ranks"]] == [6, 6]
    assert shown["metrics"]["loss"]["step"] == 6
    shutil.rmtree(cwd / f"out-{name}")
    preempted, _ = train(PREEMPT_AT="1")
    assert preempted == expected[:4]
    resumed, notes = train("--resume")
    if name != "grpo":  # its checkpoints lack the completions of earlier steps that it still trains on
        assert resumed == expected
    assert len(resumed) == len(expected)
    assert "resuming from" in notes
