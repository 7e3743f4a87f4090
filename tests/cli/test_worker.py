"""The worker: its writes to the terminal, and records of failures."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.waits import limit

import accel_cli
from accel_cli import worker

WORKER = Path(accel_cli.__file__).parent / "worker.py"


def writes(folder, source, stream, *options):
    """Return the exit code and each write of the worker to `stdout` or `stderr`, through a packet socket."""
    (folder / "train.py").write_text(source)
    local_end, remote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with local_end, remote_end:
        command = [sys.executable, *options, str(WORKER), "script", "train.py"]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        process = subprocess.Popen(command, cwd=folder, env=environ, **{stream: remote_end.fileno()})
        remote_end.close()
        writes_of_process = iter(lambda: local_end.recv(65536).decode(), "")
        return process.wait(timeout=limit(200)), list(writes_of_process)


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_a_printed_line_is_one_write(tmp_path, options):
    assert writes(tmp_path, "print('a', 1)\nprint('b', 2)\n", "stdout", *options) == (0, ["a 1\n", "b 2\n"])


def test_a_line_on_stderr_is_one_write(tmp_path):
    source = "import sys\nprint('a', 1, file=sys.stderr)\nprint('b', file=sys.stderr)\n"
    assert writes(tmp_path, source, "stderr", "-u") == (0, ["a 1\n", "b\n"])


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_a_traceback_is_one_write(tmp_path, options):
    code, (text,) = writes(tmp_path, "def f():\n    raise ValueError('no data')\nf()\n", "stderr", *options)
    assert code == 1
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: no data\n")
    assert "worker.py" not in text


def test_output_to_a_log_on_a_full_disk_is_dropped_and_unlinks_the_log(tmp_path):
    sign = tmp_path / "stdout"
    sign.symlink_to("output.log")
    with Path("/dev/full").open("w", buffering=1) as stream:
        worker.ignore_full_disk(stream, str(sign))
        print("lost", file=stream)
        print("lost too", file=stream, flush=True)
    assert not sign.is_symlink()


def test_output_to_a_closed_pipe_raises_an_error(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as stream:
        worker.ignore_full_disk(stream, str(tmp_path / "stdout"))
        with pytest.raises(BrokenPipeError):
            print("lost", file=stream)
        with pytest.raises(BrokenPipeError):
            stream.close()


def test_a_failure_that_cannot_be_recorded_is_printed(tmp_path, monkeypatch):
    error = ValueError("no data")
    worker.record_failure(error, tmp_path / "error.json")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: no data"
    (tmp_path / "full.new").symlink_to("/dev/full")
    screen = tmp_path / "screen"
    monkeypatch.setattr(worker, "_LAUNCHER_STDERR", str(screen))
    worker.record_failure(error, tmp_path / "full.json")
    assert not (tmp_path / "full.json").exists()
    assert screen.read_text() == "ValueError: no data\n"


LEAVES_A_GROUP = """
import atexit, torch.distributed as dist
from accel_runtime.observe import threads
threads.wait_for_threads = lambda *seconds: print("waits", *seconds)
atexit.register(print, "function of the script")
{group}
"""
GROUP = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "waits"),
    [(GROUP, ["waits 0.05 0.5"]), (f"{GROUP}; dist.destroy_process_group()", []), ("", [])],
    ids=["an open group", "a destroyed group", "no group"],
)
def test_a_process_with_an_open_process_group_waits_for_its_threads_at_last(tmp_path, group, waits):
    script = tmp_path / "train.py"
    script.write_text(LEAVES_A_GROUP.format(group=group))
    result = subprocess.run(
        [sys.executable, WORKER, "script", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["function of the script", *waits]
