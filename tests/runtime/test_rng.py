"""Random state."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from accel_runtime.backends import connect
from accel_runtime.env import Settings
from accel_runtime.rng import broadcast_rng_types, set_seed
from accel_runtime.topology import Topology


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002 - what scripts draw from


def test_a_seed_makes_every_generator_draw_the_same_again():
    set_seed(3)
    first = draws()
    set_seed(3)
    assert draws() == first
    set_seed(4)
    assert not set(draws()) & set(first)


def test_a_device_specific_seed_adds_the_rank(ranks):
    def drawn(device_specific):
        set_seed(3, device_specific)
        return draws()

    wanted = []
    for rank in range(ranks.size):
        set_seed(3 + rank)
        wanted.append(draws())
    assert ranks.run(drawn, True) == wanted
    assert ranks.run(drawn, False) == wanted[:1] * ranks.size


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_the_range_of_numpy_is_refused(seed):
    with pytest.raises(ValueError, match=f"Invalid seed {seed}: expected 0 to"):
        set_seed(seed)


def test_deterministic_algorithms_are_allowed_only_where_asked():
    set_seed(3)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(3, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_shared_states_are_those_of_the_first_rank(ranks):
    def drawn():
        backend = connect(Settings.from_env(os.environ), Topology.from_env(os.environ))
        torch.manual_seed(backend.topology.rank)
        broadcast_rng_types(["generator", "torch"], backend)
        return torch.rand(1).item()

    torch.manual_seed(0)
    wanted = torch.rand(1).item()
    assert ranks.run(drawn) == [wanted] * ranks.size
