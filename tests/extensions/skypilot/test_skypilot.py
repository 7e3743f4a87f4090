"""The skypilot launcher: its task, what it refuses, and a job on an imitation of the command `sky`."""

import json
import re
import subprocess
import sys
import tarfile

import pytest
import yaml
from pydantic import ValidationError
from support.hosts import sky
from support.launchers.launch_specs import build_spec
from support.processes.commands import Accel, call_accel
from support.processes.waits import wait_until

from accel_cli.errors import UsageError
from accel_cli.extensions.skypilot import service
from accel_cli.extensions.skypilot.launcher import SkyPilot
from accel_cli.extensions.skypilot.service import SkyJobs
from accel_cli.extensions.skypilot.task import write_folder
from accel_cli.launchers.job_service import UnreachableError
from accel_cli.profile.planner import build_plan

TRAIN = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.environ["API_KEY"], flush=True)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture(autouse=True)
def _files(cwd):
    (cwd / "train.py").write_text(TRAIN)


def build_task(section, *args, **options):
    return build_plan(section, build_spec(*args, **options)).job.build_task("folder")


@pytest.mark.smoke
def test_a_task_has_the_resources_the_command_and_the_settings():
    section = SkyPilot(
        infra="gcp/us-central1", nnodes=2, accelerators="H100:8", cpus="16+", memory=64, disk_size=500, spot=True,
        image="docker:registry/accel:cuda", setup=["pip install einops", "nvidia-smi"],
    )  # fmt: skip
    task = build_task(section, "--lr", "a b", mixed_precision="bf16", env={"A": "1"})
    assert task["resources"] == {
        "infra": "gcp/us-central1", "accelerators": "H100:8", "cpus": "16+", "memory": 64, "disk_size": 500, "use_spot": True,
        "image_id": "docker:registry/accel:cuda", "labels": task["resources"]["labels"],
    }  # fmt: skip
    assert (task["num_nodes"], task["setup"]) == (2, "pip install einops\nnvidia-smi\n")
    assert {"ACCEL_MIXED_PRECISION": "bf16", "ACCEL_SHARED_FILES": "0", "A": "1"}.items() <= task[
        "envs"
    ].items()
    *_, folder, command = task["run"].splitlines()
    assert folder == "cd source/."
    assert command.startswith(
        "exec python -m accel_cli launch --quiet --no-profile --set launcher.kind=torchrun "
    )
    assert "launcher.nproc_per_node=8 " in command
    assert command.endswith(" -- train.py --lr 'a b'")
    assert set(build_task(SkyPilot())["resources"]) == {"labels"}


def test_the_folder_of_a_job_has_the_task_and_the_source(cwd):
    (cwd / ".env").write_text("TOKEN=s3cret")
    (cwd / ".gitignore").write_text("*.bin\n")
    job = build_plan(SkyPilot(), build_spec()).job
    with write_folder(job) as folder:
        task = yaml.safe_load((folder / "accel-task.yaml").read_text())
        assert task["workdir"] == str(folder / "workdir")
        with tarfile.open(folder / "workdir/accel-source.tar.gz") as archive:
            assert sorted(archive.getnames()) == [".gitignore", "train.py"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task": {"run": "x"}}, r"Cannot set launcher\.task\.run.*Pass the script"),
        ({"task": {"resources": {"image_id": "x"}}}, r"Set launcher\.image\."),
        ({"task": {"resources": None}}, r"Cannot set launcher\.task\.resources"),
        ({"task": {"envs": {"A": "1"}}}, r"Set env in the profile"),
    ],
)
def test_a_patch_of_the_task_cannot_set_what_accel_sets(keys, message):
    with pytest.raises(UsageError, match=message):
        build_task(SkyPilot(**keys))


def test_a_patch_is_merged_into_the_task():
    task = build_task(
        SkyPilot(cpus=4, task={"file_mounts": {"/data": "s3://b"}, "resources": {"ports": [80]}})
    )
    assert (task["file_mounts"], task["resources"]["ports"], task["resources"]["cpus"]) == (
        {"/data": "s3://b"},
        [80],
        4,
    )


