"""Gradients of weighted losses equal those of one process on all samples of an accumulation cycle."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import TokenNet, TwoLayerNet, TwoPartNet
from support.numerics import relative_error
from support.runs.sharded_runs import build_accelerator, to_full
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from accel_runtime.data.active_loops import LoopRecord
from accel_runtime.foundation.epoch_progress import EpochProgress, StepInfo
from accel_runtime.training.gradients import LossWeight, zero_loss

BAR = 1e-6  # relative error of the gradient
EXACT = 1e-14  # the same in float64
WORDS, WIDTH, LENGTH = 11, 6, 24


def build_model(seed=0, kind=TokenNet):
    """Return a model with the same parameters in all processes."""
    torch.manual_seed(seed)
    return kind(WORDS, WIDTH)


def build_text(seed, counts):
    """Build rows of tokens and their targets; only the first `count` targets of a row are counted."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(WORDS, (len(counts), LENGTH + 1), generator=generator)
    targets = rows[:, 1:].clone()
    for row, count in zip(targets, counts, strict=True):
        row[count:] = -100
    return rows[:, :-1], targets


def mean_loss(model, batch):
    """Return the mean over the counted tokens, or nan if there are none."""
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def count_tokens(batch):
    return int((batch[1] != -100).sum())


def flatten_gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def compute_reference(batches, model=None):
    """Return the gradient of one process on all rows at once."""
    model = model or build_model()
    global_batch = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    mean_loss(model, global_batch).backward()
    return flatten_gradients(model)


def run_cycle(accelerator, model, batches):
    """Return the gradient after one accumulation cycle of this rank."""
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch), weight=count_tokens(batch))
    return flatten_gradients(model)


