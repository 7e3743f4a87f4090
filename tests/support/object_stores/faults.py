"""Faults of requests to S3 that pass, and those that last, by the names of cases."""

from __future__ import annotations

from support.object_stores.fault_proxy import Answer, BlackHole, Reset, Slow

SERVER_ERROR = Answer(500, "InternalError", "We encountered an internal error. Please try again.")
EXPIRED = Answer(400, "ExpiredToken", "The provided token has expired.")
PASSING = {
    "reset before": (Reset("before"), {"every": 5}),
    "reset in uploads": (Reset("upload"), {"every": 3, "method": "PUT"}),
    "answers lost": (Reset("after"), {"every": 4, "first": 2}),
    "reset in downloads": (Reset("download"), {"every": 3, "method": "GET"}),
    "503": (Answer(), {"every": 3}),
    "500": (SERVER_ERROR, {"every": 4}),
    "slow": (Slow(300_000), {"every": 3}),
    "expired once": (EXPIRED, {"first": 5, "count": 1}),
}
"""Faults that pass, and which requests have them: arguments of `FaultProxy.inject`."""
LASTING = {
    "no answer": (BlackHole(), "Check the network"),
    "503": (Answer(), "Check the network"),
    "expired": (EXPIRED, "Renew the credentials"),
    "denied": (Answer(403, "AccessDenied", "Access Denied"), "Renew the credentials, or allow"),
    "no bucket": (Answer(404, "NoSuchBucket", "The specified bucket does not exist"), "Create s3://"),
}
"""Faults that last, and the cure in the error."""
