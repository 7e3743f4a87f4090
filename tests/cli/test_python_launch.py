"""`accel_cli.launch`: the command line of a request, and results, refusals and interrupts of real launches."""

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import accel_cli
from accel_cli.commands import launch as command
from accel_cli.errors import UsageError
from accel_cli.planning.launch_options import Request
from accel_cli.planning.machine import Machine
from accel_cli.profile import planner
from accel_cli.profile.options import OPTIONS
from accel_cli.python_launch import LaunchOptions, build_words

TRAIN = """\
import sys, time
import torch
from accel_runtime import Accelerator

accelerator = Accelerator(log_with="jsonl", project_dir="logs")
accelerator.init_trackers("t")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(3):
    accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
    optimizer.step()
accelerator.log({"loss": 0.5}, step=3)
print("trained", sys.argv[1:], accelerator.num_processes)
if sys.argv[1:] == ["fail"]:
    raise ValueError("no luck")
if sys.argv[1:] == ["wait"]:
    open(f"waits{accelerator.process_index}", "w").close()
    time.sleep(600)
"""
ON_TWO = {"nproc_per_node": 2, "cpu": True, "no_profile": True}


def test_the_options_of_the_request_are_those_of_the_command():
    parameters = inspect.signature(command.launch).parameters.keys()
    # The target is an argument; a plan is printed by the command only.
    other = {"context", "script", "args", "module", "no_python", "dry_run", "explain"}
    assert LaunchOptions.__annotations__.keys() == parameters - other
    assert LaunchOptions.__annotations__.keys() <= OPTIONS.keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nproc_per_node": 2, "cpu": True, "quiet": False}, ["--nproc-per-node", "2", "--cpu"]),
        ({"gpu_ids": [0, 2], "ranks": (1,)}, ["--gpu-ids", "0,2", "--ranks", "1"]),
        ({"check_replay": True, "record_numerics": "every:5"}, ["--check-replay", "100", "--record-numerics", "every:5"]),
        ({"log_dir": Path("/x y"), "profile": None}, ["--log-dir", "/x y"]),
        (
            {"set": {"launcher.rdzv_id": "no", "launcher.nnodes": 2, "env.A": "1 # 2", "fully_shard.wrap": ["A", "B"]}},
            ["--set", 'launcher.rdzv_id="no"', "--set", "launcher.nnodes=2", "--set", "env.A=1 # 2", "--set", 'fully_shard.wrap=["A", "B"]'],
        ),
    ],
)  # fmt: skip
def test_options_become_the_words_of_the_command_line(options, words):
    assert build_words(Path("a.py"), (1, Path("b"), "-c"), "script", options) == (
        *words,
        "--",
        "a.py",
        "1",
        "b",
        "-c",
    )


def test_values_of_set_are_those_that_the_profile_gets(cwd):
    """Text that YAML would read as another value stays text."""
    values = {
        "env.A": "no",
        "launcher.kind": "torchrun",
        "launcher.rdzv_id": "007",
        "launcher.max_restarts": 2,
    }
    words = build_words("train.py", (), "script", {"set": values})
    texts = [word for word in words if "=" in word]
    resolved = planner.resolve(
        Request("train.py", options={"no_profile": True, "set": texts}), {}, Machine(1)
    )
    assert {key: resolved.values[key] for key in values} == values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc": 2}, "launch has no option 'nproc': expected quiet, "),
        ({"cpu": "yes"}, "Invalid cpu 'yes': expected True or False."),
        ({"max_restarts": True}, "Invalid max_restarts True: expected N."),
        ({"set": "a=b"}, "Invalid set: expected keys and values, got 'a=b'. Give a dict."),
    ],
)
def test_a_request_with_an_invalid_option_starts_no_process(options, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(UsageError) as caught:
        accel_cli.launch("train.py", **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"set": {"launcher.nproc": 2}}, "--set: launcher.nproc: unknown key (did you mean launcher.nproc_per_node?)"),
        ({"node_rank": -1}, "Invalid value for '--node-rank': expected at least 0, got '-1'."),
    ],
)  # fmt: skip
def test_a_refused_launch_raises_the_error_of_the_command(cwd, options, message):
    Path("train.py").write_text("")
    with pytest.raises(UsageError) as caught:
        accel_cli.launch("train.py", no_profile=True, output=[].append, **options)
    assert str(caught.value).startswith(message)


