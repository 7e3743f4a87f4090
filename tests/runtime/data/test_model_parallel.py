"""Data of model-parallel ranks: they receive equal batches, and every sample is read exactly once."""

from __future__ import annotations

import random
from itertools import chain, product

import pytest
import read_epochs
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import pairwise_params
from read_epochs import check_steps, read_steps, split_batches
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accel_runtime.accelerator as facade
from accel_runtime import Accelerator, DataLoaderConfiguration, set_seed
from accel_runtime.backends.single import Single
from accel_runtime.data.map_style import MapStyleSource
from accel_runtime.data.presharded import PreshardedSource
from accel_runtime.data.sharding import sharding_of_loader
from accel_runtime.topology import DataRank, Topology

pytestmark = pytest.mark.slow

COPIES = 2
KINDS = {"a stream": read_epochs.Stream, "a map": range}


def place(topology, copies=COPIES):
    """Return the data rank of a rank with this number of model-parallel ranks."""
    return DataRank(topology.rank // copies, topology.world_size // copies, copies)


def backend(copies=COPIES):
    """Return a backend whose data-parallel size is smaller than its world size."""
    found = read_epochs.get_backend()
    found.data_rank = place(found.topology, copies)
    return found


def accelerator(copies=COPIES, **options):
    """Return an Accelerator with model-parallel ranks."""
    real = facade.connect

    def connect(*args):
        made = real(*args)
        made.data_rank = place(made.topology, copies)
        return made

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


def parts(found, copies=COPIES):
    """Return the steps by data rank; require that model-parallel ranks have equal steps."""
    for rank, own in enumerate(found):
        first = found[rank - rank % copies]
        assert [(step.samples, step.step_info, read_epochs.to_plain(step.offset)) for step in own] == [
            (step.samples, step.step_info, read_epochs.to_plain(step.offset)) for step in first
        ]
    return found[::copies]


def every_walk(kind, reader, copies, even):
    """Return the epochs of many loaders on one rank."""
    seen = {}
    found = backend(copies)
    read = {
        "each": read_epochs.build_iterable_source if kind == "a stream" else ordered,
        "the first": read_epochs.build_dispatched_source,
    }[reader]
    for count, size, drop, split in product((0, 1, 2, 3, 9, 16), (1, 2, 4), (False, True), (False, True)):
        if split and size % found.data_rank.world_size:
            continue
        loader = DataLoader(KINDS[kind](count), batch_size=size, drop_last=drop)
        world = 1 if split else found.data_rank.world_size
        seen[count, size * world, drop, split] = read_steps(read(loader, found, split=split, even=even))
    return seen


# Reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reader", "even", "copies"),
    pairwise_params(
        {"kind": list(KINDS), "reader": ["each", "the first"], "even": [True, False], "copies": [2, 4]}
    ),
)
def test_model_parallel_ranks_receive_equal_batches_and_every_sample_is_read_once(
    four, kind, reader, even, copies
):
    found = four.run(every_walk, kind, reader, copies, even)
    for key in found[0]:
        count, size, drop, _ = key
        own = parts([seen[key] for seen in found], copies)
        assert check_steps(own) == split_batches(range(count), size, drop_last=drop)


@pytest.mark.parametrize(
    ("kind", "workers", "dispatch"),
    pairwise_params(
        {
            "kind": [
                read_epochs.ShuffledStream,
                read_epochs.WorkerSplitStream,
                read_epochs.StatefulStream,
                read_epochs.BufferedShuffleStream,
                range,
            ],
            "workers": [0, 2],
            "dispatch": [False, True],
        }
    ),
)
def test_model_parallel_ranks_with_different_seeds_read_equal_batches(four, kind, workers, dispatch):
    def walk(kind, workers, dispatch):
        made = accelerator(dispatch_batches=dispatch)
        torch.manual_seed(made.process_index)
        random.seed(made.process_index)
        loader = made.prepare(DataLoader(kind(17), batch_size=2, num_workers=workers, shuffle=kind is range))
        seen = [
            [(read_epochs.to_ids(b), made.gather_for_metrics(b).tolist()) for b in loader] for _ in range(2)
        ]
        return seen, torch.rand(1).item(), random.random()

    found = four.run(walk, kind, workers, dispatch)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0][1:] != found[2][1:], "parts draw numbers of their own"
    for epoch in (0, 1):
        every = [[whole for _, whole in own[0][epoch]] for own in found]
        assert every == [every[0]] * 4
        assert sorted(chain.from_iterable(every[0])) == list(range(17))


