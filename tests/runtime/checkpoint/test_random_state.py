"""Random streams go on where they were, and on another world size all follow from what was saved."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_runtime import rng as item

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _streams_of_others_are_left_alone():
    before = item.capture_rng_state(CPU)
    yield
    item.restore_rng_state(before, CPU)


def seeded(torchs, pythons, numpys):
    torch.manual_seed(torchs)
    random.seed(pythons)
    np.random.seed(numpys)  # noqa: NPY002 - what scripts draw from
    return item.capture_rng_state(CPU)


def draws():
    return {
        "torch": torch.randn(3).tolist(),
        "python": [random.random(), random.gauss(0, 1)],
        "numpy": [*np.random.rand(2).tolist(), np.random.randn()],  # noqa: NPY002 - the same
    }


def drawn_from(tree):
    item.restore_rng_state(tree, CPU)
    return draws()


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=25)
@given(seeds, seeds, seeds, st.integers(0, 5))
def test_what_is_put_back_draws_what_would_have_been_drawn(one, two, three, before):
    seeded(one, two, three)
    for _ in range(before):
        draws()
    tree = item.capture_rng_state(CPU)
    wanted = draws(), draws()
    seeded(0, 0, 0)
    assert (drawn_from(tree), draws()) == wanted


def test_a_state_is_small_numbers_text_and_tensors():
    tree = item.capture_rng_state(CPU)
    assert set(tree) == {"torch", "python", "numpy"}
    words = tree["python"][1], tree["numpy"][1]
    assert all(isinstance(part, torch.Tensor) and part.dtype == torch.int64 for part in words)
    rest = [*tree["python"][::2], tree["numpy"][0], *tree["numpy"][2:]]
    assert all(part is None or isinstance(part, (int, float, str)) for part in rest)


def test_a_stream_that_was_not_kept_is_left_alone():
    tree = seeded(1, 2, 3)
    del tree["python"]
    random.seed(9)
    wanted = random.random()
    random.seed(9)
    item.restore_rng_state(tree, CPU)
    assert random.random() == wanted


worlds = st.integers(1, 4)


@settings(max_examples=25)
@given(worlds, worlds, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_a_stream_that_was_the_same_on_several_ranks_stays_so_and_others_part(old, new, numpys):
    """Torch's stream is the same on all old ranks, Python's is not, NumPy's may be; a single one is everybody's."""
    trees = [seeded(7, rank, numpys[rank]) for rank in range(old)]
    again = [drawn_from(item.derive_rng_state(trees, rank, new)) for rank in range(new)]
    wanted = drawn_from(trees[0])
    equal = {"torch": old > 1, "python": False, "numpy": old > 1 and len(set(numpys[:old])) == 1}
    for kind, same in equal.items():
        if same:
            assert all(draw[kind] == wanted[kind] for draw in again)
        else:
            streams = [draw[kind] for draw in again] + [drawn_from(tree)[kind] for tree in trees]
            assert len({tuple(stream) for stream in streams}) >= new + min(old, 2)


@settings(max_examples=10)
@given(st.lists(seeds, min_size=3, max_size=3, unique=True), st.integers(0, 2))
def test_what_is_derived_follows_from_the_states_of_all_ranks_and_from_nothing_else(ranks, changed):
    trees = [seeded(seed, 1, 1) for seed in ranks]
    seeded(5, 5, 5)
    once = item.derive_rng_state(trees, 1, 2)
    seeded(6, 6, 6)
    assert item.derive_rng_state(trees, 1, 2) == once
    trees[changed] = seeded(ranks[changed] + 1, 1, 1)
    assert item.derive_rng_state(trees, 1, 2)["torch"] != once["torch"]
    assert item.derive_rng_state(trees, 1, 3)["torch"] != item.derive_rng_state(trees, 1, 2)["torch"]


def test_a_stream_only_some_ranks_had_is_derived():
    trees = [seeded(1, 1, 1), seeded(1, 1, 1)]
    del trees[1]["numpy"]
    first, second = (item.derive_rng_state(trees, rank, 2)["numpy"]["seed"] for rank in range(2))
    assert first != second


class Device:
    """A device with a generator of its own, as torch's modules of devices have it."""

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


def test_the_devices_own_generator_is_kept_too(device):
    device.module.manual_seed(4)
    tree = item.capture_rng_state(device.name)
    wanted = device.module.draw()
    device.module.manual_seed(0)
    item.restore_rng_state(tree, device.name)
    assert device.module.draw() == wanted


def test_a_device_whose_generator_was_not_kept_begins_a_stream_that_follows_from_torchs(device):
    def first(seed):
        item.restore_rng_state(seeded(seed, 0, 0), device.name)
        return device.module.draw()

    assert first(1) == first(1) != first(2)


def test_the_devices_generator_is_derived_where_it_differed(device):
    def tree(seed):
        device.module.manual_seed(seed)
        return seeded(0, 0, 0) | item.capture_rng_state(device.name)

    trees = [tree(1), tree(2)]

    def first(rank):
        item.restore_rng_state(item.derive_rng_state(trees, rank, 3), device.name)
        return device.module.draw()

    assert len({tuple(first(rank)) for rank in range(3)}) == 3
    assert first(0) == first(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_what_it_would_have_drawn():
    where = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.manual_seed(3)
    tree = item.capture_rng_state(where)
    wanted = torch.rand(2, device=where).tolist()
    torch.rand(5, device=where)
    item.restore_rng_state(tree, where)
    assert torch.rand(2, device=where).tolist() == wanted
