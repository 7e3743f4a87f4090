"""The first of several failures, and its formatting."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import accel_cli
from accel_cli.runner import failures
from accel_cli.runner.failures import Cause, ExceptionInfo, Failure, Frame, format_reason
from accel_cli.runs.run_dir import REASON_SIZE, RankFolder, format_ranks

WORKER = Path(accel_cli.__file__).parent / "worker.py"


def failure(rank, time=1.0, exitcode=1, text="ValueError: boom\n", kind="builtins.ValueError", **more):
    chain = (ExceptionInfo(kind, text),) if exitcode > 0 else ()
    return Failure(rank, "box", 7, exitcode, time, "log", chain=chain, **more)


LOST = {
    "kind": "builtins.RuntimeError",
    "text": "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1\n",
}
WAITED = {
    "kind": "builtins.RuntimeError",
    "text": "RuntimeError: [gloo/pair.cc] Timed out waiting 30000ms for recv\n",
}

TOLD_STALL = {
    "kind": "accel_runtime.collectives.handshake.StallError",
    "text": "accel_runtime.collectives.handshake.StallError: rank 1 did not come to gather at train.py:9 in time\n",
}
TOLD_LOSS = {
    "kind": "accel_runtime.collectives.handshake.RankLostError",
    "text": "accel_runtime.collectives.handshake.RankLostError: backward() at train.py:3 cannot complete: rank 0 ended\n",
}


def test_the_first_failure_is_the_earliest_of_those_nearest_to_the_root_cause():
    in_order = [
        failure(3, 5.0),
        failure(1, 6.0),
        failure(0, 1.0, exitcode=-6),
        failure(6, 9.0, **TOLD_STALL),
        failure(7, 8.0, **TOLD_LOSS),
        failure(2, 0.5, **WAITED),
        failure(4, 0.2, **LOST),
        failure(5, 0.1, exitcode=-15, stopped=True),
    ]
    for pair_of_failures in itertools.combinations(in_order, 2):
        assert failures.find_root_failure(reversed(pair_of_failures)) is pair_of_failures[0]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("builtins.ConnectionResetError", "ConnectionResetError: [Errno 104] Connection reset by peer\n"),
        ("requests.exceptions.ConnectionError", "ConnectionError: Connection refused\n"),
        ("builtins.TimeoutError", "TimeoutError: timed out\n"),
    ],
)
def test_errors_of_connections_to_other_services_are_primary_failures(kind, text):
    assert failure(0, kind=kind, text=text).cause == Cause.PRIMARY


def test_a_lost_peer_is_recognized_in_the_cause_of_another_exception():
    lost = ExceptionInfo(**LOST)
    raised = ExceptionInfo("builtins.SystemExit", "SystemExit: 1\n")
    assert Failure(0, "box", 7, 1, 1.0, "log", chain=(raised, lost), exit=1).cause == Cause.LOST_PEER


def run_and_read_failure(folder, source, name="train.py"):
    """Return the failure that the worker records for a script, and the folder of the rank."""
    rank = RankFolder(folder / "rank_0")
    rank.path.mkdir()
    for stream in ("stdout", "stderr"):
        (rank.path / stream).symlink_to("output.log")
    rank.output.touch()
    (folder / name).write_text(source)
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(rank.error)}
    command = [sys.executable, str(WORKER), "script", name]
    process = subprocess.run(command, cwd=folder, env=environ, capture_output=True, check=False)
    assert process.stdout + process.stderr == b""
    failures.complete_log(rank)
    pid = failures.read_record(rank.error).get("pid", 0)
    failure = Failure(0, "box", pid, process.returncode, 0.0)
    return failures.read_failure(rank, failure, started=0.0, is_replica_host=False), rank


def test_a_traceback_is_printed_by_the_launcher_only_and_is_in_the_log(tmp_path):
    read, rank = run_and_read_failure(tmp_path, "print('a')\nraise ValueError('boom')\n")
    assert failures.format_cause(read) == "ValueError: boom"
    assert failures.format_stack(read)[1] == "    raise ValueError('boom')"
    assert rank.output.read_text().startswith("a\nTraceback (most recent call last):\n")
    assert not rank.fault.exists()


def test_the_traceback_of_an_endless_recursion_is_folded(tmp_path):
    read, _ = run_and_read_failure(tmp_path, "def f():\n    g()\ndef g():\n    f()\nf()\n")
    assert len(failures.format_stack(read)) <= 12
    assert failures.format_cause(read).startswith("RecursionError: maximum recursion depth exceeded")


@pytest.mark.parametrize(
    "call", ["stop()", "import threading\nthreading.Thread(target=stop).start()\nthreading.Event().wait()"]
)
def test_the_line_of_an_immediate_exit_is_recorded(tmp_path, call):
    read, _ = run_and_read_failure(tmp_path, f"import os\ndef stop():\n    os._exit(3)\n{call}\n")
    assert (read.code, read.cause) == (3, Cause.PRIMARY)
    assert failures.format_stack(read) == [
        f'  File "{tmp_path / "train.py"}", line 3, in stop',
        "    os._exit(3)",
    ]
    assert failures.describe_end(read) == "exited with code 3"


CHILDREN = """
import multiprocessing, os, pickle
assert pickle.loads(pickle.dumps(os._exit)) is os._exit
child = multiprocessing.get_context("fork").Process(target=os._exit, args=(4,))
child.start()
child.join()
assert child.exitcode == 4
if (pid := os.fork()) == 0:
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
"""


def test_immediate_exits_of_children_are_not_those_of_the_rank(tmp_path):
    read, rank = run_and_read_failure(tmp_path, CHILDREN)
    assert read.exitcode == 0
    assert not rank.error.exists()


def test_an_exception_stays_the_failure_if_the_process_exits_immediately_after_it(tmp_path):
    source = "import atexit, os\natexit.register(os._exit, 3)\nraise ValueError('boom')\n"
    read, _ = run_and_read_failure(tmp_path, source)
    assert read.exitcode == 3
    assert failures.format_cause(read) == "ValueError: boom"


def test_the_stack_of_a_crash_begins_with_the_script(tmp_path):
    read, _ = run_and_read_failure(tmp_path, "import ctypes\nctypes.string_at(0)\n")
    assert read.exitcode == -signal.SIGSEGV
    assert "accel_cli" in Path(read.log).read_text()
    assert "train.py" in failures.format_stack(read)[0]
    assert not [line for line in failures.format_stack(read) if "accel_cli" in line]


def test_escape_sequences_are_removed_from_messages(tmp_path):
    read, _ = run_and_read_failure(tmp_path, r"raise ValueError('\x1b[2J\x1b]0;x\x07red\x08\x00')")
    assert failures.format_cause(read) == "ValueError: red\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_an_exit_with_code_0_is_not_recorded_as_a_failure(tmp_path):
    _, rank = run_and_read_failure(tmp_path, "import sys\nsys.exit(0)\n")
    assert not rank.error.exists()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([0, 2, 3], "ranks 0, 2 and 3"),
    ],
)
def test_format_ranks_joins_ranks_to_text(ranks, text):
    assert format_ranks(ranks) == text


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ", (4711,)),
        ("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Segmentation fault. ", ()),
        ("RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly", (4711,)),
        ("RuntimeError: DataLoader worker (pid(s) 4711, 12) exited unexpectedly", (4711, 12)),
    ],
)
def test_data_loader_workers_that_the_kernel_may_have_killed_are_recognized(text, workers):
    assert failure(0, text=text, kind="builtins.RuntimeError").lost_workers == workers


@pytest.mark.parametrize(
    ("end", "hint"),
    [
        ("exited unexpectedly with exit code 1. Details are lost", "ended itself"),
        ("is killed by signal: Segmentation fault. ", "a library crashed"),
        ("is killed by signal: Killed. ", "often for lack of memory"),
    ],
)
def test_the_hint_about_a_data_loader_worker_follows_from_its_end(end, hint):
    texts = [
        "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly",
        f"RuntimeError: DataLoader worker (pid 4711) {end}",
    ]
    chain = tuple(ExceptionInfo("builtins.RuntimeError", text) for text in texts)
    failed = Failure(0, "box", 7, 1, 1.0, chain=chain)
    assert hint in failures._find_hint(failed)


@pytest.mark.parametrize(
    ("exitcode", "text", "lost"),
    [
        (247, "", True), (137, "", True), (1, "", False), (9, "", False),
        (1, "subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>.", True),
        (1, "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL", True),
        (1, "RuntimeError: worker has exitcode -9", True),
        (1, "subprocess.CalledProcessError: Command 'x' returned non-zero exit status 9.", False),
    ],
)  # fmt: skip
def test_a_failure_after_the_kill_of_a_child_process_is_recognized(exitcode, text, lost):
    chain = (ExceptionInfo("x.Error", text),) if text else ()
    assert Failure(0, "box", 7, exitcode, 1.0, chain=chain).lost_child is lost


def failure_with_log(tmp_path, **more):
    fields = {"rank": 3, "host": "algo-2", "pid": 7, "exitcode": 1, "time": 0.0, "log": str(tmp_path / "log")}
    return Failure(**{**fields, **more})


def test_the_reason_has_the_last_frames_of_a_deep_traceback(tmp_path):
    frames = tuple(Frame(f"/opt/ml/code/{'deep/' * 12}{n}.py", n, f"call{n}", "x" * 90) for n in range(12))
    reason = format_reason(
        failure_with_log(tmp_path, chain=(ExceptionInfo("ValueError", "ValueError: boom\n", frames),))
    )
    head, *frame_lines = reason.splitlines()
    assert head == "exit code 1 on algo-2, rank 3: ValueError: boom"
    assert "in call11" in frame_lines[-2]
    assert len(reason.encode()) <= REASON_SIZE


def test_the_reason_of_a_failure_without_an_exception_has_the_end_of_the_log(tmp_path):
    (tmp_path / "log").write_text("one\n\ntwo\n")
    killed = format_reason(failure_with_log(tmp_path, exitcode=-9, out_of_memory=True))
    assert killed.splitlines() == [
        "exit code 137 on algo-2, rank 3: terminated by SIGKILL: killed by the kernel because memory ran out", "one", "two"
    ]  # fmt: skip


def test_a_message_of_accel_is_printed_to_its_end_without_the_error_that_it_explains():
    names = ", ".join(f"layers.{number}.weight" for number in range(60))
    text = f"RuntimeError: no gradient of {names}. Freeze them before prepare().\n"
    line = Frame("/home/me/train.py", 3, "<module>", "loss = model(x)")
    of_accel = Frame(
        f"{Path(accel_cli.__file__).parent}/runner/x.py", 1, "forward", "raise RuntimeError(text)"
    )
    explained = ExceptionInfo("builtins.RuntimeError", "RuntimeError: Expected reduction\nset DEBUG\n")
    raised = ExceptionInfo("builtins.RuntimeError", text, (line, of_accel))
    report = Failure(0, "box", 7, 1, 1.0, "log", chain=(raised, explained))
    assert failures.format_cause(report) == text.strip()
    assert not [line for line in failures.format_stack(report) if "after" in line]


def test_a_long_line_of_another_library_keeps_its_end():
    text = f"ValueError: {'x' * 900} Use y.\n"
    assert failures.format_cause(failure(0, text=text)).endswith("x Use y.")
    assert "more characters in its log" in failures.format_cause(failure(0, text=text))


def test_an_earlier_exception_is_shown_by_the_first_line_of_its_message():
    raised, earlier = (
        ExceptionInfo("builtins.ValueError", text) for text in ("ValueError: b\n", "OSError: a\nmore\n")
    )
    report = Failure(0, "box", 7, 1, 1.0, "log", chain=(raised, earlier))
    assert failures.format_stack(report) == ["after OSError: a"]


def test_failures_that_differ_in_their_rank_only_are_the_same(capsys):
    first, second = (failure(rank, text=f"ValueError: bad on rank {rank}\n") for rank in (0, 1))
    failures.print_report(first, [first, second], world_size=2, shown=True)
    assert "rank 1 failed later, in the same way" in capsys.readouterr().err


def test_the_report_of_a_rank_has_the_exceptions_that_had_ended_its_threads(tmp_path, capsys):
    rank = RankFolder(tmp_path / "rank_0")
    rank.path.mkdir()
    frames = [["/lib/python3.11/threading.py", 9, "run", ""], ["/s/train.py", 7, "read", "raise error"]]
    record = json.dumps(
        {"kind": "builtins.ValueError", "text": "ValueError: no data\nmore\n", "frames": frames}
    )
    damaged = '{"text": "", "frames": []}\n{"text": 3}\n{"frames": [[]], "text": "x"}\n'
    rank.thread_failures.write_text(f"{damaged}{record}\n{record}\n{damaged}")
    failed = failures.read_failure(rank, failure(0), started=0.0, is_replica_host=False)
    failures.print_report(failed, [failed], world_size=2, shown=True)
    report = capsys.readouterr().err
    assert "rank 0: a thread has failed before: ValueError: no data at train.py:7 (read)\n" in report


def test_a_crash_in_a_collective_names_the_line_of_each_rank_and_the_cure(capsys, tmp_path):
    log = tmp_path / "output.log"
    log.write_text(
        "what():  gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4.\nFatal Python error: Aborted\n"
    )
    frames = [Frame("/s/train.py", line, "main", "") for line in (10, 17)]
    crashed = Failure(1, "box", 7, -6, 1.0, str(log), crash=(frames[0],))
    link = ExceptionInfo("builtins.RuntimeError", "RuntimeError: Connection closed by peer\n", (frames[1],))
    failures.print_report(
        crashed, [crashed, Failure(0, "box", 8, 1, 2.0, chain=(link,))], world_size=2, shown=True
    )
    report = capsys.readouterr().err
    assert "rank 1 at train.py:10 (main); rank 0 at train.py:17 (main)" in report
    assert "unwrap_model(model) on one rank alone" in report


def test_a_script_whose_process_cannot_fork_prints_the_limit_on_processes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import errno, os\ndef fork(): raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))\nfork()\n"
    )
    command = [sys.executable, str(WORKER), "script", str(script)]
    environ = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert "accel: hint: the limit on processes is reached" in result.stderr


def test_a_script_without_a_launcher_process_prints_the_hint_below_its_traceback(tmp_path):
    """As with the launcher `single`, whose process the script replaces."""
    (tmp_path / "train.py").write_text("import no_such_package_anywhere\n")
    environ = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
    command = [sys.executable, str(WORKER), "script", "train.py"]
    process = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    *_, cause, hint = process.stderr.splitlines()
    assert cause == "ModuleNotFoundError: No module named 'no_such_package_anywhere'"
    assert hint.startswith(f"accel: hint: the script runs with {sys.executable}")


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.exit(3)\n",
        "import argparse\nargparse.ArgumentParser().parse_args(['--absent'])\n",
    ],
    ids=["sys.exit", "argparse"],
)
def test_an_exit_with_a_code_has_the_line_of_the_script(tmp_path, source):
    read, _ = run_and_read_failure(tmp_path, source)
    call = source.splitlines()[1]
    assert failures.format_stack(read) == [
        f'  File "{tmp_path}/train.py", line 2, in <module>',
        f"    {call}",
    ]
    assert failures.describe_end(read) == f"exited with code {read.exitcode}"


WORKER_TEXT = """\
KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/x/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/train.py", line 10, in __getitem__
    return self.labels['x']
           ~~~~~~~~~~~^^^^^
  File "/usr/lib/python3.11/collections/__init__.py", line 1011, in __getitem__
    return self.data[key]
