"""Models that are sharded over processes, from `prepare` to the end of a run."""

from __future__ import annotations

import pytest
import torch
from support.cases.log_messages import collect_messages
from support.training.models import ResidualNet
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel_runtime import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from accel_runtime.foundation.options import DistributedType


def create_sharding_accelerator(**options):
    return Accelerator(parallelism_config=ParallelismConfig(dp_shard_size="auto"), **options)


def create_tensor_parallel_accelerator():
    return Accelerator(parallelism_config=ParallelismConfig(tp_size=2, tp_plan=ResidualNet.tp_plan))


def gather_parameters(model):
    return [p.full_tensor().tolist() for p in model.parameters()]


def train(make, order):
    """Return the parameters after three steps, for any order of `prepare` calls."""
    torch.manual_seed(0)
    accelerator, model = make(), ResidualNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if order == "model":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    elif order == "optimizer":
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    elif order == "new":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    else:
        optimizer, model = accelerator.prepare(optimizer, model)
    for step in range(3):
        accelerator.backward(model(torch.ones(2, 4) * (step + 1)).mean())
        optimizer.step()
        optimizer.zero_grad()
    return gather_parameters(model)


@pytest.mark.parametrize("order", ["model", "optimizer", "together"])
def test_an_optimizer_created_before_prepare_trains_in_any_order(pair, order):
    assert pair.run(train, create_sharding_accelerator, order) == pair.run(
        train, create_sharding_accelerator, "new"
    )


def test_one_process_uses_fully_shard(alone):
    model = create_sharding_accelerator().prepare(ResidualNet())
    assert isinstance(model, FSDPModule)
    assert all(isinstance(block, FSDPModule) for block in model.blocks)


def test_the_accelerator_reports_sharding(pair):
    def read_properties():
        accelerator = create_sharding_accelerator()
        accelerator.prepare(ResidualNet())
        return accelerator.distributed_type, accelerator.is_fsdp2, accelerator.describe().models[0].wrapping

    assert pair.run(read_properties) == [(DistributedType.FSDP, True, "fully_shard (dp_shard 2)")] * 2


def test_preparing_a_model_twice_returns_it(alone):
    accelerator = create_sharding_accelerator()
    model = accelerator.prepare(ResidualNet())
    assert accelerator.prepare(model) is model


def test_a_model_for_evaluation_is_sharded(pair):
    def divided():
        return isinstance(
            create_sharding_accelerator().prepare_model(ResidualNet(), evaluation_mode=True), FSDPModule
        )

    assert pair.run(divided) == [True, True]


def test_options_of_ddp_are_rejected_with_sharding(alone):
    with pytest.raises(
        ValueError,
        match=r"DistributedDataParallelKwargs\(bucket_cap_mb\) is not supported for sharded models",
    ):
        create_sharding_accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=3)])


def test_sharding_on_xla_is_rejected(alone, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "xla")
    with pytest.raises(ValueError, match="XLA devices"):
        create_sharding_accelerator()


def test_join_uneven_inputs_warns_once_that_it_has_no_effect(pair):
    def joined():
        accelerator = create_sharding_accelerator()
        model = accelerator.prepare(ResidualNet())
        with collect_messages("accel_runtime.parallel") as messages:
            for _ in range(2):
                with accelerator.join_uneven_inputs([model]):
                    model(torch.ones(1, 4)).sum().backward()
        return messages

    for messages in pair.run(joined):
        (message,) = messages
        assert "join_uneven_inputs() has no effect, at test_sharded.py:" in message
        assert "(joined)" in message


def test_no_sync_defers_averaging_until_the_next_backward_pass(pair):
    def grads():
        torch.manual_seed(0)
        accelerator = create_sharding_accelerator()
        model = accelerator.prepare(ResidualNet())
        x = torch.full((1, 4), float(accelerator.process_index + 1))
        with accelerator.no_sync(model):
            model(x).sum().backward()
            is_deferred = model.head.bias.grad is None
            with accelerator.trigger_sync_in_backward(model):
                pass
            model(x).sum().backward()
            still = model.head.bias.grad is None
        model(x).sum().backward()
        return is_deferred, still, model.head.bias.grad.full_tensor().tolist()

    assert pair.run(grads) == [(True, True, [3.0])] * 2


def test_a_state_saved_after_an_evaluation_restores_the_sharded_model(pair, tmp_path):
    def saved(folder):
        torch.manual_seed(0)
        accelerator, model = create_sharding_accelerator(), ResidualNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                loss = model(torch.ones(2, 4)).mean()
            if grad:
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(folder)
        before = gather_parameters(model)
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        accelerator.load_state(folder)
        return before == gather_parameters(model)

    assert pair.run(saved, str(tmp_path / "state")) == [True, True]


def test_an_optimizer_of_unprepared_parameters_is_rejected_at_its_first_step(alone):
    accelerator, model = create_sharding_accelerator(), ResidualNet()
    other = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="SGD cannot step: 2 of its parameters"):
        optimizer.step()


