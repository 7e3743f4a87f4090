"""Progress of scripts without an Accelerator, through hooks in torch: steps, backward passes, batches of loaders."""

import os
import threading
import time
import traceback

import pytest
import torch
from support.processes.rank_hooks import read_beat, watch
from support.processes.ranks import run_script
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accel_cli.runs.heartbeats import Beat
from accel_cli.runs.run_dir import RankFolder
from accel_cli.worker import strip_frames
from accel_runtime import Accelerator
from accel_runtime.environment.settings import RANK_FOLDER
from accel_runtime.observe import torch_hooks
from accel_runtime.observe.heartbeat import heartbeat


@pytest.fixture
def folder(tmp_path):
    """The folder of a rank that a launcher watches."""
    with watch(tmp_path) as rank_folder:
        yield rank_folder


def build(kind=torch.optim.SGD, size=2):
    """Return an optimizer of a parameter with a gradient."""
    parameter = torch.nn.Parameter(torch.ones(size))
    parameter.grad = torch.ones(size)
    return kind([parameter], lr=0.1)


def read_steps(folder):
    return Beat.read(folder.beat).steps


def test_nothing_is_written_before_the_first_step(folder):
    optimizer = build()
    assert not folder.beat.exists()
    for _ in range(3):
        optimizer.step()
    beat = read_beat(folder)
    assert (beat.steps, beat.pid, len(beat.recent)) == (3, os.getpid(), 3)
    assert 0 < beat.recent[0] <= beat.recent[1] <= beat.recent[2] == beat.time


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ("dgdgdg", 3),  # a GAN
        ("dddddgdddddg", 10),  # one with five critic steps for one of the generator
        ("abcabc", 2),  # an optimizer for each parameter, stepped in the backward pass
        ("aaabbb", 5),  # one training after the other: only its first step joins the last one before it
    ],
)
def test_optimizers_that_step_in_turn_make_one_step(folder, order, steps):
    optimizers = {name: build() for name in set(order)}
    for name in order:
        optimizers[name].step()
    assert read_steps(folder) == steps


def test_the_groups_that_an_engine_steps_one_after_the_other_make_one_step(folder):
    """So does ZeRO stage 3 with its sub-groups, of one optimizer."""
    optimizer = build()
    parts = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for _ in range(4):
        for part in parts:
            part.grad = torch.ones(2)
            optimizer.param_groups[0]["params"] = [part]
            optimizer.step()
            optimizer.param_groups[0]["params"] = []
    assert read_steps(folder) == 4


def test_a_prepared_optimizer_is_counted_once(folder):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert read_steps(folder) == 2


def test_a_gan_of_prepared_optimizers_makes_one_step_in_turn(folder):
    accelerator = Accelerator(cpu=True)
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    for _ in range(3):
        for model, optimizer in zip(models, (first, second), strict=True):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert read_steps(folder) == 3


def test_lbfgs_counts_its_iterations_as_one_step(folder):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([parameter], max_iter=5)

    def closure():
        optimizer.zero_grad()
        loss = (parameter - 3).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert read_steps(folder) == 1


def test_a_process_that_the_script_forks_is_not_counted(folder):
    optimizer = build()
    optimizer.step()
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0)
    os.waitpid(child, 0)
    assert read_steps(folder) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_step_has_the_graphs_that_it_has_without_the_hook(folder):
    counter = CompileCounter()
    optimizer = build(torch.optim.AdamW)
    step = torch.compile(optimizer.step, backend=counter)
    for _ in range(3):
        step()
    assert counter.frame_count == 1
    assert not folder.beat.exists()


# Batches ----------------------------------------------------------------------------------


