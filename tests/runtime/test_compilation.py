"""`torch.compile` of prepared models, on one process and on two."""

from __future__ import annotations

import copy
import shutil
import warnings
from types import MethodType

import pytest
import torch
from support.training.models import ResidualNet
from torch import nn

from accel_runtime import Accelerator, DynamoBackend, TorchDynamoPlugin, utils
from accel_runtime.foundation.module_names import uncompiled_module

X = torch.linspace(-1, 1, 48).view(6, 8)


def build_model():
    torch.manual_seed(0)
    return ResidualNet(8, inputs=8, depth=3)


def train_compiled(**options):
    """Train a compiled model for two steps, and return its state and the compiled modules."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch during compilation
        accelerator = Accelerator(**options)
        model = build_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        local_batch = X.chunk(accelerator.num_processes)[accelerator.process_index]
        for _ in range(2):
            accelerator.backward(model(local_batch).square().mean(), weight=len(local_batch))
            optimizer.step()
            optimizer.zero_grad()
    original = accelerator.unwrap_model(model)
    compiled = [name for name, part in original.named_modules() if part._compiled_call_impl is not None]
    return {name: value.clone() for name, value in original.state_dict().items()}, compiled


@pytest.fixture(scope="module")
def expected():
    model = build_model()
    for _ in range(2):
        model(X).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        model.zero_grad()
    return model.state_dict()


def check_results(results, expected, compiled):
    for state, parts in results:
        assert parts == compiled
        assert list(state) == list(expected)
        assert all(torch.allclose(state[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "backend"),
    [
        (1, "eager"),
        (2, DynamoBackend.AOT_EAGER),
        pytest.param(1, DynamoBackend.AOT_EAGER, marks=pytest.mark.full),
        pytest.param(2, "eager", marks=pytest.mark.full),
    ],
)
def test_a_compiled_model_trains_as_an_eager_one_and_keeps_its_parameter_names(
    clusters, size, backend, expected
):
    check_results(clusters[size].run(lambda b: train_compiled(dynamo_backend=b), backend), expected, [""])


@pytest.mark.full
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_a_model_compiled_with_inductor_trains_as_an_eager_one(clusters, size, expected):
    check_results(clusters[size].run(lambda: train_compiled(dynamo_backend="INDUCTOR")), expected, [""])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_regional_compilation_compiles_repeated_blocks_and_the_layers_around_them(clusters, size, expected):
    def train_with_regions():
        return train_compiled(dynamo_plugin=TorchDynamoPlugin("aot_eager", use_regional_compilation=True))

    parts = ["first", "blocks.0", "blocks.1", "blocks.2", "head"]
    check_results(clusters[size].run(train_with_regions), expected, parts)


def test_a_mixed_precision_model_is_compiled_into_one_graph():
    torch._dynamo.reset()
    plugin = TorchDynamoPlugin("eager", fullgraph=True)
    accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=plugin)
    model = accelerator.prepare(build_model())
    assert model(X).dtype == torch.float32
    assert torch.allclose(model(X), build_model()(X), atol=0.05)


def test_a_model_of_a_torch_class_is_compiled():
    torch._dynamo.reset()
    records = []

    def remember(graph, _):
        records.append(graph)
        return graph.forward

    torch._dynamo.register_backend(remember, "remember")
    plugin = TorchDynamoPlugin("remember", fullgraph=True)
    for model in (nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))):
        expected = model(X)
        assert torch.equal(Accelerator(dynamo_plugin=plugin).prepare(model)(X), expected)
    assert len(records) == 2


def test_each_model_has_its_own_limit_of_recompilations():
    torch._dynamo.reset()
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin("eager", fullgraph=True))
    for width in range(1, 2 + torch._dynamo.config.recompile_limit):
        model = accelerator.prepare(nn.Linear(8, width, dtype=torch.float64))
        assert model(X.double()).shape[-1] == width


def test_equal_blocks_are_compiled_once():
    torch._dynamo.reset()
    records = []

    def remember(graph, _):
        records.append(graph)
        return graph.forward

    torch._dynamo.register_backend(remember, "count")
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
    model = nn.Sequential()
    model.blocks = blocks
    model.forward = lambda x: blocks[3](blocks[2](blocks[1](blocks[0](x))))
    model = Accelerator(dynamo_plugin=TorchDynamoPlugin("count", use_regional_compilation=True)).prepare(
        model
    )
    with torch.no_grad():
        model(X)
    assert len(records) == 1


def test_a_compiled_model_runs_hooks_and_modes_and_can_be_copied():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0))
    records = []
    model.register_forward_hook(lambda *_call: records.append(1))
    model = Accelerator(dynamo_backend="eager").prepare(model)
    assert model(X).abs().sum() == 0
    model.eval()
    assert model(X).abs().sum() > 0
    assert len(records) == 2
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin[0].weight)
    nn.init.zeros_(twin[0].bias)
    assert twin(X).abs().sum() == 0
    assert model(X).abs().sum() > 0


@pytest.mark.parametrize("backend", [None, "no", "NO", DynamoBackend.NO])
def test_a_model_is_not_compiled_without_a_backend(backend):
    assert Accelerator(dynamo_backend=backend).prepare(build_model())._compiled_call_impl is None


def test_all_compilation_options_are_passed_to_torch():
    plugin = TorchDynamoPlugin(
        DynamoBackend.INDUCTOR, mode="reduce-overhead", fullgraph=True, dynamic=False, disable=True
    )
    expected = {"backend": "inductor", "mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    assert plugin.to_kwargs() == expected | {"options": None, "disable": True}
    model = Accelerator(dynamo_plugin=plugin).prepare(build_model())
    assert torch.equal(model(X), build_model()(X))


def test_unwrap_model_can_remove_the_compilation():
    accelerator = Accelerator(dynamo_backend="eager")
    model = accelerator.prepare(build_model())
    assert accelerator.unwrap_model(model)._compiled_call_impl is not None
    assert accelerator.unwrap_model(model, keep_torch_compile=False)._compiled_call_impl is None


def test_a_model_compiled_by_the_script_is_not_compiled_again_and_can_be_unwrapped():
    compiled_model = torch.compile(model := build_model(), backend="eager")
    accelerator = Accelerator(dynamo_backend="eager")
    prepared = accelerator.prepare(compiled_model)
    assert prepared is compiled_model
    assert model._compiled_call_impl is None
    assert accelerator.unwrap_model(prepared) is compiled_model
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert uncompiled_module(compiled_model) is model
    assert uncompiled_module(model) is model


class Blocks(nn.Module):
    """Model with repeated blocks, and a name without a module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))})
        self.head = nn.Linear(8, 2)
        self.none = None
        self.register_module("missing", None)

    def forward(self, x):
        for block in self.inner["h"]:
            x = block(x)
        return self.head(x)


