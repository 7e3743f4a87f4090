"""Gradients of weighted losses are those of one process on the whole window, whatever the window is like."""

from __future__ import annotations

import copy
import math
import os
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from accel_runtime.data.source import EpochIterator, StepInfo
from accel_runtime.training.gradients import LossWeight, zero_loss

BAR = 1e-6  # relative error of the gradient
EXACT = 1e-14  # the same in float64
WORDS, WIDTH, LENGTH = 11, 6, 24


class Bigram(nn.Module):
    """A tiny language model."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def text(seed, counts):
    """Rows of tokens and of what follows them; of the latter, only the first `count` of a row are asked."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(WORDS, (len(counts), LENGTH + 1), generator=generator)
    targets = rows[:, 1:].clone()
    for row, count in zip(targets, counts, strict=True):
        row[count:] = -100
    return rows[:, :-1], targets


def mean_loss(model, batch):
    """The mean over the tokens asked for: nan where there are none."""
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def asked(batch):
    return int((batch[1] != -100).sum())


def flat(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


def reference(batches, model=None):
    """The gradient of one process on all rows at once."""
    model = model or Bigram()
    whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    mean_loss(model, whole).backward()
    return flat(model)


def window(accelerator, model, batches):
    """The gradient after one window of this rank's micro-batches."""
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch), weight=asked(batch))
    return flat(model)


def plan(world, steps, kind, seed=0):
    """For every rank and micro-batch of a window, how many tokens each of its two rows asks for."""
    draw = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    kinds = {
        "equal tokens": lambda _: 12,
        "tokens from 1 to 24": lambda _: number(1, 24),
        "few tokens, and now and then 24": lambda _: number(1, 2) if number(1, 5) > 1 else 24,
        "nothing on the last rank": lambda rank: 0 if rank == world - 1 and world > 1 else number(1, 24),
        "nothing in most batches": lambda _: 24 if number(1, 5) == 1 else 0,
    }
    counts = [[[kinds[kind](rank) for _ in range(2)] for _ in range(steps)] for rank in range(world)]
    counts[0][0][0] = counts[0][0][0] or 5
    return counts


def own_text(accelerator, counts):
    """This rank's micro-batches."""
    rank = accelerator.process_index
    return [text(100 * rank + step, each) for step, each in enumerate(counts[rank])]


def all_text(counts):
    return [text(100 * rank + step, each) for rank, own in enumerate(counts) for step, each in enumerate(own)]


KINDS = [
    "equal tokens",
    "tokens from 1 to 24",
    "few tokens, and now and then 24",
    "nothing on the last rank",
    "nothing in most batches",
]


def measured(counts, steps, options=None):
    accelerator = Accelerator(gradient_accumulation_steps=steps, **(options or {}))
    model = accelerator.prepare(Bigram())
    return window(accelerator, model, own_text(accelerator, counts))


# The gradient ----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_one_process_on_all_tokens(ranks, kind, steps):
    counts = plan(ranks.size, steps, kind)
    wanted = reference(all_text(counts))
    assert all(error(got, wanted) <= BAR for got in ranks.run(measured, counts, steps))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_the_gradient_is_that_of_one_process_on_all_tokens_of_four(four, steps):
    for kind in KINDS:
        counts = plan(4, steps, kind)
        wanted = reference(all_text(counts))
        assert all(error(got, wanted) <= BAR for got in four.run(measured, counts, steps))


