"""The plan of a Ray job: the request that is submitted, and the run that the job carries to its driver and nodes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

from typing_extensions import override

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.job_launcher import SentFolder
from accel_cli.launchers.manifest import PatchRules, format_manifests, merge_patch
from accel_cli.launchers.node_launch import build_command, build_rendezvous_options
from accel_cli.launchers.source_files import describe_selection
from accel_cli.planning.network import Endpoint
from accel_cli.planning.nodes import PORT
from accel_cli.planning.plan import JobPlan, join_for_bash
from accel_runtime.environment.settings import __version__, find_nearest

__all__ = ["ARCHIVE", "RUN_FILE", "STOP_MARGIN_S", "RayJobPlan", "RayRun", "write_folder"]

RUN_FILE, ARCHIVE = "accel-run.json", "accel-source.tar.gz"
"""The files in the working directory of the job: the run, and the source if it is sent."""
_RUNTIME_ENV = {
    "working_dir": "Set launcher.source_dir.",
    "excludes": "Set launcher.exclude.",
    "env_vars.RAY_JOB_STOP_WAIT_TIME_S": "Set launcher.shutdown_timeout.",
}
"""What to do instead of setting a member of the runtime environment that accel sets."""
_SUBMISSION = {
    "entrypoint": "Pass the script to accel launch.",
    "submission_id": "Set launcher.job_name.",
    "job_id": "Set launcher.job_name.",
    "runtime_env": "Set launcher.runtime_env.",
}
"""The same of an argument of Ray's client."""
_INSTALLERS = ("pip", "uv", "conda")
"""Members of the runtime environment that install packages, of which Ray takes one."""
STOP_MARGIN_S = 10
"""Seconds beyond `shutdown_timeout` that nodes, and the driver after them, have to end."""


