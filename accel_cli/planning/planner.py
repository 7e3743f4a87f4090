"""From what was typed to a plan: the layers of the command line, the target, and the machine."""

from __future__ import annotations

import errno
import importlib
import importlib.machinery
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accel_cli import launchers
from accel_cli.errors import AccelError, UsageError, explain_torch_error
from accel_cli.launchers.base import Job, Launcher, Plan
from accel_cli.planning import machine, nodes
from accel_cli.planning.machine import Machine, Tpu
from accel_cli.profile import layers, yaml_io
from accel_cli.profile.layers import Layer, Resolved
from accel_cli.profile.store import Store
from accel_cli.runner.exec_fallback import source_of
from accel_runtime.env import SettingsError, check_layout, find_nearest

__all__ = [
    "Request",
    "check_target",
    "detect_machine",
    "find_options_after_script",
    "looked",
    "make_plan",
    "plan_layout",
    "prepare",
    "resolve",
    "run_plan",
]


Kind = Literal["script", "module", "program"]
_COUNTS = frozenset(
    f"launcher.{key}" for key in ("nproc_per_node", "nnodes", "rdzv_endpoint", "rdzv_id", "max_restarts")
)
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
    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    max_restarts: int | None = None
    shutdown_timeout: int | None = None
    stall_timeout: int | None = None
    mixed_precision: str | None = None
    gpu_ids: str | None = None
    ranks: str | None = None
    log_dir: str | None = None
    job_name: str | None = None
    cpu: bool = False
    resume: bool = False
    as_a_whole: bool = False
    """Whether the target runs as a whole, also where the profile names a function of the user's script."""
    no_profile: bool = False
    """Whether only variables and options speak, and no file."""
    for_pod: bool = False
    """Whether it is for the workers of a TPU pod, of which this machine's own profile says nothing."""


def prepare(request: Request, environ: Mapping[str, str]) -> tuple[Resolved, Plan]:
    """The profile in force and the plan of a request, on this machine.

    Raises:
        UsageError: A profile, variable or option cannot be used, or not on this machine.
    """
    found = detect_machine(environ, cpu=request.cpu)
    resolved = resolve(request, environ, found)
    return resolved, make_plan(request, resolved, environ, found)


def resolve(request: Request, environ: Mapping[str, str], found: Machine) -> Resolved:
    """The profile in force; where no layer says how processes start, what suits the machine.

    Raises:
        UsageError: A profile, variable or option cannot be used.
    """
    if request.cpu and request.gpu_ids is not None:
        raise UsageError(f"--cpu and --gpu-ids {request.gpu_ids} contradict each other. Give one of them.")
    said = _said(request, environ)
    assigned = layers.assigned(request.assignments, kind=_kind(said))
    if _kind(said) is None:
        suits = launchers.suggest(_of_use(found, [*said, assigned]))
        said.insert(0, Layer("detected", {"launcher.kind": suits}, {"": "detected"}))
    kind = _kind([*said, assigned])
    launcher = _launcher(kind)
    options = [layer for layer in _options(request) if not (launcher.alone and _asks_for_one(layer))]
    options = [_in_its_words(kind, layer) for layer in options]
    around = find_node_layout(request, environ, kind, found)
    if around.ranks:
        one = Layer(around.source, {"launcher.kind": "single"}, {"": around.source})
        return layers.resolve([*said, assigned, *(_not_a_count(layer) for layer in options), one])
    if values := _derived(around, options):
        several = kind if launcher.runs == "pod" else "torchrun"
        said.append(Layer(around.source, {"launcher.kind": several, **values}, {"": around.source}))
    elif launcher.alone:
        said += _not_alone(options, request)
    return layers.resolve([*said, assigned, *options])


