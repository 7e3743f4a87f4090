"""The sizes of the device mesh, and options of sharding that are rejected."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.environment.layouts import (
    DIMENSION_NAMES,
    STYLES,
    FullyShard,
    Parallel,
    SettingsError,
    check_layout,
    name_dimension,
)
from tests.runtime.environment.test_settings import every_parallel

small = st.integers(1, 6)
shards = small | st.just("auto")


def list_sizes(parallel, world):
    """Return the sizes of `dp_replicate`, `dp_shard`, `cp` and `tp` for a number of processes."""
    return tuple(parallel.build_grid(world).size(role) for role in DIMENSION_NAMES)


@given(small, shards, small, small, st.integers(1, 300))
def test_sizes_of_a_mesh_multiply_to_the_world_size_or_are_rejected(replicate, shard, tp, cp, world):
    parallel = Parallel(dp_replicate=replicate, dp_shard=shard, tp=tp, cp=cp)
    others = replicate * cp * tp
    fits = world % others == 0 if shard == "auto" else world == others * shard
    if parallel.plain:
        assert list_sizes(parallel, world) == (world, 1, 1, 1)
    elif fits:
        sizes = list_sizes(parallel, world)
        assert math.prod(sizes) == world
        assert (sizes[0], *sizes[2:]) == (replicate, cp, tp)
        assert shard in {"auto", sizes[1]}
    else:
        with pytest.raises(SettingsError, match=rf"parallel: .*{world}"):
            parallel.build_grid(world)


@given(small, small, small, small)
def test_auto_takes_the_size_that_the_other_dimensions_leave(replicate, shard, tp, cp):
    parallel = Parallel(dp_replicate=replicate, dp_shard="auto", tp=tp, cp=cp)
    assert list_sizes(parallel, replicate * shard * cp * tp) == (replicate, shard, cp, tp)


@given(small, small, small)
def test_both_forms_of_splitting_sequences_have_the_same_ranks(shard, tp, parts):
    grids = [
        Parallel(dp_shard=shard, tp=tp, **{name: parts}).build_grid(shard * tp * parts)
        for name in ("cp", "sp")
    ]
    assert grids[0].sizes == grids[1].sizes
    names = [name_dimension(grid, "sequence") for grid in grids]
    assert names == (["cp", "sp"] if parts > 1 else ["cp", "cp"])


def test_sequences_are_split_in_one_form():
    with pytest.raises(SettingsError, match=r"parallel\.sp 4: parallel\.cp is 2, .*\. Set one of them"):
        Parallel(cp=2, sp=4)


@given(every_parallel)
def test_only_a_layout_without_sharding_is_plain(parallel):
    sizes = (parallel.dp_replicate, parallel.dp_shard, parallel.tp, parallel.cp, parallel.sp)
    assert parallel.plain == (sizes == (1, 1, 1, 1, 1))
    assert list_sizes(parallel, None)[0] == parallel.dp_replicate


def test_sharding_on_one_process_is_not_plain():
    alone = Parallel(dp_shard="auto")
    assert alone.shards
    assert not alone.plain
    assert list_sizes(alone, 1) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        (Parallel(tp=2), 4, "set dp_replicate: 2 (more replicas) or dp_shard: auto (more shards)"),
        (Parallel(dp_shard=4), 6, "is 4, and there are 6 processes. Start 4, or change the sizes"),
        (Parallel(sp=3), 4, "dp_shard: 1 x sp: 3 x tp: 1 is 3, and there are 4 processes. Start 3"),
        (Parallel(tp=2), 1, "is 2, and there is 1 process. Start 2"),
        (Parallel(dp_shard="auto", tp=4), 6, "there are 6 processes, and 6 is not a multiple of 4"),
    ],
)
def test_an_error_suggests_sizes_that_fit(parallel, world, message):
    with pytest.raises(SettingsError) as caught:
        parallel.build_grid(world)
    assert message in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "2", "all", None])
@pytest.mark.parametrize("name", ["dp_replicate", "dp_shard", "tp", "cp", "sp"])
def test_a_size_must_be_a_positive_integer(name, size):
    with pytest.raises(SettingsError, match=f"Invalid parallel.{name} "):
        Parallel(**{name: size})


@pytest.mark.parametrize("text", ["a,b", "", " a", "a b", "a\0b"])
def test_text_that_a_variable_cannot_contain_is_rejected(text):
    with pytest.raises(SettingsError, match=r"fully_shard\.ignore"):
        FullyShard(ignore=(text,))
    with pytest.raises(SettingsError, match=r"parallel\.tp_plan"):
        Parallel(tp_plan=((text, "colwise"),))
    with pytest.raises(SettingsError, match=r"parallel\.tp_plan"):
        Parallel(tp_plan=(("layers.*", text),))


@pytest.mark.parametrize(
    ("style", "message"), [("colwize", "Did you mean colwise?"), ("no", "Styles are colwise, ")]
)
def test_an_unknown_style_is_rejected_with_the_known_ones(style, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        Parallel(tp=2, tp_plan=(("layers.*.up", style),))


def test_the_styles_of_the_launcher_equal_those_of_the_runtime():
    from accel_runtime.parallel import tensor_parallel

    assert {*STYLES} == {*tensor_parallel.STYLE_NAMES, *tensor_parallel._CLASSES}


def test_a_module_name_must_not_contain_an_equals_sign():
    with pytest.raises(SettingsError, match="tp_plan"):
        Parallel(tp_plan=(("a=b", "colwise"),))


@pytest.mark.parametrize("wrap", ["", "0", "-1", "1.5", "Block,", "Block Other", "auto,none", "a-b"])
def test_wrap_must_be_class_names_a_number_or_a_keyword(wrap):
    with pytest.raises(SettingsError, match=r"fully_shard\.wrap"):
        FullyShard(wrap=wrap)


def test_an_invalid_reshard_after_forward_is_rejected():
    with pytest.raises(SettingsError, match="reshard_after_forward"):
        FullyShard(reshard_after_forward=-2)
    two = FullyShard(reshard_after_forward=2)
    assert check_layout(Parallel(dp_shard="auto"), two, 4).size("shard") == 4
    assert check_layout(Parallel(dp_shard="auto"), two, None).size("shard") == 1
    with pytest.raises(SettingsError, match="does not divide the 3 processes"):
        check_layout(Parallel(dp_shard=3), two, None)


@pytest.mark.parametrize(
    ("parallel", "options", "idle"),
    [
        (Parallel(), {"cpu_offload": True}, ["cpu_offload"]),
        (Parallel(dp_replicate=2), {"wrap": "Block"}, ["wrap"]),
        (Parallel(tp=2), {"activation_checkpointing": True, "wrap": "Block"}, []),
        (Parallel(tp=2), {"reduce_dtype": "fp32"}, ["reduce_dtype"]),
        (Parallel(cp=2), {"cpu_offload": True}, []),
        (Parallel(sp=2), {"cpu_offload": True}, []),
        (Parallel(dp_shard="auto"), {"cpu_offload": True}, []),
        (Parallel(), {}, []),
    ],
)
def test_an_option_without_effect_is_rejected(parallel, options, idle):
    section = FullyShard(**options)
    assert section.idle(parallel) == idle
    if idle:
        with pytest.raises(SettingsError, match=rf"fully_shard\.{idle[0]} has no effect"):
            check_layout(parallel, section, None)
    else:
        check_layout(parallel, section, None)


def test_a_tp_plan_without_tensor_parallelism_is_rejected():
    with pytest.raises(SettingsError, match="tp_plan has no effect with tp: 1"):
        check_layout(Parallel(tp_plan=(("a", "colwise"),)), FullyShard(), 4)
