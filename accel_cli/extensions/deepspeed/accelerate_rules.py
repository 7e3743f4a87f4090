"""The rules of DeepSpeed's section in a config file of Accelerate, and of the JSON file that it may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accel_cli.accelerate.config_values import (
    EMPTY,
    AccelerateConfig,
    Answer,
    EngineRules,
    InvalidValueError,
    KeyRule,
    build_parser,
    by_meaning,
    choice,
    drop,
    dropped,
    integer,
    normalize,
    parse_bool,
    parse_or,
    same,
    sets,
    take,
)
from accel_runtime.environment.accelerate import sharding
from accel_runtime.environment.accelerate.setting import IntegerRange, Setting
from accel_runtime.extensions.deepspeed.settings import KEYS, SECTIONS, ZERO_3

__all__ = ["RULES"]


def _get_section(config: AccelerateConfig) -> Mapping[str, Any]:
    return config.get_section(sharding.DEEPSPEED)


def _get_zero_optimization(config: AccelerateConfig) -> Mapping[str, Any]:
    section = (config.engine_file or {}).get("zero_optimization")
    return section if isinstance(section, Mapping) else {}


def find_stage(config: AccelerateConfig) -> int:
    """Return DeepSpeed's ZeRO stage, that of its JSON file if it has one, whether it exists or not."""
    name = _get_section(config).get(sharding.DEEPSPEED_FILE.key)
    stage = _get_section(config).get(sharding.ZERO_STAGE.key, sharding.DEFAULT_ZERO_STAGE)
    if name and normalize(name) not in sharding.DEEPSPEED_FILE.off:
        stage = _get_zero_optimization(config).get("stage", 0)
    return int(parse_or(sharding.ZERO_STAGE.values, stage, ZERO_3))


def _read_precision(config: AccelerateConfig) -> str:
    """Return the number format of DeepSpeed's JSON file; `no` without one."""
    for name, precision in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        section = (config.engine_file or {}).get(name)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return precision
    return "no"


def _convert_deepspeed_file(_: str, config: AccelerateConfig) -> Answer:
    if config.engine_file is None:
        raise InvalidValueError("expected the path of a JSON file, which was not found")
    if config.keeps_engine:
        return sets({sharding.DEEPSPEED_FILE.profile_key: config.engine_path})
    return Answer("its keys are listed below")


# The section, if the profile keeps DeepSpeed: keys whose result the variables do not say.


def _convert_zero3_init(value: Any, config: AccelerateConfig) -> Answer:
    if find_stage(config) != ZERO_3:
        return Answer("used only with ZeRO-3")
    return by_meaning(sharding.ZERO3_INIT).convert(value, config)


def _convert_optimizer_device(device: str, config: AccelerateConfig) -> Answer:
    answer = by_meaning(sharding.OFFLOAD_OPTIMIZER_DEVICE).convert(device, config)
    if answer.values and device not in answer.values.values():
        return replace(answer, text=f"{answer.text} (as DeepSpeed does in stage {find_stage(config)})")
    return answer


_FILE = KeyRule(_convert_deepspeed_file, off=(*EMPTY, *sharding.DEEPSPEED_FILE.off))
KEPT: Mapping[Setting, KeyRule] = {
    sharding.OFFLOAD_OPTIMIZER_DEVICE: KeyRule(
        _convert_optimizer_device, off=(*EMPTY, *sharding.OFFLOAD_OPTIMIZER_DEVICE.off)
    ),
    sharding.ZERO3_INIT: KeyRule(_convert_zero3_init, off=(*EMPTY, *sharding.ZERO3_INIT.off)),
    sharding.SAVE_16BIT_MODEL: same("accelerator.save_model() gathers the weights anyway"),
    sharding.MOE_CLASSES: drop("call DeepSpeedPlugin.set_moe_leaf_modules in the script"),
    sharding.DEEPSPEED_FILE: _FILE,
}


# The section and the JSON file, if they become `fully_shard`.


def _convert_zero_stage(stage: int, config: AccelerateConfig) -> Answer:
    if stage == 0:
        return Answer("models are replicated")
    if stage < ZERO_3:
        note = "parameters are sharded between steps too"
        return sets({"fully_shard.reshard_after_forward": False}, note)
    size = parse_or(IntegerRange(1), _get_zero_optimization(config).get("zero_hpz_partition_size"), 1)
    return sets({"fully_shard.reshard_after_forward": size if size > 1 else True})


