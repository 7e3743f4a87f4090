"""Configuration objects: validation on assignment, and the effect of an assignment on an `Accelerator`."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from support.cases.log_messages import collect_messages
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
)

REFUSED = [
    (DistributedDataParallelKwargs, {}, "comm_hook", "int8"),
    (DistributedDataParallelKwargs, {}, "comm_wrapper", "fp16"),
    (DistributedDataParallelKwargs, {"comm_hook": "fp16"}, "comm_state_option", {"warm_start": True}),
    (GradientAccumulationPlugin, {"num_steps": 2}, "num_steps", 0),
    (GradientAccumulationPlugin, {}, "num_steps", "4"),
    (GradientAccumulationPlugin, {}, "num_steps", 2.0),
    (GradientAccumulationPlugin, {}, "num_steps", True),
    (GradientAccumulationPlugin, {}, "sync_each_batch", "no"),
    (DataLoaderConfiguration, {}, "dispatch_batches", "yes"),
    (DataLoaderConfiguration, {}, "even_batches", "False"),
    (DataLoaderConfiguration, {}, "split_batches", None),
    (DistributedDataParallelKwargs, {}, "static_graph", "False"),
    (TorchDynamoPlugin, {}, "dynamic", "auto"),
    (TorchDynamoPlugin, {"backend": "eager", "mode": "default"}, "options", {"a": 1}),
    (TorchDynamoPlugin, {}, "backend", "fast"),
    (ProfileKwargs, {}, "activities", ["gpu"]),
    (ProfileKwargs, {}, "schedule_option", {"wait": 1}),
    (ProjectConfiguration, {}, "total_limit", 0),
    (ProjectConfiguration, {}, "iteration", -1),
    (ParallelismConfig, {"tp_size": 2}, "tp_size", 0),
    (ParallelismConfig, {}, "cp_handler", 3),
    (TorchContextParallelConfig, {}, "cp_comm_strategy", "alltoall"),
    (TorchTensorParallelConfig, {}, "enable_async_tp", True),
    (FullyShardedDataParallelPlugin, {}, "state_dict_type", "FULL_STATE_DICT"),
    (FullyShardedDataParallelPlugin, {"min_num_params": 5}, "transformer_cls_names_to_wrap", ["Block"]),
]
OBJECTS = {
    AutocastKwargs: {"cache_enabled": False},
    DataLoaderConfiguration: {"data_seed": 3},
    DistributedDataParallelKwargs: {"comm_hook": "power_sgd", "comm_state_option": {"warm_start": False}},
    FullyShardedDataParallelPlugin: {"ignored_modules": ["head"]},
    GradScalerKwargs: {"init_scale": 4.0},
    GradientAccumulationPlugin: {"num_steps": 2},
    InitProcessGroupKwargs: {"backend": "gloo"},
    ParallelismConfig: {"tp_size": 2},
    ProfileKwargs: {"schedule_option": {"wait": 1, "warmup": 1, "active": 1}},
    ProjectConfiguration: {"total_limit": 2},
    TorchContextParallelConfig: {"cp_comm_strategy": "allgather"},
    TorchDynamoPlugin: {"backend": "no", "fullgraph": True},
    TorchTensorParallelConfig: {"enable_async_tp": False},
}


def pickle_and_load(item):
    return pickle.loads(pickle.dumps(item))  # noqa: S301 - our own


# An object by itself -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "name", "value"),
    REFUSED,
    ids=[f"{kind.__name__}.{name}={value}" for kind, _, name, value in REFUSED],
)
def test_an_invalid_assignment_raises_the_error_of_the_constructor_and_changes_nothing(
    kind, fields, name, value
):
    with pytest.raises((TypeError, ValueError)) as constructed:
        kind(**fields | {name: value})
    configuration = kind(**fields)
    before = vars(configuration).copy()
    with pytest.raises(constructed.type) as assigned:
        setattr(configuration, name, value)
    assert str(assigned.value) == str(constructed.value)
    assert vars(configuration) == before


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_a_configuration_can_be_copied_pickled_compared_and_written_as_a_dict(kind):
    configuration = kind(**OBJECTS[kind])
    Accelerator().dataloader_config = DataLoaderConfiguration()  # other objects in use
    for copied in (
        copy.deepcopy(configuration),
        copy.copy(configuration),
        pickle_and_load(configuration),
        dataclasses.replace(configuration),
    ):
        assert copied == configuration
        assert copied is not configuration
    written = configuration.to_dict()
    assert set(written) <= {field.name for field in dataclasses.fields(kind)}
    assert kind(**written | OBJECTS[kind]) == configuration


def test_changes_of_a_copied_configuration_do_not_affect_the_accelerator():
    config = DataLoaderConfiguration()
    accelerator = Accelerator(dataloader_config=config)
    for copied in (copy.deepcopy(config), pickle_and_load(config), dataclasses.replace(config)):
        copied.even_batches = False
    assert accelerator.even_batches


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_a_misspelled_field_is_rejected_with_a_suggestion(kind):
    configuration = kind(**OBJECTS[kind])
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(
        AttributeError, match=rf"{kind.__name__}.{name}s: it has no such field. Did you mean {name}"
    ):
        setattr(configuration, f"{name}s", 1)


def test_an_error_names_the_field_and_the_value():
    with pytest.raises(
        ValueError, match=r"DataLoaderConfiguration.even_batches 'False': expected True or False"
    ):
        DataLoaderConfiguration(even_batches="False")
    with pytest.raises(
        ValueError, match=r"DataLoaderConfiguration.dispatch_batches 'yes': expected True, False or None"
    ):
        DataLoaderConfiguration(dispatch_batches="yes")


@pytest.mark.parametrize("steps", [1.5, "4", True])
def test_accumulation_steps_must_be_an_integer(steps):
    refusal = rf"Invalid gradient_accumulation_steps {steps!r}: expected an integer of at least 1"
    with pytest.raises(ValueError, match=refusal):
        Accelerator(gradient_accumulation_steps=steps)
    accelerator = Accelerator(gradient_accumulation_steps=3)
    with pytest.raises(ValueError, match=refusal):
        accelerator.gradient_accumulation_steps = steps
    assert accelerator.gradient_accumulation_steps == 3


def test_accumulation_steps_default_to_one():
    plugin = GradientAccumulationPlugin(num_steps=None)
    assert plugin == GradientAccumulationPlugin() == GradientAccumulationPlugin(1)
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 1


def test_a_string_is_converted_to_the_enum_member_on_assignment():
    handler = DistributedDataParallelKwargs()
    handler.comm_hook = "fp16"
    assert handler == DistributedDataParallelKwargs(comm_hook="fp16")


def test_ignored_modules_given_as_a_generator_are_read_once():
    plugin = FullyShardedDataParallelPlugin(ignored_modules=(name for name in ["head"]))
    plugin.cpu_offload = True
    assert plugin.fully_shard().ignore == ("head",)


# In an Accelerator ---------------------------------------------------------------------


def collect_warnings(name="accel_runtime.options"):
    return collect_messages(name)


def test_loader_configuration_changes_affect_loaders_prepared_later(pair):
    def prepare():
        config = DataLoaderConfiguration()
        accelerator = Accelerator(split_batches=True, dataloader_config=config)
        config.even_batches = False
        first = accelerator.prepare(DataLoader(range(6), batch_size=4))
        batches = [batch.tolist() for batch in first]
        accelerator.dataloader_config.even_batches = True
        config.use_stateful_dataloader = True
        second = accelerator.prepare(DataLoader(range(6), batch_size=4))
        assert accelerator.dataloader_config is config
        assert accelerator.use_stateful_dataloader
        return batches, [batch.tolist() for batch in first], [batch.tolist() for batch in second]

    (first, again, second), (other, _, others) = pair.run(prepare)
    assert (first, other) == ([[0, 1], [4]], [[2, 3], [5]])
    assert again == first
    assert (second, others) == ([[0, 1], [4, 5]], [[2, 3], [0, 1]])


def test_a_loader_configuration_can_be_replaced_unless_schedules_would_count_other_batches():
    accelerator = Accelerator()
    accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True)
    accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    assert accelerator.use_seedable_sampler
    loader = accelerator.prepare(DataLoader(range(4)))
    accelerator.dataloader_config = DataLoaderConfiguration(even_batches=False)
    assert len(loader) == 4
    with pytest.raises(RuntimeError, match=r"with split_batches=True: loaders and schedulers are prepared"):
        accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True)
    with pytest.raises(
        TypeError, match=r"Invalid Accelerator.dataloader_config 3: expected a DataLoaderConfiguration"
    ):
        accelerator.dataloader_config = 3


def test_a_data_seed_without_a_seedable_sampler_is_rejected_by_prepare():
    accelerator = Accelerator()
    accelerator.dataloader_config.data_seed = 3
    with pytest.raises(ValueError, match="has no effect without use_seedable_sampler=True"):
        accelerator.prepare(DataLoader(range(4)))
    accelerator.dataloader_config.use_seedable_sampler = True
    accelerator.prepare(DataLoader(range(4)))


def test_an_assigned_ddp_handler_affects_models_prepared_later(pair):
    def prepare():
        handler = DistributedDataParallelKwargs(static_graph=True)
        accelerator = Accelerator(kwargs_handlers=[handler])
        first = accelerator.prepare(nn.Linear(1, 1))
        with collect_warnings() as messages:
            accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        second = accelerator.prepare(nn.Linear(1, 1))
        assert accelerator.is_main_process == bool(messages)
        return first.static_graph, second.static_graph, second.find_unused_parameters

    assert pair.run(prepare) == [(True, False, True)] * 2


def test_an_assigned_autocast_handler_affects_prepared_models_immediately():
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(1, 1))
    x = torch.ones(1, 1)
    assert model(x).dtype == torch.float32
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    assert model(x).dtype == torch.float32
    accelerator.autocast_handler = AutocastKwargs(fp32_outputs=False)
    assert model(x).dtype == torch.bfloat16
    accelerator.autocast_handler = None
    assert model(x).dtype == torch.float32


def test_assigned_accumulation_steps_are_shared_by_plugin_and_accelerator():
    plugin = GradientAccumulationPlugin(2)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    records = []
    for steps in (2, 3):
        plugin.num_steps = steps
        for _ in range(2 * steps):
            with accelerator.accumulate():
                records.append(accelerator.sync_gradients)
    assert records == [False, True] * 2 + [False, False, True] * 2
    accelerator.gradient_accumulation_steps = 4
    assert plugin.num_steps == 4
    with pytest.raises(ValueError, match="Invalid gradient_accumulation_steps 0: expected at least 1"):
        accelerator.gradient_accumulation_steps = 0
    assert plugin.num_steps == 4


def test_profile_uses_assigned_handler_fields(tmp_path):
    handler = ProfileKwargs()
    accelerator = Accelerator(kwargs_handlers=[handler])
    assert accelerator.profile_handler is handler
    handler.output_trace_dir = str(tmp_path)
    with accelerator.profile():
        torch.ones(2).sum()
    assert (tmp_path / "profile_0.json").exists()


READ_AT_ONCE = {
    "scaler": (GradScalerKwargs, "init_scale", 4.0, "the loss scaler exists already"),
    "process group": (InitProcessGroupKwargs, "backend", "nccl", "the process group exists already"),
    "sizes": (ParallelismConfig, "tp_size", 2, "the device mesh exists already"),
    "autocast": (AutocastKwargs, "enabled", False, "the Accelerator has read it"),
    "ddp": (DistributedDataParallelKwargs, "static_graph", True, "the Accelerator has read it"),
    "compilation": (TorchDynamoPlugin, "backend", "eager", "the Accelerator has read it"),
    "directories": (
        ProjectConfiguration,
        "logging_dir",
        "other",
        "the directories of the project are in use",
    ),
    "loaders": (DataLoaderConfiguration, "split_batches", True, "schedules count by it"),
}
ARGUMENTS = {
    ParallelismConfig: "parallelism_config",
    TorchDynamoPlugin: "dynamo_plugin",
    ProjectConfiguration: "project_config",
    DataLoaderConfiguration: "dataloader_config",
}


@pytest.mark.parametrize("case", READ_AT_ONCE)
def test_an_assignment_that_would_have_no_effect_is_rejected(case):
    kind, name, value, why = READ_AT_ONCE[case]
    option = kind()
    Accelerator(**({ARGUMENTS[kind]: option} if kind in ARGUMENTS else {"kwargs_handlers": [option]}))
    before = getattr(option, name)
    with pytest.raises(
        RuntimeError, match=rf"Cannot set {kind.__name__}.{name}: {why}. Set it before you create the Acc"
    ):
        setattr(option, name, value)
    assert getattr(option, name) == before
    setattr(option, name, before)
    changed = copy.copy(option)
    setattr(changed, name, value)  # for the next Accelerator
    assert getattr(changed, name) != before


def test_names_and_numbers_of_checkpoints_can_be_assigned_at_any_time(tmp_path):
    config = ProjectConfiguration()
    accelerator = Accelerator(project_dir=tmp_path, project_config=config)
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.project_configuration.iteration = 7
    assert Path(accelerator.save_state()).name == "checkpoint_7"
    assert accelerator.save_iteration == 8


def test_sharding_plugin_changes_affect_models_prepared_later(pair):
    def prepare():
        plugin = FullyShardedDataParallelPlugin()
        accelerator = Accelerator(fsdp_plugin=plugin)
        plugin.reshard_after_forward = 3
        with pytest.raises(ValueError, match="does not divide the 2 processes"):
            accelerator.prepare(nn.Linear(2, 2))
        plugin.reshard_after_forward = None
        plugin.transformer_cls_names_to_wrap = ["Linear"]
        model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        with pytest.raises(RuntimeError, match=r"cpu_offload: models are sharded by it. Set it before prep"):
            plugin.cpu_offload = True
        options = accelerator.describe().options["fully_shard_wrap"]
        groups = accelerator._run.strategy.describe_model(model, None).groups
        return len(groups[0].modules), options.value, options.origin

    assert pair.run(prepare) == [(2, "Linear", "argument")] * 2


def test_an_assigned_sharding_option_applies_if_the_profile_enables_sharding(pair):
    def prepare():
        os.environ["ACCEL_PARALLEL_DP_SHARD"] = "auto"
        try:
            accelerator = Accelerator()
        finally:
            del os.environ["ACCEL_PARALLEL_DP_SHARD"]
        accelerator.state.fsdp_plugin.reshard_after_forward = False
        return accelerator.describe().options["fully_shard_reshard_after_forward"].value

    assert pair.run(prepare) == [False] * 2


def test_a_configuration_does_not_keep_its_accelerator_alive():
    config = DataLoaderConfiguration()
    accelerator = Accelerator(dataloader_config=config)
    reference = weakref.ref(accelerator)
    del accelerator
    gc.collect()
    assert reference() is None
