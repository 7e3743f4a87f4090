"""The prepared optimizer."""

from __future__ import annotations

import copy
import pickle
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases.log_messages import collect_messages
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, PartialState
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.loss_scaler import LossScaler
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.precision import Precision

HUGE = 1e30  # overflows float32 when scaled


class Run:
    """One weight of value 10 for each optimizer, with SGD of rate 1: a step subtracts the gradient."""

    def __init__(self, mixed_precision="no", optimizers=1, cycle=1, fused=False, **scaler):
        options = {"init_scale": 1024.0} | scaler
        scaler = LossScaler("cpu", **options) if mixed_precision == "fp16" else None
        self.precision = Precision(mixed_precision, torch.device("cpu"), {}, scaler)
        self.accumulation = Accumulation(cycle)
        self.weights = [nn.Parameter(torch.tensor([10.0])) for _ in range(optimizers)]
        self.optimizers = [
            PreparedOptimizer(
                torch.optim.SGD([weight], lr=1.0, fused=fused), self.accumulation, self.precision.scaler
            )
            for weight in self.weights
        ]
        self.optimizer = self.optimizers[0]

    def backward(self, *gradients):
        """Add the given gradients to those of the first weights, through a loss."""
        loss = sum(w * g for w, g in zip(self.weights, gradients, strict=False))
        self.precision.begin_backward()
        self.precision.scale(loss).backward()

    @property
    def values(self):
        return [weight.item() for weight in self.weights]


def test_an_optimizer_is_checked_before_its_first_step_until_the_check_passes():
    failures = [ValueError("first"), ValueError("second")]
    observed = []

    @contextmanager
    def observe():
        observed.append(weight.item())
        yield
        observed.append(weight.item())

    def check():
        if failures:
            raise failures.pop(0)
        return observe()

    weight = nn.Parameter(torch.ones(1))
    optimizer = PreparedOptimizer(torch.optim.SGD([weight], lr=1.0), Accumulation(1), None, check=check)
    for reason in ("first", "second"):
        with pytest.raises(ValueError, match=reason):
            optimizer.step()
    weight.grad = torch.ones(1)
    optimizer.step()
    failures.append(ValueError("late"))
    optimizer.step()
    assert observed == [1, 0]
    assert optimizer.steps == 2


# Accumulation cycles ---------------------------------------------------------------------


def test_step_and_zero_grad_are_skipped_until_the_end_of_a_cycle():
    run = Run(cycle=2)
    records = []
    for _ in range(4):
        run.accumulation.advance(is_last=False)
        run.backward(1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        records.append((run.values[0], run.weights[0].grad is None))
    assert records == [(10, False), (8, True), (8, False), (6, True)]


def test_gradients_can_be_zeroed_in_place():
    run = Run()
    run.backward(1.0)
    run.optimizer.zero_grad(set_to_none=False)
    assert run.weights[0].grad.item() == 0


def test_step_calls_a_closure_and_returns_its_loss():
    run = Run()
    run.backward(1.0)
    assert run.optimizer.step(lambda: 3.5) == 3.5
    assert run.values == [9]


# Closures within accumulation cycles -----------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=False),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
}


