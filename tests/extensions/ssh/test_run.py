"""The launcher and its hosts, over a stand-in for `ssh` that runs the command on this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.processes.waits import limit, wait_for_texts, wait_until

from accel_cli.extensions.ssh import run as ssh_run

SSH = """\
#!/bin/sh
while case $1 in -*) true ;; *) false ;; esac; do shift; done
shift
case $1 in rsync) exec "$@" ;; esac
echo "welcome"
if [ -n "$BACKGROUND" ]; then sleep 600 & echo $! >> "$BACKGROUND"; fi
export SSH_CONNECTION="10.0.0.9 1 10.0.0.1 22"
# A buffer, as that of a connection.
if [ -n "$BUFFERED" ]; then exec 3>&1; sh -c "$*" 2>&1 >&3 3>&- | sort >&2 3>&-; exit; fi
sh -c "$*"
code=$?
[ $code = 137 ] && exit 255  # as ssh after SIGKILL
exit $code
"""
LAUNCH = """\
#!{python}
import os, signal, sys, time
from pathlib import Path
if sys.argv[1] != "-m":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
from accel_cli import control
from accel_runtime.environment import settings as env

def end(*_):
    connection.report_end(143)
    sys.exit(143)

host, script = os.environ[env.NODE_NAME], next(word for word in sys.argv if word.endswith(".py"))
if script == "refuse.py":
    control.reply(reason="no GPU found")
    sys.exit(2)
if script == "broken.py":
    control.reply(reason="the reason")
    os.kill(os.getppid(), signal.SIGKILL)  # ssh
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
connection = control.Control(os.environ.pop(env.CONTROL), 30)
Path(f"pid{{host}}").write_text(f"{{os.getpid()}}\\n")
if script == "wait.py":
    print("a warning", file=sys.stderr, flush=True)
    time.sleep(600)
if script == "port.py":
    Path(str(os.getpid())).write_text(f"{{sys.argv}}\\n")
    while not Path("all").exists():
        time.sleep(0.05)
while script == "print.py":
    try:
        print("line", flush=True)
    except BrokenPipeError:
        os._exit(141)
    time.sleep(0.05)
if script == "stall.py":
    sys.stdout.write(500_000 * "line\\n")
if script == "errors.py":
    sys.stderr.write(100_000 * "a line of\\n")
    sys.stderr.flush()
if script == "fail.py":
    if host == "b":
        control.reply(reason="the reason\\nmore")
    connection.report_end(7 if host == "b" else 1)
    sys.exit(1)
