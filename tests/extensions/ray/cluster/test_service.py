"""The ray launcher and `accel jobs` on a real Ray cluster: a head and nodes on this machine, each with its own raylet."""

import os
import re
import signal
from types import SimpleNamespace

import pytest
from support.processes.commands import call_accel
from support.processes.waits import WAIT_FOR_SIGNAL, limit, wait_until

pytest.importorskip("ray.job_submission", reason="Ray is in an environment of its own: make test-ray")

WAIT_S = 180
TRAIN = """
import os, sys, time
import torch
from accel_runtime import Accelerator
from helper import NAME
accelerator = Accelerator()
rank, size = accelerator.process_index, accelerator.num_processes
ranks = accelerator.gather(torch.tensor([rank])).tolist()
print("rank", rank, "of", size, ranks, NAME, sys.argv[1:-1], os.environ["OMP_NUM_THREADS"], os.environ.get("TEAM"), flush=True)
if "fail" in sys.argv and rank == 1:
    os._exit(7)
if "fail" in sys.argv:
    time.sleep(300)
"""
STAY = (
    """
import os, signal, sys, time
def leave(*_):
    time.sleep(1 if sys.argv[1:-1] else 4)  # Ray itself would kill a stopped job after 3 seconds
    for path in sys.argv[1:-1]:
        open(path, "w").close()
    print("the script saves", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("the script runs with", os.environ["SETTING"], os.environ["NODE_KEY"], flush=True)
"""
    + WAIT_FOR_SIGNAL
)
RESUMES = """
import os, pathlib, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel_runtime import Accelerator, ProjectConfiguration, set_seed

folder = pathlib.Path(sys.argv[1])
accelerator = Accelerator(project_config=ProjectConfiguration(str(folder / "project"), automatic_checkpoint_naming=True))
set_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4) / 64), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
accelerator.print("begins at", optimizer.steps, flush=True)
for (batch,) in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if optimizer.steps == 2:
        accelerator.save_state()
        victim = folder / "victim"
        if not victim.exists():
            accelerator.wait_for_everyone()
            if accelerator.process_index == int(sys.argv[2]):
                (folder / "new").write_text(str(os.getpid()))
                (folder / "new").rename(victim)
            time.sleep(300)
accelerator.print("ends with", optimizer.steps, flush=True)
"""


@pytest.fixture(autouse=True)
def _files(cwd):
    (cwd / "train.py").write_text(TRAIN)
    for name in ("yaml", "ray"):  # not to be imported instead of the packages
        (cwd / f"{name}.py").write_text("raise ImportError(__file__)")
    (cwd / "helper.py").write_text("NAME = 'helped'\n")


def get_id(text):
    return re.search(r"job (\S+) is submitted", text)[1]


def test_two_nodes_train_and_their_job_can_be_listed_and_read(launches):
    patches = (
        "--set",
        "launcher.runtime_env={env_vars: {TEAM: red}}",
        "--set",
        "launcher.job={metadata: {team: red}}",
    )
    following = launches.start("--lr", "$HOME 'x", options=("--nnodes", "2", "--ranks", "all", *patches))
    out, err = following.communicate(timeout=limit(WAIT_S))
    assert following.returncode == 0, err + out
    for rank in (0, 1):
        shown = f"rank {rank} of 2 [0, 1] helped ['--lr', \"$HOME 'x\"] 1 red"
        assert re.search(rf"^\[\S+-{rank}\] .*{re.escape(shown)}$", out, re.MULTILINE), out
    name = get_id(err)
    assert f"job {name} is SUCCEEDED" in err
    assert re.search(rf"{name}\t.*\tSUCCEEDED\t", launches.jobs("list").stdout)
    assert re.search(r"exit code\t0\n", launches.jobs("status", name).stdout)
    assert launches.jobs("logs", name).stdout == out
    assert launches.wait_for_end() == []


