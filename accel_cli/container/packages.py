"""What a host's Python needs: the requirements of the job, and the few packages that accel itself imports."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from accel_cli.container.problem import ContainerError

__all__ = ["NEEDED", "TORCH", "missing", "provide", "require"]

TORCH = (2, 9)
"""The oldest that accel runs on."""
NEEDED: Mapping[str, str] = {
    "typing_extensions": "typing-extensions",
    "safetensors": "safetensors",
    "xxhash": "xxhash",
}
"""What accel imports on a host, beside torch: modules, and the packages that have them."""
_PIP = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}
"""As variables, since an old pip refuses options that it does not know."""
_KEPT = 40
_CAUSE = re.compile(r"^\s*(ERROR|error):? ")


def require(file: str, folder: Path, environ: Mapping[str, str]) -> None:
    """Install the requirements of a job.

    Args:
        file: The file that names them, in the source.
        folder: The source; the file may name others beside it.
        environ: The environment of pip.

    Raises:
        ContainerError: pip could not, and says why.
    """
    if not (folder / file).is_file():
        raise ContainerError(f"requirements: there is no {file} in the source")
    if failed := _pip(["-r", file], environ, cwd=folder):
        raise ContainerError(f"the packages of {file} could not be installed: {failed}")


def missing(modules: Collection[str]) -> list[str]:
    """Those that this Python cannot import."""
    importlib.invalidate_caches()
    return [module for module in modules if find_spec(module) is None]


def provide(wheels: Path, folder: Path, environ: Mapping[str, str]) -> None:
    """Have everything that accel imports: what the image lacks is installed, out of the bundle where that has it.

    Args:
        wheels: The wheels in the bundle.
        folder: Where packages go, so that those of the image stay as they are.
        environ: The environment of pip.

    Raises:
        ContainerError: torch is not in the image or too old, or a package cannot be installed.
    """
    if missing(["torch"]):
        raise ContainerError(
            f"this image has no torch for {sys.executable}: use an image of PyTorch (launcher.image_uri), or leave "
            "image_uri out and accel chooses one"
        )
    if problem := _too_old():
        raise ContainerError(problem)
    wanted = [NEEDED[module] for module in missing(NEEDED)]
    if not wanted:
        return
    sys.stderr.write(f"accel: {', '.join(wanted)} is not in this image, and is installed\n")
    into = ["--target", str(folder), "--no-deps", *wanted]
    failed = _pip(["--no-index", "--find-links", str(wheels), *into], environ, quiet=True)
    if failed and (failed := _pip(into, environ)):
        raise ContainerError(
            f"accel needs {', '.join(wanted)}, which is neither in the image nor fits it from the bundle, and pip could "
            f"not fetch it: {failed}. Build it into the image (launcher.image_uri)."
        )


def _too_old() -> str:
    """What is wrong with the torch that is here, as far as its version tells."""
    try:
        found = version("torch")
    except PackageNotFoundError:  # built by hand
        return ""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if not numbers or (int(numbers[1]), int(numbers[2])) >= TORCH:
        return ""
    return (
        f"this image has torch {found}, and accel needs {TORCH[0]}.{TORCH[1]} or newer: choose a newer image "
        "(launcher.image_uri, or launcher.pytorch_version)"
    )


def _pip(
    words: Sequence[str], environ: Mapping[str, str], *, cwd: Path | None = None, quiet: bool = False
) -> str:
    """Install something; why it failed, in pip's own words, or nothing."""
    command = [sys.executable, "-m", "pip", "install", *words]
    last: deque[str] = deque(maxlen=_KEPT)
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**_PIP, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                last.append(line.decode(errors="replace").rstrip())
                if not quiet:
                    os.write(2, line)
        except BaseException:
            pip.kill()
            raise
    return "" if pip.returncode == 0 else _cause(last) or f"pip ended with exit code {pip.returncode}"


def _cause(lines: Collection[str]) -> str:
    """Its own error lines; without one, the last line."""
    said = [line.strip() for line in lines if line.strip()]
    errors = [line for line in said if _CAUSE.match(line)]
    return " ".join(errors[-3:] or said[-1:])
