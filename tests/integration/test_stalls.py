"""Runs without progress: the output of `accel launch --stall-timeout` and `accel stacks`."""

import re
import signal
import subprocess
import sys

import pytest
from support.processes.children import Process
from support.processes.commands import Accel, run_accel
from support.processes.waits import wait_until

STALLS = """
import time, torch
from accel_runtime import Accelerator
def augment():
    time.sleep(8)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(4):
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    if step == 2 and accelerator.process_index == 1:
        augment()
    accelerator.gather(torch.ones(1))
time.sleep(2.5)  # the launcher looks every 0.75 s
"""
SLEEPS = """
import os, threading, time
from pathlib import Path
def wait():
    while not Path("go").exists():
        time.sleep(1)
threading.Thread(target=wait).start()
Path("up" + os.environ["RANK"]).touch()
wait()
"""

STRAYS = """
import sys, time, torch
from accel_runtime import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(12):
    if step == 9 and accelerator.is_main_process:
        STRAY
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
"""


@pytest.fixture
def accel(cwd):
    """Run `accel`, forked from an interpreter that has imported torch, in an empty folder."""
    return run_accel


@pytest.fixture
def sleeping(script, cwd):
    """A running launch of two processes that wait for the file `go`; executed, since its stacks are read."""
    script(SLEEPS)
    command = [sys.executable, "-m", "accel_cli", "launch", "-q", "--nproc-per-node", "2", "train.py"]
    with Process(command) as process:
        try:
            wait_until(lambda: len(list(cwd.glob("up*"))) == 2)
            yield process
        finally:
            (cwd / "go").touch()
    assert process.returncode == 0, "who was asked goes on"


@pytest.mark.slow
def test_a_stall_report_has_steps_collectives_and_the_stacks_that_differ(accel, script):
    script(STALLS)
    result = accel("launch", "-q", "--nproc-per-node", 3, "--stall-timeout", 3, "train.py")
    assert result.returncode == 0, result.stderr
    # A slow machine may stall elsewhere too.
    notes = result.stderr.split("accel: ")
    index = next(i for i, note in enumerate(notes) if "in augment" in note)
    table = notes[index].splitlines()
    assert table[0].startswith("no process on this machine has made progress for ")
    assert table[1].split() == ["rank", "steps", "batches", "last", "progress", "location"]
    for rank, location in enumerate(["in", "after", "in"]):
        words = table[2 + rank].split()
        assert words[:3] == [str(rank), "3", "0"]
        assert f"{location} gather() at train.py:14 (<module>)" in table[2 + rank]
    assert table[5] == "  rank 1, innermost call first:"
    assert 'train.py", line 5' in table[6]
    assert "ranks 0 and 2 are at the same place" in table[-3]
    assert table[-2:] == [
        "  ranks 0 and 2 are in gather() at train.py:14 (<module>)",
        "  rank 1 is at train.py:5 (augment)",
    ]
    assert notes[index + 1].startswith("progress resumed after")


@pytest.mark.slow
def test_accel_stacks_prints_the_stacks_of_a_run_that_continues(accel, sleeping):
    result = accel("stacks")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].endswith(f"-train-{sleeping.pid}")
    assert [line.split() for line in lines[2:4]] == [
        [rank, "-", "-", "-", "no", "step", "yet"] for rank in "01"
    ]
    assert lines[4] == "  ranks 0 and 1, innermost call first:"
    assert 'train.py", line 6 in wait' in lines[5]
    assert 'train.py", line 9 in <module>' in lines[6]
    assert "worker.py" not in result.stdout

    output_of_rank = accel("stacks", lines[0], "--rank", 1, "--full").stdout
    assert "  rank 1, innermost call first:" in output_of_rank
    assert "  another thread:" in output_of_rank
    assert "rank 0" not in output_of_rank

    unknown_rank = accel("stacks", "--rank", 5)
    assert (
        unknown_rank.returncode,
        "does not run on this machine. Local ranks: 0, 1." in unknown_rank.stderr,
    ) == (2, True)


