"""Random streams continue after a load; on another world size they are derived from the saved states."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_runtime.backends import rng

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restore_global_streams():
    before = rng.capture_rng_state(CPU)
    yield
    rng.restore_rng_state(before, CPU)


def seed_and_capture(torch_seed, python_seed, numpy_seed):
    torch.manual_seed(torch_seed)
    random.seed(python_seed)
    np.random.seed(numpy_seed)  # noqa: NPY002 - scripts use the global generator
    return rng.capture_rng_state(CPU)


def draw_numbers():
    return {
        "torch": torch.randn(3).tolist(),
        "python": [random.random(), random.gauss(0, 1)],
        "numpy": [*np.random.rand(2).tolist(), np.random.randn()],  # noqa: NPY002 - the global generator
    }


def restore_and_draw(tree):
    rng.restore_rng_state(tree, CPU)
    return draw_numbers()


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=25)
@given(seeds, seeds, seeds, st.integers(0, 5))
def test_a_restored_state_draws_the_same_numbers(first, second, third, before):
    seed_and_capture(first, second, third)
    for _ in range(before):
        draw_numbers()
    tree = rng.capture_rng_state(CPU)
    expected = draw_numbers(), draw_numbers()
    seed_and_capture(0, 0, 0)
    assert (restore_and_draw(tree), draw_numbers()) == expected


def test_a_state_consists_of_numbers_texts_and_tensors():
    tree = rng.capture_rng_state(CPU)
    assert set(tree) == {"torch", "python", "numpy"}
    words = tree["python"][1], tree["numpy"][1]
    assert all(isinstance(part, torch.Tensor) and part.dtype == torch.int64 for part in words)
    remaining = [*tree["python"][::2], tree["numpy"][0], *tree["numpy"][2:]]
    assert all(part is None or isinstance(part, (int, float, str)) for part in remaining)


def test_a_stream_without_a_saved_state_is_not_changed():
    tree = seed_and_capture(1, 2, 3)
    del tree["python"]
    random.seed(9)
    expected = random.random()
    random.seed(9)
    rng.restore_rng_state(tree, CPU)
    assert random.random() == expected


worlds = st.integers(1, 4)


@settings(max_examples=25)
@given(worlds, worlds, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_derived_streams_are_equal_on_all_ranks_only_if_the_saved_ones_were(old, new, numpy_seed):
    """torch's stream is equal on all old ranks, Python's differs, and NumPy's depends on the example."""
    trees = [seed_and_capture(7, rank, numpy_seed[rank]) for rank in range(old)]
    restored = [restore_and_draw(rng.derive_rng_state(trees, rank, new)) for rank in range(new)]
    expected = restore_and_draw(trees[0])
    equal = {"torch": old > 1, "python": False, "numpy": old > 1 and len(set(numpy_seed[:old])) == 1}
    for kind, is_same in equal.items():
        if is_same:
            assert all(draw[kind] == expected[kind] for draw in restored)
        else:
            streams = [draw[kind] for draw in restored] + [restore_and_draw(tree)[kind] for tree in trees]
            assert len({tuple(stream) for stream in streams}) >= new + min(old, 2)


@settings(max_examples=10)
@given(st.lists(seeds, min_size=3, max_size=3, unique=True), st.integers(0, 2))
def test_a_derived_state_depends_only_on_the_states_of_all_ranks(ranks, changed):
    trees = [seed_and_capture(seed, 1, 1) for seed in ranks]
    seed_and_capture(5, 5, 5)
    once = rng.derive_rng_state(trees, 1, 2)
    seed_and_capture(6, 6, 6)
    assert rng.derive_rng_state(trees, 1, 2) == once
    trees[changed] = seed_and_capture(ranks[changed] + 1, 1, 1)
    assert rng.derive_rng_state(trees, 1, 2)["torch"] != once["torch"]
    assert rng.derive_rng_state(trees, 1, 3)["torch"] != rng.derive_rng_state(trees, 1, 2)["torch"]


def test_a_stream_that_only_some_ranks_saved_is_derived():
    trees = [seed_and_capture(1, 1, 1), seed_and_capture(1, 1, 1)]
    del trees[1]["numpy"]
    first, second = (rng.derive_rng_state(trees, rank, 2)["numpy"]["seed"] for rank in range(2))
    assert first != second


class Device:
    """A device module of torch with its own generator."""

    def __init__(self):
        self.generator = torch.Generator()

    def get_rng_state(self, _device):
        return self.generator.get_state()

    def set_rng_state(self, state, _device):
        self.generator.set_state(state)

    def manual_seed(self, seed):
        self.generator.manual_seed(seed)

    def draw(self):
        return torch.rand(2, generator=self.generator).tolist()


@pytest.fixture
def device(monkeypatch):
    module = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    return SimpleNamespace(module=module, name=torch.device("cuda", 0))


def test_the_generator_of_the_device_is_restored(device):
    device.module.manual_seed(4)
    tree = rng.capture_rng_state(device.name)
    expected = device.module.draw()
    device.module.manual_seed(0)
    rng.restore_rng_state(tree, device.name)
    assert device.module.draw() == expected


def test_a_device_without_a_saved_generator_is_seeded_from_the_stream_of_torch(device):
    def first(seed):
        rng.restore_rng_state(seed_and_capture(seed, 0, 0), device.name)
        return device.module.draw()

    assert first(1) == first(1) != first(2)


def test_the_generator_of_the_device_is_derived_if_ranks_differed(device):
    def tree(seed):
        device.module.manual_seed(seed)
        return seed_and_capture(0, 0, 0) | rng.capture_rng_state(device.name)

    trees = [tree(1), tree(2)]

    def first(rank):
        rng.restore_rng_state(rng.derive_rng_state(trees, rank, 3), device.name)
        return device.module.draw()

    assert len({tuple(first(rank)) for rank in range(3)}) == 3
    assert first(0) == first(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_generator_of_a_gpu_is_restored():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.manual_seed(3)
    tree = rng.capture_rng_state(device)
    expected = torch.rand(2, device=device).tolist()
    torch.rand(5, device=device)
    rng.restore_rng_state(tree, device)
    assert torch.rand(2, device=device).tolist() == expected
