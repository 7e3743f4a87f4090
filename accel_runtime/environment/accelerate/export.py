"""Variables of Accelerate for what a profile says, for scripts that use Accelerate itself, and what it cannot do.

The meaning of each variable is that of Accelerate 1.15: `state.py`, `accelerator.py` and `utils/dataclasses.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from accel_runtime.environment.accelerate import launch, sharding
from accel_runtime.environment.accelerate.setting import Setting
from accel_runtime.environment.accelerate.variables import ENGINE_VARIABLES, translate_supported
from accel_runtime.environment.layouts import DIMENSION_NAMES, FullyShard, Parallel, SettingsError
from accel_runtime.environment.settings import Settings, find_user_variables, variable_name

__all__ = [
    "AccelerateExport",
    "UserVariables",
    "build_export",
    "read_user_variables",
    "select_file_variables",
]

_ON, _OFF = "true", "false"
_CPU = "cpu"
_LAYOUT = ("parallel", "fully_shard", "engines")
_COMPILE, _PRECISION = ("compile",), ("mixed_precision",)


def _list_names(*settings: Setting) -> frozenset[str]:
    return frozenset(setting.variable for setting in settings if setting.variable)


_OF_FILE: Mapping[tuple[str, ...], frozenset[str]] = {
    _PRECISION: _list_names(launch.MIXED_PRECISION),
    _COMPILE: _list_names(*launch.DYNAMO_SETTINGS),
    _LAYOUT: _list_names(
        sharding.USE_FSDP,
        *sharding.FSDP.settings,
        sharding.USE_PARALLELISM_CONFIG,
        *sharding.PARALLELISM.settings,
    ),
}
"""The variables that a launch takes from a config file as they are, by the fields of the settings that they mean.

Others need more than the file: the device, DeepSpeed's JSON file, or the script's own accumulation steps.
"""


@dataclass(frozen=True)
class AccelerateExport:
    """The variables of Accelerate for a launch."""

    variables: Mapping[str, str]
    """Variables that the launcher adds to the environment of the processes."""
    replaced: tuple[str, ...] = ()
    """Sentences on the user's own variables that options of the launch replace."""
    limits: tuple[str, ...] = ()
    """Sentences on values of the profile that have no effect in a script that uses Accelerate."""
    trainer_limits: tuple[str, ...] = ()
    """Sentences on values that have no effect if it uses a Trainer of Transformers."""
    resume_limit: str = ""
    """The sentence on `resume`, which has an effect in scripts that use `accel_runtime.transformers`."""
    refusal: str = ""
    """The reason why such a script cannot run with this profile; empty if it can."""

    @property
    def report(self) -> str:
        """Return the limits and the refusal as JSON, for the processes; empty without any."""
        parts = {
            "limits": self.limits,
            "trainer_limits": self.trainer_limits,
            "resume_limit": self.resume_limit,
            "refusal": self.refusal,
        }
        return json.dumps(parts) if any(parts.values()) else ""


class UserVariables(NamedTuple):
    """The user's own variables: those that no launch of accel has exported."""

    variables: Mapping[str, str]
    settings: Settings
    """The settings that those of Accelerate mean, without those of the profile."""
    names: Mapping[str, str]
    """The names of those of Accelerate by the field of `Settings` that they set, in its flat form."""
    of_profile: frozenset[str] = frozenset()
    """The names of those in the section `env` of the profile, which the launch never changes."""
    of_file: Mapping[str, str] = MappingProxyType({})
    """The result of `select_file_variables`, which processes get instead of what the settings mean."""


class _Group(NamedTuple):
    """Variables of Accelerate that mean some fields of the settings together."""

    fields: tuple[str, ...]
    defaults: Mapping[Setting, str]
    """The variables that switch it off, with Accelerate's defaults."""
    values: Mapping[Setting, str]
    """The variables and their values for a launch; empty for the defaults."""


def read_user_variables(
    environ: Mapping[str, str], of_profile: frozenset[str] = frozenset()
) -> UserVariables:
    """Return the user's own variables; `of_profile` are those that are in the section `env` of the profile.

    Variables of Accelerate that accel does not support are left to a script that uses Accelerate itself.
    """
    variables = find_user_variables(environ)
    translated = translate_supported(
        {name: text for name, text in variables.items() if name not in of_profile}
    )
    try:
        settings = Settings.from_env({variable_name(name): other.text for name, other in translated.items()})
    except SettingsError:
        return UserVariables(variables, Settings(), {}, of_profile)
    names = {name: other.variable for name, other in translated.items()}
    return UserVariables(variables, settings, names, of_profile)


