"""Whole training loops on data of every kind: each sample is used once, with the gradients of one process."""

from __future__ import annotations

import random
import warnings
from itertools import chain

import pytest
import torch
from support.training.data_sets import (
    RandomOrderSampler,
    RangeStream,
    ShardedStream,
    ShuffledStream,
    SizedStream,
    VariableBatchSampler,
    WorkerSplitStream,
)
from support.training.models import TwoLayerNet
from support.training.numerics import relative_error
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from accel_runtime import Accelerator, DataLoaderConfiguration, gather_object
from accel_runtime.data.loader import skip_first_batches

BAR = 1e-6  # relative error of a gradient
WAYS = {
    "even": {},
    "not even": {"even_batches": False},
    "dispatched": {"dispatch_batches": True},
    "dispatched, not even": {"dispatch_batches": True, "even_batches": False},
    "from a seed": {"use_seedable_sampler": True, "data_seed": 3},
}


def build_text_sample(number):
    return {"id": torch.tensor(number), "text": f"no {number}"}


def build_ragged_sample(number):
    return torch.full((number % 5 + 1,), number)


def collate_padded(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def build_row(number):
    return torch.tensor([number])


def build_weighted_sampler():
    return WeightedRandomSampler(torch.ones(100), 10, replacement=False, generator=torch.Generator())


def build_tensor_dataset(count):
    return TensorDataset(torch.arange(count))


MAPS = {
    "17 in batches of 4": lambda: DataLoader(range(17), 4),
    "10 in batches of 4": lambda: DataLoader(range(10), 4),
    "one sample": lambda: DataLoader(range(1), 4),
    "fewer samples than ranks": lambda: DataLoader(range(2), 1),
    "no sample": lambda: DataLoader(build_tensor_dataset(0), 4),
    "shuffled": lambda: DataLoader(range(21), 4, shuffle=True),
    "workers": lambda: DataLoader(range(17), 4, shuffle=True, num_workers=2),
    "a sampler that draws by itself": lambda: DataLoader(range(16), 4, sampler=RandomOrderSampler(16)),
    "half of the indices": lambda: DataLoader(range(12), 4, sampler=range(0, 12, 2)),
    "half of 22": lambda: DataLoader(range(22), 4, sampler=range(0, 22, 2)),
    "10 of 100 by weight": lambda: DataLoader(range(100), 4, sampler=build_weighted_sampler()),
    "a BatchSampler": lambda: DataLoader(
        range(17), batch_sampler=BatchSampler(SequentialSampler(range(17)), 4, drop_last=False)
    ),
    "batches of 3, 4 and 5": lambda: DataLoader(
        range(12), batch_sampler=VariableBatchSampler([[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11]])
    ),
    "a list of lists": lambda: DataLoader(range(9), batch_sampler=[[0, 1, 2, 3], [4, 5], [6, 7, 8]]),
    "samples on their own": lambda: DataLoader([build_row(n) for n in range(7)], batch_size=None),
    "nothing to drop": lambda: DataLoader(range(24), 2, drop_last=True),
}
STREAMS = {
    "a stream": lambda: DataLoader(RangeStream(10), 4),
    "a stream of 17": lambda: DataLoader(RangeStream(17), 4),
    "a stream of one": lambda: DataLoader(RangeStream(1), 4),
    "a stream of one, singly": lambda: DataLoader(RangeStream(1), 1),
    "an empty stream": lambda: DataLoader(RangeStream(0), 4),
    "a stream with a length": lambda: DataLoader(SizedStream(17), 4),
    "a stream that shuffles by itself": lambda: DataLoader(ShuffledStream(16), 4),
    "a stream in three shards": lambda: DataLoader(ShardedStream(22), 4),
    "a stream of texts": lambda: DataLoader(SizedStream(10, build_text_sample), 4),
    "a stream padded by batch": lambda: DataLoader(
        RangeStream(10, build_ragged_sample), 4, collate_fn=collate_padded
    ),
    "workers that all read everything": lambda: DataLoader(SizedStream(16), 4, num_workers=2),
    "workers that divide": lambda: DataLoader(WorkerSplitStream(16), 4, num_workers=3),
    "workers that divide 18": lambda: DataLoader(WorkerSplitStream(18), 4, num_workers=2),
    "samples of a stream on their own": lambda: DataLoader(RangeStream(7, build_row), batch_size=None),
}
LOADERS = MAPS | STREAMS
COUNTS = {
    "17 in batches of 4": range(17),
    "10 in batches of 4": range(10),
    "one sample": range(1),
    "fewer samples than ranks": range(2),
    "no sample": range(0),
    "shuffled": range(21),
    "workers": range(17),
    "a sampler that draws by itself": range(16),
    "half of the indices": range(0, 12, 2),
    "half of 22": range(0, 22, 2),
    "a BatchSampler": range(17),
    "batches of 3, 4 and 5": range(12),
    "a list of lists": range(9),
    "samples on their own": range(7),
    "nothing to drop": range(24),
    "a stream": range(10),
    "a stream of 17": range(17),
    "a stream of one": range(1),
    "a stream of one, singly": range(1),
    "an empty stream": range(0),
    "a stream with a length": range(17),
    "a stream that shuffles by itself": range(16),
    "a stream in three shards": range(22),
    "a stream of texts": range(10),
    "a stream padded by batch": range(10),
    "workers that all read everything": range(16),
    "workers that divide": range(16),
    "workers that divide 18": range(18),
    "samples of a stream on their own": range(7),
}


def get_sample_numbers(batch):
    """Return the samples of a batch as numbers, one for each sample."""
    if isinstance(batch, dict):
        assert batch["text"] == [f"no {n}" for n in batch["id"].tolist()]
        return batch["id"]
    batch = batch[0] if isinstance(batch, (list, tuple)) else batch
    return batch if batch.dim() == 1 else batch[:, 0]


def create_accelerator(method, **options):
    """Return an accelerator, on a rank with random numbers of its own."""
    # This machine may have fewer cores than a loader of these tests has workers.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**method), **options)
    random.seed(accelerator.process_index)
    torch.manual_seed(accelerator.process_index)
    return accelerator


def get_length(loader):
    try:
        return len(loader)
    except TypeError:
        return None


# Every sample once -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOADERS)
def test_every_sample_is_gathered_once_in_equally_many_steps_on_every_rank(ranks, kind):
    """Accelerate repeats or loses samples for most of these, and hangs, aborts or fails for the others."""

    def read_epoch(build, method):
        accelerator = create_accelerator(method)
        loader = accelerator.prepare(build())
        steps, gathered, computed = 0, [], []
        for batch in loader:
            steps += 1
            numbers = get_sample_numbers(batch)
            # Ranks that pad to lengths of their own have nothing that can be joined but the numbers.
            ragged = torch.is_tensor(batch) and batch.dim() == 2
            gathered += get_sample_numbers(
                accelerator.gather_for_metrics(numbers if ragged else batch)
            ).tolist()
            computed += accelerator.gather_for_metrics(numbers * 2).tolist()
        assert computed == [2 * number for number in gathered]
        assert get_length(loader) in {steps, None}
        return steps, gathered

    def read_with_each_option(build, methods):
        return [read_epoch(build, method) for method in methods]

    # Workers take long to start; the other ways differ in the main process only.
    methods = ["even", "dispatched"] if "workers" in kind else list(WAYS)
    actual = ranks.run(read_with_each_option, LOADERS[kind], [WAYS[method] for method in methods])
    assert actual == [actual[0]] * ranks.size
    for method, (_, samples) in zip(methods, actual[0], strict=True):
        if kind == "10 of 100 by weight":
            assert len(set(samples)) == len(samples) == 10, method
        else:
            assert sorted(samples) == list(COUNTS[kind]), method


@pytest.mark.parametrize("kind", ["17 in batches of 4", "a stream with a length"])
def test_padding_of_the_last_batch_is_counted(ranks, kind):
    """Accelerate trains on 24 samples instead of 17, without a message."""

    def count_samples(build):
        accelerator = create_accelerator({})
        loader = accelerator.prepare(build())
        handed = sum(len(batch) for batch in loader)
        return accelerator.reduce(torch.tensor(handed)).item(), loader.repeats

    count = -(-17 // (4 * ranks.size)) * 4 * ranks.size if ranks.size > 1 else 17
    assert ranks.run(count_samples, LOADERS[kind]) == [(count, count - 17)] * ranks.size


@pytest.mark.parametrize("kind", MAPS)
def test_without_even_batches_only_ranks_without_samples_get_padding(ranks, kind):
    """A rank without samples gets one padding sample that is not counted; other batches have their length."""

    def list_batch_sizes(build):
        accelerator = create_accelerator({"even_batches": False})
        loader = accelerator.prepare(build())
        batch_sizes = [len(get_sample_numbers(batch)) for batch in loader]
        return gather_object([batch_sizes]), loader.repeats

    lengths, repeats = ranks.run(list_batch_sizes, MAPS[kind])[0]
    count = 10 if kind == "10 of 100 by weight" else len(COUNTS[kind])
    assert sum(map(sum, lengths)) == count + repeats
    assert repeats < ranks.size or kind in {"batches of 3, 4 and 5", "a list of lists"}


def test_a_distributed_sampler_is_rejected_unless_data_is_declared_sharded(several):
    """Accelerate shards the data twice, so that half of the samples are never used."""

    def read_with_each_option():
        accelerator = create_accelerator({})
        data = range(16)
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
        with pytest.raises(ValueError, match=r'sharding twice would skip samples.*data="sharded"'):
            accelerator.prepare(loader)
        prepared = accelerator.prepare_data_loader(loader, data="sharded")
        return [n for batch in prepared for n in accelerator.gather_for_metrics(batch).tolist()]

    count = -(-16 // several.size) * several.size  # the sampler adds padding
    for result in several.run(read_with_each_option):
        assert len(result) == count
        assert set(result) == set(range(16))


@pytest.mark.parametrize("kind", ["a list", "a stream"])
def test_ranks_with_unequal_sharded_data_take_equally_many_steps(several, kind):
    def read_with_each_option(kind):
        accelerator = create_accelerator({})
        rank = accelerator.process_index
        numbers = [100 * rank + n for n in range(3 + 4 * rank)]
        data = numbers if kind == "a list" else RangeStream(len(numbers), lambda n: torch.tensor(numbers[n]))
        loader = accelerator.prepare_data_loader(DataLoader(data, 2), data="sharded")
        steps, gathered = 0, []
        for batch in loader:
            steps += 1
            gathered += accelerator.gather_for_metrics(batch).tolist()
        return steps, sorted(gathered)

    expected = [100 * rank + n for rank in range(several.size) for n in range(3 + 4 * rank)]
    assert (
        several.run(read_with_each_option, kind)
        == [(-(-len(range(3 + 4 * (several.size - 1))) // 2), expected)] * several.size
    )


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"drop_last": True}, {"shuffle": True, "drop_last": True}]
)
@pytest.mark.parametrize("method", ["even", "dispatched", "from a seed"])
def test_batches_depend_only_on_the_global_batch_size(clusters, options, method):
    """With Accelerate the order and `drop_last` depend on the number of processes."""

    def read_epochs(options, method):
        torch.manual_seed(5)
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**method))
        loader = accelerator.prepare(DataLoader(range(20), 6 // accelerator.num_processes, **options))
        return [[sorted(accelerator.gather_for_metrics(b).tolist()) for b in loader] for _ in range(2)]

    expected = clusters[1].run(read_epochs, options, WAYS[method])[0]
    for size in (2, 3):
        assert clusters[size].run(read_epochs, options, WAYS[method]) == [expected] * size


def test_the_order_from_a_data_seed_is_the_same_with_dispatch_batches(ranks):
    def read_epochs(dispatch):
        torch.manual_seed(0 if dispatch else 9)
        config = DataLoaderConfiguration(dispatch_batches=dispatch, use_seedable_sampler=True, data_seed=3)
        accelerator = Accelerator(dataloader_config=config)
        loader = accelerator.prepare(DataLoader(range(20), 4, shuffle=True))
        return [[accelerator.gather_for_metrics(b).tolist() for b in loader] for _ in range(2)]

    expected = ranks.run(read_epochs, False)
    assert ranks.run(read_epochs, True) == expected
    assert expected[0][0] != expected[0][1]


def test_reduce_mean_of_integers_returns_a_float(ranks):
    def reduce_mean():
        accelerator = Accelerator()
        return accelerator.reduce(torch.tensor([accelerator.process_index]), "mean").tolist()

    assert ranks.run(reduce_mean) == [[(ranks.size - 1) / 2]] * ranks.size


@pytest.mark.slow
def test_four_ranks_can_read_one_or_three_samples(four):
    def read_with_each_option():
        accelerator = Accelerator()
        results = []
        for data in (build_tensor_dataset(1), build_tensor_dataset(3), RangeStream(1), RangeStream(3)):
            loader = accelerator.prepare(DataLoader(data, 1))
            results.append(
                [n for b in loader for n in accelerator.gather_for_metrics(get_sample_numbers(b)).tolist()]
            )
        return results

    assert four.run(read_with_each_option) == [[[0], [0, 1, 2]] * 2] * 4


# Resuming --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["even", "dispatched", "not even"])
@pytest.mark.parametrize("kind", ["a list", "a stream"])
def test_skip_first_batches_skips_global_batches_and_the_last_gather_is_exact(ranks, kind, method):
    """Accelerate skips one batch of one rank with dispatch_batches, and pads the last gather."""

    def read_rest(kind, method):
        accelerator = create_accelerator(method)
        loader = accelerator.prepare(DataLoader(range(33) if kind == "a list" else SizedStream(33), 4))
        skipped_loader = skip_first_batches(loader, 1)
        assert len(skipped_loader) == len(loader) - 1
        return [n for batch in skipped_loader for n in accelerator.gather_for_metrics(batch).tolist()]

    assert ranks.run(read_rest, kind, WAYS[method]) == [list(range(4 * ranks.size, 33))] * ranks.size


RESUMED = {
    "default shuffle": ({}, {"shuffle": True}),
    "workers": ({}, {"shuffle": True, "num_workers": 2}),
    "a seedable sampler": ({"use_seedable_sampler": True}, {"shuffle": True}),
    "a seed": ({"data_seed": 3, "use_seedable_sampler": True}, {"shuffle": True}),
    "stateful": ({"use_stateful_dataloader": True}, {"shuffle": True}),
    "dispatched": ({"dispatch_batches": True}, {"shuffle": True}),
    "dispatched from a seed": (
        {"dispatch_batches": True, "use_seedable_sampler": True, "data_seed": 3},
        {"shuffle": True},
    ),
    "a stream": ({}, {}),
    "a dispatched stream": ({"dispatch_batches": True}, {}),
}


def interrupt_epoch(kind, epoch, state=None):
    """Return the samples from step 3 of an epoch to the end of the next, and the state before step 3."""
    method, options = RESUMED[kind]
    torch.manual_seed(5)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**method))
    data = SizedStream(20) if "stream" in kind else range(20)
    loader = accelerator.prepare(DataLoader(data, 6 // accelerator.num_processes, **options))
    if state is None:
        for _ in range(epoch):
            for _ in loader:
                pass
    else:
        torch.manual_seed(99)
        loader.load_state_dict(state)
    batches_read = []
    for _ in range(2):
        for step, batch in enumerate(loader):
            batches_read.append(sorted(accelerator.gather_for_metrics(batch).tolist()))
            if state is None and step == 1 and len(batches_read) == 2:
                state, batches_read = loader.state_dict(), []
    return batches_read, state


@pytest.mark.parametrize(
    ("kind", "epoch"),
    [
        # Workers take long to start: `data/test_position.py` and `data/test_augmentation.py` resume other epochs of theirs.
        pytest.param(kind, epoch, marks=[pytest.mark.full] * (kind == "workers" and epoch == 1))
        for kind in RESUMED
        for epoch in (0, 1)
    ],
)
def test_a_resumed_run_reads_the_rest_of_its_epoch_on_any_world_size(clusters, kind, epoch):
    """With Accelerate the order changes, epoch 0 is repeated, or an epoch has no samples."""

    def interrupt_without_warnings(kind, epoch):
        warnings.filterwarnings("ignore", "This DataLoader will create")
        return interrupt_epoch(kind, epoch)

    expected, state = clusters[2].run(interrupt_without_warnings, kind, epoch)[0]
    for size in (1, 2, 3):
        actual = clusters[size].run(lambda *a: interrupt_epoch(*a)[0], kind, epoch, state)
        if kind in {"a seed", "dispatched from a seed", "a stream", "a dispatched stream"}:
            assert actual == [expected] * size
        else:  # the next epoch is drawn from the current state of the generator
            num_remaining = 20 // 6 + 1 - 2
            assert [each[:num_remaining] for each in actual] == [expected[:num_remaining]] * size
            assert all(
                sorted(chain.from_iterable(each[num_remaining:])) == list(range(20)) for each in actual
            )


# Gradients -------------------------------------------------------------------------------


def build_samples(count):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, generator=generator), torch.arange(count)


def copy_gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def squared_loss(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


@pytest.mark.parametrize("finished", [False, True], ids=["beside a longer loop", "after its own loop"])
def test_a_short_batch_has_the_gradient_of_one_process_while_the_newest_one_is_full(ranks, finished):
    def train(finished):
        accelerator = create_accelerator(WAYS["not even"])
        x, plain, model = build_samples(4 * accelerator.num_processes - 1)[0], TwoLayerNet(), TwoLayerNet()
        model, short = accelerator.prepare(model, DataLoader(x, 4))
        full = accelerator.prepare(DataLoader(build_samples(64)[0], 4))
        batches = list(short) if finished else short
        for batch, _ in zip(batches, full, strict=False):
            accelerator.backward(squared_loss(model, batch))
        squared_loss(plain, x).backward()
        return relative_error(copy_gradients(model), copy_gradients(plain))

    assert max(ranks.run(train, finished)) <= BAR


def test_join_uneven_inputs_accepts_loops_of_unequal_length_on_the_cpu(several):
    """In Accelerate this context has no effect on the CPU, and the ranks hang."""

    def train_locally():
        accelerator = Accelerator()
        model = TwoLayerNet()
        rule = torch.optim.SGD(model.parameters(), lr=0.1)
        model, rule = accelerator.prepare(model, rule)
        inputs = build_samples(2 + 3 * accelerator.process_index)[0]
        with accelerator.join_uneven_inputs([model]):
            for each in inputs:
                accelerator.backward(squared_loss(model, each[None]))
                rule.step()
                rule.zero_grad()
        accelerator.wait_for_everyone()
        # A rank that finishes early has the same weights as the others.
        return [v.tolist() for v in model.state_dict().values()]

    actual = several.run(train_locally)
    assert actual == [actual[0]] * several.size


# The learning rate -----------------------------------------------------------------------


@pytest.mark.parametrize("options", ["a global batch", "left to the script", "one step a call"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_scheduler_follows_optimizer_steps_on_any_number_of_processes(ranks, options, accumulation):
    """Test a global batch size, and schedulers that the script steps itself."""

    def collect_rates(options, accumulation):
        config = DataLoaderConfiguration(split_batches=options == "a global batch")
        accelerator = Accelerator(
            dataloader_config=config,
            gradient_accumulation_steps=accumulation,
            step_scheduler_with_optimizer=options != "left to the script",
        )
        model = TwoLayerNet()
        rule = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = LinearLR(rule, start_factor=1.0, end_factor=0.5, total_iters=8)
        size = 12 if options == "a global batch" else 12 // accelerator.num_processes
        loader = DataLoader(build_samples(12 * 4 * accumulation)[0], size)
        if options == "one step a call":
            model, rule, loader = accelerator.prepare(model, rule, loader)  # the schedule stays the script's
        else:
            model, rule, loader, schedule = accelerator.prepare(model, rule, loader, schedule)
        rates = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(squared_loss(model, batch))
                rule.step()
                if options == "a global batch" or accelerator.sync_gradients:
                    schedule.step()
                rule.zero_grad()
            if accelerator.sync_gradients:
                rates.append(rule.param_groups[0]["lr"])
        return rates

    expected = [pytest.approx(1 - 0.5 * step / 8) for step in (1, 2, 3, 4)]
    assert ranks.run(collect_rates, options, accumulation) == [expected] * ranks.size
