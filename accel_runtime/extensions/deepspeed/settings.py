"""Options of DeepSpeed's ZeRO, and its JSON files; standard library only.

The launcher uses it to refuse what cannot work before it starts processes, and the runtime to build DeepSpeed's configuration.
The keys of the JSON files are DeepSpeed's (https://www.deepspeed.ai/docs/config-json, 0.19.8).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from accel_runtime.environment.accelerate.sharding import ZERO_3
from accel_runtime.environment.engines import Engine, EngineConflict
from accel_runtime.environment.layouts import SettingsError

if TYPE_CHECKING:
    from accel_runtime.environment.settings import Settings

__all__ = [
    "AUTO",
    "ZERO_3",
    "DeepSpeed",
    "DeepSpeedConfig",
    "OffloadDevice",
    "ZeroStage",
    "find_value",
    "iterate_leaves",
    "parse_deepspeed_config",
    "read_deepspeed_config",
    "read_deepspeed_file",
    "resolve_deepspeed",
    "state_accumulation",
    "state_precision",
]

ZeroStage = Literal["no", "auto", "0", "1", "2", "3"]
OffloadDevice = Literal["no", "cpu", "nvme"]
AUTO = "auto"
"""Value in a JSON file that is filled in when the model is prepared."""
_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "stage": get_args(ZeroStage),
        "offload_optimizer": get_args(OffloadDevice),
        "offload_param": get_args(OffloadDevice),
    }
)
"""The values of the fields of a section that are words."""


@dataclass(frozen=True)
class DeepSpeed(Engine):
    """Options of DeepSpeed's ZeRO; each replaces a key of `config_file` that is missing or `auto`."""

    name: ClassVar[str] = "deepspeed"
    title: ClassVar[str] = "DeepSpeed"
    switch: ClassVar[str] = "stage"
    file: ClassVar[str] = "config_file"
    package: ClassVar[str] = "deepspeed"

    stage: ZeroStage = "no"
    """What is sharded: 1 the optimizer state, 2 gradients too, 3 parameters too; `auto` is the stage of `config_file`, `no` does
    not use DeepSpeed."""
    config_file: str = ""
    """Path of a JSON file of DeepSpeed."""
    offload_optimizer: OffloadDevice = "no"
    """Device that keeps the optimizer state and steps, if it is not that of the model."""
    offload_param: OffloadDevice = "no"
    """Device that keeps the sharded parameters of stage 3, if it is not that of the model."""
    nvme_path: str = ""
    """Directory on a local disk for what is offloaded to `nvme`."""
    zero3_init: bool = False
    """If true, `from_pretrained` of transformers shards a model while it loads; for stage 3."""
    gradient_clipping: float = 0.0
    """Norm to which the gradients of every step are clipped; 0 leaves clipping to the script."""
    reduce_bucket_size: int | Literal["auto"] = "auto"
    """Number of gradients that are reduced together."""
    prefetch_bucket_size: int | Literal["auto"] = "auto"
    """Number of parameters that stage 3 gathers ahead."""
    param_persistence_threshold: int | Literal["auto"] = "auto"
    """Number of elements below which stage 3 does not shard a parameter."""

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if (value := getattr(self, name)) not in words:
                raise SettingsError(
                    f"Invalid deepspeed.{name} {value!r}: expected one of {', '.join(words)}."
                )
        for name in ("config_file", "nvme_path"):
            if not (path := getattr(self, name)).isprintable():
                raise SettingsError(f"Invalid deepspeed.{name} {path!r}: expected a path.")
        if isinstance(self.gradient_clipping, bool) or not 0 <= self.gradient_clipping < float("inf"):
            raise SettingsError(
                f"Invalid deepspeed.gradient_clipping {self.gradient_clipping}: expected a number above 0, or 0."
            )
        self._check_effect()

    def _check_effect(self) -> None:
        """Raise SettingsError if a field is missing, or has no effect."""
        if self.stage == "no":
            changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
            if changed:
                raise SettingsError(
                    f"deepspeed.{changed[0]} has no effect with deepspeed.stage: no. Set deepspeed.stage to 1, 2 or 3, or to auto "
                    "with a deepspeed.config_file."
                )
        if self.stage == AUTO and not self.config_file:
            raise SettingsError(
                "deepspeed.config_file: expected the path of a JSON file, from which deepspeed.stage: auto is read. Set it, or set "
                "deepspeed.stage to 1, 2 or 3."
            )
        is_on_disk = "nvme" in {self.offload_optimizer, self.offload_param}
        if is_on_disk and not (self.nvme_path or self.config_file):
            raise SettingsError(
                "deepspeed.nvme_path: expected a directory on a local disk, for what is offloaded to nvme. Set it."
            )
        if self.nvme_path and not (is_on_disk or self.config_file):
            raise SettingsError(
                "deepspeed.nvme_path has no effect: nothing is offloaded to nvme. Set deepspeed.offload_optimizer or "
                "deepspeed.offload_param to nvme, or leave it out."
            )

    @classmethod
    def of(cls, settings: Settings) -> DeepSpeed:
        """Return the section of the settings of a process."""
        return next(engine for engine in settings.engines if isinstance(engine, cls))

    @property
    def is_used(self) -> bool:
        """Return whether DeepSpeed is used."""
        return self.stage != "no"

    def find_conflict(self, settings: Settings) -> EngineConflict | None:
        """Return the first setting that cannot be used with DeepSpeed."""
        for section in ("parallel", "fully_shard"):
            part = getattr(settings, section)
            for f in fields(part):
                if (value := getattr(part, f.name)) != f.default:
                    reason = "DeepSpeed shards models itself"
                    if f.name in {"tp", "cp", "sp", "tp_plan"}:
                        reason = "DeepSpeed has no tensor, context or sequence parallelism in accel"
                    return EngineConflict(f"{section}.{f.name}", value, reason)
        if settings.spmd:
            return EngineConflict("spmd", settings.spmd, "torch_xla shards models itself")
        if settings.device in {"xla", "mps"}:
            return EngineConflict("device", settings.device, "DeepSpeed does not support this device")
        return None

    def read_config(self) -> DeepSpeedConfig:
        """Return the configuration of the section and its JSON file."""
        return read_deepspeed_config(self)


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A configuration of DeepSpeed, with the source of each value."""

    values: Mapping[str, Any]
    """The nested keys of a JSON file; `auto` is filled in when the model is prepared."""
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Where each value comes from, by its path, such as `zero_optimization.stage`."""
    leaf_modules: tuple[str, ...] = ()
    """Names of classes of modules whose parameters stage 3 gathers together."""

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a path; the default also for `auto`."""
        value = find_value(self.values, path)
        return default if value is None or value == AUTO else value

    @property
    def stage(self) -> int:
        """Return the ZeRO stage: what DeepSpeed's default, 0, is without one."""
        return int(self.get("zero_optimization.stage", 0))

    @property
    def summary(self) -> str:
        """Return the stage and the devices that it offloads to, in words."""
        devices = {"optimizer": _OFFLOAD, "parameters": _OFFLOAD_PARAM}
        parts = [
            f"{what} on {device}"
            for what, path in devices.items()
            if (device := self.get(f"{path}.device", "none")) != "none"
        ]
        return f"DeepSpeed ZeRO {self.stage}{f' ({chr(44).join(parts)})' if parts else ''}".replace(",", ", ")

    @property
    def mixed_precision(self) -> Literal["bf16", "fp16"] | None:
        """Return the number format that is enabled; None if that is left to the profile."""
        names: tuple[Literal["bf16", "fp16"], ...] = ("bf16", "fp16")
        return next((name for name in names if self.get(f"{name}.enabled") is True), None)

    @property
    def accumulation_steps(self) -> int | None:
        """Return the number of micro-batches of an optimizer step; None if it is left to the profile."""
        steps: int | None = self.get("gradient_accumulation_steps")
        return steps


