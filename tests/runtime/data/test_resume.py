"""Loader states: an epoch continues from any offset on any world size with the remaining samples."""

from __future__ import annotations

import io
import random
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases.pairs import pairwise_params
from support.training.data_sets import EpochSampler, PythonRandomSampler, VariableBatchSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accel_runtime import Accelerator, DataLoaderConfiguration
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.single import Single
from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.data.loader import LoaderOptions, skip_first_batches
from accel_runtime.data.map_style import EpochOrder, EpochStart
from accel_runtime.data.prepare import prepare_loader
from accel_runtime.data.sharding import BatchSharding
from accel_runtime.environment.topology import Topology

COUNT = 25
PART = 2  # samples a process a step


BATCHES = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10], [11, 12], [13]]
ORDERS = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "shuffled by a generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "workers": lambda: {"shuffle": True, "num_workers": 2},
    "a sampler of Python's": lambda: {"sampler": PythonRandomSampler(COUNT)},
    "batches of the script": lambda: {"batch_sampler": VariableBatchSampler(BATCHES, shuffle=True)},
    "one by one": lambda: {"batch_size": None, "shuffle": True},
}
RANKS = [
    pytest.param(1, id="1 process"),
    pytest.param(2, id="2 processes", marks=pytest.mark.full),
    pytest.param(3, id="3 processes"),
]


def prepare_ordered_loader(accelerator, kind):
    options = ORDERS[kind]()
    if not {"batch_size", "batch_sampler"} & set(options):
        options["batch_size"] = PART
    return accelerator.prepare(DataLoader(torch.arange(COUNT)[:, None], **options))


def gather_steps(accelerator, loader, steps=None):
    """Return the gathered samples of the next steps in one list."""
    steps_read = []
    for at, batch in enumerate(loader):
        steps_read.append(accelerator.gather_for_metrics(batch).flatten().tolist())
        if at + 1 == steps:
            break
    return list(chain.from_iterable(steps_read))


def seed_generators():
    torch.manual_seed(11)
    random.seed(11)


def run_interrupted(kind, epoch, steps):
    """Return the state after some steps of an epoch, and the remaining samples of the uninterrupted run."""
    seed_generators()
    accelerator = Accelerator()
    loader = prepare_ordered_loader(accelerator, kind)
    for _ in range(epoch):
        gather_steps(accelerator, loader)
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    state = loader.state_dict()
    saved_state = io.BytesIO()
    torch.save(state, saved_state)
    remaining = [accelerator.gather_for_metrics(batch).flatten().tolist() for batch in iterator]
    following = gather_steps(accelerator, loader)
    return saved_state.getvalue(), list(chain.from_iterable(remaining)), following


def run_resumed(kind, state):
    """Load the state in a new run; return the rest of the epoch and the next epoch."""
    torch.manual_seed(99)  # only the state is kept
    random.seed(99)
    accelerator = Accelerator()
    loader = prepare_ordered_loader(accelerator, kind)
    loader.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
    epoch = loader.epoch
    return gather_steps(accelerator, loader), gather_steps(accelerator, loader), (epoch, loader.epoch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kind", "epoch"),
    pairwise_params({"ranks": RANKS, "kind": list(ORDERS), "epoch": [0, 1]}),
    indirect=["ranks"],
)
def test_a_resumed_epoch_has_the_remaining_samples_of_the_uninterrupted_run(ranks, kind, epoch):
    """Rows B1 and B6, with gathered samples, so that all ranks return the same."""
    (state, remaining, _), *others = ranks.run(run_interrupted, kind, epoch, 2)
    assert all(other[1] == remaining for other in others)
    for resumed, _, epochs in ranks.run(run_resumed, kind, state):
        assert resumed == remaining
        assert epochs == (epoch, epoch + 2)


