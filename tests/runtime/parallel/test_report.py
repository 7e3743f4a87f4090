"""What a run says of a divided model, and that it is refused where it is not what was asked for."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from accel_runtime import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accel_runtime.parallel import dividing, verifying
from accel_runtime.parallel.report import layout_of

PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.down(self.up(x).relu()))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def prepared(tp=1, replicate=1, precision="bf16", **options):
    """A run with a divided model."""
    config = ParallelismConfig(dp_replicate_size=replicate, tp_size=tp, tp_plan=PLAN if tp > 1 else None)
    plugin = FullyShardedDataParallelPlugin(**options)
    accelerator = Accelerator(mixed_precision=precision, parallelism_config=config, fsdp_plugin=plugin)
    model = Model()
    model.head.requires_grad_(requires_grad=False)
    return accelerator, accelerator.prepare(model)


def told(*args, **options):
    description = prepared(*args, **options)[0].describe()
    found = description.models[0]
    return found, [text for title, text in description.lines() if title == ""]


def test_parameters_are_told_of_by_what_is_gathered_together(pair):
    def described():
        return told(1, activation_checkpointing=True, ignored_modules="layers.*.norm")

    for facts, lines in pair.run(described):
        assert (facts.name, facts.computes_in, facts.reduces_in) == ("Model", "bfloat16", "float32")
        blocks, whole, head = sorted(facts.groups, key=lambda group: (group.kind, -group.elements))
        assert blocks.modules == whole.modules == ("layers.0", "layers.1", "layers.2")
        assert (blocks.elements, blocks.parameters, blocks.bytes_here) == (552, 4, 3 * 552 * 4 // 2)
        assert (blocks.dtype, blocks.gradients) == ("float32", "float32")
        assert (blocks.layout, blocks.computed_again) == ("divided over 2 ranks of dp_shard", True)
        assert (whole.layout, whole.reduces_in, whole.bytes_here) == ("whole on every rank", "float32", 192)
        assert (head.modules, head.gradients, head.reduces_in) == (("",), "", "")
        assert lines[0].startswith(
            "Model: 32 parameters in float32, frozen, computed in bfloat16; divided over 2"
        )
        assert (
            "3 x Block: 552 parameters each in float32, gradients float32, computed in bfloat16" in lines[1]
        )
        assert (
            "averaged in float32; divided over 2 ranks of dp_shard; 3.2 KiB here; activations computed"
            in lines[1]
        )


@pytest.mark.slow
def test_copies_and_divided_layers_are_told_of(four):
    def layouts(tp, replicate):
        facts, _ = told(tp, replicate)
        return {group.layout for group in facts.groups if group.kind == "Block"}

    shards = "divided over 2 ranks of dp_shard"
    tp = "2 ranks of tp"
    assert four.run(layouts, 1, 2) == [{f"{shards}, 2 copies"}] * 4
    wanted = {f"{shards}, divided over {tp} along dimension {at}" for at in (0, 1)} | {
        f"{shards}, the same over {tp}"
    }
    assert four.run(layouts, 2, 1) == [wanted | {shards}] * 4


def test_a_layout_has_words(pair):
    def words():
        Accelerator()
        mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        whole = distribute_tensor(torch.ones(2), mesh, [Replicate()])
        part = DTensor.from_local(torch.ones(2), mesh, [torch.distributed.tensor.Partial()])
        return layout_of(whole), layout_of(part), layout_of(torch.ones(1))

    wanted = ("the same over 2 ranks of tp", "to be added up over 2 ranks of tp", "whole on every rank")
    assert pair.run(words) == [wanted] * 2


def test_every_setting_of_a_section_says_where_it_comes_from(pair):
    def origins():
        os.environ["ACCEL_FULLY_SHARD_WRAP"] = "Block"
        try:
            accelerator, _ = prepared(1, cpu_offload=True)
        finally:
            del os.environ["ACCEL_FULLY_SHARD_WRAP"]
        found = accelerator.describe().options
        names = ("wrap", "cpu_offload", "ignore")
        return [found[f"fully_shard_{name}"].origin for name in names] + [found["parallel_dp_shard"].origin]

    assert pair.run(origins) == [["ACCEL_FULLY_SHARD_WRAP", "argument", "default", "argument"]] * 2


# What is not as it was asked for -----------------------------------------------------------


def _plain(model):
    model.layers[0].up.weight = nn.Parameter(torch.zeros(32, 8))


def _other_dtype(model):
    model.layers[0].up.bias = nn.Parameter(model.layers[0].up.bias.detach().bfloat16())


def _frozen(model):
    model.layers[1].up.bias.requires_grad_(requires_grad=False)


def _gone(model):
    model.layers[1].up.bias = None


def _new(model):
    model.extra = nn.Parameter(torch.zeros(1))


def _smaller(model):
    mesh = model.layers[0].up.bias.device_mesh
    model.layers[0].up.bias = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))


def _copied(model):
    mesh = model.layers[0].up.bias.device_mesh
    model.layers[0].up.bias = nn.Parameter(distribute_tensor(torch.zeros(32), mesh, [Replicate()]))


def _other_mesh(model):
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("elsewhere",))
    model.layers[0].up.bias = nn.Parameter(distribute_tensor(torch.zeros(32), mesh, [Shard(0)]))


def _divided(model):
    weight = model.layers[0].up.weight
    model.layers[0].norm.weight = nn.Parameter(
        distribute_tensor(torch.ones(8), weight.device_mesh, [Shard(0)])
    )


def _keeps(model):
    model.layers[2].forward = model.layers[2].forward.forward


def _not_gathered(model):
    model.layers[1] = Block()


def _gathered_too(model):
    fully_shard(model.layers[0].norm)


def _formats(model):
    state = model.layers[1]._get_fsdp_state()
    state._mp_policy = replace(state._mp_policy, reduce_dtype=torch.bfloat16)


BREAKS = {
    _plain: "layers.0.up.weight is whole, and was to be sharded",
    _other_dtype: "layers.0.up.bias is in bfloat16, not in float32",
    _frozen: "layers.1.up.bias does not learn",
    _gone: "layers.1.up.bias is gone",
    _new: "extra is new",
    _smaller: r"layers.0.up.bias has the shape \(3,\), not \(32,\)",
    _copied: "layers.0.up.bias is R on dp_shard",
    _other_mesh: "layers.0.up.bias is on .*, and was to be divided over dp_shard of 2",
    _divided: "layers.0.norm.weight is sharded, and was to stay whole",
    _keeps: "layers.2 keeps its activations",
    _not_gathered: "layers.1 is not gathered by itself",
    _gathered_too: "layers.0.norm is gathered by itself, and was not to be",
    _formats: "layers.1 has MixedPrecisionPolicy.*bfloat16.*, not MixedPrecisionPolicy",
}


@pytest.mark.parametrize("broken", BREAKS, ids=lambda function: function.__name__)
def test_a_model_that_is_not_what_was_asked_for_is_refused(broken, pair):
    def refused(broken):
        def first_break(model, wanted):
            broken(model)
            verifying.verify(model, wanted)

        dividing.verify = first_break
        try:
            prepared(1, activation_checkpointing=True, ignored_modules="layers.*.norm")
        except RuntimeError as error:
            return str(error)
        finally:
            dividing.verify = verifying.verify
        return "it was accepted"

    for told in pair.run(refused, broken):
        assert told.startswith("Model is not divided as it was asked for: ")
        assert re.search(BREAKS[broken], told), told


def test_an_offloaded_part_and_a_divided_layer_are_looked_for(pair):
    def refused():
        _, model = prepared(1)
        found = []
        for options in ({"offload": True}, {"layers": {"layers.0.up": frozenset({"weight"})}}):
            empty = verifying.Wanted({}, None, {})
            wanted = replace(
                empty,
                parameters=verifying.expected(model, set(), shards=True),
                policies={"": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
                **options,
            )
            try:
                verifying.verify(model, wanted)
            except RuntimeError as error:
                found.append(str(error))
        return found

    for offload, layer in pair.run(refused):
        assert "the model is not offloaded to host memory" in offload
        assert "layers.0.up.weight is not divided over tp" in layer


def test_what_is_wrong_in_many_places_is_told_of_in_a_few(pair):
    def refused():
        _, model = prepared(1)
        wanted = verifying.Wanted(verifying.expected(Model().double(), set(), shards=True), None, {})
        with pytest.raises(RuntimeError, match=r"not in float64; and \d+ more\. Has the script"):
            verifying.verify(model, wanted)

    pair.run(refused)
