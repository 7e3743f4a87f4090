"""What a started process runs."""

import socket
import subprocess
import sys
from pathlib import Path

import accel_cli

WORKER = Path(accel_cli.__file__).with_name("worker.py")


def writes(folder, source, stream):
    """Each write the worker makes to `stdout` or `stderr`: a packet socket keeps them apart."""
    (folder / "train.py").write_text(source)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-u", str(WORKER), "script", "train.py"]
        process = subprocess.Popen(command, cwd=folder, **{stream: theirs.fileno()})
        theirs.close()
        found = iter(lambda: ours.recv(65536).decode(), "")
        return process.wait(timeout=200), list(found)


def test_a_printed_line_is_one_write(tmp_path):
    assert writes(tmp_path, "print('a', 1)\nprint('b', 2)\n", "stdout") == (0, ["a 1\n", "b 2\n"])


def test_a_line_on_stderr_is_one_write(tmp_path):
    source = "import sys\nprint('a', 1, file=sys.stderr)\nprint('b', file=sys.stderr)\n"
    assert writes(tmp_path, source, "stderr") == (0, ["a 1\n", "b\n"])


def test_a_traceback_is_one_write(tmp_path):
    code, (said,) = writes(tmp_path, "def f():\n    raise ValueError('no data')\nf()\n", "stderr")
    assert code == 1
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("ValueError: no data\n")
    assert "worker.py" not in said