def _not_alone(options: Iterable[Layer], request: Request) -> list[Layer]:
    """The launcher that options need which one process by itself cannot follow; none if there are no such options."""
    options = list(options)
    watched = [layer for layer in options if not _WATCHED.isdisjoint(layer.values)]
    counts = [
        layer for layer in options if not _COUNTS.isdisjoint(layer.values) or _names_several_gpus(layer)
    ]
    if not watched and not counts:
        _refuse_logs(request)
    return [
        *(Layer(layer.name, _AGENT, layer.where) for layer in watched[:1]),
        *(Layer(layer.name, {"launcher.kind": "torchrun"}, layer.where) for layer in counts[:1]),
    ]


def _names_several_gpus(layer: Layer) -> bool:
    """Return True if an option chooses several GPUs, each of which gets a process."""
    return "," in str(layer.values.get("launcher.gpu_ids"))


def _refuse_logs(request: Request) -> None:
    for option, value in (("--ranks", request.ranks), ("--log-dir", request.log_dir)):
        if value is not None:
            raise UsageError(
                f"{option} is for the launcher torchrun (--set launcher.kind=torchrun): with single, accel launch "
                "becomes the script, and what that writes goes to the screen only"
            )


def make_plan(request: Request, resolved: Resolved, environ: Mapping[str, str], found: Machine) -> Plan:
    """The plan of a request.

    Raises:
        UsageError: The profile cannot run it on this machine.
    """
    path = Path(request.target)
    if request.kind == "script" and not resolved.profile.start.alone and path.exists() and not path.is_file():
        raise UsageError(
            f"the script {request.target} is a pipe, which one process alone can read. Save it to a file, or launch one "
            "process"
        )
    resolved.profile.start.check_carrier(resolved.profile.settings)
    job = Job(
        target=request.target,
        args=request.args,
        kind=request.kind,
        settings=resolved.profile.settings,
        env=resolved.profile.env,
        environ=environ,
        machine=found,
        python=sys.executable,
        as_a_whole=request.as_a_whole,
        nodes=find_node_layout(request, environ, resolved.profile.launcher.kind, found),
    )
    return plan_layout(resolved.profile.start, job)


def find_node_layout(
    request: Request, environ: Mapping[str, str], kind: str | None, found: Machine
) -> nodes.Facts:
    """What options, schedulers and the machine itself say of the machines there are, as far as a launcher asks.

    Raises:
        UsageError: They contradict each other.
    """
    runs = _launcher(kind).runs
    if request.for_pod or runs == "job":
        if request.node_rank is not None:
            raise UsageError(
                f"--node-rank numbers the machine accel launch runs on, and launcher.kind: {kind} runs the script elsewhere"
            )
        return nodes.Facts()
    typed = nodes.Typed(
        nnodes=_scalar(request.nnodes, "--nnodes"),
        nproc_per_node=_scalar(request.nproc_per_node, "--nproc-per-node"),
        node_rank=request.node_rank,
        rdzv_endpoint=request.rdzv_endpoint,
        max_restarts=request.max_restarts,
    )
    if runs == "pod":
        return nodes.pod(typed, environ, found.tpu)
    return nodes.facts(typed, environ, parent=os.getppid())


def looked(plan: Plan, *, offline: bool) -> str:
    """What a service would be asked and sent, where one runs the processes; nothing is changed by it.

    Args:
        plan: A plan that has something to look up.
        offline: Whether nobody is asked either.
    """
    module, _, function = plan.look.partition(":")
    look: Callable[..., str] = getattr(importlib.import_module(module), function)
    return look(plan, offline=offline)


def run_plan(plan: Plan) -> int:
    """Carry a plan out; the exit code of the script.

    Raises:
        AccelError: torch cannot be loaded.
    """
    module, _, function = plan.runner.partition(":")
    try:
        runner: Callable[[Plan], int] = getattr(importlib.import_module(module), function)
    except (ImportError, MemoryError, OSError) as error:
        raise AccelError(explain_torch_error(error)) from error
    return runner(plan)


