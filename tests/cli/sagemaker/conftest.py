"""A folder that is sent, what makes it a repository, and the S3 it is sent to, with a bad network before it."""

import contextlib
import socket
import struct
import subprocess
import threading

import pytest
from aws.models import keep_models

import accel_cli.launchers  # noqa: F401 - the section of SageMaker is in its table

WHY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
    % (len(WHY), WHY)
)


@pytest.fixture(scope="session", autouse=True)
def _models():
    keep_models()


@pytest.fixture
def tree(tmp_path):
    """An empty folder that no repository is above."""
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


@pytest.fixture
def write(tree):
    """Writes files into the folder: names, and what is in them."""

    def written(*names, text="x\n"):
        for name in names:
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return written


@pytest.fixture
def git(tree, monkeypatch):
    """Runs git in the folder, or in one below it, with no configuration but its own."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")

    def run(*args, below="."):
        told = [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "protocol.file.allow=always",
            "-c",
            "init.defaultBranch=main",
        ]
        subprocess.run(["git", *told, *args], cwd=tree / below, check=True, capture_output=True)

    return run


@pytest.fixture(scope="session")
def moto_port(aws_plane):
    """The port of an AWS on loopback."""
    return int(aws_plane.address.rpartition(":")[2])


class Proxy:
    """Stands before a server; what befalls a request is decided by its first bytes."""

    def __init__(self, port):
        self.server = port
        self.fate = lambda _: "pass"
        """From the beginning of a request to `pass`, `cut` or `slow down`."""
        self.asked = []
        self.delay = threading.Event()
        """Set, requests are passed on; not set, they wait."""
        self.delay.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open = [self.listener]
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.server))
            self.open += [client, server]
            for work in (
                lambda c=client, s=server: self.requests(c, s),
                lambda c=client, s=server: self.answers(c, s),
            ):
                self.threads.append(threading.Thread(target=work))
                self.threads[-1].start()

    def requests(self, client, server):
        try:
            while data := client.recv(1 << 16):
                if data.split(b" ", 1)[0] in {b"GET", b"PUT", b"POST", b"DELETE", b"HEAD"}:
                    self.asked.append(data.split(b"\r\n", 1)[0].decode())
                    fate = self.fate(self.asked[-1])
                    if fate == "slow down":
                        client.sendall(SLOW_DOWN)
                        break
                    if fate == "cut":
                        server.sendall(data[: len(data) // 2])
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        client.close()
                        break
                self.delay.wait(60)
                server.sendall(data)
        except OSError:
            pass
        self.shut(client, server)

    def answers(self, client, server):
        try:
            while data := server.recv(1 << 16):
                client.sendall(data)
        except OSError:
            pass
        self.shut(client, server)

    def shut(self, *ends):
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.delay.set()
        self.shut(*self.open)
        for end in self.open:
            end.close()
        for thread in self.threads:
            thread.join(30)


@pytest.fixture
def network(moto_port):
    """What stands between a client and AWS."""
    proxy = Proxy(moto_port)
    yield proxy
    proxy.close()