def test_the_exit_code_and_reason_are_those_of_the_rank_that_failed_first(launches):
    following = launches.start("fail", options=("--nnodes", "2", "--set", "launcher.shutdown_timeout=5"))
    out, err = following.communicate(timeout=limit(WAIT_S))
    name = get_id(err)
    assert following.returncode == 7, err + out
    reason = r"node (\S+-1): exit code 7 on \1, rank 1: exited with code 7"
    assert re.search(
        rf"job {name} ended as FAILED with exit code 7: {reason}; its log: accel jobs logs {name} --launcher ray",
        err,
    ), err
    assert re.search(rf"^accel: error: {reason}$", out.splitlines()[-1]), out
    assert launches.wait_for_end() == []
    assert launches.jobs("logs", "-f", name).returncode == 7
    assert "rank 1: exited with code 7" in launches.jobs("status", name).stdout


def test_a_detached_job_that_is_stopped_saves(launches, cwd):
    (cwd / "train.py").write_text(STAY)
    (cwd / "accel.yaml").write_text("schema_version: 1\nenv: {SETTING: v4lue}\n")
    detached = launches.start(options=("--detach",))
    out, err = detached.communicate(timeout=limit(WAIT_S))
    name = get_id(err)
    assert (detached.returncode, out) == (0, f"{name}\n"), err
    while "the script runs with v4lue of-the-node" not in launches.jobs("logs", name).stdout:
        assert "RUNNING" in (state := launches.jobs("status", name).stdout) or "PENDING" in state
    assert "v4lue" not in launches.jobs("status", name).stdout
    assert len(launches.list_processes()) >= 1
    assert launches.jobs("stop", name).returncode == 0
    followed = launches.jobs("logs", "-f", name)
    assert followed.returncode == 143, followed.stderr
    assert "the script saves" in followed.stdout
    assert f"job {name} ended as STOPPED with exit code 143: the job was stopped" in followed.stderr
    assert launches.wait_for_end() == []
    assert "is STOPPED already" in launches.jobs("stop", name).stderr


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("job={entrypoint_num_cpu: 1}", "Invalid launcher.job.entrypoint_num_cpu: Ray does not know it. Did you mean entrypoint_num_cpus?"),
        ("runtime_env={image_url: x}", "Invalid launcher.runtime_env.image_url: Ray does not know it. Did you mean image_uri?"),
        ("runtime_env={uv: [a], conda: b}", "Invalid launcher.runtime_env: Ray refuses it: The 'pip' field"),
        ("runtime_env={env_vars: {A: 1}}", "Invalid launcher.runtime_env: Ray refuses it: runtime_env['env_vars'] must be"),
    ],
)  # fmt: skip
def test_what_ray_does_not_know_is_an_error_before_anything_is_sent(cwd, capfd, patch, message):
    done = call_accel(
        capfd, "launch", "--set=launcher.kind=ray", f"--set=launcher.{patch}", "--dry-run", "train.py"
    )
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.full
def test_ctrl_c_leaves_the_job_running_until_its_driver_is_killed(launches, cwd):
    (cwd / "train.py").write_text(STAY)
    (cwd / "accel.yaml").write_text("schema_version: 1\nenv: {SETTING: x}\n")
    following = launches.start()
    while "the script runs" not in (line := following.stdout.readline()):
        assert line, "".join(following.communicate())
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=limit(60))
    assert following.returncode == 130
    name = get_id(err)
    assert f"job {name} keeps running" in err
    assert launches.list_processes()
    # Without its driver, nothing of the job is left.
    os.kill(launches.find_driver(name), signal.SIGKILL)
    assert launches.wait_for_end() == []
    assert launches.jobs("logs", "-f", name).returncode == 137


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_lost_node_is_replaced_and_the_run_resumes(launches, ray_cluster, cwd, tmp_path, victim):
    ray_cluster.want(3)
    (cwd / "train.py").write_text(RESUMES)
    options = ("--nnodes", "2", "--set", "launcher.max_retries=1", "--set", "launcher.shutdown_timeout=5")
    following = launches.start(str(tmp_path), str(victim), options=options)
    wait_until((tmp_path / "victim").exists, WAIT_S, process=following)
    ray_cluster.lose_node_of(int((tmp_path / "victim").read_text()))
    out, err = following.communicate(timeout=limit(WAIT_S))
    assert following.returncode == 0, err + out
    assert re.search(
        rf"accel: Lost node \S+-{victim}: .*Retry 1 of 1: all nodes start again with --resume", out
    ), out
    assert "[state-dump]" not in out
    assert re.findall(r"begins at (\d)", out) == ["0", "2"]
    assert re.findall(r"ends with (\d)", out) == ["4"]
    assert launches.wait_for_end() == []