@dataclass(frozen=True, kw_only=True)
class RayRun:
    """A run on the nodes of a cluster, which the job carries as a file."""

    nnodes: int
    job_id: str = ""
    """The id of the job, known when it is submitted."""
    bundle: Mapping[str, float]
    """The resources that each node reserves."""
    options: tuple[str, ...]
    """Options of `accel launch` that are the same on all nodes."""
    target: tuple[str, ...]
    """The script and its arguments, as `accel launch` takes them."""
    env: Mapping[str, str]
    """The variables of the nodes."""
    sends_source: bool
    """True if the job carries the source."""
    folder: str | None
    """The working directory of the nodes, in the source if that is sent; None for that of the job."""
    script: str | None
    """The file that must exist on the nodes; None for a module or program."""
    fixed_ranks: bool
    """True if the nodes get their ranks from their bundles; restarts do not allow it."""
    max_retries: int
    """The number of times that the run starts again on other nodes after one was lost."""
    start_timeout: int
    shutdown_timeout: int
    version: str = __version__

    def build_command(
        self, python: str, rank: int, endpoint: Endpoint, run_id: str, *, resume: bool
    ) -> tuple[str, ...]:
        """Return the command `accel launch` of a node."""
        fixed_rank = rank if self.fixed_ranks else None
        words = [*build_rendezvous_options(self.nnodes, fixed_rank, str(endpoint), run_id)]
        if self.nnodes > 1 and endpoint.is_loopback:  # all nodes of a cluster may be on one machine
            words += ["--set", "launcher.allow_loopback=true"]
        if resume:
            words.append("--resume")
        return build_command(python, *words, *self.options, *self.target)

    def to_json(self) -> str:
        """Return the run as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RayRun:
        """Return the run that `to_json` wrote."""
        data = json.loads(text)
        if data["version"] != __version__:
            raise AccelError(
                f"Cannot start the run: {sys.executable} has accel {__version__}, and the job was submitted with {data['version']}. "
                "Install the same version on all nodes."
            )
        return cls(**{**data, "options": tuple(data["options"]), "target": tuple(data["target"])})


@dataclass(frozen=True, kw_only=True)
class RayJobPlan(JobPlan):
    """A job of a Ray cluster."""

    address: str
    address_source: str
    """The variable that sets the address; empty if the profile does."""
    name: str
    """The start of its id."""
    python: str
    """The interpreter of the driver."""
    requirements: tuple[str, ...]
    """Packages that Ray installs for the job."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """The patch of the runtime environment."""
    submission: Mapping[str, Any] = field(default_factory=dict)
    """The patch of the arguments of Ray's client."""
    sent: SentFolder | None
    """The folder whose files it carries; None if it carries none."""
    run: RayRun

    @property
    def entrypoint(self) -> str:
        """The command of the driver; everything else is in a file, since everyone sees the command of a job."""
        return f"exec {self.python} -m accel_cli.extensions.ray"

    def build_runtime_env(self, folder: str) -> dict[str, Any]:
        """Return the runtime environment of Ray, with the folder that is uploaded."""
        wait_s = self.run.shutdown_timeout + 2 * STOP_MARGIN_S
        # Ray kills the driver of a stopped job after 3 seconds otherwise.
        runtime_env: dict[str, Any] = {
            "working_dir": folder,
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)},
        }
        if self.requirements:
            runtime_env["pip"] = list(self.requirements)
        installers = (
            dict.fromkeys(_INSTALLERS, "Remove it, or launcher.requirements.") if self.requirements else {}
        )
        rules = PatchRules("launcher.runtime_env", reserved={**_RUNTIME_ENV, **installers})
        merged: dict[str, Any] = merge_patch(runtime_env, self.runtime_env, rules)
        return merged

    def build_request(self, folder: str, job_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments of `submit_job`.

        Args:
            folder: The folder that is uploaded.
            job_id: The id of the job.
            metadata: What Ray keeps with the job.
        """
        request = {"submission_id": job_id, "entrypoint": self.entrypoint, "metadata": {**metadata}}
        reserved = {**_SUBMISSION, **{f"metadata.{name}": "Remove it." for name in metadata}}
        merged = merge_patch(request, self.submission, PatchRules("launcher.job", reserved=reserved))
        return {**merged, "runtime_env": self.build_runtime_env(folder)}

    def check_request(self, request: Mapping[str, Any]) -> None:
        """Raise if Ray does not know what the profile adds to a request; without Ray, a note says that it was not checked.

        Raises:
            UsageError: An argument or a member is unknown, or Ray refuses its value.
        """
        if not (self.runtime_env or self.submission):
            return
        try:
            from ray.job_submission import JobSubmissionClient  # noqa: PLC0415 - takes a second
            from ray.runtime_env import RuntimeEnv  # noqa: PLC0415
        except ImportError:
            console.note("launcher.runtime_env and launcher.job were not checked: Ray is not installed")
            return
        known = {
            "launcher.job": set(signature(JobSubmissionClient.submit_job).parameters) - {"self"},
            "launcher.runtime_env": {name for name in RuntimeEnv.known_fields if not name.startswith("_ray")},
        }
        for key, patch in (("launcher.job", self.submission), ("launcher.runtime_env", self.runtime_env)):
            for name in patch:
                if name not in known[key]:
                    nearest = find_nearest(name, sorted(known[key]))
                    hint = f" Did you mean {nearest}?" if nearest else ""
                    raise UsageError(
                        f"Invalid {key}.{name}: Ray does not know it.{hint} Correct it, or install the Ray of the cluster."
                    )
        try:
            # The folder is a name only, as nothing is uploaded.
            RuntimeEnv(**{**request["runtime_env"], "working_dir": None})
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"Invalid launcher.runtime_env: Ray refuses it: {' '.join(str(error).split())}."
            ) from None

    @override
    def describe(self) -> list[str]:
        run = self.run
        resources = ", ".join(f"{key}: {value:g}" for key, value in run.bundle.items())
        command = run.build_command(self.python, 0, Endpoint("ADDRESS", PORT), "ID", resume=False)
        return [
            f"cluster: {self.address}{f' (from {self.address_source})' if self.address_source else ''}",
            f"placement group: STRICT_SPREAD, {run.nnodes} x {{{resources}}}",
            f"command of the first node: {join_for_bash(command)}",
        ]

    @override
    def preview(self) -> str:
        """Return the request as YAML, secrets masked, with the files that the job carries."""
        env = {key: console.mask_secrets(key, value) for key, value in self.run.env.items()}
        submission = self.build_request(
            f"{RUN_FILE}{f', {ARCHIVE}' if self.sent else ''}", f"{self.name}-...", {}
        )
        self.check_request(submission)
        variables = submission["runtime_env"]["env_vars"]
        variables |= {key: console.mask_secrets(key, str(value)) for key, value in variables.items()}
        request = {
            **{name: value for name, value in submission.items() if value != {}},
            RUN_FILE: json.loads(replace(self.run, env=env).to_json()),
        }
        files = describe_selection(self.sent.select(self.run.env)) if self.sent else ()
        return "\n".join([format_manifests([request]), *files])


@contextmanager
def write_folder(job: RayJobPlan, job_id: str) -> Iterator[Path]:
    """Yield a temporary folder with the files of a job, for Ray to upload.

    The source is an archive: Ray would leave out files that git ignores, and jobs with equal files share a folder.
    """
    with tempfile.TemporaryDirectory(prefix="accel-") as scratch:
        folder = Path(scratch)
        run = replace(job.run, job_id=job_id)
        (folder / RUN_FILE).touch(mode=0o600)  # Ray keeps the mode
        (folder / RUN_FILE).write_text(run.to_json(), encoding="utf-8")
        if job.sent:
            job.sent.write(run.env, folder / ARCHIVE)
        yield folder
