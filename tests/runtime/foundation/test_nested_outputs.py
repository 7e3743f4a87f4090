"""Outputs of models in dataclasses and other objects: their dtype, their gradients, and their collectives."""

from __future__ import annotations

import logging
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from support.training.outputs import MAKERS, Frozen, Net, Own, Pair, Plain, Slots, Stateful
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, DistributedDataParallelKwargs, ParallelismConfig, TorchDynamoPlugin
from accel_runtime.foundation import nested
from accel_runtime.parallel import ddp
from accel_runtime.training import precision as forward


@pytest.fixture(autouse=True)
def _reported():
    ddp._reported_types.clear()
    forward._reported_types.clear()


@pytest.mark.parametrize("kind", MAKERS)
def test_half_precision_outputs_are_converted_to_float32_in_every_kind_of_object(kind):
    model = Accelerator(mixed_precision="bf16").prepare(Net(MAKERS[kind]))
    outputs = model(torch.randn(2, 4))
    assert type(outputs) is type(MAKERS[kind](torch.ones(1, 1)))
    assert outputs.y.dtype == torch.float32
    assert {leaf.dtype for leaf in nested.leaves(outputs) if isinstance(leaf, torch.Tensor)} == {
        torch.float32
    }


def test_everything_else_in_an_object_is_kept():
    tensor = torch.ones(1, dtype=torch.bfloat16)
    own, slots = Own(tensor), Slots(tensor)
    own.doubled = own.y * 2
    converted = forward._to_float32
    found = nested.map_leaves(converted, own)
    assert (found.function, found.doubled.dtype) == (torch.tanh, torch.float32)
    assert nested.map_leaves(converted, slots).private.dtype == torch.float32
    assert nested.map_leaves(converted, Frozen(tensor)).size == 4
    assert (own.y.dtype, slots.y.dtype) == (torch.bfloat16, torch.bfloat16), (
        "the object of the model does not change"
    )
    assert nested.map_leaves(converted, unchanged := Slots(torch.ones(1))) is unchanged
    assert nested.map_leaves(converted, deque([tensor], maxlen=2)).maxlen == 2
    normal = nested.map_leaves(converted, torch.distributions.Normal(tensor, tensor))
    assert normal.sample().dtype == normal.loc.dtype == torch.float32


def test_chains_and_cycles_of_objects_are_leaves():
    first, second = Plain(1), Plain(2)
    first.y, second.y = [second], {"first": first}
    (leaf,) = nested.leaves({"both": first})
    assert leaf is first
    chain = None
    for _ in range(100):
        chain = SimpleNamespace(first=chain, second=chain)
    (leaf,) = nested.leaves([chain])
    assert leaf is chain
    assert nested.map_leaves(forward._to_float32, chain) is chain


def test_outputs_of_transformers_are_converted_and_their_caches_are_kept():
    transformers = pytest.importorskip("transformers")
    tensor = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    cache = transformers.DynamicCache()
    cache.update(tensor, tensor, 0)
    outputs = transformers.modeling_outputs.CausalLMOutputWithPast(logits=tensor, past_key_values=cache)
    found = nested.map_leaves(forward._to_float32, outputs)
    assert type(found) is type(outputs)
    assert found.logits.dtype == torch.float32
    assert found.past_key_values is cache
    assert not forward._reported_types


def make_cycle(y):
    cycle = Own(y)
    cycle.itself = [cycle]
    return cycle


@pytest.mark.parametrize(
    "make", [Stateful, make_cycle, lambda y: (n for n in [y])], ids=["state", "cycle", "generator"]
)
def test_a_warning_names_objects_whose_tensors_stay_in_half_precision(make, caplog):
    class Model(nn.Linear):
        def forward(self, x):
            return {"out": make(super().forward(x)), "text": "t", "others": [Stateful(None), {1, 2}]}

    model = Accelerator(mixed_precision="bf16").prepare(Model(4, 4))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            outputs = model(torch.randn(2, 4))
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert f"contain an object of {type(outputs['out']).__name__}" in messages[0]
    assert "Return" in messages[0]


@pytest.mark.parametrize("make", [Plain, Frozen, Own, Pair])
def test_outputs_in_objects_are_compiled_into_one_graph(make):
    torch._dynamo.reset()
    accelerator = Accelerator(
        mixed_precision="bf16", dynamo_plugin=TorchDynamoPlugin("eager", fullgraph=True)
    )
    model = accelerator.prepare(Net(make))
    outputs = model(torch.randn(2, 4))
    assert (type(outputs), outputs.y.dtype) == (make, torch.float32)


