"""The first process of a SageMaker container: unpack the job, install its packages, and run `accel launch`.

The image's Python runs this file by path, before accel can be imported, so it needs the standard library only. It is
`ROOT/input/data/accel/entry.py`, next to the other files of the bundle; ROOT is `/opt/ml` on the platform.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_cli.launchers.node_launch import NodeLaunch

__all__ = ["JobError", "build_variables", "link_folder", "main", "needs_compat", "read_secrets"]

_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2
)  # fmt: skip
_CHANNEL = "accel"
_PORT = "7777"
"""The port of the rendezvous, as in SageMaker's own launchers."""
_PYTHON, _TORCH = (3, 11), (2, 9)
"""The oldest versions that accel runs on."""
_COMPAT, _DRIVER = Path("/usr/local/cuda/compat"), Path("/proc/driver/nvidia/version")
_PIP = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}
"""Options as variables, of which an old pip ignores those that it does not know."""


class JobError(Exception):
    """The job cannot start, for a reason that the user can change."""


class _StoppedError(BaseException):
    """A signal arrived before `accel launch` was started."""


class _Signals:
    """The handler of signals: they stop the preparation of this host, or are passed on to `accel launch`."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.is_preparing = True
        self.launch: NodeLaunch | None = None
        # The kernel drops signals for which process 1 has no handler.
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        if self.launch:
            self.launch.send_signal(number)
        elif self.is_preparing:
            raise _StoppedError


def main(root: Path) -> int:
    """Run the job on this host, and return its exit code: 128 + n if signal n ended it."""
    signals, host, reason = _Signals(), socket.gethostname(), ""
    try:
        try:
            resources = _read_config(root, "resourceconfig")
            host = resources["current_host"]
            command, environ = _prepare(root, resources)
        finally:
            signals.is_preparing = False
        code, reason = _run(root, command, environ, signals)
    except _StoppedError:
        code = 128 + signals.received[0]
    except Exception as error:  # noqa: BLE001 - the user sees nothing but the reason
        code, name = 1, "" if isinstance(error, JobError) else f"{type(error).__name__}: "
        reason = f"the job cannot start: {name}{error}"
    # A signal is how the platform ends a job, which is not a failure.
    if reason and not signals.received:
        _note(f"error: {reason}")
        (root / "output").mkdir(parents=True, exist_ok=True)
        # accel launch may have left a reason already.
        with suppress(FileExistsError), (root / "output" / "failure").open("x", encoding="utf-8") as file:
            file.write(f"{host}: {reason}")
    # A client that follows the job needs this line to know that the log of this host is complete.
    sys.stdout.write(f"accel: {host} ended with exit code {code}\n")
    sys.stdout.flush()
    return code


def _run(root: Path, command: list[str], environ: Mapping[str, str], signals: _Signals) -> tuple[int, str]:
    """Run `accel launch`, and return its exit code and the reason of a failure that it could not write itself."""
    from accel_cli.launchers.node_launch import NodeLaunch  # noqa: PLC0415 - unpacked by _prepare

    launch = NodeLaunch(root / "output" / "failure")
    process = launch.start(command, Path.cwd(), environ, streams=(None, None))
    signals.launch = launch
    for number in signals.received:
        launch.send_signal(number)
    end = launch.wait()
    if process.returncode >= 0:
        return end.code, ""
    name = signal.Signals(-process.returncode).name
    return end.code, f"accel launch was ended by {name}; SIGKILL is often the out-of-memory killer"


def _note(text: str) -> None:
    sys.stderr.write(f"accel: {text}\n")


def _read_config(root: Path, name: str) -> dict[str, Any]:
    """Read a file of the platform."""
    return dict(json.loads((root / "input" / "config" / f"{name}.json").read_text(encoding="utf-8")))


def _prepare(root: Path, resources: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Unpack and install everything, and return the command of `accel launch` and its environment."""
    _check_image()
    bundle, accel, code = root / "input" / "data" / _CHANNEL, root / "accel", root / "code"
    job = json.loads((bundle / "job.json").read_text(encoding="utf-8"))
    _unpack(bundle, accel, code)
    from accel_runtime.environment import settings as env  # noqa: PLC0415 - unpacked a moment ago

    for folder in (root / "model", root / "checkpoints", root / "output" / "data"):
        folder.mkdir(parents=True, exist_ok=True)
    options = [*job["options"], "--log-dir", str(root / "output" / "data" / "accel-runs")]
    if any((root / "checkpoints").iterdir()):
        options.append("--resume")
        _note(
            f"{root / 'checkpoints'} has checkpoints of an earlier run: accelerator.resume() continues from there"
        )
    for key, name in (("model_dir", "model"), ("checkpoint_dir", "checkpoints")):
        if job[key]:
            link_folder(code / job["cwd"] / job[key], root / name)
    environ = {**build_variables(root, resources), **os.environ, **job["settings"], **job["env"]}
    environ[env.NODE_NAME] = resources["current_host"]
    # Requirements that name accel are satisfied by the one that was sent.
    metadata = accel / f"accel_runtime-{env.__version__}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(
        f"Metadata-Version: 2.1\nName: accel-runtime\nVersion: {env.__version__}\n", encoding="utf-8"
    )
    environ["PYTHONPATH"] = _prepend(accel, environ.get("PYTHONPATH"))
    if needs_compat():
        environ["LD_LIBRARY_PATH"] = _prepend(_COMPAT, environ.get("LD_LIBRARY_PATH"))
    os.chdir(code)
    # Before pip, whose index may need one.
    environ |= read_secrets(job["secrets"], environ.get("AWS_REGION"))
    _install(job, bundle, accel, environ)
    os.chdir(job["cwd"])
    # A file of its own: with -m or -c, modules next to the script would hide those of Python.
    launcher = accel / "accel"
    launcher.write_text("from accel_cli.main import main\n\nmain()\n", encoding="utf-8")
    return [sys.executable, str(launcher), "launch", *options, "--", job["target"], *job["args"]], environ


