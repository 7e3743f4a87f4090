"""The record of a launch, and the line at its end."""

import json
import re
import signal
import subprocess

import pytest
from support.processes.commands import Accel, run_accel
from support.processes.waits import limit, wait_until

from accel_cli.runs.run_dir import RunFolder

PAIR = ("launch", "--cpu", "--nproc-per-node", 2)


@pytest.fixture
def runs(cwd, home):
    """Returns the folders of all runs, the oldest first."""
    return lambda: [RunFolder(path) for path in sorted((home / "runs").glob("*"))]


def read_events(folder):
    events = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    return [event.pop("event") for event in events], events


def test_a_launch_ends_with_a_line_of_duration_exit_code_and_logs(script, runs):
    """Also if the output of the script does not end with a newline."""
    script("import os, sys\nprint('trained', end='')\nsys.stderr.write('warned')\n")
    result = run_accel(*PAIR, "train.py")
    (folder,) = runs()
    lines = result.stderr.splitlines()
    assert (result.returncode, result.stdout, lines[1]) == (0, "trained", "warned")
    assert re.fullmatch(
        rf"accel: 2 processes finished in [\d.]+ s, exit code 0; logs: {folder.path}", lines[2]
    )
    assert run_accel(*PAIR, "-q", "train.py").stderr == "warned"


def test_a_launch_ended_by_a_signal_prints_its_last_line(script, runs):
    script("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Accel(*PAIR, "train.py", **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=limit(120))
    assert process.returncode == 143
    (folder,) = runs()
    last = rf"accel: 2 processes ended after [\d.]+ s with exit code 143; logs: {folder.path}"
    assert re.fullmatch(last, err.splitlines()[-1])
    assert folder.record["exit_code"] == 143


def test_a_launch_records_its_facts_and_events(script, runs, monkeypatch):
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "bf16")
    script(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('no data')\ntime.sleep(60)\n"
    )
    result = run_accel(*PAIR, "--max-restarts", 1, "--set", "env.API_KEY=abc", "train.py", "--epochs", "3")
    assert result.returncode == 1
    (folder,) = runs()
    record = folder.record
    assert (record["target"], record["arguments"]) == ("train.py", ["--epochs", "3"])
    assert (record["launcher"], record["device"], record["nnodes"]) == ("torchrun", "cpu", 1)
    assert (record["nproc_per_node"], record["world_size"], record["exit_code"]) == (2, 2, 1)
    assert record["profile"]["mixed_precision"] == "bf16"
    assert record["profile"]["env.API_KEY"] == "***"
    assert f"accel: {record['headline']}" == result.stderr.splitlines()[0]
    assert set(record["versions"]) == {"accel", "torch", "python"}
    assert 0 < record["ended"] - record["started"] < 600
    names, events = read_events(folder)
    assert names == ["start", "failure", "restart", "start", "failure", "end"]
    assert [event.get("attempt") for event in events] == [0, 0, 1, 1, 1, None]
    assert events[0]["ranks"] == [0, 1]
    assert "ValueError: no data" in events[2]["reason"]
    assert (events[4]["rank"], events[4]["cause"]) == (1, "ValueError: no data")
    assert any('train.py", line 3' in line for line in events[4]["frames"])


def test_a_single_process_has_a_run_folder_with_its_heartbeat(script, runs):
    script(
        "import os\nfrom accel_runtime import Accelerator\nAccelerator(cpu=True)\n"
        "print(os.environ['ACCEL_RANK_FOLDER'])\nraise ValueError('no data')\n"
    )
    result = run_accel("launch", "-q", "--cpu", "train.py")
    (folder,) = runs()
    assert (result.returncode, result.stdout) == (1, f"{folder.get_rank(0, 0).path}\n")
    status = folder.read_status()
    assert (status.record["launcher"], status.record["world_size"], status.state) == ("single", 1, "failed")
    assert status.ended >= status.record["started"]
    assert run_accel("runs").stdout.endswith("\tfailed\n")
    logs = run_accel("logs")
    assert logs.returncode == 2
    assert "has no log: with the launcher single, its output went to the terminal" in logs.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "state"), [pytest.param("single", "ended", marks=pytest.mark.slow), ("torchrun", "exit code 3")]
)
def test_the_exit_code_of_a_script_is_recorded_by_a_launcher_that_stays(script, runs, kind, state):
    """Python does not show the code to the process itself, which records its end under the launcher `single`."""
    script("import sys\nfrom accel_runtime import Accelerator\nAccelerator(cpu=True)\nsys.exit(3)\n")
    assert run_accel("launch", "-q", "--cpu", "--set", f"launcher.kind={kind}", "train.py").returncode == 3
    (folder,) = runs()
    assert folder.read_status().state == state


def test_a_single_process_runs_if_its_folder_cannot_be_created(script, cwd, monkeypatch):
    script("import os\nprint('ACCEL_RANK_FOLDER' in os.environ)\n")
    monkeypatch.setenv("ACCEL_HOME", str(cwd / "train.py"))
    result = run_accel("launch", "-q", "--cpu", "--no-profile", "train.py")
    assert (result.returncode, result.stdout, result.stderr) == (0, "False\n", "")


def test_a_rank_of_another_launcher_and_a_dry_run_have_no_run_folder(script, runs, monkeypatch):
    script("")
    assert run_accel("launch", "-q", "--cpu", "--dry-run", "train.py").returncode == 0
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("0", "1", "0", "1", "localhost", "29400"), strict=True):
        monkeypatch.setenv(name, value)
    assert run_accel("launch", "-q", "--cpu", "train.py").returncode == 0
    assert runs() == []


@pytest.mark.slow
def test_the_memory_of_the_ranks_is_recorded_while_they_run(script, runs):
    """The first sample is taken after five seconds."""
    script("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    with Accel(*PAIR, "-q", "train.py", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        (folder,) = runs()
        wait_until((folder.path / "memory.jsonl").exists)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=limit(120))
    (sample, *_) = [json.loads(line) for line in (folder.path / "memory.jsonl").read_text().splitlines()]
    assert set(sample["rss"]) == {"0", "1"}
