"""The ray launcher: its plan, what is submitted, and the messages, without Ray."""

import json
import re
import sys
import tarfile
from importlib.util import find_spec

import pytest
import yaml
from pydantic import ValidationError
from support.launchers.launch_specs import build_spec
from support.launchers.ray_answers import RecordedClient, details
from support.processes.commands import call_accel

from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.ray.launcher import Ray
from accel_cli.extensions.ray.plan import ARCHIVE, RUN_FILE, RayRun, write_folder
from accel_cli.extensions.ray.service import JobLog, RayCluster, parse_job
from accel_cli.launchers import job_launcher
from accel_cli.launchers.job_service import UnreachableError
from accel_cli.planning.network import Endpoint
from accel_cli.profile.planner import build_plan

ELSEWHERE = Endpoint("10.0.0.7", 29400)


@pytest.fixture(autouse=True)
def _files(cwd):
    (cwd / "train.py").write_text("pass")


def plan(section, *args, **options):
    return build_plan(section, build_spec(*args, **options))


@pytest.mark.parametrize(
    ("section", "options", "bundle"),
    [
        (Ray(), {}, {"CPU": 1}),
        (Ray(nproc_per_node=4), {}, {"CPU": 4}),
        (Ray(nproc_per_node=4, cpus_per_process=3), {}, {"CPU": 12}),
        (Ray(gpus_per_node=8, cpus_per_process=2), {}, {"CPU": 16, "GPU": 8}),
        (Ray(gpus_per_node=8), {"device": "cpu"}, {"CPU": 1}),
        (Ray(gpus_per_node=1, cpus_per_process=0), {}, {"GPU": 1}),
        (Ray(resources={"team": 0.5, "memory": 64e9}), {}, {"CPU": 1, "team": 0.5, "memory": 64e9}),
    ],
)
def test_each_node_reserves_what_its_processes_need(section, options, bundle):
    assert plan(section, **options).job.run.bundle == bundle


def test_a_job_without_gpus_runs_on_the_cpus_of_its_nodes():
    assert plan(Ray()).job.run.env["ACCEL_DEVICE"] == "cpu"
    assert plan(Ray(gpus_per_node=1)).job.run.env["ACCEL_DEVICE"] == "auto"
    assert plan(Ray(resources={"TPU": 4})).job.run.env["ACCEL_DEVICE"] == "auto"
    with pytest.raises(UsageError, match=r"Cannot use device cuda .* the job reserves no GPU"):
        plan(Ray(), device="cuda")


def test_other_accelerators_of_ray_need_a_number_of_processes():
    with pytest.raises(ValidationError, match="cannot count processes from HPU; set nproc_per_node"):
        Ray(resources={"HPU": 8})
    assert plan(Ray(resources={"HPU": 8}, nproc_per_node=8)).nproc_per_node == 8


def test_the_plan_names_the_variable_that_overrides_the_address():
    planned = plan(Ray(address="http://head:8265"), environ={"RAY_ADDRESS": "http://other:8265"})
    assert planned.job.describe()[0] == "cluster: http://other:8265 (from RAY_ADDRESS)"
    assert plan(Ray(address="http://head:8265")).job.describe()[0] == "cluster: http://head:8265"


