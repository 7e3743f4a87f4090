"""Launches in unusual environments: no IPv4, no /proc, little memory, process 1 of a container."""

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.processes.children import Process
from support.processes.commands import run_accel
from support.processes.waits import WAIT_FOR_SIGNAL, limit, wait_until

from accel_cli.errors import explain_os_error, explain_process_limit, explain_torch_error
from accel_runtime.environment import settings as env

GATHERS = """
import torch
from accel_runtime import Accelerator
accelerator = Accelerator(cpu=True)
print("gathered", accelerator.gather(torch.tensor([accelerator.process_index])).tolist())
"""
WORKER_ENDS = """
import os, signal, torch
from accel_runtime import Accelerator
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(2)
accelerator = Accelerator(cpu=True)
for batch in accelerator.prepare(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1)):
    pass
"""
NAMES = """
import sys, torch
from accel_runtime import Accelerator
from accel_runtime.utils import gather_object
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1], log_with="jsonl")
accelerator.init_trackers("run", config={"name": sys.argv[1], "\\ud800": "\\ud800"})
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
accelerator.backward(model(torch.ones(2)).sum())
optimizer.step()
accelerator.log({"\\ud800": 1.0})
accelerator.gather(torch.ones(1))
accelerator.save_state(sys.argv[1] + "/checkpoint")
accelerator.load_state(sys.argv[1] + "/checkpoint")
accelerator.print(ascii(gather_object(["\\ud800"])))
accelerator.end_training()
"""
WORKERS = """
import glob, os, time, torch
from accel_runtime import Accelerator
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        return torch.ones(2000)
accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2))
for step, batch in enumerate(loader):
    if step == 20 and accelerator.process_index == 1:
        raise ValueError(f"folders: {len(glob.glob(os.environ['TMPDIR'] + '/pymp-*')) > 1}")
    accelerator.gather(torch.ones(1))
"""
LEAVES_ORPHANS = """
import os, time
from pathlib import Path
def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "reaped"
read, write = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode())
        os._exit(0)
    os._exit(0)
os.wait()
orphan = int(os.read(read, 20))
deadline = time.monotonic() + 20
while state(orphan) != "reaped" and time.monotonic() < deadline:
    time.sleep(0.05)
print("orphan", state(orphan))
"""
SAVES = (
    """
import signal, sys, time
from pathlib import Path
def save(*_):
    print("saved", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
Path("up").touch()
"""
    + WAIT_FOR_SIGNAL
)


@pytest.fixture
def accel(cwd):
    """Runs `accel`, forked from an interpreter that has imported torch, in an empty folder."""
    return run_accel


def command_in(namespaces, setup, *args):
    """Build a command that runs `accel` in namespaces of its own, after a few lines of shell."""
    accel = [sys.executable, "-m", "accel_cli", *map(str, args)]
    return ["unshare", *namespaces, "sh", "-c", f'{setup}; exec "$@"', "sh", *accel]


def run_in(namespaces, setup, *args, **options):
    options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 240} | options
    return subprocess.run(command_in(namespaces, setup, *args), check=False, **options)


@pytest.mark.service("root")
def test_processes_connect_without_ipv4(script):
    script(GATHERS)
    setup = "ip link set lo up; ip addr del 127.0.0.1/8 dev lo"
    result = run_in(["--net"], setup, "launch", "-q", "--nproc-per-node", 2, "train.py")
    assert (result.returncode, "gathered [0, 1]" in result.stdout) == (0, True), result.stderr


@pytest.mark.service("root")
def test_a_loopback_interface_that_is_down_is_an_error(script):
    script(GATHERS)
    result = run_in(["--net"], ":", "launch", "-q", "--nproc-per-node", 2, "train.py")
    assert result.returncode == 2
    assert result.stderr == (
        "accel: error: Cannot connect the processes of this machine: it has neither 127.0.0.1 nor ::1. Set its "
        "loopback interface up: ip link set lo up\n"
    )


@pytest.mark.full
@pytest.mark.service("root")
def test_processes_connect_without_proc(script):
    script(GATHERS)
    result = run_in(
        ["--mount"], "mount -t tmpfs none /proc", "launch", "-q", "--nproc-per-node", 2, "train.py"
    )
    assert (result.returncode, "gathered [0, 1]" in result.stdout) == (0, True), result.stderr


