"""Functions that run a model on any mesh of ranks."""

from __future__ import annotations

import os
from contextlib import contextmanager

import torch
from support.training.models import UnevenTiedNet

from accel_runtime import Accelerator
from accel_runtime.environment.layouts import Parallel
from accel_runtime.environment.topology import RankGrid


def build_model(seed=1, kind=UnevenTiedNet):
    """Return the model with parameters that are equal in all processes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-1, 1)
    return model


@contextmanager
def set_settings(settings):
    """Set the variables of settings of accel inside this context."""
    variables = {f"ACCEL_{name.upper()}": str(value) for name, value in settings.items()}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def build_accelerator(sizes, options=None, **arguments):
    """Return an Accelerator on a mesh, with options of fully_shard; without sizes, models are replicated."""
    settings = {f"parallel_{name}": value for name, value in sizes.items()}
    settings |= {f"fully_shard_{name}": value for name, value in (options or {}).items()}
    with set_settings(settings):
        return Accelerator(**arguments)


@contextmanager
def arrange_ranks(roles):
    """Number the ranks in another order of roles inside this context, outermost first."""
    build = Parallel.build_grid

    def build_grid(parallel, world_size):
        grid = build(parallel, world_size)
        return RankGrid(tuple((role, grid.size(role)) for role in roles))

    Parallel.build_grid = build_grid
    try:
        yield
    finally:
        Parallel.build_grid = build


def sum_in_group(backend, role):
    """Return the ranks of the group of a role, and the sum of their numbers from 1."""
    value = torch.tensor([backend.topology.rank + 1.0], device=backend.device)
    group, ranks = backend.get_group(role), list(backend.grid.ranks_of(backend.topology.rank, role))
    if group is not None:
        assert torch.distributed.get_process_group_ranks(group) == ranks
        torch.distributed.all_reduce(value, group=group)
    elif len(ranks) > 1:
        assert len(ranks) == backend.topology.world_size
        value = backend.all_reduce(value, "sum")
    return ranks, value.item()


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
