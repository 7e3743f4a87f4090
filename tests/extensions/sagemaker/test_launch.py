"""`accel launch` of a SageMaker job, with a SageMaker on loopback."""

import json
import os
import signal
import subprocess
from functools import partial

import pytest
from aws import models
from support import commands
from support.waits import limit, wait_until

BUCKET = "sagemaker-us-east-1-123456789012"
PROFILE = """
schema_version: 1
launcher:
  kind: sagemaker
  instance_type: ml.m5.large
  pytorch_version: "2.9"
"""
TRAIN = """
import os, sys, pathlib
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * world + rank))
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank} of {world} says {sys.argv[1:]} on {os.environ['SM_CURRENT_HOST']}, loss {loss.item():.3f}", flush=True)
if rank == 0:
    folder = pathlib.Path("out")
    folder.mkdir(exist_ok=True)
    torch.save(model.module.state_dict(), folder / "model.pt")
dist.destroy_process_group()
"""


@pytest.fixture
def here(aws, cwd, script, monkeypatch, tmp_path):
    """A folder with a profile and a script, an account with a role, and separate temporary folders."""
    script("pass")
    (cwd / "accel.yaml").write_text(PROFILE)
    aws.role()
    for name in ("scratch", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    return cwd


def world(aws):
    """Return all objects, jobs and roles on AWS."""
    s3 = aws.client("s3")
    buckets = [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]
    keys = [item["Key"] for name in buckets for item in s3.list_objects_v2(Bucket=name).get("Contents", [])]
    uploads = [item for name in buckets for item in s3.list_multipart_uploads(Bucket=name).get("Uploads", [])]
    return buckets, keys, uploads, jobs(aws)


def jobs(aws):
    return [
        job["TrainingJobName"] for job in aws.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    ]


def refused(result):
    """Return the only error message of a failed command."""
    assert "Traceback" not in result.stderr
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("accel: error: ")]
    return message


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    commands.preload(models.__file__)


@pytest.fixture
def forked(here):
    """Run `accel`, forked from an interpreter with boto3 and its service models."""
    return partial(commands.run_accel, cwd=here)


@pytest.fixture
def launched(here, forked, tmp_path):
    """Run `accel launch`, and check that it leaves no temporary file."""

    def run(*args, accel=forked, **options):
        result = accel("launch", *args, **options)
        assert list((tmp_path / "scratch").iterdir()) == []
        return result

    return run


@pytest.fixture
def started(here):
    """Start `accel launch` in the background, and end it after the test."""
    running = []

    def start(*args):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(commands.Accel("launch", *args, cwd=here, **pipes))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.full
def test_detach_submits_a_job_and_prints_only_its_name_on_stdout(aws, accel, launched):
    result = launched("--detach", "--job-name", "mine", "train.py", "--lr", "1e-4", accel=accel)
    assert (result.returncode, result.stdout) == (0, "mine\n"), result.stderr
    assert jobs(aws) == ["mine"]
    assert "Follow it with accel jobs logs mine -f or stop it with accel jobs stop mine" in result.stderr


@pytest.mark.slow
def test_the_printed_commands_contain_the_options_of_the_launch(aws, here, forked, launched):
    (here / "accel.yaml").unlink()
    options = [
        "launcher.kind=sagemaker",
        "launcher.pytorch_version='2.9'",
        "launcher.instance_type=ml.m5.large",
        "launcher.region=eu-west-1",
    ]
    set_options = [word for option in options for word in ("--set", option)]
    result = launched("--detach", *set_options, "--job-name", "mine", "train.py")
    options_of_commands = "--launcher sagemaker --set launcher.region=eu-west-1"
    assert f"Follow it with accel jobs logs mine -f {options_of_commands} or stop it" in result.stderr, (
        result.stderr
    )
    assert forked("jobs", "status", "mine", *options_of_commands.split()).stdout.startswith("id\tmine\n")


def test_a_dry_run_shows_the_upload_and_changes_nothing(aws, here, launched):
    before = world(aws)
    result = launched("--dry-run", "--job-name", "mine", "train.py", "--lr", "1e-4")
    assert result.returncode == 0, result.stderr
    assert f"bundle: s3://{BUCKET}/accel/mine/bundle/" in result.stdout
    assert "nothing was sent or changed" in result.stdout
    assert world(aws) == before