def draw_token_counts(world, steps, kind, seed=0):
    """Draw the number of counted tokens of both rows, for every rank and micro-batch of a cycle."""
    draw = torch.Generator().manual_seed(seed)

    def draw_number(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    kinds = {
        "equal tokens": lambda _: 12,
        "tokens from 1 to 24": lambda _: draw_number(1, 24),
        "few tokens, and now and then 24": lambda _: draw_number(1, 2) if draw_number(1, 5) > 1 else 24,
        "nothing on the last rank": lambda rank: 0 if rank == world - 1 and world > 1 else draw_number(1, 24),
        "nothing in most batches": lambda _: 24 if draw_number(1, 5) == 1 else 0,
    }
    counts = [[[kinds[kind](rank) for _ in range(2)] for _ in range(steps)] for rank in range(world)]
    counts[0][0][0] = counts[0][0][0] or 5
    return counts


def build_local_text(accelerator, counts):
    """Return the micro-batches of this rank."""
    rank = accelerator.process_index
    return [build_text(100 * rank + step, each) for step, each in enumerate(counts[rank])]


def build_all_text(counts):
    return [
        build_text(100 * rank + step, each)
        for rank, rank_counts in enumerate(counts)
        for step, each in enumerate(rank_counts)
    ]


KINDS = [
    "equal tokens",
    "tokens from 1 to 24",
    "few tokens, and now and then 24",
    "nothing on the last rank",
    "nothing in most batches",
]


def compute_gradient(counts, steps, options=None):
    accelerator = Accelerator(gradient_accumulation_steps=steps, **(options or {}))
    model = accelerator.prepare(build_model())
    return run_cycle(accelerator, model, build_local_text(accelerator, counts))


# The gradient ----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_equals_that_of_one_process_on_all_tokens(ranks, kind, steps):
    counts = draw_token_counts(ranks.size, steps, kind)
    expected = compute_reference(build_all_text(counts))
    assert all(
        relative_error(actual, expected) <= BAR for actual in ranks.run(compute_gradient, counts, steps)
    )


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_the_gradient_on_four_ranks_equals_that_of_one_process(four, steps):
    for kind in KINDS:
        counts = draw_token_counts(4, steps, kind)
        expected = compute_reference(build_all_text(counts))
        assert all(
            relative_error(actual, expected) <= BAR for actual in four.run(compute_gradient, counts, steps)
        )


def collect_cycle_gradients(steps, micro_batches, n):
    """Return the gradients of all accumulation cycles of an epoch."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    gradients = []
    with iterate_epoch(accelerator, micro_batches) as iterator:
        for index in iterator:
            with accelerator.accumulate(model):
                batch = build_text(100 * accelerator.process_index + index, [n, index + 1])
                accelerator.backward(mean_loss(model, batch), weight=count_tokens(batch))
                if accelerator.sync_gradients:
                    gradients.append(flatten_gradients(model))
                optimizer.step()
                optimizer.zero_grad()
    return gradients


@contextmanager
def iterate_epoch(accelerator, steps, factors=None):
    """Iterate over the steps of an epoch; `factors` are the loss scales of this rank."""
    loop = EpochProgress()

    def yield_steps():
        track = LoopRecord(loop)
        accelerator._run.loops.open(track)
        try:
            for index in range(steps):
                factor = 1.0 if factors is None else factors[index]
                loop.advance(StepInfo((1,), (1,), index == steps - 1, loss_scale=factor))
                yield index
        finally:
            accelerator._run.loops.close(track, finished=False)

    walking = yield_steps()
    yield walking
    walking.close()


@pytest.mark.parametrize(("steps", "micro_batches"), [(4, 6), (4, 5), (8, 9), (3, 1)])
def test_a_short_last_cycle_has_the_correct_gradient(ranks, steps, micro_batches):
    results = ranks.run(collect_cycle_gradients, steps, micro_batches, 7)
    starts = range(0, micro_batches, steps)
    for number, start in enumerate(starts):
        indices = range(start, min(start + steps, micro_batches))
        batches = [build_text(100 * rank + i, [7, i + 1]) for rank in range(ranks.size) for i in indices]
        assert all(
            relative_error(gradients[number], compute_reference(batches)) <= BAR for gradients in results
        )
    assert [len(gradients) for gradients in results] == [len(starts)] * ranks.size


@pytest.mark.parametrize(("n", "batch"), [(17, 4), (10, 4), (13, 4), (21, 4), (16, 4), (3, 4)])
@pytest.mark.parametrize("steps", [1, 2])
def test_training_on_a_short_last_batch_equals_one_process(ranks, n, batch, steps):
    """Use each sample once, so that ranks end with batches of unequal size, or with none."""

    def trained(n, batch, steps):
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        tokens, targets = build_text(1, [LENGTH] * n)
        size = batch * accelerator.num_processes
        rounds = list(zip(tokens.split(size), targets.split(size), strict=True))
        with iterate_epoch(accelerator, len(rounds)) as iterator:
            for index in iterator:
                rank_slice = slice(accelerator.process_index * batch, (accelerator.process_index + 1) * batch)
                local_batch = [part[rank_slice] for part in rounds[index]]
                count = len(local_batch[0])
                # A rank without samples uses one of another rank as padding.
                local_batch = local_batch if count else [part[:1] for part in rounds[index]]
                with accelerator.accumulate(model):
                    accelerator.backward(mean_loss(model, local_batch), weight=count)
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    tokens, targets = build_text(1, [LENGTH] * n)
    size = batch * ranks.size * steps
    for global_batch in zip(tokens.split(size), targets.split(size), strict=True):
        mean_loss(model, global_batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for actual in ranks.run(trained, n, batch, steps):
        assert relative_error(torch.cat([p.flatten() for p in actual]), expected) <= BAR


@given(
    counts=st.lists(st.lists(st.integers(0, LENGTH), min_size=1, max_size=3), min_size=1, max_size=5).filter(
        lambda rows: any(any(row) for row in rows)
    ),
    factor=st.sampled_from([1, 0.25, 4096]),
)
@settings(max_examples=40)
def test_any_weights_and_scales_give_the_mean_over_all_items(counts, factor):
    accelerator = Accelerator(gradient_accumulation_steps=len(counts))
    model = accelerator.prepare(build_model())
    batches = [build_text(step, row) for step, row in enumerate(counts)]
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch), weight=factor * count_tokens(batch))
    assert relative_error(flatten_gradients(model), compute_reference(batches)) <= BAR


def test_a_weight_can_be_a_number_or_a_tensor_of_any_dtype(ranks):
    def kinds():
        batches = [build_text(step, [3, 20]) for step in range(2)]
        errors = []
        for kind in (float, torch.tensor, lambda n: torch.tensor([n]), lambda n: torch.tensor(n).double()):
            accelerator = Accelerator(gradient_accumulation_steps=2)
            model = accelerator.prepare(build_model())
            for batch in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(mean_loss(model, batch), kind(count_tokens(batch)))
            errors.append(flatten_gradients(model))
        return errors

    for errors in ranks.run(kinds):
        assert all(torch.equal(other, errors[0]) for other in errors[1:])


def build_text_of_ranks(counts, size):
    """Return the micro-batches of all ranks."""
    return [build_text(100 * rank + step, count) for rank in range(size) for step, count in enumerate(counts)]


@pytest.mark.parametrize("kind", [float, partial(torch.tensor, dtype=torch.float32)])
def test_a_float64_gradient_is_as_exact_as_its_loss(ranks, kind):
    counts = [[3, 7], [11, 0], [1, 9]]

    def train():
        accelerator = Accelerator(gradient_accumulation_steps=3)
        model = accelerator.prepare(build_model().double())
        for step, count in enumerate(counts):
            with accelerator.accumulate(model):
                batch = build_text(100 * accelerator.process_index + step, count)
                accelerator.backward(mean_loss(model, batch), weight=kind(count_tokens(batch)))
        return flatten_gradients(model)

    expected = compute_reference(build_text_of_ranks(counts, ranks.size), build_model().double())
    assert expected.dtype == torch.float64
    assert all(relative_error(actual, expected) < EXACT for actual in ranks.run(train))


def test_the_loss_scale_of_an_uneven_step_is_exact_in_float64(pair):
    """Train on three samples with two ranks."""

    def train():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
        torch.manual_seed(0)
        data = torch.randn(3, 5, dtype=torch.float64)
        model = accelerator.prepare(nn.Linear(5, 1, dtype=torch.float64))
        for batch in accelerator.prepare(DataLoader(data, batch_size=2)):
            accelerator.backward(model(batch).square().mean())
        alone = copy.deepcopy(accelerator.unwrap_model(model))
        alone.zero_grad()
        alone(data).square().mean().backward()
        return relative_error(flatten_gradients(model), flatten_gradients(alone))

    assert all(error < EXACT for error in pair.run(train))


def run_weighted(model, weight, loss, factor):
    silent_backward(model, weight, loss * factor)


def silent_backward(model, weight, loss):
    with zero_loss(model.parameters, weight):
        loss.backward()


def test_a_weight_on_the_device_is_selected_without_reading_its_value():
    """Use the CPU as the device; the value must not be read."""
    from support.strategies import connect_strategy

    from accel_runtime.training.accumulation import Accumulation
    from accel_runtime.training.gradients import LossWeights, group_parameters

    model, accumulation = build_model(), Accumulation(3)
    strategy = connect_strategy()
    weights = LossWeights(strategy, accumulation)
    groups = group_parameters([model], [], strategy.gradients)
    batches = [build_text(0, [3, 4]), build_text(1, [0, 0]), build_text(2, [9, 1])]
    for batch in batches:
        accumulation.advance(is_last=False)
        unknown = LossWeight(torch.tensor(float(count_tokens(batch))), is_zero=None)
        run = partial(run_weighted, model, unknown, mean_loss(model, batch))
        weights.backward(unknown, run, groups)
    assert relative_error(flatten_gradients(model), compute_reference([batches[0], batches[2]])) <= BAR


@pytest.mark.parametrize("steps", [1, 2])
def test_backward_does_not_synchronize_with_the_device(steps):
    """Use `meta`, where reading any value fails."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    accelerator._backend.runtime.device = torch.device("meta")
    model = accelerator.prepare(build_model())
    for _ in range(2):
        for weight in (7, torch.tensor(7), torch.tensor(7, device="meta")):
            with accelerator.accumulate(model):
                loss = model(torch.zeros(2, 3, dtype=torch.int64, device="meta")).mean()
                accelerator.backward(loss, weight=weight)
    assert flatten_gradients(model).device.type == "meta"


@pytest.mark.parametrize(
    "reshard", [False, True], ids=["averaged at once", "kept until the window is complete"]
)
def test_fully_sharded_parameters_have_the_same_gradients(several, reshard):
    def sharded(counts, reshard):
        from torch.distributed.fsdp import fully_shard

        class Copied(TokenNet):
            def forward(self, tokens):
                return super().forward(tokens).clone()  # FSDP warns of views

        accelerator = Accelerator(gradient_accumulation_steps=3)
        model = fully_shard(build_model(kind=Copied))
        accelerator._run.prepared.models.append(model)
        accelerator._run.gradients.find_groups()
        for batch in build_local_text(accelerator, counts):
            with accelerator.accumulate(model):
                model.set_requires_gradient_sync(accelerator.sync_gradients or not reshard)
                accelerator.backward(mean_loss(model, batch), weight=count_tokens(batch))
        return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])

    for kind in KINDS[:3]:
        counts = draw_token_counts(several.size, 3, kind)
        expected = compute_reference(build_all_text(counts))
        assert all(
            relative_error(actual, expected) <= BAR for actual in several.run(sharded, counts, reshard)
        )