def test_what_the_profile_adds_is_in_the_request_beside_what_accel_sets(capfd):
    section = Ray(
        runtime_env={"env_vars": {"TEAM": "a"}, "config": {"setup_timeout_seconds": 9}},
        job={"entrypoint_resources": {"head": 1}, "metadata": {"team": "a"}},
    )
    request = plan(section).job.build_request("folder", "id", {"accel-user": "ann"})
    assert request["runtime_env"]["env_vars"] == {"TEAM": "a", "RAY_JOB_STOP_WAIT_TIME_S": "50"}
    assert request["runtime_env"]["config"] == {"setup_timeout_seconds": 9}
    assert (request["submission_id"], request["entrypoint_resources"]) == ("id", {"head": 1})
    assert request["metadata"] == {"accel-user": "ann", "team": "a"}
    shown = yaml.safe_load(plan(section).job.preview().partition("accel-run.json:")[0])
    assert (shown["metadata"], shown["runtime_env"]["env_vars"]["TEAM"]) == ({"team": "a"}, "a")
    if find_spec("ray") is None:
        assert "were not checked: Ray is not installed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"job": {"entrypoint": "x"}}, r"launcher\.job\.entrypoint.*Pass the script"),
        ({"job": {"metadata": {"accel-user": "bob"}}}, r"launcher\.job\.metadata\.accel-user"),
        ({"runtime_env": {"working_dir": "."}}, r"Set launcher\.source_dir"),
        ({"runtime_env": {"env_vars": None}}, r"Set launcher\.shutdown_timeout"),
        ({"runtime_env": {"uv": ["x"]}, "requirements": "r.txt"}, r"launcher\.runtime_env\.uv.*launcher\.requirements"),
        ({"runtime_env": {"env_vars": {"API_KEY": "x"}}}, r"launcher\.runtime_env\.env_vars\.API_KEY looks like a secret"),
    ],
)  # fmt: skip
def test_what_accel_sets_in_a_request_is_not_replaced(cwd, keys, message):
    (cwd / "r.txt").write_text("six\n")
    with pytest.raises(UsageError, match=message):
        plan(Ray(**keys)).job.build_request("folder", "id", {"accel-user": "ann"})


def test_every_node_runs_accel_launch_with_its_rank():
    job = plan(Ray(nnodes=2, nproc_per_node=2, stall_timeout=60), "--lr", "1").job
    command = job.run.build_command("py", 1, ELSEWHERE, "id-0", resume=False)
    assert command[:14] == (
        *("py", "-m", "accel_cli", "launch", "--quiet", "--no-profile", "--nnodes", "2"),
        *("--rdzv-endpoint", "10.0.0.7:29400", "--rdzv-id", "id-0", "--node-rank", "1"),
    )
    assert "launcher.nproc_per_node=2" in command
    assert "launcher.stall_timeout=60" in command
    assert command[-4:] == ("--", "train.py", "--lr", "1")
    assert "launcher.allow_loopback=true" not in command


def test_a_retry_resumes_and_nodes_of_one_machine_may_use_loopback():
    run = plan(Ray(nnodes=2)).job.run
    command = run.build_command("py", 0, Endpoint("127.0.0.1", 29400), "id-1", resume=True)
    assert command.index("--resume") < command.index("--")
    assert "launcher.allow_loopback=true" in command
    alone = plan(Ray()).job.run.build_command("py", 0, ELSEWHERE, "id-0", resume=False)
    assert not {"--nnodes", "--rdzv-endpoint", "--resume"} & set(alone)


def test_restarts_let_the_rendezvous_assign_the_ranks():
    run = plan(Ray(nnodes=2, max_restarts=1)).job.run
    assert "--node-rank" not in run.build_command("py", 1, ELSEWHERE, "id", resume=False)


def test_the_job_carries_its_files_and_the_run_and_no_value_is_in_the_command(cwd):
    (cwd / "lib").mkdir()
    (cwd / "lib" / "model.py").write_text("x = 1\n")
    (cwd / "key.pem").write_text("secret")
    job = plan(Ray(), "\udcff", env={"SETTING": "v4lue"}).job
    with write_folder(job, "train-1") as folder:
        assert {path.name for path in folder.iterdir()} == {RUN_FILE, ARCHIVE}
        assert (folder / RUN_FILE).stat().st_mode & 0o077 == 0
        with tarfile.open(folder / ARCHIVE) as archive:
            assert sorted(archive.getnames()) == ["lib/model.py", "train.py"]
        run = RayRun.from_json((folder / RUN_FILE).read_text())
    assert (run.job_id, run.target, run.env["SETTING"]) == ("train-1", ("--", "train.py", "\udcff"), "v4lue")
    assert "v4lue" not in job.entrypoint + json.dumps(job.build_runtime_env("."))
    assert not folder.exists()