def select_file_variables(
    settings: Settings, variables: Mapping[str, str], meaning: Settings
) -> dict[str, str]:
    """Return the variables of a config file, without the groups that a launch has other settings for.

    Args:
        settings: The settings of the launch.
        variables: The variables that Accelerate's launcher sets for the file.
        meaning: The settings of the file alone.
    """
    names = {
        name
        for fields, names in _OF_FILE.items()
        if all(getattr(settings, field) == getattr(meaning, field) for field in fields)
        for name in names
    }
    return {name: text for name, text in variables.items() if name in names}


def build_export(
    settings: Settings,
    device: str,
    world_size: int | None,
    environ: Mapping[str, str],
    user: UserVariables,
) -> AccelerateExport:
    """Return the variables of Accelerate for the settings of a launch.

    Args:
        settings: The settings that the processes receive.
        device: The type of device of the processes.
        world_size: The number of processes; None if it is known only when they run.
        environ: The environment that the processes inherit.
        user: The user's own variables in it. A group of them that means the same as `settings` stays as it is, and so
            does each variable of the profile.
    """
    variables: dict[str, str] = {}
    replaced: list[str] = []
    for group in _list_groups(settings, device, world_size):
        if group.fields == _LAYOUT and _is_fsdp1(user):
            continue
        texts = {setting.variable: text for setting, text in group.values.items()}
        # Accelerate's launcher starts a run on the CPU without FSDP.
        if group.fields != _LAYOUT or device != _CPU:
            names = _OF_FILE.get(group.fields, frozenset())
            texts = {name: text for name, text in user.of_file.items() if name in names} or texts
        # Also the default, if the processes would inherit another value.
        texts |= {
            setting.variable: text
            for setting, text in group.defaults.items()
            if setting.variable not in texts and setting.variable in environ
        }
        means_same = all(getattr(settings, field) == getattr(user.settings, field) for field in group.fields)
        if means_same and texts.keys() & user.variables.keys():
            continue
        texts = {name: text for name, text in texts.items() if name not in user.of_profile}
        variables |= texts
        replaced += [
            f"{name}={before} of the environment is replaced by {text!r}."
            for name, text in texts.items()
            if (before := user.variables.get(name, text)).strip().lower() != text.lower()
        ]
    limits = (
        *_list_limits(settings),
        *_list_layout_limits(settings, device, world_size),
        *(ENGINE_VARIABLES[engine.name].list_limits(engine) if (engine := settings.engine) else ()),
    )
    return AccelerateExport(
        variables,
        tuple(replaced),
        limits,
        tuple(_list_trainer_limits(settings)),
        _describe_resume_limit(settings),
        _explain_refusal(settings, device),
    )


def _is_fsdp1(user: UserVariables) -> bool:
    """Return whether the profile's own variables use version 1 of FSDP, whose options those of a launch are not."""
    names = {sharding.USE_FSDP.variable, sharding.VERSION.variable}
    return names <= user.of_profile and user.variables.get(sharding.VERSION.variable) == "1"


def _list_groups(settings: Settings, device: str, world_size: int | None) -> Iterator[_Group]:
    steps = sharding.GRADIENT_ACCUMULATION_STEPS
    compiler = launch.DYNAMO_SETTINGS[0]
    switches = (engine.switch for engine in sharding.ENGINES)
    layout = dict.fromkeys((sharding.USE_FSDP, sharding.USE_PARALLELISM_CONFIG, *switches), _OFF)
    yield _Group(_PRECISION, {launch.MIXED_PRECISION: "no"}, _export_precision(settings))
    yield _Group(("device",), {launch.USE_CPU: _OFF}, {launch.USE_CPU: _ON} if device == _CPU else {})
    yield _Group(("log_level",), {}, _export_log_level(settings))
    yield _Group(("gradient_accumulation_steps",), {steps: "1"}, _export_accumulation(settings))
    yield _Group(_COMPILE, {compiler: "no"}, _export_compile(settings))
    engine = settings.engine
    values = (
        ENGINE_VARIABLES[engine.name].export(engine)
        if engine
        else _export_sharding(settings, device, world_size)
    )
    yield _Group(_LAYOUT, layout, values)
    yield _Group((), {}, ENGINE_VARIABLES[engine.name].export_implied(values) if engine else {})