def train(kind, sizes, mixed_precision, ddp_options):
    """Return the weights and a gradient after steps on different data, and the dtype of the outputs."""
    handlers = [DistributedDataParallelKwargs(**ddp_options)] if ddp_options else []
    config = {"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}
    accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=handlers, **config)
    model = Net(MAKERS[kind], unused=bool(ddp_options))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, 16).view(4, 4)
    local = x.chunk(accelerator.num_processes)[accelerator.process_index]
    for _ in range(2):
        outputs = model(local)
        accelerator.backward(outputs.y.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        evaluated = model(local)
    state = accelerator.get_state_dict(model, everywhere=True)
    types = type(outputs).__name__, str(outputs.y.dtype), str(evaluated.y.dtype)
    return {name: value.tolist() for name, value in state.items() if "unused" not in name}, types


LAYOUTS = {
    "find_unused_parameters": ({}, "no", {"find_unused_parameters": True}),
    "static_graph": ({}, "no", {"static_graph": True}),
    "dp_shard": ({"dp_shard_size": 2}, "no", {}),
    "dp_shard bf16": ({"dp_shard_size": 2}, "bf16", {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_outputs_in_objects_are_those_of_one_process(pair, layout):
    def train_all(options):
        return {kind: train(kind, *options) for kind in MAKERS}

    sizes, mixed_precision, options = LAYOUTS[layout]
    expected, _ = train("dataclass", {}, mixed_precision, {})
    tolerance = 1e-6 if mixed_precision == "no" else 2e-3
    for results in pair.run(train_all, (sizes, mixed_precision, options)):
        for kind, (state, types) in results.items():
            assert types[1:] == ("torch.float32", "torch.float32"), kind
            for name, value in expected.items():
                difference = (torch.tensor(state[name]) - torch.tensor(value)).abs().max()
                assert difference <= tolerance, (kind, name)


def fail_to_train(sizes, ddp_options):
    handlers = [DistributedDataParallelKwargs(**ddp_options)] if ddp_options else []
    config = {"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}
    accelerator = Accelerator(kwargs_handlers=handlers, **config)
    model = accelerator.prepare(Net(Stateful, unused=bool(ddp_options)))
    try:
        model(torch.ones(2, 4))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", ["find_unused_parameters", "dp_shard"])
def test_outputs_in_which_no_tensor_is_found_are_rejected_before_the_backward_pass(pair, layout):
    sizes, _, options = LAYOUTS[layout]
    for message in pair.run(fail_to_train, sizes, options):
        assert "are in an object of Stateful" in message
        assert "Return tensors in a dict" in message


def gather_objects():
    """Gather outputs in objects of an uneven data set, and objects with more than tensors."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(5.0), batch_size=2))
    results = [accelerator.gather_for_metrics(Pair(x, SimpleNamespace(twice=2 * x))) for x in loader]
    mixed = [
        accelerator.gather_for_metrics(SimpleNamespace(y=x, texts=[str(n) for n in x.tolist()]))
        for x in loader
    ]
    reduced = accelerator.reduce(Plain(torch.ones(1), []), "sum")
    try:
        accelerator.gather(Plain(torch.ones(1)))
    except TypeError as error:
        text = str(error)
    return (
        torch.cat([result.y for result in results]).tolist(),
        torch.cat([result.other.twice for result in results]).tolist(),
        torch.cat([result.y for result in mixed]).tolist(),
        [text for result in mixed for text in result.texts],
        (type(reduced).__name__, reduced.y.item()),
        text,
    )


def test_outputs_in_objects_are_gathered_without_padding(clusters):
    numbers = [0.0, 1.0, 2.0, 3.0, 4.0]
    for size in (1, 2):
        for found in clusters[size].run(gather_objects):
            assert found[0] == numbers
            assert found[1] == [2 * number for number in numbers]
            assert found[2] == numbers
            assert found[3] == [str(number) for number in numbers]
            assert found[4] == ("Plain", size)
            assert "data.names[0], str" in found[5]


def test_objects_in_containers_are_prepared_only_if_they_are_in_a_list_tuple_or_dict():
    model = nn.Linear(1, 1)
    bundle = SimpleNamespace(model=model)
    first, second = Accelerator(mixed_precision="bf16").prepare(bundle, {"model": nn.Linear(1, 1)})
    assert first is bundle
    assert "forward" not in vars(model)
    assert "forward" in vars(second["model"])


class Scaled(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.scale, self.make = nn.Parameter(torch.arange(4.0)), make

    def forward(self, _):
        return self.make(self.scale[1:])


def return_parameters():
    """Return a slice of a sharded parameter from an evaluation and in training, and the error for one that is not found."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))
    model = accelerator.prepare(Scaled(Own))
    with torch.no_grad():
        found = [model(torch.ones(1)).y.tolist()]
    loss = model(torch.ones(1)).y
    found.append(loss.tolist())
    accelerator.backward(loss.sum())
    found.append(model.scale.grad.full_tensor().tolist())
    try:
        accelerator.prepare(Scaled(Stateful))(torch.ones(1))
    except RuntimeError as error:
        return found, str(error)
    return found, ""


def test_a_sharded_parameter_in_the_outputs_is_copied_before_its_memory_is_freed(pair):
    for values, message in pair.run(return_parameters):
        assert values == [[1, 2, 3], [1, 2, 3], [0, 1, 1, 1]]
        assert "a parameter is in an object of Stateful" in message
