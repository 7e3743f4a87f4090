"""Export of sharded models: weights are written file by file, and loaded shard by shard on any mesh."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from support.processes.ranks import Cluster
from support.runs.sharded_runs import build_accelerator, build_model, gather_model_state, import_sharding
from support.training.models import UnevenTiedNet
from torch import nn

from accel_runtime import Accelerator, init_empty_weights
from accel_runtime.storage.errors import CheckpointError


def save_and_load(folder, sizes, limit):
    run = build_accelerator(sizes)
    model = run.prepare(build_model())
    run.save_model(model, folder, max_shard_size=limit)
    there = sorted(path.name for path in folder.iterdir())
    other = run.prepare(build_model(2))
    run.load_model(other, folder)
    return there, gather_model_state(other)


def read_files(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("limit", ["10GB", 250], ids=["one file", "several"])
def test_a_sharded_model_is_exported_in_full_and_loaded_into_shards(pair, tmp_path, limit):
    folder = tmp_path / "export"
    results = pair.run(save_and_load, folder, {"dp_shard": 2}, limit)
    expected = {name: value.tolist() for name, value in build_model().state_dict().items()}
    assert [state for _, state in results] == [expected] * 2
    several = len(list(folder.glob("*.safetensors")))
    assert (several == 1) == (limit == "10GB")
    assert results[0][0] == sorted(path.name for path in folder.iterdir()), (
        "all files are there when it returns"
    )
    tensors = read_files(folder)
    assert "head.weight" in tensors or "embedding.weight" in tensors
    assert len(tensors) == len(expected) - 1, "tied weights are there once"
    plain = UnevenTiedNet()
    if several == 1:
        load_model(plain, str(folder / "model.safetensors"))
    else:
        plain.load_state_dict(tensors, strict=False)
    plain.head.weight = plain.embedding.weight
    assert {name: value.tolist() for name, value in plain.state_dict().items()} == expected


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2}], ids=str)
def test_four_ranks_export_and_load_a_sharded_model(four, tmp_path, sizes):
    four.run(import_sharding)
    expected = {name: value.tolist() for name, value in build_model().state_dict().items()}
    for _, state in four.run(save_and_load, tmp_path / "export", sizes, 500):
        assert state == expected


def try_to_load(folder, sizes, kind, meta):
    run = build_accelerator(sizes)
    with init_empty_weights() if meta else torch.device("cpu"):
        model = kind()
    model = run.prepare(model)
    before = None if meta else gather_model_state(model)
    try:
        run.load_model(model, folder / str(run.process_index) if (folder / "0").exists() else folder)
    except CheckpointError as error:
        same = all(p.is_meta for p in model.parameters()) if meta else gather_model_state(model) == before
        return str(error), same
    return "", False


class Other(UnevenTiedNet):
    """The model with one parameter of another shape and one additional parameter."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.more = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("meta", [False, True], ids=["with values", "without"])
