"""What is sent to S3: all of it, over a network that breaks, and nothing is left where it fails."""

import contextlib
import re
import signal
import subprocess
import sys

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from accel_cli.errors import AccelError
from accel_cli.launchers.sagemaker import upload
from accel_cli.launchers.sagemaker.archive import Archive
from accel_cli.launchers.sagemaker.bundle import Bundle

KEYS = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
FOLDER = "accel/job-1/bundle"
LARGE = 9 << 20


def client_of(port, attempts=2):
    config = Config(
        retries={"mode": "standard", "max_attempts": attempts}, connect_timeout=5, read_timeout=20
    )
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", config=config, **KEYS)


@pytest.fixture
def s3(moto_port):
    """A client with no trouble, and a bucket of its own."""
    client = client_of(moto_port)
    client.create_bucket(Bucket="sagemaker-b")
    client.put_object(Bucket="sagemaker-b", Key="accel/job-1/output/kept", Body=b"")
    client.put_object(Bucket="sagemaker-b", Key="accel/job-1/bundles/kept", Body=b"")
    yield client
    upload.remove(client, "sagemaker-b", "accel")
    client.delete_bucket(Bucket="sagemaker-b")
    client.close()


@pytest.fixture
def flaky(s3, network):
    """A client of the same bucket behind a network that breaks."""
    client = client_of(network.port)
    yield client
    client.close()


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    (folder / "wheels").mkdir(parents=True)
    (folder / "accel.tar.gz").write_bytes(b"accel")
    (folder / "entry.py").write_text("print()")
    (folder / "wheels" / "a.whl").write_bytes(b"")
    (folder / "source.tar.gz").write_bytes(b"0123456789abcdef" * (LARGE // 16))
    return Bundle(folder, Archive(folder / "source.tar.gz", "", LARGE, 1))


@contextlib.contextmanager
def speaking(doing):
    """As an account of AWS puts it, in short."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("botocore.", "boto3.")):
            raise
        raise AccelError(f"cannot {doing}: {error}") from error


def there(s3):
    """All there is in the bucket, but for what was there before."""
    found = s3.list_objects_v2(Bucket="sagemaker-b").get("Contents", [])
    return {one["Key"] for one in found} - {"accel/job-1/output/kept", "accel/job-1/bundles/kept"}


def kept(s3):
    return s3.list_objects_v2(Bucket="sagemaker-b")["KeyCount"] == 2


def half_sent(s3):
    return s3.list_multipart_uploads(Bucket="sagemaker-b").get("Uploads", [])


def test_all_of_a_bundle_arrives_and_one_line_says_so(s3, bundle, capsys):
    address = upload.send(s3, bundle, "sagemaker-b", FOLDER, speaking=speaking)
    assert address == "s3://sagemaker-b/accel/job-1/bundle/"
    assert there(s3) == {
        f"{FOLDER}/{name}" for name in ("accel.tar.gz", "entry.py", "source.tar.gz", "wheels/a.whl")
    }
    body = s3.get_object(Bucket="sagemaker-b", Key=f"{FOLDER}/source.tar.gz")["Body"].read()
    assert body == (bundle.folder / "source.tar.gz").read_bytes()
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"accel: sent 9\.4 MB to s3://sagemaker-b/accel/job-1/bundle/ in \d+\.\d s", line)


def test_a_person_at_a_terminal_sees_how_far_it_is(moto_port, s3, bundle, tmp_path):
    pexpect = pytest.importorskip("pexpect")
    child = pexpect.spawn(
        sys.executable, ["-c", CHILD, str(moto_port), str(bundle.folder)], dimensions=(24, 80), timeout=200
    )
    child.expect("uploading.*/9.4 MB")
    child.expect("accel:.* sent 9.4 MB")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_only_the_bucket_of_the_account_is_sent_to_and_encrypted_as_was_asked(s3, bundle):
    asked = []
    s3.meta.events.register(
        "before-call.s3", lambda params, model, **_: asked.append((model.name, params["headers"]))
    )
    upload.send(
        s3, bundle, "sagemaker-b", FOLDER, speaking=speaking, account="123456789012", kms_key="alias/k"
    )
    upload.remove(s3, "sagemaker-b", FOLDER, account="123456789012")
    assert {"PutObject", "CreateMultipartUpload", "UploadPart", "DeleteObjects", "ListMultipartUploads"} <= {
        name for name, _ in asked
    }
    assert {headers["x-amz-expected-bucket-owner"] for _, headers in asked} == {"123456789012"}
    began = [headers for name, headers in asked if name in {"PutObject", "CreateMultipartUpload"}]
    assert {headers["x-amz-server-side-encryption-aws-kms-key-id"] for headers in began} == {"alias/k"}


TROUBLES = pytest.mark.parametrize("trouble", ["cut", "slow down"])


@TROUBLES
@pytest.mark.parametrize("part", ["PUT /sagemaker-b/accel/job-1/bundle/entry.py", "partNumber=2"])
def test_what_breaks_on_the_way_is_sent_again(network, flaky, bundle, trouble, part):
    network.fate = lambda line: (
        trouble if part in line and sum(part in one for one in network.asked) == 1 else "pass"
    )
    upload.send(flaky, bundle, "sagemaker-b", FOLDER, speaking=speaking)
    assert sum(part in one for one in network.asked) > 1
    body = flaky.get_object(Bucket="sagemaker-b", Key=f"{FOLDER}/source.tar.gz")["Body"].read()
    assert body == (bundle.folder / "source.tar.gz").read_bytes()


@TROUBLES
@pytest.mark.parametrize("part", [r"PUT .*source.tar.gz.*partNumber=2", r"PUT .*a\.whl"])
def test_what_breaks_again_and_again_leaves_nothing(network, flaky, bundle, trouble, part):
    network.fate = lambda line: trouble if re.match(part, line) else "pass"
    with pytest.raises(AccelError) as error:
        upload.send(flaky, bundle, "sagemaker-b", FOLDER, speaking=speaking)
    assert str(error.value).startswith("cannot send the files to s3://sagemaker-b/accel/job-1/bundle/: ")
    assert str(error.value).endswith("; nothing of it is left there")
    assert ("SlowDown" in str(error.value)) == (trouble == "slow down")
    assert kept(flaky)
    assert not half_sent(flaky)


def test_where_nothing_can_be_deleted_either_the_message_says_how_to(s3, network, flaky, bundle):
    network.fate = lambda line: (
        "slow down" if "wheels" in line or not line.startswith(("PUT", "POST")) else "pass"
    )
    with pytest.raises(
        AccelError,
        match=r"what was sent is still there \(cannot delete .*\): aws s3 rm --recursive s3://sagemaker-b/accel/job-1/bundle/ deletes it",
    ):
        upload.send(flaky, bundle, "sagemaker-b", FOLDER, speaking=speaking)
    assert f"{FOLDER}/entry.py" in there(s3)


def test_a_bucket_that_is_not_there_got_nothing(s3, bundle):
    with pytest.raises(AccelError, match=r"NoSuchBucket.*; nothing of it has arrived"):
        upload.send(s3, bundle, "sagemaker-none", FOLDER, speaking=speaking)


def test_the_kind_of_an_error_stays(s3, bundle):
    class OwnError(AccelError):
        pass

    @contextlib.contextmanager
    def other(doing):
        try:
            yield
        except (boto3.exceptions.S3UploadFailedError, ClientError):
            raise OwnError("no") from None

    with pytest.raises(OwnError, match="no; nothing of it has arrived"):
        upload.send(s3, bundle, "sagemaker-none", FOLDER, speaking=other)


CHILD = """
import contextlib, pathlib, sys
import boto3
from accel_cli.launchers.sagemaker import upload
from accel_cli.launchers.sagemaker.bundle import Bundle
folder = pathlib.Path(sys.argv[2])
client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{sys.argv[1]}", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
print("begins", flush=True)
try:
    upload.send(client, Bundle(folder, None), "sagemaker-b", "accel/job-1/bundle", speaking=lambda doing: contextlib.nullcontext())
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_leaves_nothing(s3, network, bundle):
    held = []
    network.fate = lambda line: (
        held.append(1) or network.delay.clear() or "pass" if "partNumber" in line and not held else "pass"
    )
    command = [sys.executable, "-c", CHILD, str(network.port), str(bundle.folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        while not held:
            assert child.poll() is None
        assert half_sent(s3)
        child.send_signal(signal.SIGINT)
        network.delay.set()
        _, said = child.communicate(timeout=200)
    assert child.returncode == 130, said
    assert said == "accel: the upload is broken off; nothing of it is left there\n"
    assert kept(s3)
    assert not half_sent(s3)


def test_remove_deletes_a_folder_of_any_size_and_nothing_beside_it(s3):
    for number in range(7):
        s3.put_object(Bucket="sagemaker-b", Key=f"{FOLDER}/{number}", Body=b"")
    # As if S3 listed no more than two at once, of its thousand.
    s3.meta.events.register(
        "provide-client-params.s3.ListObjectsV2", lambda params, **_: {**params, "MaxKeys": 2}, "pages"
    )
    s3.create_multipart_upload(Bucket="sagemaker-b", Key=f"{FOLDER}/half")
    other = s3.create_multipart_upload(Bucket="sagemaker-b", Key="accel/job-2/bundle/half")
    assert upload.remove(s3, "sagemaker-b", f"/{FOLDER}/") == 7
    s3.meta.events.unregister("provide-client-params.s3.ListObjectsV2", unique_id="pages")
    assert kept(s3)
    assert [one["Key"] for one in half_sent(s3)] == ["accel/job-2/bundle/half"]
    s3.abort_multipart_upload(Bucket="sagemaker-b", Key="accel/job-2/bundle/half", UploadId=other["UploadId"])


def test_what_s3_keeps_is_an_error(s3, bundle):
    upload.send(s3, bundle, "sagemaker-b", FOLDER, speaking=speaking)

    def refuse(parsed, **_):
        parsed["Errors"] = [{"Key": f"{FOLDER}/entry.py", "Code": "AccessDenied", "Message": "Access Denied"}]

    s3.meta.events.register("after-call.s3.DeleteObjects", refuse)
    with pytest.raises(
        AccelError, match=r"S3 keeps s3://sagemaker-b/accel/job-1/bundle/entry.py: Access Denied"
    ):
        upload.remove(s3, "sagemaker-b", FOLDER)
    s3.meta.events.unregister("after-call.s3.DeleteObjects", refuse)


def test_a_whole_bucket_is_never_deleted(s3):
    with pytest.raises(AssertionError):
        upload.remove(s3, "sagemaker-b", "/")


def test_remove_of_a_bucket_that_is_not_there_says_what_s3_said(s3):
    with pytest.raises(ClientError, match="NoSuchBucket"):
        upload.remove(s3, "sagemaker-none", FOLDER)