def detect_machine(environ: Mapping[str, str], *, cpu: bool) -> Machine:
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


def find_options_after_script(request: Request, options: Iterable[str]) -> list[str]:
    """Find the options of `accel launch` among the arguments of a script that does not declare them.

    Args:
        request: A program (`--no-python`) has options of its own.
        options: All options of `accel launch`; one letter is too likely to be the script's own.
    """
    own = request.args[: request.args.index("--")] if "--" in request.args else request.args
    ours = {name for name in options if name.startswith("--")} - {"--help"}
    names = (argument.partition("=")[0] for argument in own)
    found = dict.fromkeys(name for name in names if name.replace("_", "-") in ours)
    if not found or request.kind == "program":
        return []
    try:
        source = source_of(request.kind, request.target).decode(errors="replace")
    except (OSError, ImportError, ValueError):  # a pod's script may be on its workers only
        source = ""
    return [name for name in found if not _declares(source, name)]


def _declares(source: str, option: str) -> bool:
    """Return True if the text of a script has an option, or reads or declares a parameter of its name."""
    words = re.escape(option.removeprefix("--").replace("_", "-")).replace(r"\-", "[-_]")
    declared = rf"--{words}(?![-\w])|\.{words}\b(?!\s*\()|\b{words}\s*(:[ \t]*\w|=(?!=))"
    return re.search(declared, source) is not None


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{target} is a directory; give the script inside it, or a package with -m")
    if not path.exists():
        raise UsageError(f"the script {target} does not exist{_beside(path)}")
    # Not by opening it: a pipe would lose its writer.
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {target} cannot be read: {os.strerror(errno.EACCES)}")


def _beside(path: Path) -> str:
    """The file that was probably meant, if one name on the way to it is a near miss."""
    missing = next(part for part in (*reversed(path.parents), path) if not part.exists())
    if not missing.parent.is_dir():
        return ""
    meant = find_nearest(missing.name, [item.name for item in missing.parent.iterdir()])
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


def _said(request: Request, environ: Mapping[str, str]) -> list[Layer]:
    """The layers below the options: files and variables, or variables only."""
    if request.no_profile:
        return [layer for layer in (layers.environment(environ),) if layer.values]
    found = layers.stack(Store.from_env(environ, Path.cwd()), environ, request.profile)
    return [layer for layer in found if not (request.for_pod and layer.name == "user")]


def _launcher(kind: Any) -> type[Launcher]:
    """The launcher of a kind; one that no layer names, or names wrongly, is taken for any that runs here."""
    return launchers.LAUNCHERS.get(kind, Launcher)


def _kind(said: Iterable[Layer]) -> Any:
    """The launcher that the last layer to name one names."""
    return _last(said, "launcher.kind")


def _last(said: Iterable[Layer], key: str) -> Any:
    """What the last layer that says a key says."""
    named = [layer.values[key] for layer in said if key in layer.values]
    return named[-1] if named else None


def _of_use(found: Machine, said: Iterable[Layer]) -> Machine:
    """The machine without a TPU that it was told not to use."""
    return found if _last(said, "device") in {None, "auto", "xla"} else replace(found, tpu=Tpu())


def _asks_for_one(layer: Layer) -> bool:
    """Whether a layer only asks for the one process, or the one machine, that `single` gives anyway."""
    return any(layer.values == {f"launcher.{key}": 1} for key in ("nproc_per_node", "nnodes"))


def _in_its_words(kind: Any, layer: Layer) -> Layer:
    """An option's layer, under the key by which the launcher of that kind knows it."""
    own = _launcher(kind).words
    return Layer(layer.name, {own.get(key, key): value for key, value in layer.values.items()}, layer.where)


def _derived(around: nodes.Facts, options: Iterable[Layer]) -> dict[str, Any]:
    """What a scheduler says of the launcher's section, less what an option says itself."""
    typed = {key for layer in options for key in layer.values}
    keys = {f"launcher.{key}": value for key, value in around.values.items()} if around.source else {}
    return {key: value for key, value in keys.items() if key not in typed}