def test_mismatched_weights_are_named_and_change_no_rank(pair, tmp_path, meta):
    tensors = {name: value for name, value in build_model().state_dict().items() if name != "head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    for message, unchanged in pair.run(try_to_load, tmp_path, {"dp_shard": 2}, Other, meta):
        assert unchanged
        assert "does not fit the model, which was not changed" in message
        assert "missing: more" in message
        assert "gain has shape [1] in the file and [2] in the model" in message


def test_a_read_error_on_one_rank_changes_no_rank(pair, tmp_path):
    tensors = {name: value for name, value in build_model().state_dict().items() if name != "head.weight"}
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        save_file(tensors, tmp_path / str(rank) / "model.safetensors")
    path = tmp_path / "1" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for message, unchanged in pair.run(try_to_load, tmp_path, {"dp_shard": 2}, UnevenTiedNet, False):
        assert unchanged
        assert "rank 1: " in message
        assert "truncated" in message


def test_tied_weights_with_different_values_in_the_file_are_rejected(pair, tmp_path):
    tensors = dict(build_model().state_dict())
    tensors["head.weight"] = tensors["head.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    for message, unchanged in pair.run(try_to_load, tmp_path, {"dp_shard": 2}, UnevenTiedNet, False):
        assert unchanged
        assert (
            "head.weight and embedding.weight are one tensor in the model and differ in the file" in message
        )


def test_a_file_that_does_not_match_the_index_is_rejected(pair, tmp_path):
    pair.run(save_and_load, tmp_path, {"dp_shard": 2}, 250)
    path = max(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for message, unchanged in pair.run(try_to_load, tmp_path, {"dp_shard": 2}, UnevenTiedNet, False):
        assert unchanged
        assert f"{path} does not match" in message


def load_into_bfloat16(folder):
    run = build_accelerator({"dp_shard": 2})
    model = run.prepare(build_model(2).to(torch.bfloat16))
    run.load_model(model, folder / "model.safetensors")
    return gather_model_state(model)


def test_sharded_weights_are_cast_to_the_dtype_of_the_model(pair, tmp_path):
    tensors = {name: value for name, value in build_model().state_dict().items() if name != "head.weight"}
    tensors["frozen"] = tensors["frozen"].double()
    save_file(tensors, tmp_path / "model.safetensors")
    expected = {name: value.tolist() for name, value in build_model().to(torch.bfloat16).state_dict().items()}
    assert pair.run(load_into_bfloat16, tmp_path) == [expected] * 2


def export_to_full_disk(folder, sizes):
    """Export with a disk that is full at the second file; return the error and the number of writes."""
    from accel_runtime.export import save_model

    run = build_accelerator(sizes)
    model = run.prepare(build_model())
    write, calls = save_model.write_safetensors, []

    def full(put, parts, about):
        calls.append(put)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(put, parts, about)

    save_model.write_safetensors = full
    try:
        run.save_model(model, folder, max_shard_size=250)
    except CheckpointError as error:
        return str(error), len(calls)
    finally:
        save_model.write_safetensors = write
    return "", 0


def test_a_full_disk_raises_on_all_ranks_and_leaves_no_file(pair, tmp_path):
    (message, calls), (same, none) = pair.run(export_to_full_disk, tmp_path / "export", {"dp_shard": 2})
    assert message == same
    assert "save_model failed on rank 0: Cannot write the model" in message
    assert (calls, none) == (2, 0)
    assert list((tmp_path / "export").iterdir()) == []


# Memory ------------------------------------------------------------------------------------

WEIGHTS = 24, 1024
"""The number of layers and their width: 96 MiB."""


def layers():
    count, width = WEIGHTS
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def read_status(name):
    """Return a number of bytes from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) << 10


def load_within_limit(folder, limit):
    """Load the weights with a memory limit of `limit` more bytes; return the memory used and the sum of the shards."""
    run = build_accelerator({"dp_shard": 4})
    with init_empty_weights(include_buffers=True):
        model = layers()
    model = run.prepare(model)
    tiny = run.prepare(nn.Linear(4, 4))  # what is imported and allocated at the first use does not count
    run.save_model(tiny, f"{folder}-tiny")
    run.load_model(tiny, f"{folder}-tiny")
    before = read_status("RssAnon")
    resource.setrlimit(resource.RLIMIT_DATA, (read_status("VmData") + limit, resource.RLIM_INFINITY))
    try:
        with pytest.raises(MemoryError):
            bytearray(2 * limit)  # more than the free memory that the allocator has within the limit
        run.load_model(model, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    taken = read_status("RssAnon") - before
    return taken, sum(p.to_local().double().sum().item() for p in model.parameters())


@pytest.fixture
def four_fresh():
    """Return four new ranks, since memory that earlier tests have freed would not be counted."""
    ranks = Cluster(4)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["10GB", "20MB"], ids=["one file", "several"])
def test_a_rank_loads_a_file_larger_than_its_memory_limit(four_fresh, tmp_path, limit):
    """96 MiB of weights on four ranks with a limit of 48 MiB each; a shard has 24 MiB."""
    model, folder = layers(), tmp_path / "weights"
    Accelerator().save_model(model, folder, max_shard_size=limit)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    taken, sums = zip(*four_fresh.run(load_within_limit, str(folder), size // 2), strict=True)
    assert all(bytes_ < size / 2 for bytes_ in taken)
    assert sum(sums) == pytest.approx(sum(p.double().sum().item() for p in model.parameters()))
