"""Every strategy satisfies the contract of `parallel/strategy.py`: a step of N ranks is that of one process."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from support.training.strategies import connect_strategy
from torch import nn

from accel_runtime.environment.settings import Settings
from accel_runtime.parallel.strategy import ModelRequest, Placeholder, TrainingPass

CASES = {
    "one process": (1, {}),
    "replicated on 2 processes": (2, {}),
    "replicated on 3 machines": ("apart", {}),
    "fully_shard on one process": (1, {"dp_shard": "auto"}),
    "fully_shard on 2 processes": (2, {"dp_shard": "auto"}),
    "fully_shard on 3 processes": (3, {"dp_shard": "auto"}),
    "tensor parallel": (2, {"tp": 2}),
    "an engine on one process": (1, "engine"),
    "an engine on 2 processes": (2, "engine"),
    "fully_shard and tensor parallel": (4, {"dp_shard": 2, "tp": 2}),
}
XLA_CASES = {name: (name, {}) for name in ("xla 1", "xla 2", "xla 4", "spmd 4")}
ZERO_CASES = {
    f"ZeRO stage {stage} on {size} processes": (size, {"stage": stage}) for stage in "0123" for size in (2, 3)
}
ZERO_FULL = {f"ZeRO stage {stage} on {size} processes" for stage, size in ("03", "12", "23", "32")}
"""Each stage runs on two processes or on three; `make test-full` runs the others."""
# torch_xla and deepspeed are in environments of their own, where `make test-xla` runs the same tests on the CPU device of
# torch_xla, and `make test-deepspeed` those of ZeRO.
HERE = (
    XLA_CASES
    if importlib.util.find_spec("torch_xla")
    else ZERO_CASES
    if getattr(importlib.util.find_spec("deepspeed"), "origin", None)  # not a folder of tests
    else CASES
)


@pytest.fixture(
    params=[
        pytest.param(case, id=name, marks=[pytest.mark.full] * (case[0] in {4, "xla 4"} or name in ZERO_FULL))
        for name, case in HERE.items()
    ]
)
def case(request, clusters):
    """The ranks and the sizes of the parallel dimensions of each strategy, in turn."""
    cluster, sizes = request.param
    return clusters[cluster], sizes


@pytest.fixture
def ranks(case):
    """The ranks of a strategy."""
    return case[0]


@pytest.fixture
def sizes(case):
    """The sizes of the parallel dimensions of a strategy."""
    return case[1]


def build_model_and_batch():
    """Return equal models and batches on all ranks, also if they are threads that share a generator."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.tp_plan = {"0": "colwise", "2": "rowwise"}
    return model, torch.randn(12, 4, generator=generator)


def prepare(sizes):
    """Return a strategy, its prepared model and optimizer, the rows of this rank, and the module of the script."""
    strategy = connect_strategy(sizes)
    module, batch = build_model_and_batch()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    (model,) = strategy.prepare([ModelRequest(module)], [optimizer])
    data = strategy.backend.data_rank
    rows = batch.chunk(data.world_size)[data.rank].to(strategy.backend.device)
    return strategy, model, optimizer, rows


def full_parameters(strategy, model):
    """Return the parameters of a prepared model as full tensors."""
    (state,) = strategy.open_state([model], []).models
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu().clone()
        for p in state.parameters()
    ]


def run_backward(strategy, model, rows):
    strategy.backward(model(rows).square().mean(), {})


def train_alone(passes=1, max_norm=None):
    """Return the parameters of one process after a step over `passes` backward passes, and the norm of its gradients."""
    model, batch = build_model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(passes):
        model(batch).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
    optimizer.step()
    return [p.detach() for p in model.parameters()], norm.item()


def test_a_step_of_all_ranks_is_that_of_one_process(ranks, sizes):
    def train(sizes):
        strategy, model, optimizer, rows = prepare(sizes)
        run_backward(strategy, model, rows)
        strategy.step(optimizer)
        strategy.zero_grad(optimizer, set_to_none=True)
        strategy.synchronize()
        cleared = all(p.grad is None for group in strategy.list_parameter_groups(optimizer) for p in group)
        return full_parameters(strategy, model), cleared, strategy.overflowed(optimizer)

    expected, _ = train_alone()
    for actual, cleared, overflowed in ranks.run(train, sizes):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
        assert cleared
        assert not overflowed


