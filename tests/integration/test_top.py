"""`accel top` beside a run, and `accel launch --live`, on a screen: steps, restart, stall and end."""

import json
import os
import re
import subprocess
import sys

import pytest
from support.commands import Accel, run_accel
from support.terminal import CommandScreen
from support.waits import limit, wait_until

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


@pytest.mark.slow
def test_live_shows_a_table_below_the_output_through_a_restart(trains):
    with CommandScreen(*LAUNCH, "--live", "train.py", columns=240) as screen:
        screen.see("rank  steps", "/4000 ", "attempt 0 step 20")
        table = screen.text().splitlines()
        heading = next(index for index, line in enumerate(table) if line.startswith("rank  steps"))
        assert not any(line.startswith("attempt ") for line in table[heading:])
        (trains / "fail").touch()
        screen.see("restart 1 of 1: ", "1 restart", "attempt 1 step 20")
        (trains / "end").touch()
        assert screen.end() == 0
        lines = [*screen.scrolled(), *screen.text().splitlines()]
    assert not any(line.startswith("rank  steps") for line in lines)
    assert lines[-2] == "last line"
    assert lines[-1].startswith("accel: 2 processes finished in ")
    # Each line of the output is there once, in order.
    for attempt in (0, 1):
        steps = [
            int(match[1]) for line in lines if (match := re.fullmatch(rf"attempt {attempt} step (\d+)", line))
        ]
        assert steps == list(range(0, 10 * len(steps), 10))
        assert len(steps) > 2


@pytest.mark.full
def test_live_on_one_of_several_nodes_shows_the_ranks_of_that_node_through_a_restart(trains, port):
    node = (
        *("launch", "--cpu", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1"),
        *("--set", f"launcher.rdzv_endpoint=127.0.0.1:{port}", "--set", "launcher.allow_loopback=true"),
    )
    with (
        Accel(*node, "-q", "train.py", stdout=-3, stderr=-3) as other,
        CommandScreen(*node, "--live", "train.py", columns=240) as screen,
    ):
        screen.see("1 of 2 ranks here", "rank  steps", "/4000 ")
        (trains / "fail").touch()
        screen.see("1 restart", "1 of 2 ranks here", "/4000 ")
        assert screen.text().count("rank  steps") == 1
        (trains / "end").touch()
        assert screen.end() == 0
        assert other.wait(limit(120)) == 0
        text = screen.text()
    assert "rank  steps" not in text
    assert text.splitlines()[-1].startswith("accel: 1 process on this machine finished in ")


@pytest.mark.full
def test_quiet_leaves_the_table_and_the_output_of_the_ranks(trains):
    with CommandScreen(*LAUNCH, "--live", "-q", "train.py") as screen:
        screen.see("rank  steps", "/4000 ", "attempt 0 step 20")
        (trains / "end").touch()
        assert screen.end() == 0
        lines = [*screen.scrolled(), *screen.text().splitlines()]
    assert lines[-1] == "last line"
    assert not any(line.startswith(("accel:", "rank  steps")) for line in lines)


HINTS_SOON = """
from accel_cli.runner import output
output.SilenceHint.__init__.__kwdefaults__["seconds"] = 1.0
"""


@pytest.mark.full
@pytest.mark.parametrize("live", [(), ("--live",)])
def test_a_silent_run_gets_a_hint_unless_a_table_shows_its_progress(script, cwd, monkeypatch, live):
    script("import time\ntime.sleep(4)\nprint('end')")
    (cwd / "site").mkdir()
    (cwd / "site" / "sitecustomize.py").write_text(HINTS_SOON)
    monkeypatch.setenv("PYTHONPATH", str(cwd / "site"))
    with CommandScreen(
        "launch", "--nproc-per-node", "2", *live, "train.py", columns=200, start=start_python
    ) as screen:
        assert screen.end() == 0
        text = "\n".join([*screen.scrolled(), screen.text()])
    assert text.count("accel: no output for 1 s. Watch the run with accel top") == (0 if live else 1)


def start_piped(*args, **options):
    """Start `accel` with a pipe for its standard output."""
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w") as pipe:
        return Accel(*args, **options | {"stdout": pipe})


def start_python(*args, **options):
    """Start `accel` in a new interpreter, which reads the variables of Python."""
    return subprocess.Popen([sys.executable, "-m", "accel_cli", *args], **options)


@pytest.mark.slow
def test_a_failure_report_replaces_the_table(script):
    script("import time\ntime.sleep(2)\nraise ValueError('no more data')")
    with CommandScreen("launch", "--nproc-per-node", "2", "--live", "train.py") as screen:
        screen.see("no step yet")
        assert screen.end() == 1
        text = "\n".join([*screen.scrolled(), screen.text()])
    assert "ValueError: no more data" in text
    assert "rank  steps" not in text


@pytest.mark.slow
def test_live_needs_a_terminal_and_a_launcher_with_ranks(script):
    script("raise SystemExit(5)")
    result = run_accel("launch", "--nproc-per-node", "2", "--live", "train.py")
    assert (result.returncode, "Cannot use --live: stderr is not a terminal" in result.stderr) == (2, True)
    with CommandScreen(
        "launch", "--nproc-per-node", "2", "--live", "train.py", term="dumb", columns=200
    ) as screen:
        assert screen.end() == 2
        assert "Cannot use --live: the terminal cannot move its cursor (TERM=dumb)." in screen.text()
    with CommandScreen(
        "launch", "--nproc-per-node", "2", "--live", "train.py", columns=200, start=start_piped
    ) as screen:
        assert screen.end() == 2
        assert "Cannot use --live: stdout is a pipe" in screen.text()
    for kind in ("single", "slurm", "ssh", "kubernetes", "ray"):
        other = run_accel("launch", "--set", f"launcher.kind={kind}", "--live", "train.py")
        assert other.returncode == 2
        assert "it is an option of the launchers torchrun and xla" in other.stderr
