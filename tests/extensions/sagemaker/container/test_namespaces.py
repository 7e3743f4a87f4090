"""Hosts in namespaces, similar to containers: with a first process, `/opt/ml`, and arbitrary host names."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from support.processes.waits import WAIT_FOR_SIGNAL, limit

SCRIPT = (
    """
import os, signal, socket, sys, time
from pathlib import Path
import torch, accel_runtime

accelerator = accel_runtime.Accelerator()
accelerator.wait_for_everyone()
# An orphan: its parent is gone, and the first process is what it has.
if not os.fork():
    if os.fork():
        os._exit(0)
    Path(f"/opt/ml/orphan{accelerator.process_index}").write_text(str(os.getpid()))
    time.sleep(0.5)
    os._exit(0)
os.wait()
file, end = Path(f"/opt/ml/orphan{accelerator.process_index}"), time.monotonic() + 60
while not (file.exists() and (pid := file.read_text())) or (Path("/proc", pid).exists() and time.monotonic() < end):
    time.sleep(0.05)
print("orphan", "is there" if Path("/proc", pid).exists() else "was reaped")
print("name", socket.gethostname(), "first", Path("/proc/1/cmdline").read_text().split("\\0")[1])
total = accelerator.reduce(torch.tensor(1.0)).item()
def save(*_):
    Path(os.environ["SM_MODEL_DIR"], f"saved{accelerator.process_index}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", total, flush=True)
"""
    + WAIT_FOR_SIGNAL
)


@pytest.mark.full
def test_the_first_process_reaps_forwards_signals_and_joins_hosts_of_equal_names(
    containers, names_of_hosts, port
):
    hosts = containers.hosts("algo-1", "algo-2", source={"train.py": SCRIPT})
    for host in hosts:
        host.contain(names_of_hosts, port)
    outputs = [host.until("ready") for host in hosts]
    for text in outputs:
        assert re.search(rf"2 machines joined at algo-1:{port}: algo-1 .*with 1, algo-2 .*with 1", text)
        assert "orphan was reaped" in text
        assert "name aws first /opt/ml/input/data/accel/entry.py" in text
        assert "ready 2.0" in text
    start = time.monotonic()
    for host in hosts:
        os.kill(host.first, signal.SIGTERM)
    ended = [host.end(90) for host in hosts]
    assert time.monotonic() - start < limit(60)  # the script would sleep for longer
    assert [code for code, _ in ended] == [143, 143]
    assert [text.splitlines()[-1] for _, text in ended] == [
        "accel: algo-1 ended with exit code 143",
        "accel: algo-2 ended with exit code 143",
    ]
    for rank, host in enumerate(hosts):
        assert [file.name for file in (host.root / "model").iterdir()] == [f"saved{rank}"]
        assert host.failure is None
