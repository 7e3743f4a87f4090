"""The rules of DeepSpeed's section in a config file of Accelerate, and of the JSON file that it may name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    choice,
    drop,
    dropped,
    integer,
    normalize,
    parse_bool,
    parse_or,
    parse_text,
    same,
    sets,
    take,
)
from accel_runtime.environment.accelerate import sharding
from accel_runtime.environment.accelerate.setting import IntegerRange, Setting
from accel_runtime.extensions.deepspeed.settings import KEYS, SECTIONS, ZERO_3

__all__ = ["READER", "RULES"]


def _get_section(config: AccelerateConfig) -> Mapping[str, Any]:
    return config.engine_sections.get(sharding.DEEPSPEED.key, {})


def _names_file(config: AccelerateConfig) -> bool:
    """Return True if DeepSpeed has a JSON file, whether it exists or not."""
    name = _get_section(config).get(sharding.DEEPSPEED_FILE.key)
    return bool(name) and normalize(name) not in sharding.DEEPSPEED_FILE.off


def _get_zero_optimization(config: AccelerateConfig) -> Mapping[str, Any]:
    section = (config.engine_file or {}).get("zero_optimization")
    return section if isinstance(section, Mapping) else {}


def find_stage(config: AccelerateConfig) -> int:
    """Return DeepSpeed's ZeRO stage."""
    stage = _get_section(config).get(sharding.ZERO_STAGE.key, sharding.DEFAULT_ZERO_STAGE)
    if _names_file(config):
        stage = _get_zero_optimization(config).get("stage", 0)
    return int(parse_or(sharding.ZERO_STAGE.values, stage, ZERO_3))


def _find_hpz_size(config: AccelerateConfig) -> int:
    """Return the size of ZeRO++'s second partition; 1 without one."""
    size = _get_zero_optimization(config).get("zero_hpz_partition_size")
    return int(parse_or(IntegerRange(1), size, 1))


class _Reader:
    """DeepSpeed in the table of engines of a config file."""

    @staticmethod
    def read_precision(config: AccelerateConfig) -> str:
        """Return the number format of DeepSpeed's JSON file; `no` without one."""
        for name, precision in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
            section = (config.engine_file or {}).get(name)
            if isinstance(section, Mapping) and section.get("enabled") is True:
                return precision
        return "no"

    @staticmethod
    def is_sharded(config: AccelerateConfig) -> bool:
        """Return True if a stage of ZeRO is used."""
        return find_stage(config) > 0

    @staticmethod
    def list_values(config: AccelerateConfig) -> dict[str, Any]:
        """Return the stage, and whether models are created on the meta device."""
        stage = find_stage(config)
        values = {sharding.ZERO_STAGE.profile_key: "auto" if _names_file(config) else stage}
        if stage == ZERO_3 and parse_or("boolean", _get_section(config).get(sharding.ZERO3_INIT.key), True):
            values[sharding.ZERO3_INIT.profile_key] = True  # the default of Accelerate, too
        return values

    @staticmethod
    def find_conflicts(config: AccelerateConfig) -> Iterator[tuple[str, str, str]]:
        """Yield the second of two directories for one key of the profile."""
        paths = (sharding.OFFLOAD_OPTIMIZER_NVME_PATH.key, sharding.OFFLOAD_PARAM_NVME_PATH.key)
        first, second = (_get_section(config).get(key) for key in paths)
        if config.keeps_engine and first and second and first != second:
            yield (
                f"{sharding.DEEPSPEED.key}.{paths[1]}",
                f"expected {paths[0]}, {first!r}: a profile has one directory for both",
                repr(second),
            )


READER = _Reader()


def _convert_zero_stage(stage: int, config: AccelerateConfig) -> Answer:
    if config.keeps_engine:
        return sets({sharding.ZERO_STAGE.profile_key: stage})
    if stage == 0:
        return Answer("models are replicated")
    if stage < ZERO_3:
        note = "parameters are sharded between steps too"
        return sets({"fully_shard.reshard_after_forward": False}, note)
    return sets(
        {"fully_shard.reshard_after_forward": _find_hpz_size(config) if _find_hpz_size(config) > 1 else True}
    )


def _offload(setting: Setting) -> KeyRule:
    """Return the rule of a device that DeepSpeed offloads to."""
    least = ZERO_3 if setting is sharding.OFFLOAD_PARAM_DEVICE else 1

    def convert(device: str, config: AccelerateConfig) -> Answer:
        if not config.keeps_engine:
            note = (
                "accel does not offload to disks"
                if device == "nvme"
                else "parameters, gradients and optimizer state"
            )
            return replace(sets({"fully_shard.cpu_offload": True}, note), is_applied=device == "cpu")
        if find_stage(config) < least:
            return dropped(f"DeepSpeed does not use it in stage {find_stage(config)}")
        if device == "nvme" and find_stage(config) < ZERO_3:
            return sets({setting.profile_key: "cpu"}, f"as DeepSpeed does in stage {find_stage(config)}")
        return sets({setting.profile_key: device})

    return KeyRule(convert, build_parser(setting.values), (*EMPTY, *setting.off))


