"""Checkpoints of state on a GPU: saving during computation, loading, and the memory they use."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.backends import set_current_backend

pytestmark = pytest.mark.gpu

SAVE, ASYNC = "Checkpoints", "Checkpoints in the background"


def prepared(cpu=False, width=64, layers=3):
    """Return a model whose AdamW has stepped once."""
    set_current_backend(None)
    accelerator = Accelerator(cpu=cpu)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    step(accelerator, model, optimizer, width)
    return accelerator, model, optimizer


def step(accelerator, model, optimizer, width=64):
    accelerator.backward(model(torch.ones(2, width, device=accelerator.device)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def values(model, optimizer):
    """Copy all trained values to the CPU."""
    tensors = {name: p.detach().cpu().clone() for name, p in model.state_dict().items()}
    for number, parameter_state in enumerate(optimizer.state.values()):
        tensors |= {
            f"{number} {key}": torch.as_tensor(value).cpu().clone() for key, value in parameter_state.items()
        }
    return tensors


def differing(expected, actual):
    return [name for name in expected if not torch.equal(expected[name], actual[name])]


@pytest.mark.feature(SAVE)
@pytest.mark.parametrize(("saver", "loader"), [("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")])
def test_state_is_loaded_bit_for_bit_on_any_device(device, tmp_path, saver, loader):
    torch.manual_seed(16)
    accelerator, model, optimizer = prepared(cpu=saver == "cpu")
    expected = values(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    torch.manual_seed(17)
    accelerator, model, optimizer = prepared(cpu=loader == "cpu")
    assert differing(expected, values(model, optimizer))
    accelerator.load_state(tmp_path / "saved")
    assert differing(expected, values(model, optimizer)) == []
    state_device = torch.device("cpu") if loader == "cpu" else device
    assert {p.device for p in model.parameters()} == {state_device}
    assert {parameter_state["exp_avg"].device for parameter_state in optimizer.state.values()} == {
        state_device
    }
    step(accelerator, model, optimizer)


@pytest.mark.feature("Random numbers of the GPU")
def test_the_gpu_generator_continues_bit_for_bit_after_loading(device, tmp_path):
    accelerator, *_ = prepared()
    torch.rand(5, device=device)
    accelerator.save_state(tmp_path / "saved")
    expected = torch.rand(1000, device=device), torch.rand(3), random.random()
    accelerator.load_state(tmp_path / "saved")
    actual = torch.rand(1000, device=device), torch.rand(3), random.random()
    assert torch.equal(expected[0], actual[0]), "the numbers of the device differ"
    assert torch.equal(expected[1], actual[1]), "torch's numbers on the CPU differ"
    assert expected[2] == actual[2]


@pytest.mark.feature(ASYNC)
def test_an_asynchronous_save_contains_only_earlier_computations(device, busy, tmp_path):
    accelerator, model, optimizer = prepared()
    weight = model[0].weight
    with torch.no_grad():
        busy(0.3)
        weight.fill_(1.0)  # not computed yet when the save begins
        accelerator.save_state(tmp_path / "saved", async_save=True)
        weight.fill_(2.0)
    for _ in range(5):
        step(accelerator, model, optimizer)
    accelerator.wait_for_checkpoint()
    accelerator.load_state(tmp_path / "saved")
    assert torch.equal(weight, torch.ones_like(weight)), (
        f"from {weight.min().item()} to {weight.max().item()}"
    )


@pytest.mark.feature(ASYNC)
def test_several_asynchronous_saves_run_while_the_model_trains(device, tmp_path):
    accelerator, model, optimizer = prepared()
    expected = []
    for number in range(4):
        step(accelerator, model, optimizer)
        expected.append(values(model, optimizer))
        accelerator.save_state(tmp_path / str(number), async_save=True)
    step(accelerator, model, optimizer)
    accelerator.wait_for_checkpoint()
    for number in range(4):
        accelerator.load_state(tmp_path / str(number))
        assert differing(expected[number], values(model, optimizer)) == [], f"save {number} has other values"


@pytest.mark.feature(ASYNC)
def test_staging_memory_is_pinned_and_no_larger_than_the_state(cuda, tmp_path):
    accelerator, model, optimizer = prepared(width=3000)
    accelerator.save_state(tmp_path / "saved", async_save=True)
    accelerator.wait_for_checkpoint()
    state = sum(value.nbytes for value in values(model, optimizer).values())
    staging = accelerator._checkpoints._staging
    assert staging._memory.is_pinned()
    assert state <= staging.bytes < state * 1.05 + (1 << 20), f"{staging.bytes} bytes for a state of {state}"


@pytest.mark.feature("Memory of loading a checkpoint")
def test_loading_uses_gpu_memory_for_at_most_one_additional_tensor(cuda, tmp_path):
    accelerator, _, _ = prepared(width=2048, layers=8)
    accelerator.save_state(tmp_path / "saved")
    largest = 2048 * 2048 * 4
    cuda.synchronize()
    before = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    accelerator.load_state(tmp_path / "saved")
    extra = cuda.max_memory_allocated() - before
    assert extra <= 1.1 * largest, (
        f"{extra >> 20} MiB beyond the {before >> 20} in use; the largest tensor has 16"
    )
    assert cuda.memory_allocated() - before < 1 << 20