def _export_precision(settings: Settings) -> dict[Setting, str]:
    precision = settings.mixed_precision
    return {} if precision == "no" else {launch.MIXED_PRECISION: precision}


def _export_log_level(settings: Settings) -> dict[Setting, str]:
    return {} if settings.log_level == "auto" else {launch.LOG_LEVEL: settings.log_level}


def _export_accumulation(settings: Settings) -> dict[Setting, str]:
    steps = settings.gradient_accumulation_steps
    return {} if steps == 1 else {sharding.GRADIENT_ACCUMULATION_STEPS: str(steps)}


def _export_compile(settings: Settings) -> dict[Setting, str]:
    compiler = settings.compile
    if compiler.backend == "no":
        return {}
    backend, mode, fullgraph, dynamic, regional = launch.DYNAMO_SETTINGS
    values = {
        backend: compiler.backend,
        mode: compiler.mode,
        fullgraph: _format_switch(compiler.fullgraph),
        regional: _format_switch(compiler.regional),
    }
    return values if compiler.dynamic == "auto" else values | {dynamic: _format_switch(compiler.dynamic)}


def _export_sharding(settings: Settings, device: str, world_size: int | None) -> dict[Setting, str]:
    parallel = settings.parallel
    values: dict[Setting, str] = {}
    if parallel.shards and device != _CPU:
        values |= {sharding.USE_FSDP: _ON, **_export_fully_shard(settings.fully_shard)}
    if _needs_mesh(parallel) and parallel.sp == 1 and (sizes := _find_sizes(parallel, world_size)):
        values |= {sharding.USE_PARALLELISM_CONFIG: _ON, **sizes}
    return values


def _needs_mesh(parallel: Parallel) -> bool:
    """Return whether the layout has more than one dimension, or another one than shards."""
    return (parallel.dp_replicate, parallel.splits_sequences, parallel.tp) != (1, 1, 1)


def _find_sizes(parallel: Parallel, world_size: int | None) -> dict[Setting, str] | None:
    """Return the sizes of the mesh; None if they are known only when the processes run."""
    if world_size is None and parallel.dp_shard == "auto":
        return None
    grid = parallel.build_grid(world_size)
    sizes = {f"parallel.{name}": grid.size(role) for role, name in DIMENSION_NAMES.items()}
    return {setting: str(sizes[setting.profile_key]) for setting in sharding.MESH_SIZES}


def _export_fully_shard(options: FullyShard) -> dict[Setting, str]:
    values = {
        sharding.VERSION: "2",
        sharding.RESHARD_AFTER_FORWARD: _format_switch(bool(options.reshard_after_forward)),
        sharding.CPU_OFFLOAD: _format_switch(options.cpu_offload),
        sharding.ACTIVATION_CHECKPOINTING: _format_switch(options.activation_checkpointing),
        **_export_wrap(options.wrap),
    }
    if options.ignore:
        # Accelerate matches a regular expression with the whole name of a module.
        values[sharding.IGNORED_MODULES] = "|".join(_to_regex(pattern) for pattern in options.ignore)
    return values


def _export_wrap(wrap: str) -> dict[Setting, str]:
    policies = {setting: policy.upper() for policy, setting in sharding.WRAP_POLICIES.items()}
    if wrap == "none":
        return {sharding.AUTO_WRAP_POLICY: policies[None]}
    if wrap.isdigit():
        return {sharding.AUTO_WRAP_POLICY: policies[sharding.MIN_NUM_PARAMS], sharding.MIN_NUM_PARAMS: wrap}
    by_class = {sharding.AUTO_WRAP_POLICY: policies[sharding.TRANSFORMER_CLS]}
    # Without names, Accelerate takes the model's own `_no_split_modules`, as `auto` does.
    return by_class if wrap == "auto" else by_class | {sharding.TRANSFORMER_CLS: wrap}