def tail(steps, micro_batches, n):
    """The gradients of all windows of an epoch of so many micro-batches on each rank."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = Bigram()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    with epoch_of(accelerator, micro_batches) as shares:
        for index in shares:
            with accelerator.accumulate(model):
                batch = text(100 * accelerator.process_index + index, [n, index + 1])
                accelerator.backward(mean_loss(model, batch), weight=asked(batch))
                if accelerator.sync_gradients:
                    seen.append(flat(model))
                optimizer.step()
                optimizer.zero_grad()
    return seen


@contextmanager
def epoch_of(accelerator, steps, factors=None):
    """The steps of a loop over a loader; `factors` are those of this rank."""
    loop = EpochIterator()

    def walk():
        track = accelerator._loops.open(loop)
        try:
            for index in range(steps):
                factor = 1.0 if factors is None else factors[index]
                loop.step_info = StepInfo((1,), (1,), index == steps - 1, loss_scale=factor)
                yield index
        finally:
            accelerator._loops.close(track, finished=False)

    walking = walk()
    yield walking
    walking.close()


@pytest.mark.parametrize(("steps", "micro_batches"), [(4, 6), (4, 5), (8, 9), (3, 1)])
def test_a_last_window_that_is_short_has_the_right_gradient(ranks, steps, micro_batches):
    seen = ranks.run(tail, steps, micro_batches, 7)
    starts = range(0, micro_batches, steps)
    for number, start in enumerate(starts):
        indices = range(start, min(start + steps, micro_batches))
        batches = [text(100 * rank + i, [7, i + 1]) for rank in range(ranks.size) for i in indices]
        assert all(error(own[number], reference(batches)) <= BAR for own in seen)
    assert [len(own) for own in seen] == [len(starts)] * ranks.size


@pytest.mark.parametrize(("n", "batch"), [(17, 4), (10, 4), (13, 4), (21, 4), (16, 4), (3, 4)])
@pytest.mark.parametrize("steps", [1, 2])
def test_an_update_after_an_epoch_with_a_ragged_tail_is_that_of_one_process(ranks, n, batch, steps):
    """Samples dealt out exactly once: ranks end with batches of unequal size, or with none."""

    def trained(n, batch, steps):
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        model = Bigram()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        tokens, targets = text(1, [LENGTH] * n)
        size = batch * accelerator.num_processes
        rounds = list(zip(tokens.split(size), targets.split(size), strict=True))
        with epoch_of(accelerator, len(rounds)) as walk:
            for index in walk:
                own = slice(accelerator.process_index * batch, (accelerator.process_index + 1) * batch)
                mine = [part[own] for part in rounds[index]]
                count = len(mine[0])
                # A rank without samples computes on one of the others', and counts nothing.
                mine = mine if count else [part[:1] for part in rounds[index]]
                with accelerator.accumulate(model):
                    accelerator.backward(mean_loss(model, mine), weight=count)
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model = Bigram()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    tokens, targets = text(1, [LENGTH] * n)
    size = batch * ranks.size * steps
    for whole in zip(tokens.split(size), targets.split(size), strict=True):
        mean_loss(model, whole).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = torch.cat([p.detach().flatten() for p in model.parameters()])
    for got in ranks.run(trained, n, batch, steps):
        assert error(torch.cat([p.flatten() for p in got]), wanted) <= BAR


@given(
    counts=st.lists(st.lists(st.integers(0, LENGTH), min_size=1, max_size=3), min_size=1, max_size=5).filter(
        lambda rows: any(any(row) for row in rows)
    ),
    factor=st.sampled_from([1, 0.25, 4096]),
)
@settings(max_examples=40)
def test_any_weights_in_any_unit_give_the_mean_over_all_items(counts, factor):
    accelerator = Accelerator(gradient_accumulation_steps=len(counts))
    model = accelerator.prepare(Bigram())
    batches = [text(step, row) for step, row in enumerate(counts)]
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch), weight=factor * asked(batch))
    assert error(flat(model), reference(batches)) <= BAR


def test_a_weight_may_be_a_tensor_of_any_kind_of_number(ranks):
    def kinds():
        batches = [text(step, [3, 20]) for step in range(2)]
        seen = []
        for kind in (float, torch.tensor, lambda n: torch.tensor([n]), lambda n: torch.tensor(n).double()):
            accelerator = Accelerator(gradient_accumulation_steps=2)
            model = accelerator.prepare(Bigram())
            for batch in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(mean_loss(model, batch), kind(asked(batch)))
            seen.append(flat(model))
        return seen

    for seen in ranks.run(kinds):
        assert all(torch.equal(other, seen[0]) for other in seen[1:])


def own_and_all(counts, size):
    """Every rank's micro-batches, and all of them."""
    return [text(100 * rank + step, own) for rank in range(size) for step, own in enumerate(counts)]


