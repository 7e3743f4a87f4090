"""The heartbeat: the progress that a process records for its launcher."""

import copy
import os
import pickle
import time

import pytest
import torch
from support.processes.rank_hooks import forget_progress, read_beat, watch
from support.training.data_sets import SampleStream
from torch.utils.data import DataLoader

from accel_cli.runs.heartbeats import Beat
from accel_cli.runs.run_dir import RankFolder
from accel_runtime import Accelerator
from accel_runtime.environment.settings import RANK_FOLDER
from accel_runtime.observe import heartbeat as heartbeat_module
from accel_runtime.observe import progress
from accel_runtime.observe.heartbeat import Heartbeat, heartbeat
from accel_runtime.observe.progress import StepPart


@pytest.fixture
def folder(tmp_path):
    """The folder of a rank that a launcher watches."""
    with watch(tmp_path) as rank_folder:
        yield rank_folder


def train(accelerator, batches):
    model = torch.nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(torch.ones(batches, 2))
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def test_a_launcher_reads_the_steps_the_batches_and_the_last_collective(folder):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first_beat = Beat.read(folder.beat)
    train(accelerator, batches=6)
    beat = read_beat(folder)
    assert (beat.steps, beat.batches, beat.is_inside) == (3, 6, False)
    assert beat.time > first_beat.time
    assert first_beat.location == "no step yet"
    accelerator.wait_for_everyone()
    assert Beat.read(folder.beat).location.startswith("after wait_for_everyone() at test_heartbeat.py:")


def test_the_location_of_a_rank_is_the_collective_that_it_is_in(folder):
    accelerator = Accelerator()
    records = []
    all_gather_slots = accelerator._backend.handshake._transport.all_gather_slots
    accelerator._backend.handshake._transport.all_gather_slots = lambda *args: (
        records.append(Beat.read(folder.beat)),
        all_gather_slots(*args),
    )[1]
    accelerator.wait_for_everyone()
    assert records[0].location.startswith("in wait_for_everyone() at test_heartbeat.py:")


def test_without_a_launcher_there_is_no_heartbeat(monkeypatch):
    monkeypatch.delenv(RANK_FOLDER, raising=False)
    with forget_progress():
        assert heartbeat() is None


def test_a_process_that_the_script_starts_leaves_the_heartbeat_alone(folder):
    Heartbeat(folder.beat).count_step(torch.optim.SGD([torch.zeros(1)]))
    assert heartbeat() is None
    assert Beat.read(folder.beat).steps == 1


def test_a_missing_folder_is_no_error(folder, monkeypatch):
    monkeypatch.setenv(RANK_FOLDER, os.devnull)
    assert heartbeat() is None


def test_a_prepared_optimizer_is_copied_without_the_heartbeat(folder):
    optimizer = train(Accelerator(), batches=1)
    state = optimizer.state_dict()
    assert copy.deepcopy(optimizer).state_dict() == state
    assert pickle.loads(pickle.dumps(optimizer)).state_dict() == state  # noqa: S301 - written a line above


def test_the_file_has_its_space_before_it_is_mapped(folder):
    Heartbeat(folder.beat)
    assert folder.beat.stat().st_blocks  # on a full disk a store to a hole would end the process


class Clock:
    """A clock that only the script advances, in nanoseconds."""

    now = 0

    def __call__(self):
        return self.now


class Timed(torch.nn.Linear):
    """A model whose forward pass takes 10 ns, and its backward pass 100."""

    def __init__(self, clock):
        super().__init__(2, 1)
        self._clock = clock

    def forward(self, batch):
        self._clock.now += 10
        output = super().forward(batch)
        output.register_hook(self._pass_backward)
        return output

    def _pass_backward(self, _):
        self._clock.now += 100


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (heartbeat_module, progress):
        monkeypatch.setattr(module, "monotonic_ns", clock)
    return clock


def test_own_time_is_that_in_which_a_rank_does_not_wait_for_others(folder, clock, monkeypatch):
    """A batch takes 1 ns, a forward pass 10, a backward pass 100, what follows it 1000, and a collective a million."""

    def all_gather_slots(*args):
        clock.now += 10**6
        return gather(*args)

    accelerator = Accelerator()
    transport = accelerator._backend.handshake._transport
    gather = transport.all_gather_slots
    monkeypatch.setattr(transport, "all_gather_slots", all_gather_slots)
    model = Timed(clock)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in torch.ones(4, 3, 2):
        clock.now += 1
        loss = model(batch).sum()
        accelerator.wait_for_everyone()
        accelerator.backward(loss)
        clock.now += 1000
        optimizer.step()
    history = Beat.read(folder.beat).history
    assert [round(1e9 * entry.own) for entry in history] == [0, 1111, 2222, 3333]
    assert [round(1e9 * entry.wait) for entry in history] == [0, 10**6, 2 * 10**6, 3 * 10**6]


def test_every_part_of_a_step_is_measured(folder, clock):
    """Loading takes 1 ns a batch, a forward pass 10, a backward pass 100 until its gradients are complete, the wait for others 500,
    clipping 1000, and logging 5000."""

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            clock.now += 1
            return torch.ones(2)

    accelerator = Accelerator()
    model = Timed(clock)
    loader = DataLoader(Slow())
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    beat = heartbeat()

    def finish(_):
        beat.complete_gradients()
        clock.now += 500

    model.weight.register_hook(finish)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        clock.now += 1000
        optimizer.step()
        clock.now += 5000
    totals = Beat.read(folder.beat).totals
    parts = (
        totals.data,
        totals.forward,
        totals.backward,
        totals.wait,
        totals.update,
        totals.rest,
        totals.own,
    )
    assert [round(1e9 * part) for part in parts] == [3, 30, 300, 1500, 3000, 15000, 3 * 6111]
    assert totals.samples == 4