def test_a_run_of_another_version_of_accel_is_refused():
    text = plan(Ray()).job.run.to_json()
    assert RayRun.from_json(text).to_json() == text
    with pytest.raises(AccelError, match=r"submitted with 9\.9.*Install the same version on all nodes"):
        RayRun.from_json(json.dumps({**json.loads(text), "version": "9.9"}))


def test_the_script_runs_in_the_folder_of_the_launch(cwd, monkeypatch):
    (cwd / "sub").mkdir()
    monkeypatch.chdir(cwd / "sub")
    run = plan(Ray(source_dir="..")).job.run
    assert (run.folder, run.script, run.target) == ("sub", "train.py", ("--", "train.py"))


def test_a_shared_folder_is_not_sent(cwd):
    run = plan(Ray(source="shared")).job.run
    assert (run.sends_source, run.folder) == (False, str(cwd))
    assert plan(Ray(source="shared", working_dir="/data/x")).job.run.folder == "/data/x"
    run = plan(Ray(), target="accel_runtime.selfcheck", kind="module", is_builtin=True).job.run
    assert (run.sends_source, run.folder, run.target[:2]) == (False, None, ("-m", "--"))


def test_nodes_without_a_common_folder_do_not_share_files():
    def shares(**options):
        return plan(Ray(**options)).job.run.env["ACCEL_SHARED_FILES"]

    assert shares() == "1"
    assert shares(nnodes=2) == "0"
    assert shares(nnodes=2, source="shared") == "1"


def test_processes_get_the_threads_of_their_cpus_unless_the_profile_says_otherwise():
    assert plan(Ray(cpus_per_process=3)).env["OMP_NUM_THREADS"] == "3"
    assert plan(Ray(), env={"OMP_NUM_THREADS": "7"}).env["OMP_NUM_THREADS"] == "7"


def test_ray_waits_for_the_scripts_of_a_stopped_job_and_installs_the_requirements(cwd):
    (cwd / "requirements.txt").write_text("# none\n\nrich>=13\n")
    env = plan(Ray(shutdown_timeout=50, requirements="requirements.txt")).job.build_runtime_env("folder")
    assert int(env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 50
    assert env["pip"] == ["rich>=13"]
    (cwd / "secret.txt").write_text("--index-url https://ann:s3cret@host/simple\n")
    with pytest.raises(UsageError, match=r"a password in a URL.*PIP_INDEX_URL"):
        plan(Ray(requirements="secret.txt"))
    with pytest.raises(UsageError, match=r"launcher\.requirements absent\.txt: No such file"):
        plan(Ray(requirements="absent.txt"))


@pytest.mark.smoke
def test_a_dry_run_prints_what_is_submitted_and_hides_secrets(cwd, capfd, monkeypatch):
    (cwd / "accel.yaml").write_text(
        "schema_version: 1\nenv:\n  DATA: https://ann:s3cret@host/x\nlauncher:\n  kind: ray\n"
    )
    done = call_accel(
        capfd, "launch", "--dry-run", "--nnodes", "2", "--nproc-per-node", "4", "train.py", "--lr", "1"
    )
    assert done.returncode == 0, done.stderr
    assert "placement group: STRICT_SPREAD, 2 x {CPU: 4}" in done.stdout
    assert "--nnodes 2 --rdzv-endpoint ADDRESS:29400 --rdzv-id ID --node-rank 0" in done.stdout
    request = yaml.safe_load(
        "submission_id" + done.stdout.partition("submission_id")[2].partition("\n2 files")[0]
    )
    assert request["entrypoint"] == "exec python -m accel_cli.extensions.ray"
    assert request[RUN_FILE]["target"] == ["--", "train.py", "--lr", "1"]
    assert "2 files of" in done.stdout
    assert "s3cret" not in done.stdout


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"address": "a b"}, "expected text without spaces"),
        ({"python": "python; rm"}, "expected text without spaces"),
        ({"resources": {"GPU": 1.0}}, r"cannot contain GPU: set launcher\.gpus_per_node"),
        ({"resources": {"x": 0.0}}, "expected amounts above 0"),
        ({"cpus_per_process": 0}, "must reserve something on each node"),
        ({"working_dir": "data"}, "pattern"),
        ({"working_dir": "/app"}, "expected none with source: folder, whose files"),
        ({"source": "shared", "include": ["data"]}, "expected none without source: folder"),
        ({"source": "image"}, "'folder' or 'shared'"),
    ],
)
def test_an_invalid_value_is_an_error(values, message):
    with pytest.raises(ValidationError, match=message):
        Ray(**values)


