"""Install the wheel with one extra into the environment of this interpreter, as a user does, and check that it works.

    python -m venv /tmp/env && /tmp/env/bin/python tests/wheel.py dist/*.whl cloud --oldest

`none` is the wheel without an extra. `--oldest` installs the lowest versions that `pyproject.toml` allows of all packages that it
names, otherwise pip chooses. The job `wheel` of `.github/workflows/tests.yml` runs each extra of `CHECKS` with both. Standard
library only: the environment has nothing else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTION = PROJECT["name"]
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[\w,.-]+\])?(?:[^,]*?(?P<operator>>=|==)(?P<version>[\w.]+))?"
)

TRAIN = """\
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accel_runtime import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4) / 64), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
if "--save" in sys.argv:
    accelerator.save_state("checkpoint")
    accelerator.load_state("checkpoint")
accelerator.print("trained")
"""
_TRACKERS = """\
from accel_runtime.tracking import TRACKERS
missing = [name for name, entry in TRACKERS.items() if not entry.installed]
assert not missing, missing
for entry in TRACKERS.values():
    print(entry.load())
"""
_OBJECT_STORE = """\
from accel_runtime.extensions.object_stores import obstore_client
from obstore import exceptions, store
store.from_url("s3://bucket", aws_access_key_id="a", aws_secret_access_key="b", region="eu-west-1")
print(exceptions.BaseError)
"""
_SPANS = """\
from accel_cli.extensions.opentelemetry.sink import OpenTelemetry
import opentelemetry.sdk.metrics.export, opentelemetry.sdk.trace.export
import opentelemetry.exporter.otlp.proto.http.metric_exporter, opentelemetry.exporter.otlp.proto.http.trace_exporter
"""
_LAUNCH = "accel launch --cpu {train} --save"
_TWO = "accel launch --cpu --nproc-per-node 2 {train}"
_XLA = ("python -c 'import torch_xla'", "env PJRT_DEVICE=CPU accel launch --set launcher.kind=xla {train}")

CHECKS: dict[str, tuple[str, ...]] = {
    "none": (f"{_TWO} --save", "accel test --cpu --nproc-per-node 2", "accel migrate {train}"),
    "xla": _XLA,
    "tpu": (*_XLA, "python -c 'import libtpu'"),
    "sagemaker": (
        (
            "env AWS_DEFAULT_REGION=us-east-1 AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b accel launch --set launcher.kind=sagemaker "
            "--set launcher.instance_type=ml.g5.2xlarge --set launcher.role=arn:aws:iam::123456789012:role/accel --offline {train}"
        ),
        _LAUNCH,
    ),
    "kubernetes": (
        "python -c 'import kubernetes, accel_cli.extensions.kubernetes.service'",
        "accel launch --set launcher.kind=kubernetes --set launcher.image=example/image:1 --manifest {train}",
        _LAUNCH,
    ),
    "ray": (
        "python -c 'import accel_cli.extensions.ray.driver, accel_cli.extensions.ray.service, ray.job_submission, ray.runtime_env'",
        _LAUNCH,
    ),
    "deepspeed": (_TWO.replace("{", "--set deepspeed.stage=2 {"),),
    "report": (_LAUNCH, "accel report"),
    "cloud": (f"python -c '{_OBJECT_STORE}'", _LAUNCH),
    "metrics": (_TWO.replace("{", "--metrics-port 127.0.0.1:9464 {"),),
    "otel": (
        f"python -c '{_SPANS}'",
        # No collector listens there, which does not end a run.
        f"env OTEL_TRACES_EXPORTER=otlp OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:9 {_TWO}",
    ),
    "tracking": (f"python -c '{_TRACKERS}'", _LAUNCH),
    "demo": ("accel launch --cpu --nproc-per-node 2 {examples}/digits.py --epochs 1",),
}
"""Commands that work with the packages of an extra, by the extra."""
FOR_DEVELOPMENT = {"docs", "test-base", "test-xla", "test-ray", "test-deepspeed", "test", "dev"}
"""Extras that `make` installs from the source tree, with the versions of `constraints.txt`."""
EVERYWHERE = ("python -m pip check", "accel --version", "accel --help", "python -m accel_cli --version")


def list_lowest(extra: str) -> list[str]:
    """Return a constraint for each package that `pyproject.toml` names: the lowest version that it allows."""
    texts = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, ())]
    lowest: dict[str, str] = {}
    for text in texts:
        match = _REQUIREMENT.match(text.replace(" ", ""))
        if match is None or match["version"] is None:
            raise SystemExit(
                f"Cannot find the oldest version of {text!r} in pyproject.toml: it has no >=. Add one."
            )
        if match["operator"] == "==" or match["name"] not in lowest:
            lowest[match["name"]] = match["version"]
    return [f"{name}=={version}" for name, version in lowest.items()]


def install(wheel: Path, extra: str, *, oldest: bool, folder: Path) -> None:
    """Install the wheel with its extra."""
    if any(True for _ in importlib.metadata.distributions(name=DISTRIBUTION)):
        raise SystemExit(
            f"Cannot test {wheel} in {sys.prefix}: {DISTRIBUTION} is installed there. Use a new environment."
        )
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(list_lowest(extra) if oldest else []) + "\n", encoding="utf-8")
    target = f"{wheel.resolve()}" + ("" if extra == "none" else f"[{extra}]")
    command = [sys.executable, "-m", "pip", "install", "--no-compile", "-c", str(constraints), target]
    print(f"$ {' '.join(command)}", flush=True)
    subprocess.run(command, check=True)


def run(commands: Iterable[str], folder: Path) -> None:
    """Run commands with the programs of this environment, in a folder without the source tree."""
    train = folder / "train.py"
    train.write_text(TRAIN, encoding="utf-8")
    variables = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "ACCEL_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
    }
    for command in commands:
        filled = command.replace("{train}", train.name).replace("{examples}", str(ROOT / "examples"))
        print(f"$ {filled}", flush=True)
        subprocess.run(["bash", "-c", filled], cwd=folder, env=os.environ | variables, check=True)


def main() -> None:
    """Install and check what the arguments name."""
    parser = argparse.ArgumentParser(description="Install the wheel with one extra, and check that it works.")
    parser.add_argument("wheel", type=Path, help="the file")
    parser.add_argument("extra", choices=CHECKS, help="the extra, or none")
    parser.add_argument(
        "--oldest", action="store_true", help="install the lowest versions that pyproject.toml allows"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        install(options.wheel, options.extra, oldest=options.oldest, folder=Path(name))
        run([*EVERYWHERE, *CHECKS[options.extra]], Path(name))
    print(f"{options.extra}: everything works")


if __name__ == "__main__":
    main()
