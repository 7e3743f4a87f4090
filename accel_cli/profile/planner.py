"""Two stages of a launch: `resolve` a request to the profile that it runs with, and `plan` what starts.

`accel_cli.commands.launch` has the stages before and after them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_cli import launchers
from accel_cli.errors import UsageError
from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.launcher import Launcher, LaunchSpec, Plan
from accel_cli.launchers.torchrun import NODE_CHECK
from accel_cli.planning import machine as hardware
from accel_cli.planning.launch_options import LaunchOption, Request
from accel_cli.planning.machine import Machine
from accel_cli.planning.nodes import NodeLayout, NodeOptions
from accel_cli.profile import layers, yaml_io
from accel_cli.profile.layers import CONFIG_FILE, Layer, Resolved
from accel_cli.profile.options import OPTIONS
from accel_cli.profile.store import ProfileStore
from accel_runtime.environment.accelerate import encode_variables
from accel_runtime.environment.accelerate.export import (
    build_export,
    read_user_variables,
    select_file_variables,
)
from accel_runtime.environment.cgroup import count_cpus
from accel_runtime.environment.engines import EngineConfig
from accel_runtime.environment.layouts import DIMENSION_NAMES, name_dimension
from accel_runtime.environment.settings import (
    ACCELERATE_LIMITS,
    EXPORTED,
    PREFIX,
    RECORD,
    Settings,
    SettingsError,
    check_layout,
    find_engine_conflict,
)
from accel_runtime.environment.topology import RankGrid

__all__ = ["ResolvedLaunch", "build_plan", "detect_machine", "plan", "resolve"]

_SEVERAL_PROCESSES = frozenset(
    f"launcher.{key}" for key in ("nproc_per_node", "nnodes", "rdzv_endpoint", "rdzv_id", "max_restarts")
)
"""Keys that need a launcher of several processes."""
_AGENT = frozenset(
    f"launcher.{key}"
    for key in (
        "shutdown_timeout",
        "stall_timeout",
        "stall_action",
        "startup_timeout",
        "metrics_port",
        NODE_CHECK,
        "progress_line",
        "progress_file",
        "progress_interval",
    )
)
"""Keys that need an elastic agent, also for one process."""
_CAPTURED_OUTPUT = frozenset({"launcher.ranks", "launcher.log_dir"})
"""Keys that need a launcher that captures the output, and do not choose one."""
_EXPORTING = frozenset({"local", "pod"})
"""Locations of launchers whose plan has the environment of the processes themselves."""


@dataclass(frozen=True, kw_only=True)
class ResolvedLaunch(Resolved):
    """The profile of a launch, with what it was resolved for."""

    request: Request
    environ: Mapping[str, str]
    """The environment of this process."""
    machine: Machine
    """The machine whose devices are used."""
    nodes: NodeLayout
    """The nodes of the run, and the rank of this one."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about files that are not used."""


# The profile of a launch


def resolve(
    request: Request,
    environ: Mapping[str, str],
    machine: Machine | None = None,
    *,
    reads_engine_file: bool = True,
) -> ResolvedLaunch:
    """Return the profile of a request.

    Options override assignments (`--set`), these override the values that a scheduler sets, and these override the files
    and variables of the profile. If none of them sets a launcher, the profile has the one that suits the machine.

    Args:
        request: The launch.
        environ: The environment.
        machine: The machine whose devices are used; None for this one.
        reads_engine_file: If false, values that the file of an engine decides are left out, and its mistakes are no error, for
            commands that start nothing.

    Raises:
        UsageError: A file, variable or option is invalid, or they contradict each other; its `notes` are those about files
            that are not used.
    """
    if "cpu" in request.options and "gpu_ids" in request.options:
        raise UsageError(
            f"Cannot use --cpu with --gpu-ids {request.options['gpu_ids']}: they select different devices. Leave out one of "
            "them."
        )
    machine = machine or detect_machine(environ, cpu="cpu" in request.options)
    profiles = None if "no_profile" in request.options else ProfileStore.from_env(environ, Path.cwd())
    notes = layers.list_unused_files(profiles, environ) if profiles else ()
    try:
        found, nodes = _list_layers(request, environ, machine, profiles)
        resolved = layers.resolve(_replace_file_values(request, found))
        resolved = resolved.complete_engine() if reads_engine_file else resolved
    except UsageError as error:
        error.notes = notes
        raise
    parts = {field.name: getattr(resolved, field.name) for field in fields(resolved)}
    return ResolvedLaunch(
        **parts, request=request, environ=environ, machine=machine, nodes=nodes, notes=notes
    )


