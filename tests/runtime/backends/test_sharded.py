"""Models that are divided among processes, from `prepare` to the end of a run."""

from __future__ import annotations

import pytest
import torch
from log_messages import collect_messages
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel_runtime import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from accel_runtime.options import DistributedType


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(4) for _ in range(2)), nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(**options):
    return Accelerator(parallelism_config=ParallelismConfig(dp_shard_size="auto"), **options)


def whole(model):
    return [p.full_tensor().tolist() for p in model.parameters()]


def trained(make, order):
    """Parameters after three steps, however model and optimizer came to `prepare`."""
    torch.manual_seed(0)
    accelerator, model = make(), Model()
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
    return whole(model)


@pytest.mark.parametrize("order", ["model", "optimizer", "together"])
def test_an_optimizer_made_before_prepare_trains_whatever_the_order(pair, order):
    assert pair.run(trained, sharded, order) == pair.run(trained, sharded, "new")


def test_one_process_shards_over_itself(alone):
    model = sharded().prepare(Model())
    assert isinstance(model, FSDPModule)
    assert all(isinstance(block, FSDPModule) for block in model.blocks)


def test_scripts_see_that_models_are_sharded(pair):
    def seen():
        accelerator = sharded()
        accelerator.prepare(Model())
        return accelerator.distributed_type, accelerator.is_fsdp2, accelerator.describe().models[0].wrapping

    assert pair.run(seen) == [(DistributedType.FSDP, True, "fully_shard (dp_shard 2)")] * 2


def test_a_model_prepared_twice_is_the_same(alone):
    accelerator = sharded()
    model = accelerator.prepare(Model())
    assert accelerator.prepare(model) is model


def test_a_model_that_is_never_trained_is_divided_too(pair):
    def divided():
        return isinstance(sharded().prepare_model(Model(), evaluation_mode=True), FSDPModule)

    assert pair.run(divided) == [True, True]


def test_options_of_ddp_are_refused(alone):
    with pytest.raises(
        ValueError,
        match=r"DistributedDataParallelKwargs\(bucket_cap_mb\) is not supported for sharded models",
    ):
        sharded(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=3)])


def test_sharding_on_xla_is_refused(alone, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "xla")
    with pytest.raises(ValueError, match="XLA devices"):
        sharded()


def test_uneven_inputs_are_not_joined_which_one_warning_with_the_line_tells(pair):
    def joined():
        accelerator = sharded()
        model = accelerator.prepare(Model())
        with collect_messages("accel_runtime.backends") as messages:
            for _ in range(2):
                with accelerator.join_uneven_inputs([model]):
                    model(torch.ones(1, 4)).sum().backward()
        return messages

    for messages in pair.run(joined):
        (message,) = messages
        assert "join_uneven_inputs() has no effect, at test_sharded.py:" in message
        assert "(joined)" in message


def test_gradients_stay_here_in_no_sync_and_come_together_with_the_next_pass(pair):
    def grads():
        torch.manual_seed(0)
        accelerator = sharded()
        model = accelerator.prepare(Model())
        x = torch.full((1, 4), float(accelerator.process_index + 1))
        with accelerator.no_sync(model):
            model(x).sum().backward()
            held = model.head.bias.grad is None
            with accelerator.trigger_sync_in_backward(model):
                pass
            model(x).sum().backward()
            still = model.head.bias.grad is None
        model(x).sum().backward()
        return held, still, model.head.bias.grad.full_tensor().tolist()

    assert pair.run(grads) == [(True, True, [3.0])] * 2


def test_a_state_saved_after_an_evaluation_is_that_of_the_sharded_model(pair, tmp_path):
    def saved(folder):
        torch.manual_seed(0)
        accelerator, model = sharded(), Model()
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
        before = whole(model)
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        accelerator.load_state(folder)
        return before == whole(model)

    assert pair.run(saved, str(tmp_path / "state")) == [True, True]


def test_an_optimizer_of_no_prepared_model_is_refused_at_its_first_step(alone):
    accelerator, model = sharded(), Model()
    other = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="SGD cannot step: 2 of its parameters"):
        optimizer.step()


def test_names_to_leave_whole_are_left_whole(pair):
    def kept():
        accelerator = sharded(fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="head"))
        model = accelerator.prepare(Model())
        return [name for name, p in model.named_parameters() if not hasattr(p, "device_mesh")]

    assert pair.run(kept) == [["head.weight", "head.bias"]] * 2


def test_gradients_of_what_is_left_whole_are_averaged_as_the_others_are(pair):
    def grads():
        torch.manual_seed(0)
        accelerator = sharded(fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="head"))
        model = accelerator.prepare(Model())
        x = torch.full((1, 4), float(accelerator.process_index + 1))
        with accelerator.no_sync(model):
            (model(x).sum() * (accelerator.process_index + 1)).backward()
            alone = model.head.bias.grad.item()
        (model(x).sum() * (accelerator.process_index + 1)).backward()
        return alone, model.head.bias.grad.item(), model.head.weight.grad.tolist()

    (one, mean, weight), (two, same, others) = pair.run(grads)
    assert (one, two) == (1.0, 2.0)
    assert (mean, weight) == (same, others)
    assert mean == 3.0


def test_running_means_are_the_first_ranks_at_an_evaluation(pair):
    def means():
        torch.manual_seed(0)
        accelerator = sharded()
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


def test_a_part_of_a_tensor_is_not_saved_for_a_whole_one(pair, tmp_path):
    def saved(path):
        accelerator = sharded()
        model = accelerator.prepare(Model())
        try:
            accelerator.save(model.state_dict(), path)
        except ValueError as error:
            said = str(error)
        accelerator.save(accelerator.get_state_dict(model), path)
        accelerator.wait_for_everyone()
        return said, list(accelerator.load(path)["head.weight"].shape)

    for said, shape in pair.run(saved, str(tmp_path / "model.pt")):
        assert "cannot write a sharded tensor" in said
        assert "get_state_dict" in said
        assert shape == [1, 4]


def test_an_evaluation_before_the_first_step_changes_nothing(pair):
    def stepped(evaluate):
        torch.manual_seed(0)
        accelerator, model = sharded(), Model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 4)).mean())
        if evaluate:
            with torch.no_grad():
                model(torch.ones(2, 4))
        optimizer.step()
        accelerator._backend.synchronize()
        return whole(model)

    assert pair.run(stepped, True) == pair.run(stepped, False)


def test_several_models_and_optimizers_find_each_other(pair):
    def both(divided):
        torch.manual_seed(0)
        accelerator = sharded() if divided else Accelerator()
        one, two = Model(), Model()
        first = torch.optim.AdamW(one.parameters(), lr=0.1)
        # One optimizer of two groups, of which each is of another model.
        groups = [
            {"params": list(two.blocks.parameters())},
            {"params": list(two.head.parameters()), "lr": 0.01},
        ]
        second = torch.optim.SGD(groups, lr=0.1)
        second, one, two, first = accelerator.prepare(second, one, two, first)
        for step in range(3):
            accelerator.backward((two(one(torch.ones(2, 4) * step).expand(2, 4))).mean())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        accelerator._backend.synchronize()
        everything = (*one.parameters(), *two.parameters())
        return [p.full_tensor() if divided else p.detach() for p in everything]

    for own, expected in zip(pair.run(both, True), pair.run(both, False), strict=True):
        for tensor, same in zip(own, expected, strict=True):
            torch.testing.assert_close(tensor, same, atol=1e-6, rtol=0)
