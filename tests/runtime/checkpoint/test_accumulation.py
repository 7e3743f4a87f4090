"""A run that is saved half-way through an accumulation window takes the step it would have taken."""

from __future__ import annotations

import copy

import pytest
import torch
from pairs import pairwise_params
from torch import nn

from accel_runtime import (
    Accelerator,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from accel_runtime.checkpoint import training_state
from accel_runtime.checkpoint.errors import CheckpointError

STEPS = 3  # micro-batches a window
ROWS = 6  # of a micro-batch of all ranks: as many for one rank as for two or three
BAR = 1e-6  # relative error


class Words(nn.Module):
    """A tiny classifier, with a layer that not every micro-batch uses and one that is never used."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, 5, sparse=sparse)
        self.sometimes, self.never = nn.Linear(5, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens, extra):
        found = self.embed(tokens)
        return self.head(self.sometimes(found) if extra else found)


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
    """One rank's training."""

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
        model = Words(option("sparse"))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.3, momentum=0.9, weight_decay=0 if model.embed.sparse else 0.1
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    @property
    def window(self):
        return self.accelerator._accumulation, self.accelerator._gradients

    def load(self, saved, tree):
        self.accelerator.unwrap_model(self.model).load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        training_state.restore_accumulation(tree, *self.window)

    def train(self, first, last):
        for at in range(first, last):
            self.micro(at)
        model = self.accelerator.unwrap_model(self.model)
        return copy.deepcopy(
            {
                "model": model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "window": training_state.capture_accumulation(*self.window),
                "flat": torch.cat([p.detach().flatten() for p in model.parameters()]),
            }
        )

    def micro(self, at):
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        generator = torch.Generator().manual_seed(at)
        tokens, targets = torch.randint(3, (2, ROWS), generator=generator).unbind()
        asked = torch.rand(ROWS, generator=generator) < 0.6 if self.weighted else torch.full((ROWS,), True)
        each = ROWS // world
        tokens, targets, asked = (part[rank * each :][:each] for part in (tokens, targets, asked))
        with self.accelerator.accumulate(self.model):
            logits = self.model(tokens, at % 2)
            loss = nn.functional.cross_entropy(logits[asked], targets[asked])
            self.accelerator.backward(loss, weight=int(asked.sum()) if self.weighted else None)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.to_none)


LAST = 3 * STEPS
TWO = pytest.param(2, id="2", marks=pytest.mark.full)


def until(stop, options):
    """What is saved after some micro-batches, and what the uninterrupted run comes to."""
    run = Run(options)
    saved = run.train(0, stop)
    return saved, run.train(stop, LAST)["flat"]


def onwards(start, options, saved, trees, world_size_before):
    """What a new run comes to that takes up what was saved."""
    run = Run(options)
    run.train(0, 1)  # what is held is gone
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    tree = trees[rank] if world == world_size_before else training_state.merge_accumulation(trees, world)
    run.load(saved, tree)
    return run.train(start, LAST)["flat"]


def both(before, after, kind, stop):
    """The uninterrupted run's parameters, and those of every rank of the resumed one."""
    results = before.run(until, stop, KINDS[kind])
    saved = results[0][0]
    trees = [own["window"] for own, _ in results]
    return results[0][1], after.run(onwards, stop, KINDS[kind], saved, trees, before.size)


SAME = {"size": [1, TWO, 3], "stop": [1, STEPS, STEPS + 2], "kind": list(KINDS)}
OTHER = {
    "sizes": [pytest.param(sizes, id="{}-{}".format(*sizes)) for sizes in [(2, 1), (2, 3), (1, 2), (3, 2)]],
    "stop": [STEPS + 1, STEPS + 2],
    "kind": [kind for kind in KINDS if kind != "scaled"],
}


@pytest.mark.parametrize(("size", "stop", "kind"), pairwise_params(SAME))
def test_on_as_many_processes_every_step_is_bit_for_bit_that_of_the_uninterrupted_run(
    clusters, size, stop, kind
):
    """SGD with weight decay tells a gradient of zeros from none."""
    wanted, resumed = both(clusters[size], clusters[size], kind, stop)
    assert all(torch.equal(flat, wanted) for flat in resumed)


@pytest.mark.parametrize(("sizes", "stop", "kind"), pairwise_params(OTHER))
def test_on_another_number_of_processes_the_steps_are_those_of_the_uninterrupted_run(
    clusters, sizes, stop, kind
):
    before, after = sizes
    wanted, resumed = both(clusters[before], clusters[after], kind, stop)
    for flat in resumed:
        assert (flat - wanted).norm() <= BAR * wanted.norm()