def test_an_optimizer_may_be_prepared_before_its_model(ranks, sizes):
    def train(sizes):
        strategy = connect_strategy(sizes)
        module, batch = build_model_and_batch()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        strategy.prepare(optimizers=[optimizer])
        (model,) = strategy.prepare([ModelRequest(module)])
        data = strategy.backend.data_rank
        run_backward(strategy, model, batch.chunk(data.world_size)[data.rank].to(strategy.backend.device))
        strategy.step(optimizer)
        strategy.synchronize()
        return full_parameters(strategy, model)

    expected, _ = train_alone()
    for actual in ranks.run(train, sizes):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


def test_no_sync_defers_the_combination_of_gradients_until_the_next_backward_pass(ranks, sizes):
    def train(sizes):
        strategy, model, optimizer, rows = prepare(sizes)
        with strategy.no_sync(model):
            run_backward(strategy, model, rows)
        run_backward(strategy, model, rows)
        strategy.step(optimizer)
        strategy.synchronize()
        return full_parameters(strategy, model)

    expected, _ = train_alone(passes=2)
    for actual in ranks.run(train, sizes):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_clipping_uses_the_norm_of_the_gradients_of_one_process(ranks, sizes):
    def train(sizes):
        strategy, model, optimizer, rows = prepare(sizes)
        run_backward(strategy, model, rows)
        parameters = list(model.parameters())
        strategy.gradients.finish()
        before = strategy.gradients.compute_norm(parameters, 2.0)
        clipped = strategy.gradients.clip_norm(parameters, 0.1, 2.0)
        after = strategy.gradients.compute_norm(parameters, 2.0)
        strategy.step(optimizer)
        strategy.synchronize()
        return [float(norm) for norm in (before, clipped, after)], full_parameters(strategy, model)

    expected, norm = train_alone(max_norm=0.1)
    for (before, clipped, after), actual in ranks.run(train, sizes):
        assert before == clipped == pytest.approx(norm, rel=1e-5)
        assert after == pytest.approx(0.1, rel=1e-4)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


def test_values_are_clamped_on_every_rank_or_refused(ranks, sizes):
    def clamp(sizes):
        strategy, model, _, rows = prepare(sizes)
        run_backward(strategy, model, rows)
        try:
            strategy.gradients.clip_value(list(model.parameters()), 0.01)
        except ValueError as error:
            assert "clip_grad_norm_" in str(error)
            return 0.01
        strategy.synchronize()
        return float(strategy.gradients.compute_norm(list(model.parameters()), float("inf")))

    assert ranks.run(clamp, sizes) == [pytest.approx(0.01)] * ranks.size


def test_scaled_gradients_change_the_step_and_finishing_them_again_does_not(ranks, sizes):
    def train(sizes):
        strategy, model, optimizer, rows = prepare(sizes)
        run_backward(strategy, model, rows)
        strategy.gradients.finish()
        groups = strategy.list_parameter_groups(optimizer)
        assert {*groups[0]} == {*model.parameters()}
        factor = torch.tensor(0.5, device=strategy.backend.device)
        strategy.gradients.scale(groups[0], factor)
        strategy.gradients.finish()
        strategy.step(optimizer)
        strategy.synchronize()
        return full_parameters(strategy, model)

    model, _ = build_model_and_batch()
    whole, _ = train_alone()
    expected = [(old.detach() + new) / 2 for old, new in zip(model.parameters(), whole, strict=True)]
    for actual in ranks.run(train, sizes):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


def test_versions_of_gradients_change_with_each_write_until_they_are_cleared(ranks, sizes):
    def read(sizes):
        strategy, model, optimizer, rows = prepare(sizes)
        gradients, (parameters,) = strategy.gradients, strategy.list_parameter_groups(optimizer)
        before = gradients.read_versions(parameters)
        run_backward(strategy, model, rows)
        gradients.finish()
        computed = gradients.read_versions(parameters)
        assert gradients.read_versions(parameters) == computed
        gradients.scale(parameters, torch.tensor(0.5, device=strategy.backend.device))
        scaled = gradients.read_versions(parameters)
        assert not gradients.in_parameters or all(parameter.grad is not None for parameter in parameters)
        strategy.zero_grad(optimizer, set_to_none=True)
        cleared = gradients.read_versions(parameters)
        changed = [None not in (old, new) and old != new for old, new in zip(computed, scaled, strict=True)]
        # torch_xla does not count the writes of foreach functions.
        return before, all(changed) or HERE is XLA_CASES, cleared

    nothing = [None] * len([*build_model_and_batch()[0].parameters()])
    assert ranks.run(read, sizes) == [(nothing, True, nothing)] * ranks.size


