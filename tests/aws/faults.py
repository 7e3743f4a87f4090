"""Fault injection for all services of the plane, which also records each call."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import parse_qs

__all__ = ["ITSELF", "Fault", "Faults", "Gate"]

ITSELF = "accel-test-plane"
"""In the user agent of the plane's own calls, which are neither noted nor broken."""
_S3 = {
    "GET": "GetObject",
    "PUT": "PutObject",
    "HEAD": "HeadObject",
    "DELETE": "DeleteObject",
    "POST": "PostObject",
}
_S3_BUCKET = {"GET": "ListObjectsV2", "PUT": "CreateBucket", "HEAD": "HeadBucket", "DELETE": "DeleteBucket"}
_S3_QUERY = (
    ("uploads", "POST", "CreateMultipartUpload"),
    ("partNumber", "PUT", "UploadPart"),
    ("uploadId", "POST", "CompleteMultipartUpload"),
    ("uploadId", "DELETE", "AbortMultipartUpload"),
    ("uploads", "GET", "ListMultipartUploads"),
    ("uploadId", "GET", "ListParts"),
    ("delete", "POST", "DeleteObjects"),
    ("location", "GET", "GetBucketLocation"),
    ("encryption", "PUT", "PutBucketEncryption"),
    ("publicAccessBlock", "PUT", "PutPublicAccessBlock"),
    ("versioning", "GET", "GetBucketVersioning"),
)
_KINDS = {
    # kind: (code, status, message); what a service says in words of its own is in _OWN.
    "throttled": ("ThrottlingException", 400, "Rate exceeded"),
    "broken": ("InternalFailure", 500, "We encountered an internal error. Please try again."),
    "unavailable": ("ServiceUnavailable", 503, "Service is unable to handle request."),
    "expired": ("ExpiredTokenException", 400, "The security token included in the request is expired"),
    "invalid": ("UnrecognizedClientException", 400, "The security token included in the request is invalid."),
    "denied": (
        "AccessDeniedException",
        400,
        (
            "User: arn:aws:iam::123456789012:user/ann is not authorized to perform: {service}:{operation} on resource: * "
            "because no identity-based policy allows the {service}:{operation} action"
        ),
    ),
}
_OWN = {
    ("s3", "throttled"): ("SlowDown", 503, "Please reduce your request rate."),
    ("s3", "broken"): ("InternalError", 500, "We encountered an internal error. Please try again."),
    ("s3", "expired"): ("ExpiredToken", 400, "The provided token has expired."),
    ("s3", "invalid"): (
        "InvalidAccessKeyId",
        403,
        "The AWS Access Key Id you provided does not exist in our records.",
    ),
    ("s3", "denied"): ("AccessDenied", 403, "Access Denied"),
    ("iam", "throttled"): ("Throttling", 400, "Rate exceeded"),
    ("sts", "throttled"): ("Throttling", 400, "Rate exceeded"),
    ("iam", "expired"): ("ExpiredToken", 403, "The security token included in the request is expired"),
    ("sts", "expired"): ("ExpiredToken", 403, "The security token included in the request is expired"),
    ("iam", "invalid"): (
        "InvalidClientTokenId",
        403,
        "The security token included in the request is invalid.",
    ),
    ("sts", "invalid"): (
        "InvalidClientTokenId",
        403,
        "The security token included in the request is invalid.",
    ),
    ("iam", "denied"): ("AccessDenied", 403, _KINDS["denied"][2]),
    ("sts", "denied"): ("AccessDenied", 403, _KINDS["denied"][2]),
}


@dataclass
class Fault:
    """A fault of the calls of an operation."""

    operation: str
    """`DescribeTrainingJob`, `logs:*` for all of a service, `*` for all."""
    kind: str
    """A key of `_KINDS`; `error` with code, status and message; `dropped`; `lost`, the answer only; `cut` after `size` bytes; `slow`."""
    times: int | None = 1
    """How many calls; None for all, until the faults are cleared or `seconds` have passed."""
    after: int = 0
    """How many calls go well before."""
    seconds: float | None = None
    """`slow`: how long a call takes. Else: how long this lasts."""
    code: str = ""
    status: int = 400
    message: str = ""
    size: int = 0
    since: float = field(default_factory=time.monotonic)

    def meets(self, service, operation):
        return self.operation in {operation, f"{service}:{operation}", f"{service}:*", "*"}

    def over(self):
        if self.kind != "slow" and self.seconds is not None:
            return time.monotonic() - self.since > self.seconds
        return self.times is not None and self.times <= 0


