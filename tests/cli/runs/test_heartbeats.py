"""The reader of heartbeat files, which a process writes at the same time."""

import io
import itertools
import multiprocessing
import os
import struct
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.waits import limit
from support.runs.run_folders import START, write_beat

from accel_cli.runs.heartbeats import Beat, Totals
from accel_runtime.environment import settings as env
from accel_runtime.observe import heartbeat
from accel_runtime.observe.heartbeat import Heartbeat

TICK_NS = 200_000_000
"""A step that takes so long is measured."""
OPTIMIZER = SimpleNamespace(param_groups=[{"params": [object()]}])
"""An optimizer whose steps are counted."""


def build_totals(steps):
    """Return totals with a different value in each field, which a whole number of ns has without rounding."""
    return Totals(steps, *(field * steps / 512 for field in range(1, 8)), 8 * steps, 9 * steps)


@given(
    measured=st.lists(st.integers(1, 10**8), unique=True, max_size=env.BEAT_HISTORY).map(sorted),
    ahead=st.integers(0, 1000),
)
def test_totals_history_and_last_steps_are_those_that_were_written(measured, ahead, tmp_path_factory):
    """Steps may be ahead of the totals."""
    file = tmp_path_factory.mktemp("rank") / "beat"
    history = [build_totals(steps) for steps in measured]
    steps = (measured[-1] if measured else 0) + ahead
    recent = [(number + 1) / 512 for number in range(min(steps, env.BEAT_RECENT))]
    write_beat(file, history, clock=0.0, recent=recent, steps=steps)
    beat = Beat.read(file)
    assert (beat.steps, beat.recent, tuple(beat.history)) == (steps, tuple(recent), tuple(history))
    assert beat.totals == (history[-1] if history else build_totals(0))
    assert beat.history[-3:] == tuple(history)[-3:]


def test_means_are_the_differences_per_step_and_the_rest_is_own_time_that_is_in_no_part():
    means = build_totals(8).average_since(build_totals(4))
    assert means == build_totals(1)
    assert means._replace(own=1.0, data=0.1, forward=0.2, backward=0.3, update=0.15).rest == pytest.approx(
        0.25
    )


def set_number(file, name, value):
    with file.open("r+b") as opened:
        opened.seek(8 * env.BEAT_NUMBERS.index(name))
        opened.write(struct.pack("=q", value))


@pytest.mark.parametrize("thinnings", [(0, 1), (1, 2), (0, 2)], ids=["begins", "ends", "both"])
def test_a_history_that_is_thinned_in_the_midst_of_a_read_is_read_again(tmp_path, monkeypatch, thinnings):
    file, reads = tmp_path / "beat", []
    history = [build_totals(steps) for steps in range(1, 11)]
    write_beat(file, history, clock=0.0, thinnings=thinnings[0])

    class InterruptedFile(io.FileIO):
        """A file that is read in two parts; its history changes in between, and is thinned once the read has ended."""

        def read(self, size=-1):
            is_whole = size > env.BEAT_SIZE
            first = super().read(env.BEAT_HISTORY_RANGE.start if is_whole else size)
            if is_whole and not reads:
                write_beat(file, history[::2], clock=0.0, thinnings=thinnings[1])
            elif is_whole:
                set_number(file, "thinnings", 2)
            reads.append(is_whole)
            return first + super().read() if is_whole else first

    monkeypatch.setattr("accel_cli.runs.heartbeats.open_file", InterruptedFile)
    assert tuple(Beat.read(file).history) == tuple(history[::2])
    assert reads.count(True) >= 2


def test_a_process_killed_while_it_thins_leaves_all_but_the_history(tmp_path):
    file = tmp_path / "beat"
    write_beat(file, [build_totals(1), build_totals(2)], clock=0.0, recent=[1.0, 2.0], steps=2, thinnings=1)
    beat = Beat.read(file)
    assert (beat.steps, beat.recent, tuple(beat.history)) == (2, (1.0, 2.0), ())
    assert beat.totals == build_totals(2)


def test_a_file_that_another_version_wrote_is_no_heartbeat(tmp_path):
    file = tmp_path / "beat"
    assert Beat.read(file) is None
    for size in (0, 48, env.BEAT_SIZE - 1, env.BEAT_SIZE + 1):
        file.write_bytes(bytes(size))
        assert Beat.read(file) is None


@pytest.mark.parametrize(
    ("part", "text", "location"),
    [
        ("", "", "after a step"),
        ("data_ns", "step at train.py:7", "loading data"),
        ("update_ns", "", "after a backward pass"),
        ("", "step at train.py:7", "after step() at train.py:7"),
    ],
)
def test_without_collectives_the_location_is_the_part_of_a_rank_without_progress(
    tmp_path, part, text, location
):
    write_beat(tmp_path / "beat", recent=[1.0], text=text, part=env.BEAT_NUMBERS.index(part) if part else -1)
    assert Beat.read(tmp_path / "beat").location == location


def read_beat(file, **values):
    write_beat(file, **values)
    return Beat.read(file)


