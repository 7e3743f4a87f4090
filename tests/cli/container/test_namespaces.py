"""Containers as near as namespaces come to them: a first process, `/opt/ml`, and a host name that means nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

OPT = Path("/opt/ml")
# As in the request: ContainerEntrypoint, and then ContainerArguments.
ENTRYPOINT = (
    "/bin/sh",
    "-c",
    "exec $(command -v python3 || command -v python) /opt/ml/input/data/accel/entry.py",
)
# torch tells machines apart by their address, which these two share, and their process ids: those begin elsewhere.
INSIDE = """
mount --bind "$1" /opt/ml && mount --bind "$2" /etc/hosts && hostname aws || exit
[ "$3" = algo-1 ] || /bin/true
shift 3
exec "$@"
"""
UNSHARE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
SCRIPT = """
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
time.sleep(1.5)
pid = Path(f"/opt/ml/orphan{accelerator.process_index}").read_text()
print("orphan", "is there" if Path("/proc", pid).exists() else "was reaped")
print("name", socket.gethostname(), "first", Path("/proc/1/cmdline").read_text().split("\\0")[1])
total = accelerator.reduce(torch.tensor(1.0)).item()
print("ready", total, flush=True)
def save(*_):
    Path(os.environ["SM_MODEL_DIR"], f"saved{accelerator.process_index}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
time.sleep(100)
"""


def permitted(folder):
    """Whether this machine lets us make containers of this kind."""
    if sys.platform != "linux" or not shutil.which("unshare"):
        return False
    probe = ["sh", "-c", 'mount --bind "$1" /opt && hostname aws', "sh", str(folder)]
    return subprocess.run([*UNSHARE, *probe], capture_output=True, check=False).returncode == 0


@pytest.fixture
def opt(tmp_path):
    """The place of the platform's folder, empty outside of a container; skipped by name where there can be none."""
    if not permitted(tmp_path):
        pytest.skip("namespaces need root and unshare")
    made = not OPT.exists()
    OPT.mkdir(parents=True, exist_ok=True)
    yield
    if made:
        OPT.rmdir()


def contained(host, table, port):
    """Start a host's first process, as the platform does; its id out here."""
    command = [*UNSHARE, "sh", "-c", INSIDE, "sh", str(host.root), str(table), host.name, *ENTRYPOINT]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    host.process = subprocess.Popen(
        command,
        env={"PATH": path, "TRAINING_JOB_NAME": "job", "AWS_REGION": "us-east-1", "SM_MASTER_PORT": port},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    children = Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children")
    while not children.read_text():
        time.sleep(0.01)
    return int(children.read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("opt")
def test_the_first_process_of_a_container_reaps_passes_signals_on_and_meets_hosts_that_share_a_name(
    containers, tmp_path, port
):
    table = tmp_path / "hosts"
    table.write_text("127.0.0.1 localhost algo-1 algo-2\n")
    hosts = containers.hosts("algo-1", "algo-2", source={"train.py": SCRIPT})
    first = [contained(host, table, port) for host in hosts]
    said = [host.until("ready") for host in hosts]
    for text in said:
        assert re.search(rf"2 machines met at algo-1:{port}: algo-1 .*with 1, algo-2 .*with 1", text)
        assert "orphan was reaped" in text
        assert "name aws first /opt/ml/input/data/accel/entry.py" in text
        assert "ready 2.0" in text
    begun = time.monotonic()
    for pid in first:
        os.kill(pid, signal.SIGTERM)
    ended = [host.end(30) for host in hosts]
    assert time.monotonic() - begun < 15
    assert [code for code, _ in ended] == [143, 143]
    assert [text.splitlines()[-1] for _, text in ended] == [
        "accel: algo-1 ended with exit code 143",
        "accel: algo-2 ended with exit code 143",
    ]
    for rank, host in enumerate(hosts):
        assert [file.name for file in (host.root / "model").iterdir()] == [f"saved{rank}"]
        assert host.failure is None
