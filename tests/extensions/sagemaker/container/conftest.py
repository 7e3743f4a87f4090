"""Hosts of a SageMaker job: each has a folder that replaces `/opt/ml`, a bundle, and a process."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
import venv
import zipfile
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import distribution
from pathlib import Path

import pytest
from support.waits import limit, read_until

from accel_cli.extensions.sagemaker import bundle
from accel_cli.extensions.sagemaker.launcher import SageMaker
from accel_cli.extensions.sagemaker.request import build_job_spec
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.planning.machine import Machine
from accel_runtime.environment.settings import Settings

OPT = Path("/opt/ml")
# ContainerEntrypoint and ContainerArguments of the request.
ENTRYPOINT = (
    "/bin/sh",
    "-c",
    "exec $(command -v python3 || command -v python) /opt/ml/input/data/accel/entry.py",
)
# torch tells machines apart by their address, which these two share, and their process ids: those begin elsewhere.
INSIDE = """
mount --bind "$1" /opt/ml && mount --bind "$2" /etc/hosts && hostname aws || exit
[ "$3" = algo-1 ] || /bin/true
shift 3
exec "$@"
"""
UNSHARE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")


class Host:
    """A host: its root folder, and the first process of its container."""

    def __init__(self, root, name):
        self.root, self.name = root, name
        self.process = self.first = None

    @property
    def failure(self):
        """Return the failure reason that the platform would read, or None."""
        file = self.root / "output" / "failure"
        return file.read_text() if file.exists() else None

    def start(self, python=sys.executable, **env):
        """Start the host with the Python of an image, by default this one, which has all packages."""
        inherited = {
            key: value for key, value in os.environ.items() if key not in {"ACCEL_HOME", "PIP_FIND_LINKS"}
        }
        entry = self.root / "input" / "data" / "accel" / "entry.py"
        self.process = subprocess.Popen(
            [str(python), str(entry)],
            env={**inherited, "TRAINING_JOB_NAME": f"job-{os.getpid()}", "PIP_NO_INDEX": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
        )
        return self

    def contain(self, table, port):
        """Start the host in namespaces, as the first process of a container whose `/opt/ml` is the root."""
        command = [*UNSHARE, "sh", "-c", INSIDE, "sh", str(self.root), str(table), self.name, *ENTRYPOINT]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            command,
            # One thread for each: two hosts that each take all processors for their own wait for one another.
            env={
                "PATH": path,
                "TRAINING_JOB_NAME": "job",
                "AWS_REGION": "us-east-1",
                "SM_MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PIP_NO_INDEX": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (children_text := children.read_text()):
            assert self.process.poll() is None, self.process.stdout.read()
            time.sleep(0.01)
        self.first = int(children_text)
        return self

    def until(self, word, seconds=180):
        """Read the output until it contains a word."""
        return read_until(self.process, re.escape(word), seconds=seconds)

    def end(self, seconds=180):
        """Return the exit code, and the output since the last read."""
        output, _ = self.process.communicate(timeout=limit(seconds))
        return self.process.returncode, output

    def close(self):
        if self.process:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(10)
                except subprocess.TimeoutExpired:
                    self.process.kill()
            self.process.wait()
            self.process.stdout.close()


class Containers:
    """Creates hosts, and ends them."""

    def __init__(self, folder, accel):
        self.folder, self._accel, self._made = folder, accel, []

    def hosts(self, *names, source, kind="script", target="train.py", args=(), section=(), **spec):
        """Create the hosts of one job."""
        launcher = SageMaker(instance_count=len(names), **{"ranks": "all", **dict(section)})
        # The paths of the source are not those of this folder.
        arguments = (
            target,
            tuple(args),
            kind,
            Settings(device="cpu", shared_files=False),
            {},
            {},
            Machine(2),
            sys.executable,
        )
        launch = LaunchSpec(*arguments, is_builtin=True)
        content = {**build_job_spec(launcher, launch), "packages": bundle.list_requirements(), **spec}
        created = [self.host(name, names, source, content) for name in names]
        return created[0] if len(created) == 1 else created

    def host(self, name, names, source, spec):
        root = self.folder / f"ml-{name}"
        folder, config = root / "input" / "data" / "accel", root / "input" / "config"
        for each in (folder, config):
            each.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._accel.source / "accel_cli" / "extensions" / "sagemaker" / "entry.py", folder)
        bundle.write_archive(self._accel, folder / "accel.tar.gz")
        (folder / "job.json").write_text(json.dumps(spec))
        packed(source, folder / "source.tar.gz")
        resources = {"hosts": list(names), "current_host": name, "network_interface_name": "lo"}
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        (config / "inputdataconfig.json").write_text(json.dumps({"accel": {}}))
        (config / "hyperparameters.json").write_text("{}")
        created = Host(root, name)
        self._made.append(created)
        return created

    def make_image(self, *requirements):
        """Return a Python that has only the given packages, as links, and its package folder."""
        venv.create(self.folder / "image")
        site = Path(sysconfig.get_path("purelib", vars={"base": str(self.folder / "image")}))
        for each in closure(requirements).values():
            for name in {file.parts[0] for file in each.files} - {"..", "__pycache__"}:
                if (path := Path(each.locate_file(name))).exists():
                    (site / name).symlink_to(path)
        return self.folder / "image" / "bin" / "python", site

    def write_wheels(self, host):
        """Write wheels of the installed packages that accel needs into the bundle of a host."""
        folder = host.root / "input" / "data" / "accel" / "wheels"
        folder.mkdir()
        for each in closure(bundle.list_requirements()).values():
            tags = re.findall(r"^Tag: (.*)$", each.read_text("WHEEL"), re.MULTILINE)
            name = f"{each.metadata['Name'].replace('-', '_')}-{each.version}-{tags[-1]}.whl"
            with zipfile.ZipFile(folder / name, "w") as wheel:
                for file in each.files:
                    if ".." not in file.parts and "__pycache__" not in file.parts:
                        wheel.write(each.locate_file(file), str(file))

    def close(self):
        for host in self._made:
            host.close()


def packed(source, file):
    """Pack the files of a source into an archive."""
    folder = file.parents[3] / "source"
    for name, text in source.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with tarfile.open(file, "w:gz") as archive:
        archive.add(folder, ".")


@pytest.fixture
def containers(tmp_path):
    """Create the hosts of a job, and end them after the test."""
    hosts_of_job = Containers(tmp_path, bundle.select_accel())
    yield hosts_of_job
    hosts_of_job.close()


def closure(requirements):
    """Return the installed distributions that the requirements need, with themselves, by name."""
    distributions, remaining = {}, list(requirements)
    while remaining:
        name = re.match(r"[\w.-]+", remaining.pop())[0].lower().replace("_", "-")
        # Markers are for other systems and extras.
        if name not in distributions and name != "colorama":
            distributions[name] = distribution(name)
            remaining += [text for text in distributions[name].requires or () if ";" not in text]
    return distributions


ARN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-AbCdEf"
KEPT = {"wandb": "s3cr3t", ARN: '{"key": "inner", "number": 7, "null": null}', "binary": None}


class Manager(BaseHTTPRequestHandler):
    """A stub of AWS Secrets Manager."""

    def do_POST(self):
        secret_id = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["SecretId"]
        code, response = 400, {"__type": "ResourceNotFoundException", "Message": "can't find it"}
        if secret_id == "forbidden":
            response = {"__type": "AccessDeniedException", "Message": "User: arn:... is not authorized"}
        elif secret_id in KEPT:
            code, text = 200, KEPT[secret_id]
            response = {
                "Name": secret_id,
                **({"SecretBinary": "AAAA"} if text is None else {"SecretString": text}),
            }
        body = json.dumps(response).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def address():
    with HTTPServer(("127.0.0.1", 0), Manager) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def manager(address, monkeypatch):
    """A stub of Secrets Manager that boto3 uses, here and in containers; yields its secrets."""
    pytest.importorskip("boto3", reason="boto3 is not installed")
    for name, value in {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return KEPT


@pytest.fixture
def names_of_hosts(tmp_path):
    """Names of hosts in containers."""
    with shared(OPT):
        table = tmp_path / "table"
        table.write_text("127.0.0.1 localhost algo-1 algo-2\n")
        yield table


@contextmanager
def shared(folder):
    """Hold a folder until its last user is done.

    Who takes away a folder takes away what other namespaces have mounted there.
    """
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_SH)
        folder.mkdir(exist_ok=True)
        yield
        with suppress(OSError):  # others have it, or it holds something
            fcntl.flock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.rmdir()
    finally:
        os.close(parent)
