"""The client of S3, Google Cloud Storage and Azure Blob Storage, by obstore. Imports no torch.

obstore has native threads, which a forked process does not have: its calls would wait there forever. A training process uses
`client_process` instead, which runs this module in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from accel_runtime.environment.installation import format_install
from accel_runtime.environment.locations import URL_SCHEMES, split_url
from accel_runtime.extensions.object_stores.client import (
    ConditionError,
    Level,
    ObjectClient,
    RangeRequest,
    StoredObject,
    Upload,
    absent_error,
)
from accel_runtime.storage.errors import CheckpointError, RequestError, StoreError

__all__ = ["ObstoreClient", "explain_missing_client"]

_REQUEST_S = 60.0
"""Seconds after which a request without an answer has failed: a piece of 32 MiB needs 0.6 MB/s."""
_CONNECT_S = 10.0
_PART_BYTES, _MAX_PARTS, _PART_RETRIES = 1 << 25, 9000, 20
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
_REPORT_AFTER_S, _REPORT_EVERY_S = 5.0, 30.0
_T = TypeVar("_T")


def explain_missing_client() -> str:
    """Return why there is no client, with the cure; empty if there is one."""
    if importlib.util.find_spec("obstore") is not None:
        return ""
    return (
        "Checkpoints in object stores need obstore, which is not installed. "
        f"Run: {format_install('obstore', extra='cloud')}"
    )


class ObstoreClient(ObjectClient):
    """Calls of obstore, with retries. Uploads are sent one after the other.

    Args:
        retry_s: Seconds for which a call that fails is repeated.
        environ: Variables with credentials, region and endpoint.
        report: Receives a line, now and then, while calls are repeated.
    """

    def __init__(
        self,
        retry_s: float,
        environ: Mapping[str, str] | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        if problem := explain_missing_client():
            raise RequestError(problem)
        self._retry_s = retry_s
        self._environ = os.environ if environ is None else environ
        self._report, self._next_report = report, 0.0
        self._stores: dict[str, Any] = {}
        self._given_up: dict[str, float] = {}
        """Time until which calls to a bucket are not repeated."""
        self._lock = threading.Lock()

    def start_put(self, key: str, size: int, *, wait: bool = True) -> Upload:  # noqa: ARG002 - nothing to wait for
        """Return a buffer, which is sent by `finish`."""
        return _BufferedUpload(self, key, size)

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_match: str | None = None,
        if_absent: bool = False,
    ) -> str:
        """Write an object in one request; `ObjectClient.put` has the errors."""
        import obstore  # noqa: PLC0415 - has native threads

        def write(mode: Any) -> str:
            return _encode_etag(
                self._repeat(
                    key, lambda store, path: obstore.put(store, path, data, mode=mode, use_multipart=False)
                )
            )

        if if_match is None:
            return write("create" if if_absent else "overwrite")
        version = _decode_etag(if_match)
        try:
            return write(version)
        except ConditionError:
            # Ceph compares ETags without the quotes that it sends.
            if self._read_etag(key) != if_match or not version.get("e_tag", "").startswith('"'):
                raise
        return write(version | {"e_tag": version["e_tag"].strip('"')})

    def _read_etag(self, key: str) -> str | None:
        import obstore  # noqa: PLC0415

        try:
            return self._repeat(key, lambda store, path: _encode_etag(obstore.head(store, path)), reads=True)
        except FileNotFoundError:
            return None

    def get(self, key: str) -> tuple[bytes, str]:
        """Read an object in one request."""
        import obstore  # noqa: PLC0415

        def read(store: Any, path: str) -> tuple[bytes, str]:
            result = obstore.get(store, path)
            return bytes(result.bytes()), _encode_etag(result.meta)

        return self._repeat(key, read, reads=True)

    def find_size(self, key: str) -> int | None:
        """Return the size of an object."""
        import obstore  # noqa: PLC0415

        try:
            return self._repeat(key, lambda store, path: int(obstore.head(store, path)["size"]), reads=True)
        except FileNotFoundError:
            return None

    def put_stream(self, key: str, blocks: Iterable[memoryview], size: int) -> None:
        """Write an object in parts of at least `_PART_BYTES`, each of which obstore sends again after an error."""
        import obstore  # noqa: PLC0415

        bucket, path = split_url(key)
        store = _open_bucket(bucket, self._environ, self._retry_s, num_retries=_PART_RETRIES)
        # A service accepts 10,000 parts.
        part = max(_PART_BYTES, -(-size // _MAX_PARTS))
        try:
            obstore.put(
                store, path, map(bytes, blocks), use_multipart=size > part, chunk_size=part, max_concurrency=8
            )
        except _get_errors() as error:
            failure = CallFailure.from_error(error, find_proxy(bucket, self._environ))
            raise StoreError(key, failure.describe(self._retry_s), failure.cure(bucket)) from None

    def read_ranges(self, requests: Sequence[RangeRequest]) -> None:
        """Read one range after the other."""
        for request in requests:
            request.buffer[:] = self.read_range(request.key, request.start, len(request.buffer))

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Return bytes of an object; `ObjectClient.read_ranges` has the errors."""
        import obstore  # noqa: PLC0415

        if not length:
            return memoryview(b"")
        data = self._repeat(
            key,
            lambda store, path: obstore.get_range(store, path, start=start, length=length),
            reads=True,
        )
        if len(data) < length:
            raise StoreError(key, f"it ends before byte {start + length}", "Verify the checkpoint.")
        return memoryview(data)

    def list(self, prefix: str) -> list[StoredObject]:
        """List objects, in as many requests as the service needs."""
        import obstore  # noqa: PLC0415

        bucket, _ = split_url(prefix)

        def read(store: Any, path: str) -> list[StoredObject]:
            return [
                StoredObject(f"{bucket}/{each['path']}", each["size"], each["last_modified"].timestamp())
                for chunk in obstore.list(store, path)
                for each in chunk
            ]

        found = self._repeat(prefix, read, reads=True, lists=True)
        return sorted((each for each in found if each.key.startswith(prefix)), key=lambda each: each.key)

    def list_level(self, prefix: str) -> Level:
        """List what is directly below a prefix."""
        import obstore  # noqa: PLC0415

        result = self._repeat(
            prefix,
            lambda store, path: obstore.list_with_delimiter(store, path or None),
            reads=True,
            lists=True,
        )
        folders = (path.rstrip("/").rpartition("/")[2] for path in result["common_prefixes"])
        objects = (each["path"].rpartition("/")[2] for each in result["objects"])
        return Level(tuple(sorted(folders)), tuple(sorted(objects)))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, up to a thousand in a request where the service can."""
        import obstore  # noqa: PLC0415

        buckets: dict[str, list[str]] = {}
        for key in keys:
            bucket, path = split_url(key)
            buckets.setdefault(bucket, []).append(path)
        for bucket, paths in buckets.items():

            def remove(store: Any, _path: str, paths: list[str] = paths) -> None:
                try:
                    obstore.delete(store, paths)
                except FileNotFoundError:  # a service without requests for several objects
                    for path in paths:
                        try:
                            obstore.delete(store, path)
                        except FileNotFoundError:
                            continue

            self._repeat(f"{bucket}/{paths[0]}", remove)

    def _repeat(
        self, key: str, call: Callable[[Any, str], _T], *, reads: bool = False, lists: bool = False
    ) -> _T:
        """Return the result of a call for the store and the path of a key; repeat it while its error may pass."""
        from obstore import exceptions  # noqa: PLC0415

        start = time.monotonic()
        bucket, path = split_url(key)
        deadline, delay, renewed = self._choose_deadline(bucket), _FIRST_DELAY_S, False
        while True:
            store = self._open(bucket)
            try:
                result = call(store, path)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                if "ConditionalRequestConflict" not in str(error):
                    raise ConditionError(key) from None
                failure = CallFailure.from_error(error)
            except FileNotFoundError as error:
                failure = CallFailure.from_error(error)
                if failure.code != "NoSuchBucket" and not lists:
                    # A write finds nothing if its condition is an ETag.
                    raise (absent_error(key) if reads else ConditionError(key)) from None
            except (exceptions.BaseError, OSError) as error:
                failure = CallFailure.from_error(error, find_proxy(bucket, self._environ))
            else:
                self._given_up.pop(bucket, None)
                return result
            if (failure.is_of_credentials or failure.has_no_code) and not renewed:
                renewed = True  # they may have expired, and the source may have new ones
                self._forget(bucket)
            elif not failure.may_pass or time.monotonic() + delay > deadline:
                raise self._give_up(key, bucket, failure) from None
            self._report_retries(bucket, failure, time.monotonic() - start)
            time.sleep(delay * random.uniform(0.5, 1))  # noqa: S311 - no secret
            delay = min(2 * delay, _LONGEST_DELAY_S)

    def _choose_deadline(self, bucket: str) -> float:
        """Return the end of the retries of a call: at once after one without success, so that the error of a save is not late."""
        now = time.monotonic()
        return now if now < self._given_up.get(bucket, 0.0) else now + self._retry_s

    def _give_up(self, key: str, bucket: str, failure: CallFailure) -> StoreError:
        if failure.may_pass:
            self._given_up[bucket] = time.monotonic() + self._retry_s
        return StoreError(key, failure.describe(self._retry_s), failure.cure(bucket))

    def _report_retries(self, bucket: str, failure: CallFailure, seconds: float) -> None:
        """Report a call that is repeated for long, once for all threads."""
        with self._lock:
            if seconds < _REPORT_AFTER_S or time.monotonic() < self._next_report:
                return
            self._next_report = time.monotonic() + _REPORT_EVERY_S
        self._report(
            f"{bucket} does not answer as expected, calls are repeated for up to {self._retry_s:g} s: {failure.reason}"
        )

    def _open(self, bucket: str) -> Any:
        with self._lock:
            if bucket not in self._stores:
                self._stores[bucket] = _open_bucket(bucket, self._environ, self._retry_s)
            return self._stores[bucket]

    def _forget(self, bucket: str) -> None:
        with self._lock:
            self._stores.pop(bucket, None)


class _BufferedUpload(Upload):
    def __init__(self, client: ObstoreClient, key: str, size: int) -> None:
        self._client, self._key = client, key
        self._buffer, self._filled = memoryview(bytearray(size)), 0

    def write(self, piece: memoryview) -> None:
        self._buffer[self._filled : self._filled + len(piece)] = piece
        self._filled += len(piece)

    def finish(self) -> str:
        return self._client.put(self._key, self._buffer)


def _get_errors() -> tuple[type[Exception], ...]:
    from obstore import exceptions  # noqa: PLC0415

    return exceptions.BaseError, OSError


def _open_bucket(bucket: str, environ: Mapping[str, str], retry_s: float, *, num_retries: int = 0) -> Any:
    """Return obstore's store for a bucket, with the settings and credentials of the environment.

    A request takes no longer than all retries. `num_retries` are those of obstore.
    """
    from obstore import exceptions, store  # noqa: PLC0415

    endpoints = [environ.get(name, "") for name in _ENDPOINTS]
    arguments: dict[str, Any] = {
        "retry_config": {"max_retries": num_retries, "retry_timeout": timedelta(seconds=retry_s)}
    }
    arguments["client_options"] = {
        "timeout": timedelta(seconds=min(_REQUEST_S, retry_s)),
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, retry_s)),
        # A user who names an endpoint without TLS has chosen it.
        "allow_http": any(each.startswith("http://") for each in endpoints),
    }
    if bucket.startswith("s3") and (provider := _find_aws_profile(environ)) is not None:
        arguments["credential_provider"] = provider
    try:
        return store.from_url(bucket, **arguments)
    except (ValueError, TypeError, exceptions.BaseError) as error:
        reason = f"invalid settings: {_remove_urls(_first_line(str(error)))}"
        raise StoreError(bucket, reason, "Correct the variables of the environment.") from None


_ENDPOINTS = (
    "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "GOOGLE_BASE_URL",
)  # fmt: skip


_HOSTS = {"s3": "s3.amazonaws.com", "gs": "storage.googleapis.com", "az": "blob.core.windows.net"}
_ENDPOINT_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}


@dataclass(frozen=True)
class Proxy:
    """The HTTP proxy through which a service is called."""

    variable: str
    """Variable of the environment that sets it."""
    address: str
    """Host and port, without user and password."""
    service: str
    """Host of the service."""


def find_proxy(bucket: str, environ: Mapping[str, str]) -> Proxy | None:
    """Return the proxy that the environment sets for the service of a bucket; None without one."""
    kind = URL_SCHEMES[bucket.partition(":")[0]]
    endpoints = (environ.get(name) for name in _ENDPOINTS if name.startswith(_ENDPOINT_PREFIXES[kind]))
    endpoint = urlsplit(next(filter(None, endpoints), f"https://{_HOSTS[kind]}"))
    host = endpoint.hostname or ""
    excluded = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").replace(" ", "").split(",")
    if any(name == "*" or f".{host}".endswith(f".{name.lstrip('.')}") for name in excluded if name):
        return None
    names = (f"{endpoint.scheme}_proxy", f"{endpoint.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    for name in filter(environ.get, names):
        url = environ[name] if "://" in environ[name] else f"//{environ[name]}"
        return Proxy(name, urlsplit(url).netloc.rpartition("@")[2], host)
    return None


def _find_aws_profile(environ: Mapping[str, str]) -> Any:
    """Return a source of credentials for profiles in AWS's files, which only AWS's SDK reads; None if others are set."""
    if environ.get("AWS_ACCESS_KEY_ID") and not environ.get("AWS_PROFILE"):
        return None
    if any(environ.get(name) for name in _AWS_ROLES):
        return None
    files = (environ.get("AWS_SHARED_CREDENTIALS_FILE"), environ.get("AWS_CONFIG_FILE"))
    names = [Path(each) for each in files if each] or [
        Path.home() / ".aws" / name for name in ("credentials", "config")
    ]
    if not environ.get("AWS_PROFILE") and not any(name.is_file() for name in names):
        return None
    if importlib.util.find_spec("boto3") is None:
        raise CheckpointError(
            "Cannot read the credentials of AWS profiles: boto3 is not installed. Set AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, or run: {format_install('boto3')}"
        )
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415

    try:
        return Boto3CredentialProvider()
    except ValueError:  # the files have none
        return None
    except Exception as error:  # noqa: BLE001 - those of botocore, which is imported nowhere else
        raise StoreError(
            "s3://",
            f"the AWS profile cannot be used: {_first_line(str(error))}".rstrip("."),
            "Correct AWS_PROFILE, or the files in ~/.aws.",
        ) from None


_AWS_ROLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip


def _encode_etag(result: Any) -> str:
    """Return what identifies a version of an object: the ETag, and the generation in Google's store."""
    return f"{result.get('e_tag') or ''}\n{result.get('version') or ''}"