def test_the_epoch_after_a_resumed_one_uses_the_generator_of_the_loader(ranks):
    (state, _, following), *_ = ranks.run(run_interrupted, "shuffled by a generator", 1, 2)
    assert [resumed for _, resumed, _ in ranks.run(run_resumed, "shuffled by a generator", state)] == [
        following
    ] * ranks.size


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        # Workers take long to start; what they read is the same.
        pytest.param(kind, *sizes, marks=[pytest.mark.full] * (kind == "workers" and sizes[0] != 2))
        for kind in ORDERS
        for sizes in ((1, 2), (2, 3), (3, 2), (2, 1))
    ],
)
def test_an_epoch_resumes_on_another_world_size(clusters, kind, before, after):
    """Row B5: the samples not seen yet, in the order of the epoch."""
    state, remaining, _ = clusters[before].run(run_interrupted, kind, 1, 2)[0]
    for resumed, _, _ in clusters[after].run(run_resumed, kind, state):
        assert resumed == remaining


def test_a_loader_state_is_equal_on_all_ranks(several):
    states = several.run(run_interrupted, "shuffled", 1, 2)
    assert len({state for state, *_ in states}) == 1


def test_a_state_between_two_epochs_contains_the_next_epoch(ranks):
    def between():
        seed_generators()
        accelerator = Accelerator()
        loader = prepare_ordered_loader(accelerator, "shuffled by a generator")
        gather_steps(accelerator, loader)
        state = loader.state_dict()
        expected = gather_steps(accelerator, loader)
        other = prepare_ordered_loader(accelerator, "shuffled by a generator")
        other.load_state_dict(state)
        return state["epoch"], "running" in state, gather_steps(accelerator, other) == expected

    assert ranks.run(between) == [(1, 0, True)] * ranks.size


@pytest.mark.parametrize("position", ["next_batch", "epoch_start", "exact"])
def test_a_state_of_the_last_step_resumes_according_to_the_position_argument(ranks, position):
    def last(position):
        accelerator = Accelerator()
        loader = prepare_ordered_loader(accelerator, "in order")
        for _ in loader:
            state = loader.state_dict()
        loader = prepare_ordered_loader(accelerator, "in order")
        loader.load_state_dict(state, position=position)
        first = loader.epoch, gather_steps(accelerator, loader)
        return first, (loader.epoch, gather_steps(accelerator, loader))

    all_samples = list(range(COUNT))
    expected = ((0, []), (1, all_samples)) if position == "exact" else ((1, all_samples), (2, all_samples))
    assert ranks.run(last, position) == [expected] * ranks.size


def test_set_epoch_after_loading_starts_another_epoch_at_its_beginning(ranks):
    """Scripts count their epochs, and may set another epoch than that of the state."""

    def second(epoch):
        accelerator = Accelerator()
        loader = prepare_ordered_loader(accelerator, "in order")
        for step, _ in enumerate(loader):
            if step == 1:
                state = loader.state_dict()
        loader = prepare_ordered_loader(accelerator, "in order")
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        return loader.epoch, gather_steps(accelerator, loader) == list(range(COUNT))

    for epoch, begins_at_its_start in ((0, False), (1, True), (4, True)):
        assert ranks.run(second, epoch) == [(epoch, begins_at_its_start)] * ranks.size


def test_a_resumed_epoch_does_not_change_the_global_generators(ranks):
    def read_generator_states(state):
        accelerator = Accelerator()
        loader = prepare_ordered_loader(accelerator, "a sampler of Python's")
        loader.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        torch.manual_seed(5)
        random.seed(5)
        gather_steps(accelerator, loader)
        return torch.rand(1).item(), random.random()

    state = ranks.run(run_interrupted, "a sampler of Python's", 0, 2)[0][0]
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1).item(), random.random()
    assert ranks.run(read_generator_states, state) == [expected] * ranks.size