def test_ignored_modules_are_not_sharded(pair):
    def read_types():
        accelerator = create_sharding_accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="head")
        )
        model = accelerator.prepare(ResidualNet())
        return [name for name, p in model.named_parameters() if not hasattr(p, "device_mesh")]

    assert pair.run(read_types) == [["head.weight", "head.bias"]] * 2


def test_gradients_of_ignored_modules_are_averaged(pair):
    def grads():
        torch.manual_seed(0)
        accelerator = create_sharding_accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="head")
        )
        model = accelerator.prepare(ResidualNet())
        x = torch.full((1, 4), float(accelerator.process_index + 1))
        with accelerator.no_sync(model):
            (model(x).sum() * (accelerator.process_index + 1)).backward()
            alone = model.head.bias.grad.item()
        (model(x).sum() * (accelerator.process_index + 1)).backward()
        return alone, model.head.bias.grad.item(), model.head.weight.grad.tolist()

    (first_gradient, mean, weight), (second_gradient, same, others) = pair.run(grads)
    assert (first_gradient, second_gradient) == (1.0, 2.0)
    assert (mean, weight) == (same, others)
    assert mean == 3.0


def test_batch_norm_statistics_of_the_first_rank_are_used_in_evaluation(pair):
    def means():
        torch.manual_seed(0)
        accelerator = create_sharding_accelerator()
        model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        for step in range(2):
            torch.manual_seed(10 * step + accelerator.process_index)
            accelerator.backward(model(torch.randn(8, 4)).mean())
        before = model[1].running_mean.tolist()
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 4))
        return before, model[1].running_mean.tolist(), model[1].num_batches_tracked.item()

    (first, shared, steps), (second, same, others) = pair.run(means)
    assert first != second
    assert shared == same == first
    assert steps == others == 2


def test_saving_a_sharded_tensor_is_rejected(pair, tmp_path):
    def saved(path):
        accelerator = create_sharding_accelerator()
        model = accelerator.prepare(ResidualNet())
        try:
            accelerator.save(model.state_dict(), path)
        except ValueError as error:
            message = str(error)
        accelerator.save(accelerator.get_state_dict(model), path)
        accelerator.wait_for_everyone()
        return message, list(accelerator.load(path)["head.weight"].shape)

    for message, shape in pair.run(saved, str(tmp_path / "model.pt")):
        assert "cannot write a sharded tensor" in message
        assert "get_state_dict" in message
        assert shape == [1, 4]


def test_an_evaluation_between_backward_and_step_changes_nothing(pair):
    def stepped(evaluate):
        torch.manual_seed(0)
        accelerator, model = create_sharding_accelerator(), ResidualNet()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 4)).mean())
        if evaluate:
            with torch.no_grad():
                model(torch.ones(2, 4))
        optimizer.step()
        accelerator._run.strategy.synchronize()
        return gather_parameters(model)

    assert pair.run(stepped, True) == pair.run(stepped, False)


def test_several_models_and_optimizers_are_matched(pair):
    def train_both(divided):
        torch.manual_seed(0)
        accelerator = create_sharding_accelerator() if divided else Accelerator()
        first_model, second_model = ResidualNet(), ResidualNet()
        first = torch.optim.AdamW(first_model.parameters(), lr=0.1)
        # One optimizer of two groups, of which each is of another model.
        groups = [
            {"params": list(second_model.blocks.parameters())},
            {"params": list(second_model.head.parameters()), "lr": 0.01},
        ]
        second = torch.optim.SGD(groups, lr=0.1)
        second, first_model, second_model, first = accelerator.prepare(
            second, first_model, second_model, first
        )
        for step in range(3):
            accelerator.backward((second_model(first_model(torch.ones(2, 4) * step).expand(2, 4))).mean())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        accelerator._run.strategy.synchronize()
        everything = (*first_model.parameters(), *second_model.parameters())
        return [p.full_tensor() if divided else p.detach() for p in everything]

    for actual, expected in zip(pair.run(train_both, True), pair.run(train_both, False), strict=True):
        for tensor, same in zip(actual, expected, strict=True):
            torch.testing.assert_close(tensor, same, atol=1e-6, rtol=0)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_on_parameters_that_sharding_replaces_are_rejected(alone, register):
    model = ResidualNet()
    getattr(model.head.bias, register)(lambda _: None)
    expected = r"Cannot shard ResidualNet: gradient hooks of head\.bias would never run, .* Register them after prepare\(\)"
    with pytest.raises(ValueError, match=expected):
        create_sharding_accelerator().prepare(model)
    plugin = FullyShardedDataParallelPlugin(ignored_modules="head")
    create_sharding_accelerator(fsdp_plugin=plugin).prepare(model)


