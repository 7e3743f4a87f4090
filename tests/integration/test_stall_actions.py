"""A stall ends: `launcher.stall_action` restarts the processes or ends the run, on one host and on several."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from support.hosts.network import hosts
from support.processes.commands import run_accel, run_together
from support.processes.waits import limit, wait_until

TRAINS = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

hang_step, mode = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
Path(f"pid{rank}.{attempt}").write_text(str(os.getpid()))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    if step == hang_step and rank == 1 and (attempt == 0 or mode == "always"):
        Path("hangs").touch()
        time.sleep(1000)
    if mode == "slow":
        time.sleep(0.5)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    Path(f"step{step}.{rank}.{attempt}").touch()
print(f"rank {rank} finished in attempt {attempt}", flush=True)
"""
RESUMES = """
import sys, time
import torch
from accel_runtime import Accelerator, ProjectConfiguration

project = ProjectConfiguration("out", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
class Steps:
    count = 0
    def state_dict(self):
        return {"count": self.count}
    def load_state_dict(self, state):
        self.count = state["count"]
steps = Steps()
accelerator.register_for_checkpointing(steps)
resumed = accelerator.resume()
start = steps.count
while steps.count < 6:
    if steps.count == 4 and not resumed and accelerator.process_index == 1:
        time.sleep(1000)
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    steps.count += 1
    accelerator.save_state()
accelerator.print("continued from step", start)
"""
PAIR = ("launch", "-q", "--no-profile", "--cpu", "--nproc-per-node", 2, "--shutdown-timeout", 1)
STALLS = ("--stall-timeout", 6)


RESTARTS = ("--stall-action", "restart", "--max-restarts")
STARTS_WITHIN = ("--set", "launcher.startup_timeout=3")
LAUNCHES = {
    "restarted": (TRAINS, (*PAIR, *STALLS, *RESTARTS, 2, "train.py", 3, "once")),
    "resumed": (RESUMES, (*PAIR, *STALLS, *RESTARTS, 1, "train.py")),
    "no restart is left": (
        TRAINS,
        (*PAIR, *STALLS, *RESTARTS, 1, *STARTS_WITHIN, "train.py", 3, "always"),
    ),
    "no progress since the restart": (
        TRAINS,
        (*PAIR, *STALLS, *RESTARTS, 3, *STARTS_WITHIN, "train.py", 0, "always"),
    ),
}
"""For each launch of the tests with `results`, its script and command."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of the launches by name; they run at the same time, since they mostly wait."""
    folder = tmp_path_factory.mktemp("launches")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCEL_")}
    for name, (text, _) in LAUNCHES.items():
        (folder / name / ".git").mkdir(parents=True)
        (folder / name / "train.py").write_text(text)
    commands = {folder / name: command for name, (_, command) in LAUNCHES.items()}
    done = run_together(commands, env=environ | {"ACCEL_HOME": str(folder / "home")})
    return {path.name: result for path, result in done.items()}


@pytest.mark.slow
def test_restarted_processes_train_to_the_end(results):
    done = results["restarted"]
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 finished in attempt 1\n"
    assert re.search(r"accel: restart 1 of 2: no progress for \d+ s on ", done.stderr)
    assert 'train.py", line 16 in <module>' in done.stderr, "the report with the stacks comes first"


@pytest.mark.slow
def test_a_restarted_script_resumes_from_its_newest_checkpoint(results):
    done = results["resumed"]
    assert (done.returncode, done.stdout) == (0, "continued from step 4\n"), done.stderr


def test_a_stall_that_fails_ends_the_run_with_its_own_code(script, cwd):
    script(TRAINS)
    done = run_accel(*PAIR, *STALLS, "--stall-action", "fail", "train.py", 3, "once")
    assert done.returncode == 124
    assert "accel: error: The run has stalled: no progress for " in done.stderr
    assert "It is not restarted: launcher.stall_action is fail." in done.stderr
    pids = [int(path.read_text()) for path in cwd.glob("pid*")]
    assert len(pids) == 2
    assert not [pid for pid in pids if Path("/proc", str(pid)).exists()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no restart is left", "all 1 restarts are used (launcher.max_restarts)"),
        ("no progress since the restart", "no step was made since the restart after the last stall"),
    ],
)
def test_a_restart_that_does_not_help_is_not_repeated(results, name, reason):
    done = results[name]
    assert done.returncode == 124
    assert done.stderr.count("accel: restart ") == 1
    assert f"It is not restarted: {reason}." in done.stderr