KeyError: 'x'
"""


def test_the_failure_of_a_data_loader_worker_keeps_its_line_and_its_exception():
    assert failures.format_cause(failure(0, kind="builtins.KeyError", text=WORKER_TEXT)).splitlines() == [
        "KeyError: Caught KeyError in DataLoader worker process 0.",
        "... 6 more lines in its log",
        '  File "/home/me/train.py", line 10, in __getitem__',
        "    return self.labels['x']",
        "KeyError: 'x'",
    ]


def test_the_failure_of_a_process_of_a_pool_names_its_line():
    text = f'multiprocessing.pool.RemoteTraceback: \n"""\n{WORKER_TEXT.partition("Original ")[2]}"""\n'
    raised = ExceptionInfo("builtins.KeyError", "KeyError: 'x'\n")
    remote = ExceptionInfo("multiprocessing.pool.RemoteTraceback", text)
    report = Failure(0, "box", 7, 1, 1.0, "log", chain=(raised, remote))
    assert failures.format_stack(report) == [
        "after KeyError: 'x' in another process (/home/me/train.py, line 10)"
    ]


def test_an_abort_in_a_thread_of_a_library_has_the_stack_of_the_main_thread(tmp_path):
    folder = RankFolder(tmp_path)
    folder.fault.write_text(
        'Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n  File "/x/heartbeat.py", line 3 in beat\n\n'
        'Thread 0x02 (most recent call first):\n  File "/home/me/train.py", line 12 in <module>\n\nExtension modules: x\n'
    )
    crash = {}
    for number in (signal.SIGABRT, signal.SIGSEGV):
        read = failures.read_failure(
            folder, Failure(0, "box", 7, -number, 0.0), started=0.0, is_replica_host=False
        )
        crash[number] = [(frame.file, frame.line) for frame in read.crash]
    assert crash == {signal.SIGABRT: [("/home/me/train.py", 12)], signal.SIGSEGV: []}
