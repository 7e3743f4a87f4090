"""`DeepSpeedPlugin` and `HfDeepSpeedConfig` read, fill in and compare options as in Accelerate 1.15; needs no deepspeed."""

from __future__ import annotations

import base64
import dataclasses
import json
import types

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.environment.layouts import SettingsError
from accel_runtime.extensions.deepspeed.plugin import DeepSpeedOptions, DeepSpeedPlugin, HfDeepSpeedConfig
from accel_runtime.extensions.deepspeed.settings import DeepSpeed
from accel_runtime.utils import DummyOptim, DummyScheduler

pytestmark = pytest.mark.usefixtures("on_the_cpu")

CONFIG = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def build(plugins, section=None, steps=1):
    return DeepSpeedOptions.build(plugins, section or DeepSpeed(), accumulation_steps=steps)


def is_read_as_changed(options):
    """Read the plugin, and return whether the strategy gets another configuration."""
    configurations = []
    options.read_plugin(configurations.append)
    return configurations == [options.config]


# A configuration -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dict", "path", "pathlib", "json", "base64", "object", "same class"])
def test_a_configuration_is_read_from_every_form_of_accelerate(form, tmp_path):
    text = json.dumps(CONFIG) + " " * 5000  # longer than a file name may be
    path = tmp_path / "ds.json"
    path.write_text(text)
    source = {
        "dict": CONFIG,
        "path": str(path),
        "pathlib": path,
        "json": text,
        "base64": base64.urlsafe_b64encode(text.encode()).decode(),
        "object": types.SimpleNamespace(config=CONFIG),
        "same class": HfDeepSpeedConfig(CONFIG),
    }[form]
    config = HfDeepSpeedConfig(source)
    assert config.config == CONFIG
    assert config.config is not CONFIG
    assert config.is_zero2()
    assert not config.is_zero3()
    assert config.is_offload()
    assert config.get_value("bf16.enabled") == "auto"
    assert config.get_value("fp16.enabled", 7) == 7
    assert config.is_true("zero_optimization.offload_optimizer.device")
    assert not config.is_false("fp16.enabled")
    config.del_config_sub_tree("bf16")
    config.del_config_sub_tree("bf16")
    with pytest.raises(ValueError, match=r"Cannot remove bf16"):
        config.del_config_sub_tree("bf16", must_exist=True)


@pytest.mark.parametrize("source", ["no-such-file.json", "[1]", 3, None, {"pipeline": {"stages": 2}}])
def test_what_is_no_configuration_is_rejected(source):
    with pytest.raises((ValueError, TypeError, SettingsError), match=r"DeepSpeed"):
        HfDeepSpeedConfig(source)


# Fields ----------------------------------------------------------------------------------


def test_the_values_that_mean_unset_in_accelerate_are_accepted():
    names = [field.name for field in dataclasses.fields(DeepSpeedPlugin)]
    unset = dict.fromkeys((name for name in names if name.startswith("offload_")), "none")
    plugin = DeepSpeedPlugin(
        hf_ds_config="none", gradient_accumulation_steps="auto", gradient_clipping="auto", **unset
    )
    options = build(plugin, DeepSpeed(stage="3", offload_optimizer="cpu", gradient_clipping=0.5))
    assert options.config.stage == 3
    assert options.config.get("zero_optimization.offload_optimizer.device") == "cpu"
    assert options.config.get("gradient_clipping") == 0.5


def test_the_fields_and_the_configuration_are_complete_once_an_accelerator_has_the_plugin():
    plugin = DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu")
    build(plugin, steps=4)
    fields = {field.name: getattr(plugin, field.name) for field in dataclasses.fields(plugin)}
    fields.pop("hf_ds_config")
    assert fields == {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "zero_stage": 2,
        "is_train_batch_min": True,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "offload_optimizer_nvme_path": "none",
        "offload_param_nvme_path": "none",
        "zero3_init_flag": False,
        "zero3_save_16bit_model": False,
        "transformer_moe_cls_names": None,
        "enable_msamp": False,
        "msamp_opt_level": "O1",
    }
    zero = plugin.deepspeed_config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (2, "cpu")
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 4
    assert plugin.selected