@pytest.mark.parametrize("kind", [float, partial(torch.tensor, dtype=torch.float32)])
def test_a_gradient_in_float64_is_as_exact_as_its_loss(ranks, kind):
    counts = [[3, 7], [11, 0], [1, 9]]

    def train():
        accelerator = Accelerator(gradient_accumulation_steps=3)
        model = accelerator.prepare(Bigram().double())
        for step, own in enumerate(counts):
            with accelerator.accumulate(model):
                batch = text(100 * accelerator.process_index + step, own)
                accelerator.backward(mean_loss(model, batch), weight=kind(asked(batch)))
        return flat(model)

    wanted = reference(own_and_all(counts, ranks.size), Bigram().double())
    assert wanted.dtype == torch.float64
    assert all(error(got, wanted) < EXACT for got in ranks.run(train))


def test_a_share_of_a_step_in_float64_is_as_exact_as_its_loss(pair):
    """Three samples on two ranks, which have two and one of them."""

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
        return error(flat(model), flat(alone))

    assert all(wrong < EXACT for wrong in pair.run(train))


def silent_backward(model, weight, loss):
    with zero_loss(model.parameters, weight):
        loss.backward()


def test_a_weight_that_is_only_known_on_the_device_selects_there():
    """Here the device is the CPU; what matters is that its value is not looked at."""
    from accel_runtime.backends import connect
    from accel_runtime.env import Settings
    from accel_runtime.topology import Topology
    from accel_runtime.training.accumulation import Accumulation
    from accel_runtime.training.gradients import LossWeights, group_parameters

    model, accumulation = Bigram(), Accumulation(3)
    weights = LossWeights(connect(Settings(device="cpu"), Topology.from_env(os.environ)), accumulation)
    found = group_parameters([model], [])
    batches = [text(0, [3, 4]), text(1, [0, 0]), text(2, [9, 1])]
    for batch in batches:
        accumulation.advance(is_last=False)
        unknown = LossWeight(torch.tensor(float(asked(batch))), is_zero=None)
        run = partial(silent_backward, model, unknown)
        weights.backward(mean_loss(model, batch), unknown, run, found)
    assert error(flat(model), reference([batches[0], batches[2]])) <= BAR


