"""The estimate of a layout is what real processes hold: to the byte where it says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator, ParallelismConfig
from accel_runtime.estimate.__main__ import estimate_layouts
from accel_runtime.estimate.memory import EstimateError, ModelSpec


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 26), nn.Linear(26, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Uneven(nn.Module):
    """Nothing in it comes out even on four: 13, 7, 1; with a tie, a frozen part, a buffer and two formats."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 13), nn.Linear(13, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block(13) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.register_buffer("shift", torch.zeros(5))

    def forward(self, words):
        x = self.embed(words) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sized(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(sizes, make):
    """Bytes of parameters, gradients and optimizer state on this rank after a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.utils._pytree import tree_leaves

    from accel_runtime.parallel.tensor_parallel import apply_tensor_parallel, plan_tensor_parallel

    def here(value):
        return value.to_local() if isinstance(value, DTensor) else value

    model = Uneven()
    if sizes[2] > 1:
        Accelerator()
        apply_tensor_parallel(model, init_device_mesh("cpu", sizes[2:]), plan_tensor_parallel(model))
        optimizer = make(model.parameters())
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    else:
        config = ParallelismConfig(dp_replicate_size=sizes[0], dp_shard_size=sizes[1])
        accelerator = Accelerator(parallelism_config=config)
        model, optimizer = accelerator.prepare(model, make(model.parameters()))
        accelerator.backward(model(torch.zeros(2, 3, dtype=torch.long)).sum())
    optimizer.step()
    state = [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, torch.Tensor)]
    return (
        sized(here(p.detach()) for p in model.parameters()),
        sized(here(p.grad) for p in model.parameters() if p.grad is not None),
        sized(here(t) for t in state),
    )


def surveyed(made=None, devices=4, **options):
    wishes = {"mixed_precision": "no", "wrap": "auto", "optimizer": None} | options
    if made is None:
        with torch.device("meta"):
            made = ModelSpec(Uneven())
    return estimate_layouts(made, devices=devices, **wishes)


def estimated(sizes):
    found = surveyed(devices=sizes[0] * sizes[1] * sizes[2]).estimates
    every = {
        (one.usage.parameters, one.usage.gradients, one.usage.optimizer)
        for one in found
        if (one.layout.dp_replicate, one.layout.dp_shard, one.layout.tp) == sizes
    }
    assert len(every) == 1, "neither resharding nor checkpointing changes what is held"
    return every.pop()


def check(cluster, sizes):
    """Parameters and gradients are padded alike everywhere; the first rank has the most of the optimizer's state."""
    first, *others = cluster.run(held, sizes, torch.optim.AdamW)
    assert first == estimated(sizes)
    for other in others:
        assert other[:2] == first[:2]
        assert other[2] <= first[2]


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_two_processes_hold_what_was_estimated_to_the_byte(pair, sizes):
    check(pair, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1)], ids=str)
def test_four_processes_hold_what_was_estimated_to_the_byte(four, sizes):
    check(four, sizes)


def test_one_process_holds_what_was_estimated_with_shards_and_without(alone):
    for shards in (1, "auto"):
        assert alone.run(held, (1, shards, 1), torch.optim.AdamW) == [estimated((1, 1, 1))]


def test_every_number_of_devices_that_divides_theirs_is_looked_at():
    found = surveyed(devices=6).estimates
    assert {one.layout.devices for one in found} == {1, 2, 3, 6}


def test_why_there_is_no_tp_is_said_for_each():
    found = surveyed(devices=4)
    assert set(found.left_out) == {4}
    assert "parallel.tp=4 does not divide dimension 0 of blocks.0.up.weight, which is 26" in found.left_out[4]
    assert {one.layout.tp for one in found.estimates} == {1, 2}


def test_heads_that_tp_does_not_divide_leave_it_out():
    with torch.device("meta"):
        model = Uneven()
    model.blocks[0].num_heads = 3
    assert "num_heads=3" in surveyed(ModelSpec(model), devices=2).left_out[2]


def test_without_a_plan_layers_are_not_divided():
    with torch.device("meta"):
        made = ModelSpec(nn.Linear(4, 4))
    assert "Linear has no tp_plan" in surveyed(made, devices=2).left_out[2]


def test_layers_whose_code_counts_on_all_of_them_are_not_divided():
    class Fixed(Uneven):
        def forward(self, words):
            return self.blocks[0].up(self.embed(words)).unflatten(-1, (2, 13))

    with torch.device("meta"):
        made = ModelSpec(Fixed(), torch.zeros(2, 3, dtype=torch.long))
    assert "with sharded layers the forward pass failed" in surveyed(made, devices=2).left_out[2]


def test_a_class_that_is_not_in_the_model_cannot_be_wrapped():
    with pytest.raises(EstimateError, match=r"--wrap: .* has no module of class Blok; did you mean Block"):
        surveyed(wrap="Blok")


def test_a_batch_makes_activations_and_mixed_precision_makes_them_smaller():
    with torch.device("meta"):
        made = ModelSpec(Uneven(), torch.zeros(64, 30, dtype=torch.long))
    full, half = (surveyed(made, 2, mixed_precision=which).estimates for which in ("no", "bf16"))
    for whole, less in zip(full, half, strict=True):
        assert less.usage.activations < whole.usage.activations
        assert less.usage.parameters == whole.usage.parameters
    assert all(one.usage.activations is None for one in surveyed().estimates)


def test_the_factory_s_optimizer_counts_unless_another_is_named():
    with torch.device("meta"):
        made = ModelSpec(Uneven(), optimizer=lambda p: torch.optim.SGD(p, lr=1))
    assert surveyed(made).estimates[0].usage.optimizer == 0
    assert surveyed(made).optimizer == "SGD"
    assert surveyed(made, optimizer="adamw").estimates[0].usage.optimizer > 0


def test_without_wrapped_modules_nothing_is_checkpointed():
    assert not any(one.layout.activation_checkpointing for one in surveyed(wrap="none").estimates)
    assert any(one.layout.activation_checkpointing for one in surveyed().estimates)


def test_halves_are_averaged_in_full():
    def working(dtype, precision):
        with torch.device("meta"):
            made = ModelSpec(Uneven().to(dtype))
        found = surveyed(made, 2, mixed_precision=precision).estimates
        return next(one.usage.working for one in found if one.layout.dp_shard == 2)

    assert working(torch.bfloat16, "no") == working(torch.bfloat16, "bf16")


def test_batch_normalisation_is_measured_in_mixed_precision():
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        made = ModelSpec(net, torch.zeros(2, 3, 8, 8))
    assert all(one.usage.activations for one in surveyed(made, 2, mixed_precision="bf16").estimates)