class Faults:
    """The faults of a test, and the recorded calls."""

    def __init__(self):
        self._lock = threading.Lock()
        self.clear()

    def clear(self):
        with self._lock:
            self._faults, self.calls = [], []

    def add(self, fields):
        with self._lock:
            fault = Fault(**fields)
            if fault.kind != "slow" and fault.seconds is not None:
                fault.times = None
            self._faults.append(fault)

    def take(self, service, operation):
        """Record a call, and return and consume its fault, if any."""
        with self._lock:
            self.calls.append(f"{service}:{operation}")
            self._faults = [fault for fault in self._faults if not fault.over()]
            for fault in self._faults:
                if not fault.meets(service, operation):
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None


class Gate:
    """The WSGI application in front of moto's."""

    def __init__(self, app, faults, control):
        self._app, self._faults, self._control = app, faults, control

    def __call__(self, environ, start_response):
        if environ["PATH_INFO"].startswith("/_plane/"):
            return self._controlled(environ, start_response)
        if ITSELF in environ.get("HTTP_USER_AGENT", "") or environ["PATH_INFO"].startswith("/moto-api"):
            return self._app(environ, start_response)
        service, operation = _call(environ)
        fault = self._faults.take(service, operation)
        if fault is None:
            return self._app(environ, start_response)
        if fault.kind == "slow":
            time.sleep(fault.seconds)
            return self._app(environ, start_response)
        if fault.kind == "lost":
            # The call does what it does, and nobody hears of it.
            list(self._app(environ, lambda *_: None))
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        if fault.kind == "dropped":
            _hang_up(environ)
        if fault.kind == "cut":
            return _cut(environ, self._app(environ, start_response), fault.size)
        return _error(environ, start_response, fault, service, operation)

    def _controlled(self, environ, start_response):
        arguments = _body(environ)
        status, answer = self._control(
            environ["PATH_INFO"].removeprefix("/_plane/"), json.loads(arguments or b"{}")
        )
        text = json.dumps(answer).encode()
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(text)))])
        return [text]


def _body(environ):
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _call(environ):
    """Return service and operation of a signed request."""
    parts = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].split(",")[0].split("/")
    service = parts[3] if len(parts) > 3 else "s3"
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        return service, target.split(".")[-1]
    if service == "s3":
        return service, _s3_operation(environ)
    return service, parse_qs(_body(environ).decode()).get("Action", ["?"])[0]


def _s3_operation(environ):
    method, query = (
        environ["REQUEST_METHOD"],
        parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True),
    )
    for name, verb, operation in _S3_QUERY:
        if verb == method and name in query:
            return operation
    path = environ["PATH_INFO"].strip("/")
    if not path:
        return "ListBuckets"
    return (_S3 if "/" in path else _S3_BUCKET).get(method, method)


def _error(environ, start_response, fault, service, operation):
    code, status, message = _OWN.get((service, fault.kind)) or _KINDS.get(fault.kind, ("", 400, ""))
    code, message = fault.code or code, fault.message or message.format(service=service, operation=operation)
    status = fault.status if fault.kind == "error" else status
    if service == "s3":
        kind, text = "application/xml", f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    elif service in {"sts", "iam"}:
        kind = "text/xml"
        text = (
            f"<ErrorResponse><Error><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>"
        )
    else:
        kind, text = "application/x-amz-json-1.1", json.dumps({"__type": code, "message": message})
    if int(environ.get("CONTENT_LENGTH") or 0) < 1 << 22:
        _body(environ)
    start_response(f"{status} {code}", [("Content-Type", kind), ("Content-Length", str(len(text)))])
    return [b"" if environ["REQUEST_METHOD"] == "HEAD" else text.encode()]


def _hang_up(environ):
    """Close the connection, without a response or within it."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionError


def _cut(environ, parts, size):
    """Yield the first bytes of a response, and close the connection."""
    for part in parts:
        yield part[:size]
        size -= len(part)
        if size <= 0:
            _hang_up(environ)