def _to_regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"[^.]*")


def _format_switch(value: bool) -> str:
    return _ON if value else _OFF


def _list_limits(settings: Settings) -> Iterator[str]:
    """Yield sentences on values that Accelerate has no variable for."""
    if settings.process_group_timeout != Settings.process_group_timeout:
        yield _format_limit(
            f"process_group_timeout: {settings.process_group_timeout}",
            "Pass InitProcessGroupKwargs(timeout=...) to the Accelerator, or ddp_timeout to TrainingArguments",
        )
    if settings.process_group_backend != "auto":
        yield _format_limit(
            f"process_group_backend: {settings.process_group_backend}",
            "Pass InitProcessGroupKwargs(backend=...) to the Accelerator, or ddp_backend to TrainingArguments",
        )

    if settings.global_batch_size != "none":
        yield _format_limit(
            f"global_batch_size: {settings.global_batch_size}",
            "Train with an accel_runtime.Accelerator, or choose batch size and accumulation in the script",
        )


def _describe_resume_limit(settings: Settings) -> str:
    if not settings.resume:
        return ""
    return _format_limit(
        "resume: true",
        "Load the checkpoint in the script, or give the Trainer an AccelCallback (accel_runtime.transformers)",
    )


def _list_trainer_limits(settings: Settings) -> Iterator[str]:
    """Yield sentences on values that a Trainer takes from its own arguments."""
    if settings.gradient_accumulation_steps != 1:
        yield (
            f"gradient_accumulation_steps: {settings.gradient_accumulation_steps} has no effect in a Trainer. Pass "
            "gradient_accumulation_steps to TrainingArguments."
        )
    if settings.compile.backend != "no":
        yield (
            f"compile.backend: {settings.compile.backend} has no effect in a Trainer. Pass torch_compile_backend to "
            "TrainingArguments."
        )


def _list_layout_limits(settings: Settings, device: str, world_size: int | None) -> Iterator[str]:
    """Yield sentences on the layout and the options of sharding."""
    parallel, options = settings.parallel, settings.fully_shard
    if parallel.tp_plan:
        yield _format_limit(
            "parallel.tp_plan", "Load the model with tp_plan='auto', which has a plan of its own"
        )
    if parallel.sp > 1:
        yield _format_limit(
            "the section parallel"
            if parallel.dp_replicate * parallel.tp > 1
            else f"parallel.sp: {parallel.sp}",
            "Set parallel.cp instead of parallel.sp, which needs an engine in Accelerate",
        )
    elif _needs_mesh(parallel) and _find_sizes(parallel, world_size) is None:
        yield _format_limit(
            "the section parallel",
            "Set parallel.dp_shard to a number, or launcher.nnodes to one: the number of processes is not known in advance",
        )
    if parallel.cp > 1 and not parallel.shards:
        yield _format_limit(
            f"parallel.cp: {parallel.cp}", "Set parallel.dp_shard: auto, which Accelerate needs for it"
        )
    if not parallel.shards or device == _CPU:
        return
    if options.reshard_after_forward not in {True, False}:
        yield (
            f"fully_shard.reshard_after_forward: {options.reshard_after_forward} is true in Accelerate, which has no number here."
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        if (value := getattr(options, name)) != "auto":
            yield _format_limit(
                f"fully_shard.{name}: {value}",
                "Pass FullyShardedDataParallelPlugin(mixed_precision_policy=...)",
            )
    if not options.cast_forward_inputs:
        yield _format_limit(
            "fully_shard.cast_forward_inputs: false",
            "Pass FullyShardedDataParallelPlugin(mixed_precision_policy=...)",
        )


def _format_limit(value: str, cure: str) -> str:
    return f"{value} has no effect in a script that uses Accelerate. {cure}."


def _explain_refusal(settings: Settings, device: str) -> str:
    if engine := settings.engine:
        return ENGINE_VARIABLES[engine.name].explain_refusal(engine, device)
    if not settings.parallel.shards or device != _CPU:
        return ""
    return (
        f"Cannot shard models on the CPU with Accelerate: parallel.dp_shard is {settings.parallel.dp_shard}, and Accelerate would "
        "replicate them instead. Set parallel.dp_shard: 1, run on GPUs, or import accel_runtime instead of accelerate."
    )