def train_with_hooks(make):
    """Return the parameters after steps with hooks of each kind, and the hooks that have run."""
    torch.manual_seed(0)
    accelerator, model, ran = make(), ResidualNet(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record_module_hooks(model.blocks[0], ran)
    model, optimizer = accelerator.prepare(model, optimizer)
    record_module_hooks(model, ran)
    record_module_hooks(model.head, ran)

    def keep_first_row(gradient):
        ran.append(f"tensor {list(gradient.shape)}")
        return gradient * (torch.arange(len(gradient)) == 0).float().view(-1, *[1] * (gradient.dim() - 1))

    def halve(parameter):
        ran.append("post accumulate")
        parameter.grad *= 0.5

    handle = model.blocks[0].up.weight.register_hook(keep_first_row)
    halving = model.head.weight.register_post_accumulate_grad_hook(halve)
    for step in range(4):
        inputs = torch.ones(2, 4) * (step + 1 + accelerator.process_index)
        loss = model(inputs.requires_grad_()).square().mean()
        if step == 1:
            handle.remove()
        if step == 2:
            handle = model.blocks[1].up.weight.register_hook(keep_first_row)
        if step == 3:
            halving.remove()
            with accelerator.no_sync(model):
                accelerator.backward(loss)
            loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(model.state_dict())
    return {name: full(p) for name, p in accelerator.unwrap_model(model).named_parameters()}, sorted(ran)


def record_module_hooks(module, ran):
    kinds = (
        "forward_pre", "forward", "full_backward_pre", "full_backward", "state_dict_pre", "state_dict_post", "load_state_dict_pre",
        "load_state_dict_post",
    )  # fmt: skip
    for kind in kinds:

        def record(*_, kind=kind):
            ran.append(f"{kind} of {type(module).__name__.removeprefix('FSDP')}")

        getattr(module, f"register_{kind}_hook")(record)


def full(parameter):
    return parameter.full_tensor().detach() if hasattr(parameter, "full_tensor") else parameter.detach()


def test_hooks_of_sharded_models_run_as_those_of_replicated_ones(pair):
    sharded, replicated = (
        pair.run(train_with_hooks, create_sharding_accelerator),
        pair.run(train_with_hooks, Accelerator),
    )
    for (parameters, ran), (expected, expected_ran) in zip(sharded, replicated, strict=True):
        assert ran.count("tensor [8, 4]") == 4
        assert len({*ran}) == 2 + 3 * 8
        replicated_ran = sorted(each.replace("DDPModel", "ResidualNet") for each in expected_ran)
        assert {*replicated_ran} == {*ran}
        # A state is read to load one.
        passes, expected_passes = (
            [each for each in names if "state" not in each] for names in (ran, replicated_ran)
        )
        assert passes == expected_passes
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name], atol=1e-6, rtol=0, msg=name)


def test_gradient_hooks_outside_of_a_tensor_parallel_plan_run(pair):
    def train_one_step():
        accelerator, model, calls = create_tensor_parallel_accelerator(), ResidualNet(), []
        model.head.bias.register_hook(calls.append)
        accelerator.backward(accelerator.prepare(model)(torch.ones(2, 4)).sum())
        inside = ResidualNet()
        inside.blocks[0].up.weight.register_hook(calls.append)
        with pytest.raises(ValueError, match=r"gradient hooks of blocks\.0\.up\.weight would never run"):
            accelerator.prepare(inside)
        return len(calls)

    assert pair.run(train_one_step) == [1, 1]


@pytest.mark.parametrize("layout", ["sharded", "tensor parallel"])
def test_attributes_of_parameters_are_kept(pair, layout):
    def find_marked():
        make = create_sharding_accelerator if layout == "sharded" else create_tensor_parallel_accelerator
        accelerator, model = make(), ResidualNet()
        model.blocks[0].up.weight._no_weight_decay = True
        return [
            name
            for name, p in accelerator.prepare(model).named_parameters()
            if hasattr(p, "_no_weight_decay")
        ]

    assert pair.run(find_marked) == [["blocks.0.up.weight"]] * 2


def average_weights(make):
    torch.manual_seed(0)
    accelerator, model = make(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, average, optimizer = accelerator.prepare(model, average, optimizer)
    for step in range(3):
        accelerator.backward(model(torch.arange(16.0).sin().view(4, 4) * step).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.unwrap_model(average).update_parameters(accelerator.unwrap_model(model))
    return {name: full(value) for name, value in accelerator.unwrap_model(average).state_dict().items()}


def test_a_sharded_average_of_weights_and_buffers_is_that_of_replicas(alone):
    expected = average_weights(Accelerator)
    for name, value in average_weights(create_sharding_accelerator).items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_models_that_share_a_module_are_rejected_by_name(alone):
    encoder = nn.Linear(2, 2)
    accelerator = create_sharding_accelerator()
    with pytest.raises(
        ValueError, match=r"Cannot shard Sequential: 0\.weight, 0\.bias belong to Sequential too"
    ):
        accelerator.prepare(nn.Sequential(encoder, nn.Linear(2, 1)), nn.Sequential(encoder, nn.Linear(2, 2)))
