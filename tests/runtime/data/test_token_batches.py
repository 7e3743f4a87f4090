"""Batches by a budget of tokens: every sample once, in batches that do not depend on the ranks, with gradients weighted by tokens."""

from __future__ import annotations

import random
import re
from itertools import chain
from statistics import fmean

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.training.data_sets import PythonRandomSampler, RangeStream, VariableBatchSampler
from support.training.numerics import relative_error
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, SubsetRandomSampler

from accel_runtime import Accelerator, DataLoaderConfiguration
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.single import Single
from accel_runtime.data.map_style import EpochOrder, EpochStart
from accel_runtime.data.sharding import BatchSharding, batch_slices
from accel_runtime.data.token_batches import TokenBatchSampler, find_lengths, plan_epoch
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.options import TokenBudget

BAR = 1e-9
"""Relative error in float64."""
COUNT = 53


class Texts(Dataset):
    """Samples of different lengths; a sample is its index and rows of numbers, as many as its length."""

    def __init__(self, count=COUNT, longest=24):
        generator = random.Random(5)
        self.lengths = [min(longest, 1 + int(generator.expovariate(0.2))) for _ in range(count)]
        self.num_read = 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.num_read += 1
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(self.lengths[index], 3, generator=generator, dtype=torch.float64)


class Table(Dataset):
    """A dataset with columns, as `datasets` has them."""

    def __init__(self, **columns):
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self):
        return len(self.columns[self.column_names[0]])

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {n: c[key] for n, c in self.columns.items()}


def count_rows(sample):
    return len(sample[1])


def collate(samples):
    """Return the indices, the rows of all samples padded to the longest one, and which rows are no padding."""
    indices, rows = zip(*samples, strict=True)
    lengths = torch.tensor([len(each) for each in rows])
    padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return torch.tensor(indices), padded, torch.arange(padded.shape[1])[None] < lengths[:, None]


def build_accelerator(max_tokens=40, length=count_rows, window=20, steps=1, **options):
    config = DataLoaderConfiguration(max_tokens=max_tokens, length=length, window=window, **options)
    return Accelerator(dataloader_config=config, gradient_accumulation_steps=steps)


def build_loader(dataset=None, **options):
    options = {"shuffle": True} | options
    return DataLoader(Texts() if dataset is None else dataset, collate_fn=collate, **options)


# Packing -----------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=120)
BUDGETS = st.builds(
    TokenBudget, st.integers(30, 200), st.booleans(), st.booleans(), st.sampled_from([1, 2, 7, 50, 4096])
)


@given(LENGTHS, BUDGETS, st.none() | st.integers(0, 5))
@example([0, 0], TokenBudget(30), None)
def test_every_sample_is_in_one_batch_within_the_budget(lengths, budget, seed):
    plan = plan_epoch(torch.arange(len(lengths)).flip(0), torch.tensor(lengths), budget, seed)
    batches = list(plan.iterate())
    assert sorted(chain.from_iterable(batches)) == list(range(len(lengths)))
    costs = [budget.count_positions([max(1, lengths[at]) for at in batch]) for batch in batches]
    assert all(batches)
    assert max(costs) <= budget.max_tokens
    assert plan.positions == sum(costs)