@pytest.mark.slow
def test_processes_connect_if_the_name_of_the_temporary_folder_is_not_utf_8(accel, script, cwd, monkeypatch):
    script(GATHERS)
    folder = os.fsencode(cwd) + b"/\xff"
    os.mkdir(folder)  # noqa: PTH102 - a path of bytes
    monkeypatch.setenv("TMPDIR", os.fsdecode(folder))
    result = accel("launch", "-q", "--nproc-per-node", 2, "train.py")
    assert (result.returncode, "gathered [0, 1]" in result.stdout) == (0, True), result.stderr


def test_a_script_with_the_longest_file_name_runs(accel, script):
    name = "a" * 252 + ".py"
    script("print('ran')", name)
    result = accel("launch", "-q", "--nproc-per-node", 2, name)
    assert (result.returncode, result.stdout) == (0, "ran\n"), result.stderr
    assert accel("logs").stdout == "ran\n"


NOT_UTF_8 = os.fsdecode(b"f\xff")
"""A name of a file that is no UTF-8; some characters of Python, such as `"\\ud800"`, are in no encoding."""
FAILURES = {
    "an exception": 'raise ValueError("\\ud800 bad")',
    "an exit text": 'import sys; sys.exit("\\ud800 bad")',
    "a cause": 'try: 1 / 0\nexcept Exception as e: raise ValueError("\\ud800 bad") from KeyError("\\udcff")',
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=name, marks=[pytest.mark.full] * (name == "an exception"))
        for name, code in FAILURES.items()
    ],
)
def test_a_failure_whose_text_has_no_encoding_is_reported(accel, script, cwd, monkeypatch, code):
    """The text passes the record, the log, the store of the rendezvous, the event and the file with the reason."""
    monkeypatch.setenv("ACCEL_HOME", str(cwd / NOT_UTF_8))
    monkeypatch.setenv(env.FAILURE_FILE, "reason")
    script(code)
    result = accel("launch", "--nproc-per-node", 2, "train.py")
    assert (result.returncode, "accel_cli" in result.stderr) == (1, False), result.stderr
    assert re.search(r"error: rank \d of 2 on .*bad", result.stderr)
    assert b"bad" in (cwd / "reason").read_bytes()
    assert "bad" in accel("logs").stdout
    assert accel("report").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("exec", marks=pytest.mark.full)])
def test_names_that_are_not_utf_8_pass_a_whole_run(accel, script, cwd, monkeypatch, start_method):
    """Of the script and its folder, of the runs, of checkpoints and of values in collectives."""
    monkeypatch.setenv("ACCEL_HOME", str(cwd / NOT_UTF_8))
    script(NAMES, f"{NOT_UTF_8}/{NOT_UTF_8}.py")
    start = ("--set", f"launcher.start_method={start_method}")
    result = accel("launch", "-q", "--nproc-per-node", 2, *start, f"{NOT_UTF_8}/{NOT_UTF_8}.py", NOT_UTF_8)
    assert (result.returncode, result.stdout) == (0, "['\\ud800', '\\ud800']\n"), result.stderr
    assert accel("checkpoint", "verify", NOT_UTF_8).returncode == 0
    assert accel("top", accel("runs").stdout.splitlines()[1].split("\t")[0]).returncode == 0


LIMITED = "The address space of a process is limited to 290 MiB. Raise the limit: ulimit -v unlimited"


@pytest.mark.slow
def test_a_limit_on_address_space_is_named(script):
    script("")
    accel = [sys.executable, "-m", "accel_cli", "launch", "-q", "--nproc-per-node", "2", "train.py"]
    limited = ["sh", "-c", f'ulimit -v {290 * 1024}; exec "$@"', "sh", *accel]
    result = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("accel: error: Cannot import torch: ")
    assert result.stderr.endswith(f"{LIMITED}\n")


