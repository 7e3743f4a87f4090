"""The speed of a run: throughput, and ranks or nodes that are slower than the others."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.runs.heartbeats import Totals
from accel_cli.runs.speed import (
    RankSpeed,
    Throughput,
    describe_global_batch,
    describe_slow_rank,
    describe_throughput,
)


def build_speed(own=0.6, *, steps=200, step_time=1.0, host="a", **changes):
    """Return the speed of a rank that spends its own time in forward passes, unless `changes` has others."""
    values = {
        "data": 0.001,
        "forward": own,
        "backward": 0.01,
        "update": 0.0,
        "samples": 64,
        "tokens": 0,
    }
    parts = {name: changes.get(name, value) for name, value in values.items()}
    means = Totals(steps=1, time=step_time, own=own, wait=step_time - own, **parts)
    flops, peak_flops = changes.get("flops", 0), changes.get("peak_flops", 0)
    return RankSpeed(steps, steps * step_time, means, 1 / step_time, flops, peak_flops, host)


def build_speeds(*own_times, **options):
    return {rank: build_speed(own, **options) for rank, own in enumerate(own_times)}


def test_a_rank_with_more_own_time_than_most_is_named():
    assert describe_slow_rank(build_speeds(0.6, 0.61, 0.9, 0.6)) == (
        "rank 2 was slower than the others: 900 ms of own time per step, 50% above the median of 600 ms; mostly in forward passes: 900 ms instead of 600 ms"
    )


@pytest.mark.parametrize(
    ("parts", "ending"),
    [
        ({"data": 0.4}, "; mostly waiting for data: 400 ms instead of 1 ms"),
        ({"forward": 0.45, "data": 0.15}, "; mostly in forward passes: 450 ms instead of 200 ms"),
        ({"forward": 0.45, "data": 0.0}, "; mostly before backward passes: 450 ms instead of 200 ms"),
        ({"backward": 0.5}, "; mostly in backward passes: 500 ms instead of 100 ms"),
        ({"update": 0.3}, "; mostly in updates (clipping, optimizer step): 300 ms instead of 0 ms"),
        ({}, "; mostly between steps: 599 ms instead of 299 ms"),
        ({"backward": 0.0}, "; no single part of its steps explains it"),
        ({"forward": 0.3, "data": 0.1, "update": 0.1}, "; no single part of its steps explains it"),
    ],
    ids=[
        "data",
        "forward",
        "a script that loads its data itself",
        "backward",
        "update",
        "rest",
        "a rest with unseen backward passes",
        "three parts",
    ],
)
def test_a_part_is_named_if_it_is_at_least_half_of_the_excess(parts, ending):
    """The other ranks spend 200 ms in forward, 100 ms in backward passes, and 300 ms between steps."""
    usual = {"forward": 0.2, "backward": 0.1}
    others = build_speeds(0.6, 0.6, **usual)
    assert describe_slow_rank(others | {2: build_speed(0.9, **(usual | parts))}).endswith(
        f"above the median of 600 ms{ending}"
    )


def test_a_node_whose_ranks_are_all_slower_is_named():
    fast = {rank: build_speed(0.6, host="n0") for rank in range(2)}
    slow = {rank: build_speed(0.9, host="n1") for rank in range(2, 4)}
    assert describe_slow_rank(fast | slow).startswith(
        "node n1 (ranks 2 and 3) was slower than the others: 900 ms"
    )
    assert describe_slow_rank(fast | slow | {3: build_speed(0.6, host="n1")}).startswith(
        "rank 2 on n1 was slower"
    )


@pytest.mark.parametrize(
    "speeds",
    [
        build_speeds(0.6, 0.65),
        build_speeds(0.001, 0.002),
        build_speeds(0.6, 0.9, steps=50),
        build_speeds(0.6, 0.9, steps=19, step_time=10),
        build_speeds(0.9),
        build_speeds(0.0, 0.0),
        {},
    ],
    ids=[
        "less than 10 %",
        "a small share of the step",
        "a short run",
        "few steps",
        "one rank",
        "no own time, as of a script whose backward passes are not seen",
        "no rank",
    ],
)
def test_no_rank_is_named_otherwise(speeds):
    assert describe_slow_rank(speeds) == ""


def test_the_throughput_is_that_of_all_ranks_and_mfu_that_of_one():
    """Each rank counts the samples of all; one that is a step behind changes nothing."""
    speeds = build_speeds(0.6, 0.6, step_time=0.05, samples=64, tokens=8192, flops=10**12, peak_flops=10**14)
    speeds[2] = build_speed(0.6, step_time=0.04, tokens=8192)
    assert Throughput.combine(speeds.values(), world_size=8) == Throughput(
        pytest.approx(1280), pytest.approx(163840), pytest.approx(1.6e14), pytest.approx(0.2)
    )
    assert describe_throughput(build_speeds(0.6, steps=5), 1) == "", "a short run has no usual speed"
    assert (
        Throughput(1280.4, 163840.0, 1.6e14, 0.2).format()
        == "1,280 samples/s, 164k tokens/s, 160 TFLOP/s, MFU 20.0%"
    )
    assert Throughput(3.14159).format() == "3.14 samples/s"
    assert Throughput().format() == ""


def test_unknown_numbers_are_null():
    assert Throughput.combine([], 2).to_json() == dict.fromkeys(
        ("samples_per_s", "tokens_per_s", "flops_per_s", "mfu")
    )
    without = Throughput.combine([build_speed(samples=0, flops=5)], 1)
    assert (without.samples, without.tokens, without.flops, without.mfu) == (None, None, 5.0, None)


@given(own=st.floats(0, 10), steps=st.integers(1, 10**6), samples=st.floats(0, 1e6), host=st.text())
def test_the_speed_of_another_node_arrives_as_it_was_sent(own, steps, samples, host):
    speed = build_speed(own, steps=steps, samples=samples, host=host)
    assert RankSpeed.from_json(json.loads(json.dumps(speed.to_json()))) == speed


@pytest.mark.parametrize(
    ("loaders", "text"),
    [
        (
            [(8, 16)],
            "the global batch is 16 samples: 8 of the script on each of 2 ranks. The learning rate is that",
        ),
        ([(16, 16)], ""),
        ([(None, None), (8, 16)], "the global batch is 16 samples"),
        ([], ""),
        (["x"], ""),
    ],
    ids=["multiplied", "split", "the first that is known", "none", "another file"],
)
def test_a_global_batch_that_is_not_that_of_the_script_is_described(tmp_path, loaders, text):
    facts = [
        {"script_batch_size": each[0], "global_batch": each[1], "parts": 2, "ranks_a_part": 1}
        if each != "x"
        else each
        for each in loaders
    ]
    (tmp_path / "description").write_text(json.dumps({"data": {"loaders": facts}}))
    description = describe_global_batch(tmp_path / "description")
    assert description.startswith(text)
    assert bool(description) == bool(text)
