"""The jobs of every service satisfy the contract of `launchers/job_service.py`, also those of docs/writing-a-launcher.md.

A new launcher of jobs needs an entry in `SERVICES`: a function that yields a `Service`, which starts jobs as the launcher
does, or has recorded answers. `make test-ray` and `make test-slow` use real clusters of Ray and Slurm.
"""

import json
import os
import re
import shutil
import subprocess
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
from aws.models import keep_models
from support.hosts import sky
from support.hosts.kubernetes import KubernetesServer
from support.launchers import page_launcher
from support.launchers.launch_specs import build_spec
from support.launchers.ray_answers import RecordedClient
from support.launchers.slurm_answers import line
from support.processes.commands import call_accel
from support.processes.waits import wait_until

from accel_cli.errors import UsageError
from accel_cli.extensions.kubernetes import manifests
from accel_cli.extensions.ray.service import RayCluster
from accel_cli.extensions.sagemaker.service import SageMakerJobs
from accel_cli.extensions.skypilot.task import LABEL
from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.job_service import Job, Jobs, PollIntervals, get_user

WAIT_S = 15  # before it is scaled
UNKNOWN = "12345678"
"""The id of no job, which is valid for every service."""


class Script(NamedTuple):
    """The end of the script of a job that prints two lines."""

    ends: str
    """The end of a shell script."""
    code: int | None
    """The exit code; None while it runs."""


DONE, FAILED, RUNNING = Script("exit 0", 0), Script("exit 3", 3), Script("exec sleep 60", None)
OUTPUT = "first\nlast\n"


@dataclass
class Service:
    """A service, and the values that select it."""

    kind: str
    start: Any
    """Function that starts a job with a name and a script, and returns its id."""
    values: dict[str, Any] = field(default_factory=dict)
    failed_code: int = FAILED.code
    """The exit code of a job whose script fails; SageMaker has only its own."""

    def open(self):
        """Return the jobs, as a new command has them."""
        return LAUNCHERS[self.kind].open_jobs(self.values)

    def call(self, capfd, *words):
        """Call a command of `accel jobs`."""
        options = [f"--set={key}={value}" for key, value in self.values.items()]
        return call_accel(capfd, "jobs", *words, "--launcher", self.kind, *options)

    def run(self, name, script):
        """Start a job, and return its id once it has printed and is in the state of the script."""
        job_id = self.start(name, script)

        def has_reached_state():
            jobs = self.open()
            job = jobs.status(job_id)
            lines = read_lines(jobs, job)
            # A log is read while it grows, too.
            assert lines == OUTPUT.split()[: len(lines)]
            return len(lines) == len(OUTPUT.split()) and job.finished == (script.code is not None)

        wait_until(has_reached_state, WAIT_S, lambda: str(self.open().status(job_id)))
        return job_id


def read_lines(jobs, job):
    """Return the lines of the script in the log of a job."""
    log, output = jobs.open_log(job), b""
    while more := log.read():
        output += more
    return find_lines(output.decode())


def find_lines(text):
    """Return the lines of the script in a text: services add the name of a host, and lines of their own."""
    return re.findall(r"^(?:\S+ \| )?(first|last)$", text, re.MULTILINE)


# The services -----------------------------------------------------------------------------

SCONTROL = """\
for id; do :; done
case $id in
  --oneliner) cat {folder}/*.job ;;
  *) cat {folder}/$id.job 2>/dev/null || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }} ;;
esac
"""
SCANCEL = """\
[ -e {folder}/$1.job ] || {{ echo "scancel: error: Kill job error on job id $1: Invalid job id specified" >&2; exit 1; }}
sed -i 's/JobState=RUNNING/JobState=CANCELLED/; s/ExitCode=0:0/ExitCode=0:15/' {folder}/$1.job
"""
SACCT = "echo 'Slurm accounting storage is disabled' >&2; exit 1\n"


