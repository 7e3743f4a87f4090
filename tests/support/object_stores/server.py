"""S3 servers of tests, on loopback: moto's, and Ceph's object gateway in `make test-services`.

moto compares the condition of a put and then writes, without a lock. In 240 races of six writers one succeeded each time, as
in Ceph; a thread that is suspended in between could make it two, so that the proxy forwards conditional puts to moto one after
the other. An ETag is the MD5 sum of the content: an object that is written again with the same bytes keeps it.
Differences that matter to tests:

| | Ceph 16.2 | moto 5.2 |
| --- | --- | --- |
| signatures | checked: a wrong secret is an error | not checked |
| session tokens | ignored | ignored |
| `If-None-Match: *` of a put | checked | checked, without a lock |
| `If-Match` of a put | checked, only without the quotes that ETags have: the proxy removes them from answers | checked, without a lock |
| a put that loses a race | error 500, and 412 when it is tried again | 412 |
| `If-Match` of a delete | ignored | checked |
| 32 MiB objects, one client on two busy cores | 160 MB/s written, 510 MB/s read | 100 MB/s written, 340 MB/s read |
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from support.processes.children import free_port
from support.processes.waits import wait_until

__all__ = [
    "ACCESS_KEY",
    "REGION",
    "SECRET_KEY",
    "SERVERS",
    "CephServer",
    "MotoServer",
    "S3Server",
    "client_variables",
]

ACCESS_KEY = "AKIATESTSOFACCELKEY0"
SECRET_KEY = "secret/of+the/tests/of+accel/0123456789ab"
REGION = "us-east-1"
_CLUSTER = "6c9ca7b1-31b0-4d2e-8a4b-c5a0c1a3b001"
_DISK = "6c9ca7b1-31b0-4d2e-8a4b-c5a0c1a3b002"
_CONFIGURATION = """\
[global]
fsid = {cluster}
run dir = {folder}
admin socket =
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
keyring = {folder}/keyring
mon host = v2:127.0.0.1:{monitor_port}
mon data = {folder}/mon
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth allow insecure global id reclaim = false
# One copy in memory, in one placement group of each pool.
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 8589934592
osd class load list = *
osd class default list = *
# Changes of the cluster at once; the disk of the tests may be nearly full.
paxos propose interval = 0.01
paxos min wait = 0.01
mon data avail warn = 1
mon data avail crit = 1
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable apis = s3
rgw thread pool size = 32
rgw override bucket index max shards = 1
# Memory of removed objects is free after a few seconds.
rgw gc obj min wait = 2
rgw gc processor period = 2
rgw gc processor max time = 2
"""

_END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of sys/prctl.h
os.execvp(sys.argv[1], sys.argv[1:])
"""