CLOSES = """
import os, signal, time
from pathlib import Path
os.closerange(3, LAST)
files = [open(f"data{number}", "wb", buffering=0) for number in range(30)]
Path("up0").touch()
while not Path("go").exists():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "answer"), [(1000, "innermost call first"), (100_000, "the script has closed the file")]
)
def test_stacks_are_not_written_to_files_that_the_script_opens_after_it_closed_all_others(
    accel, script, cwd, last, answer
):
    script(CLOSES.replace("LAST", str(last)))
    arguments = ("launch", "-q", "--set", "launcher.kind=torchrun", "--nproc-per-node", 1, "train.py")
    with Accel(*arguments, stdin=subprocess.DEVNULL) as process:
        try:
            wait_until((cwd / "up0").exists)
            output = accel("stacks").stdout
        finally:
            (cwd / "go").touch()
    assert answer in output
    assert process.returncode == 128 + signal.SIGSEGV
    assert {file.stat().st_size for file in cwd.glob("data*")} == {0}


def test_accel_stacks_without_a_running_run_is_an_error(accel, script):
    script("")
    assert "No run of accel launch is in progress on this machine" in accel("stacks").stderr
    result = accel("stacks", "gone")
    assert result.returncode == 2
    assert "accel: error: Run 'gone' not found in " in result.stderr
    assert accel("launch", "-q", "--nproc-per-node", 2, "train.py").returncode == 0
    assert accel("stacks").returncode == 2


@pytest.mark.parametrize(
    ("model", "waits"),
    [
        ("torch.nn.Linear(2, 1)", "backward()"),
        pytest.param(
            "torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))",  # its buffers are broadcast
            "the forward pass",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_that_ends_early_is_named_by_the_waiting_ranks(accel, script, model, waits):
    script(STRAYS.replace("STRAY", "sys.exit()").replace("torch.nn.Linear(2, 1)", model, 1))
    result = accel("launch", "-q", "--nproc-per-node", 2, "train.py")
    assert result.returncode == 1
    assert (
        f"RankLostError: {waits} at train.py:10 (<module>) cannot complete: rank 0 ended normally after 9 steps"
        in result.stderr
    )


@pytest.mark.parametrize(
    "call",
    [
        "gather(torch.ones(1))",
        pytest.param("wait_for_everyone()", marks=pytest.mark.full),
    ],
)
def test_a_process_that_leaves_the_loop_early_fails_at_its_next_collective(accel, script, call):
    script(
        "from accel_runtime.collectives import stalls, transport\n"
        "transport.WATCH_INTERVAL_S = stalls.IDLE_S = stalls.BACKWARD_S = 0.5\n"
        + STRAYS.replace("STRAY", f"accelerator.{call}; break")
    )
    result = accel("launch", "-q", "--nproc-per-node", 2, "train.py")
    assert result.returncode == 1
    name = call.partition("(")[0]
    lines = result.stderr[result.stderr.index("accel: error: rank 0 of 2") :].splitlines()
    assert lines[0].endswith(
        f"StallError: {name} at train.py:11 (<module>) cannot complete: rank 1 is in backward() at train.py:12 (<module>) "
        "after 9 steps and 0 batches. Call it on all ranks; to leave a loop on all ranks at once, use set_trigger() and "
        "check_trigger()."
    )
    assert lines[1:3] == [
        f"  rank 0: waits in {name} at train.py:11 (<module>) after 9 steps and 0 batches",
        "  rank 1: is in backward() at train.py:12 (<module>) after 9 steps and 0 batches",
    ]


LEAVES = """
import time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from accel_runtime import Accelerator
from accel_runtime.collectives import rank_status, stalls, transport
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for step, (batch,) in enumerate(loader):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step == STEP:
            STRAY
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "stray", "places"),
    [
        (
            0,
            "if accelerator.is_main_process: accelerator.gather(batch)",
            ("waits in gather", "is in the forward pass"),
        ),
        pytest.param(
            2,
            "if accelerator.is_main_process: break",
            ("waits in all_gather of random states", "is in backward()"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            2,
            "accelerator.gather(batch) if accelerator.is_main_process else dist.barrier()",
            ("waits in gather", "is in barrier()"),
            marks=pytest.mark.slow,
        ),
        (
            2,
            "accelerator.gather(batch) if accelerator.is_main_process else accelerator.main_process_first().__enter__()",
            ("waits in gather", "is in main_process_first()"),
        ),
    ],
    ids=[
        "a call in the first step",
        "the next epoch",
        "a collective of the script",
        "a wait for the main process",
    ],
)
def test_ranks_that_wait_for_each_other_end_within_seconds(accel, script, step, stray, places):
    text = LEAVES.replace("STEP", str(step)).replace("STRAY", stray)
    script(
        text.replace(
            "accelerator =",
            "transport.WATCH_INTERVAL_S = stalls.IDLE_S = stalls.BACKWARD_S = 0.5\naccelerator =",
        )
    )
    result = accel("launch", "-q", "--nproc-per-node", 2, "--ranks", "all", "train.py")
    assert result.returncode == 1
    lines = result.stderr[result.stderr.index("accel: error: rank 0 of 2") :].splitlines()
    first, second = places
    assert f"StallError: {first.removeprefix('waits in ')} at train.py:" in lines[0]
    assert f"cannot complete: rank 1 {second} at train.py:" in lines[0]
    assert [line.split(" at ")[0] for line in lines[1:3]] == [f"  rank 0: {first}", f"  rank 1: {second}"]
    # Also on the rank in a call of torch, whose own error names no rank.
    assert ("[1] accel: StallError: " in result.stderr) == (second != "is in backward()")


