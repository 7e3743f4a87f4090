"""Packages of a host, in a Python that finds none but pip."""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from accel_cli.container import packages
from accel_cli.container.problem import ContainerError

ROOT = Path(__file__).parents[3]
PROVIDE = """
import sys
from pathlib import Path
from accel_cli.container import packages
from accel_cli.container.problem import ContainerError
import os
try:
    packages.provide(Path(sys.argv[1]), Path(sys.argv[2]), os.environ)
except ContainerError as error:
    sys.exit(str(error))
sys.path.append(sys.argv[2])
print(sorted(packages.missing(packages.NEEDED)), __import__("xxhash").__file__)
"""


def wheel(folder, package, module):
    """A package with one empty module, as a wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{module}.py", "")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


def provided(tmp_path, *, torch="2.13.0", **env):
    """`provide` in a Python without its site-packages, for which a torch stands in."""
    image = tmp_path / "image"
    if torch:
        about = image / f"torch-{torch}.dist-info"
        about.mkdir(parents=True)
        (image / "torch.py").touch()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    command = [sys.executable, "-S", "-c", PROVIDE, tmp_path / "wheels", tmp_path / "packages"]
    path = os.pathsep.join((str(ROOT), str(image)))
    told = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "PIP_CONFIG_FILE": "/dev/null", **env}
    return subprocess.run(command, env=told, capture_output=True, text=True, check=False)


def test_what_an_image_lacks_comes_from_the_bundle_without_a_network_and_leaves_the_image_as_it_is(
    tmp_path,
):
    for module, package in packages.NEEDED.items():
        wheel(tmp_path / "wheels", package, module)
    done = provided(tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", str(tmp_path / "packages" / "xxhash.py")]
    assert "typing-extensions, safetensors, xxhash" in done.stderr


def test_what_neither_the_bundle_nor_the_network_has_is_said_with_pips_own_words(tmp_path):
    done = provided(tmp_path, PIP_NO_INDEX="1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "accel needs typing-extensions, safetensors, xxhash, which is neither in the image"
    )
    assert "ERROR: No matching distribution found for" in last
    assert "Traceback" not in done.stderr


def test_an_image_without_torch_or_with_an_old_one_is_refused(tmp_path):
    without = provided(tmp_path, torch=None)
    assert without.returncode == 1
    assert without.stderr.startswith("this image has no torch for")
    old = provided(tmp_path, torch="2.4.1+cu121")
    assert old.stderr.startswith("this image has torch 2.4.1+cu121, and accel needs 2.9 or newer")


def test_requirements_may_name_files_beside_them_and_go_where_pip_is_told(tmp_path):
    wheel(tmp_path / "source" / "wheels", "newcomer", "newcomer")
    (tmp_path / "source" / "more.txt").write_text("./wheels/newcomer-1.0-py3-none-any.whl\n")
    (tmp_path / "source" / "requirements.txt").write_text("-r more.txt\n")
    environ = {**os.environ, "PIP_TARGET": str(tmp_path / "there"), "PIP_NO_INDEX": "1"}
    packages.require("requirements.txt", tmp_path / "source", environ)
    assert (tmp_path / "there" / "newcomer.py").exists()
    with pytest.raises(ContainerError, match=r"requirements: there is no other\.txt in the source"):
        packages.require("other.txt", tmp_path / "source", environ)


def test_every_package_that_the_runtime_imports_is_provided():
    """The third-party modules of the two packages that a host imports, found in their sources."""
    found = set()
    for file in (ROOT / "accel_runtime").rglob("*.py"):
        if "tracking" in file.parts:  # each tracker brings its own
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    foreign = {name for name in found if name not in sys.stdlib_module_names}
    assert foreign - {"accel_runtime", "torch", "torch_xla"} == set(packages.NEEDED)
