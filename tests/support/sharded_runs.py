"""A small model that is difficult to shard, and functions that run it on any mesh of ranks."""

from __future__ import annotations

import os
from contextlib import contextmanager

import torch
from torch import nn

from accel_runtime import Accelerator

ROWS, WIDTH, HIDDEN = 11, 6, 10
"""Sizes that 2 and 4 do not divide, except those that tensor parallelism divides."""


class Block(nn.Module):
    """A block of two layers that support tensor parallelism, and a norm that does not."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A model with tied, frozen and one-element parameters, and with saved and computed buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((5, WIDTH), 0.5), requires_grad=False)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("scale", torch.arange(WIDTH) / WIDTH, persistent=False)

    def reset_buffers(self):
        self.scale = torch.arange(WIDTH) / WIDTH

    def forward(self, numbers):
        x = self.embedding(numbers) * self.scale + self.frozen.sum(0)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain)


def build_model(seed=1, kind=Net):
    """Return the model with parameters that are equal in all processes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-1, 1)
    return model


@contextmanager
def shard_by_environment(options=None, **sizes):
    """Shard the models of an Accelerator inside this context; options are those of fully_shard."""
    variables = {f"ACCEL_PARALLEL_{name.upper()}": str(value) for name, value in sizes.items()}
    variables |= {f"ACCEL_FULLY_SHARD_{name.upper()}": str(value) for name, value in (options or {}).items()}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def build_accelerator(sizes, options=None, **arguments):
    """Return an Accelerator on a mesh; without sizes, models are replicated."""
    with shard_by_environment(options, **sizes):
        return Accelerator(**arguments)


def to_full(value):
    """Return the full tensor of a DTensor; return other values unchanged."""
    return value.full_tensor() if hasattr(value, "device_mesh") else value


def gather_model_state(model):
    """Return the gathered state of a model, as numbers."""
    return {name: to_full(value.detach()).tolist() for name, value in model.state_dict().items()}


def import_sharding():
    """Import modules that take seconds, before a time limit applies."""
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    Accelerator()
