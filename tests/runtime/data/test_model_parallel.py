"""Data of model-parallel ranks: they receive equal batches, and every sample is read exactly once."""

from __future__ import annotations

import random
from itertools import chain, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases.pairs import pairwise_params
from support.runs import read_epochs
from support.runs.read_epochs import check_steps, read_steps, split_batches
from support.training.data_sets import (
    BufferedShuffleStream,
    MappedDataset,
    RangeStream,
    ShuffledStream,
    StatefulStream,
    WorkerSplitStream,
)
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accel_runtime import Accelerator, DataLoaderConfiguration, set_seed
from accel_runtime.accelerator import accelerator as facade
from accel_runtime.backends.single import Single
from accel_runtime.data.map_style import MapStyleSource
from accel_runtime.data.presharded import PreshardedSource
from accel_runtime.data.sharding import sharding_of_loader
from accel_runtime.environment.topology import RankGrid, Topology

pytestmark = pytest.mark.slow

MODEL_PARALLEL_SIZE = 2
KINDS = {"a stream": RangeStream, "a map": range}


def set_grid(backend, model_parallel_size=MODEL_PARALLEL_SIZE):
    """Set a grid with this number of model-parallel ranks."""
    topology = backend.topology
    backend.grid = RankGrid(
        (("data", topology.world_size // model_parallel_size), ("tensor", model_parallel_size))
    )
    backend.data_rank = backend.grid.data_rank(topology.rank)


def build_backend(model_parallel_size=MODEL_PARALLEL_SIZE):
    """Return a backend whose data-parallel size is smaller than its world size."""
    backend = read_epochs.get_backend()
    set_grid(backend, model_parallel_size)
    return backend


def build_accelerator(model_parallel_size=MODEL_PARALLEL_SIZE, **options):
    """Return an Accelerator with model-parallel ranks."""
    real = facade.connect

    def connect(*args):
        backend = real(*args)
        set_grid(backend, model_parallel_size)
        return backend

    facade.connect = connect
    try:
        return Accelerator(**options)
    finally:
        facade.connect = real


def ordered(loader, backend, *, split=False, even=True):
    """Return the source of a map-style dataset."""
    return MapStyleSource(
        loader, backend, sharding_of_loader(loader, backend.data_rank, split=split, pad_last=even)
    )


def select_data_ranks(results, model_parallel_size=MODEL_PARALLEL_SIZE):
    """Return the steps by data rank; require that model-parallel ranks have equal steps."""
    for rank, result in enumerate(results):
        first = results[rank - rank % model_parallel_size]
        assert [(step.samples, step.step_info, read_epochs.to_plain(step.offset)) for step in result] == [
            (step.samples, step.step_info, read_epochs.to_plain(step.offset)) for step in first
        ]
    return results[::model_parallel_size]


def read_all_variants(kind, reader, model_parallel_size, even):
    """Return the epochs of many loaders on one rank."""
    steps = {}
    backend = build_backend(model_parallel_size)
    read = {
        "each": read_epochs.build_iterable_source if kind == "a stream" else ordered,
        "the first": read_epochs.build_dispatched_source,
    }[reader]
    for count, size, drop, split in product((0, 1, 2, 3, 9, 16), (1, 2, 4), (False, True), (False, True)):
        if split and size % backend.data_rank.world_size:
            continue
        loader = DataLoader(KINDS[kind](count), batch_size=size, drop_last=drop)
        world = 1 if split else backend.data_rank.world_size
        steps[count, size * world, drop, split] = read_steps(read(loader, backend, split=split, even=even))
    return steps


# Reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reader", "even", "model_parallel_size"),
    pairwise_params(
        {
            "kind": list(KINDS),
            "reader": ["each", "the first"],
            "even": [True, False],
            "model_parallel_size": [2, 4],
        }
    ),
)
def test_model_parallel_ranks_receive_equal_batches_and_every_sample_is_read_once(
    four, kind, reader, even, model_parallel_size
):
    results = four.run(read_all_variants, kind, reader, model_parallel_size, even)
    for key in results[0]:
        count, size, drop, _ = key
        steps_by_data_rank = select_data_ranks([steps[key] for steps in results], model_parallel_size)
        assert check_steps(steps_by_data_rank) == split_batches(range(count), size, drop_last=drop)


@pytest.mark.parametrize(
    ("kind", "workers", "dispatch"),
    pairwise_params(
        {
            "kind": [
                ShuffledStream,
                WorkerSplitStream,
                StatefulStream,
                BufferedShuffleStream,
                range,
            ],
            "workers": [0, 2],
            "dispatch": [False, True],
        }
    ),
)
def test_model_parallel_ranks_with_different_seeds_read_equal_batches(four, kind, workers, dispatch):
    def read_epochs_of_rank(kind, workers, dispatch):
        accelerator = build_accelerator(dispatch_batches=dispatch)
        torch.manual_seed(accelerator.process_index)
        random.seed(accelerator.process_index)
        loader = accelerator.prepare(
            DataLoader(kind(17), batch_size=2, num_workers=workers, shuffle=kind is range)
        )
        epochs = [
            [(read_epochs.to_ids(b), accelerator.gather_for_metrics(b).tolist()) for b in loader]
            for _ in range(2)
        ]
        return epochs, torch.rand(1).item(), random.random()

    results = four.run(read_epochs_of_rank, kind, workers, dispatch)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert results[0][1:] != results[2][1:], "parts draw numbers of their own"
    for epoch in (0, 1):
        every = [[gathered for _, gathered in result[0][epoch]] for result in results]
        assert every == [every[0]] * 4
        assert sorted(chain.from_iterable(every[0])) == list(range(17))


def add_noise(index):
    """Return a sample with random numbers of Python and torch."""
    return index + random.random() + torch.rand(()).item()


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_is_equal_on_model_parallel_ranks(four, workers):
    def read_epoch(workers):
        accelerator = build_accelerator()
        random.seed(accelerator.process_index)
        torch.manual_seed(accelerator.process_index)
        loader = accelerator.prepare(
            DataLoader(MappedDataset(11, add_noise), batch_size=2, shuffle=True, num_workers=workers)
        )
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    results = four.run(read_epoch, workers)
    assert results[0] == results[1] != results[2] == results[3]


def build_presharded_source(model_parallel_size, counts, wrong=None):
    """Return a source of data that the script has sharded by data rank."""
    set_seed(0)  # a test before may have left each rank in another state
    backend = build_backend(model_parallel_size)
    rank = backend.data_rank.rank if wrong is None else backend.topology.rank
    data = [rank * 100 + number for number in range(counts[rank])]
    alone = Single(Topology(), torch.device("cpu"), is_counted=False)
    loader = DataLoader(data, batch_size=2)
    return PreshardedSource(ordered(loader, alone), loader, backend)


@pytest.mark.parametrize("counts", [(4, 4), (5, 2), (0, 3), (1, 6)])
def test_data_sharded_by_data_rank_are_read_once(four, counts):
    steps = select_data_ranks(
        four.run(lambda counts: read_steps(build_presharded_source(MODEL_PARALLEL_SIZE, counts)), counts)
    )
    assert sorted(chain.from_iterable(check_steps(steps))) == sorted(
        rank * 100 + number for rank in (0, 1) for number in range(counts[rank])
    )


@pytest.mark.parametrize("counts", [(4, 4, 4, 4), (4, 2, 4, 4)])
def test_data_sharded_by_process_are_rejected(four, counts):
    def error(counts):
        with pytest.raises(RuntimeError, match=r"by accelerator\.data_parallel_rank") as caught:
            read_steps(build_presharded_source(MODEL_PARALLEL_SIZE, counts, wrong=True))
        return str(caught.value)

    four.run(error, counts)


def test_a_sampler_that_shards_by_process_is_rejected(four):
    def prepared(by_part):
        accelerator = build_accelerator()
        data_rank_and_size = accelerator.data_parallel_rank, accelerator.data_parallel_size
        rank, count = (
            data_rank_and_size if by_part else (accelerator.process_index, accelerator.num_processes)
        )
        data = list(range(8))
        sampler = DistributedSampler(data, rank=rank, num_replicas=count, shuffle=False)
        loader = accelerator.prepare_data_loader(
            DataLoader(data, batch_size=2, sampler=sampler), data="sharded"
        )
        return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]

    assert four.run(prepared, True) == [[[0, 2, 1, 3], [4, 6, 5, 7]]] * 4

    def refused(prepared):
        with pytest.raises(ValueError, match=r"rank=accelerator\.data_parallel_rank"):
            prepared(by_part=False)

    four.run(refused, prepared)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(0, 40),
    size=st.integers(1, 5),
    drop=st.booleans(),
    even=st.booleans(),
    stop=st.integers(0, 6),
    stream=st.booleans(),
    shuffled=st.booleans(),
)
def test_an_offset_is_valid_for_any_number_of_data_ranks(  # noqa: PLR0913, PLR0917
    four, pair, count, size, drop, even, stop, stream, shuffled
):
    """An epoch of four data ranks continues on two data ranks, with and without model-parallel ranks."""

    def read_part(model_parallel_size, size, start, stop):
        backend = build_backend(model_parallel_size)
        torch.manual_seed(5)
        data = RangeStream(count) if stream else range(count)
        # torch refuses to shuffle an empty dataset.
        shuffle = None if stream else shuffled and count > 0
        loader = DataLoader(data, batch_size=size, drop_last=drop, shuffle=shuffle)
        read = read_epochs.build_iterable_source if stream else ordered
        return read_steps(read(loader, backend, even=even), start, stop)

    batches_before = check_complete_or_stopped(four.run(read_part, 1, size, None, stop), stop)
    steps_before = four.run(read_part, 1, size, None, stop)[0]
    offset = steps_before[-1].offset if steps_before else None
    remaining = check_steps(select_data_ranks(four.run(read_part, 2, 2 * size, offset, None)))
    plain_rest = check_steps(pair.run(read_part, 1, 2 * size, offset, None))
    all_batches = check_steps(four.run(read_part, 1, size, None, None))
    assert remaining == plain_rest
    if not steps_before or not steps_before[-1].step_info.is_last:
        assert batches_before + remaining == all_batches
    else:
        assert remaining == []