# No items --------------------------------------------------------------------------------


def test_a_cycle_without_any_item_leaves_zero_gradients(ranks):
    def nothing():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(build_model())
        batches = [build_text(step, [0, 0]) for step in range(2)]
        assert math.isnan(mean_loss(model, batches[0]).item())
        return run_cycle(accelerator, model, batches)

    assert all(torch.equal(actual, torch.zeros_like(actual)) for actual in ranks.run(nothing))


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_weight_zero_hides_a_nonfinite_loss_and_other_weights_do_not(ranks, loss):
    def finite(loss):
        accelerator = Accelerator()
        records = []
        for weight in (0, 1):
            model = accelerator.prepare(build_model())
            accelerator.backward(mean_loss(model, build_text(0, [5, 5])) * float(loss), weight=weight)
            records.append(bool(flatten_gradients(model).isfinite().all()))
            model.zero_grad()
        return records

    assert ranks.run(finite, loss) == [[True, False]] * ranks.size


EMPTY = {
    "all of the last rank": lambda rank, _, last: rank == last,
    "one in each cycle": lambda rank, number, _: number % 2 == rank % 2,
    "a cycle": lambda _, number, __: number < 2,
}
"""The micro-batches without items, by rank and number, in cycles of two."""
LAYOUTS = {
    "sharded as one": ({"dp_shard": "auto"}, {"wrap": "none"}),
    "sharded by layers": ({"dp_shard": "auto"}, {"wrap": "Linear", "reshard_after_forward": False}),
    "checkpointed": ({"dp_shard": "auto"}, {"wrap": "Linear", "activation_checkpointing": True}),
    "tensor parallel": ({"tp": 2}, {}),
    "both": ({"tp": 2, "dp_shard": 2}, {}),
    "replicated": ({}, {}),
}


