"""`accel jobs` with a SageMaker on loopback."""

import io
import re
import signal
import subprocess
import sys
import tarfile
from functools import partial

import pytest
from aws import models
from support import commands
from support.commands import call_accel
from support.waits import limit, read_until

WAIT_S = 120
"""A generous bar for a command that hangs."""
TWO = {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30}
SPOT = {
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
}


@pytest.fixture
def account(aws):
    aws.role()
    aws.bucket("sagemaker-out")
    return aws


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    commands.preload(models.__file__)


@pytest.fixture
def forked(cwd):
    """Run `accel` in an empty folder, forked from an interpreter with boto3 and its service models."""
    return partial(commands.run_accel, cwd=cwd)


@pytest.fixture
def jobs(forked):
    """Run `accel jobs` for SageMaker."""

    def run(verb, *args, **options):
        return forked("jobs", verb, *args, "--launcher", "sagemaker", timeout=WAIT_S, **options)

    return run


@pytest.fixture
def following(cwd):
    """Start `accel jobs logs NAME -f`."""
    started = []

    def start(name):
        process = commands.Accel(
            "jobs", "logs", name, "-f", "--launcher", "sagemaker", cwd=cwd, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def create(aws, name, **changes):
    aws.client("sagemaker").create_training_job(**aws.request(name, **changes))


# Lists and status ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_newest_jobs_are_listed_oldest_first(account, jobs):
    for number in range(53):
        create(account, f"job-{number:02}")
    account.wait("job-52")
    result = jobs("list")
    assert result.returncode == 0, result.stderr
    _, *rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [row[0] for row in rows] == [f"job-{number:02}" for number in range(3, 53)]
    assert rows[0][2] == "Completed"
    assert account.calls().count("sagemaker:ListTrainingJobs") == 1


def test_an_account_without_jobs_is_reported(account, jobs):
    assert "no jobs found" in jobs("list").stderr


def test_the_status_shows_nodes_and_cost(account, accel):
    account.settings(time=200)
    create(account, "one", ResourceConfig=TWO, **SPOT)
    account.wait("one")
    lines = accel("jobs", "status", "one", "--launcher", "sagemaker").stdout.splitlines()
    assert {
        "id\tone", "state\tCompleted", "exit code\t0", "nodes\t2 x ml.g5.xlarge, spot", "elapsed\t00:03:20",
        "log\tCloudWatch Logs, group /aws/sagemaker/TrainingJobs, streams one/",
    } < set(lines)  # fmt: skip
    assert lines[-1] == "cost\t60 billable seconds on each of 2 instances, spot saved 70 %"


@pytest.mark.slow
def test_a_reached_time_limit_is_in_the_status(account, jobs):
    account.settings(hold="Training", speed=100_000)
    create(account, "long")
    account.wait("long")
    create(account, "late", **SPOT)
    account.settings(hold="Starting")
    create(account, "waits", **SPOT)
    account.wait("waits")
    text = jobs("status", "long").stdout
    assert (
        "state\tMaxRuntimeExceeded\nfinished\tTrue\nexit code\t2\nreason\tstopped: max_run of 3600 s was reached\n"
        in text
    )
    assert "reason\tstopped: max_wait of 7200 s was reached" in jobs("status", "waits").stdout


def test_region_and_aws_profile_come_from_the_effective_profile(account, forked, home, tmp_path, monkeypatch):
    account.client("sagemaker", "eu-west-1").list_training_jobs()
    (home / "profiles").mkdir(parents=True)
    (home / "profiles" / "cloud.yaml").write_text(
        "schema_version: 1\nlauncher:\n  kind: sagemaker\n  instance_type: ml.m5.large\n  region: eu-west-1\n  aws_profile: ann\n"
    )
    result = forked("jobs", "status", "one", "--profile", "cloud")
    assert result.returncode == 2
    assert "profile 'ann'" in result.stderr
    config = tmp_path / "config"
    config.write_text("[profile ann]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    result = forked("jobs", "status", "one", "--profile", "cloud")
    assert "No training job one found in eu-west-1. Run accel jobs list --profile cloud" in result.stderr


@pytest.mark.parametrize("words", [("list",), ("status", "one"), ("download", "one")])
def test_a_missing_boto3_is_one_message_for_every_command(aws, cwd, capfd, monkeypatch, words):
    for name in ("boto3", "botocore"):
        monkeypatch.setitem(sys.modules, name, None)
    result = call_accel(capfd, "jobs", *words, "--launcher", "sagemaker")
    assert result.returncode == 2
    assert "'boto3>=1.43'" in result.stderr
    assert "Traceback" not in result.stderr


# Logs --------------------------------------------------------------------------------------


def test_logs_of_all_hosts_are_printed(account, jobs):
    account.settings(play={"lines": {"algo-1": ["10%\r20%", "x" * 200_000], "algo-2": ["é"]}})
    create(account, "one", ResourceConfig=TWO)
    account.wait("one")
    result = jobs("logs", "one", text=False)  # text would have its carriage returns changed
    lines = result.stdout.decode().split("\n")
    assert result.returncode == 0
    assert [line for line in lines if line.startswith("algo-1")] == [
        "algo-1 | 10%\r20%", f"algo-1 | {'x' * 200_000}", "algo-1 | accel: algo-1 ended with exit code 0",
    ]  # fmt: skip
    assert "algo-2 | é" in lines


def test_a_job_without_output_is_reported(account, jobs):
    account.settings(hold="Starting")
    create(account, "one")
    result = jobs("logs", "one")
    assert "job one has no output; it is Starting" in result.stderr


@pytest.mark.slow
def test_following_prints_every_line_of_all_hosts_and_ends_with_the_cost(account, following):
    lines = {f"algo-{host}": [f"{host}#{number}" for number in range(400)] for host in (1, 2, 3)}
    account.settings(play={"lines": lines, "every": 0.01}, hold="Training", time=100, log_delay=0.3)
    create(account, "one", ResourceConfig=TWO | {"InstanceCount": 3}, **SPOT)
    account.fault("GetLogEvents", "unavailable", times=2, after=6)
    process = following("one")
    first_text = read_until(process, stream=process.stderr, pattern="is Training")
    account.settings(hold=None)
    out, err = process.communicate(timeout=limit(WAIT_S))
    assert process.returncode == 0, first_text + err
    for host, host_lines in lines.items():
        assert re.findall(rf"^{host} \| (\d#\d+)$", out, re.MULTILINE) == host_lines
    assert out.count("ended with exit code 0") == 3
    assert out.count("\n") == 3 * 401
    assert err.endswith(
        "job one is Completed after 00:01:40; 30 billable seconds on each of 3 instances, spot saved 70 %\n"
    )


def test_following_a_failed_job_prints_the_reason_and_exits_with_1(account, following):
    account.settings(play={"lines": ["working"], "exit": 3, "failure": "ValueError: boom"})
    create(account, "one")
    process = following("one")
    out, err = process.communicate(timeout=limit(WAIT_S))
    assert process.returncode == 1
    assert "algo-1 | working\n" in out
    assert "job one ended as Failed with exit code 1: AlgorithmError: ValueError: boom, exit code: 3" in err


@pytest.mark.slow
def test_following_a_job_that_reached_its_limit_exits_with_2(account, following):
    account.settings(hold="Training", speed=2000)
    create(account, "one")
    process = following("one")
    _, err = process.communicate(timeout=limit(WAIT_S))
    assert process.returncode == 2
    assert "ended as MaxRuntimeExceeded with exit code 2: stopped: max_run of 3600 s was reached" in err


@pytest.mark.slow
def test_following_continues_after_a_network_failure_without_losing_lines(account, following, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    account.settings(hold="Training", play={"lines": ["before"], "last": False})
    create(account, "one")
    account.wait("one", "Training")
    process = following("one")
    read_until(process, "before")
    account.fault("*", "dropped", seconds=6)
    text = read_until(process, stream=process.stderr, pattern="Trying again.")
    account.ask("log", job="one", lines=["during"])
    text += read_until(process, stream=process.stderr, pattern="answers again")
    account.ask(
        "log",
        job="one",
        lines=["after", "accel: algo-1 ended with exit code 0"],
    )
    account.settings(hold=None)
    out, err = process.communicate(timeout=limit(WAIT_S))
    assert process.returncode == 0
    assert out.splitlines() == [
        "algo-1 | during",
        "algo-1 | after",
        "algo-1 | accel: algo-1 ended with exit code 0",
    ]
    assert (text + err).count("Trying again.") == 1


@pytest.mark.slow
def test_ctrl_c_leaves_a_job_running_and_stop_ends_it(account, following, jobs):
    account.settings(hold="Training", play={"lines": ["working"], "seconds": 600})
    create(account, "one")
    process = following("one")
    read_until(process, "working")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=limit(WAIT_S))
    assert process.returncode == 130
    assert "keeps running. Follow it with accel jobs logs one -f --launcher sagemaker or stop it with" in err
    assert account.wait("one", "Training")["TrainingJobStatus"] == "InProgress"
    assert "job one is stopping" in jobs("stop", "one").stderr
    account.wait("one", "Stopped")
    assert "job one is Stopped already" in jobs("stop", "one").stderr


# Downloads ---------------------------------------------------------------------------------


def test_download_extracts_the_results_of_a_job(account, jobs, cwd):
    play = {
        "model": {"weights.bin": "w" * 100, "sub/config.json": "{}", "output": "mine"},
        "output/data": {"seen": "1"},
    }
    account.settings(play=play)
    create(account, "one")
    account.wait("one")
    account.fault("GetObject", "cut", size=40)
    result = jobs("download", "one", "-o", "models")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "models/one\n"
    home = cwd / "models"
    assert [path.name for path in home.iterdir()] == ["one"]
    assert (home / "one" / "weights.bin").read_text() == "w" * 100
    assert (home / "one" / "sub" / "config.json").read_text() == "{}"
    assert (home / "one" / "output").read_text() == "mine"
    assert (home / "one" / "output_" / "seen").read_text() == "1"
    second_result = jobs("download", "one", "-o", "models")
    assert second_result.returncode == 2
    assert "models/one exists already. Move it away" in second_result.stderr


def test_download_takes_the_files_of_a_job_without_compression(account, jobs, cwd):
    account.settings(
        play={"model": {"weights.bin": "w", "sub/config.json": "{}"}, "output/data": {"seen": "1"}}
    )
    create(
        account,
        "one",
        OutputDataConfig={"S3OutputPath": "s3://sagemaker-out/accel/one/output", "CompressionType": "NONE"},
    )
    account.wait("one")
    result = jobs("download", "one", "-o", "models")
    assert result.returncode == 0, result.stderr
    files = {
        str(path.relative_to(cwd / "models/one")): path.read_text()
        for path in (cwd / "models/one").rglob("*")
        if path.is_file()
    }
    assert files == {".gitignore": "*\n", "weights.bin": "w", "sub/config.json": "{}", "output/seen": "1"}


@pytest.mark.slow
def test_download_of_a_running_or_empty_job_is_an_error(account, jobs, cwd):
    account.settings(hold="Training")
    create(account, "one")
    account.wait("one", "Training")
    result = jobs("download", "one")
    assert result.returncode == 2
    assert "Job one is Training: its results appear when it has ended" in result.stderr
    account.settings(hold=None)
    account.wait("one")
    result = jobs("download", "one")
    assert result.returncode == 2
    assert "Job one left nothing in s3://sagemaker-out/accel/one/output/" in result.stderr
    assert [path.name for path in cwd.iterdir()] == [".git"]


def _packed(*entries):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for entry in entries:
            archive.addfile(entry, io.BytesIO(b"x" * entry.size))
    return content.getvalue()


def _file(name):
    entry = tarfile.TarInfo(name)
    entry.size = 1
    return entry


def _link(name, target):
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return entry


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_packed(_file("good"), _file("../../evil")), "holds a file that is not safe to unpack"),
        (_packed(_link("a", "/etc"), _file("a/evil")), "holds a file that is not safe to unpack"),
        (_packed(_file("good"))[:-12], "Cannot unpack s3://"),
        (b"nonsense", "Cannot unpack s3://"),
    ],
    ids=["outside", "through a link", "cut off", "nonsense"],
)
def test_a_broken_or_unsafe_archive_is_an_error_and_leaves_nothing(account, jobs, cwd, body, message):
    account.settings(play={"model": {"x": "y"}})
    create(account, "one")
    account.wait("one")
    account.client("s3").put_object(Bucket="sagemaker-out", Key="accel/one/output/model.tar.gz", Body=body)
    result = jobs("download", "one", "-o", "models")
    assert result.returncode == 1
    assert message in result.stderr
    assert list((cwd / "models").iterdir()) == []
    assert not (cwd / "evil").exists()


@pytest.mark.slow
def test_download_of_a_slurm_job_names_the_cluster_file_system(forked):
    result = forked("jobs", "download", "12", "--launcher", "slurm")
    assert result.returncode == 2
    assert "its files are on the file system of the cluster" in result.stderr