def test_the_stage_is_2_without_another_one():
    assert build(DeepSpeedPlugin()).config.stage == 2
    assert build(DeepSpeedPlugin(), DeepSpeed(stage="1")).config.stage == 1


def test_a_contradiction_names_both_places():
    with pytest.raises(
        SettingsError, match=r"stage is 2 in DeepSpeedPlugin.hf_ds_config and 3 by DeepSpeedPlugin.zero_stage"
    ):
        build(DeepSpeedPlugin(hf_ds_config=CONFIG, zero_stage=3))
    with pytest.raises(
        SettingsError, match=r"stage is 2 in DeepSpeedPlugin.zero_stage and 1 by deepspeed\.stage"
    ):
        build(DeepSpeedPlugin(zero_stage=2), DeepSpeed(stage="1"))


# Assignments of scripts ------------------------------------------------------------------


def test_keys_that_a_script_assigns_are_read_at_prepare():
    options = build(DeepSpeedPlugin(hf_ds_config=CONFIG))
    assert not is_read_as_changed(options)
    options.plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
    assert is_read_as_changed(options)
    assert options.config.get("train_micro_batch_size_per_gpu") == 8
    assert options.config.sources["train_micro_batch_size_per_gpu"] == "DeepSpeedPlugin.hf_ds_config"
    options.plugin.deepspeed_config["zero_optimization"]["stage"] = 1
    options.plugin.deepspeed_config["zero_optimization"]["offload_optimizer"]["device"] = "none"
    assert is_read_as_changed(options)
    assert options.config.stage == 1


def test_the_source_of_a_value_is_the_same_at_every_read():
    options = build(
        DeepSpeedPlugin(gradient_clipping=1.0),
        DeepSpeed(stage="3"),
        2,
    )
    before = dict(options.config.sources)
    assert before == {
        "zero_optimization.stage": "deepspeed.stage",
        "gradient_clipping": "DeepSpeedPlugin.gradient_clipping",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
    }
    options.read_plugin(lambda _: None)
    assert options.config.sources == before


@pytest.mark.parametrize(("path", "value"), [("gradient_accumulation_steps", 4), ("fp16.enabled", True)])
def test_what_the_accelerator_reads_once_cannot_be_assigned_later(path, value):
    options = build(DeepSpeedPlugin(zero_stage=2))
    section, key = options.plugin.hf_ds_config.find_config_node(path)
    if section is None:
        section = options.plugin.deepspeed_config.setdefault(path.partition(".")[0], {})
    section[key] = value
    with pytest.raises(ValueError, match=rf"{path} is {value} .*before the Accelerator is made"):
        options.read_plugin(lambda _: None)


def test_values_that_are_auto_are_filled_in_and_others_compared():
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    plugin.deepspeed_config_process(
        must_match=True,
        **{
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization.reduce_bucket_size": 16,
            "steps_per_print": 1,
        },
    )
    assert plugin.get_value("train_micro_batch_size_per_gpu") == 4
    assert plugin.get_value("zero_optimization.reduce_bucket_size") == 16
    assert plugin.is_auto("gradient_accumulation_steps")
    plugin.deepspeed_config_process(must_match=False, **{"zero_optimization.stage": 3})
    with pytest.raises(
        ValueError, match=r"zero_optimization.stage is 2 in the configuration and 3 in the call"
    ):
        plugin.deepspeed_config_process(**{"zero_optimization.stage": 3})
    mismatches = []
    plugin.fill_match("zero_optimization.stage", mismatches, **{"zero_optimization.stage": 1})
    plugin.fill_match("no.such.path", mismatches)
    assert len(mismatches) == 1


