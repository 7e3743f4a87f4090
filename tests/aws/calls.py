"""The calls that boto3 makes in this process: they are noted, and those that a test chooses fail.

Both are done by a handler of botocore's event `before-send`, which every session of boto3 gets: botocore has named the
operation then, and its retries and parsers see what a service would have sent.
"""

from __future__ import annotations

import io
import json
import os
import threading
from contextlib import closing
from pathlib import Path

from botocore import handlers
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError
from botocore.httpsession import URLLib3Session

__all__ = ["CALLS", "NOTES", "OF_TESTS", "Calls"]

NOTES = "TEST_AWS_CALLS"
"""The variable with the file to which each process adds its calls."""
OF_TESTS = "of-the-tests"
"""In the user agent of the tests' own clients, whose calls are neither noted nor broken."""
_PREFIXES = {"cloudwatch-logs": "logs", "secrets-manager": "secretsmanager"}
"""How permissions name a service, if not as botocore does."""
_ERRORS = {
    "throttled": ("ThrottlingException", 400, "Rate exceeded"),
    "broken": ("InternalFailure", 500, "We encountered an internal error. Please try again."),
    "expired": ("ExpiredToken", 400, "The security token included in the request is expired"),
    "invalid": ("InvalidClientTokenId", 403, "The security token included in the request is invalid."),
    "denied": (
        "AccessDeniedException",
        403,
        (
            "User: arn:aws:iam::123456789012:user/ann is not authorized to perform: {service}:{operation} on resource: * "
            "because no identity-based policy allows the {service}:{operation} action"
        ),
    ),
}


class _Body(io.BytesIO):
    """The body of a response, as urllib3 has it."""

    def stream(self, *_, **__):
        yield self.read()


class Calls:
    """The handler of a process."""

    def __init__(self):
        self._lock, self._faults = threading.Lock(), []

    def clear(self):
        """Forget the faults."""
        self._faults.clear()

    def fault(self, operation, kind, times=1, after=0, **error):
        """Let the next calls of an operation fail.

        Args:
            operation: `PutObject`, `s3:*` for all of a service, `*` for all.
            kind: A key of `_ERRORS`; `error` with code, status and message; `dropped`, without an answer; `lost`, done without an
                answer; `cut`, after the first bytes of the answer; or a function to call before the call is made.
            times: How many calls; None for all, until `clear`.
            after: How many calls go well before.
        """
        self._faults.append({"operation": operation, "kind": kind, "times": times, "after": after, **error})

    def __call__(self, event_name, request, **_):
        """Note a call, and return the response that replaces its own, if any."""
        if OF_TESTS in str(request.headers.get("User-Agent")):
            return None
        _, service, operation = event_name.split(".")
        service = _PREFIXES.get(service, service)
        if path := os.environ.get(NOTES):
            with Path(path).open("a", encoding="utf-8") as notes:
                notes.write(f"{service}:{operation}\n")
        fault = self._take(service, operation)
        return _answer(fault, request, service, operation) if fault else None

    def _take(self, service, operation):
        with self._lock:
            for fault in self._faults:
                if fault["operation"] not in {operation, f"{service}:*", "*"} or fault["times"] == 0:
                    continue
                if fault["after"]:
                    fault["after"] -= 1
                    continue
                if fault["times"]:
                    fault["times"] -= 1
                return fault
        return None


def _answer(fault, request, service, operation):
    kind = fault["kind"]
    if callable(kind):
        return kind()
    if kind in {"lost", "cut"}:
        with closing(URLLib3Session()) as session:
            response = session.send(request)
            content = response.content
        if kind == "cut":
            return AWSResponse(request.url, 200, response.headers, _Body(content[: len(content) // 2]))
    if kind in {"lost", "dropped"}:
        raise ConnectionClosedError(endpoint_url=request.url)
    code, status, message = _ERRORS.get(kind) or (fault["code"], fault["status"], fault.get("message", ""))
    message = message.format(service=service, operation=operation)
    # The protocols of these services differ in this alone.
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    if service in {"iam", "sts"}:
        text = f"<ErrorResponse>{text}</ErrorResponse>"
    elif service != "s3":
        text = json.dumps({"__type": code, "message": message})
    body = b"" if request.method == "HEAD" else text.encode()
    return AWSResponse(request.url, status, {"Content-Length": str(len(body))}, _Body(body))


CALLS = Calls()
if not any(isinstance(handler, Calls) for _, handler in (entry[:2] for entry in handlers.BUILTIN_HANDLERS)):
    handlers.BUILTIN_HANDLERS.append(("before-send", CALLS))
