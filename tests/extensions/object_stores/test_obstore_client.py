"""The client of object stores: its results and errors against an S3 server, and what it makes of the errors of obstore."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest
from obstore import exceptions
from support.object_stores.server import SECRET_KEY, client_variables
from support.processes.children import fork, wait_for_exit
from support.processes.waits import wait_until

from accel_runtime.extensions.object_stores import client_process
from accel_runtime.extensions.object_stores.client import (
    ClientEndedError,
    ConditionError,
    Level,
    RangeRequest,
)
from accel_runtime.extensions.object_stores.client_process import ProcessClient
from accel_runtime.extensions.object_stores.obstore_client import CallFailure, find_proxy
from accel_runtime.extensions.object_stores.store import ObjectStore
from accel_runtime.storage.errors import StoreError
from accel_runtime.storage.manifest import FileEntry, Manifest, hash_bytes
from accel_runtime.storage.store import RepeatableStream

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")

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
        with pytest.raises(StoreError, match="NoSuchBucket") as raised:
            call("s3://accel-no-such-bucket/object")
        assert raised.value.cure == "Create s3://accel-no-such-bucket, or correct the URL."


def test_a_stream_that_fails_leaves_no_object_and_a_client_that_works(client, s3_url):
    def generate():
        yield memoryview(bytes(6 << 20))
        raise ValueError("the end")

    with pytest.raises(ValueError, match="the end"):
        client.put_stream(f"{s3_url}/stream", generate(), 12 << 20)
    with pytest.raises(StoreError, match="NoSuchBucket"):
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


def kill(client):
    """Kill the process of the client, and return before it is known to have ended."""
    os.kill(client._child._process.pid, signal.SIGKILL)


def test_a_call_whose_process_was_killed_is_made_again_in_a_new_one(client, s3_url):
    key = f"{s3_url}/object"
    etag = client.put(key, b"1")

    def put_if_match():
        nonlocal etag
        etag = client.put(key, b"2", if_match=etag)

    for call, result in (
        (lambda: client.get(key)[0], b"1"),
        (lambda: read(client, key, 0, 1), b"1"),
        (lambda: client.list_level(f"{s3_url}/"), Level((), ("object",))),
        (put_if_match, None),
        (lambda: client.put_stream(key, RepeatableStream(lambda: iter([memoryview(b"3")])), 1), None),
        (lambda: client.delete([key]), None),
    ):
        kill(client)
        assert call() == result
    assert client.find_size(key) is None


def test_an_upload_whose_process_is_killed_is_sent_again_and_saves_a_complete_part(client, s3_url):
    store, sent, kills = ObjectStore(client, piece_bytes=1 << 20), random.Random(5).randbytes(3 << 20), [0, 2]

    def generate():
        for number in range(3):
            if number in kills:
                kills.remove(number)
                kill(client)
            yield memoryview(sent)[number << 20 : number + 1 << 20]

    draft = store.begin(f"{s3_url}/mine", "a1")
    draft.put("part", RepeatableStream(generate), len(sent))
    assert not kills
    files = {"part": FileEntry(len(sent), hash_bytes(sent))}
    draft.commit(Manifest("a1", "2026-11-27T15:00:00Z", 1, 1, {}, {}, files=files))
    with store.open(f"{s3_url}/mine") as snapshot:
        data = bytearray(len(sent))
        snapshot.get_range("part", 0, memoryview(data))
    assert data == sent


def test_a_process_that_is_killed_each_time_is_an_error_with_a_cure(client, s3_url, monkeypatch):
    client.put(f"{s3_url}/object", b"1")
    send = client_process._Call.send

    def kill_before(call, *arguments):
        kill(client)
        send(call, *arguments)

    monkeypatch.setattr(client_process._Call, "send", kill_before)
    with pytest.raises(ClientEndedError, match="also when it was started again") as raised:
        client.get(f"{s3_url}/object")
    assert raised.value.cure == "Check the memory of this machine, and try again."


def test_the_process_of_the_client_ends_with_a_killed_parent(s3_server, s3_url):
    code = (
        "import sys; from accel_runtime.extensions.object_stores.client_process import ProcessClient; client = ProcessClient(5); "
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
    failure = CallFailure.from_error(error)
    assert (failure.reason, failure.may_pass) == (reason, passes)
    text = failure.describe(5) + failure.cure("s3://bucket")
    assert not [secret for secret in ("sig=SECRET", "AKIA1", SECRET_KEY, "://b/", "sig=") if secret in text]
    assert text.endswith(".")


def test_a_proxy_that_does_not_answer_is_named_without_its_password():
    environ = {
        "AWS_ENDPOINT_URL": "http://store.example:1",
        "http_proxy": "http://me:SECRET@127.0.0.1:9",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }
    code = (
        "import os; from accel_runtime.extensions.object_stores.obstore_client import ObstoreClient\n"
        "try: ObstoreClient(0.2).list('s3://bucket/run/')\n"
        "except OSError as error: print(error, error.cure)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, check=True
    )
    assert "through the proxy 127.0.0.1:9 of http_proxy" in result.stdout
    assert "Check http_proxy and the endpoint, or add store.example to no_proxy" in result.stdout
    assert "SECRET" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("bucket", "environ", "expected"),
    [
        ("s3://b", {}, None),
        ("s3://b", {"http_proxy": "proxy:1"}, None),
        ("s3://b", {"HTTPS_PROXY": "proxy:1"}, ("HTTPS_PROXY", "proxy:1")),
        ("gs://b", {"all_proxy": "socks5://me:pw@proxy:1"}, ("all_proxy", "proxy:1")),
        ("gs://b", {"all_proxy": "proxy:1", "no_proxy": "localhost, .googleapis.com"}, None),
        ("az://b", {"https_proxy": "proxy:1", "NO_PROXY": "*"}, None),
        (
            "s3://b",
            {"AWS_ENDPOINT_URL": "http://store:9000", "https_proxy": "other:2", "http_proxy": "proxy:1"},
            ("http_proxy", "proxy:1"),
        ),
    ],
)
def test_the_proxy_of_a_service_is_that_of_the_scheme_of_its_endpoint(bucket, environ, expected):
    proxy = find_proxy(bucket, environ)
    assert (proxy and (proxy.variable, proxy.address)) == expected


def test_an_error_of_the_service_does_not_name_the_proxy():
    proxy = find_proxy("s3://b", {"https_proxy": "proxy:1"})
    failure = CallFailure.from_error(exceptions.PermissionDeniedError(DENIED), proxy)
    assert "proxy" not in failure.describe(5) + failure.cure("s3://b")
