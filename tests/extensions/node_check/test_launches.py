"""`launcher.preflight`, and the table of `accel test`: a bad node is left out, or ends the launch with its name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from support.hosts.network import Hosts, hosts, ip
from support.processes.children import Process, free_port
from support.processes.commands import run_accel
from support.processes.waits import limit, wait_until

TRAINS = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
Path(f"up{dist.get_rank()}").touch()
while len(sys.argv) > 1 and not Path(sys.argv[1]).exists():
    time.sleep(0.05)
print("rank", dist.get_rank(), "trained with", int(total))
"""
FAILS_ONCE = """
import os, sys
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""
MEET = ("-q", "--cpu", "--preflight", "--rdzv-endpoint", "h0:29400", "--set", "launcher.last_call_timeout=3")
UNREACHABLE = "is not connected with h0 (10.77.0.10), h2 (10.77.0.12): 10.88.0.11 port "


def publish_wrong_address(host):
    """Resolve the host's own name to an address to which the other hosts have no route; gloo would publish it."""
    ip("-n", host.namespace, "addr", "add", "10.88.0.11/32", "dev", "eth0")
    host.call_itself("10.88.0.11")


def read_output(process):
    return re.sub(r"^\[\d+\] ", "", process.communicate(timeout=limit(150))[0], flags=re.MULTILINE)


def find_check(host):
    """Return the processes of the check on a host."""
    found = []
    for pid in map(int, ip("netns", "pids", host.namespace).split()):
        with suppress(OSError):
            if "/preflight/" in str(Path(f"/proc/{pid}/fd/1").readlink()):
                found.append(pid)
    return found


def stop_check(host):
    """Stop the process of the check on a host, and return its id."""
    wait_until(lambda: find_check(host))
    (pid,) = find_check(host)
    os.kill(pid, signal.SIGSTOP)
    return pid