# Several hosts ---------------------------------------------------------------------------

MEET = ("-q", "--cpu", "--rdzv-endpoint", "h0:29400", "--shutdown-timeout", "1", "--stall-action", "restart")


def read_output(process):
    return re.sub(r"^\[\d+\] ", "", process.communicate(timeout=limit(150))[0], flags=re.MULTILINE)


def find_pid(cwd, rank, attempt=0):
    path = cwd / f"pid{rank}.{attempt}"
    return int(path.read_text() or 0) if path.exists() else 0


@pytest.mark.service("root")
def test_three_hosts_restart_together_after_a_hang_on_one(script):
    script(TRAINS)
    options = ("--nnodes", "3", "--stall-timeout", "3", "--max-restarts", "2", "train.py", "3", "once")
    with hosts(3) as three:
        launched = three.launch(*MEET, *options)
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [0, 0, 0], outputs
    restarts = {line for output in outputs for line in output.splitlines() if "accel: restart " in line}
    assert len(restarts) == 1, restarts
    assert re.search(r"restart 1 of 2: no progress for \d+ s on h\d$", restarts.pop())
    assert "finished in attempt 1" in "".join(outputs)


@pytest.mark.service("root")
def test_hosts_restart_after_the_processes_of_one_were_stopped(script, cwd):
    """A stopped process does not handle SIGTERM."""
    script(TRAINS)
    options = ("--nnodes", "2", "--stall-timeout", "8", "--max-restarts", "1", "train.py", "9", "slow")
    with hosts(2) as two:
        launched = two.launch(*MEET, *options)
        wait_until((cwd / "step1.1.0").exists)
        os.kill(find_pid(cwd, 1), signal.SIGSTOP)
        outputs = [read_output(process) for process in launched]
    assert [process.returncode for process in launched] == [0, 0], outputs
    assert "finished in attempt 1" in "".join(outputs)


@pytest.mark.service("root")
@pytest.mark.full
@pytest.mark.parametrize("fault", ["agent", "network"])
def test_a_run_goes_on_without_a_host_whose_agent_is_stopped_or_whose_network_fails(script, cwd, fault):
    script(TRAINS)
    options = ("--nnodes", "1:2", "--stall-timeout", "20", "--max-restarts", "2",
               "--set", "launcher.last_call_timeout=2", "--set", "process_group_timeout=6",
               "train.py", "9", "slow")  # fmt: skip
    with hosts(2) as two:
        first, second = two.launch(*MEET, *options)
        wait_until(lambda: find_pid(cwd, 1))
        if fault == "agent":
            os.kill(second.pid, signal.SIGSTOP)
            os.kill(find_pid(cwd, 1), signal.SIGSTOP)
        else:
            two[1].cut()
        output = read_output(first)
        if fault == "agent":
            os.kill(second.pid, signal.SIGKILL)
        else:
            second.kill()
    assert first.returncode == 0, output
    assert "finished in attempt 1" in output


@pytest.mark.service("root")
@pytest.mark.full
def test_one_host_that_gives_up_ends_the_run_on_all(script):
    script(TRAINS)
    options = ("--nnodes", "2", "--max-restarts", "3", "--set", "launcher.startup_timeout=4", "--stall-timeout", "2",
               "train.py", "0", "always")  # fmt: skip
    with hosts(2) as two:
        launched = two.launch(*MEET, *options)
        outputs = [read_output(process) for process in launched]
    codes = [process.returncode for process in launched]
    assert 124 in codes, outputs
    assert set(codes) <= {1, 124}
    assert "no step was made since the restart after the last stall" in "".join(outputs)


@pytest.mark.slow
def test_a_program_whose_steps_are_not_seen_is_not_ended(script, home):
    done = run_accel(
        "launch", "--no-profile", "--nproc-per-node", 2, "--stall-timeout", 1, "--set", "launcher.startup_timeout=1", "--stall-action", "fail",
        "--no-python", "sleep", 4,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no process on this machine has made progress" in done.stderr
    assert (
        done.stderr.count(
            "launcher.stall_action fail has no effect: steps of a program (--no-python) are not seen"
        )
        == 1
    )