def detect_machine(environ: Mapping[str, str], *, cpu: bool) -> Machine:
    """Return the hardware of this machine, as far as a launch needs it."""
    return Machine(count_cpus()) if cpu else hardware.detect_quickly(environ)


def _list_layers(
    request: Request, environ: Mapping[str, str], machine: Machine, profiles: ProfileStore | None
) -> tuple[list[Layer], NodeLayout]:
    """Return the layers of a launch, the weakest first, and its nodes."""
    base = _read_layers(request, environ, profiles)
    base += _select_launcher(request, base)
    profile_kind = layers.find_value(base, "launcher.kind")
    assignments = layers.parse_assignments(request.options.get("set", ()), kind=profile_kind)
    if profile_kind is None:
        device = layers.find_value([*base, assignments], "device")
        suggested = launchers.suggest_launcher(machine, device)
        base.insert(0, Layer("detected", {"launcher.kind": suggested}, {"": "detected"}))
    kind = layers.find_value([*base, assignments], "launcher.kind")
    # An invalid kind is reported with the other problems of the profile.
    launcher = LAUNCHERS[kind] if kind in LAUNCHERS else Launcher  # noqa: SIM401 - a kind may be a list
    options = _build_option_layers(request, launcher)
    nodes = _find_nodes(request, environ, kind, launcher, machine)
    if nodes.ranks:
        # Another launcher has started a process for each rank.
        single = _build_layer(nodes.source, {"launcher.kind": "single"})
        options = [layer for layer in options if _SEVERAL_PROCESSES.isdisjoint(layer.values)]
        return [*base, assignments, *options, single], nodes
    option_keys = {key for layer in options for key in layer.values}
    derived = {f"launcher.{key}": value for key, value in nodes.values.items()} if nodes.source else {}
    if not derived.keys() <= option_keys:
        node_launcher = kind if launcher.location == "pod" else "torchrun"
        derived = {key: value for key, value in derived.items() if key not in option_keys}
        base.append(_build_layer(nodes.source, {"launcher.kind": node_launcher, **derived}))
    elif launcher.replaces_process:
        base += _choose_torchrun(options)
    return [*base, assignments, *options], nodes


def _replace_file_values(request: Request, found: list[Layer]) -> list[Layer]:
    """Return layers in which those above the config file replace what depends on their keys.

    Raises:
        UsageError: A layer above the file shards models otherwise than the file, whose way is not in a profile.
    """
    file = request.config_file
    place = next((number for number, layer in enumerate(found) if layer.name == CONFIG_FILE), None)
    if file is None or place is None:
        return found
    above = found[place + 1 :]
    for layer in above:
        key = next((key for key in layer.values if key.startswith(("parallel.", "fully_shard."))), None)
        if file.fixed_reason and key:
            source = layer.where.get(key) or layer.name
            raise UsageError(
                f"Cannot use {source if key in source else f'{source} ({key})'} with {file.name}: the file has {file.fixed_reason}, which shards models without "
                "parallel: and fully_shard:. Leave it out, or change the file."
            )
    stronger = {key for layer in above for key in layer.values}
    replaced = {key for key, other in file.replaced_by.items() if other in stronger}
    kept = {key: value for key, value in found[place].values.items() if key not in replaced}
    return [*found[:place], replace(found[place], values=kept), *above]


def _read_layers(request: Request, environ: Mapping[str, str], profiles: ProfileStore | None) -> list[Layer]:
    """Return the layers of files and variables, or of variables only."""
    file = request.config_file
    config = [Layer(CONFIG_FILE, file.values, {"": file.name})] if file else []
    if profiles is None:
        return [layer for layer in (*config, layers.read_environment(environ)) if layer.values]
    found = layers.read_layers(profiles, environ, request.options.get("profile"), config=config)
    return [layer for layer in found if not (request.for_pod and layer.name == "user")]


def _build_layer(source: str, values: Mapping[str, Any]) -> Layer:
    return Layer(source, values, {"": source})


