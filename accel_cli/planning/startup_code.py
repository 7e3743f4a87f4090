"""Code that Python runs before a script: `sitecustomize`, `usercustomize` and the import lines of `.pth` files.

In a forked process it has run once, in the fork server, without the variables and the id of the process. Python documents
it at https://docs.python.org/3/library/site.html.
"""

from __future__ import annotations

import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

__all__ = ["explain_startup_code", "find_module_spec"]

_MODULES = ("sitecustomize", "usercustomize")
_IMPORTS = re.compile(
    rb"""(?:^|[;:]|\bexec\(["'])\s*(?:from\s+([\w.]+)\s+import|import\s+([\w.]+(?:\s*,\s*[\w.]+)*))|__import__\(\s*["']([\w.]+)""",
    re.MULTILINE,
)
# The variables that the launcher sets for each rank, and what differs between a process and its forks.
_PER_PROCESS = re.compile(
    rb"\b((?:LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(?:LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)|TORCHELASTIC_\w+|ACCEL_\w+)\b"
    rb"|\bos\.(getpid|getppid)\b|\bimport\s+(getpid)\b|\b(Thread)\("
)
_MAX_FILES = 100
"""The most files that are searched; start-up code that imports more is not understood."""
_MAX_SIZE = 1 << 20


def explain_startup_code() -> str:
    """Return why start-up code must run in each process, as far as its sources show; empty without a reason.

    Searched are the start-up code and the modules that it imports, except those of Python; of an installed package its
    module alone, since most packages use the process id somewhere.
    """
    searched: set[str] = set()
    for name, source in _find_startup_code():
        if reason := _search_source(name, source, searched):
            return reason
    return ""


def _find_startup_code() -> Iterator[tuple[str, bytes]]:
    """Yield the start-up code of an interpreter that starts now, each with the name of its file."""
    if sys.flags.no_site:
        return
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    for folder in map(Path, folders):
        with suppress(OSError):
            for file in sorted(folder.glob("*.pth")):
                lines = _read(file).splitlines()
                yield (
                    str(file),
                    b"\n".join(line for line in lines if line.startswith((b"import ", b"import\t"))),
                )
    for module in _MODULES:
        yield from _find_source(module)


def _search_source(name: str, source: bytes, searched: set[str]) -> str:
    """Return why a source, or one that it imports, must run in each process; empty without a reason."""
    if match := _PER_PROCESS.search(source):
        variable = match[1]
        found = f"reads {variable.decode('ascii')}" if variable else "uses its process id or starts a thread"
        return f"the start-up code in {name} {found}"
    if name.endswith(".py") and _is_installed(name):
        return ""
    for imported in _list_imports(source):
        for file, text in _find_source(imported):
            if file not in searched and len(searched) < _MAX_FILES:
                searched.add(file)
                if reason := _search_source(file, text, searched):
                    return reason
    return ""


def _list_imports(source: bytes) -> Iterator[str]:
    for groups in _IMPORTS.findall(source):
        for names in groups:
            yield from (name.strip().decode("ascii", "replace") for name in names.split(b",") if name)


def _find_source(module: str) -> Iterator[tuple[str, bytes]]:
    """Yield the source of a module that is not in Python's own library."""
    spec = None
    with suppress(ImportError, ValueError):
        spec = find_module_spec(module)
    if spec and spec.origin and spec.origin.endswith(".py") and not _is_in_library(spec.origin):
        with suppress(OSError):
            yield spec.origin, _read(Path(spec.origin))


def find_module_spec(module: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """Find a module by its dotted name in the folders of a path (by default `sys.path`), without importing anything."""
    spec, names = None, module.split(".")
    for depth in range(1, len(names) + 1):
        spec = PathFinder.find_spec(".".join(names[:depth]), path)
        path = list(spec.submodule_search_locations or []) if spec else []
    return spec


def _is_in_library(file: str) -> bool:
    """Return True for a module of Python itself."""
    return file.startswith(f"{sysconfig.get_path('stdlib')}/") and not _is_installed(file)


def _is_installed(file: str) -> bool:
    """Return True for a module of an installed package, other than start-up code."""
    return Path(file).stem not in _MODULES and re.search(r"/(site|dist)-packages/", file) is not None


def _read(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_MAX_SIZE)