def find_value(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path of nested keys; None without one."""
    value: Any = values
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def read_deepspeed_file(path: str | Path) -> dict[str, Any]:
    """Return the content of a JSON file of DeepSpeed.

    Keys that are off and that accel does not support are left out: DeepSpeed rejects some of them even if they are off.

    Raises:
        SettingsError: The file cannot be read, is not JSON, has a key twice, or has keys that accel does not support.
    """

    def refuse_repeated(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise SettingsError(f"Invalid {path}: the key {repeated!r} occurs twice. Remove one of them.")
        return dict(pairs)

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "it is not a path"
        reason = (error.strerror or reason) if isinstance(error, OSError) else reason
        raise SettingsError(
            f"Cannot read {path}, the file of deepspeed.config_file: {reason}. Correct the path."
        ) from None
    try:
        values = json.loads(text, object_pairs_hook=refuse_repeated)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"Invalid {path}: {error.msg} in line {error.lineno}, column {error.colno}. Correct the JSON."
        ) from None
    except RecursionError:
        raise SettingsError(f"Invalid {path}: it is nested too deeply. Correct the JSON.") from None
    if not isinstance(values, dict):
        raise SettingsError(f"Invalid {path}: expected a JSON object with the keys of DeepSpeed.")
    return parse_deepspeed_config(values, str(path))


def parse_deepspeed_config(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a configuration as `read_deepspeed_file`; `source` names it in errors."""
    check_deepspeed_keys(values, source)
    return _normalize_keys(values, source)


def check_deepspeed_keys(values: Mapping[str, Any], source: str) -> None:
    """Raise SettingsError for keys of a configuration that DeepSpeed does not have, or that accel does not support."""
    _check_keys(values, "", (*SECTIONS, *KEYS), source)


def _check_keys(values: Mapping[str, Any], prefix: str, known: Sequence[str], source: str) -> None:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if path in REFUSED:
            if not _is_off(path, value):
                raise SettingsError(f"{source}: {path} is not supported: {REFUSED[path]}")
        elif key not in known:
            raise SettingsError(f"{source}: {path} is not a key of DeepSpeed.{_suggest(key, known)}")
        elif path in SECTIONS:
            if not isinstance(value, Mapping):
                # DeepSpeed reads null as no section for those of offloading.
                if value is None and path in {_OFFLOAD, _OFFLOAD_PARAM}:
                    continue
                raise SettingsError(f"Invalid {source}: {path} is {_show(value)}, expected an object.")
            if SECTIONS[path]:
                _check_keys(value, f"{path}.", SECTIONS[path], source)


def _suggest(name: str, known: Sequence[str]) -> str:
    names = [key.rpartition(".")[2] for key in known]
    nearest = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {nearest[0]}?" if nearest else " Remove it."


def _is_off(path: str, value: Any) -> bool:
    """Return whether a key that is not supported has no effect."""
    if value in _HARMLESS.get(path, ()) and isinstance(value, bool) == isinstance(_HARMLESS[path][0], bool):
        return True
    if path in _HARMLESS:
        return False
    if isinstance(value, Mapping):
        return not value.get("enabled", bool(value))
    return value in (None, False, "none", "None", "", AUTO, []) or (value == 1 and value is not True)


def _normalize_keys(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a configuration without unsupported keys that are off, and with one name for each key."""
    kept = {
        key: {name: inner for name, inner in value.items() if f"{key}.{name}" not in REFUSED}
        if isinstance(value, Mapping) and key != "zero_optimization"
        else value
        for key, value in values.items()
        if key not in REFUSED
    }
    if isinstance(zero := kept.get("zero_optimization"), Mapping):
        section: dict[str, Any] = {}
        for key, value in zero.items():
            name = f"stage3_{key}" if f"stage3_{key}" in _ZERO else key
            if name in section:
                raise SettingsError(
                    f"Invalid {source}: zero_optimization.{name} occurs twice, once without stage3_. Remove one of them."
                )
            if f"zero_optimization.{key}" not in REFUSED and value is not None:
                section[name] = value
        kept["zero_optimization"] = section
    if "bfloat16" in kept:
        if "bf16" in kept:
            raise SettingsError(f"Invalid {source}: bf16 occurs twice, once as bfloat16. Remove one of them.")
        kept["bf16"] = kept.pop("bfloat16")
    return kept


def iterate_leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested keys that is not an object with keys itself, with its path behind the prefix."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from iterate_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_OF_STAGE_3 = ("zero3_init", "prefetch_bucket_size", "param_persistence_threshold")
"""Fields of a section that only stage 3 has."""
_OFFLOAD = "zero_optimization.offload_optimizer"
_OFFLOAD_PARAM = "zero_optimization.offload_param"
PATHS = {
    "stage": "zero_optimization.stage",
    "offload_optimizer": f"{_OFFLOAD}.device",
    "offload_param": f"{_OFFLOAD_PARAM}.device",
    "gradient_clipping": "gradient_clipping",
    "reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
}
"""Fields of the profile's section, and their paths in a JSON file."""


def state_precision(
    file: Mapping[str, Any] | None, mixed_precision: str, source: str
) -> dict[str, tuple[Any, str]]:
    """Return what a number format states for `resolve_deepspeed`; `no` states that the file enables none."""
    return {
        f"{name}.enabled": (name == mixed_precision, source)
        for name in ("bf16", "fp16")
        if name == mixed_precision or find_value(file or {}, f"{name}.enabled") is not None
    }


def state_accumulation(steps: int, source: str) -> dict[str, tuple[Any, str]]:
    """Return what a number of accumulated micro-batches states for `resolve_deepspeed`."""
    return {"gradient_accumulation_steps": (steps, source)}


def resolve_deepspeed(
    section: DeepSpeed,
    file: Mapping[str, Any] | None = None,
    stated: Mapping[str, tuple[Any, str]] = MappingProxyType({}),
    *,
    name: str = "",
    sources: Mapping[str, str] = MappingProxyType({}),
) -> DeepSpeedConfig:
    """Return the configuration of a section of the profile, its JSON file, and other statements.

    Args:
        section: The section.
        file: The content of `section.config_file`; None without one.
        stated: Values by path that the script or another part of the profile states, with the name of that place.
        name: The name of `file`, if it is not that of the section.
        sources: Sources of values of `file` that come from elsewhere.

    Raises:
        SettingsError: Two of them contradict each other; the message names both.
    """
    values: dict[str, Any] = json.loads(json.dumps(file or {}))
    found = {path: sources.get(path, name or section.config_file) for path, _ in iterate_leaves(values)}
    for path, (value, source) in (*_list_statements(section, values).items(), *stated.items()):
        known = find_value(values, path)
        if known is not None and known != AUTO and not _is_same(known, value):
            raise SettingsError(
                f"{path} is {_show(known)} in {found.get(path, 'the defaults')} and {_show(value)} by {source}. Remove one of "
                "them, or set it to auto in the JSON file."
            )
        if known is None or known == AUTO:
            _set_value(values, path, value)
            found[path] = source
    config = DeepSpeedConfig(values, found)
    _check_combination(config)
    _check_effect(section, config)
    return config


def read_deepspeed_config(section: DeepSpeed) -> DeepSpeedConfig:
    """Return the configuration of a section and its JSON file.

    Raises:
        SettingsError: As `read_deepspeed_file` and `resolve_deepspeed`.
    """
    file = read_deepspeed_file(section.config_file) if section.config_file else None
    return resolve_deepspeed(section, file)


def _list_statements(section: DeepSpeed, values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the values that a section sets, by path, with their keys; `values` are those of the file."""
    statements: dict[str, tuple[Any, str]] = {
        PATHS[f.name]: (getattr(section, f.name), f"deepspeed.{f.name}")
        for f in fields(section)
        if f.name in PATHS and getattr(section, f.name) not in (f.default, AUTO)
    }
    if "zero_optimization.stage" in statements:
        stage, name = statements["zero_optimization.stage"]
        statements["zero_optimization.stage"] = (int(stage), name)
    if section.nvme_path:
        for path in (_OFFLOAD, _OFFLOAD_PARAM):
            device = statements.get(f"{path}.device", (find_value(values, f"{path}.device"), ""))[0]
            if device == "nvme":
                statements[f"{path}.nvme_path"] = (section.nvme_path, "deepspeed.nvme_path")
    return statements


def _check_combination(config: DeepSpeedConfig) -> None:
    """Raise SettingsError if values have no effect together."""
    source = config.sources.get("zero_optimization.stage", "DeepSpeed's default")
    stage = find_value(config.values, "zero_optimization.stage")
    if stage == AUTO:
        raise SettingsError(
            f"zero_optimization.stage is auto in {source}, and deepspeed.stage is auto too. Set one of them to 1, 2 or 3."
        )
    if stage is not None and (isinstance(stage, bool) or stage not in {0, 1, 2, 3}):
        raise SettingsError(
            f"Invalid zero_optimization.stage {_show(stage)} by {source}: expected 0, 1, 2 or 3."
        )
    for path, least in ((_OFFLOAD, 1), (_OFFLOAD_PARAM, ZERO_3)):
        device = config.get(f"{path}.device", "none")
        if device not in {"none", "cpu", "nvme"}:
            raise SettingsError(f"Invalid {path}.device {_show(device)}: expected none, cpu or nvme.")
        # DeepSpeed keeps the optimizer state of stages 1 and 2 in memory with nvme, too.
        needed = ZERO_3 if device == "nvme" else least
        if device != "none" and config.stage < needed:
            raise SettingsError(
                f"{path}.device: {device} by {config.sources[f'{path}.device']} has no effect in ZeRO stage {config.stage} by "
                f"{source}. Use stage {needed}{'' if needed == ZERO_3 else ' or higher'}."
            )
        if device == "nvme" and not config.get(f"{path}.nvme_path"):
            raise SettingsError(
                f"{path}.device: nvme needs a directory. Set deepspeed.nvme_path to one on a local disk."
            )
    for path, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        is_scattered = config.stage > 1 and config.get("zero_optimization.reduce_scatter", default=True)
        if is_scattered and config.get(path, default) != default:
            raise SettingsError(
                f"{path} by {config.sources[path]} cannot be used with zero_optimization.reduce_scatter in ZeRO stage {config.stage} "
                f"by {source}. Set zero_optimization.reduce_scatter to false, or remove {path}."
            )
    if config.get("bf16.enabled") is True and config.get("fp16.enabled") is True:
        names = [config.sources.get(f"{name}.enabled", "the defaults") for name in ("bf16", "fp16")]
        raise SettingsError(
            f"bf16.enabled is true by {names[0]} and fp16.enabled by {names[1]}. Enable one of them."
        )


def _check_effect(section: DeepSpeed, config: DeepSpeedConfig) -> None:
    """Raise SettingsError if a field of the section has no effect."""
    needed = {"reduce_bucket_size": 1, **dict.fromkeys(_OF_STAGE_3, ZERO_3)}
    for f in fields(section):
        least = needed.get(f.name, 0)
        if getattr(section, f.name) != f.default and config.stage < least:
            source = config.sources.get("zero_optimization.stage", "DeepSpeed's default")
            raise SettingsError(
                f"deepspeed.{f.name} has no effect in ZeRO stage {config.stage} by {source}. Use stage "
                f"{least}{'' if least == ZERO_3 else ' or higher'}, or leave it out."
            )
    on_disk = {config.get(f"{path}.device") for path in (_OFFLOAD, _OFFLOAD_PARAM)}
    if section.nvme_path and "nvme" not in on_disk:
        raise SettingsError(
            "deepspeed.nvme_path has no effect: nothing is offloaded to nvme. Set deepspeed.offload_optimizer or "
            "deepspeed.offload_param to nvme, or leave it out."
        )


def _set_value(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[name] = value


def _is_same(known: Any, value: Any) -> bool:
    if isinstance(known, (int, float)) and isinstance(value, (int, float)):
        return isinstance(known, bool) == isinstance(value, bool) and float(known) == float(value)
    return str(known).lower() == str(value).lower()


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_ZERO = (
    "stage", "allgather_partitions", "allgather_bucket_size", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce", "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint", "offload_param",
    "offload_optimizer", "sub_group_size", "prefetch_bucket_size",
    "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
    "gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "ignore_unused_parameters",
    "round_robin_gradients", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "memory_efficient_linear", "parameter_alignment", "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings",
    "enable_sanity_checks",
)  # fmt: skip
_BF16 = (
    "enabled", "check_grad_overflow",
)  # fmt: skip
SECTIONS: Mapping[str, Sequence[str]] = MappingProxyType({
    "zero_optimization": _ZERO,
    "zero_optimization.offload_optimizer": (
        "device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio",
        "super_offload", "cpuadam_cores_perc",
    ),
    "zero_optimization.offload_param": (
        "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory",
    ),
    "fp16": (
        "enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
        "consecutive_hysteresis",
    ),
    "bf16": _BF16,
    "bfloat16": _BF16,
    "optimizer": ("type", "params"),
    "scheduler": ("type", "params"),
    "data_types": ("grad_accum_dtype", "buffer_dtype", "keep_in_fp32_modules"),
    "activation_checkpointing": ("number_checkpoints",),
    "aio": ("block_size", "queue_depth", "thread_count", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"),
})  # fmt: skip
"""Sections of a JSON file by their paths, with their keys."""
KEYS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "prescale_gradients", "gradient_predivide_factor", "communication_data_type", "zero_allow_untested_optimizer",
    "steps_per_print", "dump_state", "disable_python_gc", "log_level", "vocabulary_size",
)  # fmt: skip
"""Keys of a JSON file outside of sections."""
_CHECKPOINTING = (
    "checkpoint activations in the model, as with model.gradient_checkpointing_enable(). Remove it."
)
_PROFILER = "it needs DeepSpeed's own training loop. Use accelerator.profile()."
_FP32_STATE = "master weights and optimizer state are kept in fp32. Remove it."
_TRACKERS = "use accelerator.log and the trackers of log_with."
REFUSED: Mapping[str, str] = MappingProxyType({
    "pipeline": "accel has no pipeline parallelism. Use ZeRO stage 3, or parallel.tp.",
    "tensor_parallel": "AutoTP is not supported. Use parallel.tp with fully_shard.",
    "autotp_size": "AutoTP is not supported. Use parallel.tp with fully_shard.",
    "sequence_parallel_size": "accel has Ulysses without DeepSpeed. Use parallel.sp with fully_shard.",
    "expert_parallel": "expert parallelism is not supported. Use ZeRO stage 3, or fully_shard.",
    "moe": "expert parallelism is not supported. Use ZeRO stage 3, or fully_shard.",
    "compression_training": "compression is not supported. Quantize the trained model with another library.",
    "elasticity": "accel restarts with other numbers of processes by itself. Set max_restarts in the profile.",
    "data_efficiency": "accel does not change the data. Use a sampler.",
    "curriculum_learning": "accel does not change the data. Use a sampler.",
    "progressive_layer_drop": "it needs DeepSpeed's own training loop. Drop layers in the model.",
    "eigenvalue": "it needs DeepSpeed's own training loop. Remove it.",
    "quantize_training": "it needs DeepSpeed's own training loop. Remove it.",
    "amp": "apex is not supported. Use bf16 or fp16.",
    "torch_autocast": "autocast is set by mixed_precision. Set mixed_precision: bf16.",
    "sparse_attention": "DeepSpeed's sparse attention is not supported. Use torch's scaled_dot_product_attention.",
    "autotuning": "DeepSpeed's autotuning starts its own launches. Use accel estimate.",
    "hybrid_engine": "DeepSpeed's hybrid engine is not supported. Generate in a separate engine.",
    "checkpoint": "checkpoints are saved by accelerator.save_state, and load on any number of processes. Remove it.",
    "use_data_before_expert_parallelism": "expert parallelism is not supported. Remove it.",
    "flops_profiler": "use accelerator.profile().",
    "comms_logger": "use accelerator.profile().",
    "tensorboard": _TRACKERS,
    "wandb": _TRACKERS,
    "csv_monitor": _TRACKERS,
    "comet": _TRACKERS,
    "sparse_gradients": "DeepSpeed 0.19 has removed it. Use Embedding(sparse=True) in the model.",
    "graph_harvesting": "DeepSpeed 0.19 has removed it. Remove it.",
    "dataloader_drop_last": "batches are those of the script's loaders. Set drop_last in the DataLoader.",
    "managed_gradient_accumulation": "accel decides where an accumulation ends. Remove it.",
    "gradient_allreduce_op": "gradients are averaged. Remove it.",
    "datastates_ckpt": "checkpoints are saved by accelerator.save_state. Remove it.",
    "zero_force_ds_cpu_optimizer": "torch's fused optimizers step offloaded state. Set it to false.",
    "disable_allgather": "DeepSpeed 0.19 ignores it. Remove it.",
    "seq_parallel_communication_data_type": "accel has Ulysses without DeepSpeed. Use parallel.sp with fully_shard.",
    "wall_clock_breakdown": _PROFILER,
    "memory_breakdown": _PROFILER,
    "timers": _PROFILER,
    "optimizer.legacy_fusion": "the optimizer is that of torch. Remove it.",
    "data_types.param_dtype": "the number format of parameters is that of mixed_precision. Remove it.",
    "fp16.fp16_master_weights_and_grads": _FP32_STATE,
    "bf16.bf16_master_weights_and_grads": _FP32_STATE,
    "bf16.bf16_optimizer_states": _FP32_STATE,
    "bf16.immediate_grad_update": "gradients are final at the end of a step. Remove it.",
    "activation_checkpointing.partition_activations": _CHECKPOINTING,
    "activation_checkpointing.cpu_checkpointing": _CHECKPOINTING,
    "activation_checkpointing.contiguous_memory_optimization": _CHECKPOINTING,
    "activation_checkpointing.synchronize_checkpoint_boundary": _CHECKPOINTING,
    "activation_checkpointing.profile": _CHECKPOINTING,
    "compile": "set compile.backend in the profile.",
    "nebula": "checkpoints are saved by accelerator.save_state. Remove it.",
    "weight_quantization": "quantization of weights is not supported. Use bf16.",
    "zero_optimization.mics_shard_size": "MiCS is not supported. Use parallel.dp_replicate with fully_shard.",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS is not supported. Use parallel.dp_replicate with fully_shard.",
    "zero_optimization.zeropp_loco_param": "DeepSpeed 0.19 has removed it. Remove it.",
    "zero_optimization.cpu_offload": "it is an early form. Use offload_optimizer with device: cpu.",
    "zero_optimization.cpu_offload_param": "it is an early form. Use offload_param with device: cpu.",
    "zero_optimization.cpu_offload_use_pin_memory": "it is an early form. Use pin_memory of offload_optimizer.",
    "zero_optimization.compute_grad_norm": "the norm of the gradients is needed for clipping. Remove it.",
    "zero_optimization.zenflow": "ZenFlow is not supported. Use offload_optimizer.",
    "zero_optimization.legacy_stage1": "DeepSpeed has removed it. Remove it.",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "Muon is not supported with ZeRO. Remove it.",
    "zero_optimization.leaf_module": "leaf modules are set by the plugin. Use DeepSpeedPlugin.set_moe_leaf_modules.",
})  # fmt: skip
"""Keys of a JSON file that are refused unless they are off, and what to use."""
_HARMLESS: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "managed_gradient_accumulation": (True,),
    "gradient_allreduce_op": ("mean",),
    "zero_optimization.compute_grad_norm": (True,),
    "seq_parallel_communication_data_type": ("fp32", None),
    "zero_optimization.mics_shard_size": (-1, 0, 1),
})  # fmt: skip
"""Values with which a refused key has no effect, if they are not those of other keys."""