class Slow(Dataset):
    """Four samples of token ids, each of which takes 20 ms to load."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.02)
        return {"labels": index, "input_ids": torch.zeros(8, dtype=torch.long)}


class Stream(IterableDataset):
    """Three samples without a length."""

    def __iter__(self):
        yield from torch.ones(3, 2)


def train(loader, *, epochs=1):
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for batch in loader:
            model(batch["input_ids"].float()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_batches_of_any_script_are_counted_with_its_waits_for_them(folder, workers):
    train(DataLoader(Slow(), batch_size=2, num_workers=workers), epochs=2)
    beat = read_beat(folder)
    assert (beat.steps, beat.batches, beat.epoch, beat.epoch_batches, beat.epoch_length) == (4, 4, 1, 2, 2)
    assert (beat.totals.samples, beat.totals.tokens) == (8, 64)
    assert beat.totals.data >= 0.04
    assert beat.totals.forward > 0
    assert beat.totals.backward > 0


def test_a_loader_that_a_thread_reads_ahead_is_not_counted(folder):
    loader = DataLoader(Slow(), batch_size=2)
    for _ in loader:
        pass
    iterator = iter(loader)
    thread = threading.Thread(target=list, args=[iterator])
    thread.start()
    thread.join()
    assert read_beat(folder).batches == 2


LEAVES_AN_ITERATOR = """
import torch
from accel_runtime.observe import heartbeat
heartbeat.heartbeat()
iterator = iter(torch.utils.data.DataLoader(torch.ones(4, 2)))
next(iterator)
torch.optim.SGD([torch.ones(2, requires_grad=True)]).step()
torch.kept = iterator, heartbeat  # torch was imported first, so that its names are deleted last
"""


def test_an_iterator_that_lives_until_the_interpreter_ends_prints_nothing(tmp_path):
    (tmp_path / "train.py").write_text(LEAVES_AN_ITERATOR)
    ((_, err, code),) = run_script(tmp_path / "train.py", [{RANK_FOLDER: tmp_path}])
    assert (err, code) == ("", 0)
    assert Beat.read(RankFolder(tmp_path).beat).batches == 1


def test_persistent_workers_begin_an_epoch_with_each_loop(folder):
    loader = DataLoader(Slow(), batch_size=2, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for _ in loader:
            pass
    beat = read_beat(folder)
    assert (beat.steps, beat.batches, beat.epoch, beat.epoch_batches) == (0, 4, 1, 2)


def test_a_stream_has_no_length_and_batches_that_are_not_trained_on_count_no_samples(folder):
    train(DataLoader(Slow(), batch_size=4))
    assert sum(len(batch) for batch in DataLoader(Stream(), batch_size=2)) == 3
    beat = read_beat(folder)
    assert (beat.batches, beat.epoch_batches, beat.epoch_length, beat.totals.samples) == (3, 2, None, 4)


def test_a_prepared_loader_counts_its_batches_itself(folder):
    loader = Accelerator(cpu=True).prepare(DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2))
    unprepared = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2)
    for _ in loader:
        pass
    for _ in unprepared:
        pass
    beat = read_beat(folder)
    assert (beat.batches, beat.epoch_batches, beat.epoch_length) == (3, 3, 3)


def test_an_exception_of_a_data_set_has_no_frames_of_the_hooks(folder):
    class Broken(Slow):
        def __getitem__(self, index):
            raise ValueError(index)

    build().step()  # parts of the first steps are measured
    loss = (torch.nn.Linear(2, 1)(torch.ones(2)) * 0).sum()
    loss.register_hook(lambda _: 1 / 0)
    for fail in (lambda: list(DataLoader(Broken())), loss.backward):
        with pytest.raises((ValueError, ZeroDivisionError)) as raised:
            fail()
        assert torch_hooks.__file__ in [frame.filename for frame in traceback.extract_tb(raised.tb)]
        frames = traceback.extract_tb(strip_frames(raised.value))
        assert torch_hooks.__file__ not in [frame.filename for frame in frames]
        assert len(frames) > 2


# Backward passes --------------------------------------------------------------------------


def train_ddp(path, slow, delay=0.05, steps=6):
    """Train with DDP, of which the last rank takes longer in one part of a step; return the totals."""
    rank, is_last = int(os.environ["RANK"]), os.environ["RANK"] == "1"
    folder = path / f"rank_{rank}"
    folder.mkdir()

    class Data(Dataset):
        def __len__(self):
            return steps

        def __getitem__(self, index):
            time.sleep(delay if is_last and slow == "data" else 0)
            return torch.ones(4)

    def pass_backward(grad):
        time.sleep(delay if is_last and slow == "backward" else 0)
        return grad

    Accelerator(cpu=True)  # connects the ranks
    with watch(folder):
        model = DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Data()):
            output = model(batch)
            time.sleep(delay if is_last and slow == "forward" else 0)
            output.register_hook(pass_backward)
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return Beat.read(RankFolder(folder).beat).totals


@pytest.mark.parametrize("part", ["data", "forward", "backward"])
def test_the_slow_rank_is_told_from_the_rank_that_waits_for_it(pair, tmp_path, part):
    fast, slow = pair.run(train_ddp, tmp_path, part)
    lost = 5 * 0.05
    assert getattr(slow, part) >= 0.9 * lost
    assert getattr(slow, part) > getattr(fast, part) + 0.5 * lost
    assert fast.wait > slow.wait + 0.5 * lost
    assert slow.own > fast.own + 0.5 * lost
    assert fast.samples == slow.samples == 12


class Recompute(torch.autograd.Function):
    """A layer that is computed again in the backward pass, by a pass inside of it."""

    @staticmethod
    def forward(ctx, batch, layer):
        ctx.layer = layer
        ctx.save_for_backward(batch)
        return layer(batch).detach()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            batch = ctx.saved_tensors[0].detach().requires_grad_()
            (ctx.layer(batch) * grad).sum().backward()
        return batch.grad, None


def train_recomputed(path, slow):
    """Train with a layer that is computed again; a slow rank takes 50 ms between the pass inside and the end."""
    folder = path / f"rank_{os.environ['RANK']}"
    folder.mkdir()
    Accelerator(cpu=True)
    with watch(folder):
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        model = DistributedDataParallel(torch.nn.Sequential(first, second))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def pass_backward(grad):
            time.sleep(0.05 if os.environ["RANK"] == slow else 0)
            return grad

        for _ in range(6):
            hidden = model.module[0](torch.ones(3, 4))
            hidden.register_hook(pass_backward)  # after the pass inside
            model(torch.ones(3, 4)).sum().mul(0).backward()
            Recompute.apply(hidden, second).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return Beat.read(RankFolder(folder).beat).totals


def test_passes_inside_of_a_pass_do_not_end_it(pair, tmp_path):
    _, slow = pair.run(train_recomputed, tmp_path, "1")
    assert slow.backward >= 0.9 * 5 * 0.05
    assert slow.wait < 0.5 * 5 * 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_model_has_the_graphs_that_it_has_without_the_hooks_in_measured_steps_and_others(tmp_path):
    def count_graphs(begin_step):
        counter = CompileCounter()
        torch._dynamo.reset()
        model = torch.nn.Linear(2, 1)

        @torch.compile(backend=counter)
        def step(batch):
            model(batch).sum().backward()
            return model.weight.grad * 2

        for number in range(6):
            begin_step(number)
            step(torch.ones(3, 2))
        return counter.frame_count

    without_hooks = count_graphs(lambda _: None)
    with watch(tmp_path):
        build().step()
        hooks = heartbeat()._hooks
        replaced = torch.autograd.backward
        assert (
            count_graphs(lambda number: hooks.remove() if number % 2 else hooks.measure_parts())
            == without_hooks
        )
        assert torch.autograd.backward is not replaced