def _decode_etag(text: str) -> dict[str, str]:
    etag, _, version = text.partition("\n")
    return {name: value for name, value in (("e_tag", etag), ("version", version)) if value}


class CallFailure:
    """The reason that a call failed, read from the text of obstore's error, which may contain URLs with signatures."""

    def __init__(self, kind: str, status: int, code: str, message: str, proxy: Proxy | None = None) -> None:
        self._kind, self._status, self.code, self._message = kind, status, code, message
        # An answer with a code is one of the service.
        self._proxy = None if code or status not in _OF_PROXIES else proxy

    @classmethod
    def from_error(cls, error: Exception, proxy: Proxy | None = None) -> CallFailure:
        """Return the failure of an error of a call, which went through a proxy if there is one."""
        text = str(error)
        status = re.search(r"status code: (\d{3})", text)
        code = re.search(r"<Code>([^<]*)</Code>", text) or re.search(r'"reason": ?"(\w+)"', text)
        message = re.search(r"<Message>([^<]*)</Message>", text)
        kind = type(error).__name__
        tail = _first_line(text).rpartition(" - ")[2]
        if "169.254.169.254" in text or "metadata.google.internal" in text:
            return cls(kind, 0, "NoCredentials", "no credentials were found")
        return cls(
            kind,
            int(status[1]) if status else 0,
            code[1] if code else "",
            _first_line(message[1]) if message else "" if status else _remove_urls(tail),
            proxy,
        )

    @property
    def is_of_credentials(self) -> bool:
        """Return whether new credentials may help."""
        return (
            self._kind in {"PermissionDeniedError", "UnauthenticatedError"}
            or self._status in {401, 403}
            or self.code
            in {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired", "NoCredentials"}
        )

    @property
    def has_no_code(self) -> bool:
        """Return whether a request is bad for a reason that is not given, as in answers to HEAD, also for an expired token."""
        return self._status == HTTPStatus.BAD_REQUEST and not self.code

    @property
    def may_pass(self) -> bool:
        """Return whether the same call may succeed later."""
        if self.is_of_credentials:
            return False
        if self.code in {"RequestTimeout", "SlowDown", "ConditionalRequestConflict", "OperationAborted"}:
            return True
        if self._status:
            is_of_server = self._status >= HTTPStatus.INTERNAL_SERVER_ERROR
            return self._status in _PASSING or (is_of_server and self._status != HTTPStatus.NOT_IMPLEMENTED)
        return self._kind == "GenericError"

    @property
    def reason(self) -> str:
        """Return the reason as a text."""
        if self.code == "NoCredentials":
            return self._message
        parts = [f"HTTP {self._status}" if self._status else "", self.code, self._message[:300].rstrip(".")]
        text = " ".join(part for part in parts if part) or self._kind
        if self._proxy is not None:
            text += f", through the proxy {self._proxy.address} of {self._proxy.variable}"
        return text

    def describe(self, retry_s: float) -> str:
        """Return the reason of the end of retries."""
        return f"no success in {retry_s:g} s of retries: {self.reason}" if self.may_pass else self.reason

    def cure(self, bucket: str) -> str:
        """Return the cure, as a sentence."""
        if self.code in {"NoSuchBucket", "ContainerNotFound"} or self._status == HTTPStatus.NOT_FOUND:
            return f"Create {bucket}, or correct the URL."
        if self.is_of_credentials:
            source = _CREDENTIALS[URL_SCHEMES[bucket.partition(":")[0]]]
            if self.code == "NoCredentials":
                return f"Set {source}."
            return f"Renew the credentials, or allow them to list, read, write and delete there: {source}."
        if self._status in {301, 307, 400} and bucket.startswith("s3"):
            others = ", or renew the credentials" if self.has_no_code else ""
            return f"Set AWS_REGION to the region of the bucket{others}."
        if self._status == HTTPStatus.NOT_IMPLEMENTED:
            return "Use a service that supports conditional writes (If-None-Match, If-Match)."
        return (
            "Check the network and the endpoint, and try again."
            if self._proxy is None
            else f"Check {self._proxy.variable} and the endpoint, or add {self._proxy.service} to no_proxy, and try again."
        )


_OF_PROXIES = frozenset({0, 407, 502, 503, 504})
"""Statuses of a request that a proxy may not have passed on; 0 is no answer."""
_PASSING = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS})
"""Errors of a client that may pass, besides those of a server."""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of this machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or a service account of this machine",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or a managed identity of this machine",
}


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _remove_urls(text: str) -> str:
    return re.sub(r"\S+://\S+", "the service", text)[:300]
