"""Norms of sharded gradients equal those of one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from accel_runtime import Accelerator, ParallelismConfig
from accel_runtime.parallel import grad_norm

ORDERS = [2.0, 1.0, 0.0, 3.0, 0.5, -1.0, math.inf, -math.inf]
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def draw_values(size, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) + 0.1


def distribute_parameter(values, mesh, placements):
    """Return a distributed parameter with a gradient; a partial gradient has an equal part on every rank."""
    gradient = distribute_tensor(values, mesh, [Replicate() if p.is_partial() else p for p in placements])
    if any(p.is_partial() for p in placements):
        num_partial = mesh.size(next(at for at, p in enumerate(placements) if p.is_partial()))
        gradient = DTensor.from_local(gradient.to_local() / num_partial, mesh, placements, run_check=False)
        placements = [Replicate() if p.is_partial() else p for p in placements]
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(values), mesh, placements))
    parameter.grad = gradient
    return parameter


def build_parameters():
    """Return parameters of every layout, and their full gradients."""
    size = Accelerator().num_processes
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))
    square = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp_replicate", "tp"))
    layouts = [
        ((7, 3), line, [Shard(0)]),  # uneven
        ((1, 5), line, [Shard(0)]),  # empty on most ranks
        ((4, 6), line, [Shard(1)]),
        ((5,), line, [Replicate()]),
        ((6, 2), line, [Partial()]),
        ((8, 4), square, [Replicate(), Shard(0)]),
        ((5, 3), square, [Shard(0), Shard(1)]),
        ((8, 4), square, [Shard(0), Shard(0)]),
        ((3, 4), square, [Replicate(), Partial()]),
        ((6, 4), square["tp"], [Shard(0)]),  # each submesh has all of it
        ((3,), square["dp_replicate"], [Replicate()]),
        ((5, 2), square["dp_replicate"], [Shard(0)]),
    ]
    full_values = [draw_values(shape, at) for at, (shape, _, _) in enumerate(layouts)]
    divided = [
        distribute_parameter(values, *layout)
        for values, (_, *layout) in zip(full_values, layouts, strict=True)
    ]
    for at, shape in enumerate([(3, 3), (2,)]):
        plain = nn.Parameter(torch.zeros(shape))
        plain.grad = draw_values(shape, 50 + at)
        full_values.append(plain.grad.clone())
        divided.insert(at * 3, plain)
    return divided, full_values


def add_unused_parameter(parameters):
    return [*parameters, nn.Parameter(torch.zeros(2))]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_mixed_layouts_equals_that_of_one_process(order, pair):
    def measured(order):
        divided, full_values = build_parameters()
        norm = grad_norm.get_total_norm([p.grad for p in add_unused_parameter(divided)], order)
        assert type(norm) is torch.Tensor
        return norm, torch.nn.utils.get_total_norm(full_values, order)

    (first, expected), *others = pair.run(measured, order)
    torch.testing.assert_close(first, expected)
    assert all(first.equal(other) for other, _ in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [pytest.param(order, marks=[pytest.mark.full] * (order not in {2.0, 0.0, math.inf})) for order in ORDERS],
)
def test_the_norm_on_a_two_dimensional_mesh_equals_that_of_one_process(order, four):
    def measured(order):
        divided, full_values = build_parameters()
        return grad_norm.get_total_norm([p.grad for p in add_unused_parameter(divided)], order), full_values

    results = four.run(measured, order)
    expected = torch.nn.utils.get_total_norm(results[0][1], order)
    torch.testing.assert_close(results[0][0], expected)
    assert all(results[0][0].equal(norm) for norm, _ in results)


@pytest.mark.slow
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_clipped_gradients_equal_those_of_one_process(order, four):
    def clipped(order):
        divided, _ = build_parameters()
        grad_norm.clip_grad_norm_(add_unused_parameter(divided), 0.7, order)
        assert not any(p.is_partial() for d in divided if isinstance(d, DTensor) for p in d.grad.placements)
        return [full(p.grad) for p in divided]

    def plain():
        parameters = [nn.Parameter(torch.zeros_like(p)) for p in full_values]
        for parameter, gradient in zip(parameters, full_values, strict=True):
            parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(parameters, 0.7, order)
        return [p.grad for p in parameters]

    full_values = four.run(gather_gradients)[0]
    for actual in four.run(clipped, order):
        torch.testing.assert_close(actual, plain())


def gather_gradients():
    divided, _ = build_parameters()
    return [full(p.grad) for p in divided]


@pytest.mark.slow
def test_partial_gradients_are_reduced_before_values_are_clipped(four):
    def clipped():
        divided, _ = build_parameters()
        grad_norm.clip_grad_value_(add_unused_parameter(divided), 0.3)
        return [full(p.grad) for p in divided]

    expected = [gradient.clamp(-0.3, 0.3) for gradient in four.run(gather_gradients)[0]]
    for actual in four.run(clipped):
        torch.testing.assert_close(actual, expected)


def test_a_mesh_of_some_processes_counts_only_their_gradients(clusters):
    def measured():
        Accelerator()
        mesh = DeviceMesh("cpu", [1, 2])
        if dist.get_rank() == 0:
            return None
        gradient = distribute_tensor(draw_values((5, 2), 1), mesh, [Shard(0)], src_data_rank=None)
        plain = draw_values((3,), 2)
        expected = torch.nn.utils.get_total_norm([draw_values((5, 2), 1), plain])
        norm = grad_norm.get_total_norm([gradient, plain])
        largest = grad_norm.get_total_norm([gradient, plain], math.inf)
        assert largest == torch.nn.utils.get_total_norm([draw_values((5, 2), 1), plain], math.inf)
        return norm, expected

    _, *results = clusters[3].run(measured)
    for norm, expected in results:
        torch.testing.assert_close(norm, expected)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_of_one_rank_are_an_error_on_all(order, bad, pair):
    def measured(order, bad):
        Accelerator()
        mesh = init_device_mesh("cpu", (2,))
        gradient = torch.ones(4)
        gradient[3] = bad
        parameter = distribute_parameter(gradient, mesh, [Shard(0)])
        norm = grad_norm.get_total_norm([parameter.grad], order)
        try:
            grad_norm.clip_grad_norm_([parameter], 1.0, order, error_if_nonfinite=True)
        except RuntimeError as error:
            return norm, str(error), full(parameter.grad)
        return norm, None, None

    for norm, message, is_unchanged in pair.run(measured, order, bad):
        assert norm.isnan() if math.isnan(bad) else norm.isinf()
        assert "Cannot clip gradients" in message
        assert is_unchanged[0] == 1


def test_norms_of_half_precision_gradients_are_computed_in_float32(pair):
    def measured():
        Accelerator()
        mesh = init_device_mesh("cpu", (2,))
        parameter = distribute_parameter(draw_values((301,), 1).bfloat16(), mesh, [Shard(0)])
        return grad_norm.clip_grad_norm_([parameter], 1e-3), parameter.grad.dtype

    for norm, dtype in pair.run(measured):
        torch.testing.assert_close(norm, draw_values((301,), 1).bfloat16().float().norm())
        assert dtype == torch.bfloat16


@pytest.mark.skipif(
    not hasattr(DeviceMesh, "_get_root_mesh"), reason="torch tells the root of a mesh from 2.10 on"
)
def test_gradients_of_different_layouts_need_one_collective(pair):
    def counted():
        divided, _ = build_parameters()
        gradients = [
            p.grad for p in divided if not any(x.is_partial() for x in getattr(p.grad, "placements", ()))
        ]
        calls, real = [], dist.all_gather
        dist.all_gather = lambda *args, **kwargs: (calls.append(args), real(*args, **kwargs))[1]
        try:
            grad_norm.get_total_norm(gradients)
        finally:
            dist.all_gather = real
        return len(calls)

    assert pair.run(counted) == [1, 1]


@pytest.mark.slow
def test_the_norm_with_tensor_parallelism_and_sharding_equals_that_of_one_process(four):
    def measured():
        Accelerator()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        x = draw_values((5, 4), 9)
        model(x).square().mean().backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        model.zero_grad()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh["dp_shard"])
        model(x).square().mean().backward()
        kinds = {type(p).__name__ for parameter in model.parameters() for p in parameter.placements}
        return grad_norm.get_total_norm([p.grad for p in model.parameters()]), expected, kinds

    for norm, expected, kinds in four.run(measured):
        torch.testing.assert_close(norm, expected)
        assert "_StridedShard" in kinds


@pytest.mark.parametrize("single", [False, True])
def test_parameters_listed_before_prepare_can_be_clipped(pair, single):
    def clipped(single):
        accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))
        torch.manual_seed(3)
        model = nn.Linear(4, 2, bias=False)
        listed = model.weight if single else list(model.parameters())
        model = accelerator.prepare(model)
        accelerator.backward(model(draw_values((5, 4), 9)).square().mean())
        norm = accelerator.clip_grad_norm_(listed, 0.1)
        accelerator.clip_grad_value_(listed, 0.02)
        return norm, model.weight.grad.full_tensor()

    torch.manual_seed(3)
    alone = nn.Linear(4, 2, bias=False)
    alone(draw_values((5, 4), 9)).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    alone.weight.grad.clamp_(-0.02, 0.02)
    for norm, gradient in pair.run(clipped, single):
        torch.testing.assert_close((norm, gradient), (expected, alone.weight.grad))
