"""The examples of the cookbook give the same result on any number of processes, and after an interruption."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.commands import preload, run_accel

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def launch(cwd, monkeypatch):
    """Launch an example on the CPU in an empty folder, and return its output."""
    preload("sklearn.datasets")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def launch(example, *arguments, processes=2, resume=False):
        options = ["--resume"] if resume else []
        script = EXAMPLES / f"{example}.py"
        result = run_accel("launch", "--cpu", "--nproc-per-node", processes, *options, script, *arguments)
        assert result.returncode == 0, result.stderr
        assert "accumulate()" not in result.stderr
        return result.stdout

    return launch


@pytest.mark.full
def test_a_diffusion_model_has_the_same_noise_in_every_run(launch):
    arguments = ("diffusion", "--epochs", 1)
    first = launch(*arguments)
    assert first == launch(*arguments)
    assert first != launch(*arguments, "--seed", 1)


@pytest.mark.full
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_gan_resumes_within_an_accumulation_cycle_to_equal_weights(launch, processes):
    arguments = ("gan", "--epochs", 3)
    uninterrupted = launch(*arguments, processes=processes).splitlines()
    shutil.rmtree("gan")
    stopped = launch(*arguments, "--stop-after", 45, processes=processes).splitlines()
    resumed = launch(*arguments, processes=processes, resume=True).splitlines()
    assert stopped == [uninterrupted[0], "stopped in epoch 2"]
    assert resumed == uninterrupted[1:]


STREAM = ("streaming", "--epochs", 2, "--documents", 50, "--every", 10)


@pytest.mark.full
@pytest.mark.parametrize(
    ("processes", "workers"), [pytest.param(1, 0, marks=pytest.mark.full), (2, 0), (2, 2)], ids=str
)
def test_a_stream_resumes_with_the_weights_of_the_whole_run(launch, processes, workers):
    arguments = (*STREAM, "--workers", workers)
    uninterrupted = launch(*arguments, processes=processes).splitlines()
    shutil.rmtree("streaming")
    stopped = launch(*arguments, "--stop-after", 15, processes=processes).splitlines()
    resumed = launch(*arguments, processes=processes, resume=True).splitlines()
    assert stopped == [uninterrupted[0], "stopped at step 15"]
    assert resumed == uninterrupted[1:]


@pytest.mark.full
def test_a_stream_has_the_same_losses_on_one_and_two_processes_and_after_a_change(launch):
    alone = launch(*STREAM, processes=1).splitlines()[:-1]
    shutil.rmtree("streaming")
    pair = launch(*STREAM, "--stop-after", 15).splitlines()[:-1]
    assert pair + launch(*STREAM, processes=1, resume=True).splitlines()[:-1] == alone


@pytest.mark.full
def test_a_search_reports_failed_trials_and_skips_finished_ones(cwd):
    folder = cwd / "search" / "trial-002"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text('{"accuracy": 0.05}')  # of a search before
    command = [sys.executable, EXAMPLES / "search.py", "--epochs", "1", "--trials", "3"]
    command += ["--nproc-per-node", "1", "--parallel", "2"]
    environ = {**os.environ, "ACCEL_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert re.search(r"trial 1: .*: exit code 1: .*RuntimeError: no better than a guess", result.stdout)
    assert re.search(r"trial 2: .*: accuracy 0\.0500", result.stdout)
    accuracy = json.loads((cwd / "search" / "trial-000" / "result.json").read_text())["accuracy"]
    finished, best = result.stdout.splitlines()[-2:]
    assert finished == "2 of 3 trials finished"
    assert best.endswith(f"accuracy {accuracy:.4f}")
    assert not (folder / "log.txt").exists()


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_the_notebook_trains_and_can_be_rerun_from_its_launch(cwd, processes):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    train, load = (
        cell for cell in notebook.cells if cell.source.startswith(("notebook_launcher", "model ="))
    )
    shown = read_output(notebook)
    train.source = train.source.replace("num_processes=2", f"num_processes={processes}")
    notebook.cells += [train, load]
    options = {"timeout": 240, "resources": {"metadata": {"path": str(cwd)}}}
    nbclient.NotebookClient(notebook, **options).execute()
    *first, losses, accuracy = [read_output(cell) for cell in notebook.cells]
    assert losses + accuracy == "".join(first)
    assert "".join(first) == shown.replace("on 2 processes", f"on {processes} processes")


def read_output(cells):
    """Return the output of cells."""
    cells = getattr(cells, "cells", [cells])
    return "".join(output.text for cell in cells for output in cell.get("outputs", ()))
