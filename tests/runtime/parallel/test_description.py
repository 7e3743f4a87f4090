"""The description of a sharded model."""

from __future__ import annotations

import os

import pytest
import torch
from support.training.models import ResidualNet
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from accel_runtime import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accel_runtime.parallel.fully_shard import describe_layout


def prepare_sharded(tp=1, replicate=1, precision="bf16", **options):
    """Prepare a sharded model."""
    config = ParallelismConfig(
        dp_replicate_size=replicate, tp_size=tp, tp_plan=ResidualNet.tp_plan if tp > 1 else None
    )
    plugin = FullyShardedDataParallelPlugin(**options)
    accelerator = Accelerator(mixed_precision=precision, parallelism_config=config, fsdp_plugin=plugin)
    model = ResidualNet(8, 32, 4, depth=3, norm=nn.LayerNorm, bias=False)
    model.head.requires_grad_(requires_grad=False)
    return accelerator, accelerator.prepare(model)


def describe_model(*args, **options):
    description = prepare_sharded(*args, **options)[0].describe()
    description_of_model = description.models[0]
    return description_of_model, [text for title, text in description.lines() if title == ""]


def test_parameters_are_described_by_gathered_group(pair):
    def described():
        return describe_model(1, activation_checkpointing=True, ignored_modules="blocks.*.norm")

    for facts, lines in pair.run(described):
        assert (facts.name, facts.computes_in, facts.reduces_in) == ("ResidualNet", "bfloat16", "float32")
        blocks, root, head = sorted(facts.groups, key=lambda group: (group.kind, -group.elements))
        assert blocks.modules == root.modules == ("blocks.0", "blocks.1", "blocks.2")
        assert (blocks.elements, blocks.parameters, blocks.bytes_here) == (552, 4, 3 * 552 * 4 // 2)
        assert (blocks.dtype, blocks.gradients) == ("float32", "float32")
        assert (blocks.layout, blocks.computed_again) == ("divided over 2 ranks of dp_shard", True)
        assert (root.layout, root.reduces_in, root.bytes_here) == ("whole on every rank", "float32", 192)
        assert (head.modules, head.gradients, head.reduces_in) == (("",), "", "")
        assert lines[0].startswith(
            "ResidualNet: 32 parameters in float32, frozen, computed in bfloat16; divided over 2"
        )
        assert (
            "3 x ResidualBlock: 552 parameters each in float32, gradients float32, computed in bfloat16"
            in lines[1]
        )
        assert (
            "averaged in float32; divided over 2 ranks of dp_shard; 3.2 KiB here; activations computed"
            in lines[1]
        )


@pytest.mark.slow
def test_replicas_and_tensor_parallel_layers_are_described(four):
    def layouts(tp, replicate):
        facts, _ = describe_model(tp, replicate)
        return {group.layout for group in facts.groups if group.kind == "ResidualBlock"}

    shards = "divided over 2 ranks of dp_shard"
    tp = "2 ranks of tp"
    assert four.run(layouts, 1, 2) == [{f"{shards}, 2 copies"}] * 4
    expected = {f"{shards}, divided over {tp} along dimension {at}" for at in (0, 1)} | {
        f"{shards}, the same over {tp}"
    }
    assert four.run(layouts, 2, 1) == [expected | {shards}] * 4


def test_each_kind_of_layout_is_described(pair):
    def words():
        Accelerator()
        mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        replicated = distribute_tensor(torch.ones(2), mesh, [Replicate()])
        part = DTensor.from_local(torch.ones(2), mesh, [torch.distributed.tensor.Partial()])
        return describe_layout(replicated), describe_layout(part), describe_layout(torch.ones(1))

    expected = ("the same over 2 ranks of tp", "to be added up over 2 ranks of tp", "whole on every rank")
    assert pair.run(words) == [expected] * 2


def test_each_setting_of_a_section_has_its_origin(pair):
    def origins():
        os.environ["ACCEL_FULLY_SHARD_WRAP"] = "ResidualBlock"
        try:
            accelerator, _ = prepare_sharded(1, cpu_offload=True)
        finally:
            del os.environ["ACCEL_FULLY_SHARD_WRAP"]
        options = accelerator.describe().options
        names = ("wrap", "cpu_offload", "ignore")
        return [options[f"fully_shard_{name}"].origin for name in names] + [
            options["parallel_dp_shard"].origin
        ]

    assert pair.run(origins) == [["ACCEL_FULLY_SHARD_WRAP", "argument", "default", "argument"]] * 2