@given(LENGTHS, BUDGETS)
def test_samples_stay_within_the_windows_of_the_order(lengths, budget):
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1))
    plan = plan_epoch(order, torch.tensor(lengths), budget, 3)
    count, num_windows = len(order), max(1, round(len(order) / budget.window))
    for number in range(num_windows):
        part = slice(number * count // num_windows, (number + 1) * count // num_windows)
        assert sorted(plan.samples[part].tolist()) == sorted(order[part].tolist())


@pytest.mark.parametrize("padded", [True, False])
def test_balanced_batches_have_nearly_equal_costs(padded):
    generator = random.Random(2)
    lengths = torch.tensor([min(400, int(generator.lognormvariate(4, 0.8)) + 1) for _ in range(4000)])
    costs = {}
    for balance in (True, False):
        budget = TokenBudget(4096, balance, padded, 1000)
        plan = plan_epoch(torch.arange(4000), lengths, budget, 1)
        costs[balance] = [budget.count_positions(lengths[batch].tolist()) for batch in plan.iterate()]
    for world_size in (2, 4, 8):
        assert measure_waits(costs[True], world_size) < 0.015
        assert measure_waits(costs[True], world_size) < measure_waits(costs[False], world_size)
    assert len(costs[True]) <= len(costs[False])


def measure_waits(costs, world_size):
    """Return the share of time in which ranks wait for the largest batch of their step, without the last step."""
    steps = [costs[at : at + world_size] for at in range(0, len(costs) - world_size + 1, world_size)]
    return 1 - sum(map(fmean, steps)) / sum(map(max, steps))


def test_batches_of_a_sequential_sampler_are_in_order_and_of_another_one_shuffled():
    lengths = torch.full((64,), 4)
    budget = TokenBudget(8, window=16)
    ordered = TokenBatchSampler(SequentialSampler(range(64)), lengths, budget, 0)
    assert [min(batch) for batch in ordered] == list(range(0, 64, 2))
    shuffled = TokenBatchSampler(SubsetRandomSampler(range(64)), lengths, budget, 0)
    first, again = list(shuffled), list(shuffled)
    shuffled.set_epoch(1)
    assert first == again != list(shuffled)


# Steps of ranks ----------------------------------------------------------------------------


def list_steps(world_size, lengths, budget, offset):
    """Return the steps as pairs of samples and step info, and the number of steps of the epoch."""
    sampler = DataLoader(range(len(lengths)), shuffle=True).sampler
    loader = DataLoader(
        range(len(lengths)),
        batch_sampler=TokenBatchSampler(sampler, torch.tensor(lengths), budget, 7),
    )
    backend = Single(Topology(), DeviceRuntime(torch.device("cpu")), is_counted=False)
    order = EpochOrder(loader, BatchSharding(0, world_size, None, pad_last=False), backend, 7)
    return list(order.iterate_steps(EpochStart(offset, epoch=2, seed=7))), order.num_steps(2)


@given(LENGTHS, BUDGETS, st.integers(1, 5), st.data())
def test_steps_have_each_sample_once_on_any_world_size_from_any_offset(lengths, budget, world_size, data):
    whole, _ = list_steps(1, lengths, budget, 0)
    batches = [samples for samples, _ in whole]
    offset = data.draw(st.integers(0, len(batches)))
    steps, num_steps = list_steps(world_size, lengths, budget, offset)
    read = []
    for samples, info in steps:
        assert len(info.num_valid) == len(info.tokens) == world_size
        for part, valid, tokens in zip(batch_slices(info), info.num_valid, info.tokens, strict=True):
            own = samples[part][:valid]
            read += [own] if own else []
            assert tokens == sum(lengths[at] for at in own)
            assert len(samples[part]) == max(1, valid)
    assert read == batches[offset:]
    assert len(steps) == -(-(len(batches) - offset) // world_size)
    assert num_steps == -(-len(batches) // world_size)
    assert [info.is_last for _, info in steps] == [at + 1 == len(steps) for at in range(len(steps))]


# Real ranks --------------------------------------------------------------------------------


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, rows):
        return self.layers(rows)


def compute_loss(model, rows, mask):
    """Return the mean over the rows that are no padding."""
    errors = (model(rows) - rows.sum(-1, keepdim=True).sin()).square().squeeze(-1)
    return errors[mask].mean()


def train(stop, state, steps, weight=False, sampler=None):
    """Train for two epochs, or until `stop` batches.

    Returns the parameters at the end of each step with the indices of its samples, and the state at the end.
    """
    torch.manual_seed(3)
    random.seed(3)
    accelerator = build_accelerator(steps=steps)
    model = Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    script = build_loader() if sampler is None else build_loader(shuffle=False, sampler=sampler)
    model, optimizer, loader = accelerator.prepare(model, optimizer, script)
    if state is not None:
        torch.manual_seed(4)  # only the state has the seed of the order
        accelerator.unwrap_model(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    records, samples, count = [], [], 0
    while loader.epoch < 2 and count != stop:
        for indices, rows, mask in loader:
            count += 1
            with accelerator.accumulate(model):
                loss = compute_loss(model, rows, mask)
                accelerator.backward(loss, **({"weight": mask.sum()} if weight else {}))
                optimizer.step()
                optimizer.zero_grad()
            samples += accelerator.gather_for_metrics(indices).tolist()
            if accelerator.sync_gradients:
                records.append((flatten(model), samples))
                samples = []
            if count == stop:
                state = loader.state_dict()
                break
    unwrapped = accelerator.unwrap_model(model).state_dict()
    return records, {"model": unwrapped, "optimizer": optimizer.state_dict(), "loader": state}


def flatten(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def check_training(records):
    """Compare the steps with those of one process that computes on all samples of a step at once."""
    dataset, model = Texts(), Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameters, samples in records:
        _, rows, mask = collate([dataset[index] for index in samples])
        optimizer.zero_grad()
        compute_loss(model, rows, mask).backward()
        optimizer.step()
        assert relative_error(parameters, flatten(model)) <= BAR


def list_samples(records):
    return [*chain.from_iterable(samples for _, samples in records)]


@pytest.mark.parametrize("weight", [False, True], ids=["implicit", "explicit"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_training_equals_one_process_with_the_mean_over_tokens(ranks, accumulated, weight):
    for records, _ in ranks.run(train, None, None, accumulated, weight):
        assert sorted(list_samples(records)) == sorted([*range(COUNT)] * 2)
        check_training(records)


@pytest.mark.parametrize(
    "sampler", [None, PythonRandomSampler(COUNT)], ids=["shuffled", "a sampler of Python"]
)
@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1), pytest.param(3, 2, marks=pytest.mark.full)])
def test_a_training_resumes_on_another_world_size(clusters, first, second, sampler):
    whole, _ = clusters[1].run(train, None, None, 1, False, sampler)[0]
    stop = 2
    before, state = clusters[first].run(train, stop, None, 1, False, sampler)[0]
    for after, _ in clusters[second].run(train, None, state, 1, False, sampler):
        assert list_samples(before) + list_samples(after) == list_samples(whole)
        check_training(before + after)


def read_batches(num_workers):
    """Return the batches of an epoch that prepared workers read, and the number of steps before and after it."""
    torch.manual_seed(3)
    loader = build_accelerator().prepare(build_loader(num_workers=num_workers))
    steps = len(loader)
    batches = [indices.tolist() for indices, *_ in loader]
    return batches, steps, len(loader)


def test_the_number_of_steps_is_known_before_each_epoch(several):
    results = several.run(read_batches, 1)
    for batches, steps, following in results:
        assert len(batches) == steps
        assert abs(following - steps) <= 1  # that of the next epoch
    expected = build_plan(seed=3)
    assert results[0][1] == -(-len(expected) // several.size)
    assert [batches[0] for batches, *_ in results] == expected[: several.size]


def build_plan(seed):
    torch.manual_seed(seed)
    loader = build_accelerator().prepare(build_loader())
    return [indices.tolist() for indices, *_ in loader]


def measure_on_rank():
    dataset = Texts()
    state = torch.get_rng_state()
    loader = build_accelerator(length=draw_and_count).prepare(build_loader(dataset))
    num_read = dataset.num_read
    build_accelerator(length=draw_and_count).prepare(build_loader(dataset))
    is_same = torch.equal(state, torch.get_rng_state())
    return loader.token_batches.lengths.tolist(), num_read, dataset.num_read, is_same


def draw_and_count(sample):
    torch.rand(1)
    return count_rows(sample)


def test_ranks_share_the_measurement_of_lengths_and_keep_it(ranks):
    for rank, (lengths, num_read, later, is_same) in enumerate(ranks.run(measure_on_rank)):
        assert lengths == Texts().lengths
        assert num_read == later == len(range(rank, COUNT, ranks.size))
        assert is_same


class BadTexts(Texts):
    """Sample 4 cannot be measured."""

    def __getitem__(self, index):
        if index == 4:
            raise ValueError("sample 4 is damaged")
        return super().__getitem__(index)


def prepare_bad():
    with pytest.raises(ValueError) as raised:
        build_accelerator().prepare(build_loader(BadTexts()))
    return str(raised.value)


def test_all_ranks_raise_the_error_of_a_measurement(clusters):
    assert clusters[3].run(prepare_bad) == [
        (
            message
            := "Cannot measure the samples: length() failed for sample 4: ValueError: sample 4 is damaged. See the error of that rank."
        ),
        "sample 4 is damaged",
        message,
    ]


def prepare_different():
    accelerator = build_accelerator()
    lengths = [3, 3 + accelerator.process_index]
    with pytest.raises(ValueError) as raised:
        build_accelerator(length=lengths).prepare(DataLoader(range(2)))
    return str(raised.value)


def test_ranks_with_different_lengths_are_refused(clusters):
    (message,) = {*clusters[3].run(prepare_different)}
    assert message.startswith("Cannot build batches by length: the ranks have different lengths.")


# Lengths and options -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "length"),
    [
        (range(3), [2, 3, 0]),
        (range(3), torch.tensor([2, 3, 0])),
        (Table(size=[2, 3, 0]), "size"),
        (Table(input_ids=[[5, 6], [7, 8, 9], []]), "input_ids"),
        (Table(size=torch.tensor([2, 3, 0])), "size"),
        ([[5, 6], [7, 8, 9], []], len),
        (Texts(3), lambda sample: torch.tensor([2, 3, 0][sample[0]])),
    ],
)
def test_lengths_are_numbers_a_column_or_measured(dataset, length):
    single = Single(Topology(), DeviceRuntime(torch.device("cpu")), is_counted=False)
    length = DataLoaderConfiguration(max_tokens=1, length=length).length
    assert find_lengths(dataset, length, single).tolist() == [2, 3, 0]


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: DataLoader(RangeStream(3)), {}, "its dataset is a stream"),
        (lambda: build_loader(batch_size=4), {}, "batch_size=4 sets its batches"),
        (lambda: build_loader(batch_size=None), {}, "batch_size=None yields single samples"),
        (lambda: build_loader(drop_last=True), {}, "drop_last=True drops samples"),
        (
            lambda: build_loader(shuffle=False, batch_sampler=VariableBatchSampler([[0], [1, 2]])),
            {},
            "it has a batch sampler of its own, a VariableBatchSampler",
        ),
        (build_loader, {"split_batches": True}, "split_batches=True splits a global batch"),
        (build_loader, {"dispatch_batches": True}, "only the first process reads"),
        (build_loader, {"max_tokens": 5}, "has the length"),
        (build_loader, {"length": None}, "the lengths of the samples are unknown"),
        (build_loader, {"length": [1, 2]}, "there are 2 lengths, and the Texts has 53 samples"),
        (build_loader, {"length": "size"}, "the Texts has no column 'size', it has no columns"),
        (lambda: DataLoader(Table(ids=[[1]])), {"length": "size"}, "its columns are ids"),
        (build_loader, {"length": lambda _: 1.5}, "Invalid length 1.5"),
        (build_loader, {"length": [-1] * COUNT}, "Invalid length -1"),
        (build_loader, {"max_tokens": None}, "with window: without max_tokens"),
        (lambda: DataLoader(RangeStream(3)), {"max_tokens": None, "window": 4096}, "its dataset is a stream"),
    ],
)
def test_what_has_no_batches_by_length_is_refused_with_what_to_do(build, options, message):
    with pytest.raises(ValueError) as raised:
        build_accelerator(**options).prepare(build())
    assert message in str(raised.value)
    assert str(raised.value).endswith(".")