def test_a_state_that_is_not_of_this_kind_of_loader_is_rejected():
    loader = Accelerator().prepare(DataLoader(range(3)))
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"epoch is missing\. Load the return value of state_dict\(\)"):
        loader.load_state_dict({"position": 3})
    with pytest.raises(
        ValueError, match=r"next_epoch\['kind'\] is 'ordered', and should be one of iterable, map_style"
    ):
        loader.load_state_dict(state | {"next_epoch": state["next_epoch"] | {"kind": "ordered"}})
    with pytest.raises(ValueError, match="kind 'iterable', and this one is of the kind 'map_style'"):
        loader.load_state_dict(state | {"next_epoch": {"kind": "iterable"}})


# Skipping ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "kind", "skip"),
    pairwise_params({"ranks": RANKS, "kind": list(ORDERS), "skip": [0, 1, 3]}),
    indirect=["ranks"],
)
def test_skip_first_batches_skips_exactly_the_first_batches(ranks, kind, skip):
    """Row B4: also for gather_for_metrics of the last batch."""

    def read_both(kind, skip):
        accelerator = Accelerator()
        seed_generators()
        steps = list(prepare_ordered_loader(accelerator, kind))
        seed_generators()
        loader = prepare_ordered_loader(accelerator, kind)
        skipped_steps = gather_steps(accelerator, loader, skip) if skip else []
        seed_generators()
        skipped = skip_first_batches(prepare_ordered_loader(accelerator, kind), skip)
        remaining = gather_steps(accelerator, skipped)
        seed_generators()
        everything = gather_steps(accelerator, prepare_ordered_loader(accelerator, kind))
        return skipped_steps + remaining == everything, len(skipped) == max(len(steps) - skip, 0)

    assert ranks.run(read_both, kind, skip) == [(True, True)] * ranks.size


def test_an_epoch_with_skipped_batches_counts_as_an_epoch_of_the_loader(ranks):
    """Row B2: the original loader does not replay it."""

    def epochs(skip):
        accelerator = Accelerator()
        loader = prepare_ordered_loader(accelerator, "shuffled by a generator")
        first = gather_steps(accelerator, skip_first_batches(loader, 1) if skip else loader)
        return first, gather_steps(accelerator, loader), loader.epoch

    for (read_remaining, second, epoch), (first, expected, _) in zip(
        ranks.run(epochs, True), ranks.run(epochs, False), strict=True
    ):
        assert read_remaining == first[PART * ranks.size :]
        assert second == expected
        assert epoch == 2


def test_skip_first_batches_after_loading_a_state_skips_once(ranks):
    def read_remaining(state):
        accelerator = Accelerator()
        loader = prepare_ordered_loader(accelerator, "shuffled")
        loader.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        return gather_steps(accelerator, skip_first_batches(loader, 2))

    state, expected, *_ = ranks.run(run_interrupted, "shuffled", 1, 2)[0]
    assert ranks.run(read_remaining, state) == [expected] * ranks.size


def test_skipped_samples_are_not_loaded():
    class Counting(list):
        loaded = 0

        def __getitem__(self, at):
            self.loaded += 1
            return super().__getitem__(at)

    data = Counting(range(1000))
    loader = Accelerator().prepare(DataLoader(data, batch_size=2, shuffle=True))
    assert len(list(skip_first_batches(loader, 499))) == 1
    assert data.loaded == 2


def test_a_loader_with_skipped_batches_can_be_prepared(ranks):
    def read_remaining():
        accelerator = Accelerator()
        skipped = skip_first_batches(DataLoader(range(COUNT), batch_size=PART), 3)
        assert len(list(skipped)) == len(skipped) == 10
        return gather_steps(accelerator, accelerator.prepare(skipped))

    assert ranks.run(read_remaining) == [list(range(6, COUNT))] * ranks.size


def test_a_negative_number_of_skipped_batches_is_rejected():
    with pytest.raises(ValueError, match="num_batches=-1"):
        skip_first_batches(DataLoader(range(3)), -1)