def test_gradients_that_are_not_combined_yet_can_be_stored_and_restored(ranks, sizes):
    def train(sizes):
        strategy, model, optimizer, rows = prepare(sizes)
        with strategy.no_sync(model):
            run_backward(strategy, model, rows)
        hidden = {p: g.clone() for p, g in strategy.gradients.read_local([model]).items()}
        visible = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
        assert {*hidden, *visible} == set(model.parameters())
        strategy.zero_grad(optimizer, set_to_none=True)
        strategy.gradients.restore_local([model], {p: torch.zeros_like(g) for p, g in hidden.items()})
        strategy.gradients.restore_local([model], hidden)
        for parameter, gradient in visible.items():
            parameter.grad = gradient
        run_backward(strategy, model, rows)
        strategy.step(optimizer)
        strategy.synchronize()
        return full_parameters(strategy, model)

    expected, _ = train_alone(passes=2)
    for actual in ranks.run(train, sizes):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_a_model_has_the_parameters_of_the_first_rank(ranks, sizes):
    def weights(sizes):
        strategy = connect_strategy(sizes)
        model, _ = build_model_and_batch()
        nn.init.constant_(model[0].weight, strategy.backend.topology.rank + 1)
        (prepared,) = strategy.prepare([ModelRequest(model)])
        return full_parameters(strategy, prepared)[0]

    assert all(torch.equal(actual, torch.ones(6, 4)) for actual in ranks.run(weights, sizes))


def test_a_prepared_model_is_unwrapped_to_that_of_the_script_and_described(ranks, sizes):
    def unwrap(sizes):
        strategy, model, _, _ = prepare(sizes)
        names = [name for name, _ in strategy.unwrap_model(model).named_parameters()]
        frozen = build_model_and_batch()[0].requires_grad_(requires_grad=False)
        (evaluated,) = strategy.prepare([ModelRequest(frozen, is_trained=False)])
        with strategy.no_sync(evaluated):
            layout = strategy.describe_model(model, None)
        same = strategy.unwrap_model(evaluated) is frozen
        return names, same, bool(layout.wrapper), bool(layout.groups) or not strategy.shards_models

    names = [name for name, _ in build_model_and_batch()[0].named_parameters()]
    assert ranks.run(unwrap, sizes) == [(names, True, True, True)] * ranks.size


def test_the_forward_pass_is_set_once_the_model_is_placed_and_before_it_is_wrapped(ranks, sizes):
    def prepare_forward(sizes):
        strategy, seen = connect_strategy(sizes), []
        module, _ = build_model_and_batch()

        def set_forward(model):
            seen.append((model is module, next(model.parameters()).device.type))

        strategy.prepare([ModelRequest(module, set_forward=set_forward)])
        device = strategy.backend.device.type
        return [(is_module, device in {"cpu", kind}) for is_module, kind in seen]

    assert ranks.run(prepare_forward, sizes) == [[(True, True)]] * ranks.size


def test_the_state_of_replicas_is_restored(ranks, sizes):
    def restore(sizes):
        strategy, model, _, rows = prepare(sizes)
        for _ in range(2):
            run_backward(strategy, model, rows)
        state = strategy.capture_replica_state(model)
        strategy.restore_replica_state(model, copy.deepcopy(state))
        return repr(strategy.capture_replica_state(model)) == repr(state)

    assert all(ranks.run(restore, sizes))


def test_options_of_ddp_are_honoured_or_refused(ranks, sizes):
    def check(sizes):
        strategy = connect_strategy(sizes)
        strategy.check_options({}, Settings().mixed_precision)
        try:
            strategy.check_options({"find_unused_parameters": True}, "no")
        except ValueError as error:
            return "find_unused_parameters" in str(error)
        return not strategy.shards_models

    assert all(ranks.run(check, sizes))