def test_sharded_data_is_refused():
    with pytest.raises(ValueError, match=r"each process has its own\. Leave out data"):
        build_accelerator().prepare_data_loader(build_loader(), data="sharded")


def test_a_number_of_samples_in_a_step_is_refused():
    accelerator = Accelerator(
        global_batch_size=4, dataloader_config=DataLoaderConfiguration(max_tokens=64, length=[1] * COUNT)
    )
    with pytest.raises(ValueError, match=r"global_batch_size counts samples.* Leave out global_batch_size\."):
        accelerator.prepare(build_loader())


@pytest.mark.parametrize(
    "options", [{"max_tokens": 0}, {"max_tokens": 1.5}, {"window": None}, {"length": 7}, {"balance": "no"}]
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ValueError, match=r"Invalid DataLoaderConfiguration\.\w+ .*: expected"):
        DataLoaderConfiguration(**options)


def test_a_sampler_whose_order_is_unknown_has_no_length_before_its_epoch():
    loader = build_accelerator().prepare(build_loader(shuffle=False, sampler=PythonRandomSampler(COUNT)))
    with pytest.raises(TypeError, match="a PythonRandomSampler draws the order when an epoch begins"):
        len(loader)
    iterator = iter(loader)
    next(iterator)
    assert len(loader) == 1 + len(list(iterator))


