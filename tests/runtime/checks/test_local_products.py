"""An optimizer that multiplies the shard of each process as if it were the matrix is named; those that are right are not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.cases.log_messages import collect_messages
from torch import nn
from torch.distributed.tensor import DTensor

from accel_runtime import Accelerator, ParallelismConfig

LOGGER = "accel_runtime.checks.local_products"
ROWS, COLUMNS = 8, 6


def orthogonalize(matrix):
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Stepper(torch.optim.Optimizer):
    """An optimizer whose update is a function of the parameter, its gradient and its momentum."""

    def __init__(self, parameters, update):
        super().__init__(parameters, {"lr": 0.02})
        self.update = update

    @torch.no_grad()
    def step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.lerp_(p.grad, 0.1)
        self.update(parameters, [p.grad for p in parameters], [self.state[p]["momentum"] for p in parameters])


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def of_shards(parameters, gradients, _):
    for p, gradient in zip(parameters, gradients, strict=True):
        local(p).add_(orthogonalize(local(gradient)), alpha=-0.02)


def of_shards_of_the_momentum(parameters, _, momenta):
    for p, momentum in zip(parameters, momenta, strict=True):
        update = orthogonalize(momentum.to_local().bfloat16()).to(p.dtype)
        p.add_(DTensor.from_local(update, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()))


def of_own_buffers(parameters, gradients, _):
    buffers = [torch.zeros_like(local(p)) for p in parameters]
    torch._foreach_add_(buffers, [local(gradient) for gradient in gradients])
    for p, buffer in zip(parameters, buffers, strict=True):
        local(p).sub_(orthogonalize(buffer))


def of_stacked_shards(parameters, gradients, _):
    stack = torch.stack([local(gradient) for gradient in gradients])
    for p, update in zip(parameters, orthogonalize(stack), strict=True):
        local(p).sub_(update)


def of_shards_by_svd(parameters, gradients, _):
    for p, gradient in zip(parameters, gradients, strict=True):
        u, _s, v = torch.linalg.svd(local(gradient), full_matrices=False)
        local(p).sub_(u @ v)


def of_dtensors(parameters, gradients, _):
    for p, gradient in zip(parameters, gradients, strict=True):
        p.add_(orthogonalize(gradient), alpha=-0.02)


def of_full_tensors(parameters, gradients, _):
    for p, gradient in zip(parameters, gradients, strict=True):
        update = orthogonalize(gradient.full_tensor())
        local(p).sub_(update.chunk(2)[dist.get_rank()])


def elementwise_on_shards(parameters, gradients, momenta):
    for p, gradient, momentum in zip(parameters, gradients, momenta, strict=True):
        local(p).addcdiv_(local(momentum), local(gradient).square().sqrt().add_(1e-8), value=-0.02)


def with_norms_of_rows(parameters, gradients, _):
    for p, gradient in zip(parameters, gradients, strict=True):
        norms = torch.einsum("ij,ij->i", local(gradient), local(gradient)).sqrt()
        local(p).sub_(local(gradient) / (norms[:, None] + 1e-8))


def of_heads(parameters, gradients, _):
    for p, gradient in zip(parameters, gradients, strict=True):
        heads = local(gradient).unflatten(0, (2, -1))
        local(p).sub_(orthogonalize(heads).flatten(0, 1))


def with_summed_products(parameters, gradients, _):
    for p, gradient in zip(parameters, gradients, strict=True):
        gram = local(gradient).mT @ local(gradient)
        dist.all_reduce(gram)
        local(p).sub_(local(gradient) @ gram)


def with_a_whole_projection(parameters, gradients, _):
    for p, gradient in zip(parameters, gradients, strict=True):
        projection = torch.ones(COLUMNS, 2)
        local(p).sub_(local(gradient) @ projection @ projection.mT)


WRONG = [of_shards, of_shards_of_the_momentum, of_own_buffers, of_stacked_shards, of_shards_by_svd]
RIGHT = [
    of_dtensors,
    of_full_tensors,
    elementwise_on_shards,
    with_norms_of_rows,
    of_heads,
    with_summed_products,
    with_a_whole_projection,
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(2)])

    def forward(self, x):
        return sum(layer(x).tanh() for layer in self.layers)


def train(update, steps=2, accelerator=None):
    """Return the warnings of some steps."""
    accelerator = accelerator or Accelerator(parallelism_config=ParallelismConfig(dp_shard_size="auto"))
    model = Net()
    model, optimizer = accelerator.prepare(model, Stepper(model.parameters(), update))
    with collect_messages(LOGGER) as messages:
        for _ in range(steps):
            accelerator.backward(model(torch.linspace(-1, 1, 4 * COLUMNS).view(4, COLUMNS)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return messages


def collect_warnings(updates):
    return {update.__name__: train(update) for update in updates}


def test_products_of_shards_are_reported_once_by_the_first_process(pair):
    first, second = pair.run(collect_warnings, WRONG)
    assert not any(second.values())
    for name, (message,) in first.items():
        assert (
            "The step of Stepper differs from that of one process: at test_local_products.py:" in message
        ), name
        assert f"shard [{ROWS // 2}, {COLUMNS}] of layers.0.weight [{ROWS}, {COLUMNS}]" in message, name
        assert "full_tensor()" in message, name


def test_steps_that_are_right_are_not_reported(pair):
    for found in pair.run(collect_warnings, RIGHT):
        assert not any(found.values())


def test_one_process_of_a_sharded_model_has_whole_matrices(alone):
    assert not any(alone.run(collect_warnings, WRONG[:1])[0].values())


def compile_orthogonalize(is_sharded):
    """Return the warnings of three steps with a compiled function, and how often it was compiled."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(orthogonalize, backend=count, dynamic=False)

    def step(parameters, gradients, _):
        for p, gradient in zip(parameters, gradients, strict=True):
            if is_sharded:
                local(p).sub_(compiled(local(gradient)))
            else:
                local(p).sub_(compiled(gradient.full_tensor()).chunk(2)[dist.get_rank()])

    return train(step, 3), len(graphs)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_function_that_is_compiled_in_the_observed_step_is_compiled_once(pair, is_sharded):
    (messages, graphs), (others, other_graphs) = pair.run(compile_orthogonalize, is_sharded)
    assert [len(messages), len(others)] == [is_sharded, 0]
    assert graphs == other_graphs == 1
    assert all("at test_local_products.py:" in message for message in messages)