def test_offline_prints_the_request_on_stdout(aws, launched, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    result = launched("--offline", "--set", "launcher.region=eu-west-1", "--job-name", "mine", "train.py")
    request = json.loads(result.stdout)
    assert request["TrainingJobName"] == "mine"
    assert (
        request["OutputDataConfig"]["S3OutputPath"] == "s3://sagemaker-eu-west-1-<account>/accel/mine/output"
    )
    assert result.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "environ", "words"),
    [
        ("kind=sagemaker", {"AWS_DEFAULT_REGION": ""}, "No AWS region is set"),
        (
            "kind=sagemaker",
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            "No AWS credentials found. Run aws",
        ),
        ("role=trainr", {}, "The account has no role 'trainr'. Did you mean trainer?"),
    ],
)
def test_an_error_is_one_message_with_exit_code_2(aws, launched, message, environ, words):
    before = world(aws)
    result = launched("--set", f"launcher.{message}", "train.py", env={**os.environ, **environ})
    assert result.returncode == 2, result.stderr
    assert words in refused(result)
    assert world(aws) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM])
def test_an_interrupted_submission_leaves_nothing_behind(aws, started, tmp_path, number):
    before = world(aws)
    aws.fault("s3:PutObject", "slow", times=None, seconds=1)
    launch = started("train.py")
    wait_until(lambda: "s3:PutObject" in aws.calls())
    launch.send_signal(number)
    _, err = launch.communicate(timeout=limit(200))
    aws.ask("clear")
    assert launch.returncode == 128 + number
    assert "The submission was interrupted, and no job was started. Nothing remains in S3." in err
    assert "Traceback" not in err
    assert world(aws) == before
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.slow
def test_a_job_is_followed_to_its_end_and_its_model_is_downloaded(aws, here, launched):
    lines = {"algo-1": ["one", "two"], "algo-2": ["three"]}
    aws.settings(play={"lines": lines, "model": {"weights.txt": "w"}}, time=100)
    result = launched("--set", "launcher.instance_count=2", "--job-name", "mine", "train.py")
    assert result.returncode == 0, result.stderr
    assert {"algo-1 | one", "algo-1 | two", "algo-2 | three"} < set(result.stdout.splitlines())
    assert (here / "mine/weights.txt").read_text() == "w"
    assert "results are in " in result.stderr
    assert "100 billable seconds on each of 2 instances" in result.stderr


@pytest.mark.slow
def test_a_failed_job_is_exit_code_1_with_its_reason(aws, here, launched):
    aws.settings(play={"exit": 1, "failure": "ValueError: boom on rank 1"})
    result = launched("--job-name", "mine", "train.py")
    assert result.returncode == 1
    assert "boom on rank 1" in result.stderr
    assert not (here / "mine").exists()


@pytest.mark.full
def test_a_job_without_a_model_is_no_failure(aws, here, launched):
    result = launched("--job-name", "mine", "train.py")
    assert result.returncode == 0, result.stderr
    assert "accel: Job mine left nothing in " in result.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_a_followed_job_running(aws, started):
    aws.settings(hold="Training")
    launch = started("--job-name", "mine", "train.py")
    wait_until(lambda: jobs(aws))
    wait_until(lambda: aws.calls().count("sagemaker:DescribeTrainingJob") > 2)
    launch.send_signal(signal.SIGINT)
    _, err = launch.communicate(timeout=limit(200))
    assert launch.returncode == 130
    assert "accel jobs logs mine -f" in err.splitlines()[-1]
    assert (
        aws.client("sagemaker").describe_training_job(TrainingJobName="mine")["TrainingJobStatus"]
        == "InProgress"
    )


@pytest.mark.slow
def test_two_hosts_with_two_processes_train_the_model_of_a_local_run(aws, launched, forked, script, here):
    """Test all steps: upload, download, the container entry point, the log, and the download of the model."""
    aws.settings(run=True)
    script(TRAIN)
    settings = ("instance_count=2", "nproc_per_node=2", "model_dir=out", "ranks=all")
    options = [word for setting in settings for word in ("--set", f"launcher.{setting}")]
    arguments = ["--note", 'it\'s a "test" $HOME; rm -rf x', "--", "-1e-4"]
    result = launched(*options, "--job-name", "mine", "train.py", *arguments, timeout=300)
    assert result.returncode == 0, result.stderr + result.stdout
    lines = [line for line in result.stdout.splitlines() if " says " in line]
    for rank in range(4):
        (line,) = [line for line in lines if f"rank {rank} of 4 says {arguments}" in line]
        # Without namespaces of their own, the hosts are addresses of the loopback.
        host = f"127.{rank // 2 + 1}"
        assert line.startswith(f"{host} | [{rank}] ")
        assert f"on {host}, loss" in line
    import torch

    local = ("--no-profile", "--nproc-per-node", "4", "train.py")
    result = forked("launch", *local, env={**os.environ, "SM_CURRENT_HOST": "local"}, timeout=300)
    assert result.returncode == 0, result.stderr
    models = [torch.load(here / folder / "model.pt", weights_only=True) for folder in ("mine", "out")]
    torch.testing.assert_close(*models, rtol=0, atol=1e-5)