print(*sys.argv[1:], end="; ")
print(os.environ.get("API_KEY"), sys.stdin.read(), flush=True)
connection.report_end(0)
"""
"""Stands in for Python, and is the `accel launch` of a host."""


@pytest.fixture
def start(cwd, tmp_path, monkeypatch):
    """Starts `accel launch` on hosts a and b, on each of which a program stands in for `accel launch`."""
    for name, text in (("ssh", SSH), ("python", LAUNCH.format(python=sys.executable))):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    processes = []

    def call(script, *options, stderr=subprocess.STDOUT):
        (cwd / script).touch()
        command = [sys.executable, "-m", "accel_cli", "launch", "-q", "--cpu", "--hosts", "a,b"]
        setting = f"launcher.python={tmp_path}/bin/python"
        processes.append(
            subprocess.Popen(
                [*command, "--set", setting, *options, script],
                text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
            )
        )  # fmt: skip
        return processes[-1]

    yield call
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def read_pids(cwd):
    """Wait until both hosts run, and return the process ids of their launches."""
    return [int(pid) for pid in wait_for_texts(cwd, "pid[ab]", 2)]


def wait_for_end(pids):
    wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pid in pids))


@pytest.mark.smoke
def test_every_host_runs_its_launch_and_begins_its_lines(start):
    process = start("train.py", "--set", "env.API_KEY=hidden")
    output = process.communicate(timeout=limit(60))[0]
    assert process.returncode == 0, output
    lines = sorted(output.splitlines())
    assert len(lines) == 2
    for rank, (name, line) in enumerate(zip("ab", lines, strict=True)):
        assert line.startswith(
            f"[{name}] -m accel_cli launch --quiet --no-profile --nnodes 2 --rdzv-endpoint 10.0.0.1:"
        )
        assert f"--node-rank {rank}" in line
        assert line.endswith("-- train.py; hidden ")


def test_two_launches_at_once_on_the_same_hosts_have_different_ports(start, cwd):
    processes = [start("port.py") for _ in range(2)]
    texts = wait_for_texts(cwd, "[0-9]*", 4)
    (cwd / "all").touch()
    for process in processes:
        assert process.wait(limit(60)) == 0
    ports = [re.search(r"10\.0\.0\.1:(\d+)", text)[1] for text in texts]
    assert sorted(map(ports.count, ports)) == [2, 2, 2, 2]


def test_the_host_with_the_reason_gives_the_last_line_and_the_exit_code(start):
    process = start("fail.py")
    output = process.communicate(timeout=limit(60))[0]
    assert (process.returncode, output) == (7, "accel: error: host b: the reason\n")


def test_a_host_that_ends_before_its_processes_start_gives_its_reason_and_exit_code(start):
    process = start("refuse.py", "--hosts", "b")
    output = process.communicate(timeout=limit(60))[0]
    assert (process.returncode, output) == (2, "accel: error: host b: no GPU found\n")


def test_a_host_that_fails_before_its_start_ends_although_a_login_shell_has_left_a_process(
    background, start, cwd, tmp_path
):
    once = cwd / "once"
    once.write_text(f'#!/bin/sh\nrm "$0"\nexec {tmp_path}/bin/python "$@"\n')
    once.chmod(0o755)
    process = start("train.py", "--hosts", "a", "--set", f"launcher.python={once}")
    output = process.communicate(timeout=limit(20))[0]
    assert process.returncode == 1, output
    assert "host a: cannot start accel launch: No such file" in output


def test_a_host_with_a_reason_whose_ssh_is_killed_gives_the_exit_code_1(start):
    process = start("broken.py", "--hosts", "a")
    output = process.communicate(timeout=limit(60))[0]
    assert (process.returncode, output) == (1, "accel: error: host a: the reason\n")


def test_a_host_that_does_not_start_its_launch_counts_as_lost():
    connections = [
        Mock(ended_at=None, is_up=False, is_silent=False, heard_at=time.monotonic() - age)
        for age in (500, 601)
    ]
    ssh_run._Run(Mock(), Mock(lost_after=30))._end_silent(connections)
    assert [connection.is_silent for connection in connections] == [False, True]


def test_a_launch_that_is_killed_on_its_host_counts_as_lost(start, cwd):
    process = start("wait.py")
    pids = read_pids(cwd)
    os.kill(pids[1], signal.SIGKILL)
    output = process.communicate(timeout=limit(60))[0]
    wait_for_end(pids)
    assert process.returncode == 1
    reason = "accel launch was killed there, or the connection was lost. Check the memory of the host, and the network"
    assert output.splitlines()[-1] == f"accel: error: host b: {reason}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_launch_of_every_host_ends_with_the_launcher(start, cwd, number):
    process = start("wait.py")
    pids = read_pids(cwd)
    process.send_signal(number)
    process.communicate(timeout=limit(60))
    wait_for_end(pids)
    assert process.returncode == (-9 if number == signal.SIGKILL else 143)


@pytest.fixture
def background(cwd, monkeypatch):
    """Let each login shell leave a process that keeps its streams open."""
    pids = cwd / "background"
    monkeypatch.setenv("BACKGROUND", str(pids))
    yield
    for pid in pids.read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def test_a_run_ends_although_a_login_shell_has_left_a_process(background, start):
    process = start("train.py")
    output = process.communicate(timeout=limit(60))[0]
    assert process.returncode == 0, output


def test_the_end_of_standard_error_is_shown_to_a_slow_reader(start, monkeypatch):
    monkeypatch.setenv("BUFFERED", "1")
    process = start("errors.py", "--hosts", "a", stderr=subprocess.PIPE)
    text = b""
    with process.stderr as stream:
        while part := os.read(stream.fileno(), 1 << 14):
            text += part
            time.sleep(0.08)  # 200 KB/s
    assert process.wait(limit(60)) == 0
    assert text.count(b"a line of\n") == 100_000


@pytest.mark.service("rsync")
def test_a_folder_that_cannot_be_created_for_a_copy_needs_another_path(start, cwd):
    process = start("train.py", "--sync", "--set", "launcher.folder=/proc/folder")
    output = process.communicate(timeout=limit(60))[0]
    assert process.returncode == 1
    assert "host a: cannot create the folder /proc/folder: " in output
    assert "Set launcher.folder to a path that can be created there" in output
    assert "--sync" not in output
    assert not [*cwd.glob("pid*")]


@pytest.mark.service("rsync")
def test_sync_keeps_links_to_folders_and_newer_files_of_the_host(start, cwd, tmp_path):
    folder, disk = tmp_path / "folder", tmp_path / "disk"
    disk.mkdir()
    folder.mkdir()
    (folder / "data").symlink_to(disk)
    (cwd / "data").mkdir()
    (cwd / "data/.gitkeep").touch()
    for name in ("newer.txt", "older.txt"):
        (cwd / name).write_text("local")
        (folder / name).write_text("on the host")
    os.utime(cwd / "newer.txt", (1, 1))
    os.utime(folder / "older.txt", (1, 1))
    process = start("train.py", "--hosts", "a", "--sync", "--set", f"launcher.folder={folder}")
    output = process.communicate(timeout=limit(60))[0]
    # rsync 3.5 refuses to write through a link that leaves the folder; older ones do.
    assert process.returncode == 0 or "Add the file to launcher.exclude" in output, output
    assert (folder / "data").is_symlink()
    assert [(folder / name).read_text() for name in ("newer.txt", "older.txt")] == ["on the host", "local"]


def test_a_closed_output_ends_the_run(start, cwd):
    """As in `accel launch ... | head -n 1`."""
    process = start("print.py")
    assert process.stdout.readline() in {"[a] line\n", "[b] line\n"}
    pids = read_pids(cwd)
    process.stdout.close()
    wait_for_end(pids)
    assert process.wait(limit(60)) == 128 + signal.SIGPIPE


def test_a_closed_output_ends_the_run_although_a_login_shell_has_left_a_process(background, start):
    process = start("print.py", "--hosts", "a")
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    assert process.wait(limit(60)) == 128 + signal.SIGPIPE


@pytest.mark.slow
def test_a_terminal_that_is_stopped_does_not_end_the_run(start, cwd):
    process = start("stall.py", "--set", "launcher.lost_after=2")
    read_pids(cwd)
    time.sleep(4)  # longer than lost_after
    output = process.communicate(timeout=limit(60))[0]
    assert process.returncode == 0, output[-1000:]
    # On a busy machine a line may be shown in two parts.
    assert output.count("line\n") > 999_990


@pytest.mark.slow
def test_a_launcher_that_is_silent_counts_as_lost(start, cwd):
    process = start("wait.py", "--set", "launcher.lost_after=2")
    pids = read_pids(cwd)
    process.send_signal(signal.SIGSTOP)
    wait_for_end(pids)
    process.send_signal(signal.SIGCONT)
    output = process.communicate(timeout=limit(60))[0]
    assert process.returncode == 1
    assert "the connection was lost" in output.splitlines()[-1]


@pytest.mark.slow
def test_a_host_that_is_silent_counts_as_lost(start, cwd):
    """Also over a shared connection, of which ssh does not notice the loss."""
    process = start("wait.py", "--set", "launcher.lost_after=2")
    pids = read_pids(cwd)
    try:
        os.kill(pids[1], signal.SIGSTOP)
        output = process.communicate(timeout=limit(60))[0]
        wait_for_end(pids[:1])
    finally:
        os.kill(pids[1], signal.SIGKILL)
    assert process.returncode == 1
    reason = (
        "the connection was lost: no sign of life within launcher.lost_after. Check the host and the network"
    )
    assert output.splitlines()[-1] == f"accel: error: host b: {reason}"


def test_a_folder_that_is_missing_is_named_for_each_host_and_nothing_is_started(start, cwd):
    process = start("train.py", "--set", "launcher.folder=/nowhere")
    output = process.communicate(timeout=limit(60))[0]
    assert process.returncode == 1
    assert [f"host {name}: folder not found: /nowhere. " in output for name in "ab"] == [True, True]
    assert not [*cwd.glob("pid*")]
