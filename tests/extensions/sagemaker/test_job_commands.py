"""`accel jobs` with an AWS on loopback; `test_run.py` has the real commands."""

import sys
import tarfile

import pytest
from aws.server import pack
from support.processes.commands import call_accel

from accel_cli.extensions.sagemaker.service import SageMakerJobs
from accel_cli.launchers.job_service import PollIntervals

TWO = {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30}
SPOT = {
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
}
SECONDS = {"TrainingTimeInSeconds": 200, "BillableTimeInSeconds": 60}


@pytest.fixture
def account(aws, monkeypatch):
    aws.role()
    aws.bucket("sagemaker-out")
    monkeypatch.setattr(SageMakerJobs, "intervals", PollIntervals(0.01, (0.01, 0.01), 0.01))
    return aws


@pytest.fixture
def jobs(cwd, capfd):
    """Call `accel jobs` for SageMaker."""
    return lambda verb, *args: call_accel(capfd, "jobs", verb, *args, "--launcher", "sagemaker")


# Lists and status ------------------------------------------------------------------------


def test_an_account_without_jobs_is_reported(account, jobs):
    assert "no jobs found" in jobs("list").stderr


def test_the_status_shows_nodes_and_cost(account, jobs):
    account.play(**SECONDS)
    account.create("one", ResourceConfig=TWO, **SPOT)
    lines = jobs("status", "one").stdout.splitlines()
    assert {
        "id\tone", "state\tCompleted", "exit code\t0", "nodes\t2 x ml.g5.xlarge, spot", "elapsed\t00:03:20",
        "log\tCloudWatch Logs, group /aws/sagemaker/TrainingJobs, streams one/",
    } < set(lines)  # fmt: skip
    assert lines[-1] == "cost\t60 billable seconds on each of 2 instances, spot saved 70 %"