def test_ranks_hold_different_gradients_inside_a_window_and_none_at_its_end(pair):
    inside = [saved["window"] for saved, _ in pair.run(until, 1, {})]
    assert not torch.equal(*[tree["gradients"]["model.head.weight"] for tree in inside])
    assert all(tree["accumulation"]["count"] == 1 for tree in inside)
    between = [saved["window"] for saved, _ in pair.run(until, STEPS, {})]
    assert all(tree["gradients"] == tree["weights"] == {} and tree["used"] == [] for tree in between)


def test_weights_that_are_not_divided_by_yet_are_as_many_on_any_number_of_ranks(clusters):
    trees = [saved["window"] for saved, _ in clusters[3].run(until, 2, {"weighted": True})]
    wanted = sum(float(book["pending"]) for tree in trees for book in tree["weights"].values())
    for world in (1, 2, 4):
        shared = training_state.merge_accumulation(trees, world)["weights"]
        assert world * sum(float(book["pending"]) for book in shared.values()) == pytest.approx(wanted)


def test_gradients_of_what_is_not_prepared_are_refused_and_nothing_is_changed(alone):
    saved, _ = alone.run(until, 1, {})[0]
    run = Run({})
    run.train(0, 2)
    before = run.train(2, 2)["window"]
    other = saved["window"]
    with pytest.raises(CheckpointError, match=r"a gradient of model_1\.weight, which is not among"):
        training_state.restore_accumulation(
            other | {"gradients": {"model_1.weight": torch.zeros(1)}}, *run.window
        )
    with pytest.raises(CheckpointError, match=r"model\.head\.bias has shape \[4\], the parameter \[3\]"):
        training_state.restore_accumulation(
            other | {"gradients": {"model.head.bias": torch.zeros(4)}}, *run.window
        )
    after = training_state.capture_accumulation(*run.window)
    assert after["accumulation"] == before["accumulation"]
    assert all(torch.equal(after["gradients"][name], held) for name, held in before["gradients"].items())


def test_a_rank_without_a_gradient_counts_with_zeros():
    def tree(gradients):
        return {"accumulation": {}, "unit": None, "used": [], "gradients": gradients, "weights": {}}

    got = training_state.merge_accumulation(
        [tree({"a": torch.tensor([3.0])}), tree({}), tree({"b": torch.tensor([6.0])})], 2
    )
    assert got["gradients"] == {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}


class TwoModels:
    """Two models with an optimizer each, of which one steps before a save and the other after it."""

    def __init__(self, weight):
        self.weight = weight
        self.accelerator = Accelerator(gradient_accumulation_steps=2)
        torch.manual_seed(1)
        models = [nn.Linear(3, 1), nn.Linear(3, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        self.models = self.accelerator.prepare(*models)
        self.optimizers = self.accelerator.prepare(*optimizers)

    def micro(self, number, generator):
        model, optimizer = self.models[number], self.optimizers[number]
        with self.accelerator.accumulate(model):
            self.accelerator.backward(model(torch.randn(2, 3, generator=generator)).sum(), weight=self.weight)
            optimizer.step()
            optimizer.zero_grad()

    def finish(self, generator):
        """Let the first model complete the cycle, and then step without another backward pass."""
        self.micro(1, generator)
        self.micro(0, generator)
        self.optimizers[1].step()
        return torch.cat([p.detach().flatten() for model in self.models for p in model.parameters()])


@pytest.mark.parametrize("weight", [None, 2])
def test_gradients_that_only_another_optimizer_has_used_are_saved(tmp_path, weight):
    """Accumulation cycles are common to all models: the second one ends a cycle while the first holds gradients."""
    run = TwoModels(weight)
    generator = torch.Generator().manual_seed(2)
    run.micro(0, generator)
    run.micro(1, generator)
    run.accelerator.save_state(tmp_path / "c")
    held = [p.grad.clone() for p in run.models[0].parameters()]
    state = generator.get_state()
    wanted = run.finish(generator)
    resumed = TwoModels(weight)
    for again in range(2):
        resumed.accelerator.load_state(tmp_path / "c")
        assert all(
            torch.equal(p.grad, grad) for p, grad in zip(resumed.models[0].parameters(), held, strict=True)
        )
        assert all(p.grad is None for p in resumed.models[1].parameters())
        if not again:
            resumed.accelerator.save_state(tmp_path / "c")
    assert torch.equal(resumed.finish(generator.set_state(state)), wanted)