def _convert_device(device: str, _: AccelerateConfig) -> Answer:
    """Convert a device that DeepSpeed offloads to."""
    is_disk = device == "nvme"
    note = "accel does not offload to disks" if is_disk else "parameters, gradients and optimizer state"
    return replace(sets({"fully_shard.cpu_offload": True}, note), is_applied=not is_disk)


def _enables(precision: str) -> KeyRule:
    """Return the rule of `enabled` in a section of the JSON file that is named after a number format."""

    def convert(_: bool, config: AccelerateConfig) -> Answer:
        if config.precision == precision:
            return Answer(f"mixed_precision: {precision}")
        return dropped("mixed_precision of the config takes precedence")

    return KeyRule(convert, parse_bool, EMPTY)


def _convert_hpz(number: int, config: AccelerateConfig) -> Answer:
    if find_stage(config) != ZERO_3:
        return dropped("used only with ZeRO-3")
    return sets({"fully_shard.reshard_after_forward": number})


_MICS = "set parallel.dp_shard to this size, and parallel.dp_replicate to the number of such groups"
_PINNED = same("shards in host memory are pinned")
_BATCH_SIZE = drop("set it in the DataLoader of the script")
_ZERO_STAGE = KeyRule(_convert_zero_stage, build_parser(sharding.ZERO_STAGE.values))
_OFFLOAD = KeyRule(_convert_device, build_parser(sharding.OFFLOAD_PARAM_DEVICE.values), (*EMPTY, "none"))
_parse_reduce_dtype = choice("fp32", "fp16", "bf16", aliases={"bfp16": "bf16"})
DEEPSPEED_FILE: Mapping[str, KeyRule] = {
    "zero_optimization.stage": _ZERO_STAGE,
    "zero_optimization.offload_optimizer.device": _OFFLOAD,
    "zero_optimization.offload_param.device": _OFFLOAD,
    "zero_optimization.offload_optimizer.pin_memory": _PINNED,
    "zero_optimization.offload_param.pin_memory": _PINNED,
    "zero_optimization.zero_hpz_partition_size": KeyRule(_convert_hpz, integer(1), ("1",)),
    "zero_optimization.mics_shard_size": drop(_MICS, "-1", "1", parse=integer(1, auto=-1)),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": drop(sharding.SAVE_16BIT_MODEL.reason),
    "bf16.enabled": _enables("bf16"),
    "bfloat16.enabled": _enables("bf16"),
    "fp16.enabled": _enables("fp16"),
    "fp16": drop("set it in the script: GradScalerKwargs", "0"),
    "communication_data_type": take("fully_shard.reduce_dtype", _parse_reduce_dtype),
    "gradient_accumulation_steps": take(
        sharding.GRADIENT_ACCUMULATION_STEPS.profile_key,
        build_parser(sharding.GRADIENT_ACCUMULATION_STEPS.values),
        "1",
    ),
    "gradient_clipping": drop(sharding.GRADIENT_CLIPPING.reason, "0"),
    "optimizer": drop("create an optimizer of torch in the script instead of DummyOptim", "0"),
    "scheduler": drop("create a scheduler of torch in the script instead of DummyScheduler", "0"),
    "train_batch_size": _BATCH_SIZE,
    "train_micro_batch_size_per_gpu": _BATCH_SIZE,
    "activation_checkpointing": drop("set fully_shard.activation_checkpointing: true instead", "0"),
    "*": drop("specific to DeepSpeed; accel does not have this option", "0"),
}
"""Keys of DeepSpeed's JSON file; a key with no row has that of its section."""
SHARDED: Mapping[Setting, KeyRule] = {
    sharding.ZERO_STAGE: _ZERO_STAGE,
    sharding.OFFLOAD_OPTIMIZER_DEVICE: _OFFLOAD,
    sharding.OFFLOAD_PARAM_DEVICE: _OFFLOAD,
    sharding.DEEPSPEED_FILE: _FILE,
}
RULES = EngineRules(
    SHARDED,
    KEPT,
    DEEPSPEED_FILE,
    frozenset({*SECTIONS, *KEYS}),
    _read_precision,
    lambda config: find_stage(config) > 0,
)
