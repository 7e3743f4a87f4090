"""Compiled models, accumulation, clipping, metrics, out-of-memory retries, and resuming."""

from __future__ import annotations

import gc

import pytest
import torch
from support.cases.gpu_rehearsal import REHEARSAL
from support.training.models import ResidualBlock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, TorchDynamoPlugin, find_executable_batch_size

pytestmark = pytest.mark.gpu

COMPILE = "torch.compile"
COMPILER = "aot_eager" if REHEARSAL else "inductor"


def loop(accelerator, epochs=3):
    """Return the losses of a training whose epochs end with a batch of 2 instead of 8."""
    torch.manual_seed(5)
    net = ResidualBlock(64)
    data = TensorDataset(torch.randn(26, 64, generator=torch.Generator().manual_seed(6)))
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.01), DataLoader(data, batch_size=8)
    )
    losses = []
    for _ in range(epochs):
        for (batch,) in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model, net


@pytest.fixture
def graphs():
    """Return the number of compiled graphs, and the reasons of graph breaks."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield lambda: (counters["stats"]["unique_graphs"], dict(counters["graph_break"]))
    torch._dynamo.reset()


@pytest.mark.limit(150)
@pytest.mark.feature(COMPILE)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_dynamically_compiled_model_is_one_graph_and_keeps_its_class(device, graphs, precision):
    exact, _, _ = loop(Accelerator(mixed_precision=precision))
    plugin = TorchDynamoPlugin(backend=COMPILER, dynamic=True)
    losses, model, net = loop(Accelerator(mixed_precision=precision, dynamo_plugin=plugin))
    assert model is net
    assert type(model) is ResidualBlock
    assert list(model.state_dict()) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert graphs() == (1, {}), (
        "one graph is compiled, and the short batch at the end of an epoch needs no other"
    )
    bound = 1e-5 if precision == "no" else 2e-2
    worst = max(abs(a - b) / a for a, b in zip(exact, losses, strict=True))
    assert worst < bound, f"a loss is {worst:.1e} off; the bound is {bound:.0e}"


@pytest.mark.limit(150)
@pytest.mark.feature(COMPILE)
def test_a_short_batch_is_compiled_only_once_by_default(device, graphs):
    loop(Accelerator(dynamo_plugin=TorchDynamoPlugin(backend=COMPILER)), epochs=1)
    count, breaks = graphs()
    assert (count <= 2, breaks) == (True, {}), f"{count} graphs for two sizes of a batch"
    later_graphs, _ = graphs()
    assert later_graphs == count


@pytest.mark.feature("Gradient accumulation and clipping")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accumulated_gradients_equal_those_of_the_full_batch(device, precision):
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(8))
    grads = []
    for size, steps in ((16, 1), (4, 4)):
        torch.manual_seed(9)
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=steps)
        net = ResidualBlock(64)
        model, optimizer, loader = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(TensorDataset(data), batch_size=size)
        )
        before = net.up.weight.detach().clone()
        for number, (batch,) in enumerate(loader, 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                assert accelerator.sync_gradients == (number == steps)
                if accelerator.sync_gradients:
                    grads.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
                optimizer.step()
                assert torch.equal(net.up.weight, before) == (number < steps)
    error = ((grads[0] - grads[1]).norm() / grads[0].norm()).item()
    bound = 1e-5 if precision == "no" else 2e-2
    assert error < bound, f"accumulated gradients are {error:.1e} off; the bound is {bound:.0e}"


@pytest.mark.feature("Gradient accumulation and clipping")
def test_clipping_returns_the_norm_and_scales_gradients_to_the_limit(device):
    accelerator = Accelerator()
    net = ResidualBlock(64)
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(4, 64, device=device)).square().sum())
    expected = torch.cat([p.grad.flatten() for p in net.parameters()]).double().norm().item()
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.25))
    after = torch.cat([p.grad.flatten() for p in net.parameters()]).double().norm().item()
    assert norm == pytest.approx(expected, rel=1e-5)
    assert after == pytest.approx(0.25, rel=1e-4)
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    assert max(p.grad.abs().max().item() for p in net.parameters()) <= 1e-4


@pytest.mark.feature("gather_for_metrics")
def test_gather_for_metrics_returns_every_sample_once_on_the_device(device):
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(11)), batch_size=4))
    gathered = [accelerator.gather_for_metrics({"x": batch, "twice": batch * 2}) for (batch,) in loader]
    assert {part["x"].device for part in gathered} == {device}
    assert torch.cat([part["x"] for part in gathered]).tolist() == list(range(11))
    assert torch.cat([part["twice"] for part in gathered]).tolist() == list(range(0, 22, 2))


@pytest.mark.feature("find_executable_batch_size")
def test_a_smaller_batch_size_is_found_after_out_of_memory(cuda, capfd):
    gc.collect()
    cuda.empty_cache()
    free, total = cuda.mem_get_info()
    before, unit, tried = cuda.memory_allocated(), total // 10, []

    @find_executable_batch_size(starting_batch_size=14)
    def train(batch_size):
        tried.append((batch_size, cuda.memory_allocated()))
        parts = [torch.empty(unit, dtype=torch.uint8, device="cuda") for _ in range(batch_size)]
        return batch_size, parts[-1].numel()

    found_size, _ = train()
    assert [size for size, _ in tried] == [14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1][: len(tried)]
    assert found_size <= free // unit, (
        f"{found_size} tenths of the memory fit, though {free / total:.0%} was free"
    )
    assert found_size > free // unit - 2, f"{found_size} tenths fit, and {free / total:.0%} was free"
    assert {allocated for _, allocated in tried} == {before}, (
        "what a failed size had allocated is free at the next"
    )
    assert capfd.readouterr().err.count("out of memory") == len(tried) - 1


def run(folder, stop=None, resume=None):
    """Train an epoch of 8 steps, saving after `stop`; return the losses and the final parameters."""
    torch.manual_seed(11 if resume is None else 99)
    accelerator = Accelerator(mixed_precision="bf16")
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 2))
    data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(12)))
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.01), DataLoader(data, batch_size=4, shuffle=True)
    )
    if resume:
        accelerator.resume(resume)
    losses = []
    for number, (batch,) in enumerate(loader, 1):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number == stop:
            accelerator.save_state(folder)
    return losses, [p.detach().clone() for p in net.parameters()]


@pytest.mark.feature("Resuming bit for bit")
def test_a_resumed_run_continues_bit_for_bit_with_gpu_random_numbers(device, tmp_path):
    losses, expected = run(tmp_path / "a", stop=3)
    assert len(losses) == 8
    remaining, actual = run(tmp_path / "b", resume=tmp_path / "a")
    assert remaining == losses[3:]
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
