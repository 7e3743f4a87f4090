"""Batch ownership of ranks, compared with one process that uses the global batch size."""

from __future__ import annotations

from itertools import chain, count, cycle, islice, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accel_runtime.data.sharding import BatchSharding, batch_slices

WORLDS = (1, 2, 3, 4)
every_sharding = pytest.mark.parametrize(
    ("world", "split", "drop_last", "pad_last"),
    list(product(WORLDS, (False, True), (False, True), (False, True))),
    ids=str,
)


def split_batches(items, size, *, drop_last=False):
    """Return the batches of a plain BatchSampler."""
    batches = [items[start : start + size] for start in range(0, len(items), size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]


def read_epoch(world, read, **options):
    """Return, for every step, the indices and the StepInfo of each rank."""
    ranks = [
        [
            (step[batch_slices(step_info)[rank]], step_info)
            for step, step_info in read(BatchSharding(rank, world, **options))
        ]
        for rank in range(world)
    ]
    assert len({len(steps) for steps in ranks}) == 1, "ranks take different numbers of steps"
    batches_by_step = list(zip(*ranks, strict=True))
    for step in batches_by_step:
        assert len({step_info[:3] for _, step_info in step}) == 1, "ranks know different things of a step"
    return [
        ([indices for indices, _ in step], [step_info for _, step_info in step]) for step in batches_by_step
    ]


def samples(step):
    """Return the samples of a step without padding, in rank order."""
    parts, step_infos = step
    return [
        index for part, valid in zip(parts, step_infos[0].num_valid, strict=True) for index in part[:valid]
    ]


def generate_epochs(world, split, drop_last, pad_last):
    """Yield, for 0 to 20 samples, their number, the local and global batch size, and the steps."""
    for number, part in product(range(21), range(1, 6)):
        size = part * world if split else part
        options = {"batch_size": size, "split": split, "drop_last": drop_last, "pad_last": pad_last}
        steps = read_epoch(world, lambda s, n=number: s.split_samples(range(n)), **options)
        yield number, size, part * world, steps


@every_sharding
def test_the_local_batches_of_a_step_form_the_global_batch(world, split, drop_last, pad_last):
    for number, _, global_size, steps in generate_epochs(world, split, drop_last, pad_last):
        expected = split_batches(list(range(number)), global_size, drop_last=drop_last)
        assert [samples(step) for step in steps] == expected


@every_sharding
def test_num_steps_equals_the_number_of_steps(world, split, drop_last, pad_last):
    for number, size, _, steps in generate_epochs(world, split, drop_last, pad_last):
        sharding = BatchSharding(world - 1, world, size, split, drop_last, pad_last)
        assert sharding.num_steps(number, sharding.padded_size) == len(steps)


@every_sharding
def test_batches_have_the_announced_sizes_and_none_is_empty(world, split, drop_last, pad_last):
    for *_, steps in generate_epochs(world, split, drop_last, pad_last):
        for parts, step_infos in steps:
            assert [len(part) for part in parts] == list(step_infos[0].batch_sizes)
            assert all(
                0 < size >= valid
                for size, valid in zip(step_infos[0].batch_sizes, step_infos[0].num_valid, strict=True)
            )


@every_sharding
def test_even_batches_are_full_up_to_the_last_step(world, split, drop_last, pad_last):
    for _, _, global_size, steps in generate_epochs(world, split, drop_last, pad_last):
        if world > 1 and pad_last:
            assert all(set(step_infos[0].batch_sizes) == {global_size // world} for _, step_infos in steps)


@pytest.mark.parametrize("drop_last", [False, True])
def test_static_shapes_pad_the_last_batch_from_the_start_of_the_epoch(drop_last):
    for number, size in product(range(21), range(1, 6)):
        sharding = BatchSharding(0, 1, size, drop_last=drop_last, static_shapes=True)
        steps = list(sharding.split_samples(range(number)))
        assert [step[: step_info.num_valid[0]] for step, step_info in steps] == split_batches(
            list(range(number)), size, drop_last=drop_last
        )
        assert all(len(step) == size == step_info.batch_sizes[0] for step, step_info in steps)
        for step, step_info in steps:
            repeats = step[step_info.num_valid[0] :]
            assert repeats == [n % min(number, size) for n in range(len(repeats))]
        assert all(step_info.loss_scale == 1.0 for _, step_info in steps)


@every_sharding
def test_uneven_batches_differ_by_at_most_one_sample_and_pad_only_empty_batches(
    world, split, drop_last, pad_last
):
    for *_, steps in generate_epochs(world, split, drop_last, pad_last):
        for _, step_infos in steps if not pad_last else []:
            valid, sizes = step_infos[0].num_valid, step_infos[0].batch_sizes
            assert max(valid) - min(valid) <= 1
            assert all(size == max(n, 1) for size, n in zip(sizes, valid, strict=True))


@every_sharding
def test_loss_scales_turn_the_average_over_ranks_into_the_mean_over_samples(
    world, split, drop_last, pad_last
):
    for *_, steps in generate_epochs(world, split, drop_last, pad_last):
        for _, step_infos in steps:
            total = sum(step_infos[0].num_valid)
            expected = [1.0] * world if pad_last else [n * world / total for n in step_infos[0].num_valid]
            assert [step_info.loss_scale for step_info in step_infos] == pytest.approx(expected)


@every_sharding
def test_only_the_last_step_has_is_last(world, split, drop_last, pad_last):
    for *_, steps in generate_epochs(world, split, drop_last, pad_last):
        lasts = [step_infos[0].is_last for _, step_infos in steps]
        assert lasts == [False] * (len(steps) - 1) + [True] * bool(steps)


@every_sharding
def test_padding_of_even_batches_comes_from_the_start_of_the_epoch(world, split, drop_last, pad_last):
    for *_, steps in generate_epochs(world, split, drop_last, pad_last):
        for parts, step_infos in steps if pad_last else []:
            repeats = [part[valid:] for part, valid in zip(parts, step_infos[0].num_valid, strict=True)]
            flat = list(chain.from_iterable(repeats))
            assert flat == list(islice(cycle(samples(steps[0])), len(flat)))


@every_sharding
def test_the_remaining_steps_from_any_offset_are_unchanged(world, split, drop_last, pad_last):
    options = {"split": split, "drop_last": drop_last, "pad_last": pad_last}
    for number, size, global_size, steps in generate_epochs(world, split, drop_last, pad_last):
        for at in range(1, len(steps)):
            remaining, head = range(at * global_size, number), range(min(number, global_size))
            resumed = read_epoch(
                world, lambda s, r=remaining, h=head: s.split_samples(r, h), batch_size=size, **options
            )
            assert resumed == steps[at:]


@pytest.mark.parametrize(
    ("number", "size", "options", "expected"),
    [
        (7, 2, {}, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (7, 2, {"split": True}, [[[0], [2], [4], [6]], [[1], [3], [5], [0]]]),
        (1, 2, {}, [[[0, 0]], [[0, 0]]]),
        (7, 2, {"drop_last": True}, [[[0, 1]], [[2, 3]]]),
        (3, 1, {}, [[[0], [2]], [[1], [0]]]),
        (7, 2, {"pad_last": False}, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
    ],
)
def test_batches_are_those_of_accelerate(number, size, options, expected):
    steps = read_epoch(2, lambda s: s.split_samples(range(number)), batch_size=size, **options)
    assert [[parts[rank] for parts, _ in steps] for rank in range(2)] == expected


def test_a_rank_without_samples_repeats_one_with_loss_scale_zero():
    """Accelerate gives this rank no batch, and the others wait for it."""
    (_, _), (parts, step_infos) = read_epoch(
        2, lambda s: s.split_samples(range(9)), batch_size=4, pad_last=False
    )
    assert parts == [[8], [8]]
    assert step_infos[0].num_valid == (1, 0)
    assert [step_info.loss_scale for step_info in step_infos] == [2.0, 0.0]


def cumulative_sums(lengths):
    return [sum(lengths[: number + 1]) for number in range(len(lengths))]


script_batches = st.lists(st.integers(1, 5), max_size=12).map(
    lambda lengths: [
        list(range(end - length, end)) for length, end in zip(lengths, cumulative_sums(lengths), strict=True)
    ]
)


@given(script_batches, st.sampled_from(WORLDS), st.booleans(), st.booleans(), st.none() | st.integers(1, 5))
@example(batches=[[0, 1, 2]], world=2, drop_last=False, pad_last=True, batch_size=1)
def test_batches_of_any_length_are_distributed_once_and_in_order(
    batches, world, drop_last, pad_last, batch_size
):
    """Also if the batches of a sampler differ from its `batch_size`."""
    options = {"batch_size": batch_size, "drop_last": drop_last, "pad_last": pad_last}
    steps = read_epoch(world, lambda s: s.group_batches(batches), **options)
    rounds = split_batches(batches, world, drop_last=drop_last)
    assert [samples(step) for step in steps] == [list(chain.from_iterable(round_)) for round_ in rounds]
    assert BatchSharding(0, world, **options).num_steps(len(batches), world) == len(steps)
    for parts, step_infos in steps:
        assert [len(part) for part in parts] == list(step_infos[0].batch_sizes)
        steps_are_regular = batch_size is not None and set(map(len, batches)) == {batch_size}
        assert not (pad_last and steps_are_regular) or len(set(step_infos[0].batch_sizes)) == 1


@given(script_batches, st.sampled_from(WORLDS))
def test_batches_of_unequal_sizes_are_not_padded_to_the_largest(batches, world):
    """A rank without a batch in the last step receives one of the first step."""
    steps = read_epoch(world, lambda s: s.group_batches(batches), batch_size=None, pad_last=True)
    for (parts, _), step in zip(steps, split_batches(batches, world), strict=True):
        repeats = islice(cycle(batches[:world]), world - len(step))
        assert parts == [*step, *repeats]


@given(script_batches, st.integers(2, 4))
def test_static_shapes_pad_batches_to_the_largest_of_a_step(batches, world):
    steps = read_epoch(
        world, lambda s: s.group_batches(batches), batch_size=None, pad_last=True, static_shapes=True
    )
    for (parts, _), step in zip(steps, split_batches(batches, world), strict=True):
        assert set(map(len, parts)) == {max(map(len, step))}


@given(script_batches, st.sampled_from(WORLDS), st.integers(1, 5), st.booleans())
def test_split_batches_longer_than_the_batch_size_lose_no_sample(batches, world, part, pad_last):
    steps = read_epoch(
        world, lambda s: s.group_batches(batches), batch_size=part * world, split=True, pad_last=pad_last
    )
    assert [samples(step) for step in steps] == batches


@given(script_batches)
def test_batches_of_unknown_size_are_not_split(batches):
    """A batch of the script is the batch of one rank."""
    steps = read_epoch(3, lambda s: s.group_batches(batches), batch_size=None)
    for (parts, step_infos), round_ in zip(steps, split_batches(batches, 3), strict=True):
        valid = [part[:n] for part, n in zip(parts, step_infos[0].num_valid, strict=True)]
        assert valid == [*round_, *[[]] * (3 - len(round_))]


@given(script_batches, st.sampled_from(WORLDS), st.booleans())
def test_the_remaining_batches_from_any_step_are_unchanged(batches, world, pad_last):
    options = {"batch_size": None, "pad_last": pad_last}
    steps = read_epoch(world, lambda s: s.group_batches(batches), **options)
    for at in range(1, len(steps)):
        remaining, head = batches[at * world :], batches[:world]
        assert (
            read_epoch(world, lambda s, r=remaining, h=head: s.group_batches(r, h), **options) == steps[at:]
        )


def test_batches_are_drawn_lazily():
    """An endless epoch can be iterated."""
    indices, step_info = next(BatchSharding(1, 2, 2).split_samples(count()))
    assert indices[batch_slices(step_info)[1]] == [2, 3]
    assert not step_info.is_last


def test_indices_can_be_any_hashable_objects():
    ((parts, _),) = read_epoch(2, lambda s: s.split_samples(["a", "b", "c"]), batch_size=2)
    assert parts == [["a", "b"], ["c", "a"]]
