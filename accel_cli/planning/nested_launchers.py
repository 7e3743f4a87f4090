"""Launchers as the target of `accel launch`, which would start their own processes in each process of the launch.

A script of the user may start launches of its own. Only the programs and modules that are launchers are recognised.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from accel_cli.planning.launch_options import Kind
from accel_runtime.environment.registry import Registry

__all__ = ["OTHER_LAUNCHERS", "NestedLauncher", "OtherLauncher", "Words", "find_nested_launcher"]

Words = tuple[str, ...]
_PYTHON = re.compile(r"python(\d+(\.\d+)?t?)?")
_PYTHON_VALUES = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Options of Python with a value of their own."""
_SCRIPT_HEAD = 4096
"""The bytes of a console script that are read."""


class NestedLauncher(NamedTuple):
    """A launcher that is the target of `accel launch`."""

    name: str
    """Its command, as users know it."""
    words: Words | None
    """The words after `accel launch` and its options that start the same script; None if it starts none."""
    reason: str = "it starts processes itself, and would do so in each process of this launch"


class OtherLauncher(NamedTuple):
    """The launcher of a library."""

    parse: Callable[[Words], Words | None]
    """Returns the words of the same launch without it."""
    modules: frozenset[str]
    """Its modules that are run."""


def find_nested_launcher(target: str, kind: Kind, args: Sequence[str]) -> NestedLauncher | None:
    """Return the launcher that a target is; None for a script or a program of the user."""
    if kind == "module":
        return _build(_find_command(target), tuple(args))
    name = Path(target).name.removesuffix(".exe")
    path = Path(shutil.which(target) or target) if kind == "program" else Path(target)
    if _PYTHON.fullmatch(name) and not _is_python_text(path):
        inner = _parse_python(tuple(args))
        nested = find_nested_launcher(*inner) if inner else None
        # As a program, Python runs the script in each process.
        python = NestedLauncher(name, _format(inner), "accel launch starts Python itself")
        return nested or (python if kind == "script" else None)
    if (
        name not in {*_COMMANDS, *OTHER_LAUNCHERS.names}
        or path.is_dir()
        or (path.is_file() and not _is_launcher(path, name))
    ):
        return None
    return _build(name, tuple(args))


def _build(name: str | None, args: Words) -> NestedLauncher | None:
    if not name:
        return None
    parse = _COMMANDS[name] if name in _COMMANDS else OTHER_LAUNCHERS[name].parse
    return NestedLauncher(name, parse(args))


def _find_command(module: str) -> str | None:
    """Return the name of the launcher of a module; None if it is no launcher."""
    others = (name for name in OTHER_LAUNCHERS.names if module in OTHER_LAUNCHERS[name].modules)
    return _MODULES.get(module) or next(others, None)


def _is_launcher(path: Path, name: str) -> bool:
    """Return whether a file with the name of a launcher is that launcher, and not a Python script of the user."""
    if not _is_python_text(path):
        return True
    modules = re.findall(r"^(?:from|import) ([\w.]+)", _read_head(path), re.MULTILINE)
    return any(_find_command(module) == name for module in modules)


def _is_python_text(path: Path) -> bool:
    head = _read_head(path) if path.is_file() else ""
    return bool(head) and (not head.startswith("#!") or "python" in head.partition("\n")[0])


def _read_head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(_SCRIPT_HEAD)
    except OSError:
        return ""
    return "" if b"\0" in head else head.decode(errors="replace")


# The words of the same launch without the launcher


def _format(inner: tuple[str, Kind, Words] | None) -> Words | None:
    if inner is None:
        return None
    target, kind, args = inner
    return (*(["-m"] if kind == "module" else []), target, *args)


def _parse_python(args: Words) -> tuple[str, Kind, Words] | None:
    """Return the target of a command line of Python, its kind, and its arguments; None for code in `-c`."""
    words = list(args)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in _PYTHON_VALUES:
            del words[:1]
        elif option == "-m" and words:
            return words[0], "module", tuple(words[1:])
        elif option in {"-c", "-"}:
            return None
    return (words[0], "script", tuple(words[1:])) if words else None


def _strip_command(args: Words) -> Words | None:
    """Return the words after `launch` of accel and Accelerate, whose options are those of `accel launch`."""
    return args[1:] or None if args[:1] == ("launch",) else None


def _keep(args: Words) -> Words | None:
    return args or None


def _parse_trl(args: Words) -> Words | None:
    """Return the script of a command of TRL; options of its launcher come before it."""
    if not args or args[0].startswith("-"):
        return None
    options: list[str] = []
    rest = list(args[1:])
    for option, own in (("--accelerate_config", "--config_file"), ("--num_processes", "--num_processes")):
        if option in rest[:-1]:
            place = rest.index(option)
            value = rest[place + 1]
            options += [own, _find_trl_config(value) if own == "--config_file" else value]
            del rest[place : place + 2]
    return (*options, "-m", f"trl.scripts.{args[0].replace('-', '_')}", *rest)


def _find_trl_config(name: str) -> str:
    """Return the path of a config file that TRL has by name; another name as it is."""
    spec = find_spec("trl")
    folder = Path(spec.origin).parent / "accelerate_configs" if spec and spec.origin else Path()
    file = folder / f"{name}.yaml"
    return str(file) if not Path(name).is_file() and file.is_file() else name


_COMMANDS: Mapping[str, Callable[[Words], Words | None]] = MappingProxyType(
    {
        "accel": _strip_command,
        "accelerate": _strip_command,
        "accelerate-launch": _keep,
        "torchrun": _keep,
        "trl": _parse_trl,
    }
)
"""What `accel launch` runs instead, by the name of a launcher."""
_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "accel_cli": "accel",
        "accel_cli.__main__": "accel",
        "accel_cli.main": "accel",
        "accelerate.commands.accelerate_cli": "accelerate",
        "accelerate.commands.launch": "accelerate-launch",
        "torch.distributed.launch": "torchrun",
        "torch.distributed.run": "torchrun",
        "trl.cli": "trl",
        "trl.cli.main": "trl",
    }
)
"""The names of launchers by their modules."""
OTHER_LAUNCHERS: Registry[OtherLauncher] = Registry(
    {
        "deepspeed": "accel_cli.extensions.deepspeed.own_launcher:LAUNCHER",
    }
)
"""Launchers of the libraries of extensions, by their command."""