def draw_batch(rank, number):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + number))


def train_with_empty_batches(layout, empty, is_known, mixed_precision="no"):
    """Train two cycles of two micro-batches, whose loss is nan without items; return the weights."""
    sizes, options = LAYOUTS[layout]
    accelerator = build_accelerator(
        sizes, options, gradient_accumulation_steps=2, mixed_precision=mixed_precision
    )
    # Weights on an accelerator are not read.
    accelerator._run.backend.runtime.static_shapes = not is_known
    model = TwoLayerNet()
    model.tp_plan = {"first": "colwise", "second": "rowwise"}
    model.register_forward_hook(lambda _, __, output: output.clone())  # FSDP warns of views
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = accelerator._backend.data_rank.rank
    for number in range(4):
        with accelerator.accumulate(model):
            mask = torch.full((3, 1), float(not EMPTY[empty](rank, number, 1)))
            losses = model(draw_batch(rank, number)).square() * mask
            accelerator.backward(losses.sum() / mask.sum(), weight=mask.sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator._run.backend.runtime.static_shapes = False
    return torch.cat([to_full(parameter.detach()).flatten() for parameter in model.parameters()])


def train_without_empty_batches(empty, ranks):
    model = TwoLayerNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for cycle in ((0, 1), (2, 3)):
        batches = [draw_batch(r, n) for r in range(ranks) for n in cycle if not EMPTY[empty](r, n, 1)]
        if batches:
            model(torch.cat(batches)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "both"])