@pytest.mark.usefixtures("account", "cwd")
def test_region_and_aws_profile_come_from_the_effective_profile(capfd, home, tmp_path, monkeypatch):
    (home / "profiles").mkdir(parents=True)
    (home / "profiles" / "cloud.yaml").write_text(
        "schema_version: 1\nlauncher:\n  kind: sagemaker\n  instance_type: ml.m5.large\n  region: eu-west-1\n  aws_profile: ann\n"
    )
    result = call_accel(capfd, "jobs", "status", "one", "--profile", "cloud")
    assert result.returncode == 2
    assert "profile 'ann'" in result.stderr
    config = tmp_path / "config"
    config.write_text("[profile ann]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    result = call_accel(capfd, "jobs", "status", "one", "--profile", "cloud")
    assert "No training job one found in eu-west-1. Run accel jobs list --profile cloud" in result.stderr


@pytest.mark.parametrize("words", [("list",), ("status", "one"), ("download", "one")])
def test_a_missing_boto3_is_one_message_for_every_command(aws, jobs, monkeypatch, words):
    for name in ("boto3", "botocore"):
        monkeypatch.setitem(sys.modules, name, None)
    result = jobs(*words)
    assert result.returncode == 2
    assert "'boto3>=1.43.90'" in result.stderr
    assert "Traceback" not in result.stderr


# Logs --------------------------------------------------------------------------------------


def test_logs_of_all_hosts_are_printed(account, jobs):
    account.play(lines={"algo-1": ["10%\r20%", "x" * 200_000], "algo-2": ["é"]})
    account.create("one", ResourceConfig=TWO)
    result = jobs("logs", "one")
    lines = result.stdout.split("\n")
    assert result.returncode == 0
    assert [line for line in lines if line.startswith("algo-1")] == [
        "algo-1 | 10%\r20%", f"algo-1 | {'x' * 200_000}", "algo-1 | accel: algo-1 ended with exit code 0",
    ]  # fmt: skip
    assert "algo-2 | é" in lines


def test_a_job_without_output_is_reported(account, jobs):
    account.play("InProgress", "Starting")
    account.create("one")
    result = jobs("logs", "one")
    assert "job one has no output; it is Starting" in result.stderr


@pytest.mark.parametrize(
    ("states", "code", "end"),
    [
        (("Completed", "Completed"), 0, "is Completed after 00:03:20; 60 billable seconds on each of 2 instances, spot saved 70 %"),
        (("Failed", "Failed"), 1, "ended as Failed with exit code 1: AlgorithmError: ValueError: boom, exit code: 3"),
        (("Stopped", "MaxRuntimeExceeded"), 2, "ended as MaxRuntimeExceeded with exit code 2: stopped: max_run of 3600 s was reached"),
    ],
)  # fmt: skip
def test_following_prints_every_line_and_the_end_and_exits_as_the_job(account, jobs, states, code, end):
    reason = {"FailureReason": "AlgorithmError: ValueError: boom, exit code: 3"} if code == 1 else {}
    lines = {f"algo-{host}": [f"{host}#{number}" for number in range(20)] for host in (1, 2)}
    begin = [("InProgress", "Starting"), ("InProgress", "Training")]
    account.play(*states, begin, lines=lines, **SECONDS, **reason)
    account.create("one", ResourceConfig=TWO, **SPOT)
    account.fault("GetLogEvents", "broken", times=2, after=2)
    result = jobs("logs", "one", "-f")
    assert result.returncode == code
    assert "job one is Training" in result.stderr
    assert f"job one {end}" in result.stderr
    for host, host_lines in lines.items():
        shown = [line for line in result.stdout.splitlines() if line.startswith(f"{host} | ")]
        assert [line.partition(" | ")[2] for line in shown[:-1]] == host_lines


# Downloads ---------------------------------------------------------------------------------


def test_download_extracts_the_results_of_a_job(account, jobs, cwd):
    model = {"weights.bin": "w" * 100, "sub/config.json": "{}", "output": "mine"}
    account.play(model=model, output={"seen": "1"})
    account.create("one")
    account.fault("GetObject", "cut")
    result = jobs("download", "one", "-o", "models")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "models/one\n"
    home = cwd / "models"
    assert [path.name for path in home.iterdir()] == ["one"]
    assert {name: (home / "one" / name).read_text() for name in model} == model
    assert (home / "one" / "output_" / "seen").read_text() == "1"
    second_result = jobs("download", "one", "-o", "models")
    assert second_result.returncode == 2
    assert "models/one exists already. Move it away" in second_result.stderr


def test_download_takes_the_files_of_a_job_without_compression(account, jobs, cwd):
    place = "s3://sagemaker-out/accel/one/output"
    account.play(
        model={"weights.bin": "w", "sub/config.json": "{}"},
        output={"seen": "1"},
        ModelArtifacts={"S3ModelArtifacts": f"{place}/one/output/model/"},
    )
    account.create("one", OutputDataConfig={"S3OutputPath": place, "CompressionType": "NONE"})
    result = jobs("download", "one", "-o", "models")
    assert result.returncode == 0, result.stderr
    files = {
        str(path.relative_to(cwd / "models/one")): path.read_text()
        for path in (cwd / "models/one").rglob("*")
        if path.is_file()
    }
    assert files == {".gitignore": "*\n", "weights.bin": "w", "sub/config.json": "{}", "output/seen": "1"}


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("InProgress", "Job one is Training: its results appear when it has ended"),
        ("Completed", "Job one left nothing in s3://sagemaker-out/accel/one/output/"),
    ],
)
def test_download_of_a_running_or_empty_job_is_an_error(account, jobs, cwd, status, message):
    account.play(status)
    account.create("one")
    result = jobs("download", "one")
    assert result.returncode == 2
    assert message in result.stderr
    assert [path.name for path in cwd.iterdir()] == [".git"]


def link(name, target):
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return entry


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (pack({"good": b"x", "../../evil": b"x"}), "holds a file that is not safe to unpack"),
        (pack({link("a", "/etc"): b"", "a/evil": b"x"}), "holds a file that is not safe to unpack"),
        (pack({"good": b"x"})[:-12], "Cannot unpack s3://"),
        (b"nonsense", "Cannot unpack s3://"),
    ],
    ids=["outside", "through a link", "cut off", "nonsense"],
)
def test_a_broken_or_unsafe_archive_is_an_error_and_leaves_nothing(account, jobs, cwd, body, message):
    account.create("one")
    account.client("s3").put_object(Bucket="sagemaker-out", Key="accel/one/output/model.tar.gz", Body=body)
    result = jobs("download", "one", "-o", "models")
    assert result.returncode == 1
    assert message in result.stderr
    assert list((cwd / "models").iterdir()) == []
    assert not (cwd / "evil").exists()