@pytest.mark.parametrize("steps", [1, 2])
def test_no_value_of_a_device_is_waited_for(steps):
    """On `meta` there are no values: whatever looks at one fails."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    accelerator._backend.device = accelerator._gradients.device = torch.device("meta")
    model = accelerator.prepare(Bigram())
    for _ in range(2):
        for weight in (7, torch.tensor(7), torch.tensor(7, device="meta")):
            with accelerator.accumulate(model):
                loss = model(torch.zeros(2, 3, dtype=torch.int64, device="meta")).mean()
                accelerator.backward(loss, weight=weight)
    assert flat(model).device.type == "meta"


@pytest.mark.parametrize("kept", [False, True], ids=["averaged at once", "kept until the window is complete"])
def test_fully_sharded_parameters_have_the_same_gradients(several, kept):
    def sharded(counts, kept):
        from torch.distributed.fsdp import fully_shard

        class Copied(Bigram):
            def forward(self, tokens):
                return super().forward(tokens).clone()  # FSDP warns of views

        accelerator = Accelerator(gradient_accumulation_steps=3)
        model = fully_shard(Copied())
        accelerator._models.append(model)
        accelerator._gradients.find_groups()
        for batch in own_text(accelerator, counts):
            with accelerator.accumulate(model):
                model.set_requires_gradient_sync(accelerator.sync_gradients or not kept)
                accelerator.backward(mean_loss(model, batch), weight=asked(batch))
        return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])

    for kind in KINDS[:3]:
        counts = plan(several.size, 3, kind)
        wanted = reference(all_text(counts))
        assert all(error(got, wanted) <= BAR for got in several.run(sharded, counts, kept))


# Nothing to learn from -------------------------------------------------------------------


def test_a_window_without_any_item_leaves_zeros(ranks):
    def nothing():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(Bigram())
        batches = [text(step, [0, 0]) for step in range(2)]
        assert math.isnan(mean_loss(model, batches[0]).item())
        return window(accelerator, model, batches)

    assert all(torch.equal(got, torch.zeros_like(got)) for got in ranks.run(nothing))


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_weight_zero_hides_a_loss_that_is_no_number_and_no_other_weight_does(ranks, loss):
    def finite(loss):
        accelerator = Accelerator()
        seen = []
        for weight in (0, 1):
            model = accelerator.prepare(Bigram())
            accelerator.backward(mean_loss(model, text(0, [5, 5])) * float(loss), weight=weight)
            seen.append(bool(flat(model).isfinite().all()))
            model.zero_grad()
        return seen

    assert ranks.run(finite, loss) == [[True, False]] * ranks.size


# Windows ---------------------------------------------------------------------------------


def test_losses_of_one_window_are_pooled(ranks):
    def pooled():
        accelerator = Accelerator()
        model = accelerator.prepare(Bigram())
        rank = accelerator.process_index
        for part in range(3):
            batch = text(10 * rank + part, [part + 1, 20 - rank])
            accelerator.backward(mean_loss(model, batch), weight=asked(batch))
        return flat(model)

    batches = [
        text(10 * rank + part, [part + 1, 20 - rank]) for rank in range(ranks.size) for part in range(3)
    ]
    assert all(error(got, reference(batches)) <= BAR for got in ranks.run(pooled))


@pytest.mark.parametrize("steps", [1, 2])
def test_two_models_in_one_window_each_have_their_own_weights(ranks, steps):
    def both(steps):
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        models = accelerator.prepare([Bigram(0), Bigram(1)])
        rank = accelerator.process_index
        for step in range(steps):
            with accelerator.accumulate(*models):
                for index, model in enumerate(models):
                    batch = text(100 * rank + 10 * step + index, [index * 10 + 2, step + 1 + rank])
                    accelerator.backward(mean_loss(model, batch), weight=asked(batch))
        return [flat(model) for model in models]

    places = [(rank, step) for rank in range(ranks.size) for step in range(steps)]
    for index in range(2):
        batches = [text(100 * r + 10 * s + index, [index * 10 + 2, s + 1 + r]) for r, s in places]
        wanted = reference(batches, Bigram(index))
        assert all(error(got[index], wanted) <= BAR for got in ranks.run(both, steps))


def test_two_optimizers_that_step_in_turn_each_get_their_own_gradient(ranks):
    """As those of a generator and its critic: the critic's gradients of the generator's loss do not count."""

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

    def rounds(ranks):
        """Per round and rank: noise and real samples, of which a rank has more than another."""
        draw = torch.Generator().manual_seed(5)
        sizes = [[2 + rank, 2 + rank] for rank in range(ranks)]
        return [
            [(torch.randn(a, 4, generator=draw), torch.randn(b, 4, generator=draw) + 1) for a, b in sizes]
            for _ in range(3)
        ]

    def played(size):
        accelerator = Accelerator()
        return play(accelerator, [each[accelerator.process_index] for each in rounds(size)], True)

    whole = [tuple(torch.cat(parts) for parts in zip(*each, strict=True)) for each in rounds(ranks.size)]
    wanted = play(None, whole, False)
    assert all(error(got, wanted) <= BAR for got in ranks.run(played, ranks.size))


def test_one_model_with_two_optimizers_that_step_in_turn(ranks):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.parts = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

        def forward(self, x, part):
            return self.parts[part](x)

    def data(rank, turn):
        return torch.randn(2 + rank + turn, 4, generator=torch.Generator().manual_seed(10 * rank + turn))

    def alternated():
        accelerator = Accelerator(
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
        )
        model = Two()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.parts]
        model, optimizers = accelerator.prepare(model, optimizers)
        for turn in range(4):
            x = data(accelerator.process_index, turn)
            accelerator.backward(model(x, turn % 2).square().mean(), weight=len(x))
            optimizers[turn % 2].step()
            optimizers[turn % 2].zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    model = Two()
    for turn in range(4):
        x = torch.cat([data(rank, turn) for rank in range(ranks.size)])
        model(x, turn % 2).square().mean().backward()
        with torch.no_grad():
            for p in model.parts[turn % 2].parameters():
                p.sub_(0.1 * p.grad)
        model.zero_grad()
    wanted = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(error(got, wanted) <= BAR for got in ranks.run(alternated))


def test_parameters_of_an_optimizer_that_are_in_no_model_are_divided_too(alone):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    free = nn.Parameter(torch.tensor([2.0]))
    optimizer = accelerator.prepare(torch.optim.SGD([free], lr=1.0))
    for x, weight in ((1.0, 3), (5.0, 1)):
        with accelerator.accumulate():
            accelerator.backward((free * x).sum(), weight=weight)
            optimizer.step()
    assert free.item() == pytest.approx(2 - (1 * 3 + 5 * 1) / 4)


def test_inside_no_sync_of_the_script_the_window_is_not_complete(ranks):
    def silent():
        accelerator = Accelerator()
        model = accelerator.prepare(Bigram())
        rank = accelerator.process_index
        first, second = (text(10 * rank + part, [3 + rank, 20 - part]) for part in range(2))
        with accelerator.no_sync(model):
            accelerator.backward(mean_loss(model, first), weight=asked(first))
        accelerator.backward(mean_loss(model, second), weight=asked(second))
        return flat(model)

    batches = [
        text(10 * rank + part, [3 + rank, 20 - part]) for rank in range(ranks.size) for part in range(2)
    ]
    assert all(error(got, reference(batches)) <= BAR for got in ranks.run(silent))


def test_a_backward_pass_can_be_made_to_synchronise_after_its_forward_pass_was_not(ranks):
    def late():
        accelerator = Accelerator()
        model = accelerator.prepare(Bigram())
        rank = accelerator.process_index
        batches = [text(10 * rank + part, [3 + rank, 20 - part]) for part in range(2)]
        with accelerator.no_sync(model):
            losses = [mean_loss(model, batch) for batch in batches]
        accelerator.backward(losses[0], weight=asked(batches[0]))
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1], weight=asked(batches[1]))
        return flat(model)

    batches = [
        text(10 * rank + part, [3 + rank, 20 - part]) for rank in range(ranks.size) for part in range(2)
    ]
    assert all(error(got, reference(batches)) <= BAR for got in ranks.run(late))


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_the_script_zeroes_by_itself_take_their_weights_along(ranks, to_none):
    def dropped(to_none):
        accelerator = Accelerator()
        model = accelerator.prepare(Bigram())
        with accelerator.no_sync(model):
            accelerator.backward(mean_loss(model, text(9, [20, 20])), weight=1000)
        model.zero_grad(set_to_none=to_none)
        batch = text(accelerator.process_index, [3, accelerator.process_index])
        accelerator.backward(mean_loss(model, batch), weight=asked(batch))
        return flat(model)

    wanted = reference([text(rank, [3, rank]) for rank in range(ranks.size)])
    assert all(error(got, wanted) <= BAR for got in ranks.run(dropped, to_none))


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (3, {"gradient_as_bucket_view": True}),
        (3, {"bucket_cap_mb": 1}),
        (3, {"find_unused_parameters": True}),
        (1, {"static_graph": True}),
    ],
)
def test_the_options_of_ddp_do_not_matter(pair, steps, options):
    def optioned(options, counts):
        accelerator = Accelerator(
            gradient_accumulation_steps=len(counts[0]),
            kwargs_handlers=[DistributedDataParallelKwargs(**options)],
        )
        model = accelerator.prepare(Bigram())
        return window(accelerator, model, own_text(accelerator, counts))

    counts = plan(2, steps, "nothing on the last rank")
    wanted = reference(all_text(counts))
    assert all(error(got, wanted) <= BAR for got in pair.run(optioned, options, counts))


# Formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("mixed_precision", "bar"), [("bf16", 3e-2), ("fp16", 4e-3)])
def test_half_precision_has_the_gradient_within_its_own_rounding_and_no_step_is_skipped(
    ranks, mixed_precision, bar
):
    def halves(mixed_precision, counts):
        accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=3)
        model = Bigram()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        seen = []
        for scale in (1, 4096):  # weights far from 1 must not overflow
            for batch in own_text(accelerator, counts):
                with accelerator.accumulate(model):
                    accelerator.backward(mean_loss(model, batch), weight=scale * asked(batch))
            accelerator.unscale_gradients()
            seen.append(flat(model))
            optimizer.step()
            assert scale == 4096 or not accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
        return seen

    counts = plan(ranks.size, 3, "tokens from 1 to 24")
    wanted = reference(all_text(counts))
    for seen in ranks.run(halves, mixed_precision, counts):
        assert error(seen[0], wanted) <= bar


def test_weights_of_thousands_do_not_overflow_float16(ranks):
    def skipped():
        accelerator = Accelerator(
            mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**12)]
        )
        model = Bigram()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = text(0, [20, 20])
        accelerator.backward(mean_loss(model, batch), weight=100_000)
        optimizer.step()
        return accelerator.optimizer_step_was_skipped

    assert not any(ranks.run(skipped))


# Clipping --------------------------------------------------------------------------------


def test_clipping_is_done_to_the_divided_gradients(ranks):
    def clipped():
        accelerator = Accelerator()
        model = accelerator.prepare(Bigram())
        batch = text(accelerator.process_index, [9, 9])
        accelerator.backward(mean_loss(model, batch), weight=500)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
        return norm.item(), flat(model).norm().item()

    wanted = reference([text(rank, [9, 9]) for rank in range(ranks.size)]).norm().item()
    for norm, after in ranks.run(clipped):
        assert norm == pytest.approx(wanted, rel=1e-5)
        assert after == pytest.approx(0.01, rel=1e-3)


# What is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.tensor(-2.0)])
def test_a_weight_that_is_no_number_of_items_is_refused(weight):
    accelerator = Accelerator()
    model = accelerator.prepare(Bigram())
    with pytest.raises(ValueError, match="expected a finite number of items, at least 0"):
        accelerator.backward(mean_loss(model, text(0, [3])), weight=weight)


def test_a_weight_of_several_numbers_is_refused():
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"a tensor of shape \[3\]\. Pass one number"):
        accelerator.backward(mean_loss(Bigram(), text(0, [3])), weight=torch.ones(3))


@pytest.mark.parametrize("first", [None, 3])
def test_losses_with_and_without_weights_in_one_window_are_refused(first):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(Bigram())
    with accelerator.accumulate(model):
        accelerator.backward(mean_loss(model, text(0, [3])), weight=first)
    second = None if first else 3
    with accelerator.accumulate(model), pytest.raises(ValueError, match="with a weight and without one"):
        accelerator.backward(mean_loss(model, text(0, [3])), weight=second)


@pytest.mark.parametrize("end", ["step", "zero_grad", "by hand"])
def test_the_next_window_may_do_without_weights(end):
    accelerator = Accelerator()
    model = Bigram()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for weight in (None, 3, None):
        accelerator.backward(mean_loss(model, text(0, [3])), weight=weight)
        assert accelerator._accumulation.weighted is (weight is not None)
        assert error(flat(model), reference([text(0, [3])])) <= BAR
        if end == "step":
            optimizer.step()
            model.zero_grad()
            model.load_state_dict(Bigram().state_dict())
        elif end == "zero_grad":
            optimizer.zero_grad()
        else:
            model.zero_grad()


# Uneven steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_a_phantom_batch_adds_nothing_and_the_others_have_their_share(ranks, weighted):
    """Of every step the last rank has fewer samples than the others, at the last none."""

    def shared(weighted):
        accelerator = Accelerator()
        model = accelerator.prepare(Bigram())
        world, rank = accelerator.num_processes, accelerator.process_index
        seen = []
        sizes = [[3] * (world - 1) + [k] if world > 1 else [3] for k in (3, 1, 0)]
        factors = [each[rank] * world / sum(each) for each in sizes]
        with epoch_of(accelerator, 3, factors) as walk:
            for step in walk:
                batch = text(100 * rank + step, [LENGTH] * (sizes[step][rank] or 1))
                loss = mean_loss(model, batch) * (1 if sizes[step][rank] else float("nan"))
                accelerator.backward(loss, **({"weight": len(batch[0])} if weighted else {}))
                seen.append(flat(model))
                model.zero_grad()
        return seen

    world = ranks.size
    seen = ranks.run(shared, weighted)
    for step, few in enumerate((3, 1, 0)):
        sizes = [3] * (world - 1) + [few] if world > 1 else [3]
        wanted = reference([text(100 * r + step, [LENGTH] * size) for r, size in enumerate(sizes) if size])
        assert all(error(own[step], wanted) <= BAR for own in seen)