def test_what_cannot_be_a_task_is_refused():
    with pytest.raises(UsageError, match=r"env\.API_KEY looks like a secret.*launcher\.secrets=\[API_KEY\]"):
        build_task(SkyPilot(), env={"API_KEY": "x"})
    with pytest.raises(UsageError, match="A is in both"):
        build_task(SkyPilot(secrets=["A"]), env={"A": "x"})
    with pytest.raises(UsageError, match=r"launcher\.accelerators requests 1 GPU"):
        build_task(SkyPilot(accelerators="A100", nproc_per_node=2))
    for keys, message in (
        ({"infra": "a b"}, "expected an infrastructure"),
        ({"accelerators": "8"}, "expected a type"),
        ({"cpus": "x"}, "a number such as 8"),
    ):
        with pytest.raises(ValidationError, match=message):
            SkyPilot(**keys)


# The command sky


@pytest.fixture
def clusters(tmp_path, monkeypatch):
    """The clusters of an imitation of SkyPilot."""
    (tmp_path / "sky").mkdir()
    return sky.install(tmp_path / "sky", monkeypatch)


def launch(capfd, *words):
    keys = (
        "--set=launcher.kind=skypilot",
        f"--set=launcher.python={sys.executable}",
        "--set=launcher.secrets=[API_KEY]",
        "--set=launcher.ranks=all",
    )
    return call_accel(capfd, "launch", "--cpu", *keys, "--nproc-per-node", "2", *words)