@pytest.mark.full
def test_without_retries_a_lost_node_ends_the_run_and_its_script_can_save(launches, cwd, tmp_path):
    (cwd / "train.py").write_text(STAY)
    (cwd / "accel.yaml").write_text("schema_version: 1\nenv: {SETTING: x}\n")
    following = launches.start(str(tmp_path / "saved"))
    while "the script runs" not in (line := following.stdout.readline()):
        assert line, "".join(following.communicate())
    os.kill(launches.find_worker(), signal.SIGKILL)
    out, err = following.communicate(timeout=limit(WAIT_S))
    assert following.returncode == 1, err + out
    assert re.search(
        r"with exit code 1: Lost node \S+: The actor is dead because its worker process has died\. Check the nodes",
        err,
    ), err
    assert launches.wait_for_end() == []
    assert (tmp_path / "saved").exists()


def test_nodes_that_could_not_be_started_end_the_run_with_a_cure(monkeypatch):
    from accel_cli.extensions.ray import driver

    def fail(_, attempt):
        raise driver._LostNodeError("Cannot start the nodes: Could not create the actor.")

    monkeypatch.setattr(driver._Driver, "_run_attempt", fail)
    code, reason = driver._Driver(SimpleNamespace(max_retries=1), []).run()
    assert code == 1
    assert re.fullmatch(
        r"Cannot start .* actor\. Check the nodes with ray status, .*launcher\.max_retries .*", reason
    )


def test_what_a_cluster_cannot_run_is_named(launches, cwd):
    options = ("--nnodes", "2", "--nproc-per-node", "9", "--set", "launcher.start_timeout=6")
    waiting = launches.start(options=options)
    absent = launches.start(
        options=("--set", "launcher.source=shared", "--set", "launcher.working_dir=/absent")
    )
    away = launches.start(options=("--set", "launcher.address=http://127.0.0.1:9"))
    out, err = waiting.communicate(timeout=limit(WAIT_S))
    assert re.search(
        r"waiting for 2 node\(s\) with CPU: 9 each: 0 of \d node\(s\) of the cluster are large enough", out
    )
    assert waiting.returncode == 1, err
    assert "the cluster did not have 2 node(s) with CPU: 9 each free within 6 s" in err
    _, err = absent.communicate(timeout=limit(WAIT_S))
    assert (absent.returncode, "folder not found: /absent. Use a shared file system" in err) == (1, True), err
    _, err = away.communicate(timeout=limit(WAIT_S))
    assert (away.returncode, "Cannot connect: the cluster does not answer" in err) == (1, True), err
    gone = launches.jobs("status", "absent")
    assert (gone.returncode, "the cluster does not know it" in gone.stderr) == (2, True), gone.stderr


def test_a_shared_folder_is_used_in_place(launches, cwd):
    (cwd / "train.py").write_text("import pathlib, sys\npathlib.Path('made').write_text(sys.argv[1])\n")
    following = launches.start("here", options=("--set", "launcher.source=shared"))
    _, err = following.communicate(timeout=limit(WAIT_S))
    assert following.returncode == 0, err
    assert (cwd / "made").read_text() == "here"
