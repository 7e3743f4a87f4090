"""Random streams continue after a load; on another world size they are derived from the saved states."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_runtime.backends.rng import ProcessRandomStates, derive_random_states
from accel_runtime.storage.schema import read_value, write_record

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restore_global_streams():
    before = ProcessRandomStates.capture(CPU)
    yield
    before.restore(CPU)


def seed_and_capture(torch_seed, python_seed, numpy_seed):
    torch.manual_seed(torch_seed)
    random.seed(python_seed)
    np.random.seed(numpy_seed)  # noqa: NPY002 - scripts use the global generator
    return ProcessRandomStates.capture(CPU)


def draw_numbers():
    return {
        "torch": torch.randn(3).tolist(),
        "python": [random.random(), random.gauss(0, 1)],
        "numpy": [*np.random.rand(2).tolist(), np.random.randn()],  # noqa: NPY002 - the global generator
    }


def restore_and_draw(states):
    states.restore(CPU)
    return draw_numbers()


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=25)
@given(seeds, seeds, seeds, st.integers(0, 5))
def test_a_restored_state_draws_the_same_numbers(first, second, third, before):
    seed_and_capture(first, second, third)
    for _ in range(before):
        draw_numbers()
    written = write_record(ProcessRandomStates.capture(CPU))
    expected = draw_numbers(), draw_numbers()
    seed_and_capture(0, 0, 0)
    assert (restore_and_draw(read_value(ProcessRandomStates, written)), draw_numbers()) == expected


def test_a_state_consists_of_numbers_texts_and_tensors():
    written = write_record(ProcessRandomStates.capture(CPU))["states"]
    assert set(written) == {"torch", "python", "numpy"}
    large = written["torch"], written["python"].pop("words"), written["numpy"].pop("words")
    assert all(isinstance(part, torch.Tensor) and part.dtype == torch.uint8 for part in large)
    remaining = [*written["python"].values(), *written["numpy"].values()]
    assert all(isinstance(part, (int, float, str)) for part in remaining)


def test_a_stream_without_a_saved_state_is_not_changed():
    states = seed_and_capture(1, 2, 3)
    random.seed(9)
    expected = random.random()
    random.seed(9)
    ProcessRandomStates(states.states.select(("torch", "numpy"))).restore(CPU)
    assert random.random() == expected


worlds = st.integers(1, 4)


@settings(max_examples=25)
@given(worlds, worlds, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_derived_streams_are_equal_on_all_ranks_only_if_the_saved_ones_were(old, new, numpy_seed):
    """torch's stream is equal on all old ranks, Python's differs, and NumPy's depends on the example; the first rank keeps its own."""
    trees = [seed_and_capture(7, rank, numpy_seed[rank]) for rank in range(old)]
    restored = [restore_and_draw(derive_random_states(trees, rank, new)) for rank in range(new)]
    expected = restore_and_draw(trees[0])
    equal = {"torch": old > 1, "python": False, "numpy": old > 1 and len(set(numpy_seed[:old])) == 1}
    for kind, is_same in equal.items():
        assert restored[0][kind] == expected[kind]
        if is_same:
            assert all(draw[kind] == expected[kind] for draw in restored)
        else:
            streams = [draw[kind] for draw in restored] + [restore_and_draw(tree)[kind] for tree in trees]
            assert len({tuple(stream) for stream in streams}) >= new + min(old, 2) - 1


@settings(max_examples=10)
@given(st.lists(seeds, min_size=3, max_size=3, unique=True), st.integers(0, 2))
def test_a_derived_state_depends_only_on_the_states_of_all_ranks(ranks, changed):
    trees = [seed_and_capture(seed, 1, 1) for seed in ranks]
    seed_and_capture(5, 5, 5)
    once = derive_random_states(trees, 1, 2)
    seed_and_capture(6, 6, 6)
    assert derive_random_states(trees, 1, 2) == once
    trees[changed] = seed_and_capture(ranks[changed] + 1, 1, 1)
    assert derive_random_states(trees, 1, 2).seeds["torch"] != once.seeds["torch"]
    seeds = [derive_random_states(trees, 1, world_size).seeds["torch"] for world_size in (2, 3)]
    assert seeds[0] != seeds[1]


def test_a_stream_that_only_some_ranks_saved_is_derived():
    states = seed_and_capture(1, 1, 1)
    trees = [states, ProcessRandomStates(states.states.select(("torch", "python")))]
    first, second = (derive_random_states(trees, rank, 3).seeds["numpy"] for rank in (1, 2))
    assert first != second
    assert derive_random_states(trees, 0, 3).states == states.states


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
    states = ProcessRandomStates.capture(device.name)
    expected = device.module.draw()
    device.module.manual_seed(0)
    states.restore(device.name)
    assert device.module.draw() == expected


def test_a_device_without_a_saved_generator_is_seeded_from_the_stream_of_torch(device):
    def first(seed):
        seed_and_capture(seed, 0, 0).restore(device.name)
        return device.module.draw()

    assert first(1) == first(1) != first(2)


def test_the_generator_of_the_device_is_derived_if_ranks_differed(device):
    def tree(seed):
        device.module.manual_seed(seed)
        seed_and_capture(0, 0, 0)
        return ProcessRandomStates.capture(device.name)

    trees = [tree(1), tree(2)]

    def first(rank):
        derive_random_states(trees, rank, 3).restore(device.name)
        return device.module.draw()

    assert len({tuple(first(rank)) for rank in range(3)}) == 3
    assert first(0) == first(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_generator_of_a_gpu_is_restored():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.manual_seed(3)
    states = ProcessRandomStates.capture(device)
    expected = torch.rand(2, device=device).tolist()
    torch.rand(5, device=device)
    states.restore(device)
    assert torch.rand(2, device=device).tolist() == expected
