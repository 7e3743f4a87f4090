"""Reasons to start a script by exec instead of forking a process that has torch loaded."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from accel_cli.planning.plan import Plan
from accel_cli.runner import worker

__all__ = ["explain_fallback", "get_torch_variables", "has_threads", "read_source"]

_READ_AT_IMPORT = ("ATEN_", "GOMP_", "GOTO_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH_")
"""Prefixes of variables that are read when torch, or a library of it, is imported."""
_READ_LATER = ("TORCH_HOME", "TORCH_NCCL_")
_SETTERS = frozenset({"putenv", "setdefault", "update"})


def explain_fallback(plan: Plan, *, python_modules: Collection[str]) -> str | None:
    """Return the difference that the script could observe in a forked process; None without a difference."""
    kind, target = plan.argv[2:4]
    if not Path("/proc/self/fd").is_dir():
        return "/proc is not available"
    if kind == "script" and (target.endswith(".pyc") or worker.is_application(target)):
        return f"{target} is not source code, and may set variables that are read while torch is loaded"
    folder = worker.get_import_folder(kind, target)
    if shadowed := worker.find_shadowed(folder, python_modules):
        return f"{folder} has modules with the names of imported ones: {', '.join(shadowed)}"
    if variables := sorted(set(_find_torch_variables(read_source(kind, target)))):
        return f"{target} sets {', '.join(variables)}, which is read while torch is loaded"
    return None


def has_threads() -> bool:
    """Return True if this process has more than its main thread: a fork would copy locks that others hold."""
    return len(list(Path("/proc/self/task").iterdir())) > 1


def get_torch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read when torch is imported."""
    return {name: value for name, value in environ.items() if _is_read_at_import(name)}


def _is_read_at_import(name: str) -> bool:
    return name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER)


def read_source(kind: str, target: str) -> bytes:
    """Read the source of a script or module without importing anything; empty if it cannot be found."""
    if kind == "script":
        # Only the script's own process may read a pipe.
        return Path(target).read_bytes() if Path(target).is_file() else b""
    path = [str(Path.cwd()), *sys.path]
    spec = None
    for depth, _ in enumerate(target.split("."), 1):
        spec = PathFinder.find_spec(".".join(target.split(".")[:depth]), path)
        path = list(spec.submodule_search_locations or []) if spec else []
    if spec and spec.submodule_search_locations:
        spec = PathFinder.find_spec(f"{target}.__main__", path)
    return Path(spec.origin).read_bytes() if spec and spec.origin else b""


def _find_torch_variables(source: bytes) -> Iterator[str]:
    """Yield the variables in a source that it sets and that torch reads when it is imported."""
    # Most scripts do not change the environment, and searching is cheaper than parsing.
    if b"environ" not in source and b"putenv" not in source:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        for name in _get_set_names(node):
            if (
                isinstance(name, ast.Constant)
                and isinstance(name.value, str)
                and _is_read_at_import(name.value)
            ):
                yield name.value


def _get_set_names(node: ast.AST) -> list[ast.expr | None]:
    """Return the names in `environ["X"] = ...`, `environ.setdefault("X", ...)` and the like."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return [node.slice]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    if node.func.attr not in _SETTERS:
        return []
    names: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in node.keywords if keyword.arg]
    first = node.args[0] if node.args else None
    return [*names, *(first.keys if isinstance(first, ast.Dict) else [first])]