# The order without its start ---------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_a_permutation_from_an_offset_equals_that_of_torch(count, at, size, own_generator):
    """This test fails if RandomSampler of torch changes."""

    def order(position):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(6) if own_generator else None
        sampler = RandomSampler(range(count), generator=generator)
        loader = DataLoader(range(count), batch_size=size, sampler=sampler)
        samples = EpochOrder(
            loader, BatchSharding(0, 1, size), Single(Topology(), DeviceRuntime(torch.device("cpu")))
        )
        indices_drawn = [
            index for indices, _ in samples.iterate_steps(EpochStart(offset=position)) for index in indices
        ]
        return (
            indices_drawn,
            torch.get_rng_state().tolist(),
            generator.get_state().tolist() if own_generator else None,
        )

    all_indices, *states = order(0)
    assert order(min(at, count)) == (all_indices[min(at, count) :], *states)
    torch.manual_seed(5)
    torchs = RandomSampler(
        range(count), generator=torch.Generator().manual_seed(6) if own_generator else None
    )
    assert all_indices == list(torchs)


def test_a_data_seed_determines_the_order_of_each_epoch_by_its_number():
    def epochs(start):
        options = LoaderOptions(seeded=True, seed=7)
        script = DataLoader(range(COUNT), batch_size=5, shuffle=True)
        backend = Single(Topology(), DeviceRuntime(torch.device("cpu")))
        loader = prepare_loader(script, backend, ActiveLoops(0, has_padding=False), options)
        loader.set_epoch(start)
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    first, second = epochs(0)
    assert epochs(1)[0] == second != first
    sampler = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(7 + 1))
    assert list(sampler) == second


@pytest.mark.parametrize("seedable", [False, True], ids=["drawn with the epoch", "of all epochs"])
def test_a_resumed_epoch_keeps_its_order_in_a_process_with_another_seed(ranks, seedable):
    def run(seed, seedable, steps, state=None):
        torch.manual_seed(seed)
        config = DataLoaderConfiguration(use_seedable_sampler=seedable)
        accelerator = Accelerator(dataloader_config=config)
        loader = prepare_ordered_loader(accelerator, "shuffled")
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        steps_read = gather_steps(accelerator, iterator, steps)
        state = loader.state_dict()
        return steps_read, state, gather_steps(accelerator, loader) if steps is None else []

    def continued(seedable):
        uninterrupted, _, following = run(1, seedable, None)
        first_steps, state, _ = run(1, seedable, 3)
        remaining, _, next_epoch = run(2, seedable, None, state)
        # An order that is drawn with its epoch is another one in the next epoch.
        return (
            first_steps + remaining == uninterrupted,
            next_epoch == following or not seedable,
            len(remaining) > 0,
        )

    assert ranks.run(continued, seedable) == [(True, True, True)] * ranks.size


def test_set_epoch_of_a_sampler_is_called_before_every_epoch(ranks):
    def record_calls():
        sampler = EpochSampler(COUNT)
        loader = Accelerator().prepare(DataLoader(range(COUNT), sampler=sampler, batch_size=PART))
        for _ in range(2):
            list(loader)
        next(iter(loader))
        list(loader)
        return sampler.epochs

    assert ranks.run(record_calls) == [[0, 1, 2, 3]] * ranks.size


def test_a_batch_sampler_as_sampler_passes_its_lists_to_the_dataset(ranks):
    """`batch_size=None` with a BatchSampler: the dataset receives the indices of a batch."""

    class Whole:
        def __getitem__(self, indices):
            return torch.tensor(indices)

        def __len__(self):
            return COUNT

    def read_samples():
        accelerator = Accelerator()
        sampler = BatchSampler(SequentialSampler(range(COUNT)), PART, drop_last=False)
        return gather_steps(
            accelerator, accelerator.prepare(DataLoader(Whole(), sampler=sampler, batch_size=None))
        )

    assert ranks.run(read_samples) == [list(range(COUNT))] * ranks.size


