"""`accel launch --hosts` with real `sshd` on hosts of namespaces: runs, failures, signals, and what is left on the hosts."""

import json
import os
import re
import signal

import pytest
from support.hosts.ssh import ssh_hosts
from support.processes.waits import WAIT_FOR_SIGNAL, limit, wait_until

pytestmark = pytest.mark.service("sshd")
LAUNCH = ("launch", "-q", "--cpu")
REPORT = """
import json, os, sys
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "API_KEY", "ACCEL_MIXED_PRECISION")
facts = {name: os.environ.get(name) for name in names} | {"host": os.uname().nodename, "args": sys.argv[1:]}
Path(sys.argv[1], f"rank{facts['RANK']}").write_text(json.dumps(facts))
print("finished as", facts["RANK"])
"""
LIST = """
import os
files = os.listdir()
from lib import part
print("files:", *sorted(files), part.text)
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    raise ValueError("no such sample")
time.sleep(600)
"""
WAIT = (
    """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def save(*_):
    Path(f"saved{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
Path(f"up{rank}").touch()
"""
    + WAIT_FOR_SIGNAL
)


def read(process, timeout=150):
    return process.communicate(timeout=limit(timeout))[0]


def test_two_hosts_run_a_script_with_slots_and_secrets(script, cwd, tmp_path):
    """Its first host is an alias, and calls itself 127.0.1.1, as Debian does."""
    script(REPORT)
    script("raise ImportError", "yaml.py")  # accel must not import it on a host
    (cwd / "hosts.txt").write_text("first slots=2\nh1 slots=1  # small\n")
    with ssh_hosts(2, tmp_path / "ssh") as two:
        two.machines[0].call_itself("127.0.1.1")
        options = (
            "--hostfile",
            "hosts.txt",
            "--ranks",
            "all",
            "--mixed-precision",
            "bf16",
            "--set",
            "env.API_KEY=hidden",
        )
        process = two.accel(
            *LAUNCH, *options, "--log-dir", str(tmp_path / "runs"), "train.py", str(cwd), "a b"
        )
        output = read(process)
    assert process.returncode == 0, output
    facts = [json.loads((cwd / f"rank{rank}").read_text()) for rank in range(3)]
    assert [each["host"] for each in facts] == ["h0", "h0", "h1"]
    assert {each["MASTER_ADDR"] for each in facts} == {"10.77.0.10"}
    assert {each["API_KEY"] for each in facts} == {"hidden"}
    assert {each["ACCEL_MIXED_PRECISION"] for each in facts} == {"bf16"}
    assert facts[2]["args"] == [str(cwd), "a b"]
    assert re.search(r"^\[first\] \[1\] finished as 1$", output, re.MULTILINE), output
    assert re.search(r"^\[h1\] \[2\] finished as 2$", output, re.MULTILINE), output


@pytest.mark.full
def test_three_hosts_get_the_working_folder_without_ignored_files_and_secrets(script, cwd, tmp_path):
    script(REPORT)
    for name in (".env", "data.txt", "lib/part.py"):
        (cwd / name).parent.mkdir(exist_ok=True)
        (cwd / name).write_text("text")
    copy = tmp_path / "the copy"
    with ssh_hosts(3, tmp_path / "ssh") as three:
        options = (
            "--hosts",
            "h0,h1,h2",
            "--sync",
            "--set",
            f"launcher.folder={copy}",
            "--set",
            "launcher.exclude=[data.txt]",
        )
        process = three.accel(*LAUNCH, *options, "--log-dir", str(tmp_path / "runs"), "train.py", str(cwd))
        output = read(process)
    assert process.returncode == 0, output
    assert {path.name for path in copy.iterdir()} == {"train.py", "lib"}
    assert (copy / "lib/part.py").read_text() == "text"
    assert "not sent, since they may hold secrets: .env" in output
    assert {json.loads((cwd / f"rank{rank}").read_text())["WORLD_SIZE"] for rank in range(3)} == {"3"}


