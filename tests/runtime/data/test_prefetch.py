"""Batches that are copied on a separate stream, with simulated streams that copy as late as possible."""

from __future__ import annotations

import random
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from support.training.data_sets import BufferedShuffleStream, PythonRandomSampler
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from accel_runtime import Accelerator, DataLoaderConfiguration
from accel_runtime.backends.batch_copies import StreamCopies, prefetch_batches
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.rng import RandomStates
from accel_runtime.foundation.epoch_progress import EpochProgress

NOT_COPIED = -77


class Streams:
    """A stream for copies and a current stream: copies are made when the current stream waits for them, not before.

    Args:
        monkeypatch: Replaces the streams of a GPU by the simulated ones.
    """

    def __init__(self, monkeypatch):
        self.calls = []
        self._waiting = []
        self._inside = False
        self.device = torch.device("cpu")
        to, streams = torch.Tensor.to, self

        def copy(tensor, *args, **kwargs):
            if not streams._inside:
                return to(tensor, *args, **kwargs)
            assert args == (streams.device,)
            assert kwargs == {"non_blocking": True}
            there = torch.full_like(tensor, NOT_COPIED)
            streams._waiting.append((tensor, there))
            streams.calls.append(("copy", tensor.flatten()[0].item()))
            return there

        def record(tensor, stream):
            assert stream is streams
            streams.calls.append(("record", tensor.flatten()[0].item()))

        monkeypatch.setattr(DeviceRuntime, "copy_stream", self)
        monkeypatch.setattr(torch.Tensor, "to", copy)
        monkeypatch.setattr(torch.Tensor, "record_stream", record)
        monkeypatch.setattr(torch.cpu, "stream", lambda stream: stream)
        monkeypatch.setattr(torch.cpu, "current_stream", lambda _: self)

    def __enter__(self):
        self._inside = True

    def __exit__(self, *_):
        self._inside = False

    def record_event(self):
        """Return the copies that are done when the event is."""
        pending, self._waiting = self._waiting, []
        return pending

    def wait_event(self, event):
        """Make the copies before the event."""
        for tensor, there in event:
            there.copy_(tensor)


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


DATA = TensorDataset(torch.arange(11.0))
LOADERS = {
    "shuffled": (DATA, {"batch_size": 2, "shuffle": True}),
    "own-sampler": (DATA, {"batch_size": 2, "sampler": PythonRandomSampler(11)}),
    "own-batches": (DATA, {"batch_sampler": BatchSampler(PythonRandomSampler(11), 2, drop_last=False)}),
    "single": (DATA, {"batch_size": None, "shuffle": True}),
    "stream": (BufferedShuffleStream(11, float), {"batch_size": 2}),
}
WORKERS = [0, pytest.param(1, id="worker")]


def prepared(name, workers, **options):
    data, loader_options = LOADERS[name]
    config = DataLoaderConfiguration(non_blocking=True, **options)
    return Accelerator(dataloader_config=config).prepare(
        DataLoader(data, num_workers=workers, **loader_options)
    )


def numbers(batch):
    return (batch[0] if isinstance(batch, (list, tuple)) else batch).flatten().tolist()


