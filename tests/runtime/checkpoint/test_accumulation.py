"""The state of an accumulation cycle in a checkpoint: gradients, weights, and their merging for another world size.

`test_training_equality.py` interrupts trainings within cycles.
"""

from __future__ import annotations

from dataclasses import replace

import cloudpickle
import pytest
import torch
from support.runs import training_oracle
from support.runs.training_oracle import Training, TrainingRun
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.checkpoint import training_state
from accel_runtime.checkpoint.training_state import AccumulationState
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.training.accumulation import CycleState

cloudpickle.register_pickle_by_value(training_oracle)

STEPS = 3  # micro-batches per accumulation cycle


def train(stop, **fields):
    """Train until micro-batch `stop`; return the parts of the run that hold the cycle."""
    run = TrainingRun(Training(samples=48, steps=STEPS, model="partly used", **fields))
    for number, batch in zip(range(stop), run.loader, strict=False):
        run.train_micro_batch(batch, number)
    return run.accelerator._run.accumulation, run.accelerator._run.gradients


def capture(stop, items="none"):
    """Return the state of the cycle after micro-batch `stop`."""
    return training_state.capture_accumulation(*train(stop, items=items))


def test_ranks_hold_different_gradients_within_a_cycle_and_none_at_its_end(pair):
    inside = pair.run(capture, 1)
    assert not torch.equal(*[state.gradients["model.head.weight"] for state in inside])
    assert all(state.cycle.micro_batches == 1 for state in inside)
    assert all(
        state.gradients == state.weights == {} and state.used == () for state in pair.run(capture, STEPS)
    )


def test_merging_preserves_the_sum_of_pending_loss_weights_on_any_world_size(clusters):
    states = clusters[3].run(capture, 2, "unequal")
    expected = sum(float(group.pending) for state in states for group in state.weights.values())
    for world in (1, 2, 4):
        shared = training_state.merge_accumulation(states, world).weights
        assert world * sum(float(group.pending) for group in shared.values()) == pytest.approx(expected)


def test_gradients_of_unprepared_parameters_are_rejected_without_changes():
    state = capture(1)
    cycle = train(2)
    before = training_state.capture_accumulation(*cycle)
    with pytest.raises(CheckpointError, match=r"a gradient of model_1\.weight, which is not among"):
        training_state.restore_accumulation(
            replace(state, gradients={"model_1.weight": torch.zeros(1)}), *cycle
        )
    with pytest.raises(CheckpointError, match=r"model\.head\.bias has shape \[4\], the parameter \[3\]"):
        training_state.restore_accumulation(
            replace(state, gradients={"model.head.bias": torch.zeros(4)}), *cycle
        )
    after = training_state.capture_accumulation(*cycle)
    assert after.cycle == before.cycle
    assert all(torch.equal(after.gradients[name], gradient) for name, gradient in before.gradients.items())


def test_merging_counts_a_missing_gradient_of_a_rank_as_zeros():
    def state(gradients):
        return AccumulationState(CycleState(1, 1, False, False, False), gradients=gradients)

    actual = training_state.merge_accumulation(
        [state({"a": torch.tensor([3.0])}), state({}), state({"b": torch.tensor([6.0])})], 2
    )
    assert actual.gradients == {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}


class TwoModels:
    """Two models with one optimizer each: one steps before the save, the other after it."""

    def __init__(self, weight):
        self.weight = weight
        self.accelerator = Accelerator(gradient_accumulation_steps=2)
        torch.manual_seed(1)
        models = [nn.Linear(3, 1), nn.Linear(3, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        self.models = self.accelerator.prepare(*models)
        self.optimizers = self.accelerator.prepare(*optimizers)

    def train_micro_batch(self, number, generator):
        model, optimizer = self.models[number], self.optimizers[number]
        with self.accelerator.accumulate(model):
            self.accelerator.backward(model(torch.randn(2, 3, generator=generator)).sum(), weight=self.weight)
            optimizer.step()
            optimizer.zero_grad()

    def finish(self, generator):
        """Let the first model complete the cycle, and then step without another backward pass."""
        self.train_micro_batch(1, generator)
        self.train_micro_batch(0, generator)
        self.optimizers[1].step()
        return torch.cat([p.detach().flatten() for model in self.models for p in model.parameters()])


@pytest.mark.parametrize("weight", [None, 2])
def test_gradients_pending_after_a_step_of_another_optimizer_are_saved(tmp_path, weight):
    """Accumulation cycles are common to all models: the second one ends a cycle while the first holds gradients."""
    run = TwoModels(weight)
    generator = torch.Generator().manual_seed(2)
    run.train_micro_batch(0, generator)
    run.train_micro_batch(1, generator)
    run.accelerator.save_state(tmp_path / "c")
    pending = [p.grad.clone() for p in run.models[0].parameters()]
    state = generator.get_state()
    expected = run.finish(generator)
    resumed = TwoModels(weight)
    for attempt in range(2):
        resumed.accelerator.load_state(tmp_path / "c")
        assert all(
            torch.equal(p.grad, grad) for p, grad in zip(resumed.models[0].parameters(), pending, strict=True)
        )
        assert all(p.grad is None for p in resumed.models[1].parameters())
        if not attempt:
            resumed.accelerator.save_state(tmp_path / "c")
    assert torch.equal(resumed.finish(generator.set_state(state)), expected)
