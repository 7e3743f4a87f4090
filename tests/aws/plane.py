"""A stub of SageMaker for tests: moto's services on one loopback port, with training jobs that are checked and run.

It prints its address as one line, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import signal
import sys
import threading
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

# Roles for SageMaker have managed policies; moto reads this on import.
os.environ.setdefault("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")

import boto3
from answers import ACCOUNT, answer, keys
from botocore.config import Config
from faults import ITSELF, Faults, Gate
from moto.iam.models import iam_backends
from moto.logs.models import logs_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.models import s3_backends
from moto.sagemaker.models import sagemaker_backends
from moto.secretsmanager.models import secretsmanager_backends
from training import SETTINGS
from werkzeug.serving import make_server


class Plane:
    """The state behind the address of the plane."""

    def __init__(self, root, *, run):
        self.root, self.faults, self._run = Path(root), Faults(), run
        self.jobs = {}
        self.lock = threading.Lock()
        self.settings = copy.deepcopy(SETTINGS) | {"run": run}
        application = Gate(DomainDispatcherApplication(create_backend_app), self.faults, self.control)
        self.server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def control(self, verb, arguments):
        """Execute a request of a test to the plane itself."""
        if verb == "fault":
            self.faults.add(arguments)
        elif verb == "clear":
            self.faults.clear()
        elif verb == "settings":
            self.settings |= arguments
        elif verb == "calls":
            return "200 OK", list(self.faults.calls)
        elif verb == "interrupt":
            self.find(arguments["job"]).ask("interrupt")
        elif verb == "log":
            self.find(arguments["job"]).print(arguments.get("host", "algo-1"), arguments["lines"])
        elif verb == "reset":
            self.reset()
        else:
            return "404 NOT FOUND", {"unknown": verb}
        return "200 OK", {}

    def find(self, name):
        return next(job for (_, _, job_name), job in self.jobs.items() if job_name == name)

    def reset(self):
        """Restore the state at the start."""
        self.close_jobs()
        self.faults.clear()
        self.settings.clear()
        self.settings |= copy.deepcopy(SETTINGS) | {"run": self._run}
        for backends in (s3_backends, logs_backends, sagemaker_backends, secretsmanager_backends):
            for regions in backends.values():
                for backend in regions.values():
                    backend.reset()
        # IAM takes a second to load the managed policies: only the objects of tests are removed.
        iam = iam_backends[ACCOUNT]["aws"]
        iam.roles.clear()
        for arn in [arn for arn in iam.managed_policies if f":{ACCOUNT}:" in arn]:
            del iam.managed_policies[arn]

    def close_jobs(self):
        with self.lock:
            jobs, self.jobs = list(self.jobs.values()), {}
        for job in jobs:
            job.ask("kill")
        for job in jobs:
            job.close()

    def platform(self, account, region):
        """Return the platform of the jobs of a region."""
        env = {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return types.SimpleNamespace(
            settings=self.settings,
            root=self.root,
            s3=self._s3(),
            keys=keys,
            env=env,
            account=account,
            region=region,
        )

    @functools.cache  # noqa: B019 - there is one plane
    def _s3(self):
        return boto3.client(
            "s3",
            "us-east-1",
            endpoint_url=self.address,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",  # noqa: S106
            config=Config(user_agent_extra=ITSELF, proxies={}),
        )


class _Handler(MotoRequestHandler):
    """A request handler that prints no log."""

    def log(self, *args):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True, help="where hosts have their folders")
    parser.add_argument(
        "--no-run", action="store_true", help="bundles are not run unless a test switches it on"
    )
    options = parser.parse_args()
    plane = Plane(options.root, run=not options.no_run)
    answer(plane)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=plane.server.serve_forever, daemon=True).start()
    print(plane.address, flush=True)
    try:
        sys.stdin.read()
    finally:
        plane.close_jobs()


if __name__ == "__main__":
    main()