@pytest.mark.slow
def test_a_job_runs_and_is_followed_with_its_cost(clusters, capfd, monkeypatch):
    monkeypatch.setenv("API_KEY", "s3cret")
    done = launch(capfd, "train.py", "7", "it's")
    assert done.returncode == 7, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2 ['7', \"it's\"] s3cret" in done.stdout
    name = re.search(r"job (\S+) is submitted", done.stderr)[1]
    assert f"cluster {name} costs $ 32.77 per hour until SkyPilot ends it" in done.stderr
    assert re.search(rf"job {name} ended as FAILED with exit code 7: rank 1 of 2 .*7", done.stderr), (
        done.stderr
    )
    options = json.loads((clusters / name / "options.json").read_text())
    assert options[:7] == [
        "--yes",
        "--detach-run",
        "--down",
        "--idle-minutes-to-autostop",
        "10",
        "--secret",
        "API_KEY",
    ]
    assert "s3cret" not in str(options)
    listed = call_accel(capfd, "jobs", "list", "--launcher", "skypilot").stdout
    assert re.search(rf"{name}\t.*FAILED\t.*AWS/us-east-1, 1x\(cpus=8\), \$ 32\.77 per hour", listed), listed
    assert "is FAILED already" in call_accel(capfd, "jobs", "stop", name, "--launcher", "skypilot").stderr


TRAIN_AND_RESUME = """
import os, time
import torch
from accel_runtime import Accelerator, ProjectConfiguration
config = ProjectConfiguration(os.environ["OUT"], automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=config)
model, steps = torch.nn.Linear(1, 1), torch.zeros(1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
class Steps:
    def __init__(self): self.number = 0
    def state_dict(self): return {"number": self.number}
    def load_state_dict(self, state): self.number = state["number"]
steps = Steps()
accelerator.register_for_checkpointing(steps)
accelerator.resume()
accelerator.print("begins at step", steps.number, flush=True)
while steps.number < 6:
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    steps.number += 1
    if steps.number == 3:
        accelerator.save_state()
        if accelerator.is_main_process and not os.path.exists(os.environ["OUT"] + "/preempted"):
            open(os.environ["OUT"] + "/saved", "w").close()
        while not os.path.exists(os.environ["OUT"] + "/preempted"):
            time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_managed_job_that_is_preempted_resumes_from_its_checkpoint(clusters, script, tmp_path, monkeypatch):
    monkeypatch.setenv("API_KEY", "x")
    out = tmp_path / "bucket"
    out.mkdir()
    script(TRAIN_AND_RESUME)
    keys = (
        "--set=launcher.kind=skypilot", "--set=launcher.managed=true", f"--set=launcher.python={sys.executable}",
        "--set=launcher.secrets=[API_KEY]", f"--set=env.OUT={out}",
    )  # fmt: skip
    with Accel(
        "launch", "--cpu", *keys, "--nproc-per-node", "2", "train.py", stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launched:  # fmt: skip
        wait_until((out / "saved").exists, 120, process=launched)
        (cluster,) = clusters.iterdir()
        sky.preempt(cluster)
        (out / "preempted").touch()
        stdout, stderr = launched.communicate()
    assert launched.returncode == 0, stderr
    assert re.findall("begins at step .", stdout) == ["begins at step 0", "begins at step 3"]
    assert "SkyPilot ends the clusters of the job, also after a failure." in stderr
    options = json.loads((cluster / "options.json").read_text())
    assert options == ["--yes", "--detach-run", "--secret", "API_KEY", "--name", cluster.name]


@pytest.mark.slow
def test_a_managed_job_is_listed_and_has_the_exit_code_of_its_script(clusters, capfd, monkeypatch):
    monkeypatch.setenv("API_KEY", "x")
    done = launch(capfd, "--set=launcher.managed=true", "train.py", "9")
    assert done.returncode == 9, done.stderr
    (name,) = [path.name for path in clusters.iterdir()]
    options = ("--launcher", "skypilot", "--set", "launcher.managed=true")
    listed = call_accel(capfd, "jobs", "list", *options).stdout
    assert re.search(rf"{name}\t.*FAILED\t.*AWS/us-east-1, 1x\(cpus=8\)", listed), listed
    assert "9" in call_accel(capfd, "jobs", "status", name, *options).stdout.split()
    assert name not in call_accel(capfd, "jobs", "list", "--launcher", "skypilot").stdout


@pytest.mark.parametrize(
    ("line", "code"),
    [("[7, 137] ", 7), ("[1, 143, 3]", 3), ("[137, 137]", 137), ("[1]", 1), ("nothing", 1)],
)
def test_the_exit_code_is_that_of_the_node_that_failed_first(tmp_path, monkeypatch, line, code):
    text = f"ERROR: \x1b[31mJob 3 failed with return code list:\x1b[0m {line}"
    (tmp_path / "sky").write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit 100\n")
    (tmp_path / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert service._find_exit_code(None, "logs", "a") == code


def test_a_managed_job_has_no_minutes_until_its_cluster_ends():
    with pytest.raises(ValidationError, match="SkyPilot ends the clusters of a managed job itself"):
        SkyPilot(managed=True, down_after=5)


def test_a_secret_that_is_not_set_and_a_task_that_sky_refuses_are_errors(clusters, capfd, monkeypatch):
    monkeypatch.delenv("API_KEY", raising=False)
    assert "Cannot pass API_KEY of launcher.secrets: it is not set here" in launch(capfd, "train.py").stderr
    monkeypatch.setenv("API_KEY", "x")
    done = launch(capfd, "--set=launcher.task={service: {port: 80}}", "train.py")
    assert done.returncode == 1
    assert re.search(
        r"Invalid task YAML: .*SkyPilot did not submit the job .* run sky down train-\w{6}\n",
        done.stderr,
        re.DOTALL,
    )


def test_without_sky_the_error_says_where_to_get_it(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("API_KEY", "x")
    assert "needs the command sky, which was not found. Install SkyPilot" in launch(capfd, "train.py").stderr


def test_a_cluster_that_starts_or_was_stopped_or_has_ended_is_a_state(monkeypatch):
    record = {"name": "a", "launched_at": 1, "status": "INIT", "nodes": 2, "init_status_reason": "Launching"}
    answers = {"status": [record], "queue": {"a": []}, "cost-report": []}
    monkeypatch.setattr(service, "_run_json", lambda *words: answers[words[0]])
    jobs = SkyJobs()
    job = jobs.status("a")
    assert (job.state, job.reason, job.finished, job.hosts) == ("INIT", "Launching", False, 0)
    record["status"] = "UP"
    assert jobs.status("a").state == "PENDING"
    record["status"] = "STOPPED"
    assert (jobs.status("a").exit_code, jobs.status("a").reason) == (143, "the cluster was stopped")
    record["status"] = "UP"
    jobs.status("a")
    answers["status"] = []
    assert (jobs.status("a").state, jobs.status("a").exit_code) == ("DOWN", 143)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("Failed to connect to SkyPilot API server", UnreachableError), ("Invalid option", UsageError)],
)
def test_a_server_that_does_not_answer_is_asked_again(tmp_path, monkeypatch, text, kind):
    (tmp_path / "sky").write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
    (tmp_path / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(kind, match=text):
        SkyJobs().list()
