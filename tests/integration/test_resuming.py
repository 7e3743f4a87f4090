"""The checkpointing example, interrupted in every way, resumes to the weights of an uninterrupted run."""

import re
import signal
import subprocess
import time

import pytest
from support.processes.commands import Accel, preload, run_accel
from support.processes.waits import limit, read_until
from support.runs.slow_example import EXAMPLES, checkpointing

FINAL = r"\d+ steps, weights [0-9a-f]{16}"
WAIT_S = 120

DIES = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel_runtime import Accelerator, ProjectConfiguration, set_seed

accelerator = Accelerator(project_config=ProjectConfiguration("project", automatic_checkpoint_naming=True))
set_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
found = accelerator.resume()
accelerator.print("begins at", optimizer.steps, "of run", found and found.manifest.run["launch"])
for epoch in range(loader.epoch, 2):
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.steps == 3:
            accelerator.save_state()
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and optimizer.steps == int(sys.argv[1]) and accelerator.process_index == 0:
            os._exit(9)
accelerator.print("ends with", optimizer.steps, accelerator.unwrap_model(model).weight.tolist())
"""


def example(cwd):
    """The example, which runs slowly while the folder has a file `hold`."""
    path = cwd / "train.py"
    # One process writes as Python does: to a pipe, when it ends.
    now = "import sys\nsys.stdout.reconfigure(line_buffering=True)\n"
    path.write_text(checkpointing(cwd / "hold").replace("import sys\n", now))
    return path


@pytest.fixture(autouse=True)
def environment(home, monkeypatch):
    """Import the packages of the example once, and limit the threads of a process."""
    preload("sklearn.datasets")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Run:
    """A running launch of the example, in the working folder."""

    def __init__(self, cwd, processes, *options):
        command = ("launch", "--quiet", "--cpu", "--nproc-per-node", processes, *options)
        self.process = Accel(
            *(*command, example(cwd), "--epochs", 2, "--every", 20, "--project-dir", "project"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
        )
        self.said = ""

    def until(self, pattern):
        self.said = read_until(self.process, pattern, self.said)
        return self

    def end(self):
        """Wait for the end, and return the exit code."""
        self.said += self.process.communicate(timeout=limit(WAIT_S))[0]
        return self.process.returncode

    @property
    def final(self):
        matches = re.findall(FINAL, self.said)
        assert len(matches) == 1, self.said
        return matches[0]


@pytest.fixture
def run(cwd):
    """Start the example, and end its launches after the test."""
    started = []

    def start(processes, *options):
        started.append(Run(cwd, processes, *options))
        return started[-1]

    yield start
    for process in started:
        process.process.kill()
        process.process.communicate()


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    """Return the last output of an uninterrupted run on a number of processes."""
    runs = {}

    def final(processes):
        if processes not in runs:
            run = Run(tmp_path_factory.mktemp("whole"), processes)
            assert run.end() == 0, run.said
            runs[processes] = run.final
        return runs[processes]

    return final


def resume_run(run, processes):
    """Start the example again, and return its last output."""
    resumed = run(processes, "--resume")
    assert resumed.end() == 0, resumed.said
    assert re.search(r"accel: resuming from project/checkpoints/checkpoint_\d+ \(step [1-9]", resumed.said)
    return resumed.final


def list_incomplete_checkpoints(cwd):
    """Return the hidden entries of the directory of checkpoints."""
    return [path.name for path in (cwd / "project" / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "processes"),
    [
        pytest.param(signal.SIGUSR1, 1, marks=pytest.mark.full),
        (signal.SIGTERM, 2),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.full),
    ],
)
def test_a_preempted_run_saves_and_resumes_to_the_weights_of_an_uninterrupted_one(
    run, cwd, uninterrupted_run, processes, number
):
    (cwd / "hold").touch()
    first = run(processes).until(r"step 20: loss")
    first.process.send_signal(number)
    code = first.end()
    (cwd / "hold").unlink()
    assert re.search(r"step \d+: saved, and leaving", first.said)
    assert not re.search(FINAL, first.said)
    told_apart = number == signal.SIGTERM and processes > 1
    assert code == (128 + signal.SIGTERM if told_apart else 0), first.said
    assert not list_incomplete_checkpoints(cwd)
    assert resume_run(run, processes) == uninterrupted_run(processes)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_weights_of_an_uninterrupted_one(run, cwd, uninterrupted_run):
    (cwd / "hold").touch()
    first = run(2)
    while not (cwd / "project" / "checkpoints" / "checkpoint_0").exists():
        assert first.process.poll() is None, first.end()
        time.sleep(0.01)
    first.process.kill()
    assert first.end() == -signal.SIGKILL
    (cwd / "hold").unlink()
    assert not re.search(FINAL, first.said)
    assert resume_run(run, 2) == uninterrupted_run(2)
    assert not list_incomplete_checkpoints(cwd)


@pytest.mark.full
def test_restarted_processes_resume_automatically(cwd, script):
    script(DIES)
    undisturbed = run_accel("launch", "--cpu", "--nproc-per-node", 2, "train.py", 0)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert "begins at 0 of run None" in undisturbed.stdout
    options = ("launch", "--cpu", "--nproc-per-node", 2, "--max-restarts", 1, "train.py")
    # The checkpoint of the run before is there: a run that has none yet does not take it up.
    early, late = run_accel(*options, 2), run_accel(*options, 5)
    for result in (early, late):
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == undisturbed.stdout.splitlines()[-1]
    assert (
        "no checkpoint of this run yet: starting from the beginning (those in project/checkpoints are of"
        in early.stderr
    )
    assert early.stdout.count("begins at 0 of run None") == 2
    assert re.search(r"begins at 3 of run [0-9a-f]{12}\n", late.stdout)
    assert "resuming from project/checkpoints/checkpoint_2 (step 3)" in late.stderr


@pytest.mark.full
def test_resume_without_a_checkpoint_is_reported_once(cwd):
    options = (
        "--cpu",
        "--resume",
        EXAMPLES / "checkpointing.py",
        "--epochs",
        1,
        "--every",
        100,
        "--project-dir",
        "project",
    )
    result = run_accel("launch", *options)
    assert result.returncode == 0, result.stderr
    assert (
        result.stderr.count("accel: no checkpoint in project/checkpoints yet: starting from the beginning")
        == 1
    )


@pytest.mark.slow
def test_a_script_that_ignores_resume_is_reported(cwd, script):
    script(
        "from accel_runtime import Accelerator\nfrom torch import nn\n"
        "accelerator = Accelerator()\naccelerator.prepare(nn.Linear(1, 1))\n"
        "accelerator.save_state('a')\naccelerator.save_state('b')\n"
    )
    result = run_accel("launch", "--cpu", "--resume", "--set", "launcher.kind=torchrun", "train.py")
    assert result.returncode == 0, result.stderr
    assert (
        result.stderr.count("--resume had no effect: the script calls neither resume() nor load_state()") == 1
    )
