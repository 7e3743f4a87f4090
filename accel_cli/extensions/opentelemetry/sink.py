"""The progress sink that sends spans and metrics of a run to a collector of OpenTelemetry, through its SDK.

The variables are those of the specification (https://opentelemetry.io/docs/specs/otel/protocol/exporter/), which the SDK reads itself.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Self

from typing_extensions import override

from accel_cli.extensions.opentelemetry.spans import RunSpans
from accel_cli.planning.plan import AgentSettings
from accel_cli.runs.progress import ProgressSink, RunProgress
from accel_cli.runs.run_dir import RunFolder
from accel_runtime.environment.installation import format_install

__all__ = ["GAUGES", "OpenTelemetry"]

_TIMEOUT_S = 3
"""The seconds of an export with its retries, unless a variable sets them: at its end, a launch waits for five."""
_PACKAGES = {"http/protobuf": "http", "grpc": "grpc"}
"""The last part of the package of a protocol; the first is the default."""
_EXPORTERS = {
    "traces": ("trace_exporter", "OTLPSpanExporter"),
    "metrics": ("metric_exporter", "OTLPMetricExporter"),
}
"""The module and the class of the SDK's exporter of each signal."""


class OpenTelemetry(ProgressSink):
    """Sends spans and metrics of a run, while it runs and at its end.

    Args:
        signals: `traces` and `metrics`, or one of them.
        environ: The environment of the launch.
    """

    def __init__(self, signals: Iterable[str], environ: Mapping[str, str]) -> None:
        self._signals, self._environ = tuple(signals), environ
        self._errors = _ExportErrors()
        self._progress: RunProgress | None = None
        self._spans: RunSpans | None = None
        self._providers: list[Any] = []

    @classmethod
    @override
    def create(cls, settings: AgentSettings, environ: Mapping[str, str]) -> Self | None:
        if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        signals = [name for name in _EXPORTERS if _is_on(name, environ)]
        return cls(signals, environ) if signals else None

    @override
    def open(self, run: RunFolder) -> None:
        try:
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra of its own
        except ImportError as error:
            raise RuntimeError(
                f"{error}. Install it: {format_install('opentelemetry-sdk', 'opentelemetry-exporter-otlp-proto-http', extra='otel')}"
            ) from None
        record = run.record
        attributes = {
            "host.name": os.uname().nodename,
            "accel.run": run.path.name,
            "accel.script": str(record.get("target", "")),
            "accel.launcher": str(record.get("launcher", "")),
        }
        # Those of the user are in variables, which arguments would replace.
        if "service.name=" not in self._environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            attributes["service.name"] = self._environ.get("OTEL_SERVICE_NAME", "accel")
        resource = Resource.create(attributes)
        self._errors.install()
        if "metrics" in self._signals:
            self._providers.append(self._create_meter_provider(resource))
        if "traces" in self._signals:
            provider = self._create_tracer_provider(resource)
            self._providers.append(provider)
            self._spans = RunSpans(run, provider.get_tracer("accel"), self._environ.get("TRACEPARENT", ""))

    @override
    def write(self, progress: RunProgress) -> None:
        self._progress = progress
        if self._spans:
            self._spans.update(progress)
        self._errors.raise_newest()

    @override
    def close(self, outcome: RunProgress) -> None:
        self._progress = outcome
        if self._spans:
            self._spans.end(outcome)
            self._spans = None
        providers, self._providers = self._providers, []
        # Each sends what it has kept; together, since the launch waits a few seconds only.
        threads = [threading.Thread(target=provider.shutdown, daemon=True) for provider in providers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._errors.remove()
        self._errors.raise_newest()

    def _create_tracer_provider(self, resource: Any) -> Any:
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - as above
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        exporter = _import_exporter("traces", self._environ)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return provider

    def _create_meter_provider(self, resource: Any) -> Any:
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415 - as above
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415

        reader = PeriodicExportingMetricReader(_import_exporter("metrics", self._environ))
        provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        meter = provider.get_meter("accel")
        for name, (unit, text) in GAUGES.items():
            meter.create_observable_gauge(f"accel.{name}", [partial(self._observe, name)], unit, text)
        return provider

    def _observe(self, name: str, _options: Any) -> list[Any]:
        """Return the values of a gauge now, for a callback of the SDK."""
        from opentelemetry.metrics import Observation  # noqa: PLC0415 - as above

        values = _read_values(self._progress, name) if self._progress else []
        return [Observation(value, attributes) for value, attributes in values]


GAUGES = {
    "steps": ("{step}", "Optimizer steps of this attempt, of the rank that is behind the others."),
    "steps_per_second": ("{step}/s", "Optimizer steps per second, over the last steps."),
    "fraction": ("1", "Part of the run that is done, from 0 to 1."),
    "eta": ("s", "Time until the end of the run."),
    "restarts": ("{restart}", "Restarts of all processes."),
    "world_size": ("{rank}", "Number of ranks on all nodes."),
    "stalled_ranks": ("{rank}", "Number of ranks without progress."),
    "goodput": ("1", "Share of the wall time that moved the newest kept step forward, from 0 to 1."),
    "lost_time": ("s", "Wall time that moved no kept step forward, by cause."),
    "logged": ("1", "Last value of a logged metric, by name."),
}
"""The metrics by name: the unit and the description."""


def _read_values(progress: RunProgress, name: str) -> list[tuple[float, dict[str, str]]]:
    """Return the values of a metric with their attributes; none if it is not known."""
    goodput = progress.goodput
    if name == "lost_time":
        return [(seconds, {"cause": cause}) for cause, seconds in goodput.causes.items()] if goodput else []
    if name == "logged":
        return [(value, {"name": key}) for key, value in progress.metrics.items()]
    value = {
        "steps": progress.steps,
        "steps_per_second": progress.steps_per_s,
        "fraction": progress.fraction,
        "eta": progress.eta_s,
        "restarts": progress.health.restarts,
        "world_size": progress.world_size,
        "stalled_ranks": len(progress.health.stalled_ranks),
        "goodput": goodput.share if goodput else None,
    }[name]
    return [] if value is None else [(value, {})]


def _is_on(signal: str, environ: Mapping[str, str]) -> bool:
    """Return True if the environment has an endpoint for a signal, and another exporter does not replace it."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    has_endpoint = any(environ.get(name) for name in names)
    return has_endpoint and environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp") == "otlp"


def _import_exporter(signal: str, environ: Mapping[str, str]) -> Any:
    """Return the SDK's exporter of a signal, for the protocol that the environment names.

    Raises:
        RuntimeError: The protocol is unknown, or its package is missing.
    """
    general = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or next(iter(_PACKAGES))
    protocol = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL") or general
    if protocol not in _PACKAGES:
        raise RuntimeError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not known. Set it to {' or '.join(_PACKAGES)}"
        )
    module, kind = _EXPORTERS[signal]
    package = _PACKAGES[protocol]
    try:
        imported = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.{module}")
    except ImportError as error:
        raise RuntimeError(
            f"{error}. Install it: {format_install(f'opentelemetry-exporter-otlp-proto-{package}')}"
        ) from None
    timeouts = {"OTEL_EXPORTER_OTLP_TIMEOUT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_TIMEOUT"}
    exporter = getattr(imported, kind)
    return exporter() if timeouts & environ.keys() else exporter(timeout=_TIMEOUT_S)


class _ExportErrors(logging.Handler):
    """Keeps what the SDK logs about failed exports, which it would print at each of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._newest = ""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._newest = record.getMessage().partition("\n")[0]

    def install(self) -> None:
        """Replace the output of the SDK's loggers."""
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self)
        logger.propagate = False

    def remove(self) -> None:
        """Restore it."""
        logger = logging.getLogger("opentelemetry")
        logger.removeHandler(self)
        logger.propagate = True

    def raise_newest(self) -> None:
        """Raise OSError if an export has failed since the last call."""
        newest, self._newest = self._newest, ""
        if newest:
            raise OSError(newest)