@pytest.mark.full
def test_a_host_without_the_working_folder_needs_a_copy_of_it(script, cwd, tmp_path):
    """Its second host has a file system of its own at the path of the working folder."""
    script(LIST)
    script("text = 'a module'", "lib/part.py")
    script("API_KEY=hidden", ".env")
    with ssh_hosts(2, tmp_path / "ssh", emptied={"h1": cwd}) as two:
        options = ("--hosts", "h0,h1", "--ranks", "all", "--log-dir", str(tmp_path / "runs"))
        refused = two.accel(*LAUNCH, *options, "train.py")
        message = read(refused)
        process = two.accel(*LAUNCH, *options, "--sync", "train.py")
        output = read(process)
    assert (refused.returncode, process.returncode) == (1, 0), message + output
    assert f"host h1: script not found: {cwd}/train.py. Use a shared file system" in message
    assert "files:" not in message
    assert "[h1] [1] files: lib train.py a module" in output.splitlines()
    assert re.search(r"^\[h0\] \[0\] files: \.env .* a module$", output, re.MULTILINE), output


@pytest.mark.full
def test_two_launches_at_once_on_the_same_hosts_do_not_mix(script, cwd, tmp_path):
    script(REPORT)
    with ssh_hosts(2, tmp_path / "ssh") as two:
        processes = []
        for name in ("one", "two"):
            (cwd / name).mkdir()
            options = ("--hosts", "h0,h1", "--log-dir", str(tmp_path / "runs"))
            processes.append(two.accel(*LAUNCH, *options, "train.py", str(cwd / name)))
        outputs = [*map(read, processes)]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for name in ("one", "two"):
        assert {file.name for file in (cwd / name).iterdir()} == {"rank0", "rank1"}


def test_the_first_failure_is_printed_last_and_gives_the_exit_code(script, tmp_path):
    script(FAIL)
    with ssh_hosts(2, tmp_path / "ssh") as two:
        process = two.accel(*LAUNCH, "--hosts", "h0,h1", "--log-dir", str(tmp_path / "runs"), "train.py")
        output = read(process)
        wait_until(lambda: not two.list_processes(), 30)
    assert process.returncode == 1, output
    last = output.splitlines()[-1]
    assert last == "accel: error: host h1: exit code 1 on h1, rank 1: ValueError: no such sample"
    assert re.search(
        r"^\[h1\] accel: error: rank 1 of 2 on h1 .*ValueError: no such sample$", output, re.MULTILINE
    ), output


@pytest.mark.parametrize(
    ("send", "number"),
    [
        pytest.param(os.killpg, signal.SIGINT, id="Ctrl-C", marks=pytest.mark.full),
        pytest.param(os.kill, signal.SIGKILL, id="SIGKILL"),
    ],
)
def test_a_launcher_that_ends_leaves_nothing_on_any_host(script, cwd, tmp_path, send, number):
    """The scripts get a signal and may save. Ctrl-C of a terminal signals the process group, with what the launcher has started."""
    script(WAIT)
    with ssh_hosts(2, tmp_path / "ssh") as two:
        process = two.accel(*LAUNCH, "--hosts", "h0,h1", "--log-dir", str(tmp_path / "runs"), "train.py")
        wait_until(lambda: len([*cwd.glob("up*")]) == 2)
        assert os.getpgid(process.pid) == process.pid
        send(process.pid, number)
        output = read(process)
        wait_until(lambda: not two.list_processes(), 60)
    assert process.returncode == (130 if number == signal.SIGINT else -9), output
    assert {path.name for path in cwd.glob("saved*")} == {"saved0", "saved1"}