def _nvme_path(setting: Setting, device: Setting) -> KeyRule:
    """Return the rule of the directory of a device that DeepSpeed offloads to."""

    def convert(path: str, config: AccelerateConfig) -> Answer:
        if not config.keeps_engine:
            return dropped(setting.reason)
        if normalize(_get_section(config).get(device.key)) != "nvme" or find_stage(config) < ZERO_3:
            return dropped(f"used only with {device.key}: nvme in stage 3")
        return sets({setting.profile_key: path})

    return KeyRule(convert, parse_text, (*EMPTY, *setting.off))


def _convert_clipping(value: Any, config: AccelerateConfig) -> Answer:
    setting = sharding.GRADIENT_CLIPPING
    if not config.keeps_engine:
        return dropped(setting.reason)
    try:
        return sets({setting.profile_key: float(value)})
    except (TypeError, ValueError):
        raise InvalidValueError("expected a number") from None


def _convert_zero3_init(_: Any, config: AccelerateConfig) -> Answer:
    if not config.keeps_engine:
        return dropped(sharding.ZERO3_INIT.reason)
    if find_stage(config) != ZERO_3:
        return Answer("used only with ZeRO-3")
    return sets({sharding.ZERO3_INIT.profile_key: True})


def _convert_save_16bit(_: Any, config: AccelerateConfig) -> Answer:
    if config.keeps_engine:
        return Answer("accelerator.save_model() gathers the weights anyway")
    return dropped(sharding.SAVE_16BIT_MODEL.reason)


def _convert_moe_classes(_: Any, config: AccelerateConfig) -> Answer:
    setting = sharding.MOE_CLASSES
    return dropped(
        "call DeepSpeedPlugin.set_moe_leaf_modules in the script" if config.keeps_engine else setting.reason
    )


def _convert_deepspeed_file(_: str, config: AccelerateConfig) -> Answer:
    if config.engine_file is None:
        raise InvalidValueError("expected the path of a JSON file, which was not found")
    if config.keeps_engine:
        return sets({sharding.DEEPSPEED_FILE.profile_key: config.engine_path})
    return Answer("its keys are listed below")


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
ZERO_STAGE = KeyRule(_convert_zero_stage, build_parser(sharding.ZERO_STAGE.values))
OFFLOAD_OPTIMIZER = _offload(sharding.OFFLOAD_OPTIMIZER_DEVICE)
OFFLOAD_PARAM = _offload(sharding.OFFLOAD_PARAM_DEVICE)
_parse_reduce_dtype = choice("fp32", "fp16", "bf16", aliases={"bfp16": "bf16"})
DEEPSPEED_FILE: Mapping[str, KeyRule] = {
    "zero_optimization.stage": ZERO_STAGE,
    "zero_optimization.offload_optimizer.device": OFFLOAD_OPTIMIZER,
    "zero_optimization.offload_param.device": OFFLOAD_PARAM,
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
CONVERTED: Mapping[Setting, KeyRule] = {
    sharding.ZERO_STAGE: ZERO_STAGE,
    sharding.OFFLOAD_OPTIMIZER_DEVICE: OFFLOAD_OPTIMIZER,
    sharding.OFFLOAD_PARAM_DEVICE: OFFLOAD_PARAM,
    sharding.OFFLOAD_OPTIMIZER_NVME_PATH: _nvme_path(
        sharding.OFFLOAD_OPTIMIZER_NVME_PATH, sharding.OFFLOAD_OPTIMIZER_DEVICE
    ),
    sharding.OFFLOAD_PARAM_NVME_PATH: _nvme_path(
        sharding.OFFLOAD_PARAM_NVME_PATH, sharding.OFFLOAD_PARAM_DEVICE
    ),
    sharding.GRADIENT_CLIPPING: KeyRule(_convert_clipping, off=(*EMPTY, *sharding.GRADIENT_CLIPPING.off)),
    sharding.ZERO3_INIT: KeyRule(_convert_zero3_init, off=EMPTY),
    sharding.SAVE_16BIT_MODEL: KeyRule(_convert_save_16bit, off=EMPTY),
    sharding.MOE_CLASSES: KeyRule(_convert_moe_classes, off=EMPTY),
    sharding.DEEPSPEED_FILE: KeyRule(_convert_deepspeed_file, off=(*EMPTY, *sharding.DEEPSPEED_FILE.off)),
}
"""The rules of the section whose result depends on other keys."""
RULES = EngineRules(CONVERTED, sharding.DEEPSPEED_FILE.key, DEEPSPEED_FILE, frozenset({*SECTIONS, *KEYS}))