def train_with_closures(accelerator, make_optimizer, *, clears="in closure", batches=7):
    """Return the weights after each micro-batch, and the losses that the steps returned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses, weights = [], []
    for index in range(batches):
        rows = torch.randn(2, 3, generator=generator)

        def closure(rows=rows):
            if clears == "in closure":
                optimizer.zero_grad()
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            return loss

        with accelerator.accumulate(model):
            if clears == "no closure":
                closure()
                optimizer.step()
                optimizer.zero_grad()
            else:
                losses.append(optimizer.step(closure).item())
            if clears == "after step":
                optimizer.zero_grad()
        weights.append([parameter.tolist() for parameter in model.parameters()])
        assert accelerator.sync_gradients is (index % 3 == 2)
    return weights, losses


@pytest.mark.parametrize("clears", ["in closure", "after step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closures_train_on_all_micro_batches_of_a_cycle(several, name, clears):
    def train(clears):
        accelerator = Accelerator(gradient_accumulation_steps=3)
        return train_with_closures(accelerator, OPTIMIZERS[name], clears=clears)

    expected = several.run(lambda: train("no closure"))
    results = several.run(lambda: train(clears))
    assert [weights for weights, _ in results] == [weights for weights, _ in expected]
    assert all(len(losses) == 7 for _, losses in results), "each closure runs, and its loss is returned"


def test_two_optimizers_with_closures_clear_their_own_gradients():
    run = Run(optimizers=2, cycle=2)

    def step(optimizer, *gradients):
        def closure():
            optimizer.zero_grad()
            run.accumulation.begin_backward(weighted=False)
            run.backward(*gradients)
            return 0.0

        optimizer.step(closure)

    for _ in range(4):
        run.accumulation.advance(is_last=False)
        step(run.optimizers[0], 1.0)
        step(run.optimizers[1], 0.0, 1.0)
    assert run.values == [6, 6]


class TwoPoints(torch.optim.SGD):
    """Optimizer that computes the gradient at a second point, as SAM does."""

    def step(self, closure):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(1.0)
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class TwoRuns(torch.optim.SGD):
    """Optimizer that runs its closure twice."""

    def step(self, closure):
        closure()
        return super().step(closure)


class NoRun(torch.optim.SGD):
    """Optimizer that ignores its closure."""

    def step(self, _):
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, TwoPoints, TwoRuns, NoRun])
def test_an_optimizer_that_needs_the_whole_cycle_in_its_closure_is_refused(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} does not run its closure exactly once"):
        train_with_closures(Accelerator(gradient_accumulation_steps=3), partial(kind, lr=0.1))


def test_lbfgs_trains_with_cycles_of_one_micro_batch():
    weights, losses = train_with_closures_of_whole_epochs(torch.optim.LBFGS)
    assert losses[-1] < losses[0]
    assert weights[0] != weights[-1]


def train_with_closures_of_whole_epochs(kind):
    """Train with loaders of one batch, which completes each cycle."""
    accelerator = Accelerator(gradient_accumulation_steps=3)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model, optimizer, loader = accelerator.prepare(
        model, kind(model.parameters(), lr=0.1), DataLoader(torch.randn(4, 3), batch_size=4)
    )
    weights, losses = [], []
    for _ in range(3):
        for rows in loader:

            def closure(rows=rows):
                optimizer.zero_grad()
                loss = (model(rows) - 1).square().mean()
                accelerator.backward(loss)
                return loss

            with accelerator.accumulate(model):
                losses.append(optimizer.step(closure).item())
        weights.append(model.weight.tolist())
    return weights, losses


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_closure_that_clears_the_gradients_of_its_model_is_refused(set_to_none):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def closure():
        model.zero_grad(set_to_none)
        loss = model(torch.ones(1, 1)).sum()
        accelerator.backward(loss)
        return loss

    with accelerator.accumulate(model):
        optimizer.step(closure)
    with (
        pytest.raises(ValueError, match="the closure changed the gradients of the earlier micro-batches"),
        accelerator.accumulate(model),
    ):
        optimizer.step(closure)


def test_clearing_gradients_before_the_last_backward_pass_of_a_cycle_warns_once():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with collect_messages("accel_runtime.optimizer") as messages:
        for _ in range(4):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
    assert len(messages) == 1
    assert "test_optimizer.py" in messages[0]
    assert "discards the gradients of earlier micro-batches" in messages[0]


# The loss scaler -------------------------------------------------------------------------


def test_a_step_unscales_the_gradient():
    run = Run("fp16")
    run.backward(2.0)
    assert run.weights[0].grad.item() == 2048
    run.optimizer.step()
    assert run.values == [8]
    assert not run.optimizer.step_was_skipped


@pytest.mark.parametrize("fused", [False, True])
def test_overflowed_gradients_skip_one_step_and_halve_the_scale(fused):
    run = Run("fp16", fused=fused)
    skipped, scales, values = [], [], []
    for gradient in (HUGE * HUGE, 1.0, 1.0):
        run.backward(gradient)
        run.optimizer.step()
        run.optimizer.zero_grad()
        skipped.append(run.optimizer.step_was_skipped)
        scales.append(run.precision.scaler.get_scale())
        values += run.values
    assert skipped == [True, False, False]
    assert scales == [512, 512, 512]
    assert values == [10, 9, 8]


def test_gradients_are_unscaled_only_once():
    run = Run("fp16")
    run.backward(2.0)
    run.optimizer.unscale()
    run.optimizer.unscale()
    assert run.weights[0].grad.item() == 2
    run.optimizer.step()
    assert run.values == [8]


def test_gradients_are_not_unscaled_before_the_end_of_a_cycle():
    run = Run("fp16", cycle=2)
    for _ in range(2):
        run.accumulation.advance(is_last=False)
        run.backward(1.0)
        run.optimizer.unscale()
    assert run.weights[0].grad.item() == 2


@pytest.mark.parametrize("clipped", [False, True])
def test_optimizers_of_one_loss_are_unscaled_by_the_same_scale(clipped):
    """Let the scale grow: it must not grow before the last optimizer has stepped."""
    run = Run("fp16", optimizers=2, growth_interval=1)
    for _ in range(2):
        run.backward(2.0, 3.0)
        for optimizer in run.optimizers * clipped:
            optimizer.unscale()
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert run.values == [6, 4]
    assert run.precision.scaler.get_scale() == 4096


def test_optimizers_that_step_alternately_are_independent():
    """Train as a GAN does, in which clipping unscales the gradients of both optimizers."""
    run = Run("fp16", optimizers=2)
    read = []
    for _ in range(2):
        for index, gradients in enumerate(((2.0, 1.0), (0.0, 3.0))):
            for optimizer in run.optimizers:
                optimizer.zero_grad()
            run.backward(*gradients)
            for optimizer in run.optimizers:
                optimizer.unscale()
            read.append(run.weights[index].grad.item())
            run.optimizers[index].step()
    assert read == [2, 3, 2, 3]
    assert run.values == [6, 4]


def test_only_the_optimizer_with_overflowed_gradients_skips_its_step():
    run = Run("fp16", optimizers=2)
    run.backward(HUGE * HUGE, 3.0)
    for optimizer in run.optimizers:
        optimizer.step()
    assert run.values == [10, 7]
    assert [optimizer.step_was_skipped for optimizer in run.optimizers] == [True, False]
    assert run.precision.scaler.get_scale() == 512


OPERATIONS = st.sampled_from(
    [("backward", (1.0, 2.0)), ("backward", (3.0,)), ("unscale",)]
    + [(name, index) for name in ("step", "zero", "forget") for index in range(2)]
)


@given(operations=st.lists(OPERATIONS, min_size=3, max_size=24))
@settings(max_examples=150)
def test_any_order_of_calls_trains_as_without_a_scale(operations):
    """Let the scale grow at every update; all numbers are exact in float32."""
    scaled, plain = Run("fp16", optimizers=2, init_scale=4.0, growth_interval=1), Run(optimizers=2)
    scaled.backward(0.0, 0.0)
    plain.backward(0.0, 0.0)
    for name, *arguments in operations:
        for run in (scaled, plain):
            if name == "backward":
                run.backward(*arguments[0])
            elif name == "unscale":
                for optimizer in run.optimizers:
                    optimizer.unscale()
            elif name == "forget":  # as `model.zero_grad()` does
                run.weights[arguments[0]].grad = None
            elif name == "zero":
                run.optimizers[arguments[0]].zero_grad()
            elif run.weights[arguments[0]].grad is not None:  # torch's scaler cannot step without any
                run.optimizers[arguments[0]].step()
        assert scaled.values == plain.values


@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_a_scale_that_overflows_is_reduced_although_the_script_leaves_out_the_steps(clear):
    run, steps = Run("fp16", init_scale=2.0**10), 0
    for _ in range(6):
        run.backward(2.0**120)  # fits with a scale of 2**7
        run.optimizer.unscale()
        if run.weights[0].grad.isfinite():
            run.optimizer.step()
            steps += 1
        if clear == "model":
            run.weights[0].grad = None
        else:
            run.optimizer.zero_grad()
    assert (run.precision.scaler.get_scale(), steps) == (2.0**7, 3)


def test_a_step_that_is_left_out_counts_for_the_growth_of_the_scale():
    run = Run("fp16", growth_interval=2)
    for is_left_out in (False, True):
        run.backward(1.0)
        run.optimizer.unscale()
        if not is_left_out:
            run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.precision.scaler.get_scale() == 2048


def test_a_disabled_scaler_does_not_scale():
    run = Run("fp16", enabled=False)
    run.backward(2.0)
    run.optimizer.unscale()
    run.optimizer.step()
    assert run.values == [8]
    assert not run.optimizer.step_was_skipped


def test_lbfgs_uses_the_mean_of_the_losses_of_the_ranks(several):
    inputs = torch.arange(12.0).view(12, 1) / 12
    targets = (3 * inputs).sin()

    def fit(first, last, prepare):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")
        model, optimizer, backward = prepare(model, optimizer)

        def closure():
            optimizer.zero_grad()
            loss = (model(inputs[first:last].double()) - targets[first:last].double()).square().mean()
            backward(loss)
            return loss

        losses = [optimizer.step(closure).item() for _ in range(4)]
        return losses, [parameter.tolist() for parameter in model.parameters()]

    def fit_shard(index, size):
        accelerator = Accelerator()
        rows = len(inputs) // size
        return fit(
            index * rows,
            (index + 1) * rows,
            lambda *objects: (*accelerator.prepare(*objects), accelerator.backward),
        )

    expected = fit(0, len(inputs), lambda *objects: (*objects, torch.Tensor.backward))
    by_rank = several.run(lambda: fit_shard(PartialState().process_index, PartialState().num_processes))
    for losses, parameters in by_rank:
        assert (losses, parameters) == by_rank[0], "all ranks have the same parameters"
        assert losses == pytest.approx(expected[0], rel=1e-9)


@pytest.mark.parametrize("cycle", [1, 2])
def test_a_closure_is_rejected_with_a_loss_scaler(cycle):
    run = Run("fp16", cycle=cycle)
    run.accumulation.advance(is_last=False)
    with pytest.raises(ValueError, match=r"is not supported with mixed_precision fp16"):
        run.optimizer.step(lambda: 1.0)


# Compatibility with torch ----------------------------------------------------------------


def build_adamw():
    """Return a prepared AdamW that has stepped once, and its parameter."""
    weight = nn.Parameter(torch.tensor([10.0]))
    optimizer = PreparedOptimizer(torch.optim.AdamW([weight], lr=0.5), Accumulation(1), None)
    (weight * 2).backward()
    optimizer.step()
    return optimizer, weight


def test_a_prepared_optimizer_has_the_attributes_of_the_original():
    optimizer, weight = build_adamw()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state[weight]["step"] == 1
    assert optimizer.defaults["lr"] == 0.5
    assert "AdamW" in repr(optimizer)


def test_a_learning_rate_set_on_the_prepared_optimizer_is_used():
    run = Run()
    for group in run.optimizer.param_groups:
        group["lr"] = 3.0
    run.backward(1.0)
    run.optimizer.step()
    assert run.values == [7]


def test_a_parameter_group_added_to_the_prepared_optimizer_is_stepped():
    run = Run()
    late = nn.Parameter(torch.tensor([5.0]))
    run.optimizer.add_param_group({"params": [late]})
    late.sum().backward()
    run.optimizer.step()
    assert late.item() == 4


def test_state_dicts_of_prepared_and_plain_optimizers_are_exchangeable():
    optimizer, _ = build_adamw()
    plain = torch.optim.AdamW([nn.Parameter(torch.tensor([10.0]))], lr=0.1)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.5
    plain.param_groups[0]["lr"] = 0.25
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25


def test_attributes_of_a_custom_optimizer_class_are_available():
    class Own(torch.optim.SGD):
        note = "mine"

    optimizer = PreparedOptimizer(Own([nn.Parameter(torch.ones(1))], lr=1.0), Accumulation(1), None)
    assert optimizer.note == "mine"
    assert not hasattr(optimizer, "no_such_attribute")


def test_step_hooks_of_torch_run_once_a_step():
    run = Run()
    records = []
    run.optimizer.register_step_post_hook(lambda *_: records.append(1))
    run.optimizer.step()
    assert records == [1]


def test_a_scheduler_of_the_prepared_optimizer_changes_its_learning_rate():
    run = Run()
    scheduler = LambdaLR(run.optimizer, lambda step: 0.5**step)
    for _ in range(2):
        run.optimizer.step()
        scheduler.step()
    assert run.optimizer.optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])  # noqa: S301
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_prepared_optimizer_can_be_copied_and_pickled_also_with_a_scheduler(copied, scheduled):
    optimizer, _ = build_adamw()
    if scheduled:
        LambdaLR(optimizer, lambda _: 1.0)
    twin = copied(optimizer)
    weight = twin.param_groups[0]["params"][0]
    assert twin.state[weight]["step"] == 1
    weight.grad = torch.ones(1)
    twin.step()
    assert twin.state[weight]["step"] == 2
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_train_and_eval_are_called_on_optimizers_that_have_them():
    class ScheduleFree(torch.optim.SGD):
        calls = ()

        def train(self):
            self.calls += ("train",)

        def eval(self):
            self.calls += ("eval",)

    for kind, calls in ((ScheduleFree, ("eval", "train")), (torch.optim.SGD, None)):
        optimizer = PreparedOptimizer(kind([nn.Parameter(torch.ones(1))], lr=1.0), Accumulation(1), None)
        optimizer.eval()
        optimizer.train()
        assert getattr(optimizer.optimizer, "calls", None) == calls
