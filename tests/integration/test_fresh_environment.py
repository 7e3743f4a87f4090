"""The wheel in an environment that has only what the wheel requires: all modules, and all commands of the first pages.

The packages are those of the test environment, by links, so that nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.processes.waits import limit

from accel_cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
FIRST_PAGES = (
    "README.md",
    "docs/index.md",
    "docs/install.md",
    "docs/launch.md",
    "docs/five-lines.md",
    "docs/migrate.md",
)
NEEDS_A_PACKAGE = {
    "accel_runtime.extensions.xla.": "torch_xla",
    "accel_runtime.extensions.xla.strategies.": "torch_xla",
    "accel_cli.extensions.xla.replicas": "torch_xla",
    "accel_runtime.transformers ": "transformers",
    "accel_runtime.extensions.trackers.": "a tracker",
    "accel_runtime.tracking.": "a tracker",
    "accel_cli.runs.prometheus": "prometheus_client",
    **{f"accel_cli.extensions.report.{module}": "plotly" for module in ("figures", "page", "ranks")},
    "accel_cli.extensions.ray.": "ray",
    "accel_cli.extensions.sagemaker.": "boto3",
    **{
        f"accel_runtime.extensions.deepspeed.{module} ": "deepspeed"
        for module in (
            "configured_optimizers",
            "engine",
            "library",
            "modules",
            "state_view",
            "strategy",
        )
    },
}
"""Modules that import a package of an extra, which the message names that their command prints without it."""
SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 8)
dataset = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(dataset, batch_size=32, shuffle=True)
for inputs, targets in loader:
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.4f}")
"""
IMPORTS = """
import importlib, pkgutil, sys
for package in ("accel_cli", "accel_runtime"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name.endswith(("__main__", "forkserver_main")) or module.name in {
            "accel_cli.worker", "accel_runtime.hooks", "accel_runtime.torch_probe", "accel_runtime.selfcheck"
        }:
            continue  # they run when they are imported, or raise an error that tells what to import
        try:
            importlib.import_module(module.name)
        except BaseException as error:
            print(module.name, type(error).__name__, str(error).replace(chr(10), " "))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the folder of an environment with the wheel and the packages that it requires."""
    folder = tmp_path_factory.mktemp("fresh")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    options = ["--no-compile", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *options, str(wheel)], check=True)
    (site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    (metadata,) = site.glob("accel_runtime-*.dist-info/METADATA")
    required = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    for name in find_packages(required):
        link_package(name, site)
    # PATH has no other program: no git, gcloud or kubectl.
    (folder / "venv" / "bin" / "env").symlink_to(shutil.which("env"))
    return folder / "venv"


def find_packages(texts, extras=("",)):
    """Return the names of the installed packages that requirements name, and of those that these require."""
    found = set()
    open_requirements = [(Requirement(text), extras) for text in texts]
    while open_requirements:
        requirement, extras = open_requirements.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        key = (requirement.name.lower(), *sorted(requirement.extras))
        if key in found:
            continue
        found.add(key)
        try:
            needed = distribution(requirement.name).requires or []
        except PackageNotFoundError:  # `make` made the environment, so that this system does without it
            continue
        open_requirements += [(Requirement(text), ("", *requirement.extras)) for text in needed]
    return {name for name, *_ in found}


def link_package(name, site):
    """Link the files of an installed package into the packages of another environment."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return
    for first in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        target = site / first
        if not target.exists():
            target.symlink_to(Path(package.locate_file(first)).resolve())


@pytest.fixture
def accel(environment, cwd):
    """Return a function that runs `accel` of the fresh environment, as after its activation."""
    (cwd / "train.py").write_text(SCRIPT)

    def run(*args, program="accel"):
        environ = {
            name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}
        }
        environ |= {"PATH": str(environment / "bin"), "VIRTUAL_ENV": str(environment)}
        return subprocess.run(
            [environment / "bin" / program, *args],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            timeout=limit(120),
        )

    return run


@pytest.mark.slow
def test_modules_that_lack_a_package_in_a_fresh_environment_are_those_of_extras(accel):
    done = accel("-c", IMPORTS, program="python")
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert line.startswith(tuple(NEEDS_A_PACKAGE)), line


WORKS = {
    "migrate": ("migrate", "train.py"),
    "migrate of a folder": ("migrate", "."),
    "config": ("config", "default"),
    "show": ("config", "show"),
    "launch": ("launch", "--cpu", "--nproc-per-node", "2", "--record-numerics", "train.py"),
    "runs": ("runs",),
    "logs": ("logs",),
    "test": ("test", "--cpu", "--nproc-per-node", "1"),
    "env": ("env",),
    "skill": ("skill",),
    "estimate": ("estimate", "model.py:make"),
    "checkpoint": ("checkpoint", "list"),
    "diff": ("diff", "RUN", "RUN"),
}
"""Commands that succeed, in an order in which one finds what an earlier one wrote; RUN is the id of the launch."""
REFUSED = {
    "report": (("report",), "plotly>="),
    "top": (("top",), "No run"),
    "stacks": (("stacks",), "No run"),
    "pod": (("xla", "pod", "pod", "--zone", "z", "--run", "--", "train.py"), "gcloud not found"),
    "jobs": (("jobs", "list", "--launcher", "ray"), "ray[default]>="),
    "kubernetes": (
        ("launch", "--set", "launcher.kind=kubernetes", "--set", "launcher.image=i", "train.py"),
        "kubernetes>=",
    ),
    "jobs of kubernetes": (("jobs", "list", "--launcher", "kubernetes"), "kubernetes>="),
    "ray": (("launch", "--set", "launcher.kind=ray", "train.py"), "ray[default]>="),
    "sagemaker": (("launch", "--set", "launcher.kind=sagemaker", "train.py"), "boto3>="),
    "jobs of sagemaker": (("jobs", "list", "--launcher", "sagemaker"), "boto3>="),
    "xla": (("launch", "--set", "launcher.kind=xla", "train.py"), "torch-xla==2.9.0 torch==2.9.0"),
}
"""Commands that need what a fresh environment lacks: a package, a run or a program; each with a part of its message."""


@pytest.mark.slow
def test_every_command_works_in_a_fresh_environment_or_names_what_it_needs_in_one_line(accel, cwd, home):
    (cwd / "model.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(8, 1)\n")
    assert {words[0] for words in [*WORKS.values(), *(words for words, _ in REFUSED.values())]} == {
        *COMMANDS.names
    }
    for words in WORKS.values():
        run = min((path.name for path in home.glob("runs/*")), default="")
        done = accel(*(run if word == "RUN" else word for word in words))
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), (words, done.stderr)
    assert "+accelerator = Accelerator()" in accel("migrate", "train.py").stdout
    accel("migrate", "--write", "train.py")
    done = accel("train.py", program="python")
    assert (done.returncode, done.stderr) == (0, "")
    for words, part in REFUSED.values():
        done = accel(*words)
        *notes, error = done.stderr.strip().splitlines()
        assert done.returncode in {1, 2}, (words, done.stderr)
        assert error.startswith("accel: error: "), (words, done.stderr)
        assert part in error, (words, done.stderr)
        assert all(note.startswith("accel: ") for note in notes), (words, done.stderr)


def test_the_commands_of_the_first_pages_are_those_that_run_in_a_fresh_environment():
    named = {
        word
        for page in FIRST_PAGES
        for word in re.findall(r"(?:^\$ |`)accel ([a-z][\w-]*)", (ROOT / page).read_text(), re.MULTILINE)
    }
    assert {"migrate", "launch", "config", "report"} <= named
    assert named <= {words[0] for words in WORKS.values()} | {words[0] for words, _ in REFUSED.values()}
