"""The slurm launcher and `accel jobs` on a real cluster of two nodes."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from support.processes.commands import Accel, run_accel
from support.processes.terminal import CommandScreen
from support.processes.waits import WAIT_FOR_SIGNAL, limit, read_until, wait_until
from support.runs.slow_example import checkpointing

WAIT_S = 400
"""A generous bar for a job that hangs."""
TRAIN = """
import json, os, socket, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
told = {"argv": sys.argv[1:], "world": dist.get_world_size(), "total": total.item(), "host": socket.gethostname(),
        "precision": os.environ["ACCEL_MIXED_PRECISION"], "mine": os.environ.get("MINE"), "set": os.environ.get("SETUP"),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
with open(f"rank{dist.get_rank()}.json", "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
"""
STAY = (
    """
import os, signal, sys, time
def leave(number, _):
    if number == signal.SIGTERM:
        time.sleep(2)  # the time it takes to save
    print("rank", os.environ["RANK"], "saves", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
if "listen" in sys.argv:
    signal.signal(signal.SIGUSR1, leave)
print("rank", os.environ["RANK"], "runs, attempt", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
    sys.exit(0)
"""
    + WAIT_FOR_SIGNAL
)


@pytest.fixture
def on_slurm(slurm_cluster, cwd, monkeypatch):
    """Runs `accel` on the login node."""
    monkeypatch.setenv("PATH", f"{slurm_cluster.path}{os.pathsep}{os.environ['PATH']}")
    return run_accel


@pytest.fixture
def jobs(slurm_cluster, cwd):
    """Start `accel launch` of jobs, and end them after the test."""
    started = []

    def launch(*args):
        process = Accel(
            *("launch", "--cpu", "--set", "launcher.kind=slurm", "--ranks", "all", *args),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
        )
        started.append(process)
        return Following(process, slurm_cluster)

    yield launch
    for process in started:
        process.kill()
        process.communicate()
    slurm_cluster.command("scancel", f"--user={os.getuid()}")


class Following:
    """An `accel launch` that follows its job."""

    def __init__(self, process, cluster):
        self.process, self.cluster, self.said = process, cluster, ""

    def until(self, pattern):
        """Read the output until a line matches."""
        self.said = read_until(self.process, pattern, self.said, seconds=WAIT_S)
        found = re.search(pattern, self.said)
        return found[1] if found.groups() else found[0]

    def end(self):
        """Return the whole output, and the exit code."""
        out, _ = self.process.communicate(timeout=limit(WAIT_S))
        self.said += out
        return self.process.returncode

    def command(self, *args):
        done = self.cluster.command(*args)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start_now(self, job):
        """Skip the two minutes in which Slurm waits for the end of the previous attempt."""
        # What the node still has to report would be taken for the end of the next attempt.
        completing = ("sinfo", "--noheader", "--states=completing", "--format=%N")
        wait_until(
            lambda: not self._on_a_node(job) and not self.command(*completing), WAIT_S, lambda: self.said
        )
        time.sleep(1)
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now")

    @staticmethod
    def _on_a_node(job):
        steps = ["pgrep", "-f", rf"^slurmstepd: \[{job}\."]
        return subprocess.run(steps, stdout=subprocess.DEVNULL, check=False).returncode == 0


def launch(on_slurm, *args, **options):
    return on_slurm("launch", "--cpu", "--set", "launcher.kind=slurm", *args, timeout=WAIT_S, **options)


def job_of(done):
    return re.search(r"job (\d+) is submitted", done.stderr)[1]


def test_a_job_trains_on_two_nodes(on_slurm, script, cwd, home):
    script(TRAIN)
    (home / "profiles").mkdir(parents=True)
    (home / "profiles" / "default.yaml").write_text(
        "schema_version: 1\nlauncher:\n  kind: slurm\n  nnodes: 2\n  nproc_per_node: 2\n  gpus_per_node: 2\n  job_name: my run\n"
        "  output_dir: logs/of mine\n  time: 0:05:00\n  partition: long\n  sbatch_args: ['--comment=\"two words\"']\n"
        "  setup:\n    - export SETUP='a b'\nmixed_precision: bf16\nenv:\n  MINE: it's mine\n"
    )
    nasty = [
        "--",
        "-1",
        "",
        "a b",
        "it's",
        "$HOME",
        "$(id)",
        "`id`",
        "a\nb",
        "a\r\nb",
        "*",
        "\\",
        "$$",
        "${x}",
        "é",
        "\udcff",
    ]
    done = on_slurm("launch", "--cpu", "train.py", *nasty, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr + done.stdout
    assert re.match(
        r"accel: slurm, 4 processes \(2 on each of 2 nodes\), cpu, mixed precision bf16", done.stderr
    )
    told = [json.loads((cwd / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert all(said["argv"] == nasty for said in told)
    assert {(said["world"], said["total"], said["precision"]) for said in told} == {(4, 6.0, "bf16")}
    assert {(said["mine"], said["set"]) for said in told} == {("it's mine", "a b")}
    assert len({said["host"] for said in told}) == 2
    assert {said["gpus"] for said in told} == {"0,1"}
    job = job_of(done)
    assert f"job {job} is COMPLETED" in done.stderr
    log = cwd / "logs" / "of mine" / f"slurm-{job}.out"
    assert done.stdout == log.read_text()
    assert f"accel: Slurm job {job} on" in done.stdout
    said = on_slurm("jobs", "status", job).stdout.splitlines()
    assert {"name\tmy run", "state\tCOMPLETED", "exit code\t0", f"log\t{log}"} <= set(said)
    shown = subprocess.run(
        ["scontrol", "show", "job", job], capture_output=True, text=True, check=True
    ).stdout
    assert "Partition=long" in shown
    assert "TimeLimit=00:05:00" in shown
    assert "Comment=two words" in shown


def test_the_exit_code_of_a_job_is_that_of_the_failed_script(on_slurm, script):
    script("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(300)")
    done = launch(on_slurm, "--nnodes", 2, "train.py")
    assert done.returncode == 7, done.stdout
    assert "rank 1 of 2" in done.stdout
    job = job_of(done)
    assert re.search(
        rf"error: job {job} ended as FAILED with exit code 7: .*rank 1.*; its log: /.*slurm-{job}\.out",
        done.stderr,
    )


def test_ctrl_c_leaves_a_job_that_can_be_followed_and_stopped(on_slurm, script, jobs):
    script(STAY)
    following = jobs("--set", "launcher.requeue=true", "--set", "launcher.signal=USR1@60", "train.py")
    job = following.until(r"job (\d+) is submitted")
    following.until("rank 0 runs")
    following.process.send_signal(signal.SIGINT)
    assert following.end() == 130
    assert (
        f"job {job} keeps running. Follow it with accel jobs logs {job} -f --launcher slurm or stop it with"
        in following.said
    )
    assert "Traceback" not in following.said
    row = next(line for line in on_slurm("jobs", "list").stdout.splitlines() if line.startswith(f"{job}\t"))
    assert row.split("\t")[1:3] == ["train.py", "RUNNING"]
    assert "rank 0 runs" in on_slurm("jobs", "logs", job).stdout
    stopped = on_slurm("jobs", "stop", job)
    assert (stopped.returncode, stopped.stderr) == (0, f"accel: job {job} is stopping\n")
    done = on_slurm("jobs", "logs", job, "-f", timeout=WAIT_S)
    assert "rank 0 saves" in done.stdout
    assert f"job {job} ended as CANCELLED" in done.stderr
    assert done.returncode == 128 + signal.SIGTERM
    assert "restarts" not in on_slurm("jobs", "status", job).stdout
    assert f"job {job} is CANCELLED already" in on_slurm("jobs", "stop", job).stderr


WATCHED = """
import time
from pathlib import Path
print("\\x1b[31mstep 1\\x1b[0m", flush=True)
while not Path("end").exists():
    time.sleep(0.1)
print("step 2", flush=True)
raise SystemExit(3)
"""


def test_top_shows_a_job_from_the_queue_to_its_failure(on_slurm, jobs, slurm_cluster, script, cwd):
    script(WATCHED)
    done = launch(on_slurm, "--detach", "--set", "launcher.sbatch_args=[--hold]", "train.py")
    job = done.stdout.strip()
    with CommandScreen("top", job, "--launcher", "slurm") as screen:
        screen.see(f"job {job}  train.py", "PENDING", "JobHeldUser: it is held until scontrol release")
        assert slurm_cluster.command("scontrol", "release", job).returncode == 0
        screen.see(
            "RUNNING, for 00:00:", f"nodes {slurm_cluster.names[0]}", "log: ", "\nstep 1", seconds=WAIT_S
        )
        snapshot = json.loads(on_slurm("top", job, "--launcher", "slurm", "--json").stdout)
        assert (snapshot["job"]["state"], snapshot["log"][-1]) == ("RUNNING", "step 1")
        (cwd / "end").touch()
        assert screen.end(WAIT_S) == 0
        last = screen.text()
    assert "FAILED, " in last
    assert "exit code 3" in last
    assert "step 2" in last
    assert "PENDING" not in last
    assert "FAILED, " in on_slurm("top", job, "--launcher", "slurm").stdout


@pytest.mark.full
def test_the_tasks_of_an_array_run_with_their_index_and_have_a_log_each(on_slurm, script, cwd):
    script(
        "import os, sys\nprint('task', os.environ['SLURM_ARRAY_TASK_ID'])\nsys.exit(int(os.environ['SLURM_ARRAY_TASK_ID']))"
    )
    done = launch(on_slurm, "--nnodes", 1, "--array", "0,3", "train.py")
    array = re.search(r"array (\d+) is submitted, with the tasks 0,3", done.stderr)[1]
    for index in (0, 3):
        followed = on_slurm("jobs", "logs", f"{array}_{index}", "-f", "--launcher", "slurm", timeout=WAIT_S)
        assert (followed.returncode, f"task {index}\n" in followed.stdout) == (index, True), followed.stderr
    assert f"id\t{array}_3\n" in on_slurm("jobs", "status", f"{array}_3", "--launcher", "slurm").stdout


def test_detach_submits_a_job_and_prints_its_id(on_slurm, script, jobs):
    script("")
    done = launch(on_slurm, "--detach", "--set", "launcher.sbatch_args=[--hold]", "train.py")
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    assert (
        f"job {job} is submitted. Follow it with accel jobs logs {job} -f --launcher slurm or stop it with accel jobs stop {job} --launcher slurm"
        in done.stderr
    )
    said = on_slurm("jobs", "status", job).stdout
    assert "state\tPENDING" in said
    assert "reason\tJobHeldUser: it is held until scontrol release" in said
    read = on_slurm("jobs", "logs", job)
    assert (read.stdout, read.stderr) == ("", f"accel: job {job} has no output; it is PENDING\n")


@pytest.mark.full
def test_a_job_whose_scripts_ignore_the_warning_is_requeued_and_followed(on_slurm, script, jobs):
    script(STAY)
    # The job goes back into the queue 15 seconds before the limit, which is one second after the warning.
    following = jobs("--set", "launcher.requeue=true", "--set", "launcher.signal=USR1@16", "train.py")
    job = following.until(r"job (\d+) is submitted")
    following.until("rank 0 runs, attempt 0")
    following.command("scancel", "--batch", "--signal=USR1", job)
    following.until(r"is PENDING \(BeginTime\), restart 1")
    following.start_now(job)
    assert following.end() == 0, following.said
    assert "rank 0 runs, attempt 1" in following.said
    assert "restarts\t1" in on_slurm("jobs", "status", job).stdout


def test_scripts_get_a_signal_before_the_time_limit_and_the_job_is_requeued(on_slurm, script, jobs):
    script(STAY)
    following = jobs(
        "--nproc-per-node",
        "2",
        "--set",
        "launcher.requeue=true",
        "--set",
        "launcher.signal=USR1@60",
        "train.py",
        "listen",
    )
    job = following.until(r"job (\d+) is submitted")
    for rank in range(2):
        following.until(f"rank {rank} runs, attempt 0")
    # What Slurm itself does that many seconds before the limit.
    following.command("scancel", "--batch", "--signal=USR1", job)
    for rank in range(2):
        following.until(f"rank {rank} saves")
    following.until(r"is PENDING \(BeginTime\), restart 1")
    following.start_now(job)
    assert following.end() == 0, following.said
    assert f"sending SIGUSR1 to the scripts, then requeueing job {job}" in following.said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--set", "launcher.partition=none"), "Slurm rejects the job: sbatch: error: invalid partition"),
        (
            ("--set", "launcher.gpus_per_node=3"),
            "Slurm rejects the job: sbatch: error: Batch job submission failed: Requested node configuration",
        ),
    ],
)
def test_a_job_that_slurm_rejects_is_an_error_with_its_message(on_slurm, script, args, said):
    script("")
    done = launch(on_slurm, *args, "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_job_that_cannot_start_prints_the_reason(script, jobs, slurm_cluster, on_slurm):
    script("")
    following = jobs("--nnodes", "3", "train.py")
    following.until(
        r"is PENDING \(PartitionNodeLimit: the job needs more nodes than the partition allows; the job does not start"
    )


def test_an_unknown_job_is_an_error(on_slurm):
    done = on_slurm("jobs", "status", 999999)
    assert done.returncode == 2
    assert "Unknown Slurm job 999999" in done.stderr


def test_a_step_of_an_allocation_runs_the_script_without_submitting(on_slurm, script, cwd):
    script(TRAIN)
    command = [
        sys.executable,
        "-m",
        "accel_cli",
        "launch",
        "--cpu",
        "--set",
        "launcher.kind=slurm",
        "--nnodes",
        "2",
        "train.py",
    ]
    in_job = {"capture_output": True, "text": True, "cwd": cwd, "timeout": WAIT_S}
    refused = subprocess.run(["salloc", "-Q", "-N2", *command], check=False, **in_job)
    assert refused.returncode == 2
    assert "inside the Slurm job" in refused.stderr
    assert "srun --nodes=2 --ntasks-per-node=1 accel launch" in refused.stderr
    ran = subprocess.run(["srun", "-Q", "-N2", "--ntasks-per-node=1", *command], check=False, **in_job)
    assert ran.returncode == 0, ran.stderr
    assert json.loads((cwd / "rank1.json").read_text())["total"] == 1.0
    assert ran.stderr.count("accel: torchrun, 2 processes (1 on each of 2 nodes)") == 2


def test_submitting_without_slurm_is_an_error(cwd, script, tmp_path):
    script("")
    environ = {**os.environ, "PATH": str(tmp_path)}
    done = run_accel("launch", "-q", "--set", "launcher.kind=slurm", "train.py", env=environ)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "accel: error: Cannot submit the job: sbatch not found. Log in to a node of a Slurm cluster"
    )
    assert len(done.stderr.splitlines()) == 1
    listed = run_accel("jobs", "list", env=environ)
    assert (listed.returncode, len(listed.stderr.splitlines())) == (2, 1)
    assert "scontrol not found" in listed.stderr


@pytest.mark.smoke
def test_a_dry_run_prints_the_batch_script(cwd, script, tmp_path):
    script("")
    environ = {**os.environ, "PATH": str(tmp_path)}
    done = run_accel("launch", "--set", "launcher.kind=slurm", "--dry-run", "train.py", "a b", env=environ)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.partition("batch script:\n")[2]
    assert shown.startswith("#!/bin/bash\n#SBATCH --job-name=train.py\n")
    assert shown.endswith("-- train.py 'a b'\n")


def test_detach_is_an_error_for_launchers_without_jobs(cwd, script):
    script("")
    done = run_accel("launch", "--detach", "train.py")
    assert done.returncode == 2
    assert (
        "Cannot use --detach with launcher.kind: single: it is an option of the launchers slurm, sagemaker, "
        "kubernetes, ray and skypilot." in done.stderr
    )


def test_no_profile_reads_no_file(cwd, script, home):
    script("import os; print(os.environ['ACCEL_MIXED_PRECISION'])")
    (home / "profiles").mkdir(parents=True)
    (home / "profiles" / "default.yaml").write_text(
        "schema_version: 1\nlauncher:\n  kind: slurm\nmixed_precision: bf16\n"
    )
    done = run_accel("launch", "--no-profile", "train.py")
    assert (done.returncode, done.stdout) == (0, "no\n")
    assert "profile: none" in done.stderr


@pytest.mark.full
def test_a_requeued_job_resumes_to_the_weights_of_an_uninterrupted_run(on_slurm, jobs, script, cwd):
    script(checkpointing(cwd / "hold"))
    options = ("--epochs", "2", "--every", "20", "--project-dir")
    whole = on_slurm("launch", "--cpu", "--nproc-per-node", 2, "train.py", *options, "whole", timeout=WAIT_S)
    assert whole.returncode == 0, whole.stderr
    sets = ("--set", "launcher.requeue=true", "--set", "launcher.signal=USR1@60")
    (cwd / "hold").touch()
    following = jobs("--nproc-per-node", "2", *sets, "train.py", *options, "project")
    job = following.until(r"job (\d+) is submitted")
    following.until("step 20: loss")
    following.command("scancel", "--batch", "--signal=USR1", job)
    following.until(r"step \d+: saved, and leaving")
    (cwd / "hold").unlink()
    following.until(r"is PENDING \(BeginTime\), restart 1")
    following.start_now(job)
    assert following.end() == 0, following.said
    assert re.search(r"accel: resuming from project/checkpoints/checkpoint_\d+ \(step \d+\)", following.said)
    assert following.said.count(whole.stdout.splitlines()[-1]) == 1