@pytest.mark.slow
@pytest.mark.parametrize("shown", ["all", pytest.param("0", marks=pytest.mark.full)])
def test_ranks_that_wait_for_each_other_in_torch_are_reported_once_with_their_lines(script, cwd, shown):
    script(
        LEAVES.replace("STEP", "2")
        .replace("STRAY", "dist.barrier() if accelerator.is_main_process else dist.all_reduce(torch.ones(3))")
        .replace(
            "accelerator =",
            "rank_status.SAMPLE_INTERVAL_S, rank_status.REPORT_WAIT_S = 0.5, 2\naccelerator =",
        )
    )
    command = ("launch", "-q", "--nproc-per-node", 2, "--ranks", shown, "--shutdown-timeout", "1", "train.py")
    with Accel(*command, stderr=subprocess.PIPE, text=True) as process:
        lines = [process.stderr.readline() for _ in range(3)]
        process.terminate()
        rest = process.stderr.read()
    lines = [re.sub(r"^\[\d\] ", "", line) for line in lines]
    assert re.fullmatch(r"accel: rank [01] has waited 2 s for other ranks:\n", lines[0])
    assert lines[1:] == [
        "  rank 0: is in barrier() at train.py:18 (<module>) after 3 steps and 3 batches\n",
        "  rank 1: is in all_reduce() at train.py:18 (<module>) after 3 steps and 3 batches\n",
    ]
    assert "has waited" not in rest


SLOW_BACKWARD = """
import time, torch
from accel_runtime import Accelerator
from accel_runtime.collectives import stalls, transport
transport.WATCH_INTERVAL_S = stalls.IDLE_S = stalls.BACKWARD_S = LOOK_EVERY
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value
    @staticmethod
    def backward(ctx, gradient):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end: PASS_TIME
        return gradient
accelerator = Accelerator(cpu=True)
value = torch.ones(1, requires_grad=True)
for _ in range(PASSES * accelerator.process_index):
    CALL
print(accelerator.gather(torch.ones(1)).tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "texts",
    [
        {"LOOK_EVERY": "0.3", "SECONDS": "3", "PASS_TIME": "pass", "PASSES": "1", "CALL": "Slow.apply(value).sum().backward()"},
        {
            "LOOK_EVERY": "2",
            "SECONDS": "0.3",
            "PASS_TIME": "time.sleep(0.3)",
            "PASSES": "20",
            "CALL": "accelerator.backward(Slow.apply(value).sum())",
        },
    ],
    ids=["computes in one", "runs more of its own"],
)  # fmt: skip
def test_a_collective_waits_for_a_process_in_backward_passes_that_average_nothing(accel, script, texts):
    text = SLOW_BACKWARD
    for name, value in texts.items():
        text = text.replace(name, value)
    script(text)
    result = accel("launch", "-q", "--nproc-per-node", 2, "train.py")
    assert (result.returncode, result.stdout) == (0, "[1.0, 1.0]\n"), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stray", "message"),
    [
        ("time.sleep(100)", "rank 0 is at train.py:9 (<module>) after 9 steps"),
        pytest.param("continue", "rank 0 ended normally after 11 steps", marks=pytest.mark.full),
        (
            "accelerator.gather(torch.ones(1))",
            "rank 0 waits in gather at train.py:9 (<module>) after 9 steps",
        ),
    ],
    ids=["sleeps", "skips", "gathers"],
)
def test_a_stall_in_gradient_averaging_has_the_locations_of_all_processes(
    accel, script, monkeypatch, stray, message
):
    monkeypatch.setenv("ACCEL_PROCESS_GROUP_TIMEOUT", "3")
    script(STRAYS.replace("STRAY", stray))
    result = accel("launch", "-q", "--nproc-per-node", 2, "train.py")
    assert result.returncode == 1
    error = result.stderr[result.stderr.index("accel: error:") :]
    assert message in error or "rank 1 did not come to gather at train.py:9" in error
    assert "rank 1" in error


HANGS_IN_A_WORKER = """
import time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 37:
            self.read()
        return torch.ones(2)
    def read(self):
        import os
        from pathlib import Path
        Path("worker").write_text(str(os.getpid()))
        time.sleep(1000)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2):
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_data_loader_worker_that_hangs_is_named_with_its_stack(accel, script, cwd):
    script(HANGS_IN_A_WORKER)
    options = ("--stall-timeout", 3, "--stall-action", "fail", "--shutdown-timeout", 1)
    result = accel(
        "launch", "-q", "--set", "launcher.kind=torchrun", "--nproc-per-node", 1, *options, "train.py"
    )
    assert result.returncode == 124, result.stderr
    lines = result.stderr.splitlines()
    worker = (cwd / "worker").read_text()
    index = lines.index(f"  a data-loader worker of rank 0 (pid {worker}), innermost call first:")
    assert 'train.py", line 14 in read' in lines[index + 1]
    assert 'train.py", line 8 in __getitem__' in lines[index + 2]
    assert "data-loader worker" not in "".join(lines[index + 3 :]), "the other worker waits for work"
