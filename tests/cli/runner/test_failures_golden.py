"""Failure reports, compared with golden files."""

from dataclasses import replace

import pytest
from support.cases import golden

from accel_cli.runner.failures import (
    ExceptionInfo,
    Failure,
    Frame,
    find_root_failure,
    format_one_line,
    format_reason,
    print_report,
)

SCRIPT = Frame("train.py", 9, "step", "    loss.backward()")
LIBRARY = Frame("/lib/torch/nn/modules/linear.py", 134, "forward", "    return F.linear(input, self.weight)")
RAISED = ExceptionInfo("builtins.ValueError", "ValueError: boom\n", (SCRIPT,))
FAILED = Failure(1, "node0", 4711, 1, 2.0, "/logs/rank_1/output.log", chain=(RAISED,))
LOST = ExceptionInfo(
    "builtins.RuntimeError",
    "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1\n",
    (SCRIPT,),
)
STALLED = ExceptionInfo(
    "builtins.RuntimeError",
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation\n",
)
WORKER = ExceptionInfo(
    "builtins.RuntimeError", "RuntimeError: DataLoader worker (pid 4712) is killed by signal: Killed. \n"
)
WORKERS = ExceptionInfo(
    "builtins.RuntimeError", "RuntimeError: DataLoader worker (pid(s) 4712, 4713) exited unexpectedly\n"
)
OUT_OF_MEMORY = ExceptionInfo(
    "torch.OutOfMemoryError",
    "torch.OutOfMemoryError: CUDA out of memory. If reserved by PyTorch but unallocated memory is large try x\n",
)
FAILURES = {
    "raised": [FAILED],
    "raised-from": [replace(FAILED, chain=(ExceptionInfo("x.E", "x.E: two\n", (SCRIPT, LIBRARY)), RAISED))],
    "one-and-lost": [FAILED, replace(FAILED, rank=0, time=3.0, chain=(LOST,))],
    "the-same-on-all": [FAILED, replace(FAILED, rank=2, time=3.0), replace(FAILED, rank=3, time=3.5)],
    "different": [FAILED, replace(FAILED, rank=0, time=3.0, chain=(ExceptionInfo("x.E", "x.E: other\n"),))],
    "timed-out": [replace(FAILED, chain=(STALLED,))],
    "killed": [replace(FAILED, chain=(), exitcode=-9)],
    "killed-for-memory": [replace(FAILED, chain=(), exitcode=-9, out_of_memory=True)],
    "crashed": [replace(FAILED, chain=(), exitcode=-11, crash=(SCRIPT,))],
    "aborted": [
        replace(FAILED, chain=(), exitcode=-6),
        *(replace(FAILED, rank=rank, time=3.0, chain=(), exitcode=-6) for rank in (0, 2)),
        replace(FAILED, rank=3, time=3.0, chain=(LOST,)),
    ],
    "worker-killed": [replace(FAILED, chain=(WORKER,))],
    "worker-killed-for-memory": [replace(FAILED, chain=(WORKER,), out_of_memory=True)],
    "workers-lost": [replace(FAILED, chain=(WORKERS,))],
    "child-killed": [replace(FAILED, chain=(), exitcode=247)],
    "child-killed-for-memory": [replace(FAILED, chain=(), exitcode=247, out_of_memory=True)],
    "out-of-memory": [replace(FAILED, chain=(OUT_OF_MEMORY,))],
    "exit-code": [replace(FAILED, chain=(), exitcode=3, exit=3)],
    "exit-text": [replace(FAILED, chain=(), exitcode=1, exit="no data in /data")],
    "replicas": [replace(FAILED, world_size=0)],
}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_report_equals_its_golden_file(name, elsewhere, capfd):
    failures = FAILURES[name]
    first = find_root_failure(failures)
    world_size = 4 if first.world_size is None else 0
    print_report(first, failures[1:] if elsewhere else failures, world_size=world_size, shown=False)
    out, err = capfd.readouterr()
    assert not out
    text = f"{err}\nin a line:\n{format_one_line(first)}\n\nin a file:\n{format_reason(first)}\n"
    golden.check(f"failures/{name}{'-elsewhere' if elsewhere else ''}.txt", text)


def test_every_golden_failure_report_has_a_test():
    assert golden.names("failures") == {f"{name}{end}" for name in FAILURES for end in ("", "-elsewhere")}
