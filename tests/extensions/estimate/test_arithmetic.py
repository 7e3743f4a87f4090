"""Arithmetic of layouts, compared with numbers calculated by hand."""

from __future__ import annotations

import pytest

from accel_runtime.extensions.estimate.memory import (
    Activations,
    Formats,
    ParallelLayout,
    Parameter,
    compute_usage,
    list_splits,
    list_variants,
    local_shape,
)

PLAIN = Formats()
BF16 = Formats(gathered=2, reduced=4)


def parameter(*shape, group=None, **more):
    return Parameter(shape, 4, more.pop("trained", True), group=group, **more)


def sharded(dp_shard, tp=1, dp_replicate=1, **more):
    return ParallelLayout(dp_replicate, dp_shard, tp, sharded=True, wrapped=True, **more)


@pytest.mark.parametrize(
    ("shape", "dim", "layout", "part"),
    [
        ((10, 3), None, sharded(4), (3, 3)),
        ((8, 3), None, sharded(4), (2, 3)),
        ((1,), None, sharded(4), (1,)),
        ((8, 6), 0, sharded(2, tp=2), (2, 6)),
        ((8, 6), 1, sharded(4, tp=2), (2, 3)),
        ((8, 6), 0, ParallelLayout(1, 1, 2, sharded=False), (4, 6)),
        ((8, 6), None, ParallelLayout(4, 1, 1, sharded=False), (8, 6)),
    ],
)
def test_local_shape_is_that_of_the_rank_with_the_largest_shard(shape, dim, layout, part):
    assert local_shape(parameter(*shape, dim=dim), layout) == part


def test_frozen_parameters_count_without_gradients():
    parameters = [parameter(8, 2), parameter(8, 4, trained=False)]
    usage = compute_usage(parameters, sharded(4), PLAIN, optimizer=7, buffers=5)
    assert (usage.parameters, usage.gradients, usage.optimizer, usage.buffers) == (48, 16, 7, 5)
    assert usage.activations is None


def test_working_memory_holds_two_gathered_modules_and_one_full_gradient():
    units = [parameter(100, group=0), parameter(80, group=1), parameter(60, group=2)]
    remaining = parameter(20)
    usage = compute_usage([*units, remaining], sharded(2, reshard_after_forward=True), PLAIN, optimizer=0)
    # Parameters of 100, 80 and the rest; the gradient of 100, and once more as it is averaged.
    assert usage.working == 4 * (100 + 80 + 20) + 4 * 100 * 2
    unresharded = compute_usage(
        [*units, remaining], sharded(2, reshard_after_forward=False), PLAIN, optimizer=0
    )
    assert unresharded.working == 4 * (100 + 80 + 60 + 20) + 4 * 100 * 2
    half = compute_usage([*units, remaining], sharded(2, reshard_after_forward=True), BF16, optimizer=0)
    assert half.working == 2 * (100 + 80 + 20) + (2 + 4) * 100
    assert half.parameters == usage.parameters, "what is held stays in the model's own format"


def test_gathered_integers_keep_their_size():
    usage = compute_usage([parameter(10, floating=False, trained=False)], sharded(2), BF16, optimizer=0)
    assert usage.working == 40


def test_only_replicas_need_gradient_buckets():
    layout = ParallelLayout(1, 1, 1, sharded=False)
    activations = Activations(full=400, checkpointed=100, largest=8)
    usage = compute_usage(
        [parameter(10)], ParallelLayout(2, 1, 1, sharded=False), PLAIN, optimizer=0, activations=activations
    )
    assert usage.working == 40 + 8
    assert compute_usage([parameter(10)], layout, PLAIN, optimizer=0, activations=activations).working == 8


def test_working_memory_covers_the_optimizer_step_if_activations_are_small():
    usage = compute_usage(
        [parameter(10)],
        ParallelLayout(1, 1, 1, sharded=False),
        PLAIN,
        optimizer=80,
        activations=Activations(4, 4, 4),
    )
    assert usage.working == 36
    assert usage.total == 40 + 40 + 80 + 4 + 36


def test_activation_checkpointing_uses_the_checkpointed_size():
    activations = Activations(full=400, checkpointed=100, largest=8)
    layout = sharded(2, activation_checkpointing=True)
    assert (
        compute_usage([parameter(2)], layout, PLAIN, optimizer=0, activations=activations).activations == 100
    )


def test_list_splits_returns_every_split_once():
    assert list_splits(1) == [(1, 1, 1)]
    assert list_splits(4) == [(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]
    assert all(a * b * c == 12 for a, b, c in list_splits(12))
    assert len(set(list_splits(12))) == len(list_splits(12)) == 18


def test_list_variants_contains_only_supported_options():
    replicas = list_variants((4, 1, 1))
    assert [(v.sharded, v.wrapped, v.activation_checkpointing) for v in replicas] == [(False, False, False)]
    assert {(v.reshard_after_forward, v.activation_checkpointing) for v in list_variants((1, 4, 1))} == {
        (False, False), (True, False), (False, True), (True, True)
    }  # fmt: skip
    assert [(v.sharded, v.activation_checkpointing) for v in list_variants((1, 1, 2))] == [
        (False, False),
        (False, True),
    ]
    assert all(v.sharded and not v.wrapped for v in list_variants((2, 1, 2))), (
        "gradients of copies are averaged by fully_shard"
    )
    assert [v.activation_checkpointing for v in list_variants((1, 1, 1))] == [False, True, True]


def test_layouts_are_ordered_replicas_shards_tensor_parallel():
    every = [layout for split in list_splits(4) for layout in list_variants(split)]
    order = sorted(every, key=lambda layout: layout.division)
    assert (order[0].dp_replicate, order[0].sharded) == (4, False)
    assert [(v.dp_shard, v.reshard_after_forward) for v in order[1:5]] == [
        (2, False), (2, True), (4, False), (4, True)
    ]  # fmt: skip
    assert order[5].activation_checkpointing
    assert [v.tp for v in order] == sorted(v.tp for v in order)
