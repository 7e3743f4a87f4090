"""What is sent to S3 arrives completely over a network that breaks, or nothing of it remains."""

import re
import signal
import subprocess
import sys

import boto3
import pytest

from accel_cli.errors import AccelError
from accel_cli.sagemaker import s3
from accel_cli.sagemaker.aws import Account
from accel_cli.sagemaker.bundle import Bundle

OWNER = "123456789012"
FOLDER = "accel/job-1/bundle"
LARGE = 9 << 20


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "2",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def client(moto_port):
    """A client with no trouble, and a bucket of its own."""
    made = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{moto_port}", region_name="us-east-1")
    made.create_bucket(Bucket="sagemaker-b")
    made.put_object(Bucket="sagemaker-b", Key="accel/job-1/output/kept", Body=b"")
    made.put_object(Bucket="sagemaker-b", Key="accel/job-1/bundles/kept", Body=b"")
    yield made
    for item in made.list_objects_v2(Bucket="sagemaker-b").get("Contents", []):
        made.delete_object(Bucket="sagemaker-b", Key=item["Key"])
    made.delete_bucket(Bucket="sagemaker-b")
    made.close()


@pytest.fixture
def account(client, moto_port, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{moto_port}")
    return Account()


@pytest.fixture
def flaky(client, network, monkeypatch):
    """The same account behind a network that breaks."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{network.port}")
    return Account()


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    (folder / "wheels").mkdir(parents=True)
    (folder / "accel.tar.gz").write_bytes(b"accel")
    (folder / "entry.py").write_text("print()")
    (folder / "wheels" / "a.whl").write_bytes(b"")
    (folder / "source.tar.gz").write_bytes(b"0123456789abcdef" * (LARGE // 16))
    return Bundle(folder)


def upload(account, bundle, bucket="sagemaker-b"):
    s3.upload_bundle(account, bundle, bucket, FOLDER, OWNER)


def there(client):
    """All there is in the bucket, but for what was there before."""
    found = client.list_objects_v2(Bucket="sagemaker-b").get("Contents", [])
    return {one["Key"] for one in found} - {"accel/job-1/output/kept", "accel/job-1/bundles/kept"}


def kept(client):
    return client.list_objects_v2(Bucket="sagemaker-b")["KeyCount"] == 2


def half_sent(client):
    return client.list_multipart_uploads(Bucket="sagemaker-b").get("Uploads", [])


def test_all_of_a_bundle_arrives_and_one_line_says_so(client, account, bundle, capsys):
    upload(account, bundle)
    assert there(client) == {
        f"{FOLDER}/{name}" for name in ("accel.tar.gz", "entry.py", "source.tar.gz", "wheels/a.whl")
    }
    body = client.get_object(Bucket="sagemaker-b", Key=f"{FOLDER}/source.tar.gz")["Body"].read()
    assert body == (bundle.folder / "source.tar.gz").read_bytes()
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"accel: sent 9\.4 MB to s3://sagemaker-b/accel/job-1/bundle/ in \d+\.\d s", line)


CHILD = """
import pathlib, sys
from accel_cli.sagemaker import s3
from accel_cli.sagemaker.aws import Account
from accel_cli.sagemaker.bundle import Bundle
account = Account()
account.client("s3")
print("begins", flush=True)
try:
    s3.upload_bundle(account, Bundle(pathlib.Path(sys.argv[1])), "sagemaker-b", "accel/job-1/bundle", "123456789012")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_person_at_a_terminal_sees_how_far_it_is(account, bundle):
    pexpect = pytest.importorskip("pexpect")
    child = pexpect.spawn(sys.executable, ["-c", CHILD, str(bundle.folder)], dimensions=(24, 80), timeout=200)
    child.expect("uploading.*/9.4 MB")
    child.expect("accel:.* sent 9.4 MB")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_only_a_bucket_of_the_account_is_used(account, bundle):
    asked = []

    def record(params, model, **_):
        asked.append((model.name, params["headers"]))

    account.client("s3").meta.events.register("before-call.s3", record)
    upload(account, bundle)
    s3.delete_prefix(account, "sagemaker-b", FOLDER, OWNER)
    assert {"PutObject", "CreateMultipartUpload", "UploadPart", "DeleteObjects", "ListMultipartUploads"} <= {
        name for name, _ in asked
    }
    assert {headers["x-amz-expected-bucket-owner"] for _, headers in asked} == {OWNER}


TROUBLES = pytest.mark.parametrize("trouble", ["cut", "slow down"])


@TROUBLES
@pytest.mark.parametrize("part", ["PUT /sagemaker-b/accel/job-1/bundle/entry.py", "partNumber=2"])
def test_what_breaks_on_the_way_is_sent_again(client, network, flaky, bundle, trouble, part):  # noqa: PLR0913, PLR0917
    network.fate = lambda line: (
        trouble if part in line and sum(part in one for one in network.asked) == 1 else "pass"
    )
    upload(flaky, bundle)
    assert sum(part in one for one in network.asked) > 1
    body = client.get_object(Bucket="sagemaker-b", Key=f"{FOLDER}/source.tar.gz")["Body"].read()
    assert body == (bundle.folder / "source.tar.gz").read_bytes()


@TROUBLES
@pytest.mark.parametrize("part", [r"PUT .*source.tar.gz.*partNumber=2", r"PUT .*a\.whl"])
def test_what_breaks_again_and_again_leaves_nothing(client, network, flaky, bundle, trouble, part):  # noqa: PLR0913, PLR0917
    network.fate = lambda line: trouble if re.match(part, line) else "pass"
    with pytest.raises(AccelError) as error:
        upload(flaky, bundle)
    assert str(error.value).startswith("Cannot upload the files to s3://sagemaker-b/accel/job-1/bundle/: ")
    assert str(error.value).endswith(" Nothing remains in S3.")
    assert ("SlowDown" in str(error.value)) == (trouble == "slow down")
    assert kept(client)
    assert not half_sent(client)


def test_where_nothing_can_be_deleted_either_the_message_says_how_to(client, network, flaky, bundle):
    network.fate = lambda line: (
        "slow down" if "wheels" in line or not line.startswith(("PUT", "POST")) else "pass"
    )
    with pytest.raises(
        AccelError,
        match=r"may remain \(Cannot delete .*\)\. Delete them: aws s3 rm --recursive s3://sagemaker-b/accel/job-1/bundle/$",
    ):
        upload(flaky, bundle)
    assert f"{FOLDER}/entry.py" in there(client)


def test_a_bucket_that_is_not_there_got_nothing(account, bundle):
    with pytest.raises(AccelError, match=r"NoSuchBucket.* Nothing was uploaded\."):
        upload(account, bundle, "sagemaker-none")


def test_ctrl_c_leaves_nothing(client, network, flaky, bundle):
    held = []
    network.fate = lambda line: (
        held.append(1) or network.delay.clear() or "pass" if "partNumber" in line and not held else "pass"
    )
    command = [sys.executable, "-c", CHILD, str(bundle.folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        while not held:
            assert child.poll() is None
        assert half_sent(client)
        child.send_signal(signal.SIGINT)
        network.delay.set()
        _, said = child.communicate(timeout=200)
    assert child.returncode == 130, said
    assert said == "accel: The upload was interrupted. Nothing remains in S3.\n"
    assert kept(client)
    assert not half_sent(client)


def test_a_folder_of_any_size_is_deleted_and_nothing_beside_it(client, account):
    for number in range(7):
        client.put_object(Bucket="sagemaker-b", Key=f"{FOLDER}/{number}", Body=b"")
    # As if S3 listed no more than two at once, of its thousand.
    account.client("s3").meta.events.register(
        "provide-client-params.s3.ListObjectsV2", lambda params, **_: {**params, "MaxKeys": 2}
    )
    client.create_multipart_upload(Bucket="sagemaker-b", Key=f"{FOLDER}/half")
    other = client.create_multipart_upload(Bucket="sagemaker-b", Key="accel/job-2/bundle/half")
    assert s3.delete_prefix(account, "sagemaker-b", f"/{FOLDER}/", OWNER) == "Nothing remains in S3."
    assert kept(client)
    assert [one["Key"] for one in half_sent(client)] == ["accel/job-2/bundle/half"]
    client.abort_multipart_upload(
        Bucket="sagemaker-b", Key="accel/job-2/bundle/half", UploadId=other["UploadId"]
    )


def test_what_s3_keeps_is_named(account, bundle):
    upload(account, bundle)

    def refuse(parsed, **_):
        parsed["Errors"] = [{"Key": f"{FOLDER}/entry.py", "Code": "AccessDenied", "Message": "Access Denied"}]

    account.client("s3").meta.events.register("after-call.s3.DeleteObjects", refuse)
    sentence = s3.delete_prefix(account, "sagemaker-b", FOLDER, OWNER)
    assert "accel/job-1/bundle/entry.py: Access Denied" in sentence
    assert "aws s3 rm --recursive s3://sagemaker-b/accel/job-1/bundle/" in sentence


def test_a_whole_bucket_is_never_deleted(account):
    with pytest.raises(AssertionError):
        s3.delete_prefix(account, "sagemaker-b", "/", OWNER)
