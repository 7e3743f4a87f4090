"""Replicas whose weights differ are reported, at a save and during training, without a wait."""

from __future__ import annotations

import pytest
import torch
from support.cases.log_messages import collect_messages
from torch import nn

from accel_runtime import Accelerator, LocalSGD
from accel_runtime.checks import replicas


def train(change, *, passes=70, folder=None):
    """Train on different data on each rank; return the messages and the weights."""
    torch.manual_seed(0)
    with collect_messages("accel_runtime.checks.replicas") as messages:
        accelerator = Accelerator()
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        if change == "step in a hook":
            optimizers = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        draws = torch.Generator().manual_seed(accelerator.process_index)
        for number in range(passes):
            accelerator.backward(model(torch.randn(4, 2, generator=draws)).square().mean())
            if change == "weights of one rank" and number == 4 and not accelerator.is_main_process:
                with torch.no_grad():
                    model[2].bias.add_(1e-7)
            if change != "step in a hook":
                optimizer.step()
            optimizer.zero_grad()
        accelerator.wait_for_everyone()
        if folder is not None:
            accelerator.save_state(folder)
    return messages, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("change", ["step in a hook", "weights of one rank"])
def test_weights_that_differ_are_reported_once_during_training(pair, change):
    (messages, first), (others, second) = pair.run(train, change)
    assert not torch.equal(first, second)
    assert others == []
    (message,) = messages
    assert message.startswith(
        f"The weights of the processes differ after backward pass {1 if 'hook' in change else 8}: "
    )
    assert ("2.bias (rank 0 has others than rank 1)" in message) == (change == "weights of one rank") or (
        "and 3 more (rank 0" in message
    )


def test_weights_that_differ_are_reported_at_a_save(pair, tmp_path):
    (messages, _), _ = pair.run(
        lambda: train("weights of one rank", passes=6, folder=str(tmp_path / "saved"))
    )
    (message,) = messages
    assert "differ after backward pass 6: " in message


def test_equal_replicas_are_not_reported(several, tmp_path):
    results = several.run(lambda: train("nothing", folder=str(tmp_path / "saved")))
    assert all(messages == [] for messages, _ in results)


def test_weights_that_local_sgd_lets_differ_are_not_reported(pair):
    def locally():
        with collect_messages("accel_runtime.checks.replicas") as messages:
            accelerator = Accelerator()
            model = nn.Linear(2, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            with LocalSGD(accelerator, model, local_sgd_steps=7) as local:
                for number in range(70):
                    accelerator.backward(model(torch.ones(1, 2) * (number + accelerator.process_index)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    local.step()
        return messages

    assert pair.run(locally) == [[], []]


def test_checks_are_rare_in_a_long_run():
    numbers, number = [], 1
    while number < 5000:
        numbers.append(number)
        number = min(number * replicas._GROWTH, number + replicas.CHECK_INTERVAL)
    assert numbers[:5] == [1, 8, 64, 512, 1012]
    assert len(numbers) == 12