@contextmanager
def small_disk(path, size):
    """Mount a file system of some bytes."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.smoke
def test_the_check_of_one_node_prints_one_line_and_keeps_its_facts(script, cwd):
    script("import os\nprint('rank', os.environ['RANK'])")
    options = ("--preflight", "--nproc-per-node", "2", "--ranks", "all", "--log-dir", "logs")
    done = run_accel("launch", "-q", "--no-profile", "--cpu", *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0", "[1] rank 1"]
    assert re.fullmatch(r"accel: preflight: 1 node passed in \d+ s\n", done.stderr)
    (file,) = cwd.glob("logs/*/preflight.json")
    data = json.loads(file.read_text())
    assert [device["rank"] for device in data["ranks"]] == [0, 1]
    assert not [finding for finding in data["findings"] if finding["severity"] == "bad"]
    assert not (file.parent / "preflight").exists()


def test_restarts_do_not_check_again(script):
    script(FAILS_ONCE)
    done = run_accel(
        "launch", "-q", "--no-profile", "--cpu", "--preflight", "--max-restarts", "1", "train.py"
    )
    assert (done.returncode, done.stdout) == (0, "attempt 0\nattempt 1\n"), done.stderr
    assert done.stderr.count("preflight: 1 node passed") == 1


@pytest.mark.slow
def test_ranks_that_another_launcher_has_started_share_the_store_with_their_process_group(cwd):
    """No agent serves a store: the first rank does, for the check and afterwards for the process group."""
    command = [sys.executable, "-m", "accel_runtime.selfcheck"]
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ACCEL_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        port = stack.enter_context(free_port())
        environ = {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [
            stack.enter_context(
                Process(
                    command,
                    env={**environ, "RANK": rank, "LOCAL_RANK": rank},
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
            for rank in "01"
        ]
        outputs = [process.communicate(timeout=limit(120))[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0].endswith("everything works here\n")
    assert "nodes: 1 node checked" in outputs[0]


@pytest.mark.service("root")
def test_a_full_disk_for_logs_ends_the_launch_of_one_node(script, cwd):
    script(TRAINS)
    with small_disk(cwd / "logs", "48k") as logs:
        done = run_accel(
            "launch", "-q", "--no-profile", "--cpu", "--preflight", "--log-dir", logs, "train.py"
        )
    assert done.returncode == 1
    assert "accel: error: The preflight failed: " in done.stderr
    assert "cannot be written: No space left on device" in done.stderr
    assert done.stdout == ""


@pytest.mark.service("root")
def test_a_node_that_others_cannot_reach_is_left_out_and_cannot_come_back(script, cwd):
    script(TRAINS)
    options = (*MEET, "--nnodes", "2:3", "train.py", "enough")
    with hosts(3) as three:
        publish_wrong_address(three[1])
        launched = three.launch(*options)
        bad = read_output(launched[1])
        wait_until(lambda: len([*cwd.glob("up*")]) == 2)
        again = read_output(Hosts([three[1]]).launch(*options)[0])
        (cwd / "enough").touch()
        good = [read_output(launched[node]) for node in (0, 2)]
    assert [process.returncode for process in launched] == [0, 1, 0], [bad, *good]
    assert f"accel: error: The preflight has left h1 (10.77.0.11) out of the run: {UNREACHABLE}" in bad
    for output in good:
        assert f"accel: preflight: h1 (10.77.0.11) is left out: {UNREACHABLE}" in output
        assert "trained with 2" in output
        assert "restart" not in output
    assert "cannot join: the preflight of this run has left it out" in again


@pytest.mark.service("root")
def test_a_launch_that_needs_the_bad_node_fails_on_all_with_its_name(script):
    script(TRAINS)
    with hosts(3) as three:
        publish_wrong_address(three[1])
        launched = three.launch(*MEET, "--nnodes", "3", "train.py")
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [1, 1, 1], outputs
    for output in outputs:
        assert f"accel: error: The preflight failed: h1 (10.77.0.11): {UNREACHABLE}" in output
        assert "trained" not in output


@pytest.mark.service("root")
@pytest.mark.full
def test_a_spare_takes_the_place_of_the_bad_node(script):
    script(TRAINS)
    options = (*MEET, "--nnodes", "2", "train.py")
    with hosts(3) as three:
        publish_wrong_address(three[1])
        launched = Hosts(three[:2]).launch(*options)
        pid = stop_check(three[0])
        launched += Hosts(three[2:]).launch(*options)
        # Before the others have waited for the stopped process in vain.
        waiting = next(line for line in launched[2].stdout if "waiting as a spare" in line)
        os.kill(pid, signal.SIGCONT)
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [0, 1, 0], [waiting, *outputs]
    assert "trained with 2" in outputs[0]
    assert "trained with 2" in outputs[2]


@pytest.mark.service("root")
@pytest.mark.full
def test_a_bad_node_with_the_rendezvous_serves_it_until_the_run_ends(script):
    script(TRAINS)
    with hosts(3) as three:
        publish_wrong_address(three[0])
        launched = three.launch(*MEET, "--nnodes", "2:3", "train.py")
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [1, 0, 0], outputs
    assert "Until the run ends, it serves the rendezvous." in outputs[0]
    for output in outputs[1:]:
        assert "trained with 2" in output


@pytest.mark.service("root")
@pytest.mark.full
def test_a_node_behind_a_slow_link_is_left_out(script):
    script(TRAINS)
    with hosts(3) as three:
        slow = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "32kb", "latency", "400ms")  # fmt: skip
        ip("netns", "exec", three[1].namespace, *slow)
        launched = three.launch(*MEET, "--nnodes", "2:3", "train.py")
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [0, 1, 0], outputs
    assert re.search(r"h1 \(10.77.0.11\) is left out: its best link has .*/s, .* of the median", outputs[0])


@pytest.mark.service("root")
@pytest.mark.full
def test_a_node_whose_check_hangs_is_left_out(script):
    script(TRAINS)
    with hosts(3) as three:
        launched = three.launch(*MEET, "--nnodes", "2:3", "train.py")
        pid = stop_check(three[1])
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [0, 1, 0], outputs
    assert re.search(r"h1 \(10.77.0.11\) is left out: did not answer within \d+ s", outputs[0])
    assert not Path("/proc", str(pid)).exists()


@pytest.mark.service("root")
@pytest.mark.full
def test_a_node_whose_agent_hangs_during_the_check_is_left_out(script):
    script(TRAINS)
    with hosts(3) as three:
        launched = three.launch(*MEET, "--nnodes", "2:3", "train.py")
        stop_check(three[1])
        launched[1].send_signal(signal.SIGSTOP)
        outputs = [read_output(launched[node]) for node in (0, 2)]
        launched[1].kill()
    assert [launched[node].returncode for node in (0, 2)] == [0, 0], outputs
    assert re.search(r"h1 \(10.77.0.11\) is left out: did not answer within \d+ s", outputs[0])


@pytest.mark.service("root")
@pytest.mark.full
def test_a_signal_during_the_check_ends_its_processes(script):
    script(TRAINS)
    with hosts(2) as two:
        launched = two.launch(*MEET, "--nnodes", "2", "train.py")
        stop_check(two[1])
        for process in launched:
            process.send_signal(signal.SIGINT)
        outputs = [read_output(process) for process in launched]
        assert not find_check(two[0])
        assert not find_check(two[1])
    assert launched[1].returncode == 130, outputs


@pytest.mark.service("root")
@pytest.mark.full
def test_a_node_with_another_version_of_python_is_named(script, cwd):
    script(TRAINS)
    (cwd / "site").mkdir()
    (cwd / "site" / "sitecustomize.py").write_text(
        "import platform\nplatform.python_version = lambda: '3.1.4'\n"
    )
    options = ("launch", *MEET, "--nnodes", "3", "--set", "launcher.start_method=exec")
    other = ("--set", f"env.PYTHONPATH={cwd / 'site'}")
    with hosts(3) as three:
        launched = [host.accel(*options, *(other if host is three[1] else ()), "train.py") for host in three]
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [1, 1, 1], outputs
    assert re.search(r"h1 \(10.77.0.11\): has Python 3\.1, and most nodes have 3\.", outputs[0])


@pytest.mark.service("root")
@pytest.mark.full
def test_accel_test_names_a_node_that_others_cannot_reach_and_creates_no_process_group():
    with hosts(3) as three:
        publish_wrong_address(three[1])
        command = ("test", "--cpu", "--nnodes", "3", "--rdzv-endpoint", "h0:29400")
        checked = [host.accel(*command) for host in three]
        outputs = [read_output(process) for process in checked]
    assert [process.returncode for process in checked] == [1, 1, 1], outputs
    assert re.search(r"^h1 .* 2 of 2 !", outputs[0], re.MULTILINE)
    assert "BAD    h1: is not connected with h0, h2: 10.88.0.11 port " in outputs[0]
    assert "FAILED nodes: h1" in outputs[0]
    assert "ok     processes" not in outputs[0]