def test_a_number_format_is_enabled_where_the_configuration_leaves_it_open():
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    plugin.set_mixed_precision("fp16")
    plugin.deepspeed_config["fp16"]["initial_scale_power"] = 0
    assert not plugin.deepspeed_config["bf16"]["enabled"]
    assert build(plugin).config.mixed_precision == "fp16"
    with pytest.raises(ValueError, match=r"contradicts fp16\.enabled: true"):
        plugin.set_mixed_precision("bf16")
    with pytest.raises(ValueError, match=r"expected one of no, fp16, bf16"):
        plugin.set_mixed_precision("fp8")


# Several plugins, and other parts --------------------------------------------------------


def test_the_selected_one_of_several_plugins_is_read():
    options = build(
        {
            "student": DeepSpeedPlugin(zero_stage=2),
            "teacher": DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}}),
        }
    )
    student, teacher = options.plugins.values()
    assert (student.selected, teacher.selected) == (True, False)
    options.select("teacher")
    assert (student.selected, teacher.selected) == (False, True)
    assert options.plugin is teacher
    assert teacher.zero_stage == 3
    assert is_read_as_changed(options)
    assert options.config.stage == 3
    with pytest.raises(ValueError, match=r"'other': expected one of student, teacher"):
        options.select("other")
    for selected in (True, False):
        with pytest.raises(ValueError, match=r"Call accelerator\.state\.select_deepspeed_plugin"):
            student.select(_from_accelerator_state=selected)


def test_replicas_follow_the_selected_plugin_of_stage_0_and_refuse_others():
    plugins = {
        "first": DeepSpeedPlugin(zero_stage=0),
        "clipped": DeepSpeedPlugin(zero_stage=0, gradient_clipping=0.5),
        "sharded": DeepSpeedPlugin(zero_stage=2),
    }
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugins)
    accelerator.state.select_deepspeed_plugin("clipped")
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.tensor([[100.0]])).sum())
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.5)
    accelerator.state.select_deepspeed_plugin("sharded")
    for _ in range(2):  # a refused configuration is not kept
        with pytest.raises(
            ValueError, match=r"Cannot select ZeRO stage 2 \(.*\): the Accelerator uses stage 0"
        ):
            accelerator.prepare(nn.Linear(1, 1))


def test_options_of_the_fp16_scale_are_those_that_the_accelerator_was_made_with():
    def build(power):
        return DeepSpeedPlugin(hf_ds_config={"fp16": {"enabled": True, "initial_scale_power": power}})

    options = DeepSpeedOptions.build({"first": build(8), "other": build(4)}, DeepSpeed())
    options.select("other")
    with pytest.raises(ValueError, match=r"fp16\.initial_scale_power is 4 .* was made with 8"):
        options.read_plugin(lambda _: None)


def test_classes_of_experts_need_stage_3():
    assert build(DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="A, B")).config.leaf_modules == (
        "A",
        "B",
    )
    with pytest.raises(ValueError, match=r"transformer_moe_cls_names has no effect in ZeRO stage 2"):
        build(DeepSpeedPlugin(zero_stage=2, transformer_moe_cls_names="A"))


def test_sharded_loading_is_off_below_stage_3():
    plugin = DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True)
    assert not plugin.is_zero3_init_enabled()
    with plugin.zero3_init_context_manager(enable=False):
        pass


def test_without_deepspeed_there_is_no_plugin_and_a_dummy_is_rejected():
    accelerator = Accelerator()
    assert accelerator.deepspeed_plugin is None
    assert accelerator.state.deepspeed_plugins is None
    for call in (accelerator.state.get_deepspeed_plugin, accelerator.state.select_deepspeed_plugin):
        with pytest.raises(ValueError, match=r"DeepSpeed is not in use"):
            call("default")
    optimizer = DummyOptim(nn.Linear(1, 1).parameters())
    for dummy in (optimizer, DummyScheduler(optimizer)):
        with pytest.raises(
            ValueError, match=rf"{type(dummy).__name__} cannot be prepared: DeepSpeed is not in use"
        ):
            accelerator.prepare(dummy)


def test_both_names_of_the_argument_are_an_error():
    with pytest.raises(ValueError, match=r"either deepspeed_plugin or deepspeed_plugins"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(), deepspeed_plugins=DeepSpeedPlugin())