def test_micro_batches_without_items_add_exact_zeros_in_every_layout(pair, layout):
    ranks = 1 if layout == "tensor parallel" else 2
    for empty in EMPTY:
        expected = train_without_empty_batches(empty, ranks)
        for is_known in (True, False):
            for actual in pair.run(train_with_empty_batches, layout, empty, is_known):
                assert relative_error(actual, expected) <= BAR, (empty, is_known)


@pytest.mark.slow
def test_micro_batches_without_items_add_exact_zeros_on_a_two_dimensional_mesh(four):
    for empty in EMPTY:
        expected = train_without_empty_batches(empty, 2)
        for is_known in (True, False):
            for actual in four.run(train_with_empty_batches, "both", empty, is_known):
                assert relative_error(actual, expected) <= BAR, (empty, is_known)


def test_micro_batches_without_items_do_not_overflow_in_fp16(pair):
    expected = train_without_empty_batches("all of the last rank", 2)
    for layout in ("sharded as one", "replicated"):
        for actual in pair.run(train_with_empty_batches, layout, "all of the last rank", True, "fp16"):
            assert relative_error(actual, expected) <= 4e-3


def test_a_sparse_gradient_of_unknown_weight_is_zero_without_items():
    embedding = nn.Embedding(4, 2, sparse=True)
    for items, is_finite in ((0.0, True), (1.0, False)):
        embedding.zero_grad()
        weight = LossWeight(torch.tensor(items), is_zero=None)
        silent_backward(embedding, weight, embedding(torch.tensor([1, 1])).sum() * float("nan"))
        assert embedding.weight.grad.is_sparse
        assert bool(embedding.weight.grad.to_dense().isfinite().all()) == is_finite


# Accumulation cycles ---------------------------------------------------------------------


def test_losses_of_one_cycle_are_pooled(ranks):
    def pooled():
        accelerator = Accelerator()
        model = accelerator.prepare(build_model())
        rank = accelerator.process_index
        for part in range(3):
            batch = build_text(10 * rank + part, [part + 1, 20 - rank])
            accelerator.backward(mean_loss(model, batch), weight=count_tokens(batch))
        return flatten_gradients(model)

    batches = [
        build_text(10 * rank + part, [part + 1, 20 - rank]) for rank in range(ranks.size) for part in range(3)
    ]
    assert all(relative_error(actual, compute_reference(batches)) <= BAR for actual in ranks.run(pooled))


@pytest.mark.parametrize("steps", [1, 2])
def test_two_models_in_one_cycle_have_separate_weights(ranks, steps):
    def train_both(steps):
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        models = accelerator.prepare([build_model(0), build_model(1)])
        rank = accelerator.process_index
        for step in range(steps):
            with accelerator.accumulate(*models):
                for index, model in enumerate(models):
                    batch = build_text(100 * rank + 10 * step + index, [index * 10 + 2, step + 1 + rank])
                    accelerator.backward(mean_loss(model, batch), weight=count_tokens(batch))
        return [flatten_gradients(model) for model in models]

    rank_steps = [(rank, step) for rank in range(ranks.size) for step in range(steps)]
    for index in range(2):
        batches = [build_text(100 * r + 10 * s + index, [index * 10 + 2, s + 1 + r]) for r, s in rank_steps]
        expected = compute_reference(batches, build_model(index))
        assert all(relative_error(actual[index], expected) <= BAR for actual in ranks.run(train_both, steps))