def test_compile_regions_returns_a_copy_with_compiled_blocks_and_the_same_parameters_and_names():
    model = Blocks()
    graphs = []

    def count(graph, _):
        graphs.append(1)
        return graph.forward

    compiled = utils.compile_regions(model, backend=count)
    assert type(compiled) is Blocks
    assert utils.has_compiled_regions(compiled)
    assert not utils.has_compiled_regions(model)
    assert all(utils.is_compiled_module(block) for block in (*compiled.inner["h"], compiled.head))
    assert not utils.is_compiled_module(compiled)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    x = torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch during compilation
        assert torch.allclose(compiled(x), model(x))
        assert graphs
        prepared = Accelerator(dynamo_backend="eager").prepare(compiled)
        assert torch.allclose(prepared(x), model(x))


@pytest.mark.filterwarnings("ignore")  # warnings of torch during compilation
@pytest.mark.parametrize(
    "patch", [lambda model: setattr(model, "forward", MethodType(Blocks.forward, model)), nn.Module.compile]
)
def test_compile_regions_compiles_blocks_of_a_patched_or_compiled_model(patch):
    graphs, model = [], Blocks()
    patch(model)

    def count(graph, _):
        graphs.append(1)
        return graph.forward

    compiled = utils.compile_regions(model, backend=count)
    compiled(torch.randn(2, 8))
    assert graphs
    assert not utils.is_compiled_module(compiled)


def test_compile_regions_compiles_a_model_without_blocks_as_a_whole():
    model = nn.Sequential(nn.Linear(8, 2), nn.Tanh())
    compiled = utils.compile_regions(model, backend="eager")
    assert utils.is_compiled_module(compiled)
    assert not utils.is_compiled_module(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch during compilation
        assert torch.equal(compiled(X), model(X))


@pytest.mark.parametrize("backend", ["fastest", DynamoBackend.FX2TRT])
def test_an_unknown_dynamo_backend_is_rejected(backend):
    name = backend.lower() if backend == "fastest" else "fx2trt"
    with pytest.raises(ValueError, match=f"Unknown dynamo backend '{name}': .*inductor"):
        Accelerator(dynamo_backend=backend)


def test_mutually_exclusive_compilation_options_are_rejected():
    with pytest.raises(ValueError, match="either mode or options"):
        TorchDynamoPlugin("inductor", mode="default", options={"max_autotune": True})
    with pytest.raises(ValueError, match="Pass either dynamo_backend or dynamo_plugin, not both"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin("eager"))


class Counted(nn.Module):
    """A block that counts its calls that are not compiled."""

    def __init__(self):
        super().__init__()
        self.layer, self.plain_calls = nn.Linear(8, 8), 0

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.plain_calls += 1
        return torch.tanh(self.layer(x))


def call_with_replaced_forward(accelerator):
    """Return the number of calls of blocks that are not compiled, in a model whose forward is a function."""
    torch._dynamo.reset()
    model = nn.Sequential()
    model.blocks = blocks = nn.ModuleList(Counted() for _ in range(3))
    model.forward = lambda x: blocks[2](blocks[1](blocks[0](x)))
    with torch.no_grad():
        assert accelerator.prepare(model)(X).dtype == torch.float32
    return sum(block.plain_calls for block in blocks)


def test_compiled_regions_run_under_mixed_precision_also_with_a_replaced_forward():
    graphs = []

    def remember(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.register_backend(remember, "remember_regions")
    plugin = TorchDynamoPlugin("remember_regions", use_regional_compilation=True)
    for mixed_precision in ("no", "bf16"):
        graphs.clear()
        accelerator = Accelerator(mixed_precision=mixed_precision, dynamo_plugin=plugin)
        assert call_with_replaced_forward(accelerator) == 0
        assert graphs