@pytest.fixture
def process_limit():
    """Return a function that limits the processes of a command by a control group; skips where none can be made."""
    folder = Path(f"/sys/fs/cgroup/pids/accel-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")

    def limit_processes(count, command):
        (folder / "pids.max").write_text(str(count))
        return ["sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh", *command]

    yield limit_processes
    wait_until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.mark.parametrize(
    "count", [2, pytest.param(3, marks=pytest.mark.full), 4, pytest.param(5, marks=pytest.mark.full)]
)
def test_a_limit_on_processes_is_named(script, process_limit, count):
    """Processes and threads fail to start one after the other: of the store, of the output, of the server, of the ranks."""
    script("import torch")
    accel = [sys.executable, "-m", "accel_cli", "launch", "-q", "--nproc-per-node", "2", "train.py"]
    result = subprocess.run(process_limit(count, accel), capture_output=True, text=True, check=False)
    assert (result.returncode, "Traceback" in result.stderr) == (1, False), result.stderr
    assert result.stderr.splitlines()[-1] == (
        "accel: error: Cannot start another process or thread: the limit on processes is reached (pids.max of the control "
        f"group is {count}). Raise the limit, or end other processes."
    )


def test_a_failure_to_start_a_thread_names_the_limit_also_as_the_cause_of_another_error():
    assert explain_process_limit(ValueError("x")) == ""
    assert "the limit on processes is reached" in explain_process_limit(
        RuntimeError("can't start new thread")
    )
    try:
        try:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError:
            raise RuntimeError("cannot join thread before it is started")  # noqa: B904 - as a cleanup raises it
    except RuntimeError as error:
        assert "the limit on processes is reached" in explain_process_limit(error)


def test_the_error_of_a_failed_allocation_names_its_limit(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (290 << 20, resource.RLIM_INFINITY))
    assert explain_os_error(MemoryError()) == f"Cannot allocate memory. {LIMITED}"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert explain_os_error(MemoryError()) == "Cannot allocate memory. Free memory."
    assert explain_torch_error(MemoryError()).startswith("Cannot import torch: MemoryError. Reinstall it: ")


@pytest.mark.slow
def test_the_report_of_a_killed_data_loader_worker_has_the_likely_reason(accel, script):
    script(WORKER_ENDS)
    result = accel("launch", "-q", "--nproc-per-node", 2, "train.py")
    assert result.returncode == 1
    assert "accel: hint: data-loader worker " in result.stderr
    assert "often for lack of memory. To use less memory, reduce num_workers" in result.stderr


@pytest.mark.slow
def test_killed_data_loader_workers_leave_no_folders(script, monkeypatch):
    """multiprocessing makes one for each worker that passes tensors on, in the folder for temporary files."""
    # The path of a socket is short.
    temporary = Path(tempfile.mkdtemp(prefix="accel-"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    script(WORKERS)
    command = [sys.executable, "-m", "accel_cli", "launch", "-q", "--nproc-per-node", "2", "train.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, "ValueError: folders: True" in result.stderr) == (1, True), result.stderr
    left = list(temporary.glob("pymp-*"))
    shutil.rmtree(temporary)
    assert left == []


@pytest.mark.service("root")
@pytest.mark.parametrize("processes", [1, 2])
def test_process_1_of_a_container_reaps_orphans(script, processes):
    script(LEAVES_ORPHANS)
    container = ["--pid", "--mount", "--fork", "--mount-proc"]
    result = run_in(container, ":", "launch", "-q", "--nproc-per-node", processes, "train.py")
    assert (result.returncode, result.stdout) == (0, "orphan reaped\n"), result.stderr


@pytest.mark.service("root")
def test_process_1_of_a_container_forwards_signals_and_the_exit_code(script, cwd):
    script(SAVES)
    container = ["--pid", "--mount", "--fork", "--mount-proc"]
    command = command_in(container, ":", "launch", "-q", "--nproc-per-node", 1, "train.py")
    with Process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until((cwd / "up").exists, process=process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children), signal.SIGTERM)
        out, err = process.communicate(timeout=limit(60))
    assert (process.returncode, out) == (7, "saved\n"), err
    (pid,) = cwd.parent.rglob("rank_0/pid")
    assert pid.read_text() != "1"  # that of the launcher
