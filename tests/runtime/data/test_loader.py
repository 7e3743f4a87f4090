"""The prepared loader: one order on any world size, every sample once."""

from __future__ import annotations

import gc
import weakref
from itertools import chain, product

import pytest
import torch
from support.cases.log_messages import collect_messages
from support.training.data_sets import (
    EndlessSampler,
    EpochSampler,
    RandomOrderSampler,
    RangeStream,
    RepeatingSampler,
    VariableBatchSampler,
)
from torch.optim.swa_utils import update_bn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from accel_runtime import Accelerator
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.single import Single
from accel_runtime.collectives.handshake import MismatchError
from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.data.loader import LoaderOptions
from accel_runtime.data.prepare import prepare_loader
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.options import DataLoaderConfiguration

SEED = 5
GLOBAL_BATCH = 6  # what 1, 2 and 3 processes divide
COUNT = 20
UNEVEN_BATCHES = ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])


def read_unprepared(epochs=1, **options):
    """Return the batches of the unprepared loader on one process, by epoch."""
    torch.manual_seed(SEED)
    loader = DataLoader(range(COUNT), batch_size=GLOBAL_BATCH, **options)
    return [[batch.tolist() for batch in loader] for _ in range(epochs)]


def prepared(accelerator, dataset=range(COUNT), **options):
    """Return a prepared loader with the same global batches as `read_unprepared`."""
    if "batch_sampler" not in options and not accelerator.split_batches:
        options = {"batch_size": GLOBAL_BATCH // accelerator.num_processes} | options
    elif "batch_sampler" not in options:
        options = {"batch_size": GLOBAL_BATCH} | options
    return accelerator.prepare(DataLoader(dataset, **options))


def gather_epochs(accelerator, loader, epochs=1):
    """Return the gathered global batches by epoch."""
    return [[accelerator.gather_for_metrics(batch).tolist() for batch in loader] for _ in range(epochs)]


class Doubling(DataLoader):
    """A subclass with its own `__iter__`, attribute and method."""

    factor = 2

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * self.factor

    def described(self):
        return f"times {self.factor}"


# One order -------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True], ids=["per process", "split"])
@pytest.mark.parametrize("seeded", ["the global generator", "an own generator"])
def test_the_order_equals_that_of_the_unprepared_loader_on_one_process(ranks, split, seeded):
    def epochs(seeded, split):
        torch.manual_seed(SEED)
        generator_options = (
            {"generator": torch.Generator().manual_seed(7)} if seeded == "an own generator" else {}
        )
        accelerator = Accelerator(split_batches=split)
        return gather_epochs(accelerator, prepared(accelerator, shuffle=True, **generator_options), epochs=3)

    generator_options = (
        {"generator": torch.Generator().manual_seed(7)} if seeded == "an own generator" else {}
    )
    assert (
        ranks.run(epochs, seeded, split)
        == [read_unprepared(3, shuffle=True, **generator_options)] * ranks.size
    )


def test_persistent_workers_keep_the_order_of_the_unprepared_loader_after_a_break(pair):
    def epochs():
        accelerator = Accelerator()
        options = {"shuffle": True, "num_workers": 2, "persistent_workers": True}
        loaders = [prepared(accelerator, **options), DataLoader(range(COUNT), GLOBAL_BATCH, **options)]
        epochs_read = []
        for loader, to_global_batch in zip(
            loaders, (accelerator.gather_for_metrics, lambda batch: batch), strict=True
        ):
            torch.manual_seed(SEED)
            epochs_read.append([to_global_batch(batch).tolist() for batch in loader])
            for _ in loader:
                break
            epochs_read.append([to_global_batch(batch).tolist() for batch in loader])
        return epochs_read

    for first, third, wanted_first, wanted_third in pair.run(epochs):
        assert first == wanted_first == read_unprepared(shuffle=True)[0]
        assert third == wanted_third != first


@pytest.mark.parametrize(
    "sampler", [None, RandomOrderSampler(COUNT, COUNT // 2)], ids=["shuffle", "a sampler of the script"]
)
def test_ranks_with_different_seeds_use_the_order_of_the_first(several, sampler):
    def epochs(sampler):
        accelerator = Accelerator()
        torch.manual_seed(SEED + accelerator.process_index)
        return gather_epochs(
            accelerator, prepared(accelerator, shuffle=sampler is None, sampler=sampler), epochs=2
        )

    expected = read_unprepared(2, shuffle=sampler is None, sampler=sampler)
    assert several.run(epochs, sampler) == [expected] * several.size


def iterate_in_library(loader):
    """Iterate over a loader as tqdm does: the call of `next` is on a line of the library."""
    yield from loader


@pytest.mark.parametrize("kind", ["shuffled", "sampler", "stream", "dispatched", "sharded"])
def test_one_rank_can_read_a_loader_through_a_library(pair, kind):
    def read(kind):
        config = DataLoaderConfiguration(dispatch_batches=kind == "dispatched")
        accelerator = Accelerator(dataloader_config=config)
        rank = accelerator.process_index
        torch.manual_seed(rank)
        options = {
            "shuffled": {"shuffle": True},
            "sampler": {"sampler": RandomOrderSampler(COUNT, COUNT // 2)},
        }.get(kind, {})
        loader = DataLoader(RangeStream(COUNT) if kind == "stream" else range(COUNT), batch_size=3, **options)
        if kind == "sharded":
            rank_loader = DataLoader(range(3 + rank), batch_size=3)
            loader = accelerator.prepare_data_loader(rank_loader, data="sharded")
        else:
            loader = accelerator.prepare(loader)
        with collect_messages("accel_runtime.collectives") as messages:
            batches = list(loader if rank else iterate_in_library(loader))
        return sum(accelerator.gather_for_metrics(batch).numel() for batch in batches), messages

    expected = {"sampler": COUNT // 2, "sharded": 7}.get(kind, COUNT)
    assert pair.run(read, kind) == [(expected, [])] * 2


def test_ranks_that_read_different_loaders_raise_a_mismatch(pair):
    def read():
        accelerator = Accelerator()
        rank = accelerator.process_index
        torch.manual_seed(rank)
        long, short = (DataLoader(range(n), 1, sampler=RepeatingSampler(rank * (n - 1), n)) for n in (9, 5))
        long, short = accelerator.prepare(long, short)
        with pytest.raises(MismatchError, match="the order of a RepeatingSampler that is read 10 at a time"):
            next(iter(short if rank else long))
        return True

    assert all(pair.run(read))


def test_an_epoch_advances_the_global_generator_like_the_unprepared_loader(ranks):
    def state():
        torch.manual_seed(SEED)
        accelerator = Accelerator()
        gather_epochs(accelerator, prepared(accelerator, shuffle=True), epochs=2)
        return torch.get_rng_state()

    read_unprepared(2, shuffle=True)
    expected = torch.get_rng_state()
    assert all(torch.equal(actual, expected) for actual in ranks.run(state))


def test_rng_types_synchronize_the_generators_of_all_ranks(several):
    def draw():
        accelerator = Accelerator(rng_types=["torch", "generator"])
        torch.manual_seed(SEED + accelerator.process_index)
        return [torch.rand(1).item() for _ in prepared(accelerator)]

    actual = several.run(draw)
    assert actual == [actual[0]] * several.size


def test_set_epoch_is_passed_to_the_sampler(ranks):
    def epoch():
        sampler = EpochSampler(COUNT)
        prepared(Accelerator(), sampler=sampler).set_epoch(3)
        return sampler.epoch

    assert ranks.run(epoch) == [3] * ranks.size


class OfTheEpoch:
    """What a dataset yields that depends on the number of its epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def numbers(self):
        return [100 * self.epoch + number for number in range(4)]


class StreamOfTheEpoch(OfTheEpoch, IterableDataset):
    def __iter__(self):
        return iter(self.numbers())


class SamplesOfTheEpoch(OfTheEpoch, Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.numbers()[index]


@pytest.mark.parametrize("dataset", [StreamOfTheEpoch, SamplesOfTheEpoch])
@pytest.mark.parametrize(
    ("workers", "persistent"),
    [
        (0, False),
        pytest.param(1, False, marks=pytest.mark.full),
        (2, False),
        pytest.param(1, True, id="1-persistent", marks=pytest.mark.full),
        pytest.param(2, True, id="2-persistent"),
    ],
)
def test_set_epoch_of_a_dataset_takes_effect_in_workers_that_have_a_copy_of_it(dataset, workers, persistent):
    options = {"num_workers": workers, "persistent_workers": persistent}
    loader = Accelerator().prepare(DataLoader(dataset(), batch_size=2, **options))

    def read():
        return torch.cat(list(loader)).tolist()

    epochs = [read(), read()]
    loader.set_epoch(7)
    epochs += [read(), read()]
    assert epochs == [[100 * epoch + number for number in range(4)] for epoch in (0, 1, 7, 8)]


class Nested(BatchSampler):
    """A batch sampler around another one, as libraries have them."""

    def __init__(self, batches):
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self.batch_sampler = batches
        del self.sampler

    def __iter__(self):
        return iter(self.batch_sampler)

    def __len__(self):
        return len(self.batch_sampler)


@pytest.mark.parametrize("wrapped", [False, True], ids=["batch sampler", "nested batch samplers"])
def test_set_epoch_is_passed_to_the_sampler_inside_a_batch_sampler(ranks, wrapped):
    def epochs(wrapped):
        accelerator = Accelerator()
        batches = BatchSampler(
            EpochSampler(COUNT), GLOBAL_BATCH // accelerator.num_processes, drop_last=False
        )
        loader = prepared(accelerator, batch_sampler=Nested(batches) if wrapped else batches)
        recorded_epochs = [gather_epochs(accelerator, loader)[0] for _ in range(2)]
        loader.set_epoch(5)
        return [
            list(chain.from_iterable(steps))
            for steps in [*recorded_epochs, gather_epochs(accelerator, loader)[0]]
        ]

    expected = [[(index + epoch) % COUNT for index in range(COUNT)] for epoch in (0, 1, 5)]
    assert ranks.run(epochs, wrapped) == [expected] * ranks.size


# Exactly once ----------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True], ids=["per process", "split"])
def test_every_sample_is_gathered_once_and_in_order(ranks, split):
    def lost_or_repeated(split):
        accelerator = Accelerator(split_batches=split)
        world = accelerator.num_processes
        differences = []
        for count, size in product((0, 1, 2, 7, 12, 13), (1, 2, 5)):  # all: test_sampling
            dataset = TensorDataset(torch.arange(count))
            loader = accelerator.prepare(DataLoader(dataset, batch_size=size * world if split else size))
            samples = [
                index for (batch,) in loader for index in accelerator.gather_for_metrics(batch).tolist()
            ]
            if samples != list(range(count)):
                differences.append((count, size, samples))
        return differences

    assert ranks.run(lost_or_repeated, split) == [[]] * ranks.size


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0] * COUNT, num_samples=2 * COUNT + 1)},
        {"sampler": RandomOrderSampler(COUNT, COUNT // 2)},
        {"sampler": [3, 1, 2]},
        {"drop_last": True},
    ],
    ids=["weighted", "half", "list", "drop last"],
)
def test_the_samples_of_a_sampler_are_gathered_independent_of_the_dataset_length(ranks, options):
    def gathered(options):
        torch.manual_seed(SEED)
        accelerator = Accelerator()
        return gather_epochs(accelerator, prepared(accelerator, **options))

    assert ranks.run(gathered, options) == [read_unprepared(**options)] * ranks.size


def test_results_of_a_step_are_gathered_like_its_samples(ranks):
    def gathered():
        accelerator = Accelerator()
        gathered_values = {"id": [], "text": [], "twice": [], "losses": []}
        for batch in prepared(accelerator, [{"id": n, "text": f"no {n}"} for n in range(COUNT)]):
            batch["twice"] = batch["id"].repeat_interleave(2)
            loss = torch.tensor(float(accelerator.process_index))
            results, (losses, _) = (
                accelerator.gather_for_metrics(batch),
                accelerator.gather_for_metrics((loss, loss)),
            )
            gathered_values["text"] += results["text"]
            gathered_values["losses"].append(losses.flatten().tolist())
            for name in ("id", "twice"):
                gathered_values[name] += results[name].tolist()
        return gathered_values

    expected = {
        "id": list(range(COUNT)),
        "text": [f"no {n}" for n in range(COUNT)],
        "twice": [n for n in range(COUNT) for _ in range(2)],
        "losses": [[float(rank) for rank in range(ranks.size)]] * 4,
    }
    assert ranks.run(gathered) == [expected] * ranks.size


def test_batches_of_different_lengths_are_not_split_between_ranks(ranks):
    def read_batches():
        accelerator = Accelerator()
        loader = prepared(accelerator, batch_sampler=VariableBatchSampler(UNEVEN_BATCHES))
        expected = [batch.tolist() for batch in loader]
        return expected, gather_epochs(accelerator, loader)[0]

    rank_batches = ranks.run(read_batches)
    steps = [UNEVEN_BATCHES[at : at + ranks.size] for at in range(0, len(UNEVEN_BATCHES), ranks.size)]
    for rank, (expected, gathered) in enumerate(rank_batches):
        assert gathered == [list(chain.from_iterable(step)) for step in steps]
        for step, batch in zip(steps, expected, strict=True):
            assert batch == (step[rank] if rank < len(step) else steps[0][rank - len(step)])


def test_two_simultaneous_loops_over_one_loader_are_independent(ranks):
    def read_twice():
        accelerator = Accelerator()
        loader = prepared(accelerator, shuffle=True)
        return [(first.tolist(), second.tolist()) for first, second in zip(loader, loader, strict=True)]

    for steps in ranks.run(read_twice):
        assert len(steps) == 4
        assert all(len(first) == len(second) == GLOBAL_BATCH // ranks.size for first, second in steps[:3])


def test_an_inner_loop_keeps_the_current_batch_of_the_outer_loop(ranks):
    def gathered():
        accelerator = Accelerator()
        outer, inner = prepared(accelerator), prepared(accelerator, range(7))
        samples = []
        for batch in outer:
            assert gather_epochs(accelerator, inner)[0] == [[0, 1, 2, 3, 4, 5], [6]]
            samples += accelerator.gather_for_metrics(batch).tolist()
        return samples

    assert ranks.run(gathered) == [list(range(COUNT))] * ranks.size


@pytest.mark.parametrize("end", ["break", "exception"])
def test_a_loop_that_ends_early_leaves_no_current_batch(ranks, end):
    def gathered(end):
        accelerator = Accelerator(gradient_accumulation_steps=3)

        def leave():
            for index, _ in enumerate(prepared(accelerator)):
                if index == 3 and end == "exception":
                    raise KeyError
                if index == 3:  # the last step, which has repeats
                    break

        try:
            leave()
        except KeyError as error:
            raised_error = error  # its traceback keeps the frame, as a debugger or a log would
            assert raised_error is not None
        with accelerator.accumulate():
            synced = accelerator.sync_gradients
        return accelerator.gather_for_metrics(torch.arange(2)).tolist(), synced

    assert ranks.run(gathered, end) == [([0, 1] * ranks.size, False)] * ranks.size


def test_len_and_total_batch_size_are_equal_on_any_world_size(ranks):
    def lengths():
        accelerator = Accelerator()
        loaders = [prepared(accelerator), prepared(accelerator, drop_last=True), prepared(accelerator, [])]
        return [(len(loader), len(list(loader)), loader.total_batch_size) for loader in loaders]

    assert ranks.run(lengths) == [[(4, 4, 6), (3, 3, 6), (0, 0, 6)]] * ranks.size


# The script's own loader -----------------------------------------------------------------


def test_a_prepared_loader_is_a_data_loader_with_the_attributes_of_the_script(ranks):
    def attributes():
        accelerator = Accelerator()
        dataset = TensorDataset(torch.arange(4))
        script = DataLoader(dataset, batch_size=2, shuffle=True, timeout=0, drop_last=True)
        script.note = "mine"
        loader = accelerator.prepare(script)
        assert isinstance(loader, DataLoader)
        assert accelerator.prepare(loader) is loader
        assert loader.dataset is dataset
        assert loader.sampler is script.sampler
        assert loader.batch_sampler is script.batch_sampler
        assert not hasattr(loader, "no_such_attribute")
        assert len(script) == 2
        return loader.batch_size, loader.drop_last, loader.note

    assert ranks.run(attributes) == [(2, True, "mine")] * ranks.size


def test_a_subclass_keeps_its_iteration_attributes_and_methods(ranks):
    def doubled():
        accelerator = Accelerator()
        loader = accelerator.prepare(Doubling(range(7), batch_size=2))
        assert loader.factor == 2
        assert loader.described() == "times 2"
        epochs = gather_epochs(accelerator, loader, epochs=2)
        return [list(chain.from_iterable(epoch)) for epoch in epochs]

    assert ranks.run(doubled) == [[[0, 2, 4, 6, 8, 10, 12]] * 2] * ranks.size


def test_the_unprepared_loader_still_reads_all_samples(ranks):
    def read_both():
        script = DataLoader(range(7), batch_size=2)
        Accelerator().prepare(script)
        return len(list(script))

    assert ranks.run(read_both) == [4] * ranks.size


@pytest.mark.parametrize("put_on_device", [True, False])
def test_batches_are_moved_to_the_device_if_put_on_device(put_on_device):
    backend = Single(Topology(), DeviceRuntime(torch.device("meta")))
    loader = prepare_loader(
        DataLoader(range(3)),
        backend,
        ActiveLoops(0, has_padding=False),
        LoaderOptions(put_on_device=put_on_device),
    )
    assert {batch.device.type for batch in loader} == {"meta" if put_on_device else "cpu"}


# Unsupported loaders --------------------------------------------------------------------

UNSUPPORTED = {
    "sharded already": (
        lambda: DataLoader(range(7), sampler=DistributedSampler(range(7), 1, 0, shuffle=False)),
        "DistributedSampler",
    ),
    "overtaking": (lambda: DataLoader(range(7), num_workers=1, in_order=False), "in_order=False"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_loader_that_cannot_be_sharded_is_rejected_with_the_reason(several, kind):
    def refused(make, reason):
        with pytest.raises(ValueError, match=f"Cannot prepare this DataLoader for .* processes: .*{reason}"):
            Accelerator().prepare(make())
        return True

    assert all(several.run(refused, *UNSUPPORTED[kind]))


@pytest.mark.parametrize("kind", ["sharded already"])
def test_a_loader_that_cannot_be_sharded_works_on_one_process(kind):
    accelerator = Accelerator()
    loader = accelerator.prepare(UNSUPPORTED[kind][0]())
    samples = [accelerator.gather_for_metrics(torch.as_tensor(batch)).flatten().tolist() for batch in loader]
    assert list(chain.from_iterable(samples)) == list(range(7))


def test_an_endless_sampler_works_on_one_process():
    loader = iter(Accelerator().prepare(DataLoader(range(7), sampler=EndlessSampler())))
    assert [next(loader).tolist() for _ in range(3)] == [[0]] * 3


def test_the_last_batch_of_a_stream_is_recognized():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    synced = []
    for _ in accelerator.prepare(DataLoader(RangeStream(7), batch_size=2)):
        with accelerator.accumulate():
            synced.append(accelerator.sync_gradients)
    assert synced == [False, False, True, True]


def test_an_indivisible_batch_size_with_split_batches_is_rejected_with_both_numbers(several):
    def refused():
        accelerator = Accelerator(split_batches=True)
        size = accelerator.num_processes + 1
        with pytest.raises(ValueError, match=f"a batch size divisible by {size - 1}, and it is {size}"):
            accelerator.prepare(DataLoader(range(7), batch_size=size))
        with pytest.raises(
            ValueError, match=r"split_batches needs one batch size, and the DataLoader has none"
        ):
            accelerator.prepare(DataLoader(RangeStream(7), batch_size=None))
        return True

    assert all(several.run(refused))


def test_a_loader_without_a_fixed_batch_size_has_no_total_batch_size(ranks):
    def refused():
        with pytest.raises(ValueError, match="no fixed size"):
            _ = prepared(Accelerator(), batch_sampler=VariableBatchSampler(UNEVEN_BATCHES)).total_batch_size
        return True

    assert all(ranks.run(refused))


# Garbage collection ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("indices", "break"),
        ("stream", "complete"),
        pytest.param("indices", "complete", marks=pytest.mark.full),
        pytest.param("stream", "break", marks=pytest.mark.full),
    ],
)
def test_a_loader_is_freed_with_its_last_reference(ranks, kind, end):
    """A reference that is left would keep persistent workers until garbage collection, when torch waits seconds for each."""

    def iterate_and_drop():
        accelerator = Accelerator()
        dataset = range(7) if kind == "indices" else RangeStream(7)
        script = DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
        loader = accelerator.prepare(script)
        for _ in loader:
            if end == "break":
                break
        loader.state_dict()
        # The process group outlives the accelerator.
        accelerators = [accelerator] if accelerator.num_processes == 1 else []
        return [weakref.ref(item) for item in (loader, loader._source, *accelerators)]

    def count_left():
        iterate_and_drop()  # what torch imports meanwhile keeps frames
        gc.collect()
        gc.disable()
        try:
            return sum(reference() is not None for reference in iterate_and_drop())
        finally:
            gc.enable()

    assert not any(ranks.run(count_left))


def test_statistics_of_batch_norm_that_each_process_computes_alone_are_reported(pair):
    def update(layer, prepares):
        accelerator = Accelerator()
        loader = DataLoader(TensorDataset(torch.arange(16.0).view(8, 2)), batch_size=2)
        model = torch.nn.Sequential(layer)
        with collect_messages("accel_runtime.data") as messages:
            update_bn(accelerator.prepare(loader) if prepares else loader, model)
        return messages, [tuple(buffer.tolist()) for buffer in layer.buffers() if buffer.dim()]

    (reports, first), (others, second) = pair.run(update, torch.nn.BatchNorm1d(2), True)
    assert first != second
    assert len(reports) == 1
    assert "Pass a loader that is not prepared" in reports[0]
    assert others == []
    (reports, first), (_, second) = pair.run(update, torch.nn.BatchNorm1d(2), False)
    assert first == second
    assert reports == []
