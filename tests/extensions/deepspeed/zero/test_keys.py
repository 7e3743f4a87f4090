"""The keys of DeepSpeed's JSON file that accel accepts or refuses are those of the installed DeepSpeed."""

from __future__ import annotations

import json

import pytest

from accel_runtime.environment.accelerate.export import build_export, read_user_variables
from accel_runtime.environment.settings import Settings
from accel_runtime.extensions.deepspeed.settings import (
    KEYS,
    REFUSED,
    SECTIONS,
    DeepSpeed,
    read_deepspeed_file,
)

pytest.importorskip("deepspeed.runtime")


def list_models():
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }


@pytest.mark.parametrize("path", [*list(SECTIONS)[:3], "fp16", "bf16"])
def test_the_keys_of_a_section_are_those_of_deepspeed(path):
    fields = list_models()[path].model_fields
    names = {name for key, field in fields.items() for name in (key, field.alias) if name}
    refused = {key.removeprefix(f"{path}.") for key in REFUSED if key.startswith(f"{path}.")}
    assert names - refused - {*SECTIONS[path]} == set()
    assert {*SECTIONS[path]} <= names


def test_keys_that_deepspeed_has_removed_are_refused_and_left_out_if_they_are_off(tmp_path):
    from deepspeed.runtime import config

    removed = {
        *config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
        *(f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS),
    }
    assert removed <= REFUSED.keys()
    path = tmp_path / "ds.json"
    off = {key: {"enabled": False} for key in removed if "." not in key}
    path.write_text(json.dumps({**off, "zero_optimization": {"stage": 2, "mics_shard_size": -1}}))
    config._reject_removed_config_keys(read_deepspeed_file(path))


def test_deepspeed_itself_reads_what_accel_accepts(tmp_path):
    from deepspeed import DeepSpeedConfig

    values = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 7, "overlap_comm": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 100,
        "elasticity": {"enabled": False},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values))
    config = DeepSpeedConfig(read_deepspeed_file(path))
    assert (config.zero_config.stage, config.zero_config.param_persistence_threshold) == (3, 7)
    assert "gradient_clipping" in KEYS


def test_accelerates_plugin_of_the_exported_variables_is_read_by_deepspeed(tmp_path, monkeypatch):
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed import DeepSpeedConfig

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"overlap_comm": False}}))
    section = DeepSpeed("2", str(path), gradient_clipping=0.5, reduce_bucket_size=99)
    settings = Settings(engines=(section,), mixed_precision="bf16")
    for name, text in build_export(settings, "cuda", 1, {}, read_user_variables({})).variables.items():
        monkeypatch.setenv(name, text)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16")
    values = {
        **plugin.deepspeed_config,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }
    del values["train_batch_size"]
    config = DeepSpeedConfig(values)
    assert (config.zero_config.stage, config.zero_config.reduce_bucket_size) == (2, 99)
    assert (config.gradient_clipping, config.bfloat16_config.enabled) == (0.5, True)
