"""Estimates of layouts compared with the memory of real ranks, to the byte."""

from __future__ import annotations

import pytest
import torch
from support.training.models import ResidualBlock
from torch import nn

from accel_runtime import Accelerator, ParallelismConfig
from accel_runtime.extensions.estimate.__main__ import estimate_layouts
from accel_runtime.extensions.estimate.memory import EstimateError, ModelSpec


class Uneven(nn.Module):
    """A model whose sizes 13, 7 and 1 are not divisible by four, with tied and frozen weights and a buffer."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 13), nn.Linear(13, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(ResidualBlock(13, norm=nn.LayerNorm) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.register_buffer("shift", torch.zeros(5))

    def forward(self, words):
        x = self.embed(words) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def count_bytes(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure_rank(sizes, make):
    """Return the bytes of parameters, gradients and optimizer state on this rank after a step."""
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
        count_bytes(here(p.detach()) for p in model.parameters()),
        count_bytes(here(p.grad) for p in model.parameters() if p.grad is not None),
        count_bytes(here(t) for t in state),
    )


def estimate_model(spec=None, devices=4, **options):
    settings = {"mixed_precision": "no", "wrap": "auto", "optimizer": None} | options
    if spec is None:
        with torch.device("meta"):
            spec = ModelSpec(Uneven())
    return estimate_layouts(spec, devices=devices, **settings)


def estimate_sizes(sizes):
    estimates = estimate_model(devices=sizes[0] * sizes[1] * sizes[2]).estimates
    every = {
        (estimate.usage.parameters, estimate.usage.gradients, estimate.usage.optimizer)
        for estimate in estimates
        if (estimate.layout.dp_replicate, estimate.layout.dp_shard, estimate.layout.tp) == sizes
    }
    assert len(every) == 1, "neither resharding nor checkpointing changes what is held"
    return every.pop()


def compare_with_estimate(cluster, sizes):
    """Parameters and gradients are padded equally on all ranks; the first rank has the largest optimizer state."""
    first, *others = cluster.run(measure_rank, sizes, torch.optim.AdamW)
    assert first == estimate_sizes(sizes)
    for other in others:
        assert other[:2] == first[:2]
        assert other[2] <= first[2]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_the_memory_of_two_ranks_equals_the_estimate(pair, sizes):
    compare_with_estimate(pair, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1)], ids=str)
def test_the_memory_of_four_ranks_equals_the_estimate(four, sizes):
    compare_with_estimate(four, sizes)


@pytest.mark.smoke
def test_the_memory_of_one_process_equals_the_estimate(alone):
    for shards in (1, "auto"):
        assert alone.run(measure_rank, (1, shards, 1), torch.optim.AdamW) == [estimate_sizes((1, 1, 1))]


def test_every_divisor_of_the_number_of_devices_is_estimated():
    estimates = estimate_model(devices=6).estimates
    assert {estimate.layout.devices for estimate in estimates} == {1, 2, 3, 6}


def test_the_reason_against_each_tp_size_is_reported():
    estimates = estimate_model(devices=4)
    assert set(estimates.left_out) == {4}
    assert (
        "parallel.tp=4 does not divide dimension 0 of blocks.0.up.weight, which is 26"
        in estimates.left_out[4]
    )
    assert {estimate.layout.tp for estimate in estimates.estimates} == {1, 2}


def test_a_tp_size_that_does_not_divide_the_heads_is_left_out():
    with torch.device("meta"):
        model = Uneven()
    model.blocks[0].num_heads = 3
    assert "num_heads=3" in estimate_model(ModelSpec(model), devices=2).left_out[2]


def test_tp_is_left_out_without_a_tp_plan():
    with torch.device("meta"):
        spec = ModelSpec(nn.Linear(4, 4))
    assert "Linear has no tp_plan" in estimate_model(spec, devices=2).left_out[2]


def test_tp_is_left_out_if_the_forward_pass_needs_full_layers():
    class Fixed(Uneven):
        def forward(self, words):
            return self.blocks[0].up(self.embed(words)).unflatten(-1, (2, 13))

    with torch.device("meta"):
        spec = ModelSpec(Fixed(), torch.zeros(2, 3, dtype=torch.long))
    assert "with sharded layers the forward pass failed" in estimate_model(spec, devices=2).left_out[2]


def test_an_unknown_class_to_wrap_is_rejected():
    with pytest.raises(
        EstimateError, match=r"--wrap: .* has no module of class ResidualBlok; did you mean ResidualBlock"
    ):
        estimate_model(wrap="ResidualBlok")


def test_mixed_precision_reduces_the_activations_of_a_batch():
    with torch.device("meta"):
        spec = ModelSpec(Uneven(), torch.zeros(64, 30, dtype=torch.long))
    full, half = (estimate_model(spec, 2, mixed_precision=which).estimates for which in ("no", "bf16"))
    for full_usage, reduced_usage in zip(full, half, strict=True):
        assert reduced_usage.usage.activations < full_usage.usage.activations
        assert reduced_usage.usage.parameters == full_usage.usage.parameters
    assert all(estimate.usage.activations is None for estimate in estimate_model().estimates)


def test_the_optimizer_of_the_factory_is_used_unless_another_is_named():
    with torch.device("meta"):
        spec = ModelSpec(Uneven(), optimizer=lambda p: torch.optim.SGD(p, lr=1))
    assert estimate_model(spec).estimates[0].usage.optimizer == 0
    assert estimate_model(spec).optimizer == "SGD"
    assert estimate_model(spec, optimizer="adamw").estimates[0].usage.optimizer > 0


def test_activation_checkpointing_needs_wrapped_modules():
    assert not any(
        estimate.layout.activation_checkpointing for estimate in estimate_model(wrap="none").estimates
    )
    assert any(estimate.layout.activation_checkpointing for estimate in estimate_model().estimates)


def test_bfloat16_gradients_are_reduced_in_float32():
    def working(dtype, precision):
        with torch.device("meta"):
            spec = ModelSpec(Uneven().to(dtype))
        estimates = estimate_model(spec, 2, mixed_precision=precision).estimates
        return next(estimate.usage.working for estimate in estimates if estimate.layout.dp_shard == 2)

    assert working(torch.bfloat16, "no") == working(torch.bfloat16, "bf16")


def test_activations_of_batch_normalisation_are_measured_in_mixed_precision():
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        spec = ModelSpec(net, torch.zeros(2, 3, 8, 8))
    assert all(
        estimate.usage.activations for estimate in estimate_model(spec, 2, mixed_precision="bf16").estimates
    )