class Noisy(torch.utils.data.Dataset):
    """Samples with noise of every generator."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return index + random.random() + torch.rand(()).item()


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_is_equal_on_model_parallel_ranks(four, workers):
    def walk(workers):
        made = accelerator()
        random.seed(made.process_index)
        torch.manual_seed(made.process_index)
        loader = made.prepare(DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers))
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    found = four.run(walk, workers)
    assert found[0] == found[1] != found[2] == found[3]


def sharded(copies, counts, wrong=None):
    """Return a source of data that the script has sharded by data rank."""
    set_seed(0)  # a test before may have left each rank in another state
    found = backend(copies)
    rank = found.data_rank.rank if wrong is None else found.topology.rank
    data = [rank * 100 + number for number in range(counts[rank])]
    alone = Single(Topology(), torch.device("cpu"), is_counted=False)
    loader = DataLoader(data, batch_size=2)
    return PreshardedSource(ordered(loader, alone), loader, found)


@pytest.mark.parametrize("counts", [(4, 4), (5, 2), (0, 3), (1, 6)])
def test_data_sharded_by_data_rank_are_read_once(four, counts):
    found = parts(four.run(lambda counts: read_steps(sharded(COPIES, counts)), counts))
    assert sorted(chain.from_iterable(check_steps(found))) == sorted(
        rank * 100 + number for rank in (0, 1) for number in range(counts[rank])
    )


@pytest.mark.parametrize("counts", [(4, 4, 4, 4), (4, 2, 4, 4)])
def test_data_sharded_by_process_are_rejected(four, counts):
    def error(counts):
        with pytest.raises(RuntimeError, match=r"by accelerator\.data_parallel_rank") as caught:
            read_steps(sharded(COPIES, counts, wrong=True))
        return str(caught.value)

    four.run(error, counts)


def test_a_sampler_that_shards_by_process_is_rejected(four):
    def prepared(by_part):
        made = accelerator()
        place = made.data_parallel_rank, made.data_parallel_size
        rank, count = place if by_part else (made.process_index, made.num_processes)
        data = list(range(8))
        sampler = DistributedSampler(data, rank=rank, num_replicas=count, shuffle=False)
        loader = made.prepare_data_loader(DataLoader(data, batch_size=2, sampler=sampler), data="sharded")
        return [made.gather_for_metrics(batch).tolist() for batch in loader]

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

    def first(copies, size, start, stop):
        found = backend(copies)
        torch.manual_seed(5)
        data = read_epochs.Stream(count) if stream else range(count)
        # torch refuses to shuffle an empty dataset.
        shuffle = None if stream else shuffled and count > 0
        loader = DataLoader(data, batch_size=size, drop_last=drop, shuffle=shuffle)
        read = read_epochs.build_iterable_source if stream else ordered
        return read_steps(read(loader, found, even=even), start, stop)

    begun = checked_or_cut(four.run(first, 1, size, {}, stop), stop)
    left = four.run(first, 1, size, {}, stop)[0]
    position = left[-1].offset if left else {}
    rest = check_steps(parts(four.run(first, 2, 2 * size, position, None)))
    plain_rest = check_steps(pair.run(first, 1, 2 * size, position, None))
    whole = check_steps(four.run(first, 1, size, {}, None))
    assert rest == plain_rest
    if not left or not left[-1].step_info.is_last:
        assert begun + rest == whole
    else:
        assert rest == []


def checked_or_cut(found, stop):
    """Return the global batches of epochs that may have ended early."""
    steps = zip(*found, strict=True)
    return [
        list(chain.from_iterable(s.samples[: s.step_info.num_valid[r]] for r, s in enumerate(step)))
        for step in steps
    ]


# Gathering -------------------------------------------------------------------------------


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("copies", [2, 4])
def test_results_of_any_type_are_gathered_once_per_sample(four, copies, even):
    def gathered(copies, even):
        made = accelerator(copies, dataloader_config=DataLoaderConfiguration(even_batches=even))
        loader = made.prepare(DataLoader(TensorDataset(torch.arange(11)), batch_size=2))
        seen = {"rows": [], "twice": [], "texts": [], "lists": [], "losses": []}
        for (batch,) in loader:
            seen["rows"] += made.gather_for_metrics(batch).tolist()
            seen["twice"] += made.gather_for_metrics({"x": batch.repeat_interleave(2)})["x"].tolist()
            seen["texts"] += made.gather_for_metrics([f"no {n}" for n in batch.tolist()])
            seen["lists"] += made.gather_for_metrics(list(batch[:, None].unbind()), use_gather_object=True)
            loss = made.gather_for_metrics(batch.float().mean())
            seen["losses"].append(1 if not loss.dim() else len(loss))
        assert made.gather(torch.tensor(made.process_index)).tolist() == [0, 1, 2, 3]
        seen["lists"] = [int(item) for item in seen["lists"]]
        return seen

    found = four.run(gathered, copies, even)
    assert found == [found[0]] * 4
    assert found[0]["rows"] == found[0]["lists"] == list(range(11))
    assert found[0]["twice"] == [n for n in range(11) for _ in (0, 1)]
    assert found[0]["texts"] == [f"no {n}" for n in range(11)]
    assert set(found[0]["losses"]) == {4 // copies}


def test_rows_collected_over_a_loop_are_gathered_without_padding(four):
    def gathered():
        made = accelerator()
        loader = made.prepare(DataLoader(range(11), batch_size=2))
        return made.gather_for_metrics(torch.cat([batch + 0 for batch in loader])).tolist()

    assert four.run(gathered) == [list(range(11))] * 4


@pytest.mark.parametrize("apply_padding", [False, True])
def test_split_between_processes_splits_between_data_ranks(four, apply_padding):
    def own(apply_padding):
        made = accelerator()
        with made.split_between_processes(list("abc"), apply_padding=apply_padding) as items:
            return items

    tail = ["c", "c"] if apply_padding else ["c"]
    assert four.run(own, apply_padding) == [["a", "b"]] * 2 + [tail] * 2


# Training --------------------------------------------------------------------------------


def reference(even_sizes):
    """Return the parameters of one process that trains on the global batches."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    data = torch.randn(11, 3)
    weights = torch.arange(1.0, 12.0)
    for at in range(0, 11, 8):
        rows, own = data[at : at + 8], weights[at : at + 8]
        loss = model(rows).square().squeeze(1)
        loss = (loss * own).sum() / own.sum() if even_sizes == "weights" else loss.mean()
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
        made = accelerator(dataloader_config=config, gradient_accumulation_steps=steps)
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(11, 3), torch.arange(1.0, 12.0))
        loader = DataLoader(data, batch_size=4 // steps)
        model, optimizer, loader = made.prepare(model, optimizer, loader)
        for rows, weights in loader:
            with made.accumulate(model):
                losses = model(rows).square().squeeze(1)
                if kind == "weights":
                    made.backward((losses * weights).sum() / weights.sum(), weight=weights.sum())
                else:
                    made.backward(losses.mean(), weight=len(rows) if steps > 1 else None)
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for own in four.run(trained, kind, steps):
        for got, wanted in zip(own, reference(kind), strict=True):
            torch.testing.assert_close(got, wanted)


def test_a_scheduler_advances_by_the_number_of_data_ranks(four):
    def rate():
        made = accelerator()
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, scheduler = made.prepare(model, optimizer, scheduler)
        made.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        return scheduler.get_last_lr()

    assert four.run(rate) == [[0.25]] * 4


# Random numbers --------------------------------------------------------------------------


def test_device_specific_seeds_are_equal_on_model_parallel_ranks(four):
    def drawn():
        accelerator()
        set_seed(3, device_specific=True)
        return torch.rand(1).item(), random.random()

    first, second, third, fourth = four.run(drawn)
    assert first == second != third == fourth


def test_a_seed_before_the_accelerator_uses_the_data_rank_of_the_settings(four, monkeypatch):
    def drawn():
        import os

        from accel_runtime.backends import set_current_backend

        set_current_backend(None)
        os.environ |= {"ACCEL_PARALLEL_TP": "2", "ACCEL_PARALLEL_DP_REPLICATE": "2"}
        try:
            set_seed(3, device_specific=True)
        finally:
            del os.environ["ACCEL_PARALLEL_TP"], os.environ["ACCEL_PARALLEL_DP_REPLICATE"]
        return torch.rand(1).item()

    first, second, third, fourth = four.run(drawn)
    assert first == second != third == fourth


def test_an_accelerator_synchronizes_the_generators_of_model_parallel_ranks(four):
    def drawn():
        rank = read_epochs.get_backend().topology.rank
        random.seed(rank)
        torch.manual_seed(rank)
        before = random.getstate()
        made = accelerator()
        kept = random.getstate() == before
        return kept, torch.rand(1).item(), random.random(), made.process_index

    found = four.run(drawn)
    assert [own[0] for own in found] == [True, False, True, False], "the first of each keeps what it has"
    assert found[0][1:3] == found[1][1:3] != found[2][1:3] == found[3][1:3]


# Checkpoints and description -------------------------------------------------------------


@pytest.mark.parametrize("data", ["global", "sharded"])
def test_a_checkpoint_resumes_with_another_number_of_model_parallel_ranks(four, pair, tmp_path, data):
    """From two data ranks of two ranks each to two of one rank each; a global order also to four."""

    def rank(copies, size, folder, data, *, saves):
        made = accelerator(copies, project_dir=folder)
        part = (
            range(100)
            if data == "global"
            else range(made.data_parallel_rank * 100, made.data_parallel_rank * 100 + 7)
        )
        loader = made.prepare_data_loader(DataLoader(part, batch_size=size, shuffle=True), data=data)
        if saves:
            torch.manual_seed(3)
        else:
            made.resume(f"{folder}/kept")
        seen = []
        for batch in loader:
            seen.append(made.gather_for_metrics(batch).tolist())
            if saves and len(seen) == 2:
                made.save_state(f"{folder}/kept")
        return seen

    begun = four.run(lambda f, *a: f(*a, saves=True), rank, 2, 2, str(tmp_path), data)
    assert begun == [begun[0]] * 4
    rest = pair.run(lambda f, *a: f(*a, saves=False), rank, 1, 2, str(tmp_path), data)
    assert rest == [begun[0][2:]] * 2
    if data == "global":
        again = four.run(lambda f, *a: f(*a, saves=False), rank, 1, 1, str(tmp_path), data)
        assert again == [begun[0][2:]] * 4


def test_a_description_contains_the_number_of_model_parallel_ranks(four):
    def told():
        made = accelerator()
        made.loader = made.prepare(DataLoader(range(64), batch_size=8))
        said = made.describe()
        return said.loaders[0].global_batch, str(said)

    for size, text in four.run(told):
        assert size == 16
        assert "8 x 2 parts, 2 ranks each x 1 accumulation = 16 samples" in text