def test_a_variable_that_looks_like_a_secret_is_refused():
    with pytest.raises(UsageError, match=r"env\.API_KEY looks like a secret.*before ray start"):
        plan(Ray(), env={"API_KEY": "s3cret"})


def test_more_processes_than_reserved_gpus_are_an_error():
    with pytest.raises(UsageError, match=r"requests 1 GPU\(s\) per node"):
        plan(Ray(gpus_per_node=1, nproc_per_node=2))


def test_the_missing_package_is_named_with_the_command_that_installs_it(cwd, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = call_accel(capfd, "launch", "--set", "launcher.kind=ray", "train.py")
    assert done.returncode == 2
    assert "'ray[default]>=2.40'" in done.stderr
    monkeypatch.setattr(job_launcher, "find_spec", lambda _: None)
    assert Ray.get_missing_requirement() == "ray"
    assert plan(Ray(source="shared")).job.sent is None


# The state of jobs -----------------------------------------------------------


FAILED = (
    "Job entrypoint command failed with exit code 7, last available logs:\naccel: error: rank 1: x\n"
    "accel: error: node b: exit code 7 on b, rank 1: ValueError: x\n"
)

NOT_INSTALLED = "accel is not installed in launcher.python on the head node. Install the same version there and on all nodes"


@pytest.mark.parametrize(
    ("job", "code", "reason"),
    [
        (details("PENDING", "Job has not started yet."), None, "Job has not started yet."),
        (details("RUNNING", "Job is currently running."), None, ""),
        (details("SUCCEEDED", "Job finished successfully."), 0, ""),
        (details("STOPPED", "Job was intentionally stopped."), 143, "the job was stopped"),
        (details("FAILED", FAILED, driver_exit_code=7), 7, "node b: exit code 7 on b, rank 1: ValueError: x"),
        (details("FAILED", "failed with exit code 127, last available logs:\nexec: python: not found\n"), 1, "exec: python: not found"),
        (details("FAILED", "out of memory", driver_exit_code=-9), 137, "out of memory"),
        (details("FAILED", "Job supervisor actor died"), 1, "Job supervisor actor died"),
        (details("FAILED", "x\npython: No module named accel_cli"), 1, NOT_INSTALLED),
    ],
)  # fmt: skip
def test_the_state_exit_code_and_reason_of_a_job_are_those_of_its_driver(job, code, reason):
    read = parse_job(job)
    assert (read.exit_code, read.reason, read.finished) == (code, reason, code is not None)
    assert (read.id, read.elapsed, read.submitted) == ("train-1", "0:01:05", "1970-01-01T00:16:40+00:00")


class Client:
    """A client whose connection to the log breaks once."""

    def __init__(self):
        self.connections = 0

    async def tail_job_logs(self, _):
        self.connections += 1
        for text in ("one\ntwo", "\nthree\n") if self.connections > 1 else ("one\nt",):
            yield text
        if self.connections == 1:
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def get_job_info(self, _):
        return details("SUCCEEDED" if self.connections > 2 else "RUNNING")


def test_a_broken_connection_to_a_log_loses_and_repeats_no_output():
    cluster = RayCluster("auto")
    cluster.__dict__["client"] = Client()
    log = JobLog(cluster, "train-1")
    output, lost = b"", 0
    while not log.is_complete(None):
        try:
            output += log.read()
        except UnreachableError:
            lost += 1
    assert (output, lost, cluster.client.connections) == (b"one\ntwo\nthree\n", 1, 3)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConnectionError("Failed to connect to Ray at address: http://a:8265."), UnreachableError, "does not answer: Failed"),
        (RuntimeError("Request failed with status code 503: busy."), UnreachableError, "does not answer"),
        (RuntimeError("Request failed with status code 404: Job x does not exist."), UsageError, "does not know it"),
        (RuntimeError("Request failed with status code 500: Traceback\nValueError: Package size (501.00MiB) exceeds the maximum size of"),
         UsageError, r"larger than the cluster accepts\..*launcher\.exclude"),
        (RuntimeError('Request failed with status code 500: Traceback (most recent call last):\n  File "x"\nKeyError: 1'), UnreachableError,
         "does not answer: KeyError: 1. Check"),
        (RuntimeError("Request failed with status code 400: bad."), UsageError, "Cannot read job x: Request failed"),
        (UsageError("ours"), UsageError, "^ours$"),
    ],
)  # fmt: skip
def test_errors_of_the_client_say_what_failed_and_whether_to_try_again(error, kind, message):
    with pytest.raises(kind, match=message) as raised, RayCluster("auto").translate_errors("read job x"):
        raise error
    assert type(raised.value) is kind


