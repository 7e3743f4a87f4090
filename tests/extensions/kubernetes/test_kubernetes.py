"""The kubernetes launcher and `accel jobs` with the official client, on an API server that runs the pods as processes."""

import re
import signal
import subprocess

import pytest
from support.hosts.kubernetes import KubernetesServer
from support.hosts.network import hosts
from support.processes.children import free_port
from support.processes.commands import Accel, run_accel
from support.processes.waits import WAIT_FOR_SIGNAL, limit, wait_until

pytestmark = pytest.mark.slow
TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from helper import NAME
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "total", total.item(), NAME, sys.argv[1:], flush=True)
if "fail" in sys.argv and dist.get_rank() == 1:
    os._exit(7)
dist.destroy_process_group()
"""
WAIT = """
import os, pathlib, sys, time
if int(os.environ["RANK"]) == 1 and not pathlib.Path(sys.argv[1]).exists():
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(300)
"""
STAY = (
    """
import os, signal, sys, time
def leave(*_):
    print("the script saves", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("the script runs with", os.environ["API_KEY"], flush=True)
"""
    + WAIT_FOR_SIGNAL
)


@pytest.fixture
def server(tmp_path, monkeypatch):
    folder = tmp_path / "cluster"
    folder.mkdir()
    server = KubernetesServer(folder)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    yield server
    server.close()


@pytest.fixture
def two_nodes(server):
    with hosts(2) as machines:
        server.hosts = machines
        yield server
        server.close()
        server.hosts = ()


@pytest.fixture
def launch(cwd):
    """Starts `accel launch` of a job; at the end, none is left."""
    (cwd / "train.py").write_text(TRAIN)
    (cwd / "helper.py").write_text("NAME = 'helped'\n")
    (cwd / "stay.py").write_text(STAY)
    started = []

    def start(*args):
        words = (
            "launch",
            "--cpu",
            "--set",
            "launcher.kind=kubernetes",
            "--set",
            "launcher.image=accel:test",
            *args,
        )
        process = Accel(
            *words,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def jobs(*args):
    return run_accel("jobs", *args, "--launcher", "kubernetes")


def get_id(text):
    return re.search(r"job (\S+) is submitted", text)[1]


@pytest.mark.full
@pytest.mark.service("root")
def test_two_pods_train_and_their_job_can_be_listed_and_read(two_nodes, launch):
    following = launch("--nnodes", "2", "--ranks", "all", "train.py", "--lr", "$(HOME) $$x")
    out, err = following.communicate(timeout=limit(240))
    assert following.returncode == 0, err + out
    name = get_id(err)
    for rank in (0, 1):
        shown = f"rank {rank} of 2 total 3.0 helped ['--lr', '$(HOME) $$x']"
        assert re.search(rf"^{name}-{rank} \| .*{re.escape(shown)}$", out, re.MULTILINE), out
    assert f"job {name} is Complete" in err
    listed = jobs("list").stdout
    assert re.search(rf"{name}\t.*\tComplete\t", listed)
    status = jobs("status", name).stdout
    assert re.search(r"exit code\t0\n", status)
    assert sorted(jobs("logs", name).stdout.splitlines()) == sorted(out.splitlines())
    owners = [item["metadata"]["ownerReferences"][0] for item in two_nodes.objects["configmaps"].values()]
    assert [owner["uid"] for owner in owners] == [two_nodes.objects["jobs"][name]["metadata"]["uid"]]


@pytest.mark.service("root")
def test_the_exit_code_is_that_of_the_script_in_the_pod_that_failed(two_nodes, launch):
    following = launch("--nnodes", "2", "train.py", "fail")
    out, err = following.communicate(timeout=limit(240))
    name = get_id(err)
    assert following.returncode == 7, err + out
    assert re.search(
        rf"job {name} ended as Failed with exit code 7: .*{name}-1, rank 1: exited with code 7", err
    ), err
    # If the other pod ended first, Kubernetes has deleted the one with the cause: only those who followed know it.
    if any(pod.index == 1 for pod in two_nodes.pods):
        assert jobs("logs", "-f", name).returncode == 7
        assert "rank 1: exited with code 7" in jobs("status", name).stdout
    else:
        assert jobs("logs", "-f", name).returncode == 1


@pytest.mark.full
@pytest.mark.service("root")
def test_a_pod_whose_node_is_lost_is_replaced_while_restarts_remain(two_nodes, launch, cwd):
    (cwd / "train.py").write_text(WAIT + TRAIN)
    mark = cwd / "mark"
    following = launch(
        "--nnodes", "2", "--max-restarts", "1", "--set", "process_group_timeout=20", "train.py", str(mark)
    )
    while not mark.exists():
        assert following.poll() is None, following.communicate()
    next(pod for pod in two_nodes.pods if pod.index == 1).disrupt()
    out, err = following.communicate(timeout=limit(240))
    assert following.returncode == 0, err + out
    assert out.count("rank 0 of 2 total 3.0") == 1
    assert [pod.index for pod in two_nodes.pods] == [1, 0, 1]


@pytest.mark.full
@pytest.mark.service("root")
def test_all_pods_of_a_job_set_start_again_and_resume_after_the_first_one_is_lost(two_nodes, launch, cwd):
    (cwd / "wait.py").write_text(
        "import os, sys, time\nprint('resumes:', os.environ['ACCEL_RESUME'], flush=True)\n"
        "if os.environ['ACCEL_RESUME'] == '0': time.sleep(300)\nsys.exit(int(sys.argv[1]) * int(os.environ['RANK']))\n"
    )
    words = ("--nnodes", "2", "--set", "launcher.jobset=true", "--set", "launcher.shutdown_timeout=5")
    following = launch(*words, "wait.py", "7")
    first = wait_until(
        lambda: [
            pod
            for pod in two_nodes.pods
            if pod.index == 0 and any(b"resumes" in line for _, line in pod.lines)
        ]
    )
    first[0].disrupt()
    out, err = following.communicate(timeout=limit(240))
    name = get_id(err)
    assert (following.returncode, "exit code 7: exit code 7 on" in err) == (7, True), err + out
    assert [line for line in out.splitlines() if "resumes" in line] == [
        f"{name}-0 | resumes: 0",
        f"{name}-0 | resumes: 1",
    ]
    assert "restart 1" in err
    status = run_accel(
        "jobs", "status", name, "--launcher", "kubernetes", "--set", "launcher.jobset=true"
    ).stdout
    # As in a Job: Kubernetes has deleted the pod with the cause if the other one ended first.
    code = 7 if any(pod.index == 1 for pod in two_nodes.pods) else 1
    assert f"exit code\t{code}\n" in status


@pytest.mark.full
def test_a_stopped_job_saves_and_is_deleted(server, launch):
    server.secrets = {"keys": {"api": "s3cret"}}
    following = launch("--set", "launcher.secrets={API_KEY: keys/api}", "stay.py")
    assert following.stdout.readline() == "the script runs with s3cret\n"
    name = next(iter(server.objects["jobs"]))
    assert "s3cret" not in str(server.objects)
    assert jobs("stop", name).returncode == 0
    out, err = following.communicate(timeout=limit(120))
    assert following.returncode == 143, err
    assert "the script saves" in out
    assert f"job {name} ended as Deleted with exit code 143: the job was deleted" in err
    assert not any(server.objects.values())
    gone = jobs("status", name)
    assert (gone.returncode, "Unknown job" in gone.stderr) == (2, True)


def test_ctrl_c_leaves_the_job_running(server, launch):
    server.secrets = {"keys": {"api": "x"}}
    following = launch("--set", "launcher.secrets={API_KEY: keys/api}", "stay.py")
    assert following.stdout.readline() == "the script runs with x\n"
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=limit(60))
    assert following.returncode == 130
    name = get_id(err)
    assert f"job {name} keeps running" in err
    assert server.pods[0].code is None


def test_a_cluster_that_rejects_or_does_not_answer_is_named(server, launch, monkeypatch):
    server.write_kubeconfig("another token")
    _, err = (process := launch("train.py")).communicate(timeout=limit(60))
    assert (process.returncode, "rejects the credentials" in err) == (2, True), err
    with free_port() as port:
        server.write_kubeconfig("x", port)
    _, err = (process := launch("train.py")).communicate(timeout=limit(60))
    assert (process.returncode, err.count("accel: error:")) == (1, 1), err
    done = jobs("list")
    assert (done.returncode, "Connection refused. Check the network" in done.stderr) == (1, True), done.stderr
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "no-plugin",
        "interactiveMode": "Never",
    }
    server.write_kubeconfig("x", users=[{"name": "u", "user": {"exec": plugin}}])
    done = jobs("list")
    assert "accel: [Errno 2] No such file or directory: 'no-plugin'" in done.stderr
    monkeypatch.setenv("KUBECONFIG", str(server.folder / "absent"))
    done = jobs("list")
    assert (done.returncode, "Set KUBECONFIG or launcher.context" in done.stderr) == (2, True), done.stderr


def test_a_dry_run_lets_a_cluster_check_the_manifest_and_creates_nothing(server, launch):
    out, err = (process := launch("--dry-run", "train.py")).communicate(timeout=limit(60))
    assert (process.returncode, "kind: Job" in out, "not checked" in err) == (0, True, False), err
    words = ("--dry-run", "--set", "launcher.pod={spec: {hostnam: x}}", "train.py")
    out, err = (process := launch(*words)).communicate(timeout=limit(60))
    assert (process.returncode, "Cannot check the job: the cluster rejects it with 422" in err) == (
        2,
        True,
    ), err
    assert "hostnam" in err
    server.is_down = True
    out, err = (process := launch(*words)).communicate(timeout=limit(60))
    assert (process.returncode, "hostnam: x" in out) == (0, True), err
    assert (
        "the manifest is not checked by the cluster: Cannot check the job: the cluster does not answer" in err
    )
    assert not any(server.objects.values())


def test_a_job_without_its_files_is_deleted(server, launch, monkeypatch):
    monkeypatch.setattr(server, "create", lambda kind, item, query: _refuse(kind, item, query, server))
    _, err = (process := launch("train.py")).communicate(timeout=limit(60))
    assert process.returncode == 2, err
    assert "quota" in err
    assert len(server.deletions) == 1


def _refuse(kind, item, query, server):
    from support.hosts.kubernetes import ApiError

    if kind == "configmaps":
        raise ApiError(403, "exceeded quota")
    return KubernetesServer.create(server, kind, item, query)


@pytest.mark.full
def test_a_cluster_that_does_not_answer_for_a_while_loses_no_line(server, launch, cwd):
    (cwd / "count.py").write_text(
        "import time\nfor n in range(12):\n    print('line', n, flush=True)\n    time.sleep(0.5)\n"
    )
    following = launch("count.py")
    assert following.stdout.readline() == "line 0\n"
    server.is_down = True
    first = following.stderr.readline()
    while "Trying again" not in first:
        first = following.stderr.readline()
    server.is_down = False
    out, err = following.communicate(timeout=limit(60))
    assert following.returncode == 0, err
    assert out == "".join(f"line {n}\n" for n in range(1, 12))
    assert err.count("answers again") == 1


@pytest.mark.full
def test_pods_that_the_cluster_does_not_admit_and_volumes_that_are_missing_are_named_at_once(server, launch):
    server.rejection = 'pods "train-0" is forbidden: error looking up service account team/nobody'
    assert (
        _read_reason(launch("--set", "launcher.service_account=nobody", "train.py"))
        == f"FailedCreate: Error creating: {server.rejection}"
    )
    server.rejection = ""
    mounted = launch("--set", "launcher.volumes={/keys: secret/absent}", "train.py")
    assert _read_reason(mounted) == 'FailedMount: MountVolume.SetUp failed: secret "absent" not found'


def _read_reason(following):
    """Return why the job that is followed waits; delete it."""
    lines = []
    for line in following.stderr:
        lines.append(line)
        if match := re.search(r"is Pending \((.*)\)( on node0)?$", line):
            jobs("stop", get_id("".join(lines)))
            following.communicate(timeout=limit(60))
            return match[1]
    raise AssertionError("no reason was printed")


def test_a_job_whose_creation_was_not_answered_is_deleted(server, launch, monkeypatch):
    monkeypatch.setattr(server, "create", lambda *args: _create_and_break(server, *args))
    _, err = (process := launch("train.py")).communicate(timeout=limit(60))
    assert process.returncode == 1, err
    assert "the cluster does not answer" in err
    assert len(server.deletions) == 1


def _create_and_break(server, *args):
    KubernetesServer.create(server, *args)
    raise ConnectionAbortedError


# TrainJobs of Kubeflow Trainer


@pytest.fixture
def kubeflow(launch):
    def start(*args):
        return launch("--set", "launcher.kubeflow=true", *args)

    return start


def train_jobs(*args):
    return jobs(*args, "--set", "launcher.kubeflow=true")


@pytest.mark.service("root")
@pytest.mark.parametrize("version", ["2.2", pytest.param("2.1", marks=pytest.mark.full)])
def test_a_train_job_trains_and_can_be_listed_and_read(two_nodes, kubeflow, version):
    two_nodes.trainer = version
    versions = ("--set", f"launcher.trainer_version={version}") if version == "2.1" else ()
    following = kubeflow(*versions, "--nnodes", "2", "--ranks", "all", "train.py", "--lr", "$(HOME) $$x")
    out, err = following.communicate(timeout=limit(240))
    assert following.returncode == 0, err + out
    name = get_id(err)
    for rank in (0, 1):
        shown = f"rank {rank} of 2 total 3.0 helped ['--lr', '$(HOME) $$x']"
        assert re.search(rf"^{name}-{rank} \| .*{re.escape(shown)}$", out, re.MULTILINE), out
    assert f"job {name} is Complete" in err
    assert not two_nodes.objects["jobs"]
    assert not two_nodes.objects["services"]
    assert re.search(rf"{name}\t.*\tComplete\t", train_jobs("list").stdout)
    assert re.search(r"exit code\t0\n", train_jobs("status", name).stdout)
    assert sorted(train_jobs("logs", name).stdout.splitlines()) == sorted(out.splitlines())
    owners = [item["metadata"]["ownerReferences"][0] for item in two_nodes.objects["configmaps"].values()]
    assert [owner["uid"] for owner in owners] == [two_nodes.objects["trainjobs"][name]["metadata"]["uid"]]


@pytest.mark.full
@pytest.mark.service("root")
def test_a_train_job_that_fails_after_restarts_of_its_pods_has_the_exit_code_of_the_script(
    two_nodes, kubeflow
):
    two_nodes.backoff_limit = 2
    following = kubeflow("--nnodes", "2", "train.py", "fail")
    out, err = following.communicate(timeout=limit(240))
    name = get_id(err)
    assert following.returncode == 7, err + out
    assert re.search(rf"job {name} ended as Failed with exit code 7: .*rank 1: exited with code 7", err), err
    assert "restart 1" in err


def test_a_stopped_train_job_saves_and_is_deleted(server, kubeflow):
    server.secrets = {"keys": {"api": "s3cret"}}
    following = kubeflow("--set", "launcher.secrets={API_KEY: keys/api}", "stay.py")
    assert following.stdout.readline() == "the script runs with s3cret\n"
    name = next(iter(server.objects["trainjobs"]))
    assert "s3cret" not in str(server.objects)
    assert train_jobs("stop", name).returncode == 0
    out, err = following.communicate(timeout=limit(120))
    assert following.returncode == 143, err
    assert "the script saves" in out
    assert f"job {name} ended as Deleted with exit code 143: the job was deleted" in err
    assert not any(server.objects.values())


def test_a_cluster_without_trainer_or_with_an_older_one_is_named(server, kubeflow):
    server.trainer = None
    _, err = (process := kubeflow("train.py")).communicate(timeout=limit(60))
    assert (process.returncode, "the cluster has no Kubeflow Trainer 2" in err) == (2, True), err
    server.trainer = "2.1"
    _, err = (process := kubeflow("train.py")).communicate(timeout=limit(60))
    assert process.returncode == 2
    assert "does not know spec.runtimePatches. Set it in the runtime" in err
    assert not server.deletions