def test_the_times_of_steps_between_two_looks_are_evenly_spaced(tmp_path, clock):
    beat, optimizer = Heartbeat(tmp_path / "beat"), torch.optim.SGD([torch.zeros(1)])
    for now, steps in ((1000, 1), (2000, 10), (5000, 3)):
        clock.now = now
        for _ in range(steps):
            beat.count_step(optimizer)
        beat.refresh()
    recent = [round(1e9 * time) for time in Beat.read(tmp_path / "beat").recent]
    assert recent == [*range(1000, 2001, 100), 3000, 4000, 5000]


def test_steps_between_measured_ones_count_as_those_but_an_evaluation_does_not(tmp_path, clock):
    beat, optimizer = Heartbeat(tmp_path / "beat"), torch.optim.SGD([torch.zeros(1)])

    def step(forward_ns, rest_ns):
        beat.begin_part(StepPart.FORWARD)
        clock.now += forward_ns
        beat.begin_part(StepPart.DATA)
        clock.now += rest_ns
        beat.count_step(optimizer)

    step(0, 0)
    for evaluation_ns in (0, 10**6):
        beat.look()
        clock.now += evaluation_ns
        for _ in range(50):
            step(30, 70)
        totals = Beat.read(tmp_path / "beat").totals
        assert round(1e9 * totals.forward) == 30 * (totals.steps - 1)
        assert round(1e9 * totals.data) == 70 * (totals.steps - 1)
    assert totals.steps > 50


def test_the_samples_of_an_evaluation_do_not_count(folder):
    accelerator = Accelerator(throughput="ids")
    rows = [{"ids": torch.zeros(5, dtype=torch.long), "x": torch.ones(2)} for _ in range(6)]
    model = torch.nn.Linear(2, 1)
    model, optimizer, loader, evaluation = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(rows, 4), DataLoader(rows, 2)
    )
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(batch["x"]).sum())
            optimizer.step()
        for _ in evaluation:
            pass
    totals = Beat.read(folder.beat).totals
    assert (totals.samples, totals.tokens) == (12, 60)


def test_the_epoch_is_that_of_the_loader_which_returned_the_last_batch(folder):
    def read():
        beat = read_beat(folder)
        return beat.epoch, beat.epoch_batches, beat.epoch_length

    loader, evaluation = Accelerator().prepare(DataLoader(torch.ones(3, 2)), DataLoader(torch.ones(2, 2)))
    records = []
    for _ in range(2):
        for _ in loader:
            before = read()
            for _ in evaluation:
                pass
            records.append((before, read()))
    assert [training for training, _ in records] == [(e, b, 3) for e in range(2) for b in range(1, 4)]
    assert [other for _, other in records] == [(e, 2, 2) for e in range(6)]
    assert read_beat(folder).batches == 6 + 6 * 2


def test_an_epoch_that_is_continued_counts_the_batches_before(folder):
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.ones(5, 2)))
    iterator = iter(accelerator.skip_first_batches(loader, 3))
    next(iterator)
    beat = read_beat(folder)
    assert (beat.epoch_batches, beat.epoch_first, beat.epoch_length) == (4, 3, 5)


def test_a_stream_has_no_length(folder):
    next(iter(Accelerator().prepare(DataLoader(SampleStream(torch.ones(4, 2))))))
    beat = read_beat(folder)
    assert (beat.epoch_batches, beat.epoch_length, beat.compute_eta(beat.time)) == (1, None, None)


def test_the_slowest_rank_has_the_largest_own_time_while_all_steps_take_as_long(pair, tmp_path):
    def train(path):
        rank = int(os.environ["RANK"])
        folder = path / f"rank_{rank}"
        folder.mkdir()
        with watch(folder):
            accelerator = Accelerator()
            model = torch.nn.Linear(2, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            for _ in range(10):
                loss = model(torch.ones(1, 2)).sum()
                time.sleep(0.03 * rank)
                accelerator.backward(loss)
                optimizer.step()

    pair.run(train, tmp_path)
    fast, slow = (Beat.read(RankFolder(tmp_path / f"rank_{rank}").beat) for rank in range(2))
    assert (fast.steps, slow.steps) == (10, 10)
    assert slow.totals.own > fast.totals.own
    assert slow.totals.own >= 0.03 * (slow.totals.steps - 1)
    assert fast.totals.time - fast.recent[0] > 0.03 * (fast.totals.steps - 2), (
        "the fast rank waits for the slow one"
    )


def test_the_exchanges_of_a_background_save_are_no_progress_of_the_script(pair, tmp_path):
    def save(path):
        accelerator = Accelerator()
        accelerator.prepare(torch.nn.Linear(2, 1))
        accelerator.save_state(str(path / "first"))
        before = heartbeat().counts.collectives
        accelerator.save_state(str(path / "saved"), async_save=False)
        during = heartbeat().counts.collectives
        accelerator.save_state(str(path / "other"), async_save=True)
        accelerator.wait_for_checkpoint()
        return during - before, heartbeat().counts.collectives - during

    for at_once, in_background in pair.run(save, tmp_path):
        assert in_background < at_once