def _select_launcher(request: Request, base: Sequence[Layer]) -> list[Layer]:
    """Return a layer with the launcher that an option selects, unless the profile already has it."""
    if request.options.keys() <= OPTIONS.keys():  # the options of launchers are loaded for one of them only
        return []
    selected = launchers.find_selected(request.options)
    if selected is None or layers.find_value(base, "launcher.kind") == selected[0]:
        return []
    kind, option = selected
    return [_build_layer(option.flag, {"launcher.kind": kind})]


def _get_launcher_options(request: Request) -> dict[str, Any]:
    """Return the typed options that launchers declare, by name."""
    return {name: value for name, value in request.options.items() if name not in OPTIONS}


def _build_option_layers(request: Request, launcher: type[Launcher]) -> list[Layer]:
    """Return a layer for each option that sets a key of the profile."""
    option_layers = []
    for option in (*OPTIONS.values(), *launcher.launch_options):
        if not option.key or option.name not in request.options:
            continue
        value = _parse_value(option, request.options[option.name])
        if launcher.replaces_process and option.name in {"nproc_per_node", "nnodes"} and value == 1:
            continue
        option_layers.append(
            _build_layer(option.flag, {launcher.key_aliases.get(option.key, option.key): value})
        )
    return option_layers


def _choose_torchrun(options: Sequence[Layer]) -> list[Layer]:
    """Return a layer that replaces `single` by torchrun if an option needs several processes or an agent."""
    for layer in options:
        if not _SEVERAL_PROCESSES.isdisjoint(layer.values) or "," in str(
            layer.values.get("launcher.gpu_ids")
        ):
            return [_build_layer(layer.name, {"launcher.kind": "torchrun"})]
    sources = [layer.name for layer in options if not _AGENT.isdisjoint(layer.values)]
    if sources:
        return [_build_layer(sources[0], {"launcher.kind": "torchrun", "launcher.nproc_per_node": 1})]
    for layer in options:
        if not _CAPTURED_OUTPUT.isdisjoint(layer.values):
            raise UsageError(
                f"{layer.name} needs launcher.kind: torchrun (--set launcher.kind=torchrun). With 'single' the script "
                "replaces accel launch and writes to the terminal directly."
            )
    return []


def _find_nodes(
    request: Request, environ: Mapping[str, str], kind: Any, launcher: type[Launcher], machine: Machine
) -> NodeLayout:
    """Return the nodes of a launch as its launcher finds them."""
    if request.for_pod or launcher.location in {"hosts", "job"}:
        if "node_rank" in request.options:
            raise UsageError(
                f"Cannot use --node-rank with launcher.kind: {kind}: it is the rank of this machine, and the script runs on "
                "others. Leave it out."
            )
        return NodeLayout()
    names = [field.name for field in fields(NodeOptions) if field.name in request.options]
    options = NodeOptions(**{name: _parse_value(OPTIONS[name], request.options[name]) for name in names})
    return launcher.find_nodes(options, environ, machine)


def _parse_value(option: LaunchOption, value: Any) -> Any:
    """Return the value of the profile key for a value as typed."""
    if option.const is not None:
        return option.const
    if option.type != "scalar" or value == "":
        # Empty is what an unset shell variable leaves: not a number, and not the same as no option.
        return value
    return yaml_io.scalar(value, option.flag)


# The plan


def plan(resolved: ResolvedLaunch) -> Plan:
    """Return the plan of a launch.

    Raises:
        UsageError: The launcher cannot run it on this machine.
    """
    request, profile, launcher = resolved.request, resolved.profile, resolved.profile.launcher
    option_values = _get_launcher_options(request)
    if option_values:
        launchers.check_options(launcher.kind, option_values)
    path = Path(request.target)
    if request.kind == "script" and not launcher.replaces_process and path.exists() and not path.is_file():
        raise UsageError(
            f"Cannot run {request.target} in several processes: it is a pipe, which only one can read. Save it to a file, "
            "or launch one process."
        )
    if request.kind == "program" and profile.settings.measure_flops:
        raise UsageError(
            f"Cannot measure the operations of {request.target}: it is a program (--no-python), and they are counted in Python. Set "
            "measure_flops to false."
        )
    if request.kind == "program" and profile.settings.check_replay != "never":
        raise UsageError(
            f"Cannot check passes of {request.target}: it is a program (--no-python), and they are run again in Python. Set check_replay "
            "to never."
        )
    _check_recorders(resolved)
    _check_process_group_backend(launcher, profile.settings.process_group_backend)
    spec = LaunchSpec(
        target=request.target,
        args=request.args,
        kind=request.kind,
        settings=profile.settings,
        env=profile.env,
        # The environment of a pod's workers is not known here.
        environ={} if request.for_pod else resolved.environ,
        machine=resolved.machine,
        python=sys.executable,
        is_builtin=request.is_builtin,
        nodes=resolved.nodes,
        option_values=option_values,
        jobs_options=_format_jobs_options(request, launcher),
    )
    of_file = _select_file_variables(request, spec.settings)
    if launcher.location not in _EXPORTING:
        # The launch on each node exports for its own device, and keeps variables that mean the same.
        spec = replace(spec, env={**of_file, **spec.env})
    planned = build_plan(launcher, spec, resolved.engine, of_file)
    if request.translation and not request.for_pod:  # the number of processes of a pod is not known here
        request.translation.check(resolved.environ, planned.nnodes, planned.nproc_per_node, planned.layout)
    if request.same_as:
        planned = replace(planned, notes=(*planned.notes, f"same as: {request.same_as}"))
    return planned


