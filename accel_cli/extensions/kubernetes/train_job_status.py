"""The progress sink of a run in a TrainJob: its percentage, remaining time and metrics, in the status of the TrainJob.

The protocol is KEP-2779 of Kubeflow Trainer (https://github.com/kubeflow/trainer/tree/master/proposals/2779-trainjob-progress): a request
to its controller, with the addresses and the token that it puts into the pods (Trainer 2.2, feature gate `TrainJobStatus`).
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from typing_extensions import override

from accel_cli.planning.plan import AgentSettings
from accel_cli.runs.progress import ProgressSink, RunProgress
from accel_cli.runs.run_dir import RunFolder

__all__ = ["TrainJobStatus"]

_VARIABLES = (
    "KUBEFLOW_TRAINER_SERVER_URL",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT",
    "KUBEFLOW_TRAINER_SERVER_TOKEN",
)
_OTHER_REPORTER = "DISABLE_KUBEFLOW_INTEGRATION"
"""The variable that switches the reports of a Trainer of transformers off."""
_TIMEOUT_S = 4.0
"""The seconds of a request: at its end, a launch waits for five."""
_MAX_METRICS, _MAX_TEXT, _MAX_SECONDS = 256, 64, 2**31 - 1
"""Limits of the CustomResourceDefinition."""


class _Server(NamedTuple):
    """The server of the controller; the files are read at each request, since they are replaced from time to time."""

    url: str
    certificate: Path
    token: Path


class TrainJobStatus(ProgressSink):
    """Sends the progress to the controller of Kubeflow Trainer, every ten seconds.

    Args:
        server: The server.
        is_alone: True if a Trainer of transformers does not report itself.
    """

    def __init__(self, server: _Server, *, is_alone: bool) -> None:
        self._server, self._is_alone = server, is_alone

    @classmethod
    @override
    def create(cls, settings: AgentSettings, environ: Mapping[str, str]) -> Self | None:
        url, certificate, token = (environ.get(name, "") for name in _VARIABLES)
        # By FALSE a user leaves the reports to the Trainer.
        if not (url and certificate and token) or environ.get(_OTHER_REPORTER, "").upper() == "FALSE":
            return None
        return cls(_Server(url, Path(certificate), Path(token)), is_alone=_OTHER_REPORTER in environ)

    @override
    def open(self, run: RunFolder) -> None:
        if not self._is_alone:
            # Each report replaces the whole status, so that those of two would alternate. The ranks have not started.
            os.environ[_OTHER_REPORTER] = "TRUE"

    @override
    def write(self, progress: RunProgress) -> None:
        self._send(build_status(progress))

    @override
    def close(self, outcome: RunProgress) -> None:
        self._send(build_status(outcome))

    def _send(self, status: Mapping[str, Any]) -> None:
        server = self._server
        request = urllib.request.Request(  # noqa: S310 - the address is the controller's
            server.url,
            json.dumps({"trainerStatus": status}).encode("ascii"),
            {
                "Authorization": f"Bearer {server.token.read_text(encoding='ascii').strip()}",
                "Content-Type": "application/json",
            },
        )
        context = ssl.create_default_context(cafile=server.certificate)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context):  # noqa: S310 - as above
                pass
        except urllib.error.HTTPError as error:
            # An OSError is tried again.
            raise OSError(
                f"the server of Kubeflow Trainer answered {error.code}: {_read_message(error)}"
            ) from None


def build_status(progress: RunProgress) -> dict[str, Any]:
    """Return the member `trainerStatus` of a TrainJob's status; what is not known is left out."""
    time = dt.datetime.fromtimestamp(progress.time, dt.UTC)
    status: dict[str, Any] = {"lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ")}
    if progress.state == "succeeded":
        status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    else:
        if progress.fraction is not None:
            status["progressPercentage"] = min(100, max(0, math.floor(100 * progress.fraction)))
        if progress.eta_s is not None and math.isfinite(progress.eta_s):
            status["estimatedRemainingSeconds"] = min(_MAX_SECONDS, max(0, round(progress.eta_s)))
    own: dict[str, float | None] = {
        "accel/steps": progress.steps,
        "accel/steps_per_second": progress.steps_per_s,
        "accel/restarts": progress.health.restarts,
        "accel/goodput": progress.goodput.share if progress.goodput else None,
    }
    values = {**{name: value for name, value in own.items() if value is not None}, **progress.metrics}
    # The end of a long name is the part that differs.
    metrics = [{"name": name[-_MAX_TEXT:], "value": f"{value:.6g}"} for name, value in values.items() if name]
    return {**status, "metrics": metrics[:_MAX_METRICS]}


def _read_message(error: urllib.error.HTTPError) -> str:
    """Return the message of a `Status` of Kubernetes, or the reason of another answer."""
    try:
        return str(json.loads(error.read())["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error.reason)
