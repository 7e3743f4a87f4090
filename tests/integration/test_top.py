"""`accel top` beside a run, on a screen: steps, restart, stall and end."""

import json
import re
import subprocess
import sys

import pytest
from support.processes.commands import Accel, run_accel
from support.processes.terminal import CommandScreen
from support.processes.waits import wait_until

TRAINS = """
import os, sys, time
from pathlib import Path
import torch
from accel_runtime import Accelerator

accelerator = Accelerator(cpu=True)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(2, 1)
loader = torch.utils.data.DataLoader(torch.ones(8000, 2), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.001), loader)
for step, batch in enumerate(loader):
    accelerator.backward(model(batch).sum())
    optimizer.step()
    if step % 10 == 0:
        accelerator.log({"loss": 1 / (step + 1)}, step=step)
        accelerator.print(f"attempt {attempt} step {step}", flush=True)
    if accelerator.process_index == 1:
        if attempt == 0 and Path("fail").exists():
            raise ValueError("no more data")
        while Path("stop").exists():
            time.sleep(0.1)
    if Path("end").exists():
        accelerator.set_trigger()
    if accelerator.check_trigger():  # on all ranks at the same step
        break
    time.sleep(0.02)
print("last line")
"""
LAUNCH = ("launch", "--nproc-per-node", "2", "--max-restarts", "1")


@pytest.fixture
def trains(script, cwd):
    """The script that fails, stops and ends once files with these names exist."""
    script(TRAINS)
    yield cwd
    (cwd / "stop").unlink(missing_ok=True)
    (cwd / "end").touch()


@pytest.mark.slow
def test_top_follows_a_run_through_a_restart_and_a_stall_to_its_end(trains, home):
    with Accel(*LAUNCH, "-q", "train.py", stdout=-3, stderr=-3) as launch:
        try:
            _watch(trains, home)
        finally:
            (trains / "stop").unlink(missing_ok=True)
            (trains / "end").touch()
    assert launch.returncode == 0


def _watch(folder, home):
    wait_until(lambda: list(home.glob("runs/*/attempt_0/rank_1/beat")))
    with CommandScreen("top") as screen:
        screen.see("running for", "world size 2", "rank  steps", "/4000 ", "loss")
        steps = int(re.search(r"^ *0 +(\d+)", screen.text(), re.MULTILINE)[1])
        while int(re.search(r"^ *0 +(\d+)", screen.text(), re.MULTILINE)[1]) <= steps:
            screen.read()
        screen.resize(40, 24)
        screen.see("epoch 0: ", "rank  steps")
        screen.resize(80, 24)
        (folder / "fail").touch()
        screen.see("1 restart", "restarted: rank 1", "ValueError: no more data")
        screen.see("/4000 ", "loss")
        (folder / "stop").touch()
        screen.see("no progress for 1", seconds=60)
        with CommandScreen("top") as other:
            other.see("rank  steps")
            other.type("q")
            assert other.end() == 0
        (folder / "stop").unlink()
        snapshot = json.loads(run_accel("top", "--json").stdout)
        assert (snapshot["attempt"], snapshot["running"], len(snapshot["ranks"])) == (1, True, 2)
        (folder / "end").touch()
        screen.see("exit code 0 after")
        assert screen.end() == 0
    result = run_accel("top", snapshot["run"])
    assert (result.returncode, "exit code 0 after" in result.stdout) == (0, True)


HINTS_SOON = """
from accel_cli.runner import output
output.SilenceHint.__init__.__kwdefaults__["seconds"] = 1.0
"""


@pytest.mark.full
def test_a_silent_run_gets_a_hint(script, cwd, monkeypatch):
    script("import time\ntime.sleep(4)\nprint('end')")
    (cwd / "site").mkdir()
    (cwd / "site" / "sitecustomize.py").write_text(HINTS_SOON)
    monkeypatch.setenv("PYTHONPATH", str(cwd / "site"))
    with CommandScreen(
        "launch", "--nproc-per-node", "2", "train.py", columns=200, start=start_python
    ) as screen:
        assert screen.end() == 0
        text = "\n".join([*screen.scrolled(), screen.text()])
    assert text.count("accel: no output for 1 s. Watch the run with accel top") == 1


def start_python(*args, **options):
    """Start `accel` in a new interpreter, which reads the variables of Python."""
    return subprocess.Popen([sys.executable, "-m", "accel_cli", *args], **options)