def client_variables(address):
    """Return the environment variables of clients that use a server or proxy at an address."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@dataclass
class S3Server:
    """A server in processes of its own. They end with `close`, and with the thread that has started them."""

    folder: Path
    address: str = ""
    is_atomic = True
    """Whether of several conditional puts at the same time one succeeds; otherwise a proxy must serialize them."""
    removes_quotes = False
    """Whether a proxy must remove the quotes of ETags from answers, since the server compares `If-Match` without them."""
    _processes: list[subprocess.Popen] = field(default_factory=list)
    _resources: ExitStack = field(default_factory=ExitStack)

    def start(self):
        """Start the server, wait until it answers, and return it."""
        try:
            self._start()
            wait_until(self._answers, process=self._processes[-1], description=self._read_log)
        except BaseException:
            self.close()
            raise
        return self

    def _start(self):
        raise NotImplementedError

    def _answers(self):
        from urllib.error import URLError
        from urllib.request import ProxyHandler, build_opener

        with contextlib.suppress(URLError, ConnectionError):
            return build_opener(ProxyHandler({})).open(self.address, timeout=10).status == 200
        return False

    def _read_log(self):
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.out")))

    def close(self):
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()
        self._resources.close()
        self.__dict__.pop("client", None)

    @cached_property
    def client(self):
        """A boto3 client of the server, without faults."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            REGION,
            endpoint_url=self.address,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(proxies={}, s3={"addressing_style": "path"}),
        )

    def create_bucket(self):
        """Create an empty bucket and return its name."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name

    def read(self, bucket, key):
        """Return the bytes of an object."""
        return self.client.get_object(Bucket=bucket, Key=key)["Body"].read()

    def list_sizes(self, bucket, prefix=""):
        """Return the sizes of the objects of a bucket by their keys."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", ())}

    def list_uploads(self, bucket):
        """Return the keys of multipart uploads that were neither completed nor aborted."""
        answer = self.client.list_multipart_uploads(Bucket=bucket)
        return [upload["Key"] for upload in answer.get("Uploads", ())]

    def _spawn(self, *command):
        """Start a process that ends with this one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = Path(command[0]).name
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHON"))
        }
        with (self.folder / f"{name}-{len(self._processes)}.out").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _END_WITH_PARENT, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environ,
                )
            )


class MotoServer(S3Server):
    """The server of moto, with all services."""

    is_atomic = False

    def _start(self):
        port = self._resources.enter_context(free_port())
        self.address = f"http://127.0.0.1:{port}"
        self._spawn(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))


class CephServer(S3Server):
    """Ceph's gateway for S3 with a monitor and one disk in memory, which start in a second."""

    removes_quotes = True

    def _start(self):
        self._write_configuration()
        keyring, monitors = self.folder / "keyring", self.folder / "monmap"
        self._call(
            "ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"
        )
        rights = ("--cap", "mon", "allow *", "--cap", "osd", "allow *")
        self._call("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *rights)
        address = f"[v2:127.0.0.1:{self._monitor_port}]"
        self._call("monmaptool", "--create", "--fsid", _CLUSTER, "--addv", "a", address, monitors)
        self._call("ceph-mon", *self._options, "--mkfs", "-i", "a", "--monmap", monitors)
        self._spawn("ceph-mon", *self._options, "-i", "a", "-f")
        self._start_disk()
        shutil.copy(keyring, self.folder / "rgw" / "keyring")
        keys = ("--access-key", ACCESS_KEY, "--secret", SECRET_KEY, "--max-buckets", "0")
        user = ("--uid", "tests", "--display-name", "tests")
        self._call("radosgw-admin", *self._options, "user", "create", *user, *keys)
        self._spawn("radosgw", *self._options, "-n", "client.admin", "-f")

    def _start_disk(self):
        key = self._call("ceph-authtool", "--gen-print-key").strip()
        secret = json.dumps({"cephx_secret": key})
        self._call("ceph", *self._options, "osd", "new", _DISK, "-i", "-", text=secret)
        (self.folder / "osd" / "keyring").write_text(f"[osd.0]\n\tkey = {key}\n")
        options = ("--keyring", str(self.folder / "osd" / "keyring"), *self._options, "-i", "0")
        self._call("ceph-osd", *options, "--mkfs", "--osd-uuid", _DISK)
        self._spawn("ceph-osd", *options, "-f")

    @property
    def _options(self):
        return ("-c", str(self.folder / "ceph.conf"))

    def _write_configuration(self):
        port, self._monitor_port = (self._resources.enter_context(free_port()) for _ in range(2))
        self.address = f"http://127.0.0.1:{port}"
        for name in ("mon", "osd", "rgw"):
            (self.folder / name).mkdir(parents=True)
        values = {
            "cluster": _CLUSTER,
            "folder": self.folder,
            "port": port,
            "monitor_port": self._monitor_port,
        }
        (self.folder / "ceph.conf").write_text(_CONFIGURATION.format(**values))

    @staticmethod
    def _call(*command, text=None):
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        process = subprocess.run(
            [str(each) for each in command],
            input=text,
            capture_output=True,
            text=True,
            env=environ,
            check=False,
            timeout=120,
        )
        assert process.returncode == 0, f"{command[0]}: {process.stderr[-2000:]}"
        return process.stdout


SERVERS = {"moto": MotoServer, "Ceph": CephServer}