# Other data -----------------------------------------------------------------------------------


def prepare_shuffled(count=10, batch_size=2, **options):
    """Return an accelerator and a loader; `seedable` is an option of the accelerator."""
    torch.manual_seed(0)
    config = DataLoaderConfiguration(use_seedable_sampler=options.pop("seedable", False))
    accelerator = Accelerator(dataloader_config=config)
    data = options.pop("data", range(count))
    options = {"shuffle": True, **options}
    return accelerator, accelerator.prepare(DataLoader(data, batch_size=batch_size, **options))


def save_within_and_after(folder, **options):
    """Save after the second batch of five, and after the epoch."""
    accelerator, loader = prepare_shuffled(**options)
    for number, _ in enumerate(loader):
        if number == 1:
            accelerator.save_state(folder / "within an epoch")
    accelerator.save_state(folder / "between epochs")


def resume_with(folder, place, **options):
    accelerator, loader = prepare_shuffled(**options)
    accelerator.resume(folder / place)
    return list(loader)


OTHER_DATA = {
    "grown": ({"count": 12}, "the dataset has 12 samples, not 10"),
    "of another class": ({"data": list(range(10))}, "the dataset is a list, not range"),
    "in order": ({"shuffle": False}, "the order is drawn by a SequentialSampler, not RandomSampler"),
    "resampled": (
        {"shuffle": False, "sampler": RandomSampler(range(10), num_samples=6)},
        "the sampler draws 6 samples, not 10",
    ),
    "seedable": ({"seedable": True}, "use_seedable_sampler is True, not False"),
}


@pytest.mark.parametrize("change", OTHER_DATA)
def test_a_resume_within_an_epoch_of_other_data_is_reported(change, tmp_path, caplog):
    save_within_and_after(tmp_path)
    options, text = OTHER_DATA[change]
    assert resume_with(tmp_path, "within an epoch", **options)
    messages = [record.getMessage() for record in caplog.records if "other data" in record.getMessage()]
    assert len(messages) == 1
    assert text in messages[0]
    assert "may repeat samples" in messages[0]


@pytest.mark.parametrize("change", OTHER_DATA)
def test_a_resume_between_epochs_reports_another_dataset_only(change, tmp_path, caplog):
    save_within_and_after(tmp_path)
    options, text = OTHER_DATA[change]
    assert resume_with(tmp_path, "between epochs", **options)
    messages = [record.getMessage() for record in caplog.records if "other data" in record.getMessage()]
    assert [text in message for message in messages] == [True] * (change in {"grown", "of another class"})


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"batch_size": 1}, {"drop_last": True}],
    ids=lambda options: f"{options}",
)
def test_a_resume_of_the_same_data_reports_nothing(options, tmp_path, caplog):
    save_within_and_after(tmp_path)
    for place in ("within an epoch", "between epochs"):
        assert resume_with(tmp_path, place, **options)
    assert "data" not in caplog.text


def test_a_resume_that_begins_another_epoch_of_other_data_reads_all_of_it(tmp_path):
    """The cure of the warning."""
    save_within_and_after(tmp_path)
    accelerator, loader = prepare_shuffled(count=12)
    accelerator.resume(tmp_path / "within an epoch")
    loader.set_epoch(loader.epoch + 1)
    assert sorted(n for batch in loader for n in batch.tolist()) == list(range(12))


def test_a_resume_within_an_epoch_without_batches_left_is_reported(tmp_path, caplog):
    save_within_and_after(tmp_path)
    assert not resume_with(tmp_path, "within an epoch", count=4)
    assert "has no batches after the loaded state" in caplog.text


def test_a_resume_after_the_last_batch_of_an_epoch_reports_nothing(tmp_path, caplog):
    accelerator, loader = prepare_shuffled()
    for _ in loader:
        accelerator.save_state(tmp_path / "saved")
    assert not resume_with(tmp_path, "saved")
    assert not caplog.records
