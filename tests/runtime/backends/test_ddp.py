"""How DDP sends gradients, over real processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator, DistributedDataParallelKwargs

HALF = {"fp16": 2**-10, "bf16": 2**-7}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def data(rank):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))


def sent(options, weighted=False):
    """The gradient after the fourth backward pass on the same data; PowerSGD compresses from the third."""
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    model = accelerator.prepare(network())
    x = data(accelerator.process_index)
    for _ in range(4):
        model.zero_grad()
        accelerator.backward(model(x).square().mean(), **({"weight": 8} if weighted else {}))
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def wanted(size):
    model = network()
    model(torch.cat([data(rank) for rank in range(size)])).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error(got, size):
    return float((got - wanted(size)).norm() / wanted(size).norm())


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_gradients_sent_in_half_precision_are_right_within_its_rounding(several, kind, weighted):
    results = several.run(sent, {"comm_hook": kind}, weighted)
    assert all(torch.equal(got, results[0]) for got in results)
    assert 1e-7 < error(results[0], several.size) < HALF[kind]


@pytest.mark.parametrize("wrapper", ["no", "fp16", "bf16"])
def test_power_sgd_compresses_and_all_ranks_get_the_same(pair, wrapper):
    state = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
    results = pair.run(sent, {"comm_hook": "power_sgd", "comm_wrapper": wrapper, "comm_state_option": state})
    assert torch.equal(*results)
    assert 1e-4 < error(results[0], 2) < 0.9


def test_a_power_sgd_of_full_rank_loses_next_to_nothing(pair):
    state = {"matrix_approximation_rank": 32, "start_powerSGD_iter": 2, "min_compression_rate": 0.01}
    results = pair.run(sent, {"comm_hook": "power_sgd", "comm_state_option": state})
    assert error(results[0], 2) < 1e-4


@pytest.mark.parametrize("wrapper", ["no", "fp16"])
def test_a_wrapped_half_precision_hook_is_right_within_rounding(pair, wrapper):
    results = pair.run(sent, {"comm_hook": "fp16", "comm_wrapper": wrapper})
    assert 1e-7 < error(results[0], 2) < 2 * HALF["fp16"]


def test_without_a_hook_gradients_travel_as_they_are(several):
    assert all(error(got, several.size) < 1e-6 for got in several.run(sent, {"comm_hook": "no"}))


def test_what_torch_cannot_do_is_refused_and_torch_still_cannot(pair):
    """When this fails, torch has mended its hook, and ours can be offered."""
    with pytest.raises(ValueError, match="batched_powerSGD_hook fails"):
        DistributedDataParallelKwargs(comm_hook="batched_power_sgd")

    def torchs_own():
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        model = nn.parallel.DistributedDataParallel(network())
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
        for _ in range(2):
            model(data(0)).sum().backward()
        with pytest.raises(AssertionError):
            model(data(0)).sum().backward()

    pair.run(torchs_own)
