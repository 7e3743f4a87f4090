"""`accel logs` prints the last run that has logs, and `accel runs` lists the runs."""

import fcntl
import io
import json
import os
import re
import struct
import subprocess
import sys
import termios
import time

import pytest
from support.processes.children import Process
from support.processes.commands import call_accel
from support.runs.run_folders import write_beat

from accel_cli.runs.run_dir import RunFolder


def record_end(folder, *, failed):
    """Write the heartbeat of a script that has exited after 5 seconds; None if it has not, or was killed."""
    ended = 0 if failed is None else 5_000_000_000
    write_beat(
        folder.beat, clock=0.0, started_epoch_ns=time.time_ns(), ended_ns=ended, failed=int(bool(failed))
    )


def replace_launcher(base, name, pid, **fields):
    """Create the run of a script that has replaced its launcher."""
    created = RunFolder.create(
        base, name, {"target": name, "launcher": "single", "replaces_process": True, "world_size": 1}
    )
    created.update({"pid": pid, "pid_start": 0, **fields})
    created.get_rank(0, 0).path.mkdir(parents=True)
    return created


def test_a_launch_without_rendezvous_does_not_hide_the_previous_run(tmp_path, capfd, cwd):
    trained = RunFolder.create(tmp_path, "train.py", {"exit_code": 0})
    rank = trained.get_rank(0, 0)
    rank.path.mkdir(parents=True)
    rank.output.write_text("step 1\n")
    alone = RunFolder.create(tmp_path, "alone.py", {"exit_code": 1})
    result = call_accel(capfd, "logs", "--log-dir", tmp_path)
    assert (result.returncode, result.stdout) == (0, "step 1\n")
    assert re.sub(r"\(\S+ s ago", "(1 s ago", result.stderr) == (
        f"accel: {alone.path.name} started no process (exit code 1); these are the logs of {trained.path.name} "
        "(1 s ago, exit code 0)\n"
    )
    named = call_accel(capfd, "logs", "--log-dir", tmp_path, "alone")
    assert (named.returncode, named.stdout) == (2, "")


def test_the_log_of_the_last_run_begins_with_its_age_since_a_rejected_launch_has_no_run(tmp_path, capfd, cwd):
    trained = RunFolder.create(tmp_path, "train.py", {"exit_code": 0})
    trained.update({"started": time.time() - 7200})
    trained.get_rank(0, 0).path.mkdir(parents=True)
    trained.get_rank(0, 0).output.write_text("step 1\n")
    assert call_accel(capfd, "launch", "--nproc-per-node", "x", "train.py").returncode == 2
    result = call_accel(capfd, "logs", "--log-dir", tmp_path)
    assert result.stderr == f"accel: logs of {trained.path.name} (2 h ago, exit code 0)\n"
    assert result.stdout == "step 1\n"
    assert call_accel(capfd, "logs", "--log-dir", tmp_path, "train").stderr == ""


