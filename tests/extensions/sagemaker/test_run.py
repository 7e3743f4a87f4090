"""Jobs that run on two hosts of the plane, launched and managed with the real commands."""

import json
import re
import shutil
import subprocess
import sys
import threading

import pytest
from support.runs.slow_example import EXAMPLES, checkpointing
from support.waits import WAIT_FOR_SIGNAL, limit

WAIT_S = 180
"""A generous bar for a job that hangs."""
PROFILE = """
schema_version: 1
launcher:
  kind: sagemaker
  instance_type: ml.m5.large
  instance_count: 2
  pytorch_version: "2.9"
  nproc_per_node: 1
  ranks: all
  shutdown_timeout: 20
"""
SECRET = "a-secret-of-42"
pytestmark = pytest.mark.slow


@pytest.fixture
def here(aws, cwd, monkeypatch, tmp_path):
    """A folder with a profile, and an account that runs jobs."""
    (cwd / "accel.yaml").write_text(PROFILE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    aws.role()
    aws.settings(run=True, grace=30)
    return cwd


@pytest.fixture
def launch(here):
    """Start `accel launch` of a job, and read its output."""
    started = []

    def start(*args):
        command = [sys.executable, "-m", "accel_cli", "launch", "--job-name", "mine", *args]
        started.append(Launch(command, here))
        return started[-1]

    yield start
    for process in started:
        process.close()


class Launch:
    """A running `accel launch`."""

    def __init__(self, command, cwd):
        self.said, self.over, self._changed = "", False, threading.Condition()
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=cwd
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def until(self, pattern):
        """Wait for output that matches."""
        with self._changed:
            self._changed.wait_for(lambda: self.over or re.search(pattern, self.said), limit(WAIT_S))
            assert re.search(pattern, self.said), self.said

    def end(self):
        """Wait for the end, and return the exit code."""
        self._reading.join(limit(WAIT_S))
        return self.process.wait(limit(WAIT_S))

    def close(self):
        self.process.kill()
        self.process.wait()
        self._reading.join()
        self.process.stdout.close()

    def _read(self):
        for line in self.process.stdout:
            with self._changed:
                self.said += line.decode(errors="replace")
                self._changed.notify_all()
        with self._changed:
            self.over = True
            self._changed.notify_all()


def describe_job(aws):
    return aws.client("sagemaker").describe_training_job(TrainingJobName="mine")


@pytest.mark.full
def test_an_interrupted_spot_job_resumes_from_its_checkpoint(aws, here, launch):
    shutil.copy(EXAMPLES / "digits.py", here)
    hold = here.parent / "hold"
    (here / "checkpointing.py").write_text(checkpointing(hold))
    hold.touch()
    # One host: on the platform all have their files in /opt/ml, and here each in a folder of its own.
    aws.settings(time=100)
    words = ("spot=true", "checkpoint_dir=checkpointing", "instance_count=1", "nproc_per_node=2")
    sets = [word for setting in words for word in ("--set", f"launcher.{setting}")]
    job = launch(*sets, "checkpointing.py", "--every", "10", "--epochs", "8")
    job.until(r"step 20: loss")
    aws.ask("interrupt", job="mine")
    job.until(r"saved, and leaving")
    hold.unlink()
    assert job.end() == 0, job.said
    assert re.search(r"accel: .*resuming from .*checkpoint_\d+", job.said), job.said
    assert re.search(r"127\.1 \| .*\d+ steps, weights [0-9a-f]{16}", job.said)
    assert "restart 1" in job.said
    assert "30 billable seconds, spot saved 70 %" in job.said
    assert [step["Status"] for step in describe_job(aws)["SecondaryStatusTransitions"]].count(
        "Interrupted"
    ) == 1


FAIL = """
import os, sys, time
print("rank", os.environ["RANK"], "runs", flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("boom on rank 1")
time.sleep(300)
"""


@pytest.mark.full
def test_the_failure_reason_is_that_of_the_script_and_names_the_host(aws, here, launch):
    (here / "train.py").write_text(FAIL)
    job = launch("train.py")
    assert job.end() == 1, job.said
    last = "accel: error: job mine ended as Failed with exit code 1: AlgorithmError: .*ValueError: boom on rank 1"
    assert re.search(last, job.said), job.said
    assert "127.2" in describe_job(aws)["FailureReason"]
    assert len(re.findall(r"accel: 127\.[12] ended with exit code \d+", job.said)) == 2


STAY = (
    """
import os, pathlib, signal, sys, time
def leave(*_):
    pathlib.Path(os.environ["SM_MODEL_DIR"], f"rank{os.environ['RANK']}").write_text("saved")
    print("rank", os.environ["RANK"], "saves", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("rank", os.environ["RANK"], "runs", "with a secret" if os.environ["TOKEN"] == "a-secret-of-42" else "", flush=True)
"""
    + WAIT_FOR_SIGNAL
)


def test_a_stopped_job_saves_and_its_results_are_downloaded(aws, here, launch, accel):
    (here / "train.py").write_text(STAY)
    aws.client("secretsmanager").create_secret(Name="token", SecretString=SECRET)
    job = launch("--set", "launcher.secrets={TOKEN: token}", "train.py")
    for rank in (0, 1):
        job.until(rf"rank {rank} runs with a secret")
    assert accel("jobs", "stop", "mine").returncode == 0
    assert job.end() == 2, job.said
    assert "job mine ended as Stopped with exit code 2" in job.said
    for rank in (0, 1):
        assert f"rank {rank} saves" in job.said
    result = accel("jobs", "download", "mine", "-o", "home")
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (here / "home" / "mine").glob("rank*")) == ["rank0", "rank1"]
    sent = json.dumps(describe_job(aws), default=str)
    assert SECRET not in sent + job.said + result.stderr


@pytest.mark.full
def test_requirements_that_cannot_be_installed_are_the_failure_reason(aws, here, launch):
    (here / "train.py").write_text("raise SystemExit(9)")
    (here / "needs.txt").write_text("a-package-that-nobody-has==1.2.3\n")
    sets = (
        "--set",
        "launcher.requirements=needs.txt",
        "--set",
        "env.PIP_NO_INDEX=1",
        "--set",
        "launcher.instance_count=1",
    )
    job = launch(*sets, "train.py")
    assert job.end() == 1, job.said
    assert "a-package-that-nobody-has" in describe_job(aws)["FailureReason"], describe_job(aws)[
        "FailureReason"
    ]


@pytest.mark.full
def test_a_job_that_exceeds_max_run_is_stopped_and_reported(aws, here, launch):
    (here / "train.py").write_text(STAY.replace('os.environ["TOKEN"]', "''"))
    aws.settings(speed=5)
    job = launch("--set", "launcher.max_run=60", "train.py")
    assert job.end() == 2, job.said
    assert "ended as MaxRuntimeExceeded with exit code 2: stopped: max_run of 60 s was reached" in job.said