def _check_recorders(resolved: ResolvedLaunch) -> None:
    """Raise UsageError for variables of recorders that are invalid, or have no effect in this launch."""
    request, environ, typed = resolved.request, resolved.environ, resolved.profile.env
    for variable, value in {**typed, **environ}.items():
        if not variable.startswith(RECORD) or not value:
            continue
        flag = f"--{variable.removeprefix(PREFIX).lower().replace('_', '-')}"
        if variable in environ and typed.get(variable, value) != value:
            raise UsageError(
                f"Cannot use {flag} {typed[variable]}: {variable} is set to {value!r}. Unset it."
            )
        # Only a launch with a recorder imports it.
        from accel_runtime.observe.recorders import find_recorder  # noqa: PLC0415

        try:
            find_recorder(variable, value).check(value)
        except SettingsError as error:
            raise UsageError(str(error)) from None
        if request.kind == "program":
            raise UsageError(
                f"Cannot use {flag}: {request.target} is a program (--no-python), and a recorder needs Python. Leave it out."
            )
        if resolved.nodes.inherited:
            raise UsageError(
                f"Cannot use {flag}: another launcher has started this rank, which has no folder for its files. Start the script by "
                "accel launch alone."
            )


def _select_file_variables(request: Request, settings: Settings) -> dict[str, str]:
    """Return the variables of the config file of Accelerate that say what the launch does; none without a file."""
    if (file := request.config_file) is None:
        return {}
    alone = layers.resolve([Layer(CONFIG_FILE, file.values, {"": file.name})])
    return select_file_variables(settings, file.variables, alone.profile.settings)


def _format_jobs_options(request: Request, launcher: Launcher) -> str:
    """Return the options with which `accel jobs` finds a job that this launch submits."""
    if launcher.location != "job":
        return ""
    from accel_cli.launchers.job_service import format_options  # noqa: PLC0415 - for launchers that submit jobs

    keys = {"launcher.kind", *(f"launcher.{key}" for key in launcher.job_keys)}
    assignments = [text for text in request.options.get("set", ()) if text.partition("=")[0] in keys]
    return format_options(request.options.get("profile"), assignments)


def _check_process_group_backend(launcher: Launcher, name: str) -> None:
    """Raise UsageError if the processes of a launcher do not have a process group backend."""
    if launcher.supports_process_group_backend(name):
        return
    kinds = [kind for kind, other in LAUNCHERS.items() if name in other.process_group_backends]
    instead = (
        f"Use auto, or launcher.kind: {' or '.join(kinds)} with an image that has it."
        if kinds
        else "Use auto."
    )
    raise UsageError(
        f"Invalid process_group_backend '{name}': its library is not installed here, and launcher.kind: {launcher.kind} does "
        f"not bring it. {instead}"
    )


