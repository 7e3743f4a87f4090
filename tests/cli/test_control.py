"""The connection of a launch to the machine that has started it: requests, replies, and its loss."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support.processes.waits import WAIT_FOR_SIGNAL, limit, wait_for_texts, wait_until

from accel_cli.control import ReplyReader
from accel_runtime.environment import settings as env

MARK = b"\0accel:"
LAUNCH = """
import os, signal, sys, time
from accel_cli.control import Control
def end(number, _):
    if sys.argv[2] == "blocked":
        time.sleep(600)
    connection.report_end(128 + number)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
connection = Control(sys.argv[1], shutdown_timeout=0)
os.write(1, b"ready\\n")  # not in two parts, as an unbuffered print, with a sign of life between them
while True:
    time.sleep(0.1)
"""
SAVE = (
    """
import os, signal, sys, time
from pathlib import Path
def save(*_):
    Path(f"saved{os.environ['RANK']}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
Path(f"up{os.environ['RANK']}").write_text(str("ACCEL_CONTROL" in os.environ or "ACCEL_FAILURE_FILE" in os.environ))
"""
    + WAIT_FOR_SIGNAL
)


def encode(**content):
    return MARK + json.dumps(content).encode() + b"\n"


def start(command, lost_after, **options):
    """Start a command with a connection, and return its process and the end of the connection at which requests are written."""
    read, write = os.pipe()
    command = [f"{read},{lost_after}" if word == "CONTROL" else word for word in command]
    process = subprocess.Popen(command, pass_fds=[read], stdout=subprocess.PIPE, **options)
    os.close(read)
    return process, write


def start_launch(lost_after=60, *, blocked=False):
    process, requests = start(
        [sys.executable, "-c", LAUNCH, "CONTROL", "blocked" if blocked else ""], lost_after
    )
    lines = iter(process.stdout.readline, b"")
    assert any(line.endswith(b"ready\n") for line in lines)  # after signs of life
    return process, requests


def start_accel(*args, **environ):
    command = "import os, sys; from accel_cli.main import main; os.environ['ACCEL_CONTROL'] = sys.argv.pop(1); main()"
    return start(
        [
            sys.executable,
            "-c",
            command,
            "CONTROL",
            "launch",
            "-q",
            "--cpu",
            "--set",
            "launcher.kind=torchrun",
            *args,
        ],
        60,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, env.FAILURE_FILE: "-", **environ},
    )


def read_replies(process):
    replies = ReplyReader().feed(process.communicate(timeout=limit(60))[0])[1]
    return [reply for reply in replies if reply]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_replies_are_taken_out_of_output_wherever_it_is_cut(size):
    data = b"".join([
        b"a li", encode(), b"ne\n", encode(exit=3, reason="x\ny"), b"\0", b"\0a\0accel", b"\n", MARK, b"no JSON\n", MARK, b"5\n", MARK, b"[]\n", b"end\0",
    ])  # fmt: skip
    reader, output, replies = ReplyReader(), b"", []
    for start_ in range(0, len(data), size):
        part, new = reader.feed(data[start_ : start_ + size])
        output, replies = output + part, replies + new
    assert (output + reader.feed(b"\n")[0], replies) == (
        b"a line\n\0\0a\0accel\nend\0\n",
        [{}, {"exit": 3, "reason": "x\ny"}],
    )


def test_a_signal_is_raised_in_the_launch_and_the_exit_code_is_a_reply():
    process, requests = start_launch()
    os.write(requests, b'{}\n{"sig')
    os.write(requests, b'nal": %d}\n' % signal.SIGINT)
    assert read_replies(process) == [{"exit": 130}]
    assert process.returncode == 130
    os.close(requests)


@pytest.mark.parametrize("lost_after", [60, 1], ids=["closed", "silent"])
def test_a_lost_connection_ends_the_launch_and_is_the_reason(lost_after):
    process, requests = start_launch(lost_after)
    if lost_after > 1:
        os.close(requests)
    reason, end = read_replies(process)
    assert "no sign of life from the machine that has started this launch" in reason["reason"]
    assert (end, process.returncode) == ({"exit": 1}, 143)
    if lost_after == 1:
        os.close(requests)


@pytest.mark.slow
def test_a_launch_that_does_not_end_is_killed():
    process, requests = start_launch(blocked=True)
    os.close(requests)
    assert read_replies(process) == []
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("method", ["forkserver", "exec"])
def test_ranks_may_save_when_the_connection_of_their_launch_ends(script, cwd, method):
    script(SAVE)
    process, requests = start_accel(
        "--nproc-per-node", "2", "--set", f"launcher.start_method={method}", "train.py"
    )
    assert wait_for_texts(cwd, "up?", 2, 60) == ["False", "False"]
    os.close(requests)
    reason, end = read_replies(process)
    assert "the connection was lost" in reason["reason"]
    assert end == {"exit": 1}
    wait_until(lambda: len([*cwd.glob("saved?")]) == 2)


def test_a_launch_that_is_refused_replies_with_the_reason_and_the_exit_code(cwd):
    process, requests = start_accel("absent.py")
    reason, end = read_replies(process)
    assert "absent.py" in reason["reason"]
    assert (end, process.returncode) == ({"exit": 2}, 2)
    os.close(requests)


def test_a_launch_whose_torch_cannot_be_imported_replies_with_the_reason_and_the_exit_code(
    script, cwd, tmp_path
):
    script("")
    script("raise ImportError('a broken library')", "broken/torch.py")
    process, requests = start_accel("train.py", PYTHONPATH=str(cwd / "broken"))
    *reasons, end = read_replies(process)
    assert all("a broken library" in reason["reason"] for reason in reasons)
    assert reasons
    assert (end["exit"], process.returncode) == (1, 1)
    os.close(requests)


def test_a_signal_during_the_start_does_not_end_the_launch(script, cwd):
    """SIGUSR1 that has arrived before the launch handles signals."""
    script("")
    process, requests = start_accel("train.py")
    os.write(requests, b'{"signal": %d}\n' % signal.SIGUSR1)
    assert read_replies(process) == [{"exit": 0}]
    os.close(requests)