@contextmanager
def record_slurm(folder, monkeypatch, request):
    """Commands of Slurm with recorded answers."""
    for name, text in (("scontrol", SCONTROL), ("scancel", SCANCEL), ("sacct", SACCT)):
        (folder / name).write_text(f"#!/bin/sh\n{text.format(folder=folder)}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def start(name, script):
        job_id = str(10 + len([*folder.glob("*.job")]))
        log = folder / f"slurm-{job_id}.out"
        log.write_text(OUTPUT)
        state = {DONE: "COMPLETED", FAILED: "FAILED", RUNNING: "RUNNING"}[script]
        text = line(id=job_id, name=name, state=state, code=f"{script.code or 0}:0", log=log)
        (folder / f"{job_id}.job").write_text(text.replace("ann(1000)", f"ann({os.getuid()})") + "\n")
        return job_id

    yield Service("slurm", start)


@contextmanager
def record_ray(folder, monkeypatch, request):
    """A client of Ray with recorded answers."""
    client = RecordedClient(get_user())
    monkeypatch.setattr(RayCluster, "client", client)

    def start(name, script):
        state = {DONE: "SUCCEEDED", FAILED: "FAILED", RUNNING: "RUNNING"}[script]
        job_id, now = f"{name}-{time.monotonic_ns():x}", time.time() * 1000
        client.add(job_id, state, OUTPUT, start_time=now, driver_exit_code=script.code or None)
        return job_id

    yield Service("ray", start)


@contextmanager
def start_kubernetes(folder, monkeypatch, request):
    """An API server that runs the container of a pod as a process."""
    server = KubernetesServer(folder)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))

    def start(name, script):
        section = LAUNCHERS["kubernetes"](image="accel:cpu", source="image", job_name=name)
        job = section.plan(build_spec()).job
        job_id = manifests.name_job(job)
        (body,) = manifests.render(job, job_id, manifests.format_user(), None)
        command = ["sh", "-c", f"echo first; echo last; {script.ends}"]
        body["spec"]["template"]["spec"]["containers"][0] |= {"command": command, "args": []}
        server.create("jobs", body, {})
        return job_id

    yield Service("kubernetes", start)
    server.close()


@contextmanager
def start_sagemaker(folder, monkeypatch, request):
    """AWS on loopback, whose jobs are in the state that a test asks for."""
    keep_models()
    server = request.getfixturevalue("aws_server")
    server.use(monkeypatch)
    server.role()
    server.bucket("sagemaker-out")
    monkeypatch.setattr(SageMakerJobs, "intervals", PollIntervals(0.01, (0.01, 0.01), 0.01))

    def start(name, script):
        server.play({None: "InProgress", 0: "Completed"}.get(script.code, "Failed"), lines=OUTPUT.split())
        job_id = f"{name}-{time.monotonic_ns():x}"
        server.create(job_id)
        time.sleep(0.01)  # times of submission are those of milliseconds
        return job_id

    yield Service("sagemaker", start, failed_code=1)
    server.reset()


@contextmanager
def start_skypilot(folder, monkeypatch, request):
    """The imitation of the command of SkyPilot, which runs tasks on this machine."""
    clusters = sky.install(folder, monkeypatch)

    def start(name, script):
        known = {path.name for path in clusters.iterdir()}
        task = {"name": name, "num_nodes": 1, "resources": {"labels": {LABEL: "1"}}, "envs": {}}
        (folder / "task.yaml").write_text(
            json.dumps({**task, "run": f"echo first; echo last; {script.ends}"})
        )
        subprocess.run(
            ["sky", "launch", "--cluster", f"{name}-{len(known)}", folder / "task.yaml"], check=True
        )
        return f"{name}-{len(known)}"

    yield Service("skypilot", start)
    for cluster in clusters.iterdir():
        sky.FOLDER = clusters
        sky.down(cluster.name)