@pytest.mark.parametrize("kind", [torch.Tensor, tuple, list, dict])
def test_both_passes_of_a_batch_are_run_and_the_mean_loss_is_returned(ranks, sizes, kind):
    def train(sizes, kind):
        strategy, model, optimizer, rows = prepare(sizes)

        def compute_loss(outputs, targets):
            return (outputs - targets).square().mean()

        inputs = {torch.Tensor: rows, tuple: (rows,), list: [rows], dict: {"input": rows}}[kind]
        loss = strategy.forward_backward(
            TrainingPass(
                model,
                inputs,
                torch.zeros(len(rows), 1, device=rows.device),
                compute_loss,
                backward=lambda loss: strategy.backward(loss, {}),
                run_backward=lambda _dtype, run: run(lambda loss: loss),
            )
        )
        strategy.step(optimizer)
        strategy.synchronize()
        return loss.requires_grad, float(loss), full_parameters(strategy, model)

    model, batch = build_model_and_batch()
    mean = model(batch).square().mean().item()
    expected, _ = train_alone()
    results = ranks.run(train, sizes, kind)
    for requires_grad, _, actual in results:
        assert not requires_grad
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
    assert sum(loss for _, loss, _ in results) / len(results) == pytest.approx(mean, rel=1e-5)


class OtherConfiguration:
    """The configuration of a strategy that does not exist."""


class OtherOptimizer(Placeholder):
    """The optimizer of that strategy."""

    builder, cure = "the other engine", "Select it."


def test_the_configuration_of_another_strategy_is_refused_by_name(ranks, sizes):
    def configure(sizes):
        strategy = connect_strategy(sizes)
        with pytest.raises(TypeError) as caught:
            strategy.configure(OtherConfiguration())
        return type(strategy).__name__ in str(caught.value) and "OtherConfiguration" in str(caught.value)

    assert all(ranks.run(configure, sizes))


def test_a_placeholder_of_another_strategy_is_refused_by_name(ranks, sizes):
    def resolve(sizes):
        with pytest.raises(ValueError, match="OtherOptimizer") as caught:
            connect_strategy(sizes).resolve_placeholders([OtherOptimizer()], 1)
        return str(caught.value)

    expected = "OtherOptimizer cannot be prepared: the other engine is not in use. Select it."
    assert ranks.run(resolve, sizes) == [expected] * ranks.size


def train_in_cycles(accelerator, model, batch, *, weighted, in_one_call=False):
    """Train two steps of two micro-batches each, with clipping; return the norms and the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    data, norms = accelerator._backend.data_rank, []
    for step in range(2):
        for micro_batch in batch.roll(step, 0).chunk(2):
            with accelerator.accumulate(model):
                rows = micro_batch.chunk(data.world_size)[data.rank]
                weight = float(3 + len(norms) + rows[0, 0].abs()) if weighted else None
                if in_one_call:
                    accelerator.forward_backward(
                        model, rows, None, lambda output, _: output.square().mean(), weight
                    )
                else:
                    accelerator.backward(model(rows).square().mean(), weight)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
    return norms, full_parameters(accelerator._run.strategy, model)


@pytest.mark.skipif(HERE is XLA_CASES, reason="replicas of torch_xla have a strategy of their own")
@pytest.mark.parametrize("weighted", [False, True])
def test_an_accelerator_trains_as_with_ddp_if_only_the_strategy_has_the_gradients(clusters, weighted):
    def train(weighted):
        from unittest import mock

        from support.training.engine_strategy import EngineStrategy

        from accel_runtime import Accelerator
        from accel_runtime.accelerator import run

        results = []
        for choose in (run.choose_strategy, lambda backend, *_: EngineStrategy(backend)):
            with mock.patch.object(run, "choose_strategy", choose):
                accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            results += [
                train_in_cycles(
                    accelerator, *build_model_and_batch(), weighted=weighted, in_one_call=in_one_call
                )
                for in_one_call in (False, True)
            ]
        return results

    for (expected_norms, expected), *others in clusters[2].run(train, weighted):
        for norms, actual in others:
            assert norms == pytest.approx(expected_norms, rel=1e-5)
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
