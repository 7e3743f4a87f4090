"""A job from its submission to its download, with the real commands and the container's entry point on two hosts."""

import json
import signal
import subprocess

import pytest
import torch
from support.processes import commands
from support.processes.waits import WAIT_FOR_SIGNAL, limit, read_until

PROFILE = """
schema_version: 1
launcher:
  kind: sagemaker
  instance_type: ml.m5.large
  instance_count: 2
  pytorch_version: "2.9"
  nproc_per_node: 2
  model_dir: out
  ranks: all
  secrets: {TOKEN: token}
"""
SECRET = "a-secret-of-42"
STEP = """
def take_step(model, step, ranks):
    x = torch.cat([torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 4 + rank)) for rank in ranks])
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
            weight.grad = None
"""
TRAIN = f"""
import os, pathlib, signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
{STEP}
for step in range(5):
    take_step(model, step, [rank])

def leave(*_):
    if rank == 0:
        folder = pathlib.Path("out")
        folder.mkdir(exist_ok=True)
        torch.save(model.module.state_dict(), folder / "model.pt")
    print(f"rank {{rank}} saves", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, leave)
known = "a secret" if os.environ["TOKEN"] == "{SECRET}" else "nothing"
print(f"rank {{rank}} of {{world}} says {{sys.argv[1:]}} on {{os.environ['SM_CURRENT_HOST']}} and knows {{known}}", flush=True)
{WAIT_FOR_SIGNAL}"""
ARGUMENTS = ["--note", 'it\'s a "test" $HOME; rm -rf x', "--", "-1e-4"]


@pytest.fixture
def start(aws, cwd, script, monkeypatch, tmp_path):
    """Start `accel` in a folder with a script and a profile, with an account that runs jobs."""
    script(TRAIN)
    (cwd / "accel.yaml").write_text(PROFILE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    aws.role()
    aws.client("secretsmanager").create_secret(Name="token", SecretString=SECRET)
    aws.run = True
    commands.preload("aws.preloaded")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = []

    def run(*words):
        running.append(commands.Accel(*words, cwd=cwd, **pipes))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_job_is_submitted_followed_left_stopped_and_downloaded(aws, cwd, start):
    launch, output = start("launch", "--job-name", "mine", "train.py", *ARGUMENTS), ""
    for rank in range(4):
        output = read_until(launch, f"rank {rank} of 4 says", output)
    launch.send_signal(signal.SIGINT)
    _, errors = launch.communicate(timeout=limit(120))
    assert launch.returncode == 130, errors
    assert "accel jobs logs mine -f" in errors.splitlines()[-1]
    assert aws.describe("mine")["TrainingJobStatus"] == "InProgress"

    follow = start("jobs", "logs", "mine", "-f")
    assert start("jobs", "stop", "mine").wait(limit(120)) == 0
    output, errors = follow.communicate(timeout=limit(120))
    assert follow.returncode == 2, errors + output
    assert "job mine ended as Stopped with exit code 2" in errors
    for rank in range(4):
        # Without namespaces of their own, the hosts are addresses of the loopback.
        host = f"127.{rank // 2 + 1}"
        said = f"{host} | [{rank}] rank {rank} of 4 says {ARGUMENTS} on {host} and knows a secret"
        assert output.splitlines().count(said) == 1, output
        assert f"rank {rank} saves" in output
    assert output.count("ended with exit code 143") == 2

    download = start("jobs", "download", "mine", "-o", "home")
    assert download.wait(limit(120)) == 0, download.stderr.read()
    namespace = {"torch": torch}
    exec(STEP, namespace)  # noqa: S102 - as the script has it
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    for step in range(5):
        namespace["take_step"](model, step, range(4))
    downloaded = torch.load(cwd / "home" / "mine" / "model.pt", weights_only=True)
    torch.testing.assert_close(downloaded, dict(model.state_dict()), rtol=0, atol=1e-5)
    assert SECRET not in json.dumps(aws.describe("mine"), default=str) + output + errors