def test_a_loader_with_batches_of_its_own_is_prepared_with_another_configuration():
    accelerator = build_accelerator()
    training = accelerator.prepare(build_loader())
    accelerator.dataloader_config = DataLoaderConfiguration()
    evaluation = accelerator.prepare(build_loader(batch_size=4))
    assert evaluation.total_batch_size == 4
    facts = accelerator.describe().loaders
    pattern = r"batches of different sizes; up to 40 tokens each, \d+\.\d% padding"
    assert re.search(pattern, str(accelerator.describe()))
    assert len(training) == facts[0].steps


@pytest.mark.parametrize("shuffle", [False, True])
def test_lengths_alone_show_the_padding_of_batches_of_the_script(shuffle):
    accelerator = build_accelerator(max_tokens=None, window=4096, length=[1, 3, 4, 4])
    loader = accelerator.prepare(DataLoader(range(4), batch_size=2, shuffle=shuffle))
    assert "; about " in loader.end
    assert loader.end in str(accelerator.describe())
    if not shuffle:
        assert "about 14.3% padding" in loader.end


def test_a_resume_with_other_lengths_is_a_warning(caplog):
    dataset = Texts()
    loader = build_accelerator(length=dataset.lengths).prepare(build_loader())
    next(iter(loader))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    other = build_accelerator(length=[*reversed(dataset.lengths)]).prepare(build_loader())
    other.load_state_dict(state)
    next(iter(other))
    assert "cannot be continued exactly: the order or the lengths" in caplog.text
    caplog.clear()
    other = build_accelerator(max_tokens=50).prepare(build_loader())
    other.load_state_dict(state)
    assert "the order is drawn by a RandomSampler in batches of 50 tokens" in caplog.text


def test_a_loss_of_an_earlier_batch_has_the_weight_of_that_batch():
    """A script that reads one batch ahead, on one process."""
    accelerator = build_accelerator(steps=2)
    model, loader = accelerator.prepare(Rows(), build_loader())
    batches, plain = iter(loader), Rows()
    first, second = next(batches), next(batches)
    for batch in (first, second):
        with accelerator.accumulate(model):
            accelerator.backward(compute_loss(model, *batch[1:]))
        next(batches)
    dataset = Texts()
    _, rows, mask = collate([dataset[index] for index in [*first[0].tolist(), *second[0].tolist()]])
    compute_loss(plain, rows, mask).backward()
    actual, expected = (torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (model, plain))
    assert relative_error(actual, expected) <= BAR