def build_plan(
    launcher: Launcher,
    spec: LaunchSpec,
    engine: EngineConfig | None = None,
    of_file: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Return the plan of a launcher with the layout of models.

    Args:
        launcher: The launcher.
        spec: The launch.
        engine: The configuration of the engine; None if none is used.
        of_file: Variables of a config file of Accelerate.
    """
    launcher.check_layout(spec.settings)
    if not launcher.may_share_files:
        spec = replace(spec, settings=replace(spec.settings, shared_files=False))
    plan = launcher.plan(_locate_engine_file(launcher, spec))
    world_sizes = launcher.get_world_sizes(spec, plan)
    if engine:
        _check_engine_device(spec, plan)
        plan = replace(plan, layout=engine.summary)
    elif launcher.supports_sharding:
        layouts = _compute_layouts(spec, world_sizes)
        plan = replace(plan, layout=_format_layout(spec, layouts, is_known=bool(world_sizes)))
    return (
        _export_to_accelerate(spec, plan, world_sizes, of_file) if launcher.location in _EXPORTING else plan
    )


def _check_engine_device(spec: LaunchSpec, plan: Plan) -> None:
    """Raise if the device that was detected is not one of the engine's."""
    engine, conflict = spec.settings.engine, find_engine_conflict(replace(spec.settings, device=plan.device))  # type: ignore[arg-type]
    if engine and conflict:
        raise UsageError(
            f"Cannot use {engine.key}: {engine.choice} with {conflict.key}: {spec.settings.device}, which is {plan.device} here: "
            f"{conflict.reason}. Use --cpu, or remove the section {engine.name}."
        )


def _locate_engine_file(launcher: Launcher, spec: LaunchSpec) -> LaunchSpec:
    """Return a launch with the path of the engine's file as seen from the working folder of its nodes.

    Raises:
        UsageError: The launcher sends a folder that the file is not in.
    """
    engine, here = spec.settings.engine, Path.cwd().resolve()
    if engine is None or not engine.path or spec.is_builtin:
        return spec
    path, folder = Path(engine.path).resolve(), launcher.sent_folder
    if folder is not None and not path.is_relative_to(source := Path(folder).resolve()):
        raise UsageError(
            f"Cannot send {path} ({engine.name}.{engine.file}): it is not in {source}, the folder that is sent. Copy it there, or "
            f"set the keys of {engine.name} instead of a file."
        )
    if folder is None and not (launcher.has_own_folder and path.is_relative_to(here)):
        return spec
    return replace(spec, settings=spec.settings.with_engine(engine.move(os.path.relpath(path, here))))


def _export_to_accelerate(
    spec: LaunchSpec, plan: Plan, world_sizes: Sequence[int], of_file: Mapping[str, str]
) -> Plan:
    """Return a plan with the variables of Accelerate, for scripts that use it themselves."""
    # The profile's own variables are those of the user, too.
    environ = {**plan.env, **spec.environ}
    user = read_user_variables(environ, frozenset(spec.env.keys() - spec.environ.keys()))
    user = user._replace(of_file=of_file)
    world_size = world_sizes[0] if len(world_sizes) == 1 else None
    export = build_export(spec.settings, plan.device, world_size, environ, user)
    records = {EXPORTED: encode_variables(export.variables), ACCELERATE_LIMITS: export.report}
    # Also empty, in place of the records of a launch that this one is inside of.
    needed = {name: text for name, text in records.items() if text or name in environ}
    return replace(
        plan, env={**plan.env, **export.variables, **needed}, notes=(*plan.notes, *export.replaced)
    )


def _compute_layouts(spec: LaunchSpec, world_sizes: Sequence[int]) -> list[RankGrid]:
    """Return the grid of the ranks for each possible world size."""
    parallel, fully_shard = spec.settings.parallel, spec.settings.fully_shard
    try:
        return [check_layout(parallel, fully_shard, size) for size in world_sizes or (None,)]
    except SettingsError as error:
        reason = ""
        if len(world_sizes) > 1:
            reason = (
                f"; with launcher.nnodes a range there may be {world_sizes[0]} to {world_sizes[-1]} processes, and dp_shard: "
                "auto fits every number that the other sizes divide"
            )
        raise UsageError(f"{error}{reason}") from None


def _format_layout(spec: LaunchSpec, layouts: Sequence[RankGrid], *, is_known: bool) -> str:
    """Return the dimensions above 1 with their sizes; a size that depends on the nodes is a range."""
    parallel = spec.settings.parallel
    if parallel.plain:
        return ""
    dimensions = []
    for role in DIMENSION_NAMES:
        name = name_dimension(layouts[0], role)
        low, high = layouts[0].size(role), layouts[-1].size(role)
        is_auto = name == "dp_shard" and parallel.dp_shard == "auto"
        if high > 1 or is_auto:
            size = "auto" if is_auto and not is_known else low if low == high else f"{low} to {high}"
            dimensions.append(f"{name} {size}")
    return " x ".join(dimensions)
