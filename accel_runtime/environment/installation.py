"""Commands that install packages, in the form that works for this environment; standard library only.

Every message that names such a command gets it here: the distribution is on no package index, so that the name of one of
its extras cannot be installed. The packages themselves can, in the versions that the metadata of the distribution gives.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__all__ = [
    "DISTRIBUTION",
    "find_source_tree",
    "format_install",
    "format_new_environment",
    "format_python",
    "list_requirements",
]

DISTRIBUTION = "accel-runtime"
_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([\w.-]+)['"]""")
_NAME = re.compile(r"[\w.-]+")


def list_requirements(extra: str = "") -> list[str]:
    """Return the packages of an extra as pip spells them; without an extra, those that accel itself needs.

    The list is empty if accel is not installed, as in a container that runs a copy of its files.
    """
    return [
        requirement
        for requirement, of in _read_requirements()
        if of == extra and _normalize(requirement) != DISTRIBUTION
    ]


def format_install(*packages: str, extra: str = "", options: str = "") -> str:
    """Return the command that installs packages into the environment of this process.

    Args:
        *packages: Names of packages; each gets the version that accel requires of it, if any.
        extra: Install the packages of this extra instead; `packages` remain the answer if the metadata lacks it.
        options: Options of `pip install`, such as `--upgrade`.
    """
    required = list_requirements(extra) if extra else []
    if not required:
        versions = {_normalize(requirement): requirement for requirement, _ in reversed(_read_requirements())}
        required = [versions.get(_normalize(package), package) for package in packages]
    words = [_format_installer(), options, *map(shlex.quote, required)]
    return " ".join(word for word in words if word)


def format_new_environment(extra: str) -> str:
    """Return how to install accel with an extra into a new environment, where accel is missing too."""
    if tree := find_source_tree():
        target = f"{tree}[{extra}]"
        return f"pip install -e {shlex.quote(target)}"
    packages = " ".join(map(shlex.quote, list_requirements(extra)))
    return (
        f"pip install {packages or f'the packages of the extra {extra}'}, then install accel as you did here"
    )


def find_source_tree() -> Path | None:
    """Return the source tree from which accel is installed in editable mode, if it is."""
    found = _find_distribution()
    origin = json.loads((found and found.read_text("direct_url.json")) or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    tree = Path(unquote(urlsplit(origin["url"]).path))
    return tree if (tree / "pyproject.toml").is_file() else None


def format_python() -> str:
    """Return the interpreter of this process as it is typed: its name if PATH leads to it, else its path."""
    for name in ("python", "python3"):
        if (found := shutil.which(name)) and os.path.abspath(found) == sys.executable:  # noqa: PTH100 - a link stays
            return name
    return shlex.quote(sys.executable or "python")


def _format_installer() -> str:
    """Return the installer of this environment: those that uv makes have no pip."""
    python = format_python()
    if importlib.util.find_spec("pip"):
        return f"{python} -m pip install"
    if shutil.which("uv") or _is_made_by_uv():
        return f"uv pip install --python {python}"
    return f"{python} -m ensurepip && {python} -m pip install"


def _is_made_by_uv() -> bool:
    try:
        return "\nuv = " in Path(sys.prefix, "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _find_distribution() -> Distribution | None:
    from importlib import metadata  # noqa: PLC0415 - takes longer than the commands that need no message

    try:
        return metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def _read_requirements() -> list[tuple[str, str]]:
    """Return the requirements of the distribution, each with its extra; the extra is empty for those of accel itself."""
    found = _find_distribution()
    pairs = []
    for line in (found and found.requires) or []:
        requirement, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        pairs.append((requirement.strip(), extra[1] if extra else ""))
    return pairs


def _normalize(requirement: str) -> str:
    """Return the name in a requirement, as package indexes compare it."""
    name = _NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""