def test_the_optimizers_of_a_gan_get_their_own_gradients(ranks):
    """The gradients of the critic from the loss of the generator do not count."""

    def play(accelerator, batches, weigh):
        torch.manual_seed(3)
        maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (maker, critic)]
        if accelerator is not None:
            maker, critic, optimizers = accelerator.prepare(maker, critic, optimizers)
        back = accelerator.backward if weigh else lambda loss, _: loss.backward()
        for noise, real in batches:
            optimizers[1].zero_grad()
            scores = critic(torch.cat([real, maker(noise).detach()]))
            labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(noise), 1)])
            back(nn.functional.binary_cross_entropy_with_logits(scores, labels), len(scores))
            optimizers[1].step()
            optimizers[0].zero_grad()
            scores = critic(maker(noise))
            back(nn.functional.softplus(-scores).mean(), len(noise))
            optimizers[0].step()
        return torch.cat([p.detach().flatten() for m in (maker, critic) for p in m.parameters()])

    def build_rounds(ranks):
        """Return noise and real samples for each round and rank, of different sizes."""
        draw = torch.Generator().manual_seed(5)
        sizes = [[2 + rank, 2 + rank] for rank in range(ranks)]
        return [
            [(torch.randn(a, 4, generator=draw), torch.randn(b, 4, generator=draw) + 1) for a, b in sizes]
            for _ in range(3)
        ]

    def played(size):
        accelerator = Accelerator()
        return play(accelerator, [each[accelerator.process_index] for each in build_rounds(size)], True)

    global_batch = [
        tuple(torch.cat(parts) for parts in zip(*each, strict=True)) for each in build_rounds(ranks.size)
    ]
    expected = play(None, global_batch, False)
    assert all(relative_error(actual, expected) <= BAR for actual in ranks.run(played, ranks.size))


def test_two_optimizers_of_one_model_can_step_alternately(ranks):
    def data(rank, step):
        return torch.randn(2 + rank + step, 4, generator=torch.Generator().manual_seed(10 * rank + step))

    def alternated():
        accelerator = Accelerator(
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
        )
        model = TwoPartNet()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.parts]
        model, optimizers = accelerator.prepare(model, optimizers)
        for step in range(4):
            x = data(accelerator.process_index, step)
            accelerator.backward(model(x, step % 2).square().mean(), weight=len(x))
            optimizers[step % 2].step()
            optimizers[step % 2].zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    model = TwoPartNet()
    for step in range(4):
        x = torch.cat([data(rank, step) for rank in range(ranks.size)])
        model(x, step % 2).square().mean().backward()
        with torch.no_grad():
            for p in model.parts[step % 2].parameters():
                p.sub_(0.1 * p.grad)
        model.zero_grad()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(relative_error(actual, expected) <= BAR for actual in ranks.run(alternated))


def test_parameters_outside_of_models_are_scaled_too(alone):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    free = nn.Parameter(torch.tensor([2.0]))
    optimizer = accelerator.prepare(torch.optim.SGD([free], lr=1.0))
    for x, weight in ((1.0, 3), (5.0, 1)):
        with accelerator.accumulate():
            accelerator.backward((free * x).sum(), weight=weight)
            optimizer.step()
    assert free.item() == pytest.approx(2 - (1 * 3 + 5 * 1) / 4)


