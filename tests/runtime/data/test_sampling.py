"""Whose batch is it: checked against what one process with the global batch size would walk."""

from __future__ import annotations

from itertools import chain, cycle, islice, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accel_runtime.data.sampling import Sharding

WORLDS = (1, 2, 3, 4)
every_division = pytest.mark.parametrize(
    ("world", "split", "drop_last"),
    list(product(WORLDS, (False, True), (False, True))),
    ids=str,
)


def chunks(items, size, *, drop_last=False):
    """The batches of a plain BatchSampler."""
    batches = [items[start : start + size] for start in range(0, len(items), size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]


def epoch(batches, world, *, split=False, drop_last=False, batch_size=None):
    """What every rank is given: for every step, the shares of all ranks."""
    ranks = [
        list(Sharding(rank, world, split, drop_last).shares(batches, batch_size)) for rank in range(world)
    ]
    assert len({len(shares) for shares in ranks}) == 1, "ranks take different numbers of steps"
    return list(zip(*ranks, strict=True))


def samples(step):
    """The samples of a step that are no repeats, in rank order."""
    return [
        index for share, count in zip(step, step[0].valid, strict=True) for index in share.indices[:count]
    ]


def sizes(world, split):
    """Batch sizes a script may give: with split, those the ranks can divide."""
    return [size * (world if split else 1) for size in range(1, 6)]


def every_epoch(world, split, drop_last):
    """All epochs of 0 to 20 samples: their number, the global batch size, the sampler's batches, the steps."""
    for count, size in product(range(21), sizes(world, split)):
        batches = chunks(list(range(count)), size, drop_last=drop_last)
        steps = epoch(batches, world, split=split, drop_last=drop_last, batch_size=size)
        yield count, size if split else size * world, batches, steps


@every_division
def test_the_slices_of_a_step_are_the_global_batch_of_one_process(world, split, drop_last):
    for count, global_size, _, steps in every_epoch(world, split, drop_last):
        wanted = chunks(list(range(count)), global_size, drop_last=drop_last)
        assert [samples(step) for step in steps] == wanted


@every_division
def test_the_number_of_steps_is_known_beforehand(world, split, drop_last):
    for _, _, batches, steps in every_epoch(world, split, drop_last):
        for rank in range(world):
            assert Sharding(rank, world, split, drop_last).steps(len(batches)) == len(steps)


@every_division
def test_all_ranks_have_batches_of_the_size_they_announce(world, split, drop_last):
    for *_, steps in every_epoch(world, split, drop_last):
        for step in steps:
            assert {len(share.indices) for share in step} == {share.size for share in step} == {step[0].size}
            assert len({share.valid for share in step}) == 1
            assert len(step[0].valid) == world


@every_division
def test_batches_are_full_on_several_processes_even_at_the_end(world, split, drop_last):
    for _, global_size, _, steps in every_epoch(world, split, drop_last):
        if world > 1:
            assert all(step[0].size == global_size // world for step in steps)


@every_division
def test_only_the_last_step_is_the_last(world, split, drop_last):
    for *_, steps in every_epoch(world, split, drop_last):
        lasts = [{share.last for share in step} for step in steps]
        assert lasts == [{False}] * (len(steps) - 1) + [{True}] * bool(steps)


@every_division
def test_repeats_come_from_the_start_of_the_epoch(world, split, drop_last):
    for *_, steps in every_epoch(world, split, drop_last):
        for step in steps:
            repeats = [share.indices[count:] for share, count in zip(step, step[0].valid, strict=True)]
            flat = list(chain.from_iterable(repeats))
            assert flat == list(islice(cycle(samples(steps[0])), len(flat)))


@pytest.mark.parametrize(
    ("count", "size", "options", "wanted"),
    [
        (7, 2, {}, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (7, 2, {"split": True}, [[[0], [2], [4], [6]], [[1], [3], [5], [0]]]),
        (1, 2, {}, [[[0, 0]], [[0, 0]]]),
        (7, 2, {"drop_last": True}, [[[0, 1]], [[2, 3]]]),
        (3, 1, {}, [[[0], [2]], [[1], [0]]]),
    ],
)
def test_the_batches_scripts_know_from_accelerate(count, size, options, wanted):
    batches = chunks(list(range(count)), size, drop_last=options.get("drop_last", False))
    steps = epoch(batches, 2, batch_size=size, **options)
    assert [[step[rank].indices for step in steps] for rank in range(2)] == wanted


one_process_batches = st.lists(st.integers(1, 5), max_size=12).map(
    lambda lengths: [
        list(range(end - length, end)) for length, end in zip(lengths, _running(lengths), strict=True)
    ]
)


def _running(lengths):
    return [sum(lengths[: count + 1]) for count in range(len(lengths))]


@given(one_process_batches, st.sampled_from(WORLDS), st.booleans(), st.none() | st.integers(1, 5))
@example(batches=[[0, 1, 2]], world=2, drop_last=False, batch_size=1)
def test_batches_of_any_lengths_are_shared_out_once_and_in_order(batches, world, drop_last, batch_size):
    """Also where a sampler announces a `batch_size` its batches do not keep to."""
    steps = epoch(batches, world, drop_last=drop_last, batch_size=batch_size)
    rounds = chunks(batches, world, drop_last=drop_last)
    assert [samples(step) for step in steps] == [list(chain.from_iterable(round_)) for round_ in rounds]
    for step in steps:
        assert {len(share.indices) for share in step} == {step[0].size}


@given(one_process_batches, st.sampled_from(WORLDS), st.integers(1, 5))
def test_split_batches_longer_than_announced_lose_nothing(batches, world, part):
    steps = epoch(batches, world, split=True, batch_size=part * world)
    assert [samples(step) for step in steps] == batches


@given(one_process_batches)
def test_batches_of_unknown_size_stay_whole(batches):
    """What one rank's batch was in the script is one rank's batch in the run."""
    for step, round_ in zip(epoch(batches, 3), chunks(batches, 3), strict=True):
        valid = [share.indices[:count] for share, count in zip(step, step[0].valid, strict=True)]
        assert valid == [*round_, *[[]] * (3 - len(round_))]


def test_batches_are_drawn_as_they_are_needed():
    """An epoch without end can be walked."""

    def endless():
        index = 0
        while True:
            yield [index, index + 1]
            index += 2

    first = next(Sharding(1, 2).shares(endless(), 2))
    assert first.indices == [2, 3]
    assert not first.last


def test_indices_may_be_anything_hashable():
    steps = epoch([["a", "b"], ["c"]], 2, batch_size=2)
    assert [share.indices for share in steps[0]] == [["a", "b"], ["c", "a"]]
