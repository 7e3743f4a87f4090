"""Why a script must not run in a process that has torch loaded already."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from accel_cli.planning.plan import Plan
from accel_cli.runner import worker

__all__ = ["explain_fallback", "get_torch_variables", "source_of", "threads"]

_READ_AT_LOAD = ("ATEN_", "GOMP_", "GOTO_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH_")
"""How variables begin that are read while torch or what it loads is loaded."""
_READ_LATER = ("TORCH_HOME", "TORCH_NCCL_")
_SETTERS = frozenset({"putenv", "setdefault", "update"})


def get_torch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read while torch is loaded."""
    return {name: value for name, value in environ.items() if _is_read_at_load(name)}


def explain_fallback(plan: Plan, *, bare: Collection[str]) -> str | None:
    """What the script would notice, in words; None where it would notice nothing.

    Args:
        plan: What is to run.
        bare: The modules that Python itself has loaded when a script begins.
    """
    kind, target = plan.argv[2:4]
    if not Path("/proc/self/fd").is_dir():
        return "there is no /proc"
    if kind == "script" and (target.endswith(".pyc") or worker.is_application(target)):
        return f"{target} is not source code, and may set variables that are read while torch is loaded"
    folder = Path.cwd() if kind == "module" else Path(target).resolve().parent
    if shadowed := worker.find_shadowed(folder, bare):
        return f"{folder} has a module of its own for {', '.join(shadowed)}, which is loaded by then"
    if variables := sorted(set(_set_by(source_of(kind, target)))):
        return f"{target} sets {', '.join(variables)}, which is read while torch is loaded"
    return None


def threads() -> bool:
    """Whether this process has more than its main thread: a fork would leave the others' locks behind."""
    return len(list(Path("/proc/self/task").iterdir())) > 1


def _is_read_at_load(name: str) -> bool:
    return name.startswith(_READ_AT_LOAD) and not name.startswith(_READ_LATER)


def source_of(kind: str, target: str) -> bytes:
    """The text of what runs as `__main__`, as far as it can be found without importing anything."""
    if kind == "script":
        # Who reads a pipe takes it from the script's own process.
        return Path(target).read_bytes() if Path(target).is_file() else b""
    path = [str(Path.cwd()), *sys.path]
    spec = None
    for depth, _ in enumerate(target.split("."), 1):
        spec = PathFinder.find_spec(".".join(target.split(".")[:depth]), path)
        path = list(spec.submodule_search_locations or []) if spec else []
    if spec and spec.submodule_search_locations:
        spec = PathFinder.find_spec(f"{target}.__main__", path)
    return Path(spec.origin).read_bytes() if spec and spec.origin else b""


def _set_by(source: bytes) -> Iterator[str]:
    """The variables a text sets that torch reads while it is loaded."""
    # Most scripts touch no environment; reading the text is cheaper than taking it apart.
    if b"environ" not in source and b"putenv" not in source:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        named = [key.value for key in _names_set(node) if isinstance(key, ast.Constant)]
        yield from (name for name in named if isinstance(name, str) and _is_read_at_load(name))


def _names_set(node: ast.AST) -> list[ast.expr | None]:
    """The expressions that name what a node sets: `environ["X"] = ...`, `environ.setdefault("X", ...)`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return [node.slice]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    if node.func.attr not in _SETTERS:
        return []
    words: list[ast.expr | None] = [ast.Constant(word.arg) for word in node.keywords if word.arg]
    first = node.args[0] if node.args else None
    return [*words, *(first.keys if isinstance(first, ast.Dict) else [first])]
