"""The output if one of four ranks fails: few lines, the cause last, and everything in the logs."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.commands import Accel, run_accel
from support.processes.waits import WAIT_FOR_SIGNAL, limit, wait_until

BAR = 20
IF_2 = "import os, sys, time\nrank = int(os.environ['RANK'])\nprint('begins', rank)\nif rank == 2:\n"
OTHERS_WAIT = "time.sleep(60)\n"


@pytest.fixture
def fails(script, cwd, home):
    """Launches four ranks that fail; the lines on the screen up to the report, stdout before stderr, and the exit code."""

    def launch(text, *options):
        script(text)
        result = run_accel("launch", "--nproc-per-node", 4, *options, "train.py")
        *lines, end = (result.stdout + result.stderr).splitlines()
        assert len(lines) <= BAR, "\n".join(lines)
        (folder,) = home.glob("runs/*")
        ended = rf"accel: 4 processes ended after .* s with exit code {result.returncode}; logs: {folder}"
        assert re.fullmatch(ended, end)
        assert result.stderr.count("Traceback") <= 1
        return lines, result.returncode

    return launch


def log(home, rank):
    (path,) = home.glob(f"runs/*/attempt_0/rank_{rank}/output.log")
    return path.read_text()


def test_the_report_of_an_exception_while_other_ranks_are_in_a_collective(fails, home):
    lines, code = fails(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "def step():\n    if dist.get_rank() == 2:\n        raise ValueError('there is no data')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "step()\n"
    )
    assert code == 1
    assert re.fullmatch(
        rf"accel: error: rank 2 of 4 on {socket.gethostname()} \(pid \d+\): ValueError: there is no data",
        lines[-1],
    )
    assert "    raise ValueError('there is no data')" in lines
    assert not [line for line in lines if "elastic" in line or "To enable traceback" in line]
    assert log(home, 2).count("ValueError: there is no data\n") == 1


def test_a_rank_that_exits_early_with_code_0_is_named_with_its_line(fails):
    lines, code = fails(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for step in range(3):\n    if step == 1 and dist.get_rank() == 2:\n        sys.exit(0)\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    assert code == 1
    left = f"rank 2 on {socket.gethostname()} had exited before with code 0 at train.py:5 (<module>): RuntimeError: "
    assert re.match(rf"accel: error: rank [013] of 4 on \S+ \(pid \d+\): {re.escape(left)}", lines[-1])
    assert any(line.startswith("accel: hint: a rank that exits with code 0 joins no") for line in lines)


def test_the_failure_file_has_the_reason_and_the_name_of_the_node(fails, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCEL_NODE_NAME", "algo-7")
    monkeypatch.setenv("ACCEL_FAILURE_FILE", str(tmp_path / "failure"))
    lines, code = fails(f"{IF_2}    raise ValueError('there is no data')\n{OTHERS_WAIT}")
    assert code == 1
    assert lines[-1].startswith("accel: error: rank 2 of 4 on algo-7 ")
    reason = (tmp_path / "failure").read_text()
    assert reason.startswith("exit code 1 on algo-7, rank 2: ValueError: there is no data\n")


def test_a_rank_that_has_raised_and_exits_slowly_is_the_first_failure(fails):
    lines, code = fails(
        "import atexit, os, time\nfrom pathlib import Path\n"
        "if os.environ['RANK'] == '2':\n"
        "    atexit.register(time.sleep, 60)\n    atexit.register(Path('ending').touch)\n"
        "    raise ValueError('there is no data')\n"
        "while not Path('ending').exists():\n    time.sleep(0.01)\n"
        "raise RuntimeError('[gloo/transport/tcp/pair.cc] Connection closed by peer')\n"
    )
    assert code == 1
    assert lines[-1].startswith("accel: error: rank 2 of 4 on ")
    assert lines[-1].endswith(": ValueError: there is no data")


@pytest.mark.slow
def test_the_first_failure_is_the_first_also_if_the_clock_is_set_back_before_the_second(fails):
    lines, code = fails(
        "import os, time\nfrom pathlib import Path\n"
        "if os.environ['RANK'] == '2':\n    Path('failing').touch()\n    raise ValueError('the first')\n"
        "while os.environ['RANK'] == '3' and not Path('failing').exists():\n    time.sleep(0.001)\n"
        "time.sleep(0.3 if os.environ['RANK'] == '3' else 60)\n"
        "time.time = lambda: 1000.0\nraise ValueError('the second')\n",
        # The launcher sees both failures at once.
        "--set", "launcher.monitor_interval=3",
    )  # fmt: skip
    assert code == 1
    assert lines[-1].startswith("accel: error: rank 2 of 4 on ")
    assert "accel: rank 3 failed later, in another way" in lines


@pytest.mark.slow
def test_a_failure_with_text_that_is_not_utf_8_is_shown_and_logged(script, cwd, home):
    """A file name that another system wrote, in a folder that has such a name too."""
    folder = Path(os.fsdecode(os.fsencode(cwd) + b"/\xff"))
    folder.mkdir()
    (folder / "train.py").write_text("import os\nraise ValueError(os.fsdecode(b'\\xff.jpg'))\n")
    options = ("--quiet", "--nproc-per-node", 2, "--max-restarts", 1)
    result = run_accel("launch", *options, "train.py", cwd=folder, errors="surrogateescape")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith("ValueError: \N{REPLACEMENT CHARACTER}.jpg")
    assert "accel_cli" not in result.stderr
    for attempt in (0, 1):
        (log_path,) = home.glob(f"runs/*/attempt_{attempt}/rank_0/output.log")
        assert log_path.read_bytes().endswith(b"ValueError: \xff.jpg\n")


def test_the_report_of_an_exception_on_all_ranks(fails):
    lines, code = fails(
        "import os, time\ntime.sleep(1.5 * (int(os.environ['RANK']) != 3))\nraise KeyError('x')\n"
    )
    assert code == 1
    assert lines[-1].startswith("accel: error: rank 3 of 4 on ")
    assert lines[-1].endswith(": KeyError: 'x'")


@pytest.mark.slow
def test_the_report_of_an_exit_code(fails):
    lines, code = fails(f"{IF_2}    sys.exit(3)\n{OTHERS_WAIT}")
    assert code == 3
    assert lines[-2] == "    sys.exit(3)"
    assert lines[-1].endswith(": exited with code 3")


@pytest.mark.slow
def test_the_report_of_a_text_passed_to_exit(fails, home):
    lines, code = fails(f"{IF_2}    sys.exit('no such dataset: x')\n{OTHERS_WAIT}")
    assert code == 1
    assert lines[-1].endswith(": exited with code 1: no such dataset: x")
    assert log(home, 2) == "begins 2\nno such dataset: x\n"


def test_the_report_of_a_failed_import(fails):
    lines, _ = fails(f"{IF_2}    import no_such_module\n{OTHERS_WAIT}")
    assert "    import no_such_module" in lines
    assert lines[-1].endswith(": ModuleNotFoundError: No module named 'no_such_module'")


def test_the_report_of_a_syntax_error_has_its_location_and_no_frame_of_accel(fails, cwd):
    lines, code = fails("x = (\n")
    assert code == 1
    assert lines[-4:-1] == [f'  File "{cwd}/train.py", line 1', "    x = (", "        ^"]
    assert lines[-1].endswith(": SyntaxError: '(' was never closed")
    assert "Traceback" not in "\n".join(lines)


def test_the_report_of_a_segmentation_fault_has_the_python_stack(fails, home):
    lines, code = fails(
        f"import ctypes\ndef native():\n    ctypes.string_at(0)\n{IF_2}    native()\n{OTHERS_WAIT}"
    )
    assert code == 139
    assert lines[-1].endswith(": terminated by SIGSEGV")
    assert [line for line in lines if line.endswith("line 3, in native")]
    assert "Fatal Python error: Segmentation fault" in log(home, 2)


def test_the_report_of_a_killed_rank(fails):
    lines, code = fails(f"{IF_2}    os.kill(os.getpid(), 9)\n{OTHERS_WAIT}")
    assert code == 137
    assert lines[-1].endswith(": terminated by SIGKILL: often the out-of-memory killer")


def test_the_report_of_a_failed_allocation_of_torch(fails):
    lines, code = fails(
        f"{IF_2}    import torch\n"
        "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB. If reserved by PyTorch "
        "but unallocated memory is large try setting X')\n"
        f"{OTHERS_WAIT}"
    )
    assert code == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in lines[-1]
    assert [line for line in lines if line.startswith("accel: hint: set PYTORCH_CUDA_ALLOC_CONF=")]


def test_a_long_message_and_its_causes_are_shortened_in_the_report(fails, home):
    lines, _ = fails(
        f"{IF_2}    try:\n        {{}}['absent']\n    except KeyError as error:\n"
        "        raise RuntimeError('\\n'.join(['y' * 1000] * 100)) from error\n"
        f"{OTHERS_WAIT}"
    )
    assert [line for line in lines if line.startswith("after KeyError: 'absent' (")]
    assert lines[-1] == "... 97 more lines in its log"
    assert max(map(len, lines)) < 500
    assert log(home, 2).count("y" * 1000) == 100


def test_the_report_of_a_deep_stack_has_its_first_and_last_calls(fails):
    lines, _ = fails(f"def down(n):\n    down(n - 1) if n else int('x')\n{IF_2}    down(100)\n{OTHERS_WAIT}")
    assert "    down(100)" in lines
    assert lines[-1].endswith("ValueError: invalid literal for int() with base 10: 'x'")


def test_frames_of_torch_are_folded_into_one_line(fails):
    lines, _ = fails(
        f"{IF_2}    import torch\n    torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(3))\n{OTHERS_WAIT}"
    )
    assert [line for line in lines if re.fullmatch(r"  \.\.\. \d+ frames in torch", line)]
    assert not [line for line in lines if "site-packages" in line]


def test_the_report_of_an_exception_that_cannot_be_printed(fails):
    lines, _ = fails(
        "class Bad(Exception):\n    def __str__(self):\n        raise ValueError\n"
        f"{IF_2}    raise Bad\n{OTHERS_WAIT}"
    )
    assert lines[-1].endswith(": Bad: <exception str() failed>")


def test_the_report_of_an_exit_in_a_thread_of_a_hidden_rank(fails):
    lines, code = fails(
        f"{IF_2}    import threading\n    print('the disk is full', file=sys.stderr)\n"
        "    threading.Thread(target=os._exit, args=(7,)).start()\n"
        f"{OTHERS_WAIT}"
    )
    assert code == 7
    assert lines[-2:-1] == ["  | the disk is full"]
    assert lines[-1].endswith(": exited with code 7")


def test_a_script_that_uses_record_has_one_report(fails):
    lines, _ = fails(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        f"@record\ndef main():\n    raise ValueError('boom')\n{IF_2}    main()\n{OTHERS_WAIT}"
    )
    assert len([line for line in lines if "ValueError: boom" in line]) == 1


def test_an_excepthook_of_the_script_is_called(fails):
    lines, _ = fails(
        "import sys\nprevious = sys.excepthook\n"
        "def hook(*error):\n    print('hook:', error[0].__name__, flush=True)\n    previous(*error)\n"
        "sys.excepthook = hook\nimport os, time\n"
        f"if os.environ['RANK'] == '0':\n    raise ValueError('boom')\n{OTHERS_WAIT}"
    )
    assert lines[0] == "hook: ValueError"
    assert len([line for line in lines if "ValueError: boom" in line]) == 1


def test_ranks_that_the_launcher_ended_are_not_reported_as_failures(fails):
    lines, code = fails(
        "import signal\n"
        f"{IF_2}    time.sleep(0.5)\n    sys.exit(5)\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n{WAIT_FOR_SIGNAL}"
    )
    assert code == 5
    assert "exited with code 9" not in "\n".join(lines)
    assert lines[-2] == "    sys.exit(5)"
    assert len([line for line in lines if line != "begins 0"]) == 6


@pytest.mark.slow
def test_two_nodes_report_the_same_first_failure(script, cwd, tmp_path, port):
    """Both agents run here, on loopback, as two machines would."""
    script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 2:\n    raise SystemExit(4)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    command = (
        "launch", "--cpu", "--nnodes", "2", "--nproc-per-node", "2",
        "--set", f"launcher.rdzv_endpoint=127.0.0.1:{port}", "--set", "launcher.allow_loopback=true", "train.py",
    )  # fmt: skip
    machines = [
        Accel(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "ACCEL_HOME": str(tmp_path / f"home{number}")},
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        output_lines = [machine.communicate(timeout=limit(120))[0].splitlines() for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [4, 4]
    assert sum(map(len, output_lines)) <= BAR, output_lines
    for lines in output_lines:
        assert re.match(r"accel: error: rank 2 of 4 on .*: exited with code 4$", lines[-2]), lines
        assert lines[-1].startswith("accel: 2 processes on this machine ended after "), lines
    assert [
        line
        for lines in output_lines
        for line in lines
        if "failed as a consequence: lost the connection or timed out" in line
    ]


def removed(group):
    """Remove a control group once the last of its processes has gone."""

    def remove():
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    wait_until(remove)


@pytest.fixture
def memory_group():
    """A control group with 1 GiB, of the first version or the second."""
    groups = Path("/sys/fs/cgroup")
    for parent, setting in ((groups / "memory", "memory.limit_in_bytes"), (groups, "memory.max")):
        group = parent / f"accel-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / setting).exists():
            (group / setting).write_text(str(1 << 30))
            yield group
            removed(group)
            return
        group.rmdir()
    pytest.skip("needs the right to make a control group for memory")


def test_the_report_of_a_rank_killed_for_memory(script, memory_group):
    script(
        f"{IF_2}    hoard = []\n    while True:\n        hoard.append(bytearray(b'x' * (1 << 24)))\n{OTHERS_WAIT}"
    )
    enter = f'echo $$ > {memory_group}/cgroup.procs; exec "$@"'
    command = [sys.executable, "-m", "accel_cli", "launch", "--nproc-per-node", "4", "train.py"]
    result = subprocess.run(
        ["sh", "-c", enter, "_", *command], capture_output=True, text=True, timeout=limit(120), check=False
    )
    assert result.returncode == 137, result.stderr
    assert result.stderr.splitlines()[-2].endswith(
        ": terminated by SIGKILL: killed by the kernel because memory ran out"
    )


KEEP_RUNNING = {
    "a thread": (
        "threading.Thread(target=wait).start(); raise ValueError('no data')",
        "ValueError: no data",
    ),
    "an exit handler": ("atexit.register(wait); raise ValueError('no data')", "ValueError: no data"),
    "a child process": (
        "multiprocessing.Process(target=wait).start(); sys.exit('no data')",
        "exited with code 1: no data",
    ),
}
"""For each thing that keeps the process of a failed rank running, the code and the cause that is shown."""


@pytest.mark.slow
def test_a_failure_is_shown_while_its_process_still_runs(script):
    """All launches at the same time, since each waits ten seconds for the exit."""
    command = ("launch", "--nproc-per-node", "2", "train.py")
    with contextlib.ExitStack() as stack:
        launches = []
        for name, (keeps, cause) in KEEP_RUNNING.items():
            text = (
                "import atexit, multiprocessing, os, sys, threading, time\nfrom pathlib import Path\n"
                "def wait():\n    while not Path('end').exists(): time.sleep(0.05)\n"
                f"if os.environ['RANK'] == '1':\n    {keeps}\nwait()\n"
            )
            folder = script(text, f"{name}/train.py").parent
            environ = {**os.environ, "ACCEL_HOME": str(folder / "home")}
            process = Accel(*command, stderr=subprocess.PIPE, text=True, cwd=folder, env=environ)
            launches.append((folder, cause, stack.enter_context(process)))
        for folder, cause, process in launches:
            line = process.stderr.readline()
            while not line.startswith("accel: error: "):
                line = process.stderr.readline()
            assert re.fullmatch(rf"accel: error: rank 1 of 2 on .* \(pid \d+\): {cause}\n", line), folder.name
            assert "rank 1 of 2 has failed, but does not exit" in process.stderr.readline(), folder.name
            assert log(folder / "home", 1).count("no data\n") == 1, folder.name
            (folder / "end").touch()
            rest = process.stderr.read()
            assert process.wait(limit(60)) == 1, folder.name
            assert rest.count(cause) == 1, folder.name
            assert "does not exit" not in rest, folder.name
            assert log(folder / "home", 1).count("no data\n") == 1, folder.name


def test_a_signal_to_the_launcher_shows_a_failure_whose_process_still_runs(script, cwd, home):
    script(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(500,)).start()\n"
        "raise ValueError('no data')\n"
    )
    options = ("--set", "launcher.shutdown_timeout=1")
    command = ("launch", "--nproc-per-node", "2", *options, "train.py")
    with Accel(*command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(list(home.glob("runs/*/attempt_0/rank_*/error.json"))) == 2)
        process.terminate()
        errors = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.count("ValueError: no data") in {2, 4}, "each rank, in its traceback and its report"
    assert {log(home, rank).count("ValueError: no data\n") for rank in (0, 1)} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "method"),
    [
        ("raise ValueError('of the child')", "forkserver"),
        ("sys.exit('of the child')", "exec"),
        pytest.param("raise ValueError('of the child')", "exec", marks=pytest.mark.full),
        pytest.param("sys.exit('of the child')", "forkserver", marks=pytest.mark.full),
    ],
)
def test_the_failure_of_a_forked_child_is_not_that_of_its_rank(script, cwd, home, method, end):
    script(
        "import os, sys, time\nrank = os.environ['RANK']\n"
        f"if rank == '0':\n    if os.fork() == 0:\n        {end}\n    os.wait()\n    open('ended', 'w').close()\n"
        "else:\n    while not os.path.exists('ended'): time.sleep(0.05)\n    raise KeyError('of the rank')\n"
        "while os.getppid() > 1: time.sleep(0.05)\n"
    )
    start = ("--set", f"launcher.start_method={method}", "--set", "launcher.shutdown_timeout=1")
    result = run_accel("launch", "--nproc-per-node", 2, *start, "train.py")
    assert result.returncode == 1
    reports = [line for line in result.stderr.splitlines() if line.startswith("accel: error: ")]
    assert len(reports) == 1
    assert re.search(r"rank 1 of 2 .*: KeyError: 'of the rank'", reports[0])
    assert result.stderr.count("of the child\n") == log(home, 0).count("of the child\n") == 1


@pytest.mark.slow
def test_a_record_that_a_child_of_a_rank_writes_is_not_a_failure(script, cwd):
    """A Python program with torch's @record inherits the path of the record."""
    script(
        "from torch.distributed.elastic.multiprocessing.errors import record\nrecord(lambda: 1 / 0)()",
        "child.py",
    )
    script(
        "import os, subprocess, sys, time\n"
        "if os.environ['RANK'] == '0':\n    subprocess.run([sys.executable, 'child.py'])\n    raise KeyError('of the rank')\n"
        "time.sleep(500)\n"
    )
    result = run_accel("launch", "--nproc-per-node", 2, "--set", "launcher.shutdown_timeout=1", "train.py")
    assert result.returncode == 1
    assert re.search(r"accel: error: rank 0 of 2 .*: KeyError: 'of the rank'", result.stderr)