def check_complete_or_stopped(steps_by_rank, stop):
    """Return the global batches of epochs that may have ended early."""
    steps = zip(*steps_by_rank, strict=True)
    return [
        list(chain.from_iterable(s.samples[: s.step_info.num_valid[r]] for r, s in enumerate(step)))
        for step in steps
    ]


# Gathering -------------------------------------------------------------------------------


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("model_parallel_size", [2, 4])
def test_results_of_any_type_are_gathered_once_per_sample(four, model_parallel_size, even):
    def gathered(model_parallel_size, even):
        accelerator = build_accelerator(
            model_parallel_size, dataloader_config=DataLoaderConfiguration(even_batches=even)
        )
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(11)), batch_size=2))
        gathered_values = {"rows": [], "twice": [], "texts": [], "lists": [], "losses": []}
        for (batch,) in loader:
            gathered_values["rows"] += accelerator.gather_for_metrics(batch).tolist()
            gathered_values["twice"] += accelerator.gather_for_metrics({"x": batch.repeat_interleave(2)})[
                "x"
            ].tolist()
            gathered_values["texts"] += accelerator.gather_for_metrics([f"no {n}" for n in batch.tolist()])
            gathered_values["lists"] += accelerator.gather_for_metrics(
                list(batch[:, None].unbind()), use_gather_object=True
            )
            loss = accelerator.gather_for_metrics(batch.float().mean())
            gathered_values["losses"].append(1 if not loss.dim() else len(loss))
        assert accelerator.gather(torch.tensor(accelerator.process_index)).tolist() == [0, 1, 2, 3]
        gathered_values["lists"] = [int(item) for item in gathered_values["lists"]]
        return gathered_values

    results = four.run(gathered, model_parallel_size, even)
    assert results == [results[0]] * 4
    assert results[0]["rows"] == results[0]["lists"] == list(range(11))
    assert results[0]["twice"] == [n for n in range(11) for _ in (0, 1)]
    assert results[0]["texts"] == [f"no {n}" for n in range(11)]
    assert set(results[0]["losses"]) == {4 // model_parallel_size}


def test_rows_collected_over_a_loop_are_gathered_without_padding(four):
    def gathered():
        accelerator = build_accelerator()
        loader = accelerator.prepare(DataLoader(range(11), batch_size=2))
        return accelerator.gather_for_metrics(torch.cat([batch + 0 for batch in loader])).tolist()

    assert four.run(gathered) == [list(range(11))] * 4


@pytest.mark.parametrize("apply_padding", [False, True])
def test_split_between_processes_splits_between_data_ranks(four, apply_padding):
    def split_range(apply_padding):
        accelerator = build_accelerator()
        with accelerator.split_between_processes(list("abc"), apply_padding=apply_padding) as items:
            return items

    last_batch = ["c", "c"] if apply_padding else ["c"]
    assert four.run(split_range, apply_padding) == [["a", "b"]] * 2 + [last_batch] * 2


# Training --------------------------------------------------------------------------------


def compute_reference(even_sizes):
    """Return the parameters of one process that trains on the global batches."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    data = torch.randn(11, 3)
    weights = torch.arange(1.0, 12.0)
    for at in range(0, 11, 8):
        rows, sample_weights = data[at : at + 8], weights[at : at + 8]
        loss = model(rows).square().squeeze(1)
        loss = (
            (loss * sample_weights).sum() / sample_weights.sum() if even_sizes == "weights" else loss.mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["weights", "uneven tails"])
@pytest.mark.parametrize("steps", [1, 2])
def test_model_parallel_gradients_equal_those_of_one_process(four, kind, steps):
    """Model-parallel ranks add the same factor to every sum of weights, which cancels."""

    def trained(kind, steps):
        config = DataLoaderConfiguration(even_batches=False)
        accelerator = build_accelerator(dataloader_config=config, gradient_accumulation_steps=steps)
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(11, 3), torch.arange(1.0, 12.0))
        loader = DataLoader(data, batch_size=4 // steps)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for rows, weights in loader:
            with accelerator.accumulate(model):
                losses = model(rows).square().squeeze(1)
                if kind == "weights":
                    accelerator.backward((losses * weights).sum() / weights.sum(), weight=weights.sum())
                else:
                    accelerator.backward(losses.mean(), weight=len(rows) if steps > 1 else None)
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for gradients in four.run(trained, kind, steps):
        for actual, expected in zip(gradients, compute_reference(kind), strict=True):
            torch.testing.assert_close(actual, expected)


def test_a_scheduler_advances_by_the_number_of_data_ranks(four):
    def rate():
        accelerator = build_accelerator()
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        return scheduler.get_last_lr()

    assert four.run(rate) == [[0.25]] * 4


# Random numbers --------------------------------------------------------------------------


def test_device_specific_seeds_are_equal_on_model_parallel_ranks(four):
    def draw():
        build_accelerator()
        set_seed(3, device_specific=True)
        return torch.rand(1).item(), random.random()

    first, second, third, fourth = four.run(draw)
    assert first == second != third == fourth


def test_a_seed_before_the_accelerator_uses_the_data_rank_of_the_settings(four, monkeypatch):
    def draw():
        import os

        from accel_runtime.backends import set_current_backend

        set_current_backend(None)
        os.environ |= {"ACCEL_PARALLEL_TP": "2", "ACCEL_PARALLEL_DP_REPLICATE": "2"}
        try:
            set_seed(3, device_specific=True)
        finally:
            del os.environ["ACCEL_PARALLEL_TP"], os.environ["ACCEL_PARALLEL_DP_REPLICATE"]
        return torch.rand(1).item()

    first, second, third, fourth = four.run(draw)
    assert first == second != third == fourth


def test_an_accelerator_synchronizes_the_generators_of_model_parallel_ranks(four):
    def draw():
        rank = read_epochs.get_backend().topology.rank
        random.seed(rank)
        torch.manual_seed(rank)
        before = random.getstate()
        accelerator = build_accelerator()
        is_unchanged = random.getstate() == before
        return is_unchanged, torch.rand(1).item(), random.random(), accelerator.process_index

    results = four.run(draw)
    assert [result[0] for result in results] == [True, False, True, False], (
        "the first of each keeps what it has"
    )
    assert results[0][1:3] == results[1][1:3] != results[2][1:3] == results[3][1:3]


# Checkpoints and description -------------------------------------------------------------


@pytest.mark.parametrize("data", ["global", "sharded"])
def test_a_checkpoint_resumes_with_another_number_of_model_parallel_ranks(four, pair, tmp_path, data):
    """From two data ranks of two ranks each to two of one rank each; a global order also to four."""

    def run_rank(model_parallel_size, size, folder, data, *, saves):
        accelerator = build_accelerator(model_parallel_size, project_dir=folder)
        part = (
            range(100)
            if data == "global"
            else range(accelerator.data_parallel_rank * 100, accelerator.data_parallel_rank * 100 + 7)
        )
        loader = accelerator.prepare_data_loader(DataLoader(part, batch_size=size, shuffle=True), data=data)
        if saves:
            torch.manual_seed(3 + accelerator.data_parallel_rank)
        else:
            accelerator.resume(f"{folder}/kept")
        samples = []
        for batch in loader:
            samples.append(accelerator.gather_for_metrics(batch).tolist())
            if saves and len(samples) == 2:
                accelerator.save_state(f"{folder}/kept")
        return samples

    before_save = four.run(lambda f, *a: f(*a, saves=True), run_rank, 2, 2, str(tmp_path), data)
    assert before_save == [before_save[0]] * 4
    remaining = pair.run(lambda f, *a: f(*a, saves=False), run_rank, 1, 2, str(tmp_path), data)
    assert remaining == [before_save[0][2:]] * 2
    if data == "global":
        resumed = four.run(lambda f, *a: f(*a, saves=False), run_rank, 1, 1, str(tmp_path), data)
        assert resumed == [before_save[0][2:]] * 4


def test_a_description_contains_the_number_of_model_parallel_ranks(four):
    def describe():
        accelerator = build_accelerator()
        accelerator.loader = accelerator.prepare(DataLoader(range(64), batch_size=8))
        description = accelerator.describe()
        return description.loaders[0].global_batch, str(description)

    for size, text in four.run(describe):
        assert size == 16
        assert "8 x 2 parts, 2 ranks each x 1 accumulation = 16 samples" in text