def _not_a_count(layer: Layer) -> Layer:
    """An option's layer, empty where `nodes.facts` has read the option already."""
    return Layer(layer.name, {}) if not _COUNTS.isdisjoint(layer.values) else layer


def _scalar(text: str | None, option: str) -> Any:
    # Empty is what an unset shell variable leaves: it is no number, and not the same as no option.
    return text and yaml_io.scalar(text, option)


def _options(request: Request) -> list[Layer]:
    """The options that stand for values of the profile, each a layer of its own."""
    said: dict[str, tuple[str, Any]] = {
        "--cpu": ("device", "cpu" if request.cpu else None),
        "--resume": ("resume", True if request.resume else None),
        "--mixed-precision": ("mixed_precision", request.mixed_precision),
        "--nproc-per-node": ("launcher.nproc_per_node", _scalar(request.nproc_per_node, "--nproc-per-node")),
        "--nnodes": ("launcher.nnodes", _scalar(request.nnodes, "--nnodes")),
        "--gpu-ids": ("launcher.gpu_ids", request.gpu_ids),
        "--rdzv-endpoint": ("launcher.rdzv_endpoint", request.rdzv_endpoint),
        "--rdzv-id": ("launcher.rdzv_id", request.rdzv_id),
        "--max-restarts": ("launcher.max_restarts", request.max_restarts),
        "--ranks": ("launcher.ranks", request.ranks),
        "--log-dir": ("launcher.log_dir", request.log_dir),
        "--job-name": ("launcher.job_name", request.job_name),
        "--shutdown-timeout": ("launcher.shutdown_timeout", request.shutdown_timeout),
        "--stall-timeout": ("launcher.stall_timeout", request.stall_timeout),
    }
    return [
        Layer(option, {key: value}, {"": option})
        for option, (key, value) in said.items()
        if value is not None
    ]


_NAMES = ("dp_replicate", "dp_shard", "cp", "tp")
Sizes = tuple[int, int, int, int]


def plan_layout(launcher: Launcher, job: Job) -> Plan:
    """What will happen if a launcher runs the job, with how models are divided.

    Args:
        launcher: How the processes start.
        job: What is to run.

    Raises:
        UsageError: It cannot run this way on this machine, or the processes cannot divide models so.
    """
    launcher.check_layout(job.settings)
    plan = launcher.plan(job)
    if not launcher.divides:
        return plan
    worlds = launcher.worlds(job, plan)
    return replace(plan, layout=_describe_layout(job, _fit_layout(job, worlds), known=bool(worlds)))


def _fit_layout(job: Job, worlds: Sequence[int]) -> list[Sizes]:
    """The sizes for each number of processes that there may be."""
    settings = job.settings
    try:
        return [check_layout(settings.parallel, settings.fully_shard, world) for world in worlds or (None,)]
    except SettingsError as error:
        come_and_go = (
            f"; with launcher.nnodes a range there may be {worlds[0]} to {worlds[-1]} processes, and dp_shard: auto fits "
            "every number that the other sizes divide"
        )
        raise UsageError(f"{error}{come_and_go if len(worlds) > 1 else ''}") from None


def _describe_layout(job: Job, every: Sequence[Sizes], *, known: bool) -> str:
    """The sizes above 1 under their names, those that change with the machines as a range."""
    parallel = job.settings.parallel
    if parallel.plain:
        return ""
    said = []
    for index, name in enumerate(_NAMES):
        low, high = every[0][index], every[-1][index]
        auto = name == "dp_shard" and parallel.dp_shard == "auto"
        if high > 1 or auto:
            said.append(
                f"{name} {'auto' if auto and not known else low if low == high else f'{low} to {high}'}"
            )
    return " x ".join(said)