def _unpack(bundle: Path, accel: Path, code: Path) -> None:
    """Unpack accel, from which everything else is imported, and the source."""
    for folder in (accel, code):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        shutil.unpack_archive(bundle / "accel.tar.gz", accel, "gztar")
    except Exception as error:
        raise JobError(f"accel.tar.gz is damaged: {error}. Launch again.") from error
    sys.path.insert(0, str(accel))
    from accel_cli.errors import AccelError  # noqa: PLC0415 - unpacked a moment ago
    from accel_cli.launchers.node_launch import unpack  # noqa: PLC0415 - as above

    try:
        unpack(bundle / "source.tar.gz", code)
    except AccelError as error:
        raise JobError(str(error)) from error


def _prepend(folder: Path, path: str | None) -> str:
    return f"{folder}{os.pathsep}{path}" if path else str(folder)


def _check_image() -> None:
    """Raise JobError if the image has no suitable Python and torch."""
    cure = "Choose another image (launcher.image_uri), or leave image_uri out and accel chooses one."
    if sys.version_info < _PYTHON:
        raise JobError(
            f"this image has Python {sys.version.split()[0]}, and accel needs 3.11 or newer. {cure}"
        )
    try:
        torch = version("torch")
    except PackageNotFoundError:
        raise JobError(f"this image has no torch for {sys.executable}. {cure}") from None
    if tuple(map(int, re.findall(r"\d+", torch)[:2])) < _TORCH:
        raise JobError(f"this image has torch {torch}, and accel needs 2.9 or newer. {cure}")


