"""From what was typed to a plan: the layers of the command line, the target, and the machine."""

from __future__ import annotations

import importlib
import importlib.machinery
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from accel_cli import launchers, machine
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.base import Job, Plan
from accel_cli.machine import Machine
from accel_cli.profile import document, layers
from accel_cli.profile.layers import Layer, Resolved
from accel_cli.profile.store import Store
from accel_runtime.env import nearest

__all__ = ["Request", "check_target", "look", "make", "prepare", "resolve", "run"]

Kind = Literal["script", "module", "program"]
_COUNTS = frozenset({"launcher.nproc_per_node", "launcher.nnodes"})
"""What only a launcher of several processes can be told."""
_AGENT = {"launcher.kind": "torchrun", "launcher.nproc_per_node": 1}
"""One process, with a launcher beside it that can give it time and watch it."""
_WATCHED = frozenset({"launcher.shutdown_timeout", "launcher.stall_timeout"})
"""What needs a launcher beside the processes, be it one."""


@dataclass(frozen=True)
class Request:
    """What was typed."""

    target: str
    args: tuple[str, ...] = ()
    kind: Kind = "script"
    profile: str | None = None
    assignments: tuple[str, ...] = ()
    nproc_per_node: str | None = None
    nnodes: int | None = None
    shutdown_timeout: int | None = None
    stall_timeout: int | None = None
    mixed_precision: str | None = None
    cpu: bool = False


def prepare(request: Request, environ: Mapping[str, str]) -> tuple[Resolved, Plan]:
    """The profile in force and the plan of a request, on this machine.

    Raises:
        UsageError: A profile, variable or option cannot be used, or not on this machine.
    """
    found = look(environ, cpu=request.cpu)
    resolved = resolve(request, environ, found)
    return resolved, make(request, resolved, environ, found)


def resolve(request: Request, environ: Mapping[str, str], found: Machine) -> Resolved:
    """The profile in force; where no layer says how processes start, what suits the machine.

    Raises:
        UsageError: A profile, variable or option cannot be used.
    """
    said = layers.stack(Store.from_env(environ, Path.cwd()), environ, request.profile)
    if _kind(said) is None:
        said.insert(0, Layer("detected", {"launcher.kind": launchers.suggest(found)}, {"": "detected"}))
    assigned = layers.assigned(request.assignments)
    alone = _kind([*said, assigned]) == "single"
    options = [layer for layer in _options(request) if not (alone and _asks_for_one(layer))]
    counts = [layer for layer in options if not _COUNTS.isdisjoint(layer.values)]
    watched = [layer for layer in options if not _WATCHED.isdisjoint(layer.values)]
    if alone and watched:
        said.append(Layer(watched[0].name, _AGENT, watched[0].where))
    if alone and counts:
        said.append(Layer(counts[0].name, {"launcher.kind": "torchrun"}, counts[0].where))
    return layers.resolve([*said, assigned, *options])


def make(request: Request, resolved: Resolved, environ: Mapping[str, str], found: Machine) -> Plan:
    """The plan of a request.

    Raises:
        UsageError: The profile cannot run it on this machine.
    """
    job = Job(
        target=request.target,
        args=request.args,
        kind=request.kind,
        settings=resolved.profile.settings,
        env=resolved.profile.env,
        environ=environ,
        machine=found,
        python=sys.executable,
    )
    return resolved.profile.start.plan(job)


def run(plan: Plan) -> int:
    """Carry a plan out; the exit code of the script.

    Raises:
        AccelError: torch cannot be loaded.
    """
    module, _, function = plan.runner.partition(":")
    try:
        runner: Callable[[Plan], int] = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise AccelError(
            f"{error}. Install torch in this environment: {sys.executable} -m pip install torch"
        ) from error
    return runner(plan)


def look(environ: Mapping[str, str], *, cpu: bool) -> Machine:
    """What the machine has, as far as a launch needs to know."""
    return Machine(machine.cpus()) if cpu else machine.glance(environ)


def check_target(target: str, kind: Kind) -> None:
    """Refuse what cannot run, before anything starts.

    Raises:
        UsageError: The script, module or program is not there.
    """
    check: dict[Kind, Callable[[str], None]] = {
        "script": _check_script,
        "module": _check_module,
        "program": _check_program,
    }
    check[kind](target)


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{target} is a directory; give the script inside it, or a package with -m")
    if not path.exists():
        raise UsageError(f"the script {target} does not exist{_beside(path)}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"the script {target} cannot be read: {error.strerror}") from None


def _beside(path: Path) -> str:
    """The file that was probably meant, if one name on the way to it is a near miss."""
    missing = next(part for part in (*reversed(path.parents), path) if not part.exists())
    if not missing.parent.is_dir():
        return ""
    meant = nearest(missing.name, [item.name for item in missing.parent.iterdir()])
    found = missing.parent / meant / path.relative_to(missing) if meant else path
    return f"; did you mean {found}?" if found.is_file() else ""


def _check_module(target: str) -> None:
    package = target.partition(".")[0]
    if not package or not importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]):
        raise UsageError(
            f"there is no module named {target!r} here or in {sys.prefix}; -m takes a name as in `python -m`"
        )


def _check_program(target: str) -> None:
    if not shutil.which(target):
        raise UsageError(f"the program {target!r} was not found, or may not be executed")


def _kind(said: Iterable[Layer]) -> Any:
    """The launcher that the last layer to name one names."""
    named = [layer.values["launcher.kind"] for layer in said if "launcher.kind" in layer.values]
    return named[-1] if named else None


def _asks_for_one(layer: Layer) -> bool:
    """Whether a layer only asks for the one process, or the one machine, that `single` gives anyway."""
    return _COUNTS.issuperset(layer.values) and set(layer.values.values()) == {1}


def _options(request: Request) -> list[Layer]:
    """The options that stand for values of the profile, each a layer of its own."""
    # Empty is what an unset shell variable leaves: it is no number, and not the same as no option.
    count = request.nproc_per_node and document.scalar(request.nproc_per_node, "--nproc-per-node")
    said: dict[str, tuple[str, Any]] = {
        "--cpu": ("device", "cpu" if request.cpu else None),
        "--mixed-precision": ("mixed_precision", request.mixed_precision),
        "--nproc-per-node": ("launcher.nproc_per_node", count),
        "--nnodes": ("launcher.nnodes", request.nnodes),
        "--shutdown-timeout": ("launcher.shutdown_timeout", request.shutdown_timeout),
        "--stall-timeout": ("launcher.stall_timeout", request.stall_timeout),
    }
    return [
        Layer(option, {key: value}, {"": option})
        for option, (key, value) in said.items()
        if value is not None
    ]