def to_lists(value):
    """Return a state with tensors as lists, for comparison."""
    if isinstance(value, dict):
        return {key: to_lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_lists(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def record_epoch(loader, count=100):
    """Return the numbers, loader state and random draws of every batch, and the final states."""
    steps = []
    for batch in loader:
        steps.append((numbers(batch), to_lists(loader.state_dict()), random.random(), torch.rand(1).item()))
        if len(steps) == count:
            break
    return steps, to_lists(loader.state_dict()), RandomStates.capture()


def seeded():
    random.seed(3)
    torch.manual_seed(3)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", list(LOADERS))
def test_prefetching_does_not_change_batches_offsets_or_random_numbers(name, workers, monkeypatch):
    seeded()
    plain = prepared(name, workers)
    expected = [record_epoch(plain), record_epoch(plain, 2), record_epoch(plain)]
    streams = Streams(monkeypatch)
    seeded()
    loader = prepared(name, workers)
    actual = [record_epoch(loader), record_epoch(loader, 2), record_epoch(loader)]
    assert actual == expected
    assert streams.calls


@pytest.mark.parametrize("name", ["shuffled", "stream"])
def test_a_state_saved_during_a_prefetch_resumes_at_the_prefetched_batch(name, streams):
    loader = prepared(name, 1)
    handed, states = [], []
    for batch in loader:
        handed.append(numbers(batch))
        states.append(loader.state_dict())
    assert streams.calls.index(("copy", handed[1][0])) < streams.calls.index(("record", handed[0][0]))
    for number in (0, 2, len(states) - 2):
        later = prepared(name, 1)
        later.load_state_dict(states[number])
        assert [numbers(batch) for batch in later] == handed[number + 1 :]


def test_the_copy_of_a_batch_starts_before_the_computation_on_the_previous_one(streams):
    config = DataLoaderConfiguration(non_blocking=True)
    loader = Accelerator(dataloader_config=config).prepare(DataLoader(DATA, batch_size=4, num_workers=1))
    for (batch,) in loader:
        streams.calls.append(("compute", batch[0].item()))
    assert streams.calls == [
        ("copy", 0), ("copy", 4), ("record", 0), ("compute", 0),
        ("copy", 8), ("record", 4), ("compute", 4), ("record", 8), ("compute", 8),
    ]  # fmt: skip


def test_batches_are_not_prefetched_without_workers(streams):
    config = DataLoaderConfiguration(non_blocking=True)
    loader = Accelerator(dataloader_config=config).prepare(DataLoader(DATA, batch_size=8))
    for (batch,) in loader:
        streams.calls.append(("compute", batch[0].item()))
    assert streams.calls == [(call, at) for at in (0, 8) for call in ("copy", "record", "compute")]


@pytest.mark.parametrize("workers", WORKERS)
def test_blocking_copies_use_the_current_stream(streams, workers):
    loader = Accelerator().prepare(DataLoader(DATA, batch_size=4, num_workers=workers))
    assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert streams.calls == []


def build_broken_epoch(at):
    """Return an epoch whose batch with this number cannot be read."""

    def iterate(loop):
        num_read = 0
        loop.read_states_from(lambda _: {"position": num_read})
        for number in range(4):
            if number == at:
                raise LookupError(f"batch {number} is broken")
            num_read += 1
            yield torch.tensor([number])

    return iterate


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_read_error_is_raised_after_the_earlier_batches_with_their_offset(streams, at):
    loop, offsets = EpochProgress(), []
    batches = prefetch_batches(build_broken_epoch(at), loop, lambda: StreamCopies(streams))
    for _ in range(at):
        offsets.append(next(batches).item())
        assert loop.state() == {"position": len(offsets)}
    with pytest.raises(LookupError, match=f"batch {at} is broken"):
        next(batches)
    assert offsets == list(range(at))
    assert loop.state() == {"position": at}


def test_a_read_error_of_an_unused_batch_is_not_raised(streams):
    batches = prefetch_batches(build_broken_epoch(1), EpochProgress(), lambda: StreamCopies(streams))
    assert next(batches).item() == 0
    batches.close()


class Movable:
    """An object that moves itself."""

    def to(self, device):
        return ("moved to", device.type)


class Pair(NamedTuple):
    """A batch with names."""

    left: torch.Tensor
    right: int


def test_only_plain_tensors_of_a_batch_are_copied_on_the_stream(streams):
    there = torch.empty(2, device="meta")
    grown = torch.ones(2, requires_grad=True)
    sparse = torch.eye(2).to_sparse()
    movable = Movable()
    batch = {
        "nested": [torch.tensor([1.0]), (torch.tensor([2.0]), "text", None)],
        "pair": Pair(torch.tensor([3.0]), 4),
        "left": (there, grown, sparse, movable, torch.nn.Parameter(torch.ones(1))),
    }
    stream_copies = StreamCopies(streams)
    stream_copies.put(batch)
    actual = stream_copies.take(batch)
    assert [call for call in streams.calls if call[0] == "copy"] == [
        ("copy", 1.0),
        ("copy", 2.0),
        ("copy", 3.0),
    ]
    assert [call for call in streams.calls if call[0] == "record"] == [
        ("record", float(n)) for n in (1, 2, 3)
    ]
    assert actual["nested"][0].tolist() == [1.0]
    assert actual["nested"][1][1:] == ("text", None)
    assert (type(actual["pair"]), actual["pair"].left.tolist(), actual["pair"].right) == (Pair, [3.0], 4)
    assert all(
        copied_value is value for copied_value, value in zip(actual["left"], batch["left"], strict=True)
    )


class Encoding(UserDict):
    """A mapping with attributes that moves itself, as a BatchEncoding of transformers."""

    def __init__(self, data, words):
        super().__init__(data)
        self.words = words

    def to(self, device):
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def test_a_batch_encoding_is_copied_and_keeps_its_attributes(streams):
    batch = Encoding({"ids": torch.tensor([5]), "mask": torch.tensor([6])}, words=["a"])
    stream_copies = StreamCopies(streams)
    stream_copies.put(batch)
    actual = stream_copies.take(batch)
    assert streams.calls == [("copy", 5), ("copy", 6), ("record", 5), ("record", 6)]
    assert (type(actual), actual["ids"].tolist(), actual["mask"].tolist(), actual.words) == (
        Encoding,
        [5],
        [6],
        ["a"],
    )
    assert actual.to(torch.device("cpu"))["ids"].tolist() == [5]


def test_objects_with_a_to_method_are_moved_when_the_batch_is_returned(streams):
    config = DataLoaderConfiguration(non_blocking=True)
    loader = Accelerator(dataloader_config=config).prepare(
        DataLoader(
            [(1.0, Movable())], batch_size=None, collate_fn=lambda item: (torch.tensor([item[0]]), item[1])
        )
    )
    ((tensor, moved),) = list(loader)
    assert (tensor.tolist(), moved) == ([1.0], ("moved to", "cpu"))


def test_a_prefetched_batch_of_an_abandoned_loop_is_discarded(streams):
    loader = prepared("shuffled", 1)
    next(iter(loader))
    assert sorted(number for batch in loader for number in numbers(batch)) == list(range(11))


def gather_with_streams(dispatch, workers):
    """Return the gathered samples and end flags of this rank, with batches copied on a stream."""
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        streams = Streams(patched)
        config = DataLoaderConfiguration(non_blocking=True, dispatch_batches=dispatch)
        accelerator = Accelerator(dataloader_config=config)
        loader = accelerator.prepare(DataLoader(DATA, batch_size=2, num_workers=workers))
        batches, ends = [], []
        for (batch,) in loader:
            batches += accelerator.gather_for_metrics(batch).tolist()
            ends.append(accelerator.gradient_state.end_of_dataloader)
        return batches, ends, bool(streams.calls)


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("workers", WORKERS)
def test_prefetching_on_several_ranks_gathers_every_sample_once(pair, dispatch, workers):
    assert (
        pair.run(gather_with_streams, dispatch, workers)
        == [(list(range(11)), [False, False, True], True)] * 2
    )


@pytest.mark.parametrize(
    ("kind", "streams_of_own"), [("cpu", False), ("mps", False), ("cuda", True), ("xpu", True)]
)
def test_a_device_has_one_copy_stream_on_devices_with_streams(monkeypatch, kind, streams_of_own):
    streams = []
    for module in (torch.cpu, torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "Stream", lambda device: streams.append(device) or object())
    device = torch.device(kind, 0) if kind != "cpu" else torch.device(kind)
    runtime = DeviceRuntime(device)
    assert (runtime.copy_stream is not None) == streams_of_own
    assert runtime.copy_stream is runtime.copy_stream
    assert streams == [device] * streams_of_own
