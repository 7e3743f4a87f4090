"""The client of object stores: its results and errors against an S3 server, and what it makes of the errors of obstore."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest
from obstore import exceptions
from support.processes import fork, wait_for_exit
from support.s3.server import SECRET_KEY, client_variables
from support.waits import wait_until

from accel_runtime.storage.objects.client import ConditionError, Level, ObjectError, RangeRequest
from accel_runtime.storage.objects.client_process import ProcessClient
from accel_runtime.storage.objects.obstore_client import Failure

NAMES = ["a", "b%20c", "d e", "f#g?h", "ü", "i+j=k&l", "m;n,o", "it's", "p~q", "@r:s", "(t)[u]{v}"]


@pytest.fixture
def client(s3_server, monkeypatch):
    for name, value in client_variables(s3_server.address).items():
        monkeypatch.setenv(name, value)
    client = ProcessClient(20)
    yield client
    client.close()


def read(client, key, start, size):
    data = bytearray(size)
    client.read_ranges([RangeRequest(key, start, memoryview(data))])
    return bytes(data)


def test_objects_of_any_name_are_written_listed_read_and_removed(client, s3_url):
    for name in NAMES:
        client.put(f"{s3_url}/folder/{name}", name.encode())
    keys = [f"{s3_url}/folder/{name}" for name in NAMES]
    assert [each.key for each in client.list(f"{s3_url}/folder/")] == sorted(keys)
    assert client.list_level(f"{s3_url}/") == Level(("folder",), ())
    assert client.list_level(f"{s3_url}/folder/") == Level((), tuple(sorted(NAMES)))
    for key, name in zip(keys, NAMES, strict=True):
        assert (client.get(key)[0], client.find_size(key)) == (name.encode(), len(name.encode()))
    client.delete([*keys, f"{s3_url}/absent"])
    assert (client.list(f"{s3_url}/"), client.find_size(keys[0])) == ([], None)


def test_uploads_and_ranges_of_any_size_have_the_same_bytes(client, s3_url):
    data = random.Random(3).randbytes((9 << 20) + 5)
    for size in (0, 1, (4 << 20) + 1, len(data)):
        upload = client.start_put(f"{s3_url}/put", size)
        upload.write(memoryview(data)[:size])
        upload.finish()
        client.put_stream(f"{s3_url}/stream", [memoryview(data)[:size]], size)
        for name in ("put", "stream"):
            assert read(client, f"{s3_url}/{name}", 0, size) == data[:size]
    assert read(client, f"{s3_url}/put", 12345, 4 << 20) == data[12345 : 12345 + (4 << 20)]


def test_a_condition_holds_for_the_object_that_was_seen_only(client, s3_url):
    key = f"{s3_url}/object"
    first = client.put(key, b"1", if_absent=True)
    assert client.get(key) == (b"1", first)
    second = client.put(key, b"2", if_match=first)
    for condition in ({"if_absent": True}, {"if_match": first}):
        with pytest.raises(ConditionError):
            client.put(key, b"3", **condition)
    client.delete([key])
    with pytest.raises(ConditionError):
        client.put(key, b"3", if_match=second)
    assert client.find_size(key) is None


def test_missing_objects_and_buckets_are_different_errors(client, s3_url):
    for call in (client.get, lambda key: read(client, key, 0, 1)):
        with pytest.raises(FileNotFoundError) as raised:
            call(f"{s3_url}/absent")
        assert raised.value.filename == f"{s3_url}/absent"
    for call in (
        lambda key: client.put(key, b""),
        lambda key: client.list(f"{key}/"),
        client.get,
    ):
        with pytest.raises(ObjectError, match="NoSuchBucket") as raised:
            call("s3://accel-no-such-bucket/object")
        assert raised.value.cure == "Create s3://accel-no-such-bucket, or correct the URL."


def test_a_stream_that_fails_leaves_no_object_and_a_client_that_works(client, s3_url):
    def generate():
        yield memoryview(bytes(6 << 20))
        raise ValueError("the end")

    with pytest.raises(ValueError, match="the end"):
        client.put_stream(f"{s3_url}/stream", generate(), 12 << 20)
    with pytest.raises(ObjectError, match="NoSuchBucket"):
        client.put_stream("s3://accel-no-such-bucket/object", [memoryview(bytes(1 << 20))] * 40, 40 << 20)
    client.put(f"{s3_url}/other", b"1")
    assert [each.key for each in client.list(f"{s3_url}/")] == [f"{s3_url}/other"]


def test_a_forked_process_has_a_client_of_its_own_and_a_killed_one_is_started_again(client, s3_url):
    client.put(f"{s3_url}/before", b"1")

    def write():
        client.put(f"{s3_url}/forked", b"2")
        client.close()

    assert wait_for_exit(fork(write)) == 0
    assert client.get(f"{s3_url}/forked")[0] == b"2"
    child = client._child._process
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert client.get(f"{s3_url}/before")[0] == b"1"


def test_the_process_of_the_client_ends_with_a_killed_parent(s3_server, s3_url):
    code = (
        "import sys; from accel_runtime.storage.objects.client_process import ProcessClient; client = ProcessClient(5); "
        f"client.put({s3_url!r} + '/x', b'1'); print(client._child._process.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | client_variables(s3_server.address),
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not is_running(pid))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


DENIED = (
    "The operation lacked the necessary privileges: Error performing PUT https://bucket.example/x?X-Amz-Signature=abc&sig=SECRET "
    "in 20ms - Server returned non-2xx status code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code><Message>The request "
    f"signature does not match.</Message><AWSAccessKeyId>AKIA1</AWSAccessKeyId><StringToSign>{SECRET_KEY}</StringToSign></Error>"
)
LOST = (
    "Generic S3 error: Error performing PUT http://127.0.0.1:9/b/x?sig=SECRET in 3ms, after 2 retries, max_retries: 2 - HTTP "
    "error: error sending request to http://127.0.0.1:9/b/x?sig=SECRET"
)


@pytest.mark.parametrize(
    ("error", "reason", "passes"),
    [
        (
            exceptions.PermissionDeniedError(DENIED),
            "HTTP 403 SignatureDoesNotMatch The request signature does not match",
            False,
        ),
        (exceptions.GenericError(LOST), "HTTP error: error sending request to the service", True),
        (
            exceptions.GenericError(
                "x - Server returned non-2xx status code: 503 Slow: <Code>SlowDown</Code>"
            ),
            "HTTP 503 SlowDown",
            True,
        ),
        (
            exceptions.GenericError(
                "x - Server returned non-2xx status code: 400 Bad: <Code>ExpiredToken</Code>"
            ),
            "HTTP 400 ExpiredToken",
            False,
        ),
        (exceptions.GenericError("x - Server returned non-2xx status code: 501 No: "), "HTTP 501", False),
        (
            exceptions.GenericError(
                "Error performing PUT http://169.254.169.254/latest/api/token in 1ms - HTTP error"
            ),
            "no credentials were found",
            False,
        ),
    ],
)
def test_the_reason_of_a_failure_has_no_url_and_only_faults_that_pass_are_tried_again(error, reason, passes):
    failure = Failure.from_error(error)
    assert (failure.reason, failure.may_pass) == (reason, passes)
    text = failure.describe(5) + failure.cure("s3://bucket")
    assert not [secret for secret in ("sig=SECRET", "AKIA1", SECRET_KEY, "://b/", "sig=") if secret in text]
    assert text.endswith(".")