@pytest.mark.full
def test_a_launch_that_is_killed_on_its_host_and_a_closed_output_leave_nothing_on_any_host(
    script, cwd, tmp_path
):
    script(WAIT)
    script("import time\nwhile True:\n    print('line', flush=True)\n    time.sleep(0.1)\n", "print.py")
    with ssh_hosts(2, tmp_path / "ssh") as two:
        options = ("--hosts", "h0,h1", "--log-dir", str(tmp_path / "runs"))
        killed = two.accel(*LAUNCH, *options, "train.py")
        wait_until(lambda: len([*cwd.glob("up*")]) == 2)
        launch = next(line for line in two.list_processes() if "--node-rank 1 " in line)
        os.kill(int(launch.split()[1]), signal.SIGKILL)
        output = read(killed)
        wait_until(lambda: not two.list_processes(), 60)
        closed = two.accel(*LAUNCH, *options, "print.py")
        next(line for line in closed.stdout if line.endswith(" line\n"))
        closed.stdout.close()
        closed.stdout = None
        assert closed.wait(limit(60)) == 128 + signal.SIGPIPE
        wait_until(lambda: not two.list_processes(), 60)
    assert killed.returncode == 1, output
    assert output.splitlines()[-1].startswith("accel: error: host h1: accel launch was killed there"), output
    assert {path.name for path in cwd.glob("saved*")} == {"saved0", "saved1"}


def test_a_host_that_loses_its_network_is_named_and_ends_its_processes(script, cwd, tmp_path):
    script(WAIT)
    with ssh_hosts(2, tmp_path / "ssh") as two:
        options = (
            "--hosts",
            "h0,h1",
            "--shutdown-timeout",
            "5",
            "--set",
            "launcher.lost_after=4",
            "--log-dir",
            str(tmp_path / "runs"),
        )
        process = two.accel(*LAUNCH, *options, "train.py")
        wait_until(lambda: len([*cwd.glob("up*")]) == 2)
        two.machines[1].cut()
        output = read(process)
        wait_until(lambda: not two.list_processes(), 60)
    assert process.returncode == 1, output
    assert output.splitlines()[-1].startswith("accel: error: host h1: the connection was lost"), output
    assert (cwd / "saved1").exists()


def test_hosts_that_cannot_run_it_are_named_and_nothing_is_started(script, cwd, tmp_path):
    script(REPORT)
    (tmp_path / "broken").write_text("#!/bin/sh\necho this is no Python >&2\nexit 1\n")
    (tmp_path / "broken").chmod(0o755)

    def fail(two, *options):
        process = two.accel(*LAUNCH, "--set", "launcher.connect_timeout=2", *options, "train.py", str(cwd))
        output = read(process)
        assert process.returncode == 1, output
        return output

    with ssh_hosts(2, tmp_path / "ssh") as two:
        assert "host nowhere: ssh: Could not resolve hostname nowhere" in fail(two, "--hosts", "h0,nowhere")
        missing = fail(two, "--hosts", "h0,h1", "--set", "launcher.python=/nowhere/python")
        assert "2 of 2 hosts" in missing
        assert "host h1: cannot run /nowhere/python" in missing
        broken = fail(two, "--hosts", "h1", "--set", f"launcher.python={tmp_path}/broken")
        assert "this is no Python" in broken
        folder = fail(two, "--hosts", "h0,h1", "--set", "launcher.folder=/nowhere")
        assert "host h0: folder not found: /nowhere. Use a shared file system" in folder
        known = two.folder / "known_hosts"
        keys = known.read_text()
        subject = (two.folder / "key.pub").read_text()
        known.write_text(re.sub(r"^h1 .*$", f"h1 {subject.strip()}", keys, flags=re.MULTILINE))
        assert "ssh-keygen -R h1" in fail(two, "--hosts", "h0,h1")
        known.write_text(re.sub(r"^h1 .*\n", "", keys, flags=re.MULTILINE))
        assert "Connect once by hand and compare the key: ssh h1" in fail(two, "--hosts", "h0,h1")
        known.write_text(keys)
        two.machines[1].cut()
        output = fail(two, "--hosts", "h0,h1")
        assert re.search(r"host h1: .*(timed out|No route to host)", output), output
        (two.folder / "key").unlink()
        assert "Load your key into the agent (ssh-add)" in fail(two, "--hosts", "h0")
        assert not two.list_processes()
    assert not [*cwd.glob("rank*")]