def test_no_sync_of_the_script_keeps_the_cycle_open(ranks):
    def silent():
        accelerator = Accelerator()
        model = accelerator.prepare(build_model())
        rank = accelerator.process_index
        first, second = (build_text(10 * rank + part, [3 + rank, 20 - part]) for part in range(2))
        with accelerator.no_sync(model):
            accelerator.backward(mean_loss(model, first), weight=count_tokens(first))
        accelerator.backward(mean_loss(model, second), weight=count_tokens(second))
        return flatten_gradients(model)

    batches = [
        build_text(10 * rank + part, [3 + rank, 20 - part]) for rank in range(ranks.size) for part in range(2)
    ]
    assert all(relative_error(actual, compute_reference(batches)) <= BAR for actual in ranks.run(silent))


def test_trigger_sync_in_backward_averages_after_a_forward_pass_in_no_sync(ranks):
    def late():
        accelerator = Accelerator()
        model = accelerator.prepare(build_model())
        rank = accelerator.process_index
        batches = [build_text(10 * rank + part, [3 + rank, 20 - part]) for part in range(2)]
        with accelerator.no_sync(model):
            losses = [mean_loss(model, batch) for batch in batches]
        accelerator.backward(losses[0], weight=count_tokens(batches[0]))
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1], weight=count_tokens(batches[1]))
        return flatten_gradients(model)

    batches = [
        build_text(10 * rank + part, [3 + rank, 20 - part]) for rank in range(ranks.size) for part in range(2)
    ]
    assert all(relative_error(actual, compute_reference(batches)) <= BAR for actual in ranks.run(late))


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_gradients_in_the_script_also_drops_their_weights(ranks, to_none):
    def dropped(to_none):
        accelerator = Accelerator()
        model = accelerator.prepare(build_model())
        with accelerator.no_sync(model):
            accelerator.backward(mean_loss(model, build_text(9, [20, 20])), weight=1000)
        model.zero_grad(set_to_none=to_none)
        batch = build_text(accelerator.process_index, [3, accelerator.process_index])
        accelerator.backward(mean_loss(model, batch), weight=count_tokens(batch))
        return flatten_gradients(model)

    expected = compute_reference([build_text(rank, [3, rank]) for rank in range(ranks.size)])
    assert all(relative_error(actual, expected) <= BAR for actual in ranks.run(dropped, to_none))


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (3, {"gradient_as_bucket_view": True}),
        (3, {"bucket_cap_mb": 1}),
        (3, {"find_unused_parameters": True}),
        (1, {"static_graph": True}),
        (3, {"static_graph": True}),
    ],
)
def test_options_of_ddp_do_not_change_the_gradient(pair, steps, options):
    def optioned(options, counts):
        accelerator = Accelerator(
            gradient_accumulation_steps=len(counts[0]),
            kwargs_handlers=[DistributedDataParallelKwargs(**options)],
        )
        model = accelerator.prepare(build_model())
        return run_cycle(accelerator, model, build_local_text(accelerator, counts))

    counts = draw_token_counts(2, steps, "nothing on the last rank")
    expected = compute_reference(build_all_text(counts))
    assert all(relative_error(actual, expected) <= BAR for actual in pair.run(optioned, options, counts))


# Formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("mixed_precision", "bar"), [("bf16", 3e-2), ("fp16", 4e-3)])
def test_half_precision_gradients_are_within_rounding_and_no_step_is_skipped(ranks, mixed_precision, bar):
    def halves(mixed_precision, counts):
        accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=3)
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        errors = []
        for scale in (1, 4096):  # weights far from 1 must not overflow
            for batch in build_local_text(accelerator, counts):
                with accelerator.accumulate(model):
                    accelerator.backward(mean_loss(model, batch), weight=scale * count_tokens(batch))
            accelerator.unscale_gradients()
            errors.append(flatten_gradients(model))
            optimizer.step()
            assert scale == 4096 or not accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
        return errors

    counts = draw_token_counts(ranks.size, 3, "tokens from 1 to 24")
    expected = compute_reference(build_all_text(counts))
    for errors in ranks.run(halves, mixed_precision, counts):
        assert relative_error(errors[0], expected) <= bar


