"""States of random number generators."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from accel_runtime.backends import connect
from accel_runtime.backends.rng import broadcast_rng_types, set_seed
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import Topology


def draw_from_each_generator():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002 - scripts use this generator


def test_set_seed_seeds_every_generator():
    set_seed(3)
    first = draw_from_each_generator()
    set_seed(3)
    assert draw_from_each_generator() == first
    set_seed(4)
    assert not set(draw_from_each_generator()) & set(first)


def test_a_device_specific_seed_adds_the_rank(ranks):
    def draw_after_broadcast(device_specific):
        set_seed(3, device_specific)
        return draw_from_each_generator()

    expected = []
    for rank in range(ranks.size):
        set_seed(3 + rank)
        expected.append(draw_from_each_generator())
    assert ranks.run(draw_after_broadcast, True) == expected
    assert ranks.run(draw_after_broadcast, False) == expected[:1] * ranks.size


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_the_range_of_numpy_is_rejected(seed):
    with pytest.raises(ValueError, match=f"Invalid seed {seed}: expected 0 to"):
        set_seed(seed)


def test_deterministic_algorithms_are_enabled_only_on_request():
    set_seed(3)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(3, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_broadcast_rng_types_sends_the_states_of_the_first_rank(ranks):
    def draw_after_broadcast():
        backend = connect(Settings.from_env(os.environ), Topology.from_env(os.environ))
        torch.manual_seed(backend.topology.rank)
        broadcast_rng_types(["generator", "torch"], backend)
        return torch.rand(1).item()

    torch.manual_seed(0)
    expected = torch.rand(1).item()
    assert ranks.run(draw_after_broadcast) == [expected] * ranks.size
