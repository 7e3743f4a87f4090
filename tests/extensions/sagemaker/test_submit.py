"""Submission of a job, which succeeds or leaves nothing behind; and previews, which change nothing.

What a bundle holds is the subject of `test_bundle.py`.
"""

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from support.launchers.launch_specs import build_spec
from support.processes.commands import call_accel

from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.sagemaker import bundle, s3, service
from accel_cli.extensions.sagemaker.aws import Account
from accel_cli.extensions.sagemaker.launcher import SageMaker
from accel_cli.launchers.job_service import UnreachableError

BUCKET = "sagemaker-us-east-1-123456789012"
READS = {
    "iam:GetRole", "iam:ListRoles", "s3:HeadBucket", "s3:GetBucketLocation", "sagemaker:DescribeTrainingJob",
    "sts:GetCallerIdentity",
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("small_bundle")


@pytest.fixture
def here(aws, cwd, script, monkeypatch, tmp_path):
    """A folder with a script, an account with a role, and a separate temporary folder."""
    script("pass")
    aws.role()
    for name in ("scratch", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return cwd


@pytest.fixture
def plan(here):
    from dataclasses import replace

    def make(*args, detach=True, env=None, target="train.py", is_builtin=False, **options):
        options = {"pytorch_version": "2.9", "instance_type": "ml.m5.large"} | options
        job = build_spec(*args, env=env, target=target, is_builtin=is_builtin)
        plan = SageMaker(**options).plan(job)
        return replace(plan, job=replace(plan.job, detach=detach))

    return make


def objects(aws):
    """Return the objects of every bucket, including unfinished uploads."""
    s3 = aws.client("s3")
    contents = {}
    for bucket in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
        contents[bucket] = [item["Key"] for item in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]
        uploads = s3.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        contents[bucket] += [f"begun: {item['Key']}" for item in uploads]
    return contents


def jobs(aws):
    return [
        job["TrainingJobName"] for job in aws.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    ]


def world(aws):
    roles = [role["RoleName"] for role in aws.client("iam").list_roles()["Roles"]]
    return objects(aws), jobs(aws), roles


def scratch():
    return list(Path(tempfile.gettempdir()).iterdir())


def submitted(aws, plan, capfd):
    """Submit a job, and return its description and the output."""
    assert service.submit(plan) == 0
    out, err = capfd.readouterr()
    assert scratch() == []
    name = out.removesuffix("\n")
    return aws.describe(name), err


def body(aws, name, file):
    return aws.client("s3").get_object(Bucket=BUCKET, Key=f"accel/{name}/bundle/{file}")["Body"].read()


def test_a_job_is_uploaded_and_started(aws, plan, capfd):
    description, output = submitted(aws, plan("--lr", "1e-4", "it's", "\udcff", env={"A": "b"}), capfd)
    name = description["TrainingJobName"]
    assert description["Environment"] == {"A": "b"}
    assert (
        description["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
        == f"s3://{BUCKET}/accel/{name}/bundle/"
    )
    files = ["accel.tar.gz", "entry.py", "job.json", "source.tar.gz"]
    assert objects(aws) == {BUCKET: [f"accel/{name}/bundle/{file}" for file in files]}
    run = json.loads(body(aws, name, "job.json"))
    assert (run["args"], run["target"]) == (["--lr", "1e-4", "it's", "\udcff"], "train.py")
    assert f"bucket {BUCKET} is created" in output
    assert f"accel jobs logs {name} -f" in output
    assert f"https://console.aws.amazon.com/sagemaker/home?region=us-east-1#/jobs/{name}" in output


def test_the_profile_selects_region_and_bucket(aws, plan, capfd, monkeypatch):
    aws.client("s3", "eu-west-1").create_bucket(
        Bucket="my-bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    assert service.submit(plan(region="eu-west-1", bucket="my-bucket", job_name="mine")) == 0
    description = aws.describe("mine", "eu-west-1")
    assert description["OutputDataConfig"]["S3OutputPath"] == "s3://my-bucket/accel/mine/output"
    assert "is created" not in capfd.readouterr().err


def test_a_builtin_module_uploads_no_source_folder(aws, plan, capfd, here):
    (here / "big.txt").write_bytes(os.urandom(2_000_000))
    description, _ = submitted(aws, plan(is_builtin=True, max_upload_size=1), capfd)
    assert len(body(aws, description["TrainingJobName"], "source.tar.gz")) < 200


def test_a_preview_changes_nothing_on_aws(aws, plan):
    before = world(aws)
    lines = service.preview(plan(spot=True, inputs={"train": "s3://bucket/x"}, max_wait=90000), offline=False)
    assert set(aws.calls()) <= READS
    assert world(aws) == before
    assert scratch() == []
    for words in (
        "account: 123456789012 in us-east-1, as arn:aws:sts::123456789012:",
        "1 x ml.m5.large, for at most 1d, spot: including waits at most 1d 1h",
        "role: arn:aws:iam::123456789012:role/trainer",
        "  train: s3://bucket/x",
        "(the bucket does not exist, and would be created)",
        "train.py",
        "nothing was sent or changed",
    ):
        assert words in lines


def test_an_offline_preview_prints_the_request_without_calls_to_aws(aws, plan, monkeypatch, capfd):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    request = json.loads(service.preview(plan(job_name="mine", env={"A": "ä"}), offline=True))
    assert aws.calls() == []
    assert request["TrainingJobName"] == "mine"
    assert request["RoleArn"] == "arn:aws:iam::<account>:role/<role>"
    assert request["Environment"] == {"A": "ä"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("offline", [True, False])
def test_a_preview_reports_invalid_values(plan, offline):
    with pytest.raises(UsageError, match=r"launcher\.tags") as caught:
        service.preview(plan(tags={"a": "x" * 300}), offline=offline)
    assert "<account>" not in str(caught.value)
    assert "RoleArn" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exclude": ["*.py"]}, "train.py is needed, but is not sent: git ignores it"),
        ({"max_upload_size": 1}, r"launcher\.max_upload_size is 1 MB. The largest are big\.txt"),
        ({"tags": {"a": "x" * 300}}, r"launcher\.tags"),
        (
            {"output_dir": "train.py", "detach": False},
            r"Invalid launcher\.output_dir: train\.py is not a folder",
        ),
        ({"output_dir": "out", "job_name": "mine", "detach": False}, "out/mine exists already"),
        ({"role": "nobody"}, "The account has no role 'nobody'"),
    ],
)
def test_invalid_jobs_are_rejected_before_anything_is_uploaded(aws, plan, here, options, words):
    (here / "big.txt").write_bytes(os.urandom(2_000_000))
    (here / "out/mine").mkdir(parents=True)
    before = world(aws)
    with pytest.raises(UsageError, match=words):
        service.submit(plan(**options))
    assert world(aws) == before
    assert scratch() == []


FAULTS = [
    ("PutObject", {"kind": "denied", "after": 2}, UsageError, "Cannot upload the files to s3://"),
    ("PutObject", {"kind": "dropped", "times": None}, UnreachableError, "AWS does not answer"),
    ("UploadPart", {"kind": "broken", "times": None, "after": 1}, UnreachableError, "AWS is too busy or has a problem"),
    ("CreateBucket", {"kind": "denied"}, UsageError, "Cannot create bucket sagemaker-"),
    ("CreateTrainingJob", {"kind": "denied"}, UsageError, "user/ann is not authorized to perform: sagemaker:CreateTrainingJob"),
    ("CreateTrainingJob", {"kind": "broken", "times": None}, UnreachableError, "AWS is too busy or has a problem"),
    ("CreateTrainingJob", {"kind": "dropped", "times": None}, UnreachableError, "AWS does not answer"),
    ("CreateTrainingJob", {"kind": "error", "code": "ResourceLimitExceeded", "status": 400, "message": "The limit is 0 Instances."}, UsageError, "The limit is 0 Instances. Request a higher quota at https://console"),
    ("CreateTrainingJob", {"kind": "error", "code": "ValidationException", "status": 400, "message": "No S3 objects found"}, UsageError, "AWS refused CreateTrainingJob with ValidationException: No S3 objects found. Nothing remains in S3."),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "fault", "kind", "words"), FAULTS)
def test_a_failed_submission_leaves_nothing_behind(aws, plan, operation, fault, kind, words):  # noqa: PLR0913, PLR0917
    Path("big.txt").write_bytes(os.urandom(9_000_000 if operation == "UploadPart" else 0))
    before = world(aws)
    aws.fault(operation, **fault)
    with pytest.raises(AccelError) as caught:
        service.submit(plan())
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert world(aws) == before
    assert scratch() == []


def test_an_existing_bucket_is_kept_after_a_failure(aws, plan, here):
    aws.bucket(BUCKET, theirs=b"x")
    aws.fault("CreateTrainingJob", "denied")
    with pytest.raises(UsageError, match=r"Nothing remains in S3\."):
        service.submit(plan())
    assert objects(aws) == {BUCKET: ["theirs"]}


def test_files_that_cannot_be_deleted_are_named_with_the_command_to_delete_them(aws, plan):
    aws.fault("CreateTrainingJob", "expired")
    aws.fault("ListObjectsV2", "expired")
    with pytest.raises(UsageError) as caught:
        service.submit(plan(job_name="mine"))
    assert f"Delete them: aws s3 rm --recursive s3://{BUCKET}/accel/mine/bundle/" in str(caught.value)
    assert len(objects(aws)[BUCKET]) == 4


@pytest.mark.smoke
@pytest.mark.parametrize("attempts", ["1", "3"])
def test_a_job_with_a_lost_response_is_started_once(aws, plan, capfd, monkeypatch, attempts):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", attempts)
    aws.fault("CreateTrainingJob", "lost")
    description, _ = submitted(aws, plan(), capfd)
    assert jobs(aws) == [description["TrainingJobName"]]
    assert len(objects(aws)[BUCKET]) == 4


def test_an_unknown_outcome_is_reported_and_keeps_the_files(aws, plan):
    for operation in ("CreateTrainingJob", "DescribeTrainingJob"):
        aws.fault(operation, "dropped", times=None)
    with pytest.raises(AccelError, match=r"It is unknown if the job started.*accel jobs status train-"):
        service.submit(plan())
    assert len(objects(aws)[BUCKET]) == 4


def create_job(aws, name, uri):
    source = {"S3DataType": "S3Prefix", "S3Uri": uri}
    channel = {"ChannelName": "accel", "DataSource": {"S3DataSource": source}}
    aws.bucket("other", x=b"")
    aws.create(name, InputDataConfig=[channel], OutputDataConfig={"S3OutputPath": f"s3://{BUCKET}/x"})


@pytest.mark.parametrize("is_reader", [False, True])
@pytest.mark.parametrize("is_retried", [False, True])
def test_a_job_of_the_same_name_keeps_its_files(aws, plan, monkeypatch, is_reader, is_retried):
    uri = f"s3://{BUCKET}/accel/mine/bundle/" if is_reader else "s3://other/x"
    aws.bucket(BUCKET)
    upload = service.s3.upload_bundle

    def upload_late(*args):
        upload(*args)
        create_job(aws, "mine", uri)
        if is_retried:
            aws.fault("CreateTrainingJob", "dropped")

    monkeypatch.setattr(service.s3, "upload_bundle", upload_late)
    if is_retried and is_reader:
        assert service.submit(plan(job_name="mine")) == 0
    else:
        with pytest.raises(
            UsageError, match="Cannot start job mine: a training job of this name exists already"
        ):
            service.submit(plan(job_name="mine"))
    assert len(objects(aws)[BUCKET]) == (4 if is_reader else 0)


def interrupting(monkeypatch, event):
    """Interrupt before, or after, the call that starts the job."""
    client = service.Account.client

    def build_client(self, name):
        built_client = client(self, name)
        if name == "sagemaker":

            def interrupt(**_):
                raise KeyboardInterrupt

            built_client.meta.events.register(f"{event}.sagemaker.CreateTrainingJob", interrupt)
        return built_client

    monkeypatch.setattr(service.Account, "client", build_client)


def test_ctrl_c_before_the_upload_is_reported(aws, plan, monkeypatch, capfd):
    def broken_off(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bundle, "fetch_wheels", broken_off)
    with pytest.raises(KeyboardInterrupt):
        service.submit(plan())
    assert capfd.readouterr().err.endswith("accel: The submission was interrupted. Nothing was sent.\n")
    assert (objects(aws), jobs(aws), scratch()) == ({}, [], [])


def test_ctrl_c_before_the_job_starts_leaves_nothing_behind(aws, plan, monkeypatch, capfd):
    interrupting(monkeypatch, "before-call")
    with pytest.raises(KeyboardInterrupt):
        service.submit(plan())
    assert "no job was started. Nothing remains in S3." in capfd.readouterr().err
    assert (objects(aws), jobs(aws), scratch()) == ({}, [], [])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_is_raised_although_aws_does_not_answer(aws, plan, monkeypatch, capfd, error):
    upload = service.s3.upload_bundle

    def interrupt(*args):
        upload(*args)
        aws.fault("DescribeTrainingJob", "dropped", times=None)
        monkeypatch.setattr(service.Account, "client", raise_once(service.Account.client, error))

    monkeypatch.setattr(service.s3, "upload_bundle", interrupt)
    with pytest.raises(type(error)) as caught:
        service.submit(plan(job_name="mine", region="us-east-1"))
    assert caught.value is error
    assert "It is unknown if the job started" in capfd.readouterr().err
    assert len(objects(aws)[BUCKET]) == 4


def raise_once(client, error):
    errors = [error]

    def get(self, name):
        if errors:
            raise errors.pop()
        return client(self, name)

    return get


def test_a_signal_handler_not_installed_by_python_becomes_the_default(monkeypatch):
    install, calls = signal.signal, []

    def record(number, handler):
        calls.append(handler)
        install(number, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(signal, "signal", record)
    try:
        with service._raise_on_signals():
            pass
    finally:
        for number, handler in before.items():
            install(number, handler)
    assert calls[2:] == [signal.SIG_DFL] * 2


def test_ctrl_c_after_the_start_names_the_command_to_stop_the_job(aws, plan, monkeypatch, capfd):
    interrupting(monkeypatch, "after-call")
    with pytest.raises(KeyboardInterrupt):
        service.submit(plan())
    (name,) = jobs(aws)
    assert f"job {name} has started already; accel jobs stop {name} stops it" in capfd.readouterr().err
    assert len(objects(aws)[BUCKET]) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_upload_of_a_large_file_leaves_nothing_behind(aws, here, capfd, number):
    for name in ("a.txt", "b.txt"):
        Path(name).write_bytes(os.urandom(15_000_000))
    aws.fault("UploadPart", lambda: os.kill(os.getpid(), number))
    options = (
        "--set=launcher.kind=sagemaker",
        "--set=launcher.instance_type=ml.m5.large",
        "--set=launcher.pytorch_version='2.9'",
    )
    result = call_accel(capfd, "launch", *options, "train.py")
    assert result.returncode == 128 + number, result.stderr
    assert "The submission was interrupted, and no job was started. Nothing remains in S3." in result.stderr
    assert "Traceback" not in result.stderr
    assert "s3:UploadPart" in aws.calls()
    assert (objects(aws), jobs(aws), scratch()) == ({}, [], [])


def test_only_files_of_the_job_are_deleted_and_remaining_ones_are_named(aws):
    account, folder = Account(), "accel/job-1/bundle"
    aws.bucket(BUCKET, **{f"{folder}/{number}": b"" for number in range(5)}, **{f"{folder}s/kept": b""})
    # As if S3 listed no more than two at once, of its thousand.
    account.client("s3").meta.events.register(
        "provide-client-params.s3.ListObjectsV2", lambda params, **_: {**params, "MaxKeys": 2}
    )
    assert s3.delete_prefix(account, BUCKET, folder, "123456789012") == "Nothing remains in S3."
    assert objects(aws) == {BUCKET: [f"{folder}s/kept"]}

    def refuse(parsed, **_):
        parsed["Errors"] = [{"Key": f"{folder}s/kept", "Message": "Access Denied"}]

    account.client("s3").meta.events.register("after-call.s3.DeleteObjects", refuse)
    sentence = s3.delete_prefix(account, BUCKET, f"{folder}s", "123456789012")
    assert f"{folder}s/kept: Access Denied). Delete them: aws s3 rm --recursive" in sentence
    with pytest.raises(AssertionError):
        s3.delete_prefix(account, BUCKET, "/", "123456789012")
