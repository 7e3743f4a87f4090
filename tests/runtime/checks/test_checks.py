"""The checks of a run look at 100 steps after `prepare` and after a checkpoint is loaded, and then at rare passes only."""

from __future__ import annotations

import pytest
import torch
from support.cases.log_messages import collect_messages
from support.runs.step_calls import LATE, StepCalls
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator
from accel_runtime.checks import checks as all_checks


class Run:
    """A model in training, with several ways to make a step."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.accelerator = Accelerator(**options)
        self.script_model = nn.Sequential(
            nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(requires_grad=False)
        )
        self.script_optimizer = torch.optim.SGD(self.script_model.parameters(), 0.01)
        self.model, self.optimizer = self.accelerator.prepare(self.script_model, self.script_optimizer)

    def draw(self):
        return torch.randn(3, 2) * (self.accelerator.process_index + 1)

    def step(self, model=None):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward((model or self.model)(self.draw()).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bypass_model(self):
        self.step(self.script_model)

    def bypass_everything(self):
        self.model(self.draw()).sum().backward()
        self.script_optimizer.step()
        self.script_optimizer.zero_grad()

    def step_twice(self):
        self.accelerator.backward(self.model(self.draw()).sum())
        self.optimizer.step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def never_step(self):
        self.accelerator.backward(self.model(self.draw()).sum())


def count_calls(step, options, earlier=0):
    """Return the functions of the checks that a late step calls."""
    run, calls = Run(**options), StepCalls()
    for _ in range(earlier):
        getattr(run, step)()
    for number in range(LATE + 1):
        calls.begin_step(number)
        getattr(run, step)()
    calls.end_step()
    ((counts, _),) = calls.steps.items()
    return [name for name, _ in counts if name.startswith("accel_runtime/checks/")]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("step", "options"),
    [
        ("step", {}),
        ("step", {"gradient_accumulation_steps": 8}),
        ("bypass_everything", {}),
        ("step_twice", {}),
    ],
)
def test_after_100_steps_a_step_calls_no_function_of_the_checks(clusters, size, step, options):
    assert clusters[size].run(count_calls, step, options) == [[]] * size


def test_a_mistake_that_was_found_is_not_looked_for_again(pair):
    assert pair.run(count_calls, "bypass_model", {}, 100) == [[], []]


def test_a_run_that_was_left_early_is_not_checked_in_another_one(alone):
    def train():
        left = Run()
        left.step()
        return count_calls("step", {}), left.accelerator.num_processes

    assert alone.run(train) == [([], 1)]


def test_a_run_whose_checks_end_with_its_last_step_leaves_no_check_to_another_one(alone):
    def train():
        left = Run()
        for _ in range(all_checks.NUM_STEPS // 2):
            left.step_twice()
        return count_calls("step", {}), left.accelerator.num_processes

    assert alone.run(train) == [([], 1)]


@pytest.mark.parametrize("limit", [LATE, 2 * LATE])
def test_a_script_that_never_steps_an_optimizer_is_checked_up_to_a_limit(alone, monkeypatch, limit):
    monkeypatch.setattr(all_checks, "_MAX_PASSES", limit)
    (calls,) = alone.run(count_calls, "never_step", {})
    assert bool(calls) == (limit > LATE)


def make_late_mistake(event, folder):
    """Return the messages about a mistake that begins after the checked steps, and after `event`."""
    with collect_messages("accel_runtime.checks") as messages:
        run = Run()
        for _ in range(LATE):
            run.step()
        if event == "prepare":
            run.accelerator.prepare(nn.Linear(2, 2))
        elif event == "prepare a loader":
            run.accelerator.prepare(DataLoader(torch.ones(4)))
        elif event == "load_state":
            run.accelerator.load_state(run.accelerator.save_state(folder))
        for _ in range(2):
            run.bypass_model()
    return [message for message in messages if "on the same batch" not in message]


@pytest.mark.parametrize("event", ["prepare", "load_state"])
def test_one_process_has_no_gradients_to_average_after_a_resume(alone, event, tmp_path):
    assert alone.run(make_late_mistake, event, str(tmp_path / "saved")) == [[]]


@pytest.mark.parametrize("event", ["prepare", "load_state", "prepare a loader", "nothing"])
def test_after_prepare_and_after_a_resume_each_step_is_checked_again(pair, event, tmp_path):
    messages, others = pair.run(make_late_mistake, event, str(tmp_path / "saved"))
    assert len(messages) == (event in {"prepare", "load_state"})
    assert all(
        "are not averaged over the 2 processes in backward() at test_checks.py:" in m for m in messages
    )
    assert others == []


def test_a_mistake_of_a_later_loop_is_found_by_its_effect_and_then_named(pair):
    def train():
        with collect_messages("accel_runtime.checks") as messages:
            run = Run()
            for number in range(1020):
                run.step() if number < LATE else run.bypass_model()
                if number % 100 == 0:  # a process that is 500 passes ahead has nothing to compare
                    run.accelerator.wait_for_everyone()
        return [message for message in messages if "on the same batch" not in message]

    messages, others = pair.run(train)
    assert [message[:35] for message in messages] == [
        "The weights of the processes differ",
        "Gradients of Sequential are not ave",
    ]
    assert others == []


def test_a_layer_that_is_unfrozen_later_is_found(pair):
    def train():
        with collect_messages("accel_runtime.checks.averaging") as messages:
            run = Run()
            for number in range(520):
                run.script_model[1].requires_grad_(requires_grad=number > LATE)
                run.step()
        return messages

    (message,), others = pair.run(train)
    assert "SGD trains 2 parameters whose gradients are not averaged" in message
    assert others == []


def test_the_checks_of_a_run_that_is_freed_end(alone):
    def train():
        run = Run()
        run.step()
        before = run.accelerator._run.checks in all_checks._WATCHING
        run.accelerator.free_memory()
        return before, run.accelerator._run.checks in all_checks._WATCHING

    assert alone.run(train) == [(True, False)]