@pytest.mark.parametrize("text", ["[1]", "{", "1"])
def test_invalid_headers_are_named(text, monkeypatch):
    from accel_cli.extensions.ray.service import _read_headers

    monkeypatch.setenv("RAY_JOB_HEADERS", text)
    with pytest.raises(UsageError, match="Invalid RAY_JOB_HEADERS"):
        _read_headers()
    monkeypatch.setenv("RAY_JOB_HEADERS", '{"Authorization": "Bearer x"}')
    assert _read_headers() == {"Authorization": "Bearer x"}


class LosingClient(RecordedClient):
    """A client that loses the answer to a submission."""

    def __init__(self, *, is_taken, answers=True, error=None):
        super().__init__("ann")
        self._is_taken, self._answers = is_taken, answers
        self._error = error or ConnectionError("timed out")

    def submit_job(self, *, submission_id, **_):
        if self._is_taken:
            self.add(submission_id, "SUCCEEDED", "trained\n")
        raise self._error

    def get_job_info(self, job_id):
        if not self._answers:
            raise ConnectionError("timed out")
        return super().get_job_info(job_id)


@pytest.fixture
def launch_with(monkeypatch, capfd):
    def launch(client):
        monkeypatch.setattr(RayCluster, "client", client)
        return call_accel(capfd, "launch", "--set", "launcher.kind=ray", "train.py")

    return launch


def test_a_job_whose_submission_lost_its_answer_is_followed(launch_with):
    done = launch_with(LosingClient(is_taken=True))
    assert (done.returncode, done.stdout) == (0, "trained\n")


def test_a_job_that_did_not_arrive_is_an_error(launch_with):
    done = launch_with(LosingClient(is_taken=False))
    assert done.returncode == 1
    assert "Cannot submit the job: the cluster does not answer" in done.stderr
    assert "may be running" not in done.stderr


def test_a_job_of_which_nothing_is_known_may_be_running(launch_with):
    done = launch_with(LosingClient(is_taken=True, answers=False))
    assert done.returncode == 1
    assert re.search(
        r"Job train-\w+ may be running\. Follow it with accel jobs logs .* --launcher ray", done.stderr
    )


def test_an_interrupted_submission_names_the_job_that_runs(launch_with):
    done = launch_with(LosingClient(is_taken=True, error=KeyboardInterrupt()))
    assert done.returncode == 130
    assert re.search(r"job train-\w+ is submitted\. Follow it with", done.stderr)
