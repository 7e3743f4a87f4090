"""Sharding options with the names of Accelerate, and the settings they become; `test_options.py` tests each option alone."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from accel_runtime import FullyShardedDataParallelPlugin, ParallelismConfig, Settings
from accel_runtime.environment.settings import FullyShard, Parallel
from accel_runtime.parallel.plugins import (
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    merge_settings,
)

Plugin = FullyShardedDataParallelPlugin


class Block(nn.Module):
    pass


SUPPORTED = {
    "nothing": ({}, {}),
    "its own version": ({"fsdp_version": 2}, {}),
    "the strategy that is always": ({"sharding_strategy": "FULL_SHARD"}, {}),
    "torch's strategy": ({"sharding_strategy": ShardingStrategy.FULL_SHARD}, {}),
    "a counted strategy": ({"sharding_strategy": 1}, {}),
    "kept parameters": ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
    "kept parameters in text": ({"reshard_after_forward": "false"}, {"reshard_after_forward": False}),
    "a strategy for a switch": ({"reshard_after_forward": "FULL_SHARD"}, {"reshard_after_forward": True}),
    "a smaller group": ({"reshard_after_forward": 2}, {"reshard_after_forward": 2}),
    "prefetching as always": ({"backward_prefetch": "BACKWARD_PRE"}, {}),
    "torch's prefetching": ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, {}),
    "classes": ({"transformer_cls_names_to_wrap": ["Block", "Head"]}, {"wrap": "Block,Head"}),
    "a class": (
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": "Block"},
        {"wrap": "Block"},
    ),
    "the model's own classes": ({"auto_wrap_policy": "transformer_based_wrap"}, {"wrap": "auto"}),
    "a size": ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 1000}, {"wrap": "1000"}),
    "a size alone": ({"min_num_params": 1000}, {"wrap": "1000"}),
    "the root only": ({"auto_wrap_policy": "NO_WRAP", "min_num_params": 0}, {"wrap": "none"}),
    "a policy of classes": ({"auto_wrap_policy": ModuleWrapPolicy({Block})}, {"wrap": "Block"}),
    "a function of classes": (
        {"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})},
        {"wrap": "Block"},
    ),
    "a function of a size": (
        {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=50)},
        {"wrap": "50"},
    ),
    "the function of its own size": (
        {"auto_wrap_policy": size_based_auto_wrap_policy},
        {"wrap": "100000000"},
    ),
    "offloading": ({"cpu_offload": True}, {"cpu_offload": True}),
    "a policy of offloading": ({"cpu_offload": CPUOffloadPolicy()}, {"cpu_offload": True}),
    "no offloading": ({"cpu_offload": OffloadPolicy()}, {"cpu_offload": False}),
    "no offloading of the first version": ({"cpu_offload": CPUOffload()}, {"cpu_offload": False}),
    "names": ({"ignored_modules": "layers.*.norm, head"}, {"ignore": ("layers.*.norm", "head")}),
    "a list of names": ({"ignored_modules": ["head"]}, {"ignore": ("head",)}),
    "checkpointing": ({"activation_checkpointing": True}, {"activation_checkpointing": True}),
    "a form of checkpoints": ({"state_dict_type": StateDictType.SHARDED_STATE_DICT}, {}),
    "what is always": ({"use_orig_params": True, "limit_all_gathers": True, "sync_module_states": True}, {}),
    "what is never": (
        {
            "forward_prefetch": False,
            "cpu_ram_efficient_loading": False,
            "activation_checkpointing_offload": False,
        },
        {},
    ),
    "one format": (
        {"mixed_precision_policy": "bf16"},
        {"param_dtype": "bf16", "reduce_dtype": "bf16", "output_dtype": "bf16"},
    ),
    "formats": (
        {"mixed_precision_policy": {"param_dtype": torch.bfloat16, "reduce_dtype": "float32"}},
        {"param_dtype": "bf16", "reduce_dtype": "fp32"},
    ),
    "torch's policy": (
        {
            "mixed_precision_policy": MixedPrecisionPolicy(
                torch.float16, torch.float32, torch.float32, cast_forward_inputs=False
            )
        },
        {"param_dtype": "fp16", "reduce_dtype": "fp32", "output_dtype": "fp32", "cast_forward_inputs": False},
    ),
    "a policy that reduces in what it computes in": (
        {"mixed_precision_policy": MixedPrecisionPolicy(torch.bfloat16)},
        {"param_dtype": "bf16", "reduce_dtype": "bf16"},
    ),
}

REFUSED = {
    "machines": (
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
        "dp_replicate_size=number of machines",
    ),
    "kept machines": ({"reshard_after_forward": "HYBRID_SHARD_ZERO2"}, "and reshard_after_forward=False"),
    "nothing to shard": ({"sharding_strategy": 3}, "no fsdp_plugin at all"),
    "two words for one": (
        {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
        "Remove sharding_strategy",
    ),
    "a function": ({"auto_wrap_policy": always_wrap_policy}, "Name the classes"),
    "names and a size": (
        {"transformer_cls_names_to_wrap": ["Block"], "min_num_params": 5},
        "exclude each other",
    ),
    "names for nothing": (
        {"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": ["Block"]},
        "does not use transformer_cls_names_to_wrap",
    ),
    "a size for nothing": (
        {"auto_wrap_policy": "transformer_based_wrap", "min_num_params": 5},
        "does not use min_num_params",
    ),
    "offloading of the first version": (
        {"cpu_offload": CPUOffload(offload_params=True)},
        "Pass cpu_offload=True",
    ),
    "memory that moves": ({"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, "pinned"),
    "modules": ({"ignored_modules": [nn.Linear(1, 1)]}, "Pass names"),
    "an expression": ({"ignored_modules": r".*norm|head\d"}, "layers"),
    "a format of 64 bits": (
        {"mixed_precision_policy": {"param_dtype": torch.float64}},
        "param_dtype torch.float64: expected one of",
    ),
    "a format of the first version": ({"mixed_precision_policy": MixedPrecision()}, "MixedPrecisionPolicy"),
    "buffers": ({"mixed_precision_policy": {"buffer_dtype": torch.float32}}, "buffers keep their own dtype"),
}


@pytest.mark.parametrize("case", SUPPORTED)
def test_supported_options_become_settings(case):
    options, expected = SUPPORTED[case]
    assert Plugin(**options).fully_shard() == replace(FullyShard(), **expected)


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_options_are_rejected_with_an_alternative(case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"FullyShardedDataParallelPlugin.*{message}"):
        Plugin(**options)


def test_options_missing_in_a_plugin_come_from_the_profile():
    profile = FullyShard(wrap="Block", cpu_offload=True)
    assert Plugin(cpu_offload=False).fully_shard(profile) == FullyShard(wrap="Block")


def test_sizes_and_a_tp_plan_become_settings():
    config = ParallelismConfig(2, "auto", tp_size=4, tp_plan={"layers.*.up": "colwise"})
    expected = Parallel(dp_replicate=2, dp_shard="auto", tp=4, tp_plan=(("layers.*.up", "colwise"),))
    assert config.parallel() == expected
    assert ParallelismConfig(tp_plan=[("a", "rowwise")]).parallel() == Parallel(tp_plan=(("a", "rowwise"),))
    assert ParallelismConfig(cp_size=2, cp_backend="torch", sp_size=1).parallel(expected).tp == 4
    assert ParallelismConfig(sp_size=2, sp_backend="torch").parallel() == Parallel(sp=2)
    assert ParallelismConfig(sp_size=2).sp_enabled


@pytest.mark.parametrize("options", [{"sp_backend": "deepspeed"}, {"sp_handler": object()}])
def test_sequence_parallelism_of_deepspeed_is_rejected_with_the_cure(options):
    assert not ParallelismConfig(sp_backend="deepspeed").sp_enabled
    with pytest.raises(
        ValueError, match=r"keep sp_size, and train inside of accelerator\.maybe_context_parallel"
    ):
        ParallelismConfig(sp_size=2, **options)


def test_handlers_are_supported():
    ParallelismConfig(
        tp_handler=TorchTensorParallelConfig(), cp_handler=TorchContextParallelConfig("allgather")
    )


def test_arguments_override_the_environment():
    settings = Settings(parallel=Parallel(tp=2), fully_shard=FullyShard(wrap="Block"))
    assert merge_settings(settings, None, None) == settings
    assert merge_settings(settings, ParallelismConfig(dp_shard_size=4), None).parallel == Parallel(
        dp_shard=4, tp=2
    )


def test_a_plugin_alone_shards_over_all_processes():
    run = merge_settings(Settings(), None, Plugin(min_num_params=7))
    assert (run.parallel, run.fully_shard) == (Parallel(dp_shard="auto"), FullyShard(wrap="7"))
    assert run.parallel.build_grid(4).size("shard") == 4
    two = merge_settings(Settings(), ParallelismConfig(dp_replicate_size=2), Plugin()).parallel.build_grid(4)
    assert (two.size("data"), two.size("shard")) == (2, 2)
    assert merge_settings(Settings(), ParallelismConfig(dp_shard_size=2), Plugin()).parallel.dp_shard == 2


def test_a_plugin_with_a_shard_size_of_one_is_rejected():
    with pytest.raises(ValueError, match="Remove dp_shard_size"):
        merge_settings(Settings(), ParallelismConfig(dp_shard_size=1, tp_size=2), Plugin())


def test_an_object_of_another_class_is_rejected():
    with pytest.raises(TypeError, match=r"fsdp_plugin .*: expected a FullyShardedDataParallelPlugin"):
        merge_settings(Settings(), None, ParallelismConfig())
    with pytest.raises(TypeError, match=r"Accelerator.parallelism_config .*: expected a ParallelismConfig"):
        merge_settings(Settings(), Plugin(), None)