@contextmanager
def start_background(folder, monkeypatch, request):
    """The launcher of the page, which runs processes."""
    values = {"launcher.folder": str(folder / "jobs")}
    service = Service(page_launcher.KIND, None, values)

    def start(name, script):
        before = {job.id for job in service.open().list()}
        section = LAUNCHERS[page_launcher.KIND](folder=values["launcher.folder"])
        target = shutil.which("sh")
        spec = build_spec(
            "-c", f": {name}; echo first; echo last; {script.ends}", kind="program", target=target
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # accel launch exits before the job
            assert section.run(section.plan(replace(spec, option_values={"detach": True}))) == 0
        (job_id,) = {job.id for job in service.open().list()} - before
        return job_id

    service.start = start
    yield service
    for job in service.open().list():
        service.open().stop(job.id)


SERVICES = {
    "slurm": record_slurm,
    "ray": record_ray,
    "kubernetes": start_kubernetes,
    "sagemaker": start_sagemaker,
    "skypilot": start_skypilot,
    page_launcher.KIND: start_background,
}


@pytest.fixture(scope="module", autouse=True)
def _page_launcher(tmp_path_factory):
    with page_launcher.importable(tmp_path_factory.mktemp("page") / "site"):
        yield


@pytest.fixture(scope="module", params=SERVICES)
def service(request, tmp_path_factory, _page_launcher):
    """Each service in turn."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp(request.param)
        with SERVICES[request.param](folder, monkeypatch, request) as service:
            yield service


@pytest.fixture(scope="module")
def ids(service):
    """The ids of a job that is done, of one that failed, and of one that runs, in the order of their submission."""
    return {
        script: service.run(name, script)
        for name, script in (("done", DONE), ("failed", FAILED), ("running", RUNNING))
    }


def test_every_launcher_of_jobs_has_a_service_here():
    assert set(SERVICES) == {kind for kind, each in LAUNCHERS.items() if each.location == "job"}


@pytest.mark.parametrize("kind", SERVICES)
def test_jobs_can_be_opened_without_a_profile(kind):
    assert isinstance(LAUNCHERS[kind].open_jobs({}), Jobs)


# Status -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [DONE, FAILED, RUNNING], ids=["done", "failed", "running"])
def test_a_job_has_an_exit_code_once_it_has_finished(service, ids, script):
    job = service.open().status(ids[script])
    expected = service.failed_code if script is FAILED else script.code
    assert (job.id, job.finished, job.exit_code) == (ids[script], script.code is not None, expected)
    assert job.state
    assert job.name
    assert job.log


def test_the_list_has_every_job_with_its_status_oldest_first(service, ids):
    jobs = service.open()
    listed = [job for job in jobs.list() if job.id in ids.values()]
    assert [job.id for job in listed] == list(ids.values())
    for job in listed:
        status = jobs.status(job.id)
        assert (job.name, job.finished, job.exit_code) == (status.name, status.finished, status.exit_code)


def test_an_unknown_job_is_an_error_that_names_it_and_the_command_that_lists_others(service):
    for call in (service.open().status, service.open().stop):
        with pytest.raises(UsageError, match=rf"{UNKNOWN}.*[rR]un\s+accel jobs list"):
            call(UNKNOWN)


@pytest.mark.parametrize("verb", ["status", "logs", "stop", "download"])
def test_an_unknown_job_is_one_message_of_every_command(service, capfd, cwd, verb):
    done = service.call(capfd, verb, UNKNOWN)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"accel: error: .*{UNKNOWN}.*\n", done.stderr), done.stderr


# Logs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [DONE, FAILED, RUNNING], ids=["done", "failed", "running"])
def test_a_log_has_the_output_from_its_first_line_for_every_reader(service, ids, script):
    jobs = service.open()
    job = jobs.status(ids[script])
    log, text = jobs.open_log(job), b""
    while more := log.read():
        text += more
    assert find_lines(text.decode()) == OUTPUT.split()
    assert log.read() == b"", "it was read already"
    assert read_lines(jobs, job) == OUTPUT.split()


@pytest.mark.parametrize("script", [DONE, FAILED], ids=["done", "failed"])
def test_following_a_job_prints_its_output_and_exits_as_the_job(service, ids, capfd, cwd, script):
    done = service.call(capfd, "logs", ids[script], "-f")
    assert find_lines(done.stdout) == OUTPUT.split()
    assert done.returncode == (service.failed_code if script is FAILED else 0)
    assert f"job {ids[script]} " in done.stderr


# The end ----------------------------------------------------------------------------------


def test_a_job_that_is_stopped_ends_with_an_exit_code(service):
    job_id, jobs = service.run("stopped", RUNNING), service.open()
    assert not jobs.status(job_id).finished
    jobs.stop(job_id)
    wait_until(lambda: jobs.status(job_id).finished, WAIT_S, lambda: str(jobs.status(job_id)))
    assert jobs.status(job_id).exit_code


def test_stopping_a_job_that_has_finished_changes_nothing(service, ids, capfd, cwd):
    before: Job = service.open().status(ids[FAILED])
    done = service.call(capfd, "stop", ids[FAILED])
    assert (done.returncode, done.stderr) == (0, f"accel: job {before.id} is {before.state} already\n")
    after = service.open().status(ids[FAILED])
    assert (after.state, after.exit_code) == (before.state, before.exit_code)


def test_files_that_the_service_does_not_keep_are_an_error_that_names_their_place(service, ids, capfd, cwd):
    jobs = service.open()
    if type(jobs).download is Jobs.download:
        done = service.call(capfd, "download", ids[DONE])
        assert done.returncode == 2
        assert f"Cannot download job {ids[DONE]}: its files are {jobs.output_location}" in " ".join(
            done.stderr.split()
        )
