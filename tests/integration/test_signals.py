"""Signals: their delivery to processes, the time to exit, and that no process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes.children import Process
from support.processes.commands import Accel
from support.processes.waits import WAIT_FOR_SIGNAL, limit, wait_until

from accel_cli.runner import guard

HEARD = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def hear(number, _):
    with open("heard" + rank, "a") as file:
        file.write(signal.Signals(number).name + "\\n")
def save(number, frame):
    hear(number, frame)
    time.sleep(0.3)
    Path("saved" + rank).touch()
    sys.exit(0)
for name in ("SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), hear)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
    signal.signal(getattr(signal, name), save)
"""
UP = """
Path("up.new" + rank).write_text(str(os.getpid()))
Path("up.new" + rank).rename("up" + rank)
"""
DEAF = """
import os, signal, subprocess, time
from pathlib import Path
rank = os.environ["RANK"]
for name in ("SIGINT", "SIGTERM"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
"""
AS_PROCESS_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
WAIT = "while not Path('go').exists():\n    time.sleep(0.05)\n"


class Launched:
    """A launch under way, in the working folder."""

    def __init__(self, cwd, *options, before=()):
        command = ["launch", "-q", "--nproc-per-node", "2", *options, "train.py"]
        self.cwd, self._said = cwd, cwd.parent / "said"
        with self._said.open("w") as output_file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output_file, "stderr": subprocess.STDOUT}
            if before:
                command = [*before, sys.executable, "-m", "accel_cli", *command]
                self.process = subprocess.Popen(command, start_new_session=True, **streams)
            else:
                self.process = Accel(*command, **streams)

    def up(self):
        wait_until(lambda: len(list(self.cwd.glob("up[0-9]"))) == 2)
        return self

    def send(self, *numbers):
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(0.5)
        return self

    def ended(self, seconds=60):
        return self.process.wait(timeout=limit(seconds))

    @property
    def said(self):
        return self._said.read_text().splitlines()

    def left(self):
        """Return the processes of the run: the guard of its launcher, and the sessions of its ranks."""
        leaders = {int(path.read_text()) for path in self.cwd.glob("up[0-9]")}
        return [p for p in guard.list_processes() if p.session in leaders or self._is_guard(p.pid)]

    def _is_guard(self, pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return guard.__file__.encode() in command and f"-{self.process.pid}\0".encode() in command


@pytest.fixture
def launch(cwd):
    """Start `accel launch train.py` on two processes, and end them after the test."""
    started = []

    def start(*options, **more):
        started.append(Launched(cwd, *options, **more))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.wait()
        wait_until(lambda launched=launched: not launched.left(), 10)
    guard.send_signal(alive(cwd), signal.SIGKILL)


def heard(cwd):
    return [path.read_text().split() for path in sorted(cwd.glob("heard*"))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_terminating_signal_reaches_each_process_once_with_time_to_save(script, cwd, launch, number):
    script(HEARD + UP + WAIT)
    launched = launch().up().send(number)
    assert launched.ended() == 128 + number
    assert heard(cwd) == [[number.name]] * 2
    assert len(list(cwd.glob("saved*"))) == 2
    assert not launched.left()
    name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else number.name
    assert launched.said == [
        f"accel: received {name}: the processes have 30 s to exit; a second signal kills them"
    ]


def test_user_signals_reach_each_process_once(script, cwd, launch):
    script(HEARD + UP + WAIT)
    launched = launch().up().send(signal.SIGUSR1, signal.SIGUSR2)
    wait_until(lambda: heard(cwd) == [["SIGUSR1", "SIGUSR2"]] * 2)
    (cwd / "go").touch()
    assert launched.ended() == 0
    assert launched.said == []


def test_ctrl_c_prints_one_line_for_a_script_without_handlers(script, launch):
    script("import os, time\nfrom pathlib import Path\nrank = os.environ['RANK']\n" + UP + WAIT)
    launched = launch().up().send(signal.SIGINT)
    assert launched.ended() == 130
    assert len(launched.said) == 1, launched.said
    assert launched.said[0].startswith("accel: received Ctrl-C (SIGINT)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("package", ["typer", "torch"])
@pytest.mark.parametrize("before", [(), pytest.param(AS_PROCESS_1, marks=pytest.mark.service("root"))])
def test_a_signal_while_packages_are_imported_ends_the_launch_without_a_traceback(
    package, tmp_path, number, before
):
    """Also as process 1 of a container, where the kernel discards signals without a handler."""
    (tmp_path / package).mkdir()
    slow = "import time\nprint('importing', flush=True)\n" + WAIT_FOR_SIGNAL
    (tmp_path / package / "__init__.py").write_text(slow)
    (tmp_path / "train.py").touch()
    command = [
        *before,
        sys.executable,
        "-m",
        "accel_cli",
        "launch",
        "-q",
        "--cpu",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Process(command, cwd=tmp_path, env=environ, **streams) as launcher:
        assert launcher.stdout.readline() == "importing\n"
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        os.kill(int(children.read_text()) if before else launcher.pid, number)
        assert launcher.communicate() == ("", "")
    assert launcher.returncode == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_second_signal_kills_processes_that_ignore_it(script, launch, number):
    script(DEAF + "child = subprocess.Popen(['sleep', '600'])\n" + UP + WAIT)
    launched = launch().up().send(number)
    wait_until(lambda: launched.said)
    time.sleep(0.5)  # nearer together they are one
    pids = ", ".join((launched.cwd / f"up{rank}").read_text() for rank in range(2))
    launched.send(number)
    assert launched.ended(20) == 128 + number
    assert launched.said[1:] == [
        f"accel: process {pids} was killed at once: a signal arrived while the run was ending"
    ]
    assert not launched.left()


@pytest.mark.slow
def test_a_signal_that_a_wrapper_sends_twice_counts_once(script, cwd, launch):
    script(HEARD + UP + WAIT)
    launched = launch().up()
    # Stopped meanwhile, so that no pause lies between them; two that are equal would become one.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        launched.process.send_signal(number)
    assert launched.ended() == 130
    assert len(list(cwd.glob("saved*"))) == 2


def test_a_process_that_exceeds_the_shutdown_timeout_is_killed_and_named(script, launch):
    script(DEAF + UP + WAIT)
    launched = launch("--shutdown-timeout", "1").up()
    pids = [(launched.cwd / f"up{rank}").read_text() for rank in range(2)]
    assert launched.send(signal.SIGTERM).ended(20) == 143
    assert launched.said[1:] == [f"accel: process {', '.join(pids)} did not exit within 1 s and was killed"]


@pytest.mark.slow
def test_children_of_a_rank_are_signalled_after_it_has_exited(script, cwd, launch):
    script(
        "import os, signal, subprocess, sys, time\nfrom pathlib import Path\nrank = os.environ['RANK']\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "def save(*_):\n    time.sleep(0.5)\n    Path('helped' + rank).write_text(str(child.poll()))\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n" + UP + WAIT
    )
    launched = launch().up().send(signal.SIGTERM)
    assert launched.ended() == 143
    assert [path.read_text() for path in cwd.glob("helped*")] == ["None", "None"]
    assert not launched.left()


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_killed_launcher_leaves_no_process_after_five_seconds(script, launch, deaf):
    head = (
        DEAF if deaf else "import os, subprocess, time\nfrom pathlib import Path\nrank = os.environ['RANK']\n"
    )
    script(head + "child = subprocess.Popen(['sleep', '600'])\n" + UP + WAIT)
    launched = launch().up()
    assert len(launched.left()) == 5
    launched.process.kill()
    launched.process.wait()
    wait_until(lambda: not launched.left(), 20)


STARTS = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank = os.environ["RANK"]
started = subprocess.Popen(["sleep", "600"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        Path("daemon.new" + rank).write_text(str(os.getpid()))
        Path("daemon.new" + rank).rename("daemon" + rank)
        time.sleep(600)
    os._exit(0)
os.wait()
Path("child" + rank).write_text(str(started.pid))
while not Path("daemon" + rank).exists():
    time.sleep(0.01)
"""


def alive(cwd):
    """Return the running processes of `STARTS`."""
    running = {process.pid for process in guard.list_processes()}
    return running & {int(path.read_text()) for path in [*cwd.glob("child*"), *cwd.glob("daemon[0-9]")]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("signal", 143),
        ("second signal", 130),
        (
            "if rank == '1':\n    while not Path('up0').exists():\n        time.sleep(0.01)\n    sys.exit(3)\ntime.sleep(600)",
            3,
        ),
        pytest.param("killed", -9, marks=pytest.mark.slow),
    ],
    ids=["signal", "second signal", "failure", "killed"],
)
def test_daemons_of_ranks_end_with_a_run_that_is_ended(script, cwd, launch, ends, code):
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if ends == "second signal" else ""
    script(STARTS.replace("started =", deaf + "started =") + UP + (ends if "sys" in ends else WAIT))
    launched = launch().up()
    if code != 3:
        assert len(alive(cwd)) == 4
    if ends == "signal":
        launched.send(signal.SIGTERM)
    elif ends == "second signal":
        launched.send(signal.SIGINT, signal.SIGINT)
    elif ends == "killed":
        time.sleep(0.5)  # the guard hears of orphans ten times in a second
        launched.process.kill()
    assert launched.ended() == code
    if ends == "killed":
        wait_until(lambda: not alive(cwd), 20)
    assert not alive(cwd)


def test_daemons_of_a_successful_run_continue(script, cwd, launch):
    script(STARTS)
    assert launch().ended() == 0
    pids = alive(cwd)
    guard.send_signal(pids, signal.SIGKILL)
    assert len(pids) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [None, pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL]
)
def test_a_guard_that_was_killed_is_started_again_and_ends_the_ranks(script, cwd, launch, number):
    script("import os, time\nfrom pathlib import Path\nrank = os.environ['RANK']\n" + UP + WAIT)
    launched = launch().up()
    (lost,) = [process.pid for process in launched.left() if launched._is_guard(process.pid)]
    guard.send_signal([lost], signal.SIGKILL)
    wait_until(lambda: launched.said)
    if number:
        launched.send(number)
    else:
        (cwd / "go").touch()
    assert launched.process.wait(limit(60)) == {None: 0, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    wait_until(lambda: not launched.left(), 20)
    lines = [line for line in launched.said if "SIGTERM" not in line]
    assert lines == ["accel: the guard process of this run was terminated by signal 9, and was started again"]


@pytest.mark.slow
def test_the_guard_ends_with_a_successful_run_and_spares_its_daemons(script, cwd, launch):
    script(
        "import os, subprocess\nfrom pathlib import Path\nrank = os.environ['RANK']\n"
        "Path('child' + rank).write_text(str(subprocess.Popen(['sleep', '600']).pid))\n" + UP
    )
    launched = launch()
    assert launched.ended() == 0
    children = [int(path.read_text()) for path in cwd.glob("child*")]
    assert sorted(process.pid for process in launched.left()) == sorted(children)
    guard.send_signal(children, signal.SIGKILL)


@pytest.mark.slow
def test_an_ignored_hangup_stays_ignored(script, cwd, launch):
    script("import os, time\nfrom pathlib import Path\nrank = os.environ['RANK']\n" + UP + WAIT)
    launched = launch(before=["nohup"]).up().send(signal.SIGHUP)
    (cwd / "go").touch()
    assert launched.ended() == 0


@pytest.mark.slow
def test_exit_codes_are_kept_if_the_parent_ignores_sigchld(script, launch):
    script("import sys\nsys.exit(3)\n")
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
    launched = launch(before=[sys.executable, "-c", ignore])
    assert launched.ended() == 3


@pytest.mark.slow
def test_ctrl_c_before_the_start_of_processes_has_no_traceback(script, launch):
    script("")
    endpoint = ("--set", "launcher.rdzv_endpoint=127.0.0.1:1", "--set", "launcher.allow_loopback=true")
    launched = launch("--nnodes", "2", *endpoint)
    wait_until(launched.left)  # its guard is there, and it waits for the other machine
    assert launched.send(signal.SIGINT).ended() == 130
    assert "Traceback" not in "\n".join(launched.said)


@pytest.mark.slow
def test_preempted_saves_the_same_step_on_all_ranks_before_the_launcher_ends(script, cwd, launch):
    script(
        "import os, time\nfrom pathlib import Path\nfrom accel_runtime import Accelerator\n"
        "rank = os.environ['RANK']\naccelerator = Accelerator(cpu=True)\naccelerator.preempted()\n" + UP +
        "for step in range(10_000):\n    time.sleep(0.01)\n"
        "    if accelerator.preempted():\n        Path('saved' + rank).write_text(str(step))\n        break\n"
    )  # fmt: skip
    launched = launch().up().send(signal.SIGTERM)
    assert launched.ended() == 143
    steps = [path.read_text() for path in cwd.glob("saved*")]
    assert len(steps) == 2
    assert steps[0] == steps[1]


@pytest.mark.full
def test_twenty_launches_run_at_the_same_time(script, cwd):
    script(
        "import os, socket, sys\nfrom pathlib import Path\n"
        "place = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "socket.create_connection(place, timeout=60).close()\n"
        "Path(f'done-{sys.argv[1]}-{os.environ[\"RANK\"]}').write_text(str(place[1]))\n"
    )
    command = ("launch", "-q", "--nproc-per-node", 2, "train.py")
    launches = [Accel(*command, n, stderr=subprocess.PIPE) for n in range(20)]
    try:
        errors = [launch.communicate(timeout=limit(300))[1] for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
            launch.wait()
    assert [launch.returncode for launch in launches] == [0] * 20, errors
    ports = [{path.read_text() for path in cwd.glob(f"done-{n}-*")} for n in range(20)]
    assert all(len(run_ports) == 1 for run_ports in ports), ports


def listening(pids):
    """Return the addresses on which processes listen, as in /proc/net: `0100007F` is 127.0.0.1."""
    sockets = {
        str(entry.readlink())
        for pid in pids
        for entry in Path(f"/proc/{pid}/fd").iterdir()
        if entry.is_symlink()
    }
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.append(fields[1].partition(":")[0])
    return ports


@pytest.mark.slow
def test_a_run_on_one_node_listens_on_loopback_only(script, cwd, launch):
    script(
        "import os, time\nfrom pathlib import Path\nfrom accel_runtime import Accelerator\n"
        "rank = os.environ['RANK']\nAccelerator(cpu=True).wait_for_everyone()\n" + UP + WAIT
    )
    launched = launch().up()
    pids = [launched.process.pid, *(process.pid for process in launched.left())]
    addresses = listening(pids)
    (cwd / "go").touch()
    assert launched.ended() == 0
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert addresses
    assert set(addresses) <= loopback
