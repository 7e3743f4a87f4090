"""`accel launch --metrics-port`: metrics of a run for Prometheus, and addresses that cannot be used."""

from __future__ import annotations

import re
import socket
import subprocess
import urllib.error
import urllib.request

import pytest
from support.processes.children import free_port
from support.processes.commands import Accel, run_accel
from support.processes.waits import wait_until

SCRIPT = """
import time
from pathlib import Path
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while not Path("enough").exists():
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""
LAUNCH = ("launch", "-q", "--no-profile", "--cpu", "--nproc-per-node", 2)


def read_steps(port):
    """Return the steps of the ranks that are served; none before the run listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return []
    return [
        float(value) for value in re.findall(r'^accel_steps_total\{rank="\d"\} (\S+)$', text, re.MULTILINE)
    ]


def test_the_steps_of_a_script_without_accel_are_served_until_the_run_ends(script, cwd):
    script(SCRIPT)
    with free_port() as port:
        pass
    with Accel(*LAUNCH, "--metrics-port", port, "train.py", stdin=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: len(steps := read_steps(port)) == 2 and min(steps) > 2, 60)
        finally:
            (cwd / "enough").touch()
    assert process.returncode == 0
    assert read_steps(port) == []


def test_an_address_in_use_is_an_error_before_any_process_starts(script, cwd):
    script("open('started', 'w')")
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = run_accel(*LAUNCH, "--metrics-port", other.getsockname()[1], "train.py")
    assert done.returncode == 2
    assert "Cannot serve metrics at 127.0.0.1:" in done.stderr
    assert not (cwd / "started").exists()


@pytest.mark.parametrize("address", ["nosuch", "0", "70000", "host:"])
def test_a_text_that_is_no_port_is_refused(script, address):
    script("")
    done = run_accel(*LAUNCH, "--metrics-port", address, "train.py")
    assert done.returncode == 2
    assert "launcher.metrics_port: expected a port from 1 to 65535, or host:port" in done.stderr