def test_an_empty_list_of_runs_names_the_searched_folder(tmp_path, capfd, cwd):
    result = call_accel(capfd, "runs", "--log-dir", tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (
        0,
        "",
        f"accel: no runs found in {tmp_path}\n",
    )


def test_a_script_that_replaced_its_launcher_has_no_log(tmp_path, capfd, cwd):
    alone = replace_launcher(tmp_path, "train.py", os.getpid())
    result = call_accel(capfd, "logs", "--log-dir", tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        f"accel: error: Run {alone.path.name} has no log: with the launcher single, its output went to the terminal. "
        "Launch with --set launcher.kind=torchrun to keep it, or choose another run of accel runs.\n"
    )


def test_the_default_log_is_that_of_the_last_run_that_kept_output(tmp_path, capfd, cwd):
    trained = RunFolder.create(tmp_path, "train.py", {"exit_code": 0})
    rank = trained.get_rank(0, 0)
    rank.path.mkdir(parents=True)
    rank.output.write_text("step 1\n")
    alone = replace_launcher(tmp_path, "alone.py", 0)
    result = call_accel(capfd, "logs", "--log-dir", tmp_path)
    assert (result.returncode, result.stdout) == (0, "step 1\n")
    assert re.sub(r"\(\S+ s ago", "(1 s ago", result.stderr) == (
        f"accel: {alone.path.name} kept no output (unknown); these are the logs of {trained.path.name} (1 s ago, exit code 0)\n"
    )


def test_characters_that_the_encoding_of_the_output_lacks_are_escaped(tmp_path, capfd, cwd, monkeypatch):
    RunFolder.create(tmp_path, "train.py", {"target": "entraînement.py", "exit_code": 0})
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert call_accel(capfd, "runs", "--log-dir", tmp_path).returncode == 0
    output.seek(0)
    assert "\tentra\\xeenement.py\t" in output.read()


def test_runs_are_listed_with_script_start_duration_ranks_and_exit_code(tmp_path, capfd, cwd):
    started = time.time() - 100
    failed = RunFolder.create(tmp_path, "a/fails.py", {"target": "a/fails.py", "world_size": 4})
    failed.update({"started": started, "ended": started + 42, "exit_code": 3})
    running = RunFolder.create(tmp_path, "train.py", {"target": "train.py", "world_size": 2})
    head, *rows = [
        line.split("\t") for line in call_accel(capfd, "runs", "--log-dir", tmp_path).stdout.splitlines()
    ]
    assert head == ["RUN", "SCRIPT", "STARTED", "DURATION", "RANKS", "EXIT"]
    assert [row[:2] for row in rows] == [[running.path.name, "train.py"], [failed.path.name, "fails.py"]]
    assert [row[4:] for row in rows] == [["2", "running"], ["4", "3"]]
    assert rows[1][3] == "42 s"
    (entry,) = json.loads(call_accel(capfd, "runs", "--log-dir", tmp_path, "--json", "-n", 1).stdout)
    assert (entry["run"], entry["is_running"], entry["exit_code"]) == (running.path.name, True, None)
    rejected = call_accel(capfd, "runs", "-n", 0)
    assert rejected.returncode == 2


def test_control_characters_in_the_name_of_a_script_do_not_reach_the_terminal(tmp_path, capfd, cwd):
    name = "train\x1b[2J\x9b31m\n\té.py"
    RunFolder.create(tmp_path, name, {"target": name, "world_size": 1})
    _, row = call_accel(capfd, "runs", "--log-dir", tmp_path).stdout.splitlines()
    assert row.split("\t")[1] == r"train\x1b[2J\x9b31m\n\té.py"
    (entry,) = json.loads(call_accel(capfd, "runs", "--log-dir", tmp_path, "--json").stdout)
    assert entry["script"] == name


def test_a_script_that_replaced_its_launcher_ends_with_its_heartbeat(tmp_path, capfd, cwd):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name, failed in (("fails.py", True), ("ends.py", False), ("crashes.py", None)):
        record_end(replace_launcher(tmp_path, name, ended.pid).get_rank(0, 0), failed=failed)
    replace_launcher(tmp_path, "plain.py", ended.pid)
    replace_launcher(tmp_path, "lives.py", os.getpid(), pid_start=None)
    _, *rows = [
        line.split("\t") for line in call_accel(capfd, "runs", "--log-dir", tmp_path).stdout.splitlines()
    ]
    assert [(row[1], row[5]) for row in rows] == [
        ("lives.py", "running"),
        ("plain.py", "unknown"),
        ("crashes.py", "killed or crashed"),
        ("ends.py", "ended"),
        ("fails.py", "failed"),
    ]
    assert [row[3] for row in rows[1:]] == ["-", "-", "5 s", "5 s"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "headings"),
    [
        (120, "RUN SCRIPT STARTED DURATION RANKS EXIT"),
        (80, "RUN SCRIPT STARTED DURATION RANKS EXIT"),
        (45, "RUN DURATION EXIT"),
        (36, "RUN EXIT"),
    ],
)
def test_rows_of_runs_are_not_wrapped_on_a_terminal(tmp_path, cwd, columns, headings):
    """Every id is complete: on narrow terminals, the name of a long script is shortened, and columns are left out."""
    name = "train_a_model_of_a_long_name.py"
    base = tmp_path / "runs"
    run_folder = RunFolder.create(base, "train.py", {"target": name, "world_size": 16})
    run_folder.update(
        {"started": time.time() - 3 * 24 * 3600, "ended": time.time() - 24 * 3600, "exit_code": 143}
    )
    local_end, remote_end = os.openpty()
    fcntl.ioctl(remote_end, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
    command = [sys.executable, "-m", "accel_cli", "runs", "--log-dir", str(base)]
    environ = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    with Process(command, stdout=remote_end, stderr=remote_end, env=environ | {"TERM": "xterm"}):
        os.close(remote_end)
        text = b""
        while part := read(local_end):
            text += part
    os.close(local_end)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in text.decode().splitlines()]
    assert len(lines) == 2
    assert run_folder.path.name in lines[1]
    assert lines[1].endswith("143")
    assert lines[0].split() == headings.split()
    assert (name in lines[1]) == (columns == 120)


def read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side is closed
        return b""
