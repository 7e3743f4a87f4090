"""The S3 servers of tests and the proxy of faults: they do what tests of checkpoints rely on."""

from __future__ import annotations

import os
import threading
import time
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, HTTPClientError
from support.object_stores.fault_proxy import Answer, BlackHole, Hook, Reset, Slow
from support.object_stores.server import ACCESS_KEY, REGION, SECRET_KEY, MotoServer

WRITERS = 6


@pytest.fixture
def proxy(s3_proxy):
    return s3_proxy


@pytest.fixture
def bucket(s3_server):
    return s3_server.create_bucket()


def connect(proxy, client="client", **settings):
    """Return a client without retries, unless settings have `attempts`; other settings are `secret`, `token`, `timeout`."""
    config = Config(
        proxies={},
        retries={"total_max_attempts": settings.get("attempts", 1)},
        read_timeout=settings.get("timeout", 60),
        s3={"addressing_style": "path"},
    )
    return boto3.client(
        "s3",
        REGION,
        endpoint_url=proxy.address(client),
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=settings.get("secret", SECRET_KEY),
        aws_session_token=settings.get("token"),
        config=config,
    )


def put(client, bucket, key, data, **condition):
    """Put an object; return whether its condition held."""
    try:
        client.put_object(Bucket=bucket, Key=key, Body=data, **condition)
    except ClientError as error:
        assert error.response["Error"]["Code"] in {"PreconditionFailed", "ConditionalRequestConflict"}, error
        return False
    return True


def race(proxy, bucket, key, **condition):
    """Return the number of writers whose conditional put succeeds, of several at the same time.

    Ceph answers losers of a race with error 500, and with 412 when they try again.
    """
    clients = [connect(proxy, attempts=5) for _ in range(WRITERS)]
    barrier, successes = threading.Barrier(WRITERS), []

    def write(number):
        barrier.wait()
        successes.append(put(clients[number], bucket, key, b"%d %s" % (number, os.urandom(8)), **condition))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(successes) == WRITERS
    return sum(successes)


def test_of_several_writers_with_the_same_condition_one_succeeds(proxy, bucket):
    client = connect(proxy)
    for attempt in range(3):
        key = f"key {attempt}"
        assert race(proxy, bucket, key, IfNoneMatch="*") == 1
        assert race(proxy, bucket, key, IfMatch=client.head_object(Bucket=bucket, Key=key)["ETag"]) == 1
        assert not put(client, bucket, key, b"", IfMatch='"0123"')


def test_a_wrong_secret_is_refused_by_ceph_only(s3_server, proxy, bucket):
    client = connect(proxy, secret="x" * 40)
    if isinstance(s3_server, MotoServer):
        client.put_object(Bucket=bucket, Key="key", Body=b"1")
    else:
        with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
            client.put_object(Bucket=bucket, Key="key", Body=b"1")


def test_bytes_are_counted_by_client_and_key(proxy, bucket):
    writer, reader = connect(proxy, "writer"), connect(proxy, "reader")
    data = bytes(range(256)) * 4000
    writer.put_object(Bucket=bucket, Key="a b/1", Body=data)
    assert (
        reader.get_object(Bucket=bucket, Key="a b/1", Range="bytes=100-999")["Body"].read() == data[100:1000]
    )
    assert reader.get_object(Bucket=bucket, Key="a b/1")["Body"].read() == data
    assert reader.list_objects_v2(Bucket=bucket, Prefix="a b")["KeyCount"] == 1
    reader.delete_object(Bucket=bucket, Key="a b/1")
    assert proxy.bytes_written("writer") == proxy.bytes_written(key="^a b/1$") == len(data)
    assert proxy.bytes_read("reader") == 900 + len(data)
    assert proxy.bytes_read("writer") == proxy.bytes_written("reader") == 0
    assert [each.method for each in proxy.select(client="reader")] == ["GET", "GET", "GET", "DELETE"]


@pytest.mark.parametrize(("when", "is_written"), [("before", False), ("upload", False), ("after", True)])
def test_a_connection_is_reset_before_within_or_after_an_upload(s3_server, proxy, bucket, when, is_written):
    client = connect(proxy)
    with proxy.faults(Reset(when), every=2), pytest.raises(HTTPClientError):
        client.put_object(Bucket=bucket, Key="key", Body=bytes(1000_000))
    assert ("key" in s3_server.list_sizes(bucket)) == is_written
    client.put_object(Bucket=bucket, Key="key", Body=b"1")
    with proxy.faults(Reset(when), every=2, first=2, method="PUT"):
        outcomes = []
        for number in range(4):
            try:
                client.put_object(Bucket=bucket, Key="key", Body=b"%d" % number)
                outcomes.append(True)
            except HTTPClientError:
                outcomes.append(False)
    assert outcomes == [True, False, True, False]


def test_a_download_is_cut_and_repeated(proxy, bucket):
    client, data = connect(proxy), bytes(3_000_000)
    client.put_object(Bucket=bucket, Key="key", Body=data)
    with proxy.faults(Reset("download"), count=1, method="GET"):
        with pytest.raises(Exception, match=r"IncompleteRead|Connection"):
            client.get_object(Bucket=bucket, Key="key")["Body"].read()
        assert client.get_object(Bucket=bucket, Key="key")["Body"].read() == data
    assert len(data) <= proxy.bytes_read() < 2 * len(data)
    assert proxy.count_faults() == 1


def test_errors_are_answered_with_the_key_and_the_token_as_aws_does(proxy, bucket):
    client = connect(proxy, token="token of the session")  # noqa: S106
    with proxy.faults(Answer()), pytest.raises(ClientError, match="SlowDown"):
        client.put_object(Bucket=bucket, Key="key", Body=b"1")
    with (
        proxy.faults(Answer(400, "ExpiredToken", "The provided token has expired.")),
        pytest.raises(ClientError, match="ExpiredToken") as caught,
    ):
        client.get_object(Bucket=bucket, Key="key")
    assert caught.value.response["Error"]["AWSAccessKeyId"] == ACCESS_KEY
    assert caught.value.response["Error"]["Token-0"] == "token of the session"


def test_a_request_is_slow_or_never_answered(proxy, bucket):
    client, impatient = connect(proxy), connect(proxy, "impatient", timeout=0.5)
    start = time.monotonic()
    with proxy.faults(Slow(1_000_000), count=1):
        client.put_object(Bucket=bucket, Key="key", Body=bytes(200_000))
    assert time.monotonic() - start >= 0.19
    with proxy.faults(BlackHole(), client="impatient"):
        with pytest.raises(HTTPClientError):
            impatient.get_object(Bucket=bucket, Key="key")
        assert len(client.get_object(Bucket=bucket, Key="key")["Body"].read()) == 200_000


def test_a_function_is_called_before_and_after_a_request(s3_server, proxy, bucket):
    client, seen = connect(proxy), []

    def look(request):
        seen.append((request.key, "key" in s3_server.list_sizes(bucket)))

    proxy.inject(Hook(look), method="PUT", key="^key$", select=lambda request: request.is_conditional)
    proxy.inject(Hook(look, "after"), method="PUT", key="^key$")
    put(client, bucket, "key", b"1", IfNoneMatch="*")
    assert seen == [("key", False), ("key", True)]


def test_addresses_are_loopback(s3_server, proxy):
    for address in (s3_server.address, proxy.address("one"), proxy.address("other")):
        assert urlsplit(address).hostname == "127.0.0.1"
    assert proxy.address("one") == proxy.address("one") != proxy.address("other")
