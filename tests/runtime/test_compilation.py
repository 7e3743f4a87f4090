"""`torch.compile` in place, on one process and on two."""

from __future__ import annotations

import copy
import shutil
import warnings

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator, DynamoBackend, TorchDynamoPlugin
from accel_runtime.training.forward import uncompiled_module

X = torch.linspace(-1, 1, 48).view(6, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def trained(**options):
    """What a step of a compiled model comes to, and what was compiled."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it compiles
        accelerator = Accelerator(**options)
        model = Stack()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        share = X.chunk(accelerator.num_processes)[accelerator.process_index]
        for _ in range(2):
            accelerator.backward(model(share).square().mean(), weight=len(share))
            optimizer.step()
            optimizer.zero_grad()
    original = accelerator.unwrap_model(model)
    compiled = [name for name, part in original.named_modules() if part._compiled_call_impl is not None]
    return {name: value.clone() for name, value in original.state_dict().items()}, compiled


@pytest.fixture(scope="module")
def wanted():
    model = Stack()
    for _ in range(2):
        model(X).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        model.zero_grad()
    return model.state_dict()


def check(results, wanted, compiled):
    for state, parts in results:
        assert parts == compiled
        assert list(state) == list(wanted)
        assert all(torch.allclose(state[name], wanted[name], atol=1e-6) for name in wanted)


@pytest.mark.parametrize(
    ("size", "backend"),
    [
        (1, "eager"),
        (2, DynamoBackend.AOT_EAGER),
        pytest.param(1, DynamoBackend.AOT_EAGER, marks=pytest.mark.full),
        pytest.param(2, "eager", marks=pytest.mark.full),
    ],
)
def test_a_compiled_model_trains_the_same_under_the_names_of_the_script(clusters, size, backend, wanted):
    check(clusters[size].run(lambda b: trained(dynamo_backend=b), backend), wanted, [""])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor_trains_the_same(clusters, size, wanted):
    check(clusters[size].run(lambda: trained(dynamo_backend="INDUCTOR")), wanted, [""])


@pytest.mark.parametrize("size", [1, 2])
def test_regions_are_the_repeated_blocks_and_what_lies_around_them(clusters, size, wanted):
    def regional():
        return trained(dynamo_plugin=TorchDynamoPlugin("aot_eager", use_regional_compilation=True))

    parts = ["first", "blocks.0", "blocks.1", "blocks.2", "last"]
    check(clusters[size].run(regional), wanted, parts)


def test_mixed_precision_is_compiled_too_and_in_one_graph():
    torch._dynamo.reset()
    plugin = TorchDynamoPlugin("eager", fullgraph=True)
    accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=plugin)
    model = accelerator.prepare(Stack())
    assert model(X).dtype == torch.float32
    assert torch.allclose(model(X), Stack()(X), atol=0.05)


def test_a_model_of_torchs_own_class_is_compiled_too():
    torch._dynamo.reset()
    seen = []

    def remember(graph, _):
        seen.append(graph)
        return graph.forward

    torch._dynamo.register_backend(remember, "remember")
    plugin = TorchDynamoPlugin("remember", fullgraph=True)
    for model in (nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))):
        wanted = model(X)
        assert torch.equal(Accelerator(dynamo_plugin=plugin).prepare(model)(X), wanted)
    assert len(seen) == 2


def test_hooks_and_modes_of_a_compiled_model_still_count_and_a_copy_is_on_its_own():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0))
    seen = []
    model.register_forward_hook(lambda *_call: seen.append(1))
    model = Accelerator(dynamo_backend="eager").prepare(model)
    assert model(X).abs().sum() == 0
    model.eval()
    assert model(X).abs().sum() > 0
    assert len(seen) == 2
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin[0].weight)
    nn.init.zeros_(twin[0].bias)
    assert twin(X).abs().sum() == 0
    assert model(X).abs().sum() > 0


@pytest.mark.parametrize("backend", [None, "no", "NO", DynamoBackend.NO])
def test_without_a_backend_nothing_is_compiled(backend):
    assert Accelerator(dynamo_backend=backend).prepare(Stack())._compiled_call_impl is None


def test_all_options_reach_torch():
    plugin = TorchDynamoPlugin(
        DynamoBackend.INDUCTOR, mode="reduce-overhead", fullgraph=True, dynamic=False, disable=True
    )
    wanted = {"backend": "inductor", "mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    assert plugin.to_kwargs() == wanted | {"options": None, "disable": True}
    model = Accelerator(dynamo_plugin=plugin).prepare(Stack())
    assert torch.equal(model(X), Stack()(X))


def test_unwrapping_can_take_the_compilation_off_again():
    accelerator = Accelerator(dynamo_backend="eager")
    model = accelerator.prepare(Stack())
    assert accelerator.unwrap_model(model)._compiled_call_impl is not None
    assert accelerator.unwrap_model(model, keep_torch_compile=False)._compiled_call_impl is None


def test_a_model_that_the_script_compiled_is_not_compiled_again_and_comes_back_plain():
    own = torch.compile(model := Stack(), backend="eager")
    accelerator = Accelerator(dynamo_backend="eager")
    prepared = accelerator.prepare(own)
    assert prepared is own
    assert model._compiled_call_impl is None
    assert accelerator.unwrap_model(prepared) is own
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert uncompiled_module(own) is model
    assert uncompiled_module(model) is model


@pytest.mark.parametrize("backend", ["fastest", DynamoBackend.FX2TRT])
def test_a_backend_that_torch_does_not_know_is_refused_by_name(backend):
    name = backend.lower() if backend == "fastest" else "fx2trt"
    with pytest.raises(ValueError, match=f"Unknown dynamo backend '{name}': .*inductor"):
        Accelerator(dynamo_backend=backend)


def test_options_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="either mode or options"):
        TorchDynamoPlugin("inductor", mode="default", options={"max_autotune": True})
    with pytest.raises(ValueError, match="Pass either dynamo_backend or dynamo_plugin, not both"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin("eager"))