def build_variables(root: Path, resources: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that SageMaker's own containers set for scripts, and those of the network.

    Args:
        root: `/opt/ml`.
        resources: The content of `resourceconfig.json`.
    """
    # algo-2 comes before algo-10.
    hosts = sorted(resources["hosts"], key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    host, interface = resources["current_host"], resources.get("network_interface_name") or ""
    channels: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        channels = _read_config(root, "inputdataconfig")
        channels.pop(_CHANNEL, None)
    folders = {name: str(root / "input" / "data" / name) for name in channels}
    values: dict[str, Any] = {
        "INPUT_DIR": str(root / "input"),
        "INPUT_DATA_DIR": str(root / "input" / "data"),
        "INPUT_CONFIG_DIR": str(root / "input" / "config"),
        "MODEL_DIR": str(root / "model"),
        "OUTPUT_DIR": str(root / "output"),
        "OUTPUT_DATA_DIR": str(root / "output" / "data"),
        "CHECKPOINT_DIR": str(root / "checkpoints"),
        "HOSTS": hosts,
        "HOST_COUNT": len(hosts),
        "CURRENT_HOST": host,
        "CURRENT_HOST_RANK": hosts.index(host),
        "CURRENT_INSTANCE_TYPE": resources.get("current_instance_type", ""),
        "NETWORK_INTERFACE_NAME": interface,
        "NUM_GPUS": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "NUM_CPUS": len(os.sched_getaffinity(0)),
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": _PORT,
        "RESOURCE_CONFIG": resources,
        "INPUT_DATA_CONFIG": channels,
    }
    lower = {name.lower(): value for name, value in values.items()}
    values["TRAINING_ENV"] = {**lower, "channel_input_dirs": folders, "hyperparameters": {}}
    values |= {"CHANNELS": list(channels), "HPS": {}}
    for name, folder in folders.items():
        # SageMaker's toolkit keeps the characters of a name, and a shell accepts only some of them.
        for text in (name, re.sub(r"[^A-Za-z0-9_]", "_", name)):
            values[f"CHANNEL_{text.upper()}"] = folder
    texts = {
        f"SM_{name}": value if isinstance(value, str) else json.dumps(value) for name, value in values.items()
    }
    if len(hosts) > 1 and interface in {name for _, name in socket.if_nameindex()}:
        texts |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    # All hosts have the same host name, by which NCCL would take them for one node.
    return {**texts, "NCCL_HOSTID": host}


def needs_compat(driver: Path = _DRIVER, compat: Path = _COMPAT) -> bool:
    """Return True if the driver of this host is older than the driver libraries of the image."""
    try:
        loaded = re.search(
            r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", driver.read_text(encoding="utf-8")
        )
        libraries = [re.fullmatch(r"libcuda\.so\.(\d+(?:\.\d+)+)", path.name) for path in compat.iterdir()]
    except OSError:
        return False
    versions = [tuple(map(int, match[1].split("."))) for match in (loaded, *libraries) if match]
    return bool(loaded) and versions[0] < max(versions)


def link_folder(folder: Path, target: Path) -> None:
    """Replace a folder of the source by a link to one that the platform keeps.

    Args:
        folder: The folder of the source, existing or not; its files are copied.
        target: The folder of the platform; files that it has already stay.
    """
    for path in sorted(folder.rglob("*")):
        copy = target / path.relative_to(folder)
        if path.is_dir() and not path.is_symlink():
            copy.mkdir(exist_ok=True)
        elif not os.path.lexists(copy):
            shutil.copy2(path, copy, follow_symlinks=False)
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(target, target_is_directory=True)


def read_secrets(secrets: Mapping[str, str], region: str | None) -> dict[str, str]:
    """Read the values of secrets from AWS Secrets Manager.

    Args:
        secrets: The name or ARN of each secret, by variable; `ARN:key::` is the value of that key in a JSON object.
        region: Their region.

    Raises:
        JobError: A secret cannot be read. The message has no value.
    """
    values = {}
    for name, secret in secrets.items():
        # An ARN has seven parts, and the key comes after them, as in a task of ECS.
        parts = secret.split(":") if secret.startswith("arn:") else [secret]
        key = parts[7] if len(parts) > 7 else ""  # noqa: PLR2004 - as above
        try:
            client = importlib.import_module("boto3").client("secretsmanager", region_name=region)
            text = client.get_secret_value(SecretId=":".join(parts[:7])).get("SecretString")
        except ImportError:
            raise JobError(
                f"secrets.{name}: this image has no boto3 to read it. Choose an image that has it."
            ) from None
        except Exception as error:  # noqa: BLE001 - botocore, which may be missing, has the classes
            raise JobError(
                f"secrets.{name}: {secret} cannot be read: {type(error).__name__}: {error}"
            ) from None
        if text is None:
            raise JobError(f"secrets.{name}: {secret} is binary, and a variable holds text")
        try:
            value = json.loads(text)[key] if key else text
        except (LookupError, TypeError, ValueError):
            raise JobError(f"secrets.{name}: {secret} is not a JSON object with the key {key}") from None
        if value is None:
            raise JobError(f"secrets.{name}: {secret} has no value for the key {key}")
        values[name] = value if isinstance(value, str) else json.dumps(value)
    return values


def _install(job: Mapping[str, Any], bundle: Path, accel: Path, environ: Mapping[str, str]) -> None:
    """Install the packages of accel and of the job that the image lacks, and keep the image's torch.

    Raises:
        JobError: pip fails.
    """
    constraints, errors, requirements = accel / "constraints.txt", accel / "pip.log", job["requirements"]
    constraints.write_text(f"torch=={version('torch')}\n", encoding="utf-8")
    options = ["-c", str(constraints), "--find-links", str(bundle / "wheels"), *job["packages"]]
    # The wheels of the bundle are enough for accel in most images, and the network may be closed.
    attempts = [["-r", requirements]] if requirements else [["--quiet", "--no-index"], ["--quiet"]]
    for attempt in attempts:
        command = [sys.executable, "-m", "pip", "install", *attempt, *options]
        errors.touch(mode=0o600)
        with errors.open("wb") as file:
            if subprocess.run(command, env={**_PIP, **environ}, stderr=file, check=False).returncode == 0:
                return
    lines = errors.read_text(encoding="utf-8", errors="replace").splitlines()
    _note("\n".join(["pip failed:", *lines]))
    causes = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    what = f"the packages of {requirements}" if requirements else "the packages that accel needs"
    raise JobError(f"{what} could not be installed: {' '.join(causes[-3:])}")


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[3]))