def test_rates_come_from_the_last_steps(tmp_path):
    file = tmp_path / "beat"
    first = read_beat(file)
    assert (first.rate_now, first.rate_mean) == (None, None)
    assert read_beat(file, recent=[5.0]).rate_now is None
    beat = read_beat(file, recent=[9.0, 9.5, 10.0])
    assert (beat.rate_now, beat.rate_mean) == (pytest.approx(2), pytest.approx(0.3))


def test_the_end_of_the_epoch_is_foreseen_from_its_batches_without_those_that_were_skipped(tmp_path):
    file = tmp_path / "beat"
    assert read_beat(file).compute_eta(0.0) is None
    epoch = {
        "clock": 0.0,
        "epoch": 2,
        "epoch_first": 90,
        "epoch_length": 100,
        "epoch_base": 0,
        "epoch_ns": 10**9,
    }
    beat = read_beat(file, batches=94, changed_ns=5 * 10**9, **epoch)
    assert (beat.epoch, beat.epoch_batches, beat.epoch_length, beat.epoch_first) == (2, 94, 100, 90)
    assert beat.compute_eta(beat.time) == pytest.approx(6)
    assert beat.compute_eta(beat.time + 4) == pytest.approx(12), "half as fast until now"
    beat = read_beat(file, batches=95, **(epoch | {"epoch_base": 94, "epoch_length": 0, "epoch_first": 0}))
    assert (beat.epoch_batches, beat.epoch_length, beat.compute_eta(9.0)) == (1, None, None)


def test_times_are_converted_to_those_of_the_calendar(tmp_path):
    beat = read_beat(tmp_path / "beat", recent=[3.5])
    assert beat.to_epoch(beat.step_time) == pytest.approx(START + 3.5)


class StepClock:
    """A clock that is one tick later at the end of each step of a heartbeat, so that own time is one tick a step after the first."""

    def __init__(self):
        self.writer = None

    def __call__(self):
        return TICK_NS * (self.writer.steps if self.writer else 0)


def create_writer(clock, file):
    """Create the heartbeat whose steps move the clock."""
    clock.writer = Heartbeat(file)
    return clock.writer


def train(writer, steps):
    for _ in range(steps):
        writer.count_step(OPTIMIZER)
        writer.refresh()


def build_ticks(steps):
    return Totals(steps, steps * TICK_NS / 1e9, (steps - 1) * TICK_NS / 1e9, *[0] * 7)


def assert_is_complete(beat, least):
    """Compare the history with that of steps of one tick, at least up to a step, and the ring with the last steps."""
    entries = tuple(beat.history)
    stride = round(entries[1].steps - entries[0].steps) if len(entries) > 1 else 1
    assert stride.bit_count() == 1, "a power of two"
    assert len(entries) >= env.BEAT_HISTORY // 2 or stride == 1
    assert entries == tuple(build_ticks(1 + stride * number) for number in range(len(entries)))
    assert not entries or entries[-1].steps + stride > least
    timed = round(1e9 * beat.recent[-1] / TICK_NS) if beat.recent else 0
    assert timed in {beat.steps, beat.steps - 1}, "the newest step is written before its time"
    first = timed - len(beat.recent)
    assert beat.recent == tuple((step + 1) * TICK_NS / 1e9 for step in range(first, timed))


@settings(max_examples=30)
@given(parts=st.lists(st.integers(0, 3000), max_size=5))
def test_the_history_is_the_thinned_sequence_of_measured_steps_and_the_file_never_grows(
    parts, tmp_path_factory
):
    file = tmp_path_factory.mktemp("rank") / "beat"
    with pytest.MonkeyPatch.context() as patch:
        clock = StepClock()
        patch.setattr(heartbeat, "monotonic_ns", clock)
        writer = create_writer(clock, file)
        for steps in parts:
            train(writer, steps)
            beat = Beat.read(file)
            assert (beat.steps, file.stat().st_size) == (writer.steps, env.BEAT_SIZE)
            assert len(beat.recent) == min(beat.steps, env.BEAT_RECENT)
            assert beat.totals == (build_ticks(beat.steps) if beat.steps else build_totals(0))
            assert_is_complete(beat, beat.steps)


def write_in_rounds(path, ended):
    """Train repeatedly, each time on a new file, until the reader ends."""
    clock = heartbeat.monotonic_ns = StepClock()
    for number in itertools.count():
        new = path.with_name(f"new{number}")
        clock.writer = None
        writer = create_writer(clock, new)
        new.replace(path)
        train(writer, 3 * env.BEAT_HISTORY)
        if ended.is_set():
            os._exit(0)


def test_a_reader_never_sees_a_torn_history_or_ring(tmp_path):
    file = tmp_path / "beat"
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    process = context.Process(target=write_in_rounds, args=(file, ended))
    process.start()
    try:
        lengths = set()
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline or len(lengths) < 2:
            assert process.is_alive()
            if (beat := Beat.read(file)) is not None and beat.history:
                lengths.add(len(beat.history))
                assert_is_complete(beat, 0)
    finally:
        ended.set()
        process.join(limit(30))
    assert process.exitcode == 0
