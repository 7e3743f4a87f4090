"""The Dockerfiles of the documentation, as far as they can be checked without Docker."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMES = ("cpu", "cuda")


def read(name):
    """Return the instructions of a Dockerfile, as pairs of the keyword and the rest of the line."""
    text = (ROOT / "docs" / "docker" / f"Dockerfile.{name}").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [tuple(line.split(maxsplit=1)) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", NAMES)
def test_the_files_that_a_dockerfile_copies_are_enough_to_run_accel(name, tmp_path):
    copied = [rest.split() for keyword, rest in read(name) if keyword == "COPY"]
    for *sources, target in copied:
        for source in sources:
            folder = tmp_path / target.lstrip("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, folder)
    sources = [source for *sources, _ in copied for source in sources]
    ignored = subprocess.run(["git", "check-ignore", *sources], cwd=ROOT, capture_output=True, check=False)
    assert not ignored.stdout
    installed = tmp_path / "opt" / "accel"
    assert {path.name for path in installed.iterdir()} >= {"pyproject.toml", "README.md", "LICENSE"}
    (tmp_path / "x.py").touch()
    code = "import accel_cli, sys; print(accel_cli.__file__); sys.argv[0] = 'accel'; from accel_cli.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "launch", "--dry-run", "x.py"],
        cwd=tmp_path, env={"PYTHONPATH": str(installed), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert str(installed) in done.stdout
    assert "command:" in done.stdout, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_dockerfile_starts_from_a_fixed_image_and_installs_as_the_documentation_says(name):
    instructions = read(name)
    assert {keyword for keyword, _ in instructions} <= {"FROM", "ENV", "RUN", "COPY", "WORKDIR"}
    keyword, image = instructions[0]
    assert keyword == "FROM"
    assert ":" in image
    assert not image.endswith(":latest")
    page = (ROOT / "docs" / "docker.md").read_text()
    commands = [rest for keyword, rest in instructions if keyword == "RUN"]
    assert commands
    for command in commands:
        assert command.startswith("pip install --no-cache-dir ")
        assert f"    RUN {command}\n" in page
    assert (
        f"docker build -f docs/docker/Dockerfile.{name} -t accel:{name} ."
        in (ROOT / "docs" / "docker" / f"Dockerfile.{name}").read_text()
    )
