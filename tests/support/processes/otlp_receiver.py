"""A receiver of OTLP over HTTP, which decodes requests by the messages of the protocol (`opentelemetry-proto`)."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["OtlpReceiver", "receive_otlp"]


class OtlpReceiver:
    """What was received: spans by name, and the newest value of each metric by its name and attributes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: dict[str, list] = defaultdict(list)
        self.metrics: dict[tuple[str, ...], float] = {}
        self.resource: dict[str, object] = {}
        self.headers: list[dict[str, str]] = []

    def take(self, path: str, body: bytes) -> None:
        """Take a request.

        Raises:
            DecodeError: It is none of the protocol.
        """
        if path == "/v1/traces":
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resource = read_attributes(group.resource.attributes)
                for scope in group.scope_spans:
                    for span in scope.spans:
                        self.spans[span.name].append(span)
        elif path == "/v1/metrics":
            for group in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in group.scope_metrics:
                    for metric in scope.metrics:
                        for point in metric.gauge.data_points:
                            key = (metric.name, *map(str, read_attributes(point.attributes).values()))
                            self.metrics[key] = point.as_double or point.as_int
        else:
            raise AssertionError(path)


def read_attributes(attributes) -> dict[str, object]:
    """Return attributes of the protocol by name."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def receive_otlp():
    """Serve a receiver on the loopback interface inside of the context, and yield it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.headers.append(dict(self.headers))
            receiver.take(
                self.path, gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            )
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
