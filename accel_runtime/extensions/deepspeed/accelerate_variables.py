"""Variables of Accelerate's launcher for DeepSpeed, translated to the section of the settings and back.

The meaning of each variable is that of Accelerate 1.15: `utils/dataclasses.py`. Standard library only.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from accel_runtime.environment.accelerate import sharding
from accel_runtime.environment.accelerate.setting import Setting
from accel_runtime.environment.accelerate.variables import Equivalent, VariableReader
from accel_runtime.environment.layouts import SettingsError
from accel_runtime.extensions.deepspeed.settings import (
    AUTO,
    ZERO_3,
    DeepSpeed,
    DeepSpeedConfig,
    read_deepspeed_config,
)

__all__ = ["DeepSpeedVariables"]

_WITHOUT_VARIABLE = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold")
"""The fields of the section for which Accelerate has no variable."""


def _zero_stage(read: VariableReader) -> tuple[int, dict[str, Equivalent]]:
    """Return the stage, and the settings of it and of the JSON file."""
    setting, file = sharding.ZERO_STAGE, sharding.DEEPSPEED_FILE
    # 0 is a stage, and not unset.
    text = read.environ.get(setting.variable, "").strip() if not read.text(setting.variable) else ""
    text = read.text(setting.variable) or (text if text == "0" else "")
    if text and text not in {"0", "1", "2", "3"}:
        raise SettingsError(f"Invalid {setting.variable} {text!r}: expected 0, 1, 2 or 3.")
    if not (path := read.text(file.variable)):
        stage = text or str(sharding.DEFAULT_ZERO_STAGE)
        source = setting.variable if text else sharding.USE_DEEPSPEED.variable
        return int(stage), {setting.field: Equivalent(source, stage)}
    path = os.path.abspath(path)  # noqa: PTH100 - links stay
    stage = text or AUTO
    section = DeepSpeed(stage=stage, config_file=path)  # type: ignore[arg-type]
    settings = {
        setting.field: Equivalent(setting.variable if text else file.variable, stage),
        file.field: Equivalent(file.variable, path),
    }
    return read_deepspeed_config(section).stage, settings


def _offloads(read: VariableReader, stage: int) -> dict[str, Equivalent]:
    """Return the settings of the devices that are offloaded to, and of the directory."""
    settings: dict[str, Equivalent] = {}
    paths: dict[str, str] = {}
    for device, path, least in (
        (sharding.OFFLOAD_OPTIMIZER_DEVICE, sharding.OFFLOAD_OPTIMIZER_NVME_PATH, 1),
        (sharding.OFFLOAD_PARAM_DEVICE, sharding.OFFLOAD_PARAM_NVME_PATH, ZERO_3),
    ):
        word, text = read.word(device), read.text(path.variable)
        if word and stage < least:
            read.ignore(device.variable, f"DeepSpeed does not use it in ZeRO stage {stage}")
            word = ""
        elif word:
            word = "cpu" if word == "nvme" and stage < ZERO_3 else word  # as in DeepSpeed
            settings[device.field] = Equivalent(device.variable, word)
        # In stage 3, the JSON file may offload to disks.
        may_offload = stage == ZERO_3 and read.text(sharding.DEEPSPEED_FILE.variable)
        if text and word != "nvme" and not may_offload:
            read.ignore(path.variable, f"{device.variable} is not nvme, or the ZeRO stage is not 3")
        elif text:
            paths[path.variable] = text
    if len(set(paths.values())) > 1:
        (first, one), (second, other) = paths.items()
        raise SettingsError(
            f"Cannot use {first}={one} with {second}={other}: accel has one directory for both. Set them to the same, or write a "
            "JSON file."
        )
    field = sharding.OFFLOAD_PARAM_NVME_PATH.field
    for name, text in paths.items():
        settings[field] = Equivalent(name, text)
    return settings


def _zero3_init(read: VariableReader, stage: int) -> dict[str, Equivalent]:
    """Return the setting of models that are sharded while they load; Accelerate does so with stage 3 by default."""
    setting = sharding.ZERO3_INIT
    is_unset = not read.environ.get(setting.variable, "").strip()
    is_on = read.is_on(setting.variable) or is_unset
    if stage == ZERO_3 and is_on:
        return {setting.field: Equivalent(setting.variable, "1")}
    if is_on and not is_unset:
        read.ignore(setting.variable, f"it applies to ZeRO stage 3 only, and the stage is {stage}")
    return {}


def _encode_config(config: DeepSpeedConfig) -> str:
    """Return a configuration as text, with what Accelerate fills in of the script."""
    batches = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values: dict[str, Any] = {**dict.fromkeys(batches, AUTO), **config.values}
    values["zero_optimization"] = {"stage": config.stage, **values.get("zero_optimization", {})}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode()


class DeepSpeedVariables:
    """DeepSpeed in the table of Accelerate's variables."""

    @staticmethod
    def translate(read: VariableReader) -> dict[str, Equivalent]:
        """Return the fields of the settings that the variables of DeepSpeed mean."""
        if not read.is_on(sharding.USE_DEEPSPEED.variable):
            return {}
        for setting in (sharding.DEEPSPEED_FIELDS, sharding.SAVE_16BIT_MODEL):
            read.text(setting.variable)  # accel gathers the weights to save them anyway
        moe = sharding.MOE_CLASSES
        if read.text(moe.variable):
            raise SettingsError(
                f"{moe.variable}={read.environ[moe.variable]} is not supported: {moe.refusal}."
            )
        stage, settings = _zero_stage(read)
        settings |= _offloads(read, stage) | _zero3_init(read, stage)
        clipping = sharding.GRADIENT_CLIPPING
        if (text := read.text(clipping.variable).lower()) not in {"", "auto"}:
            try:
                norm = float(text)
            except ValueError:
                raise SettingsError(
                    f"Invalid {clipping.variable} {read.environ[clipping.variable]!r}: expected a number, or auto."
                ) from None
            settings |= {clipping.field: Equivalent(clipping.variable, str(norm))} if norm else {}
        return settings

    @staticmethod
    def export(section: DeepSpeed) -> dict[Setting, str]:
        """Return the variables of a section.

        Accelerate has variables for a part of the section only, and does not add any of them to a JSON file. So it gets the whole
        configuration, encoded as its `HfDeepSpeedConfig` reads it, unless these variables or the file say the same.
        """
        config = read_deepspeed_config(section)
        values: dict[Setting, str] = {sharding.USE_DEEPSPEED: "true"}
        if config.stage == ZERO_3 or section.zero3_init:
            values[sharding.ZERO3_INIT] = "true" if section.zero3_init else "false"
        from_file = {source for source in config.sources.values() if source == section.config_file}
        if (
            section.config_file
            and from_file == {*config.sources.values()}
            and "zero_optimization" in config.values
        ):
            return {**values, sharding.DEEPSPEED_FILE: section.config_file}
        if section.config_file or any(getattr(section, name) != AUTO for name in _WITHOUT_VARIABLE):
            return {**values, sharding.DEEPSPEED_FILE: _encode_config(config)}
        values[sharding.ZERO_STAGE] = str(config.stage)
        paths = {
            sharding.OFFLOAD_OPTIMIZER_DEVICE: (
                section.offload_optimizer,
                sharding.OFFLOAD_OPTIMIZER_NVME_PATH,
            ),
            sharding.OFFLOAD_PARAM_DEVICE: (section.offload_param, sharding.OFFLOAD_PARAM_NVME_PATH),
        }
        for setting, (device, path) in paths.items():
            values |= {setting: device} if device != "no" else {}
            values |= {path: section.nvme_path} if device == "nvme" else {}
        if section.gradient_clipping:
            values[sharding.GRADIENT_CLIPPING] = str(section.gradient_clipping)
        return values

    @staticmethod
    def export_implied(values: Mapping[Setting, str]) -> dict[Setting, str]:
        """Return the switch without which Accelerate cannot save a model of stage 3."""
        if values.get(sharding.ZERO_STAGE) != str(ZERO_3):
            return {}
        return {sharding.USE_DEEPSPEED: "true", sharding.SAVE_16BIT_MODEL: "true"}

    @staticmethod
    def list_limits(section: DeepSpeed) -> Iterator[str]:
        """Yield the sentence on clipping."""
        if section.read_config().get("gradient_clipping") is None:
            yield (
                "deepspeed.gradient_clipping: 0 is 1.0 in a script that uses Accelerate, whose clip_grad_norm_ does nothing with "
                "DeepSpeed, unless a Trainer sets max_grad_norm. Set deepspeed.gradient_clipping."
            )

    @staticmethod
    def explain_refusal(section: DeepSpeed, device: str) -> str:
        """Return why a script that uses Accelerate cannot run on a type of device."""
        if device != "cpu":
            return ""
        return (
            f"Cannot use DeepSpeed on the CPU with Accelerate: deepspeed.stage is {section.stage}, and Accelerate would replicate "
            "models instead. Remove the section deepspeed, run on GPUs, or import accel_runtime instead of accelerate."
        )
