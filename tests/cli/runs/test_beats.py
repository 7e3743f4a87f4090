"""The reader of heartbeat files, which a process writes at the same time."""

import io
import itertools
import multiprocessing
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.waits import limit

from accel_cli.runs.beats import Beat, Totals
from accel_cli.runs.run_dir import RankFolder
from accel_runtime.environment import settings as env
from accel_runtime.observe import heartbeat
from accel_runtime.observe.heartbeat import Heartbeat, LoaderEpoch

TICK_NS = 1000
OPTIMIZER = type("Optimizer", (), {})()
"""An optimizer whose steps are counted."""


class Clock:
    """A clock that advances each time it is read."""

    def __init__(self):
        self._ticks = itertools.count(1)

    def __call__(self):
        return TICK_NS * next(self._ticks)


@pytest.fixture
def clock(monkeypatch):
    """The clock of heartbeats, which is read once when one is created, and three times a step of `train`."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "monotonic_ns", clock)
    return clock


def train(beat, steps):
    for _ in range(steps):
        beat.begin_backward()
        beat.end_backward()
        beat.count_step(OPTIMIZER)


def expected_entry(step):
    """The totals after a step of `train`: from a step to the next backward pass it is one tick, which is own time, and as long a pass."""
    return build_totals(
        (1 + 3 * step) * TICK_NS / 1e9, (step - 1) * TICK_NS / 1e9, backward=(step - 1) * TICK_NS / 1e9
    )


def build_totals(time, own, backward=0.0):
    return Totals(time, own, 0.0, own, backward, 0.0, 0, 0)


@given(parts=st.lists(st.integers(0, 3000), max_size=5))
def test_the_history_is_the_thinned_sequence_of_steps_and_the_file_never_grows(parts, tmp_path_factory):
    folder = RankFolder(tmp_path_factory.mktemp("rank"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat, "monotonic_ns", Clock())
        writer = Heartbeat(folder.beat)
        for steps in parts:
            train(writer, steps)
            beat, total = Beat.read(folder.beat), writer.steps
            assert beat.steps == total
            assert folder.beat.stat().st_size == env.BEAT_SIZE
            assert beat.stride == expected_stride(total)
            assert tuple(beat.history) == tuple(
                map(expected_entry, range(beat.stride, total + 1, beat.stride))
            )
            first = max(0, total - env.BEAT_RECENT)
            assert beat.recent == tuple(expected_entry(step).time for step in range(first + 1, total + 1))


class StepClock:
    """A clock that shows the number of the step that is taken, in ticks."""

    def __init__(self):
        self.step = 0

    def __call__(self):
        return TICK_NS * self.step


def take_kept_steps(writer, clock, total):
    """Take steps up to a number; of those that the history does not keep, only the last."""
    while writer.steps < total:
        stride = expected_stride(writer.steps)
        clock.step = min(stride * (writer.steps // stride + 1), total)
        writer.steps = clock.step - 1
        writer.begin_backward()
        writer.end_backward()
        writer.count_step(OPTIMIZER)


def expected_stride(steps):
    """Return the smallest power of two that leaves room in the history."""
    strides = (2**power for power in itertools.count())
    return next(stride for stride in strides if steps // stride < env.BEAT_HISTORY)


@settings(max_examples=25)
@given(parts=st.lists(st.integers(1, 10**7) | st.integers(1, 10**12), min_size=1, max_size=3))
def test_after_many_halvings_the_history_has_every_stride_th_step_and_the_file_its_size(
    parts, tmp_path_factory
):
    """Own time is one tick a step from the first step on."""
    folder, clock = RankFolder(tmp_path_factory.mktemp("rank")), StepClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat, "monotonic_ns", clock)
        writer = Heartbeat(folder.beat)
        for total in itertools.accumulate(parts):
            take_kept_steps(writer, clock, total)
            beat = Beat.read(folder.beat)
            assert (beat.steps, beat.stride) == (total, expected_stride(total))
            assert folder.beat.stat().st_size == env.BEAT_SIZE
            steps = range(beat.stride, total + 1, beat.stride)
            assert tuple(beat.history) == tuple(
                build_totals(step * TICK_NS / 1e9, (step - 1) * TICK_NS / 1e9) for step in steps
            )
            assert beat.step_time == total * TICK_NS / 1e9
            assert beat.totals.own == (total - 1) * TICK_NS / 1e9


def test_a_million_steps_leave_the_size_of_the_file(tmp_path):
    folder = RankFolder(tmp_path)
    writer = Heartbeat(folder.beat)
    size = folder.beat.stat()
    for _ in range(10**6):
        writer.count_step(OPTIMIZER)
    assert (folder.beat.stat().st_size, folder.beat.stat().st_blocks) == (size.st_size, size.st_blocks)
    assert list(tmp_path.iterdir()) == [folder.beat]
    beat = Beat.read(folder.beat)
    assert (beat.stride, len(beat.history)) == (1024, 10**6 // 1024)


def test_a_history_that_is_thinned_in_the_midst_of_a_read_is_read_again(tmp_path, clock, monkeypatch):
    folder = RankFolder(tmp_path)
    writer = Heartbeat(folder.beat)
    train(writer, env.BEAT_HISTORY - 1)
    reads = []

    class InterruptedFile(io.FileIO):
        """A file that is read in two parts; the process takes a step in between, the first time."""

        def read(self, size=-1):
            is_whole = size > env.BEAT_SIZE
            first = super().read(env.BEAT_HISTORY_RANGE.start if is_whole else size)
            if is_whole and not reads:
                train(writer, 1)
            reads.append(is_whole)
            return first + super().read() if is_whole else first

    monkeypatch.setattr("accel_cli.runs.beats.open_file", InterruptedFile)
    beat = Beat.read(folder.beat)
    assert reads.count(True) == 2
    assert beat.stride == 2
    assert tuple(beat.history) == tuple(map(expected_entry, range(2, env.BEAT_HISTORY + 1, 2)))


def write_in_rounds(path, ended):
    """Train repeatedly, each time on a new file, until the reader ends."""
    for number in itertools.count():
        heartbeat.monotonic_ns = Clock()
        new = path.with_name(f"new{number}")
        writer = Heartbeat(new)
        new.replace(path)
        train(writer, 3 * env.BEAT_HISTORY)
        if ended.is_set():
            os._exit(0)


def test_a_reader_never_sees_a_torn_history_or_ring(tmp_path):
    folder = RankFolder(tmp_path)
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    process = context.Process(target=write_in_rounds, args=(folder.beat, ended))
    process.start()
    try:
        strides = set()
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline or not {1, 2} <= strides:
            assert process.is_alive()
            if (beat := Beat.read(folder.beat)) is None or beat.stride == 0:
                continue
            strides.add(beat.stride)
            assert tuple(beat.history) == tuple(
                expected_entry((entry + 1) * beat.stride) for entry in range(len(beat.history))
            )
            first = beat.steps - len(beat.recent)
            assert beat.recent == tuple(
                expected_entry(step).time for step in range(first + 1, beat.steps + 1)
            )
    finally:
        ended.set()
        process.join(limit(30))
    assert process.exitcode == 0


def test_a_file_that_another_version_wrote_is_no_heartbeat(tmp_path):
    folder = RankFolder(tmp_path)
    assert Beat.read(folder.beat) is None
    for size in (0, 48, env.BEAT_SIZE - 1, env.BEAT_SIZE + 1):
        folder.beat.write_bytes(bytes(size))
        assert Beat.read(folder.beat) is None


def test_a_process_killed_while_it_thins_leaves_all_but_the_history(tmp_path, clock):
    folder = RankFolder(tmp_path)
    writer = Heartbeat(folder.beat)
    train(writer, 5)
    writer._numbers[env.BEAT_NUMBERS.index("stride")] = 0
    beat = Beat.read(folder.beat)
    assert (beat.steps, beat.stride, tuple(beat.history)) == (5, 0, ())
    assert beat.recent == tuple(expected_entry(step).time for step in range(1, 6))


def test_rates_and_the_end_of_the_epoch_come_from_the_steps_and_batches(tmp_path, clock):
    folder = RankFolder(tmp_path)
    writer = Heartbeat(folder.beat)
    beat = Beat.read(folder.beat)
    assert (beat.rate_now, beat.rate_mean, beat.epoch_length) == (None, None, None)
    assert beat.compute_eta(beat.time) is None
    writer.count_step(OPTIMIZER)
    assert Beat.read(folder.beat).rate_now is None
    writer.count_step(OPTIMIZER)
    beat = Beat.read(folder.beat)
    assert beat.rate_now == pytest.approx(1e9 / TICK_NS)
    assert beat.rate_mean == pytest.approx(1e9 / TICK_NS)
    epoch = LoaderEpoch(number=2, first=90, length=100)
    for _ in range(4):
        writer.batch(epoch)
    beat = Beat.read(folder.beat)
    assert (beat.epoch, beat.epoch_batches, beat.epoch_length, beat.epoch_first) == (2, 94, 100, 90)
    assert beat.compute_eta(beat.time) == pytest.approx(6 * TICK_NS / 1e9), "skipped batches took no time"
    stalled = beat.time + 4 * TICK_NS / 1e9
    assert beat.compute_eta(stalled) == pytest.approx(12 * TICK_NS / 1e9), "half as fast until now"
    writer.batch(LoaderEpoch(number=0, first=0, length=0))
    beat = Beat.read(folder.beat)
    assert (beat.epoch, beat.epoch_batches, beat.epoch_length) == (0, 1, None)
    assert beat.compute_eta(beat.time) is None, "without a length"


def test_times_are_converted_to_those_of_the_calendar(tmp_path):
    folder = RankFolder(tmp_path)
    before = time.time()
    Heartbeat(folder.beat).count_step(OPTIMIZER)
    beat = Beat.read(folder.beat)
    assert before - 1e-3 <= beat.to_epoch(beat.started) <= beat.to_epoch(beat.step_time) <= time.time() + 1e-3
