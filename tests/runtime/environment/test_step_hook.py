"""Steps that are counted in scripts without an Accelerator, through torch's hook of all optimizers."""

import os
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from accel_cli.runs.beats import Beat
from accel_cli.runs.run_dir import RankFolder
from accel_runtime import Accelerator
from accel_runtime.environment import step_hook
from accel_runtime.environment.heartbeat import _create_progress
from accel_runtime.environment.settings import RANK_FOLDER


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a rank that a launcher watches, whose optimizers have the hook until the end of the test."""
    monkeypatch.setenv(RANK_FOLDER, str(tmp_path))
    _create_progress.cache_clear()
    handles = []
    module = sys.modules["torch.optim.optimizer"]
    register = module.register_optimizer_step_post_hook
    monkeypatch.setattr(
        module,
        "register_optimizer_step_post_hook",
        lambda hook: handles.append(register(hook)),
    )
    step_hook.watch_steps()
    yield RankFolder(tmp_path)
    handles[0].remove()
    _create_progress.cache_clear()


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
    beat = Beat.read(folder.beat)
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