def test_large_weights_do_not_overflow_float16(ranks):
    def skipped():
        accelerator = Accelerator(
            mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**12)]
        )
        model = build_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = build_text(0, [20, 20])
        accelerator.backward(mean_loss(model, batch), weight=100_000)
        optimizer.step()
        return accelerator.optimizer_step_was_skipped

    assert not any(ranks.run(skipped))


# Clipping --------------------------------------------------------------------------------


def test_clipping_applies_to_the_weighted_mean(ranks):
    def clipped():
        accelerator = Accelerator()
        model = accelerator.prepare(build_model())
        batch = build_text(accelerator.process_index, [9, 9])
        accelerator.backward(mean_loss(model, batch), weight=500)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
        return norm.item(), flatten_gradients(model).norm().item()

    expected = compute_reference([build_text(rank, [9, 9]) for rank in range(ranks.size)]).norm().item()
    for norm, after in ranks.run(clipped):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(0.01, rel=1e-3)


# Errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.tensor(-2.0)])
def test_a_weight_that_is_no_valid_count_is_rejected(weight):
    accelerator = Accelerator()
    model = accelerator.prepare(build_model())
    with pytest.raises(ValueError, match="expected a finite number of items, at least 0"):
        accelerator.backward(mean_loss(model, build_text(0, [3])), weight=weight)


def test_a_weight_of_several_numbers_is_rejected():
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"a tensor of shape \[3\]\. Pass one number"):
        accelerator.backward(mean_loss(build_model(), build_text(0, [3])), weight=torch.ones(3))


@pytest.mark.parametrize("first", [None, 3])
def test_weighted_and_unweighted_losses_in_one_cycle_are_rejected(first):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(build_model())
    with accelerator.accumulate(model):
        accelerator.backward(mean_loss(model, build_text(0, [3])), weight=first)
    second = None if first else 3
    with accelerator.accumulate(model), pytest.raises(ValueError, match="with a weight and without one"):
        accelerator.backward(mean_loss(model, build_text(0, [3])), weight=second)


@pytest.mark.parametrize("end", ["step", "zero_grad", "by hand"])
def test_the_next_cycle_can_have_no_weights(end):
    accelerator = Accelerator()
    model = build_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for weight in (None, 3, None):
        accelerator.backward(mean_loss(model, build_text(0, [3])), weight=weight)
        assert accelerator._run.accumulation.weighted is (weight is not None)
        assert relative_error(flatten_gradients(model), compute_reference([build_text(0, [3])])) <= BAR
        if end == "step":
            optimizer.step()
            model.zero_grad()
            model.load_state_dict(build_model().state_dict())
        elif end == "zero_grad":
            optimizer.zero_grad()
        else:
            model.zero_grad()


# Uneven steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_a_padding_batch_adds_nothing_and_the_others_have_their_share(ranks, weighted):
    """The last rank has fewer samples than the others in every step, and none in the last one."""

    def shared(weighted):
        accelerator = Accelerator()
        model = accelerator.prepare(build_model())
        world, rank = accelerator.num_processes, accelerator.process_index
        results = []
        sizes = [[3] * (world - 1) + [k] if world > 1 else [3] for k in (3, 1, 0)]
        factors = [each[rank] * world / sum(each) for each in sizes]
        with iterate_epoch(accelerator, 3, factors) as iterator:
            for step in iterator:
                batch = build_text(100 * rank + step, [LENGTH] * (sizes[step][rank] or 1))
                loss = mean_loss(model, batch) * (1 if sizes[step][rank] else float("nan"))
                accelerator.backward(loss, **({"weight": len(batch[0])} if weighted else {}))
                results.append(flatten_gradients(model))
                model.zero_grad()
        return results

    world = ranks.size
    results = ranks.run(shared, weighted)
    for step, few in enumerate((3, 1, 0)):
        sizes = [3] * (world - 1) + [few] if world > 1 else [3]
        expected = compute_reference(
            [build_text(100 * r + step, [LENGTH] * size) for r, size in enumerate(sizes) if size]
        )
        assert all(relative_error(gradients[step], expected) <= BAR for gradients in results)
