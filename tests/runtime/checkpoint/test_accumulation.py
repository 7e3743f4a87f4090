"""Checkpoints that are saved within an accumulation cycle: the next step equals that of the uninterrupted run."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support.models import PartlyUsedNet
from support.pairs import pairwise_params
from torch import nn

from accel_runtime import (
    Accelerator,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from accel_runtime.checkpoint import training_state
from accel_runtime.checkpoint.training_state import AccumulationState
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.training.accumulation import CycleState

STEPS = 3  # micro-batches per accumulation cycle
ROWS = 6  # samples of a global micro-batch; divisible by 1, 2 and 3 ranks
TOLERANCE = 1e-6  # relative error


KINDS = {
    "plain": {},
    "weighted": {"weighted": True},
    "sparse": {"sparse": True},
    "buckets": {"bucket_view": True},
    "scaled": {"fp16": True},
    "weighted and synchronised every time": {"weighted": True, "each": True},
    "zeros in place of None": {"to_none": False},
}


class Run:
    """The training objects of one rank."""

    def __init__(self, options):
        def option(name):
            return options.get(name, False)

        self.weighted, self.to_none = option("weighted"), options.get("to_none", True)
        ddp = DistributedDataParallelKwargs(
            find_unused_parameters=True, gradient_as_bucket_view=option("bucket_view")
        )
        self.accelerator = Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(STEPS, sync_each_batch=option("each")),
            kwargs_handlers=[ddp, GradScalerKwargs(init_scale=8.0)],
            mixed_precision="fp16" if option("fp16") else "no",
        )
        torch.manual_seed(1)
        model = PartlyUsedNet(sparse=option("sparse"))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.3, momentum=0.9, weight_decay=0 if model.embed.sparse else 0.1
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    @property
    def cycle_state(self):
        return self.accelerator._run.accumulation, self.accelerator._run.gradients

    def load(self, saved, tree):
        self.accelerator.unwrap_model(self.model).load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        training_state.restore_accumulation(tree, *self.cycle_state)

    def train(self, first, last):
        for at in range(first, last):
            self.train_micro_batch(at)
        model = self.accelerator.unwrap_model(self.model)
        return copy.deepcopy(
            {
                "model": model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "accumulation": training_state.capture_accumulation(*self.cycle_state),
                "flat": torch.cat([p.detach().flatten() for p in model.parameters()]),
            }
        )

    def train_micro_batch(self, at):
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        generator = torch.Generator().manual_seed(at)
        tokens, targets = torch.randint(3, (2, ROWS), generator=generator).unbind()
        has_loss = torch.rand(ROWS, generator=generator) < 0.6 if self.weighted else torch.full((ROWS,), True)
        each = ROWS // world
        tokens, targets, has_loss = (part[rank * each :][:each] for part in (tokens, targets, has_loss))
        with self.accelerator.accumulate(self.model):
            logits = self.model(tokens, at % 2)
            loss = nn.functional.cross_entropy(logits[has_loss], targets[has_loss])
            self.accelerator.backward(loss, weight=int(has_loss.sum()) if self.weighted else None)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.to_none)


LAST = 3 * STEPS
TWO = pytest.param(2, id="2", marks=pytest.mark.full)


def train_until(stop, options):
    """Train up to micro-batch `stop`; return the state there and the final parameters."""
    run = Run(options)
    saved = run.train(0, stop)
    return saved, run.train(stop, LAST)["flat"]


def restore_and_train(start, options, saved, trees, world_size_before):
    """Restore a saved state in a new run; return the final parameters."""
    run = Run(options)
    run.train(0, 1)  # restoring replaces these gradients
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    tree = trees[rank] if world == world_size_before else training_state.merge_accumulation(trees, world)
    run.load(saved, tree)
    return run.train(start, LAST)["flat"]


def compare_runs(before, after, kind, stop):
    """Return the parameters of the uninterrupted run, and those of each rank of the resumed run."""
    results = before.run(train_until, stop, KINDS[kind])
    saved = results[0][0]
    trees = [rank_tree["accumulation"] for rank_tree, _ in results]
    return results[0][1], after.run(restore_and_train, stop, KINDS[kind], saved, trees, before.size)


SAME = {"size": [1, TWO, 3], "stop": [1, STEPS, STEPS + 2], "kind": list(KINDS)}
OTHER = {
    "sizes": [pytest.param(sizes, id="{}-{}".format(*sizes)) for sizes in [(2, 1), (2, 3), (1, 2), (3, 2)]],
    "stop": [STEPS + 1, STEPS + 2],
    "kind": [kind for kind in KINDS if kind != "scaled"],
}


@pytest.mark.parametrize(("size", "stop", "kind"), pairwise_params(SAME))
def test_steps_after_a_resume_on_the_same_world_size_are_bitwise_equal(clusters, size, stop, kind):
    """SGD with weight decay gives different results for a zero gradient and for None."""
    expected, resumed = compare_runs(clusters[size], clusters[size], kind, stop)
    assert all(torch.equal(flat, expected) for flat in resumed)


@pytest.mark.parametrize(("sizes", "stop", "kind"), pairwise_params(OTHER))
def test_steps_after_a_resume_on_another_world_size_agree_within_rounding(clusters, sizes, stop, kind):
    before, after = sizes
    expected, resumed = compare_runs(clusters[before], clusters[after], kind, stop)
    for flat in resumed:
        assert (flat - expected).norm() <= TOLERANCE * expected.norm()


def test_ranks_hold_different_gradients_within_a_cycle_and_none_at_its_end(pair):
    inside = [saved["accumulation"] for saved, _ in pair.run(train_until, 1, {})]
    assert not torch.equal(*[state.gradients["model.head.weight"] for state in inside])
    assert all(state.cycle.micro_batches == 1 for state in inside)
    between = [saved["accumulation"] for saved, _ in pair.run(train_until, STEPS, {})]
    assert all(state.gradients == state.weights == {} and state.used == () for state in between)


def test_merging_preserves_the_sum_of_pending_loss_weights_on_any_world_size(clusters):
    states = [saved["accumulation"] for saved, _ in clusters[3].run(train_until, 2, {"weighted": True})]
    expected = sum(float(group.pending) for state in states for group in state.weights.values())
    for world in (1, 2, 4):
        shared = training_state.merge_accumulation(states, world).weights
        assert world * sum(float(group.pending) for group in shared.values()) == pytest.approx(expected)


def test_gradients_of_unprepared_parameters_are_rejected_without_changes(alone):
    saved, _ = alone.run(train_until, 1, {})[0]
    run = Run({})
    run.train(0, 2)
    before = run.train(2, 2)["accumulation"]
    other = saved["accumulation"]
    with pytest.raises(CheckpointError, match=r"a gradient of model_1\.weight, which is not among"):
        training_state.restore_accumulation(
            replace(other, gradients={"model_1.weight": torch.zeros(1)}), *run.cycle_state
        )
    with pytest.raises(CheckpointError, match=r"model\.head\.bias has shape \[4\], the parameter \[3\]"):
        training_state.restore_accumulation(
            replace(other, gradients={"model.head.bias": torch.zeros(4)}), *run.cycle_state
        )
    after = training_state.capture_accumulation(*run.cycle_state)
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
