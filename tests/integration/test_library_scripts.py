"""Scripts of Transformers, TRL, PEFT, Diffusers and sentence-transformers train unchanged under `accel launch`.

The reference is the same script under torchrun with the variables of Accelerate, set by hand. What a launch adds, such as failure
reports and preemption, works with each library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import library_scripts as script
from support.waits import limit, wait_until

pytestmark = pytest.mark.slow

SCRIPT = script.__file__
LIBRARIES = (*script.TRAINERS, "diffusion")
PAIR = ("--no-profile", "--cpu", "--nproc-per-node", "2")


def read_facts(output):
    """Return what the script printed, by library."""
    lines = [line.partition("FACTS ")[2] for line in output.splitlines() if "FACTS " in line]
    return {facts.pop("library"): facts for facts in map(json.loads, lines)}


def train_with_torchrun(folder, *names):
    folder.mkdir()
    command = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", SCRIPT, *names]
    environ = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=limit(240), check=False
    )
    assert done.returncode == 0, done.stderr
    return read_facts(done.stdout)


def test_each_library_trains_as_under_torchrun_and_as_on_one_process(accel, cwd, tmp_path):
    """One test for all, since each process imports the libraries for seconds."""
    results = {}
    for processes, options in {1: PAIR[:2], 2: PAIR}.items():
        (folder := cwd / str(processes)).mkdir()
        done = accel("launch", "-q", *options, SCRIPT, *LIBRARIES, cwd=folder)
        assert done.returncode == 0, done.stderr
        results[processes] = read_facts(done.stdout)
    one, two = results[1], results[2]
    assert two == train_with_torchrun(tmp_path / "torchrun", *LIBRARIES)
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
        command = [sys.executable, "-m", "accel_cli", "launch", *PAIR, *options, SCRIPT, name]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(
            subprocess.Popen(command, cwd=cwd, env={**os.environ, **variables}, text=True, **pipes)
        )
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
