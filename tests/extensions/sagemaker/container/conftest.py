"""Hosts of a SageMaker job: each has a folder that replaces `/opt/ml`, a bundle, and a process."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path

import pytest
from aws.hosts import ARGUMENTS, ENTRYPOINT, Host
from support.processes.waits import limit, read_until

from accel_cli.extensions.sagemaker import bundle
from accel_cli.extensions.sagemaker.launcher import SageMaker
from accel_cli.extensions.sagemaker.request import build_job_spec
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.planning.machine import Machine
from accel_runtime.environment.settings import Settings

OPT = Path("/opt/ml")
# torch tells machines apart by their address, which these two share, and their process ids: those begin elsewhere.
INSIDE = """
mount --bind "$1" /opt/ml && mount --bind "$2" /etc/hosts && hostname aws || exit
[ "$3" = algo-1 ] || /bin/true
shift 3
exec "$@"
"""
UNSHARE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")


class Container(Host):
    """A host whose bundle the tests write."""

    first = None
    """The id of the first process in its namespace."""

    def start(self, python=sys.executable, **env):
        """Start the host with the Python of an image, by default this one, which has all packages."""
        inherited = {
            key: value for key, value in os.environ.items() if key not in {"ACCEL_HOME", "PIP_FIND_LINKS"}
        }
        env = {**inherited, "TRAINING_JOB_NAME": f"job-{os.getpid()}", "PIP_NO_INDEX": "1", **env}
        return self.launch([python, self.root / "input" / "data" / "accel" / "entry.py"], env)

    def contain(self, table, port):
        """Start the host in namespaces, as the first process of a container whose `/opt/ml` is the root."""
        entry = [*ENTRYPOINT, *ARGUMENTS]
        self.launch(
            [*UNSHARE, "sh", "-c", INSIDE, "sh", self.root, table, self.name, *entry],
            # One thread for each: two hosts that each take all processors for their own wait for one another.
            {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "TRAINING_JOB_NAME": "job",
                "AWS_REGION": "us-east-1",
                "SM_MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PIP_NO_INDEX": "1",
            },
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
        created, folder = Container(root, name), root / "input" / "data" / "accel"
        created.configure(names)
        shutil.copy(self._accel.source / "accel_cli" / "extensions" / "sagemaker" / "entry.py", folder)
        bundle.write_archive(self._accel, folder / "accel.tar.gz")
        (folder / "job.json").write_text(json.dumps(spec))
        packed(source, folder / "source.tar.gz")
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


@pytest.fixture
def manager(aws, monkeypatch):
    """Secrets in Secrets Manager, for this process and for containers: a text, the ARN of an object, and bytes."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    client = aws.client("secretsmanager")
    client.create_secret(Name="wandb", SecretString="s3cr3t")
    client.create_secret(Name="binary", SecretBinary=b"\0")
    text = '{"key": "inner", "number": 7, "null": null}'
    return {
        "wandb": "s3cr3t",
        "arn": client.create_secret(Name="object", SecretString=text)["ARN"],
        "object": text,
    }


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
