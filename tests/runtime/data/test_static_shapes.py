"""One process with static shapes: the last batch is padded, and gather_for_metrics removes the padding."""

from __future__ import annotations

import pytest
import torch
from support.training.data_sets import RangeStream
from torch.utils.data import DataLoader

from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.single import Single
from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.data.loader import LoaderOptions, skip_first_batches
from accel_runtime.data.metrics import gather_samples
from accel_runtime.data.prepare import prepare_loader
from accel_runtime.environment.topology import Topology


class CompiledRuntime(DeviceRuntime):
    """A device with static shapes."""

    static_shapes = True


@pytest.fixture
def run():
    """Return a function that iterates over a loader and returns its batches and gathered results."""
    backend = Single(Topology(), CompiledRuntime(torch.device("cpu")))

    def read_steps(loader, transform=lambda batch: batch, *, skip=0, as_objects=False, **options):
        loops = ActiveLoops(0, has_padding=backend.may_have_padding)
        prepared = prepare_loader(loader, backend, loops, LoaderOptions(**options))
        batches, gathered = [], []
        for batch in skip_first_batches(prepared, skip):
            batches.append(batch.tolist())
            data = transform(batch)
            gathered.append(gather_samples(data, loops.find_steps(data), backend, as_objects=as_objects))
        return batches, gathered, prepared

    return read_steps


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skip", [0, 1])
def test_all_batches_are_full_and_every_sample_is_gathered_once(run, count, stream, skip):
    data = RangeStream(count) if stream else range(count)
    batches, gathered, prepared = run(DataLoader(data, 4), skip=skip)
    assert {len(batch) for batch in batches} <= {4}
    assert [n for batch in gathered for n in batch.tolist()] == list(range(4 * skip, count))
    assert prepared.repeats == (-count % 4 if batches else 0)


def test_the_last_batch_is_not_padded_with_even_batches_false_or_drop_last(run):
    short, _, prepared = run(DataLoader(range(6), 4), even_batches=False)
    assert short == [[0, 1, 2, 3], [4, 5]]
    assert prepared.end == "the last batch is not padded, so its shape differs"
    steps, _, prepared = run(DataLoader(range(6), 4, drop_last=True))
    assert steps == [[0, 1, 2, 3]]
    assert prepared.end == "no padding"


def test_batches_of_a_script_without_a_batch_size_are_not_padded(run):
    batches, gathered, _ = run(DataLoader(range(6), batch_sampler=[[0, 1, 2], [3], [4, 5]]))
    assert batches == [[0, 1, 2], [3], [4, 5]]
    assert [each.tolist() for each in gathered] == batches


def test_gathered_structures_contain_no_padding(run):
    def build_structure(batch):
        words = [f"no {n}" for n in batch.tolist()]
        return {
            "rows": batch.repeat_interleave(2),
            "loss": batch.sum(),
            "words": words,
            "pair": (batch, words),
            "other": "text",
            "more": [1, 2, 3],
        }

    _, gathered, _ = run(DataLoader(range(6), 4), build_structure)
    last = gathered[-1]
    assert last["rows"].tolist() == [4, 4, 5, 5]
    assert last["loss"].item() == 4 + 5 + 0 + 1
    assert last["words"] == ["no 4", "no 5"]
    assert last["pair"][0].tolist() == [4, 5]
    assert last["pair"][1] == ["no 4", "no 5"]
    assert (last["other"], last["more"]) == ("text", [1, 2, 3])


def test_tensors_of_any_shape_are_gathered_as_objects(run):
    _, gathered, _ = run(DataLoader(range(6), 4), lambda b: [torch.ones(int(n)) for n in b], as_objects=True)
    assert [len(rows) for rows in gathered[-1]] == [4, 5]


def test_rows_that_do_not_match_the_batch_are_rejected(run):
    with pytest.raises(ValueError, match="3 rows for batches of 4 samples"):
        run(DataLoader(range(6), 4), lambda _: torch.ones(3))
