"""Whose batch is it: checked against what one process with the global batch size would walk."""

from __future__ import annotations

from itertools import chain, count, cycle, islice, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accel_runtime.data.sharding import BatchSharding, batch_slices

WORLDS = (1, 2, 3, 4)
every_division = pytest.mark.parametrize(
    ("world", "split", "drop_last", "pad_last"),
    list(product(WORLDS, (False, True), (False, True), (False, True))),
    ids=str,
)


def chunks(items, size, *, drop_last=False):
    """The batches of a plain BatchSampler."""
    batches = [items[start : start + size] for start in range(0, len(items), size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]


def epoch(world, walk, **options):
    """What every rank is given: for every step, the indices of all ranks, and what all know of it."""
    ranks = [
        [
            (step[batch_slices(share)[rank]], share)
            for step, share in walk(BatchSharding(rank, world, **options))
        ]
        for rank in range(world)
    ]
    assert len({len(steps) for steps in ranks}) == 1, "ranks take different numbers of steps"
    together = list(zip(*ranks, strict=True))
    for step in together:
        assert len({share[:3] for _, share in step}) == 1, "ranks know different things of a step"
    return [([indices for indices, _ in step], [share for _, share in step]) for step in together]


def samples(step):
    """The samples of a step that are no repeats, in rank order."""
    parts, shares = step
    return [index for part, valid in zip(parts, shares[0].num_valid, strict=True) for index in part[:valid]]


def every_epoch(world, split, drop_last, pad_last):
    """All epochs of 0 to 20 samples: their number, the script's and the global batch size, the steps."""
    for number, part in product(range(21), range(1, 6)):
        size = part * world if split else part
        options = {"batch_size": size, "split": split, "drop_last": drop_last, "pad_last": pad_last}
        steps = epoch(world, lambda s, n=number: s.split_samples(range(n)), **options)
        yield number, size, part * world, steps


@every_division
def test_the_parts_of_a_step_are_the_global_batch_of_one_process(world, split, drop_last, pad_last):
    for number, _, global_size, steps in every_epoch(world, split, drop_last, pad_last):
        wanted = chunks(list(range(number)), global_size, drop_last=drop_last)
        assert [samples(step) for step in steps] == wanted


@every_division
def test_the_number_of_steps_is_known_beforehand(world, split, drop_last, pad_last):
    for number, size, _, steps in every_epoch(world, split, drop_last, pad_last):
        sharding = BatchSharding(world - 1, world, size, split, drop_last, pad_last)
        assert sharding.num_steps(number, sharding.padded_size) == len(steps)


@every_division
def test_all_ranks_have_batches_of_the_sizes_they_announce_and_none_is_empty(
    world, split, drop_last, pad_last
):
    for *_, steps in every_epoch(world, split, drop_last, pad_last):
        for parts, shares in steps:
            assert [len(part) for part in parts] == list(shares[0].batch_sizes)
            assert all(
                0 < size >= valid
                for size, valid in zip(shares[0].batch_sizes, shares[0].num_valid, strict=True)
            )


@every_division
def test_even_batches_are_full_on_several_processes_to_the_end(world, split, drop_last, pad_last):
    for _, _, global_size, steps in every_epoch(world, split, drop_last, pad_last):
        if world > 1 and pad_last:
            assert all(set(shares[0].batch_sizes) == {global_size // world} for _, shares in steps)


@pytest.mark.parametrize("drop_last", [False, True])
def test_one_process_that_keeps_shapes_completes_its_tail_from_the_start(drop_last):
    for number, size in product(range(21), range(1, 6)):
        sharding = BatchSharding(0, 1, size, drop_last=drop_last, static_shapes=True)
        steps = list(sharding.split_samples(range(number)))
        assert [step[: share.num_valid[0]] for step, share in steps] == chunks(
            list(range(number)), size, drop_last=drop_last
        )
        assert all(len(step) == size == share.batch_sizes[0] for step, share in steps)
        for step, share in steps:
            repeats = step[share.num_valid[0] :]
            assert repeats == [n % min(number, size) for n in range(len(repeats))]
        assert all(share.loss_scale == 1.0 for _, share in steps)


@every_division
def test_uneven_batches_differ_by_one_sample_at_most_and_repeat_only_where_nothing_is_left(
    world, split, drop_last, pad_last
):
    for *_, steps in every_epoch(world, split, drop_last, pad_last):
        for _, shares in steps if not pad_last else []:
            valid, sizes = shares[0].num_valid, shares[0].batch_sizes
            assert max(valid) - min(valid) <= 1
            assert all(size == max(n, 1) for size, n in zip(sizes, valid, strict=True))


@every_division
def test_factors_make_the_average_over_the_ranks_the_mean_over_the_samples(world, split, drop_last, pad_last):
    for *_, steps in every_epoch(world, split, drop_last, pad_last):
        for _, shares in steps:
            total = sum(shares[0].num_valid)
            wanted = [1.0] * world if pad_last else [n * world / total for n in shares[0].num_valid]
            assert [share.loss_scale for share in shares] == pytest.approx(wanted)


@every_division
def test_only_the_last_step_is_the_last(world, split, drop_last, pad_last):
    for *_, steps in every_epoch(world, split, drop_last, pad_last):
        lasts = [shares[0].is_last for _, shares in steps]
        assert lasts == [False] * (len(steps) - 1) + [True] * bool(steps)


@every_division
def test_repeats_of_even_batches_come_from_the_start_of_the_epoch(world, split, drop_last, pad_last):
    for *_, steps in every_epoch(world, split, drop_last, pad_last):
        for parts, shares in steps if pad_last else []:
            repeats = [part[valid:] for part, valid in zip(parts, shares[0].num_valid, strict=True)]
            flat = list(chain.from_iterable(repeats))
            assert flat == list(islice(cycle(samples(steps[0])), len(flat)))


@every_division
def test_from_any_position_the_rest_of_the_epoch_is_what_it_was(world, split, drop_last, pad_last):
    options = {"split": split, "drop_last": drop_last, "pad_last": pad_last}
    for number, size, global_size, steps in every_epoch(world, split, drop_last, pad_last):
        for at in range(1, len(steps)):
            rest, head = range(at * global_size, number), range(min(number, global_size))
            again = epoch(world, lambda s, r=rest, h=head: s.split_samples(r, h), batch_size=size, **options)
            assert again == steps[at:]


@pytest.mark.parametrize(
    ("number", "size", "options", "wanted"),
    [
        (7, 2, {}, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (7, 2, {"split": True}, [[[0], [2], [4], [6]], [[1], [3], [5], [0]]]),
        (1, 2, {}, [[[0, 0]], [[0, 0]]]),
        (7, 2, {"drop_last": True}, [[[0, 1]], [[2, 3]]]),
        (3, 1, {}, [[[0], [2]], [[1], [0]]]),
        (7, 2, {"pad_last": False}, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
    ],
)
def test_the_batches_scripts_know_from_accelerate(number, size, options, wanted):
    steps = epoch(2, lambda s: s.split_samples(range(number)), batch_size=size, **options)
    assert [[parts[rank] for parts, _ in steps] for rank in range(2)] == wanted


def test_a_rank_for_which_nothing_is_left_repeats_a_sample_that_counts_for_nothing():
    """Accelerate gives it no batch, and the others wait for it."""
    (_, _), (parts, shares) = epoch(2, lambda s: s.split_samples(range(9)), batch_size=4, pad_last=False)
    assert parts == [[8], [8]]
    assert shares[0].num_valid == (1, 0)
    assert [share.loss_scale for share in shares] == [2.0, 0.0]


def running(lengths):
    return [sum(lengths[: number + 1]) for number in range(len(lengths))]


script_batches = st.lists(st.integers(1, 5), max_size=12).map(
    lambda lengths: [
        list(range(end - length, end)) for length, end in zip(lengths, running(lengths), strict=True)
    ]
)


@given(script_batches, st.sampled_from(WORLDS), st.booleans(), st.booleans(), st.none() | st.integers(1, 5))
@example(batches=[[0, 1, 2]], world=2, drop_last=False, pad_last=True, batch_size=1)
def test_batches_of_any_lengths_are_shared_out_once_and_in_order(
    batches, world, drop_last, pad_last, batch_size
):
    """Also where a sampler announces a `batch_size` its batches do not keep to."""
    options = {"batch_size": batch_size, "drop_last": drop_last, "pad_last": pad_last}
    steps = epoch(world, lambda s: s.group_batches(batches), **options)
    rounds = chunks(batches, world, drop_last=drop_last)
    assert [samples(step) for step in steps] == [list(chain.from_iterable(round_)) for round_ in rounds]
    assert BatchSharding(0, world, **options).num_steps(len(batches), world) == len(steps)
    for parts, shares in steps:
        assert [len(part) for part in parts] == list(shares[0].batch_sizes)
        steps_are_regular = batch_size is not None and set(map(len, batches)) == {batch_size}
        assert not (pad_last and steps_are_regular) or len(set(shares[0].batch_sizes)) == 1


@given(script_batches, st.sampled_from(WORLDS))
def test_batches_of_unequal_sizes_are_not_padded_to_the_largest(batches, world):
    """A rank without a batch in the last step is given one of the first step."""
    steps = epoch(world, lambda s: s.group_batches(batches), batch_size=None, pad_last=True)
    for (parts, _), step in zip(steps, chunks(batches, world), strict=True):
        repeats = islice(cycle(batches[:world]), world - len(step))
        assert parts == [*step, *repeats]


@given(script_batches, st.integers(2, 4))
def test_ranks_that_need_equal_shapes_pad_batches_to_the_largest_of_a_step(batches, world):
    steps = epoch(
        world, lambda s: s.group_batches(batches), batch_size=None, pad_last=True, static_shapes=True
    )
    for (parts, _), step in zip(steps, chunks(batches, world), strict=True):
        assert set(map(len, parts)) == {max(map(len, step))}


@given(script_batches, st.sampled_from(WORLDS), st.integers(1, 5), st.booleans())
def test_split_batches_longer_than_announced_lose_nothing(batches, world, part, pad_last):
    steps = epoch(
        world, lambda s: s.group_batches(batches), batch_size=part * world, split=True, pad_last=pad_last
    )
    assert [samples(step) for step in steps] == batches


@given(script_batches)
def test_batches_of_unknown_size_stay_whole(batches):
    """What one rank's batch was in the script is one rank's batch in the run."""
    steps = epoch(3, lambda s: s.group_batches(batches), batch_size=None)
    for (parts, shares), round_ in zip(steps, chunks(batches, 3), strict=True):
        valid = [part[:n] for part, n in zip(parts, shares[0].num_valid, strict=True)]
        assert valid == [*round_, *[[]] * (3 - len(round_))]


@given(script_batches, st.sampled_from(WORLDS), st.booleans())
def test_from_any_round_the_rest_of_the_batches_is_what_it_was(batches, world, pad_last):
    options = {"batch_size": None, "pad_last": pad_last}
    steps = epoch(world, lambda s: s.group_batches(batches), **options)
    for at in range(1, len(steps)):
        rest, head = batches[at * world :], batches[:world]
        assert epoch(world, lambda s, r=rest, h=head: s.group_batches(r, h), **options) == steps[at:]


def test_batches_are_drawn_as_they_are_needed():
    """An epoch without end can be walked."""
    indices, share = next(BatchSharding(1, 2, 2).split_samples(count()))
    assert indices[batch_slices(share)[1]] == [2, 3]
    assert not share.is_last


def test_indices_may_be_anything_hashable():
    ((parts, _),) = epoch(2, lambda s: s.split_samples(["a", "b", "c"]), batch_size=2)
    assert parts == [["a", "b"], ["c", "a"]]