def test_a_launch_from_a_thread_returns_its_end_its_run_and_its_metrics(cwd):
    Path("train.py").write_text(TRAIN)
    lines, results = [], []
    thread = threading.Thread(
        target=lambda: results.append(
            accel_cli.launch("train.py", ["x", 1], output=lines.append, environ=dict(os.environ), **ON_TWO)
        )
    )
    thread.start()
    thread.join()
    (result,) = results
    assert (result.exit_code, result.reason, result.has_timed_out) == (0, "", False)
    assert (result.steps, dict(result.metrics)) == (3, {"loss": 0.5})
    assert result.run == result.folder.name
    assert (result.folder / "attempt_0" / "rank_1" / "output.log").read_text() == "trained ['x', '1'] 2\n"
    assert "trained ['x', '1'] 2" in lines


def test_a_failed_launch_has_the_reason_and_raises_if_it_is_checked(cwd):
    Path("train.py").write_text(TRAIN)
    with pytest.raises(
        accel_cli.LaunchError, match=r"ended with exit code 1: .*rank \d: ValueError: no luck"
    ) as caught:
        accel_cli.launch("train.py", ["fail"], output=[].append, check=True, **ON_TWO)
    assert caught.value.result.steps == 3


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_that_fails_with_the_code_of_a_refusal_is_no_refusal(cwd, processes):
    Path("train.py").write_text("import sys; sys.exit(2)")
    result = accel_cli.launch(
        "train.py", nproc_per_node=processes, cpu=True, no_profile=True, output=[].append
    )
    assert (result.exit_code, result.folder.is_dir()) == (2, True)


@pytest.mark.slow
def test_a_launch_within_a_launch_has_a_run_of_its_own(cwd):
    Path("inner.py").write_text("")
    Path("train.py").write_text(
        "import accel_cli\n"
        "result = accel_cli.launch('inner.py', cpu=True, no_profile=True)\n"
        "print('inner', result.run)\n"
    )
    lines = []
    result = accel_cli.launch("train.py", cpu=True, no_profile=True, output=lines.append)
    assert "-train-" in result.run
    assert any(line.startswith("inner ") and "-inner-" in line for line in lines)


@pytest.mark.slow
def test_a_launch_that_takes_too_long_is_ended(cwd):
    Path("train.py").write_text("import time; time.sleep(600)")
    result = accel_cli.launch("train.py", timeout=10, **ON_TWO)
    assert (result.exit_code, result.has_timed_out) == (128 + signal.SIGTERM, True)


@pytest.mark.slow
def test_an_interrupt_is_passed_on_and_raised_after_the_end_of_the_launch(cwd):
    Path("train.py").write_text(TRAIN)
    Path("caller.py").write_text(
        textwrap.dedent(
            """
            import accel_cli, sys
            try:
                accel_cli.launch("train.py", ["wait"], nproc_per_node=2, cpu=True, no_profile=True)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            """
        )
    )
    caller = subprocess.Popen([sys.executable, "caller.py"], stdout=subprocess.PIPE, text=True)
    while not Path("waits1").exists():
        time.sleep(0.05)
        assert caller.poll() is None
    caller.send_signal(signal.SIGINT)
    assert caller.communicate()[0].endswith("interrupted\n")
    (run,) = (Path(os.environ["ACCEL_HOME"]) / "runs").iterdir()
    assert '"exit_code": 130' in (run / "run.json").read_text()
