"""A TLS server that stands for the controller of Kubeflow Trainer: it takes the statuses of a TrainJob (KEP-2779)."""

import datetime as dt
import ipaddress
import json
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kubeflow_trainer_api import models

__all__ = ["Controller", "check", "serve_controller", "write_certificate"]

_PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/run/status"


class Controller:
    """What the controller allows, and what it has received.

    Args:
        folder: An empty folder for the files that the controller puts into a pod.
    """

    def __init__(self, folder):
        self.folder, self.statuses = folder, []
        self.token, self.message = "first", ""
        """The token that is allowed, and why a status is refused; empty if it is not."""
        self.environ = {}
        """The variables of a pod."""


def check(request):
    """Check a request by the models of Trainer, and by the limits of its CustomResourceDefinition, which they do not have."""
    parsed = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(request)
    plain = json.dumps(parsed.to_dict(), default=lambda time: time.strftime("%Y-%m-%dT%H:%M:%SZ"))
    assert json.loads(plain) == request, "the models leave out unknown names"
    status = request["trainerStatus"]
    assert 0 <= status.get("progressPercentage", 0) <= 100
    assert 0 <= status.get("estimatedRemainingSeconds", 0) < 2**31
    assert len(status["metrics"]) <= 256
    for metric in status["metrics"]:
        assert 1 <= len(metric["name"]) <= 64
        assert 1 <= len(metric["value"]) <= 64


def write_certificate(folder):
    """Write a certificate of 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "controller")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key").write_bytes(pem)


@contextmanager
def serve_controller(folder):
    """Serve a controller on the loopback interface inside of the context, and yield it."""
    write_certificate(folder)
    (folder / "token").write_text("first\n")
    controller = Controller(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code, answer = 200, request
            if self.headers["Authorization"] != f"Bearer {controller.token}":
                code, answer = 403, {"kind": "Status", "message": "Forbidden", "code": 403}
            elif controller.message:
                code, answer = 422, {"kind": "Status", "message": controller.message, "code": 422}
            else:
                check(request)
                controller.statuses.append(request["trainerStatus"])
            body = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        controller.environ = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{server.server_address[1]}{_PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        }
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield controller
        finally:
            server.shutdown()
            thread.join()
